//! Decides when an admitted connection is pinged, and when it is closed. It is closed if its peer is silent, or if its
//! peer does not read.
//!
//! All times come from the stall-aware clock, which leaves out stalls of this process. So a stall does not count as
//! silence of the peer.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use crate::core::{Reason, Refusal};

/// Most Pongs arrive within the ping interval divided by this number. The timer of a pinged connection fires that much
/// later than two intervals.
const PONG_FRACTION: u32 = 64;

/// How long the timer of a connection without Pings runs while nothing is expected of its peer.
const NO_PINGS: Duration = Duration::from_secs(3_600);

/// The action that is due for a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Wait,
    Ping,
    Close(Refusal),
}

/// The times at which a connection last received and sent bytes, and its timeouts.
#[derive(Debug)]
pub(super) struct KeepAlive {
    ping_interval: Duration,
    /// Whether a silent peer is pinged, and closed if it stays silent.
    pings: bool,
    /// Whether the peer has sent a part of a command. Without Pings, it is closed only then, if it stays silent.
    expects_rest: bool,
    /// The beginning of the timeout of a silent peer: when the peer last sent bytes, or when the session last did not
    /// read.
    received_at: Instant,
    /// The beginning of the timeout of a slow reader: when the peer last took bytes, or, if later, when bytes were last
    /// queued into an empty queue.
    sent_at: Instant,
    /// How long the peer may be silent before the next Ping.
    ping_after: Duration,
    /// Whether a Ping was sent since `received_at`.
    is_pinged: bool,
}

impl KeepAlive {
    pub(super) fn new(now: Instant, ping_interval: Duration) -> KeepAlive {
        KeepAlive {
            ping_interval,
            pings: true,
            expects_rest: false,
            received_at: now,
            sent_at: now,
            ping_after: first_ping(ping_interval),
            is_pinged: false,
        }
    }

    /// Creates the times of a connection whose peer may be silent between its commands. It must read what is sent to it,
    /// and send the rest of a command, within `timeout`.
    pub(super) fn without_pings(now: Instant, timeout: Duration) -> KeepAlive {
        KeepAlive { pings: false, ..KeepAlive::new(now, timeout / 2) }
    }

    /// Records that the peer sent bytes, or that the session does not read at present. Both restart the timeout of a
    /// silent peer.
    pub(super) fn received(&mut self, now: Instant) {
        (self.received_at, self.is_pinged) = (now, false);
    }

    /// Records whether the peer has sent a part of a command.
    pub(super) fn expect_rest(&mut self, expects_rest: bool) {
        self.expects_rest = expects_rest;
    }

    /// Records that the peer took bytes, or that bytes are queued into an empty queue.
    pub(super) fn sent(&mut self, now: Instant) {
        self.sent_at = now;
    }

    /// Returns the time of the next [`KeepAlive::check`]. `is_flushed` says whether the socket has taken all queued
    /// bytes.
    pub(super) fn next_check(&self, is_flushed: bool) -> Instant {
        let silence = if self.is_pinged {
            // A silent peer is closed after two intervals. If the Pong arrives soon, the next Ping is due a little
            // after two intervals. A timer for exactly two intervals would fire just before this Ping, and would have
            // to be set again. So the timer fires a little later.
            self.ping_interval * 2 + self.ping_interval / PONG_FRACTION
        } else {
            self.ping_after
        };
        let silent_at = match (self.pings, self.expects_rest) {
            (true, _) => self.received_at + silence,
            (false, true) => self.received_at + self.ping_interval * 2,
            // The timer fires from time to time for nothing.
            (false, false) => self.received_at + NO_PINGS,
        };
        if is_flushed { silent_at } else { silent_at.min(self.sent_at + self.ping_interval * 2) }
    }

    /// Returns the action that is due at `now`. `has_unread` says whether bytes of the peer wait in the socket. The
    /// session reads such bytes next, so the connection is not closed as silent.
    pub(super) fn check(&mut self, now: Instant, is_flushed: bool, has_unread: impl FnOnce() -> bool) -> Action {
        if now < self.next_check(is_flushed) {
            return Action::Wait;
        }
        let limit = self.ping_interval * 2;
        if !is_flushed && now >= self.sent_at + limit {
            let text =
                format!("the client read nothing for {limit:?} or longer: read answers while sending requests");
            return Action::Close(Refusal::new(Reason::SlowReader, text));
        }
        if !self.pings && !self.expects_rest {
            self.received_at = now;
            return Action::Wait;
        }
        if now < self.received_at + limit {
            (self.is_pinged, self.ping_after) = (true, self.ping_interval);
            return Action::Ping;
        }
        if has_unread() {
            return Action::Wait;
        }
        let remedy = if self.pings { "answer every Ping" } else { "send the rest of the command" };
        let text = format!("the client sent nothing for {limit:?}: {remedy}");
        Action::Close(Refusal::new(Reason::PeerSilent, text))
    }
}

