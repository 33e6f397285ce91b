//! The clock of the process: the only place that reads the time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;

use crate::core::{Moment, StallAwareClock};

/// A monotonic clock, with a second reading that does not count stalls of the process.
///
/// It follows the clock of tokio, so a paused runtime pauses it too.
#[derive(Debug)]
pub struct Clock {
    stall_aware: RwLock<StallAwareClock>,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock { stall_aware: RwLock::new(StallAwareClock::new(monotonic())) }
    }

    /// The monotonic time.
    pub fn now(&self) -> Instant {
        monotonic()
    }

    /// The time by the monotonic clock and by the wall clock.
    pub fn moment(&self) -> Moment {
        let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moment { now: monotonic(), unix_time }
    }

    /// The stall-aware time: for judging the silence of peers.
    pub fn stall_aware_now(&self) -> Instant {
        self.stall_aware.read().at(monotonic())
    }

    /// Whether a stall of the process has just ended.
    pub fn is_waking(&self) -> bool {
        self.stall_aware.read().is_waking(monotonic())
    }

    /// Records that the process runs. Returns how long it was stalled since the last beat.
    pub fn beat(&self) -> Duration {
        self.stall_aware.write().beat(monotonic())
    }
}

/// The monotonic time.
pub fn monotonic() -> Instant {
    tokio::time::Instant::now().into_std()
}
