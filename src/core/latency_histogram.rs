//! A histogram of latencies, so that the core needs no metrics crate.

use std::time::Duration;

/// The upper bounds of the buckets, in units of [`Stamp`] (100 µs): 100 µs to 30 s. One more bucket counts longer
/// latencies.
pub const LATENCY_BOUNDS: [u32; 20] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 50_000, 75_000, 100_000, 125_000,
    150_000, 300_000,
];

/// The length of one unit of a [`Stamp`].
pub const STAMP_UNIT: Duration = Duration::from_micros(STAMP_MICROS);

const STAMP_MICROS: u64 = 100;

/// A moment, as a count of 100 µs since some origin. It wraps around after 119 hours.
///
/// It needs four bytes instead of sixteen in every message in flight. Differences below the wrap are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp(pub u32);

/// The longest difference between two stamps. A larger one means that the later stamp was taken before the earlier one,
/// by at most a minute.
const LONGEST: u32 = u32::MAX - 600_000;

// A message is stamped when it is added, and is known for at most two revolutions after that.
const _: () = assert!(
    2 * super::tick::MAX_SLOTS as u64 * super::tick::MAX_TICK.as_secs() <= LONGEST as u64 / 10_000,
    "a stamp must outlast the longest life of a message"
);

impl Stamp {
    /// The moment `elapsed` after the origin, rounded down.
    #[expect(clippy::cast_possible_truncation, reason = "stamps wrap around on purpose")]
    pub const fn after(elapsed: Duration) -> Stamp {
        Stamp((elapsed.as_micros() / STAMP_UNIT.as_micros()) as u32)
    }
}

/// The number of latencies in each bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    /// One count for each bound of [`LATENCY_BOUNDS`], not cumulative, and one for all longer latencies.
    pub counts: [u64; LATENCY_BOUNDS.len() + 1],
    /// The sum of all latencies in µs.
    pub sum_micros: u64,
}

/// The bounds, and behind them some that no latency exceeds.
const PADDED: [u32; 32] = {
    let mut padded = [u32::MAX; 32];
    padded.split_at_mut(LATENCY_BOUNDS.len()).0.copy_from_slice(&LATENCY_BOUNDS);
    padded
};

/// The bucket of a latency, by a binary search without branches, which a processor would mispredict half of the time.
fn bucket(units: u32) -> usize {
    [16, 8, 4, 2, 1]
        .into_iter()
        .fold(0, |first, step| first + step * usize::from(PADDED[first + step - 1] < units))
}

impl LatencyHistogram {
    /// Adds `times` equal latencies.
    pub fn record(&mut self, latency: Duration, times: u64) {
        let units = u32::try_from(latency.as_micros().div_ceil(STAMP_UNIT.as_micros())).unwrap_or(u32::MAX);
        self.counts[bucket(units)] += times;
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.sum_micros = self.sum_micros.saturating_add(micros.saturating_mul(times));
    }

    /// Adds the time from one stamp to another. It counts as 0 if the order is reversed, as can happen between
    /// threads of which one was delayed after it had read its clock.
    #[inline]
    pub fn record_between(&mut self, earlier: Stamp, later: Stamp) {
        let units = later.0.wrapping_sub(earlier.0);
        let units = if units > LONGEST { 0 } else { units };
        self.counts[bucket(units)] += 1;
        self.sum_micros += u64::from(units) * STAMP_MICROS;
    }

    /// Adds another histogram.
    pub fn add(&mut self, other: &LatencyHistogram) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.sum_micros = self.sum_micros.saturating_add(other.sum_micros);
    }

    /// Whether it has no latencies.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_that_was_read_before_the_add_took_no_time() {
        let mut histogram = LatencyHistogram::default();
        for (added, acked) in [(5, 4), (0, u32::MAX), (600_000, 0), (u32::MAX, 0)] {
            histogram.record_between(Stamp(added), Stamp(acked));
        }
        assert_eq!((histogram.counts[0], histogram.sum_micros), (4, STAMP_MICROS));
    }

    #[test]
    fn a_latency_equal_to_a_bound_belongs_below_it() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(Duration::from_millis(1), 2);
        histogram.record(Duration::from_micros(1_001), 1);
        histogram.record(Duration::from_secs(31), 1);
        assert_eq!((histogram.counts[3], histogram.counts[4], histogram.counts[LATENCY_BOUNDS.len()]), (2, 1, 1));
        assert_eq!(LATENCY_BOUNDS[3], 10, "a millisecond");
        assert_eq!(histogram.sum_micros, 31_003_001);
    }

    #[test]
    fn every_latency_has_the_first_bucket_whose_bound_it_does_not_exceed() {
        let near = LATENCY_BOUNDS.iter().flat_map(|bound| [bound - 1, *bound, bound + 1]);
        for units in near.chain([0, 33, 400_000, u32::MAX]) {
            let first = LATENCY_BOUNDS.iter().position(|bound| *bound >= units);
            assert_eq!(bucket(units), first.unwrap_or(LATENCY_BOUNDS.len()), "{units}");
        }
    }

    #[test]
    fn differences_of_stamps_are_exact_across_their_wrap() {
        let before = Stamp(u32::MAX - 4);
        let mut histogram = LatencyHistogram::default();
        histogram.record_between(before, Stamp(5));
        assert_eq!((histogram.sum_micros, histogram.counts[3]), (1_000, 1), "a millisecond");
    }
}
