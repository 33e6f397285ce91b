//! The clock of the sidecar, and a timeout of which a stall uses up only a part. A *stall* is a time in which the
//! process does not run, for example because it is short of CPU. The sidecar reads the time only here.

use std::pin::pin;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;

use crate::core::{Moment, StallAwareClock};

/// The number of parts into which a timeout is divided. Each part is a timer of its own, so a stall uses up at most
/// one part.
const TIMEOUT_PARTS: u32 = 4;

/// The minimum length of a part. Timers of Tokio are exact to 1 ms, so shorter parts would be inexact.
const SHORTEST_PART: Duration = Duration::from_millis(5);

/// A monotonic clock with two times: the plain time, and the stall-aware time, which stops during a stall.
///
/// The clock is based on Tokio's clock, so `tokio::time::pause` pauses this clock too.
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

    /// Returns the stall-aware time, for measuring how long a peer has sent nothing.
    pub fn stall_aware_now(&self) -> Instant {
        self.stall_aware.read().at(monotonic())
    }

    /// Returns whether a stall has just ended: see [`StallAwareClock::is_waking`].
    pub fn is_waking(&self) -> bool {
        self.stall_aware.read().is_waking(monotonic())
    }

    /// Records a beat, which shows that the process runs. Returns the length of the stall since the last beat, or zero
    /// if there was none.
    pub fn beat(&self) -> Duration {
        self.stall_aware.write().beat(monotonic())
    }
}

/// Returns the monotonic time.
pub fn monotonic() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Awaits `awaited` for at most `timeout`, and returns `None` after that. A stall uses up at most a quarter of the
/// timeout, because the process cannot read answers during a stall. A timeout below 20 ms is not divided, so a stall
/// can use it up.
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
