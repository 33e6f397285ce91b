//! When a silent server is asked for a sign of life, and when it is given up.
//!
//! A state machine without I/O: `now` comes in, what is to be done goes out.

use std::time::Duration;

use tokio::time::Instant;

/// Bounds of the interval that a server may ask for: neither a busy loop nor for ever.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);
const LONGEST_INTERVAL: Duration = Duration::from_secs(60);

/// The action that the silence of the server requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing yet.
    Wait,
    /// A Ping.
    Ask,
    /// The connection is lost: nothing was heard for this long.
    Lost(Duration),
}

/// Since when a server is silent.
#[derive(Debug)]
pub(super) struct Silence {
    interval: Duration,
    since: Instant,
    asked: bool,
}

impl Silence {
    pub(super) fn new(ping_interval_ms: u32, now: Instant) -> Silence {
        let interval = Duration::from_millis(u64::from(ping_interval_ms));
        Silence { interval: interval.clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL), since: now, asked: false }
    }

    /// Something was received.
    pub(super) fn broken(&mut self, now: Instant) {
        self.since = now;
        self.asked = false;
    }

    /// This process stood still and does not know for how long it could not hear: it asks, and gives the
    /// server a whole interval from now to answer.
    pub(super) fn stalled(&mut self, now: Instant) {
        if let Some(asked_since) = now.checked_sub(self.interval) {
            self.since = self.since.max(asked_since);
        }
        self.asked = false;
    }

    /// The action at `now`.
    pub(super) fn judge(&mut self, now: Instant) -> Verdict {
        let silent = now.saturating_duration_since(self.since);
        if self.asked && silent >= self.interval * 2 {
            Verdict::Lost(silent)
        } else if !self.asked && silent >= self.interval {
            self.asked = true;
            Verdict::Ask
        } else {
            Verdict::Wait
        }
    }

    /// When to judge next.
    pub(super) fn next(&self) -> Instant {
        self.since + if self.asked { self.interval * 2 } else { self.interval }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_silent_server_is_asked_after_one_interval_and_given_up_after_two() {
        let start = Instant::now();
        let mut silence = Silence::new(5_000, start);
        assert_eq!(silence.judge(start + SECOND * 4), Verdict::Wait);
        assert_eq!(silence.next(), start + SECOND * 5);
        assert_eq!(silence.judge(start + SECOND * 5), Verdict::Ask);
        assert_eq!(silence.judge(start + SECOND * 9), Verdict::Wait);
        assert_eq!(silence.next(), start + SECOND * 10);
        assert_eq!(silence.judge(start + SECOND * 10), Verdict::Lost(SECOND * 10));
        silence.broken(start + SECOND * 10);
        assert_eq!(silence.judge(start + SECOND * 10), Verdict::Wait);
    }

    #[test]
    fn after_a_stall_the_server_has_a_whole_interval_again() {
        let start = Instant::now();
        let mut silence = Silence::new(5_000, start);
        assert_eq!(silence.judge(start + SECOND * 5), Verdict::Ask);
        let woken = start + SECOND * 60;
        silence.stalled(woken);
        assert_eq!(silence.judge(woken), Verdict::Ask);
        assert_eq!(silence.judge(woken + SECOND * 4), Verdict::Wait);
        assert_eq!(silence.judge(woken + SECOND * 5), Verdict::Lost(SECOND * 10));
    }
}
