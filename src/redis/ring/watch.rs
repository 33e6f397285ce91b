//! The leader's watch on Redis before each move.
//!
//! A leader through which nobody asks anything would not know that Redis stood still just before a decision, while
//! Acks wait at the other sidecars.

use std::sync::Arc;
use std::time::Duration;

use crate::redis::connection::link::Link;
use crate::redis::leader::term::{LeadershipTerm, WATCH};

/// It asks so often: a stall is seen but for as much of it.
const EVERY: Duration = Duration::from_millis(25);

/// Asks Redis whether it is there, before each move of a leader; never ends.
pub(super) async fn watch(link: Arc<Link>, office: Arc<LeadershipTerm>) {
    loop {
        let now = link.clock().now();
        let early = office.term().map_or(WATCH, |term| term.next.saturating_duration_since(now + WATCH));
        if early.is_zero() {
            if let Ok(session) = link.session() {
                link.probe(&session).await;
            }
            tokio::time::sleep(EVERY).await;
        } else {
            // Whoever leads may change, and so may its pace.
            tokio::time::sleep(early.min(WATCH)).await;
        }
    }
}
