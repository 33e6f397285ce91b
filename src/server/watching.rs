//! How a connection is looked after: whether the peer is silent, or does not read, and when to look again.

use std::time::{Duration, Instant};

use super::session::{Session, State};
use crate::core::refusal::{Reason, Refusal};
use crate::protocol::frame::{Body, Frame};

/// How long a Hello that waits in the socket when its time is over may still take to be read.
const HELLO_LENIENCE: Duration = Duration::from_secs(1);

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
            _ if self.pinged => self.heard_at + interval * 2,
            _ => self.heard_at + interval,
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
        // Bytes that wait are a sign of life, and read next. A Hello that trickles in byte by byte is none.
        if self.is_listening()
            && self.wire.has_unread()
            && (self.state != State::Greeting || overdue < HELLO_LENIENCE)
        {
            return;
        }
        if self.state == State::Greeting {
            let text = format!("no Hello came within {:?}", self.shared.options.hello_timeout);
            self.refuse(0, &Refusal::new(Reason::HelloTimeout, text));
        } else if now >= self.heard_at + interval * 2 {
            let text = format!("nothing was heard for {:?}: answer every Ping", interval * 2);
            self.refuse(0, &Refusal::new(Reason::Silent, text));
        } else {
            self.pinged = true;
            self.send(&Frame::new(0, Body::Ping(Vec::new())));
        }
    }
}

pub(super) fn not_read(interval: Duration) -> Refusal {
    let text =
        format!("what was sent was not read for {interval:?} or longer: read answers while sending requests");
    Refusal::new(Reason::SlowReader, text)
}
