//! The time that passes: the one place where this process reads a clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;

use crate::core::stall_aware_clock::StallAwareClock;
use crate::core::store::Moment;

/// A monotonic clock that also tells how long the process was alive.
///
/// It follows tokio's clock, so a paused runtime pauses it too.
#[derive(Debug)]
pub struct Clock {
    alive: RwLock<StallAwareClock>,
}

impl Clock {
    /// A clock that starts now.
    #[must_use]
    pub fn start() -> Clock {
        Clock { alive: RwLock::new(StallAwareClock::new(monotonic())) }
    }

    /// Now.
    #[must_use]
    pub fn now(&self) -> Instant {
        monotonic()
    }

    /// Now, by both clocks.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moment { now: monotonic(), unix_time }
    }

    /// Now, by a clock that stood still while the process did: for judging silence.
    #[must_use]
    pub fn alive(&self) -> Instant {
        self.alive.read().at(monotonic())
    }

    /// Whether the process stood still a moment ago.
    pub fn is_waking(&self) -> bool {
        self.alive.read().is_waking(monotonic())
    }

    /// Notes that the process runs; returns for how long it did not since the last beat.
    pub fn beat(&self) -> Duration {
        self.alive.write().beat(monotonic())
    }
}

fn monotonic() -> Instant {
    tokio::time::Instant::now().into_std()
}
