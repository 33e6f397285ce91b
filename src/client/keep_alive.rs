//! Decides when a silent server gets a Ping (after one ping interval without data), and when its connection counts as
//! lost (after two).
//!
//! This state machine does no I/O: it takes `now` and returns the next action.

use std::time::Duration;

use tokio::time::Instant;

/// The minimum ping interval. It replaces a shorter interval of the server, which would cause a busy loop.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);
/// The maximum ping interval. It replaces a longer interval of the server, which would delay the detection of a lost
/// connection.
const LONGEST_INTERVAL: Duration = Duration::from_secs(60);

/// The next action of the client for a server that may be silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Wait,
    Ping,
    /// The connection counts as lost: the server was silent for this long.
    GiveUp(Duration),
}

/// The state of the keep-alive: when the server last sent data, and whether a Ping followed.
#[derive(Debug)]
pub(super) struct KeepAlive {
    interval: Duration,
    received_at: Instant,
    /// Whether a Ping was sent after `received_at`.
    is_pinged: bool,
}

impl KeepAlive {
    pub(super) fn new(ping_interval_ms: u32, now: Instant) -> KeepAlive {
        let interval = Duration::from_millis(u64::from(ping_interval_ms));
        let interval = interval.clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL);
        KeepAlive { interval, received_at: now, is_pinged: false }
    }

    /// Records that the server sent something.
    pub(super) fn received(&mut self, now: Instant) {
        self.received_at = now;
        self.is_pinged = false;
    }

    /// Records that this process was stalled and may have unread data from the server. The server then gets another
    /// Ping before the connection can count as lost. It has at least one whole interval from `now` to answer.
    pub(super) fn stalled(&mut self, now: Instant) {
        if let Some(interval_ago) = now.checked_sub(self.interval) {
            self.received_at = self.received_at.max(interval_ago);
        }
        self.is_pinged = false;
    }

    /// Returns the action to take at `now`. Records a returned [`Action::Ping`] as sent.
    pub(super) fn check(&mut self, now: Instant) -> Action {
        if now < self.next_check() {
            return Action::Wait;
        }
        if self.is_pinged {
            return Action::GiveUp(now.saturating_duration_since(self.received_at));
        }
        self.is_pinged = true;
        Action::Ping
    }

    /// Returns when `check` will return another action than [`Action::Wait`], if no data arrives before.
    pub(super) fn next_check(&self) -> Instant {
        self.received_at + if self.is_pinged { self.interval * 2 } else { self.interval }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_silent_server_is_asked_after_one_interval_and_given_up_after_two() {
        let start = Instant::now();
        let mut keep_alive = KeepAlive::new(5_000, start);
        assert_eq!(keep_alive.check(start + SECOND * 4), Action::Wait);
        assert_eq!(keep_alive.next_check(), start + SECOND * 5);
        assert_eq!(keep_alive.check(start + SECOND * 5), Action::Ping);
        assert_eq!(keep_alive.check(start + SECOND * 9), Action::Wait);
        assert_eq!(keep_alive.next_check(), start + SECOND * 10);
        assert_eq!(keep_alive.check(start + SECOND * 10), Action::GiveUp(SECOND * 10));
        keep_alive.received(start + SECOND * 10);
        assert_eq!(keep_alive.check(start + SECOND * 10), Action::Wait);
    }

    #[test]
    fn after_a_stall_the_server_has_a_whole_interval_again() {
        let start = Instant::now();
        let mut keep_alive = KeepAlive::new(5_000, start);
        assert_eq!(keep_alive.check(start + SECOND * 5), Action::Ping);
        let woken = start + SECOND * 60;
        keep_alive.stalled(woken);
        assert_eq!(keep_alive.check(woken), Action::Ping);
        assert_eq!(keep_alive.check(woken + SECOND * 4), Action::Wait);
        assert_eq!(keep_alive.check(woken + SECOND * 5), Action::GiveUp(SECOND * 10));
    }
}
