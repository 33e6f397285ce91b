//! Reports in the log that a limit is reached, for as long as requests are refused because of it.
//!
//! The refusals themselves are only counted: at the limit there are as many as there are requests. The log follows the
//! counters.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::error;

use crate::clock::Clock;
use crate::core::refusal::Reason;
use crate::logging::WINDOW;
use crate::metrics::Metrics;

/// How often the counters are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The limits that an operator sets.
const LIMITS: [Reason; 3] = [Reason::MaxInFlight, Reason::MaxHeldAcks, Reason::TooManyConnections];

/// Reports limits that are reached, for as long as it is awaited.
pub async fn report_full_limits(metrics: Arc<Metrics>, clock: Arc<Clock>) -> Infallible {
    let mut limits = LIMITS.map(Limit::new);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = clock.now();
        for limit in &mut limits {
            if let Some(refused) = limit.due(metrics.refusals(limit.reason), now) {
                report(limit.reason, refused);
            }
        }
    }
}

/// A limit, and what was reported of it.
#[derive(Debug)]
struct Limit {
    reason: Reason,
    reported: u64,
    reported_at: Option<Instant>,
}

impl Limit {
    fn new(reason: Reason) -> Limit {
        Limit { reason, reported: 0, reported_at: None }
    }

    /// How many refusals are to be reported now, if any: the first at once, and those that follow together.
    fn due(&mut self, refused: u64, now: Instant) -> Option<u64> {
        let lately = self.reported_at.is_some_and(|at| now.saturating_duration_since(at) < WINDOW);
        let new = refused - self.reported;
        if new == 0 || lately {
            return None;
        }
        (self.reported, self.reported_at) = (refused, Some(now));
        Some(new)
    }
}

fn report(reason: Reason, refused: u64) {
    match reason {
        Reason::MaxInFlight => error!(
            refused,
            "max-in-flight reached: rejecting adds, and nobody watches the messages in them; raise --max-in-flight, or \
             find out why messages are not acknowledged"
        ),
        Reason::MaxHeldAcks => error!(
            refused,
            "max-held-acks reached while Redis is unreachable: rejecting Acks, and their messages will time out; repair \
             Redis, or raise --max-held-acks"
        ),
        _ => error!(
            refused,
            "max-connections reached: closing new connections; share connections, or raise --max-connections"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_reported_at_once_and_then_together() {
        let (mut limit, begin) = (Limit::new(Reason::MaxInFlight), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(limit.due(0, at(0)), None);
        assert_eq!(limit.due(7, at(1)), Some(7));
        assert_eq!([limit.due(1_000_000, at(2)), limit.due(2_000_000, at(10))], [None, None]);
        assert_eq!(limit.due(3_000_007, at(11)), Some(3_000_000));
        assert_eq!([limit.due(3_000_007, at(12)), limit.due(3_000_007, at(99))], [None, None]);
        assert_eq!(limit.due(3_000_008, at(100)), Some(1));
    }
}
