//! A histogram of latencies. The core uses no metrics crate, so it has this histogram of its own.

use std::time::Duration;

/// The inclusive upper bounds of the buckets in units of 100 µs, from 100 µs to 30 s. One more bucket counts longer
/// latencies.
pub const LATENCY_BOUNDS: [u32; 20] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 50_000, 75_000, 100_000, 125_000,
    150_000, 300_000,
];

/// The length of one unit of a [`Stamp`].
pub const STAMP_UNIT: Duration = Duration::from_micros(STAMP_MICROS);

const STAMP_MICROS: u64 = 100;

/// A moment, as the number of 100 µs units since an origin that the caller chooses. The number wraps around after 119
/// hours.
///
/// A stamp takes four bytes in every message in flight, where an `Instant` would take sixteen. Differences shorter
/// than 119 hours are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp(pub u32);

/// The largest difference of two stamps that counts as a duration. A larger difference means that the stamps are in
/// reverse order, up to 60 s apart, so that the subtraction wrapped around.
const LONGEST: u32 = u32::MAX - 600_000;

// A message is stamped when it is added, and is removed at most two revolutions later. A revolution takes at most
// `MAX_SLOTS` ticks of `MAX_TICK`.
const _: () = assert!(
    2 * super::tick::MAX_SLOTS as u64 * super::tick::MAX_TICK.as_secs() <= LONGEST as u64 / 10_000,
    "a stamp must outlast the longest life of a message"
);

impl Stamp {
    /// Returns the stamp of the moment `elapsed` after the origin, rounded down.
    #[expect(clippy::cast_possible_truncation, reason = "stamps wrap around on purpose")]
    pub const fn after(elapsed: Duration) -> Stamp {
        Stamp((elapsed.as_micros() / STAMP_UNIT.as_micros()) as u32)
    }
}

/// The number of latencies in each bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    /// One count for each bound of [`LATENCY_BOUNDS`], and one for all longer latencies. The counts are not
    /// cumulative.
    pub counts: [u64; LATENCY_BOUNDS.len() + 1],
    /// The sum of all latencies in µs.
    pub sum_micros: u64,
}

/// The bounds, padded to 32 with values that no latency exceeds.
const PADDED: [u32; 32] = {
    let mut padded = [u32::MAX; 32];
    padded.split_at_mut(LATENCY_BOUNDS.len()).0.copy_from_slice(&LATENCY_BOUNDS);
    padded
};

/// Returns the index of the bucket of a latency. This binary search has no branches, because a processor would predict
/// half of them wrongly.
fn bucket(units: u32) -> usize {
    [16, 8, 4, 2, 1]
        .into_iter()
        .fold(0, |first, step| first + step * usize::from(PADDED[first + step - 1] < units))
}

impl LatencyHistogram {
    /// Records the same latency `times` times.
    pub fn record(&mut self, latency: Duration, times: u64) {
        let units = u32::try_from(latency.as_micros().div_ceil(STAMP_UNIT.as_micros())).unwrap_or(u32::MAX);
        self.counts[bucket(units)] += times;
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.sum_micros = self.sum_micros.saturating_add(micros.saturating_mul(times));
    }

    /// Records the time from one stamp to another. The time counts as 0 if `later` is before `earlier`. This can
    /// happen if one of two threads is delayed after it has read the clock.
    #[inline]
    pub fn record_between(&mut self, earlier: Stamp, later: Stamp) {
        let units = later.0.wrapping_sub(earlier.0);
        let units = if units > LONGEST { 0 } else { units };
        self.counts[bucket(units)] += 1;
        self.sum_micros += u64::from(units) * STAMP_MICROS;
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &LatencyHistogram) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.sum_micros = self.sum_micros.saturating_add(other.sum_micros);
    }

    /// Returns whether the histogram has no latencies.
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
        assert_eq!(LATENCY_BOUNDS[3], 10, "bucket 3 ends at a millisecond");
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
        assert_eq!((histogram.sum_micros, histogram.counts[3]), (1_000, 1), "ten units are a millisecond");
    }
}
