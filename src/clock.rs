//! The clock of the process: the only place that reads the time. Timeouts that a stall does not use up.

use std::pin::pin;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;

use crate::core::{Moment, StallAwareClock};

/// The number of parts of a timeout. A stall uses up only one of them.
const TIMEOUT_PARTS: u32 = 4;

/// The shortest part, since the timers of the runtime count in ms.
const SHORTEST_PART: Duration = Duration::from_millis(5);

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

/// Awaits `awaited` for at most `timeout`. A stall of this process uses up a quarter of a timeout of 20 ms or more.
/// During the stall, peers had no time to answer, or were not read.
pub(crate) async fn stall_aware_timeout<T>(timeout: Duration, awaited: impl Future<Output = T>) -> Option<T> {
    let mut awaited = pin!(awaited);
    let parts = if timeout < SHORTEST_PART * TIMEOUT_PARTS { 1 } else { TIMEOUT_PARTS };
    for _ in 0..parts {
        if let Ok(output) = tokio::time::timeout(timeout / parts, &mut awaited).await {
            return Some(output);
        }
    }
    None
}
