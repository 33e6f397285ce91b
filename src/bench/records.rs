//! Records the measurements of a load (one run of the bench): latencies, the times of the server's ticks, counters and
//! errors.

use std::fmt::Display;

use hdrhistogram::Histogram;
use parking_lot::Mutex;

/// The maximum latency in the histograms, in ns: one minute. A longer latency counts as one minute.
const LONGEST: u64 = 60_000_000_000;

/// The number of significant digits of a latency.
const DIGITS: u8 = 3;

/// Creates a histogram of times in ns.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST, DIGITS).expect("the bounds are constants that fit each other")
}

/// The times that one thread has measured.
#[derive(Debug)]
pub(super) struct Recorder {
    /// Latencies of AddNewMsg, or of Ping.
    pub(super) adds: Histogram<u64>,
    /// Latencies of DelMsg.
    pub(super) dels: Histogram<u64>,
    /// For each deadline (the tick at whose end messages time out), the time at which the last request that got this
    /// deadline was sent.
    pub(super) tick_times: TickTimes,
    /// The message that was added last among those that must time out: its connection and its number.
    pub(super) timing_out: Option<(u64, u64)>,
}

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder { adds: histogram(), dels: histogram(), tick_times: TickTimes::default(), timing_out: None }
    }
}

impl Recorder {
    /// Adds the records of another recorder.
    pub(super) fn merge(&mut self, other: &Recorder) {
        for (all, one) in [(&mut self.adds, &other.adds), (&mut self.dels, &other.dels)] {
            all.add(one).expect("all histograms have the same bounds");
        }
        self.tick_times.merge(&other.tick_times);
    }
}

/// Requests that were sent together and answered together. The histogram counts them in one call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    /// When the requests were sent, in ns since the load began.
    pub(super) sent_at: u64,
    /// The number of requests.
    pub(super) count: u64,
}

impl Run {
    /// Adds an answered request to the run. If the requests of the run were sent at another time, first records the run
    /// and starts a new one.
    pub(super) fn extend(&mut self, sent_at: u64, now: u64, histogram: &mut Histogram<u64>) {
        if self.sent_at != sent_at {
            self.record(now, histogram);
            self.sent_at = sent_at;
        }
        self.count += 1;
    }

    /// Records the time from sending until `now` once for each request of the run, and starts an empty run.
    pub(super) fn record(&mut self, now: u64, histogram: &mut Histogram<u64>) {
        // A record with a count of 0 would still change the maximum.
        if self.count > 0 {
            histogram.saturating_record_n(now.saturating_sub(self.sent_at), self.count);
            self.count = 0;
        }
    }
}

/// The record of times at which ticks had not ended yet, for computing how late their batches were. For each deadline,
/// it holds the time at which the last request was sent that got this deadline.
///
/// All messages of a load have the same ack timeout of k ticks. So a request that got the deadline d reached the server
/// in tick d - k. This tick cannot have ended before the request was sent. Answers to GetMsg
/// are recorded in the same way: they give a later time at which the tick has not ended yet.
#[derive(Clone, Debug, Default)]
pub(super) struct TickTimes {
    /// Pairs of deadline and sending time, in the order of the answers. A deadline appears again if answers with
    /// another deadline came in between.
    seen: Vec<(u64, u64)>,
}

impl TickTimes {
    /// Records that a request, sent at `sent_at` in ns since the load began, got this deadline.
    pub(super) fn record(&mut self, deadline: u64, sent_at: u64) {
        match self.seen.last_mut() {
            Some((latest, latest_at)) if *latest == deadline => *latest_at = sent_at.max(*latest_at),
            _ => self.seen.push((deadline, sent_at)),
        }
    }

    /// Adds the times of another thread.
    pub(super) fn merge(&mut self, other: &TickTimes) {
        self.seen.extend_from_slice(&other.seen);
    }

    /// Returns the latest time at which a request was sent that got `deadline` or an earlier deadline. Returns `None`
    /// if there is no such request.
    pub(super) fn last_at_or_before(&self, deadline: u64) -> Option<u64> {
        self.seen.iter().filter(|(seen, _)| *seen <= deadline).map(|(_, sent_at)| *sent_at).max()
    }
}

/// The counters of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    /// The number of the connection.
    pub(super) connection: usize,
    /// Messages added during the measurement.
    pub(super) added: u64,
    /// Messages acknowledged during the measurement.
    pub(super) acked: u64,
    /// Requests answered during the measurement.
    pub(super) frames: u64,
    /// Pairs of an add and a delete, or Pings, that were due at a fixed rate and never made.
    pub(super) not_made: u64,
    /// Messages added since the load began.
    pub(super) all_added: u64,
    /// Messages acknowledged since the load began.
    pub(super) all_acked: u64,
    /// Messages added since the load began that must time out.
    pub(super) left_to_time_out: u64,
    /// How many message numbers the connection has used since the load began.
    pub(super) numbers: u64,
}

/// How many different error texts are kept.
const KEPT: usize = 8;

/// The errors of a load.
#[derive(Debug, Default)]
pub(super) struct Errors {
    inner: Mutex<(u64, Vec<String>)>,
}

impl Errors {
    /// Counts an error. Keeps its text if the text is new and there is room.
    pub(super) fn record(&self, text: impl Into<String>) {
        let text = text.into();
        self.count(|known| *known == text, || text.clone());
    }

    /// Counts an error. Keeps a text, made of `kind` and `example`, only for the first error of this kind.
    pub(super) fn record_kind(&self, kind: &str, example: impl Display) {
        self.count(|known| known.starts_with(kind), || format!("{kind} ({example})"));
    }

    fn count(&self, is_known: impl FnMut(&String) -> bool, text: impl FnOnce() -> String) {
        let (count, texts) = &mut *self.inner.lock();
        *count += 1;
        if texts.len() < KEPT && !texts.iter().any(is_known) {
            texts.push(text());
        }
    }

    /// Returns the number of errors, and the first different texts.
    pub(super) fn first(&self) -> (u64, Vec<String>) {
        self.inner.lock().clone()
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

    #[test]
    fn all_are_counted_and_the_first_different_ones_kept() {
        let errors = Errors::default();
        for number in 0..100 {
            errors.record("the same");
            errors.record_kind("a kind", number);
            errors.record(format!("number {number}"));
        }
        let (count, texts) = errors.first();
        assert_eq!((count, texts.len()), (300, KEPT));
        assert_eq!(texts[..4], ["the same", "a kind (0)", "number 0", "number 1"]);
    }
}
