//! Keeps samples of counters over the last minutes, so that rates and recent events can be reported.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::core::{DelOutcome, Reason};
use crate::metrics::Metrics;

/// How often the counters are sampled.
pub(super) const SAMPLE_EVERY: Duration = Duration::from_secs(10);

/// How far back the samples reach.
pub(super) const KEPT: Duration = Duration::from_secs(300);

/// The values of counters at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    pub(super) adds: u64,
    pub(super) dels: u64,
    pub(super) timeouts: u64,
    pub(super) storms: u64,
    /// How often Redis answered that it is out of memory.
    pub(super) out_of_memory: u64,
    /// The refusals, in the order of [`Reason::ALL`].
    pub(super) refusals: Vec<u64>,
}

impl Counters {
    pub(super) fn read(metrics: &Metrics) -> Counters {
        Counters {
            adds: metrics.messages_added.get() + metrics.messages_rearmed.get(),
            dels: DelOutcome::ALL.iter().map(|outcome| metrics.messages_acked.of(*outcome).get()).sum(),
            timeouts: metrics.messages_timed_out.get(),
            storms: metrics.storm_ticks.get(),
            out_of_memory: metrics.redis_errors.of("oom").get(),
            refusals: Reason::ALL.iter().map(|reason| metrics.refusals.of(*reason).get()).collect(),
        }
    }

    /// Returns how much each counter has grown since `before`.
    pub(super) fn since(&self, before: &Counters) -> Counters {
        let refusals = self.refusals.iter().enumerate();
        let refused = |(index, count): (usize, &u64)| count - before.refusals.get(index).unwrap_or(&0);
        Counters {
            adds: self.adds - before.adds,
            dels: self.dels - before.dels,
            timeouts: self.timeouts - before.timeouts,
            storms: self.storms - before.storms,
            out_of_memory: self.out_of_memory - before.out_of_memory,
            refusals: refusals.map(refused).collect(),
        }
    }
}

/// The samples of the last minutes, the oldest first.
#[derive(Debug)]
pub struct History {
    /// When the sidecar started, at which all counters were 0.
    pub(super) started: Instant,
    samples: VecDeque<(Instant, Counters)>,
}

impl History {
    /// Begins a history. All counters are 0 at `now`.
    pub fn starting(now: Instant) -> History {
        History { started: now, samples: VecDeque::from([(now, Counters::default())]) }
    }

    /// Adds a sample, and drops the samples that are no longer needed.
    pub(super) fn record(&mut self, now: Instant, counters: Counters) {
        self.samples.push_back((now, counters));
        while self.samples.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= KEPT) {
            self.samples.pop_front();
        }
    }

    /// Returns the latest sample that is at least `window` old, or the oldest one, with its age.
    pub(super) fn before(&self, now: Instant, window: Duration) -> (Duration, &Counters) {
        let age = |(at, _): &&(Instant, Counters)| now.saturating_duration_since(*at);
        let found = self.samples.iter().rev().find(|sample| age(sample) >= window);
        let sample = found.unwrap_or_else(|| self.samples.front().expect("a history has a sample"));
        (age(&sample), &sample.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_samples_reach_back_for_five_minutes_and_no_further() {
        let begin = Instant::now();
        let mut history = History::starting(begin);
        assert_eq!(history.before(begin, KEPT).0, Duration::ZERO, "a young history is shorter than the window");
        for number in 1..=100 {
            let counters = Counters { adds: u64::from(number), ..Counters::default() };
            history.record(begin + SAMPLE_EVERY * number, counters);
        }
        assert_eq!(history.samples.len(), 31);
        let now = begin + SAMPLE_EVERY * 100 + Duration::from_secs(5);
        let (age, counters) = history.before(now, SAMPLE_EVERY);
        assert_eq!((age, counters.adds), (Duration::from_secs(15), 99));
        let (age, counters) = history.before(now, KEPT);
        assert_eq!((age, counters.adds), (Duration::from_secs(305), 70));
    }

    #[test]
    fn growth_is_counted_from_the_earlier_sample() {
        let [before, after] =
            [[1, 0], [4, 2]].map(|refusals| Counters { refusals: refusals.to_vec(), ..Counters::default() });
        assert_eq!(after.since(&before).refusals, [3, 2]);
        assert_eq!(after.since(&Counters::default()).refusals, [4, 2], "the first sample has no list");
    }
}
