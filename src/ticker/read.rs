//! Before a tick is decided, what waits in the sockets is read: see [`crate::ticker::read_barrier`].

use std::time::{Duration, Instant};

use tracing::warn;

use super::Ticker;

/// How long a decision or a drain waits for the sockets at most, and never longer than half a tick: a move that
/// is late by a whole one counts as a stall. Who asks again for the same move waits for an eighth of that.
const READ_PATIENCE: Duration = Duration::from_secs(1);

/// The connections are asked to read so long before a move, or an eighth of a tick if that is less.
const READ_AHEAD: Duration = Duration::from_millis(3);

impl Ticker {
    /// How long before a move the connections are asked to read, so that it need not wait for them.
    pub(super) fn read_ahead(&self) -> Duration {
        READ_AHEAD.min(self.seat.ring.wheel().tick_length() / 8)
    }

    /// Whether all connections have read a moment ago, or had their time for it. What came since is what is always on
    /// its way.
    pub(super) fn has_read(&self, now: Instant) -> bool {
        self.read_at.is_some_and(|read_at| now.saturating_duration_since(read_at) < self.read_ahead() * 2)
    }

    /// Has every connection read what waits in its socket.
    pub(super) async fn pass_read_barrier(&mut self) {
        let tick_length = self.seat.ring.wheel().tick_length();
        let patience = READ_PATIENCE.min(tick_length / 2);
        // Who is slow has had its time for this move; who was kept from reading since needs but a moment.
        let asked = self.clock.now();
        let again =
            self.gave_up_at.is_some_and(|gave_up| asked.saturating_duration_since(gave_up) < tick_length / 4);
        let mut patience = if again { patience / 8 } else { patience };
        let mut all_passed = self.beating(self.read_barrier.pass(patience)).await;
        if all_passed && self.clock.now().saturating_duration_since(asked) >= self.read_ahead() * 2 {
            // So long that something may have come meanwhile to who was not asked, as where the process stood still.
            patience /= 8;
            all_passed = self.beating(self.read_barrier.pass(patience)).await;
        }
        if all_passed {
            self.gave_up_at = None;
        } else {
            self.gave_up_at = Some(self.clock.now());
            warn!(
                "some connections were not read within {patience:?} before a decision, which is made now; if this comes \
                 again, the process is short of CPU: give it more, or raise --threads"
            );
        }
        // From its end on, and where it was given up too: to ask again would hold the move up twice, and one that is
        // late by a whole tick counts as a stall.
        self.read_at = Some(self.clock.now());
    }
}
