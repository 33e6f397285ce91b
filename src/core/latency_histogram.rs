//! Latencies counted into buckets, so that the core can say how long things took without a metrics crate.

use std::time::Duration;

/// The upper bounds of the buckets, in units of [`Stamp`] (100 µs): 100 µs to 30 s. What is longer falls
/// into one bucket more.
pub const BOUNDS: [u32; 20] = [
    1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 50_000, 75_000, 100_000, 125_000,
    150_000, 300_000,
];

/// A moment, as a count of 100 µs since some origin that wraps around after 119 hours.
///
/// Four bytes instead of sixteen in every message in flight; differences below the wrap are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp(pub u32);

/// The length of one unit of a [`Stamp`].
pub const STAMP_UNIT: Duration = Duration::from_micros(100);

/// The same in µs.
const STAMP_MICROS: u64 = 100;

const _: () = assert!(STAMP_UNIT.as_micros() == STAMP_MICROS as u128);

/// The longest time that two stamps can tell. What looks longer is of a stamp that lies before the other, by a minute at
/// most.
const LONGEST: u32 = u32::MAX - 600_000;

// A message is stamped when it is added and asked for at most two revolutions later.
const _: () = assert!(
    2 * super::tick::MAX_SLOTS as u64 * super::tick::MAX_TICK.as_secs() <= LONGEST as u64 / 10_000,
    "a stamp must outlast the longest life of a message"
);

impl Stamp {
    /// The moment that lies `elapsed` after the origin, rounded down.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "stamps wrap around on purpose")]
    pub const fn after(elapsed: Duration) -> Stamp {
        Stamp((elapsed.as_micros() / STAMP_UNIT.as_micros()) as u32)
    }
}

/// How many latencies fell into each bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    /// One count a bound of [`BOUNDS`], not cumulative, and one for all above.
    pub counts: [u64; BOUNDS.len() + 1],
    /// Their sum in µs.
    pub sum_micros: u64,
}

/// The first bucket that a latency of as many bits can belong to.
const FIRST_BUCKETS: [u8; u32::BITS as usize + 1] = {
    let mut buckets = [0; u32::BITS as usize + 1];
    let mut bits = 1;
    while bits < buckets.len() {
        let least = 1 << (bits - 1);
        let mut bucket = buckets[bits - 1];
        while (bucket as usize) < BOUNDS.len() && BOUNDS[bucket as usize] < least {
            bucket += 1;
        }
        buckets[bits] = bucket;
        bits += 1;
    }
    buckets
};

/// The bounds, and behind them three that nothing exceeds: so many are looked at from the first on.
const PADDED: [u32; BOUNDS.len() + 3] = {
    let mut padded = [u32::MAX; BOUNDS.len() + 3];
    let mut bucket = 0;
    while bucket < BOUNDS.len() {
        padded[bucket] = BOUNDS[bucket];
        bucket += 1;
    }
    padded
};

/// The bucket of a latency: three bounds at most lie between numbers of as many bits. All of them are always compared
/// with, since a branch on a latency is guessed wrong every other time.
fn bucket(units: u32) -> usize {
    let first = usize::from(FIRST_BUCKETS[(u32::BITS - units.leading_zeros()) as usize]);
    first + PADDED[first..first + 3].iter().map(|bound| usize::from(*bound < units)).sum::<usize>()
}

impl LatencyHistogram {
    /// Counts `times` latencies of the same length.
    pub fn record(&mut self, latency: Duration, times: u64) {
        let units = u32::try_from(latency.as_micros().div_ceil(STAMP_UNIT.as_micros())).unwrap_or(u32::MAX);
        self.counts[bucket(units)] += times;
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.sum_micros = self.sum_micros.saturating_add(micros.saturating_mul(times));
    }

    /// Counts the time from one stamp to another. Where that is the earlier one, as between two threads of which one was
    /// held up after it had read its time, it is none.
    #[inline]
    pub fn record_between(&mut self, earlier: Stamp, later: Stamp) {
        let units = later.0.wrapping_sub(earlier.0);
        let units = if units > LONGEST { 0 } else { units };
        self.counts[bucket(units)] += 1;
        self.sum_micros += u64::from(units) * STAMP_MICROS;
    }

    /// Counts what another tally has counted too.
    pub fn add(&mut self, other: &LatencyHistogram) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.sum_micros = self.sum_micros.saturating_add(other.sum_micros);
    }

    /// Whether nothing was counted.
    #[must_use]
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
    fn a_latency_on_a_bound_belongs_below_it() {
        let mut histogram = LatencyHistogram::default();
        histogram.record(Duration::from_millis(1), 2);
        histogram.record(Duration::from_micros(1_001), 1);
        histogram.record(Duration::from_secs(31), 1);
        assert_eq!((histogram.counts[3], histogram.counts[4], histogram.counts[BOUNDS.len()]), (2, 1, 1));
        assert_eq!(BOUNDS[3], 10, "a millisecond");
        assert_eq!(histogram.sum_micros, 31_003_001);
    }

    #[test]
    fn every_latency_has_the_first_bucket_whose_bound_it_does_not_exceed() {
        let near = BOUNDS.iter().flat_map(|bound| [bound - 1, *bound, bound + 1]);
        for units in near.chain([0, 33, 400_000, u32::MAX]) {
            assert_eq!(bucket(units), BOUNDS.partition_point(|bound| *bound < units), "{units}");
        }
    }

    #[test]
    fn stamps_tell_differences_across_their_wrap() {
        let before = Stamp(u32::MAX - 4);
        let mut histogram = LatencyHistogram::default();
        histogram.record_between(before, Stamp(5));
        assert_eq!((histogram.sum_micros, histogram.counts[3]), (1_000, 1), "a millisecond");
    }
}
