//! Shortly before a tick is decided, the ring lists what is still in it, so that its batches are there when it is.

use std::time::Duration;

use super::Ticker;

/// How long before the connections are asked to read. A million messages are looked at in up to a millisecond, with pauses
/// of four times that: twenty million fit.
const AHEAD: Duration = Duration::from_millis(100);

impl Ticker {
    /// Has the ring list some more, if it is time for that. There is nothing else to do for `wait`; returns how long there
    /// is nothing to do at all.
    pub(super) fn prelist(&mut self, wait: Duration) -> Duration {
        if self.prelisted {
            return wait;
        }
        let early = wait.saturating_sub(AHEAD);
        if !early.is_zero() {
            return early;
        }
        let begun = self.clock.now();
        self.prelisted = !self.seat.ring.prelist();
        let took = self.clock.now().saturating_duration_since(begun);
        self.memory_reclaim.pause(took).min(wait.saturating_sub(took))
    }
}
