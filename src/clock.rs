//! The clock of the process, and a timeout that a stall does not use up. The sidecar reads the time only here.

use std::pin::pin;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;

use crate::core::{Moment, StallAwareClock};

/// The number of parts into which a timeout is divided. A stall uses up only one part.
const TIMEOUT_PARTS: u32 = 4;

/// The shortest part of a timeout. The timers of the runtime count in ms, so a much shorter part would be inexact.
const SHORTEST_PART: Duration = Duration::from_millis(5);

/// A monotonic clock. Its stall-aware time stops while the process is stalled.
///
/// The clock is based on Tokio's clock, so pausing the time of the runtime pauses this clock too.
#[derive(Debug)]
pub struct Clock {
    stall_aware: RwLock<StallAwareClock>,
}

impl Clock {
    /// Creates a clock that starts now.
    pub fn start() -> Clock {
        Clock { stall_aware: RwLock::new(StallAwareClock::new(monotonic())) }
    }

    /// Returns the monotonic time.
    pub fn now(&self) -> Instant {
        monotonic()
    }

    /// Returns the time by the monotonic clock and by the wall clock.
    pub fn moment(&self) -> Moment {
        let unix_time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Moment { now: monotonic(), unix_time }
    }

    /// Returns the stall-aware time. It is used to measure the silence of peers.
    pub fn stall_aware_now(&self) -> Instant {
        self.stall_aware.read().at(monotonic())
    }

    /// Returns whether a stall of the process has just ended.
    pub fn is_waking(&self) -> bool {
        self.stall_aware.read().is_waking(monotonic())
    }

    /// Records a beat: the process runs. Returns the length of the stall since the last beat, zero if there was none.
    pub fn beat(&self) -> Duration {
        self.stall_aware.write().beat(monotonic())
    }
}

/// Returns the monotonic time.
pub fn monotonic() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Awaits `awaited` for at most `timeout`. A stall uses up only a quarter of a timeout of 20 ms or more. During a
/// stall peers cannot answer, or their answers are not read.
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
