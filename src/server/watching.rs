//! How a connection is looked after: whether the peer is silent, or does not read, and when to look again.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use super::session::{Session, State};
use crate::core::refusal::{Reason, Refusal};
use crate::protocol::frame::{Body, Frame};

/// How long a Hello that waits in the socket when its time is over may still take to be read.
const HELLO_LENIENCE: Duration = Duration::from_secs(1);

/// A part of an interval in which a Pong mostly comes.
const PONG_PART: u32 = 64;

impl Session {
    pub(super) fn heard(&mut self) {
        self.heard_at = self.shared.clock.alive();
        self.pinged = false;
    }

    /// When the peer must be looked after next, in time alive.
    pub(super) fn next_check(&self) -> Instant {
        let interval = self.shared.options.ping_interval;
        let silence = match self.state {
            State::Greeting => self.opened_at + self.shared.options.hello_timeout,
            // Later than the Ping that follows a Pong will be due: so a Pong has the timer set anew, which would ring for
            // nothing just before that otherwise.
            _ if self.pinged => self.heard_at + interval * 2 + interval / PONG_PART,
            _ => self.heard_at + self.patience,
        };
        if self.wire.is_flushed() { silence } else { silence.min(self.written_at + interval * 2) }
    }

    /// Sets the timer, if it would come too late. One that comes too early finds nothing to do, which costs less than
    /// setting it after every frame.
    pub(super) fn wake_after(&mut self, wait: Duration) {
        let wanted = tokio::time::Instant::from_std(self.shared.clock.now()) + wait;
        if self.timer.is_elapsed() || self.timer.deadline() > wanted {
            self.timer.as_mut().reset(wanted);
        }
    }

    /// Asks a silent peer for a sign of life, or gives it up.
    pub(super) fn check(&mut self) {
        let now = self.shared.clock.alive();
        let Some(overdue) = now.checked_duration_since(self.next_check()) else { return };
        let interval = self.shared.options.ping_interval;
        if !self.wire.is_flushed() && now >= self.written_at + interval * 2 {
            return self.refuse(0, &not_read(interval * 2));
        }
        if self.state != State::Greeting && now < self.heard_at + interval * 2 {
            (self.pinged, self.patience) = (true, interval);
            return self.send(&Frame::new(0, Body::Ping(Vec::new())));
        }
        // Bytes that wait are a sign of life, and read next. A Hello that trickles in byte by byte is none.
        if self.is_listening()
            && self.wire.has_unread()
            && (self.state != State::Greeting || overdue < HELLO_LENIENCE)
        {
            return;
        }
        let refusal = if self.state == State::Greeting {
            let text = format!("no Hello came within {:?}", self.shared.options.hello_timeout);
            Refusal::new(Reason::HelloTimeout, text)
        } else {
            let text = format!("nothing was heard for {:?}: answer every Ping", interval * 2);
            Refusal::new(Reason::Silent, text)
        };
        self.refuse(0, &refusal);
    }
}

/// How long a peer may be silent until its first Ping: an eighth of the interval to all of it. Where thousands come at
/// the same time, after a restart, they are so not asked at the same time too, every few seconds from then on.
pub(super) fn first_patience(interval: Duration) -> Duration {
    let [first, second, ..] = RandomState::new().hash_one(()).to_ne_bytes();
    let part = u32::from(u16::from_ne_bytes([first, second]));
    interval / 8 + interval * 7 / 8 * part / u32::from(u16::MAX)
}

fn not_read(interval: Duration) -> Refusal {
    let text =
        format!("what was sent was not read for {interval:?} or longer: read answers while sending requests");
    Refusal::new(Reason::SlowReader, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_pings_are_spread_over_the_interval() {
        let interval = Duration::from_secs(8);
        let mut in_each_second = [0; 8];
        for _ in 0..7_000 {
            let patience = first_patience(interval);
            assert!(patience <= interval, "{patience:?}");
            in_each_second[usize::try_from(patience.as_secs()).unwrap().min(7)] += 1;
        }
        let [none, others @ ..] = in_each_second;
        assert_eq!(none, 0, "a busy connection would look at the time again and again");
        assert!(others.iter().all(|count| (800..=1_200).contains(count)), "{in_each_second:?}");
    }
}