/// Returns how long a peer may be silent before its first Ping: a random time between an eighth of the interval and the
/// whole interval. So connections that open at the same time, as after a restart, are not all pinged at the same time.
fn first_ping(interval: Duration) -> Duration {
    let [first, second, ..] = RandomState::new().hash_one(()).to_ne_bytes();
    let part = u32::from(u16::from_ne_bytes([first, second]));
    interval / 8 + interval * 7 / 8 * part / u32::from(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(8);

    fn begun(now: Instant) -> KeepAlive {
        KeepAlive::new(now, INTERVAL)
    }

    fn reason(action: Action) -> Reason {
        match action {
            Action::Close(refusal) => refusal.reason,
            other => panic!("the connection goes on: {other:?}"),
        }
    }

    #[test]
    fn first_pings_are_spread_over_the_interval() {
        let mut in_each_second = [0; 8];
        for _ in 0..7_000 {
            let silence = first_ping(INTERVAL);
            assert!(silence <= INTERVAL, "{silence:?}");
            in_each_second[usize::try_from(silence.as_secs()).unwrap().min(7)] += 1;
        }
        let [none, others @ ..] = in_each_second;
        assert_eq!(none, 0, "the first Ping comes after at least an eighth of the interval");
        assert!(others.iter().all(|count| (800..=1_200).contains(count)), "{in_each_second:?}");
    }

    #[test]
    fn a_silent_peer_is_pinged_once_and_closed_after_two_intervals() {
        let begin = Instant::now();
        let mut keep_alive = begun(begin);
        let due = keep_alive.next_check(true);
        assert_eq!(keep_alive.check(begin, true, || true), Action::Wait);
        assert_eq!(keep_alive.check(due, true, || true), Action::Ping);
        let end = keep_alive.next_check(true);
        assert!(end >= begin + INTERVAL * 2);
        assert_eq!(keep_alive.check(due, true, || true), Action::Wait, "no second Ping");
        assert_eq!(keep_alive.check(end, true, || true), Action::Wait, "its bytes wait in the socket");
        assert_eq!(reason(keep_alive.check(end, true, || false)), Reason::PeerSilent);
        keep_alive.received(end);
        assert_eq!(keep_alive.check(end, true, || false), Action::Wait);
        assert_eq!(keep_alive.next_check(true), end + INTERVAL, "only the first Ping comes at a random time");
    }

    #[test]
    fn without_pings_a_peer_is_closed_only_if_the_rest_of_a_command_does_not_come() {
        let begin = Instant::now();
        let mut keep_alive = KeepAlive::without_pings(begin, INTERVAL * 2);
        let later = begin + Duration::from_secs(86_400);
        assert_eq!(keep_alive.check(later, true, || false), Action::Wait, "it may be silent");
        keep_alive.received(later);
        keep_alive.expect_rest(true);
        let end = keep_alive.next_check(true);
        assert_eq!(end, later + INTERVAL * 2);
        assert_eq!(keep_alive.check(end, true, || true), Action::Wait, "the rest waits in the socket");
        assert_eq!(reason(keep_alive.check(end, true, || false)), Reason::PeerSilent);
        keep_alive.expect_rest(false);
        assert_eq!(keep_alive.check(end, true, || false), Action::Wait, "the command is complete");
    }

    #[test]
    fn a_peer_that_does_not_read_is_closed_though_it_sends() {
        let begin = Instant::now();
        let mut keep_alive = begun(begin);
        keep_alive.sent(begin + INTERVAL);
        keep_alive.received(begin + INTERVAL * 3);
        assert_eq!(keep_alive.next_check(false), begin + INTERVAL * 3);
        assert_eq!(reason(keep_alive.check(begin + INTERVAL * 3, false, || true)), Reason::SlowReader);
        assert_eq!(keep_alive.check(begin + INTERVAL * 3, true, || true), Action::Wait, "the peer has read all");
    }
}
