//! Watches Redis before each move of the pointer.
//!
//! A leader without requests of clients would not know that Redis stalled just before a decision, while Acks wait at
//! the other sidecars.

use std::sync::Arc;
use std::time::Duration;

use crate::redis::context::RingContext;
use crate::redis::leader::term::WATCH;

/// How often the watch calls Redis: it sees all of a stall but at most so much.
const WATCH_EVERY: Duration = Duration::from_millis(25);

/// Calls Redis before each move of a leader; never ends.
pub(super) async fn watch(context: Arc<RingContext>) {
    let RingContext { link, term, .. } = &*context;
    loop {
        let now = link.clock().now();
        let early = term.get().map_or(WATCH, |term| term.next.at.saturating_duration_since(now + WATCH));
        if early.is_zero() {
            if let Ok(session) = link.session() {
                link.probe(&session).await;
            }
            tokio::time::sleep(WATCH_EVERY).await;
        } else {
            // Meanwhile the leader may change, and the time of the move.
            tokio::time::sleep(early.min(WATCH)).await;
        }
    }
}
