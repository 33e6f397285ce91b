//! A patience that a pause of this process does not use up.

use std::pin::pin;
use std::time::Duration;

/// A patience is waited for in so many parts, if they are long enough for a timer that counts in ms: while the process
/// stands still, only one of them runs out.
const PARTS: u32 = 4;

/// As long as a part is at least.
const LEAST_PART: Duration = Duration::from_millis(5);

/// What is awaited, if it comes within a patience. A pause of this process takes away a quarter of one of 20 ms or more:
/// whoever is waited for has not had that time either, or is not heard yet.
pub async fn stall_aware_timeout<T>(patience: Duration, awaited: impl Future<Output = T>) -> Option<T> {
    let mut awaited = pin!(awaited);
    let parts = if patience < LEAST_PART * PARTS { 1 } else { PARTS };
    for _ in 0..parts {
        if let Ok(come) = tokio::time::timeout(patience / parts, &mut awaited).await {
            return Some(come);
        }
    }
    None
}
