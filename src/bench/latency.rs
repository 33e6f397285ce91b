//! Records latencies, and the time at which the server was at each tick.

use hdrhistogram::Histogram;

/// The longest latency that the histograms distinguish, in ns: a minute. Longer ones count as a minute.
const LONGEST: u64 = 60_000_000_000;

/// Digits that are kept of a latency.
const DIGITS: u8 = 3;

/// A histogram of times in ns.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST, DIGITS).expect("the bounds are constants that fit each other")
}

/// The times that a thread has measured.
#[derive(Debug)]
pub(super) struct Recorder {
    /// Latencies of AddNewMsg, or of Ping.
    pub(super) adds: Histogram<u64>,
    /// Latencies of DelMsg.
    pub(super) dels: Histogram<u64>,
    /// When the server was at each deadline.
    pub(super) tick_times: TickTimes,
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder { adds: histogram(), dels: histogram(), tick_times: TickTimes::default() }
    }
}

impl Recorder {
    /// Adds what another has recorded.
    pub(super) fn merge(&mut self, other: &Recorder) {
        for (all, one) in [(&mut self.adds, &other.adds), (&mut self.dels, &other.dels)] {
            all.add(one).expect("all histograms have the same bounds");
        }
        self.tick_times.merge(&other.tick_times);
    }
}

/// Answers that came together to requests that were sent together: one record, however many they are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    /// When the requests were sent, in ns since the load began.
    pub(super) sent_at: u64,
    /// How many there are.
    pub(super) count: u64,
}

impl Run {
    /// Counts an answer; if the run so far was sent at another time, that is recorded first.
    pub(super) fn extend(&mut self, sent_at: u64, now: u64, histogram: &mut Histogram<u64>) {
        if self.sent_at != sent_at {
            self.record(now, histogram);
            self.sent_at = sent_at;
        }
        self.count += 1;
    }

    /// Records the run, and starts an empty one.
    pub(super) fn record(&mut self, now: u64, histogram: &mut Histogram<u64>) {
        // Nothing recorded at a value would still make it the greatest.
        if self.count > 0 {
            histogram.saturating_record_n(now.saturating_sub(self.sent_at), self.count);
            self.count = 0;
        }
    }
}

/// When the server still was at a deadline: for each deadline answered, when the last request was sent that got it.
///
/// All messages of a load have the same ack timeout k, so a deadline d says that the tick due was d - k. It cannot have
/// moved on before the latest request was sent that was still answered with it.
#[derive(Clone, Debug, Default)]
pub(super) struct TickTimes {
    /// Deadlines in the order in which they were answered, and the times of the requests. A deadline comes again where
    /// answers with another were in between.
    seen: Vec<(u64, u64)>,
}

impl TickTimes {
    /// A request that was sent at `sent_at`, in ns since the load began, was answered with this deadline.
    pub(super) fn record(&mut self, deadline: u64, sent_at: u64) {
        match self.seen.last_mut() {
            Some((latest, latest_at)) if *latest == deadline => *latest_at = sent_at.max(*latest_at),
            _ => self.seen.push((deadline, sent_at)),
        }
    }

    /// When the latest request was sent of those that got the deadline answered last.
    pub(super) fn latest_at(&self) -> u64 {
        self.seen.last().map_or(0, |(_, sent_at)| *sent_at)
    }

    /// Adds what another has seen.
    pub(super) fn merge(&mut self, other: &TickTimes) {
        self.seen.extend_from_slice(&other.seen);
    }

    /// The latest time at which the deadline answered was surely not yet beyond `deadline`; none if no request was
    /// answered with it or an earlier one.
    pub(super) fn last_at_or_before(&self, deadline: u64) -> Option<u64> {
        self.seen.iter().filter(|(seen, _)| *seen <= deadline).map(|(_, sent_at)| *sent_at).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_together_is_one_record() {
        let mut histogram = histogram();
        let mut run = Run::default();
        for sent_at in [100, 100, 100, 200] {
            run.extend(sent_at, 1_000, &mut histogram);
        }
        run.record(1_000, &mut histogram);
        assert_eq!((histogram.len(), histogram.min(), histogram.max(), run.count), (4, 800, 900, 0));
    }

    #[test]
    fn a_deadline_was_alive_when_the_last_request_was_sent_that_got_it() {
        let (mut one, mut other) = (TickTimes::default(), TickTimes::default());
        for (deadline, sent_at) in [(20, 5), (20, 9), (21, 11), (20, 10), (21, 15)] {
            one.record(deadline, sent_at);
        }
        other.record(20, 12);
        other.record(23, 40);
        one.merge(&other);
        let seen: Vec<_> = (19..=24).map(|deadline| one.last_at_or_before(deadline)).collect();
        assert_eq!(seen, [None, Some(12), Some(15), Some(15), Some(40), Some(40)]);
    }
}
