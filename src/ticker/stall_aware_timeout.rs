//! A timeout that a stall of this process does not use up.

use std::pin::pin;
use std::time::Duration;

/// The number of parts of a timeout. A stall uses up only one of them.
const PARTS: u32 = 4;

/// The shortest part, since the timers of the runtime count in ms.
const SHORTEST_PART: Duration = Duration::from_millis(5);

/// Awaits `awaited` for at most `timeout`. A stall of this process uses up a quarter of a timeout of 20 ms or more.
/// During the stall, peers had no time to answer, or were not read.
pub(crate) async fn stall_aware_timeout<T>(timeout: Duration, awaited: impl Future<Output = T>) -> Option<T> {
    let mut awaited = pin!(awaited);
    let parts = if timeout < SHORTEST_PART * PARTS { 1 } else { PARTS };
    for _ in 0..parts {
        if let Ok(output) = tokio::time::timeout(timeout / parts, &mut awaited).await {
            return Some(output);
        }
    }
    None
}
