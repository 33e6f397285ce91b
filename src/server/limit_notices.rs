//! Logs that a limit is reached, for as long as requests are refused because of it.
//!
//! Refusals themselves are only counted: at a limit there are as many as there are requests. So the log follows the
//! counters.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::error;

use crate::clock::Clock;
use crate::core::refusal::Reason;
use crate::logging::WINDOW;
use crate::metrics::Metrics;

/// How often the counters are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The limits that an operator sets.
const LIMITS: [Reason; 3] = [Reason::MaxInFlight, Reason::MaxHeldAcks, Reason::TooManyConnections];

/// Logs the limits that are reached, for as long as it is awaited.
pub async fn report_reached_limits(metrics: Arc<Metrics>, clock: Arc<Clock>) -> Infallible {
    let mut notices = LIMITS.map(|reason| (reason, Notice::default()));
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        for (reason, notice) in &mut notices {
            if let Some(refused) = notice.due(metrics.refusals(*reason), clock.now()) {
                log(*reason, refused);
            }
        }
    }
}

/// The last log line about a limit.
#[derive(Debug, Default)]
struct Notice {
    logged: u64,
    logged_at: Option<Instant>,
}

impl Notice {
    /// The number of refusals to log now, if any: the first at once, and later ones together.
    fn due(&mut self, refused: u64, now: Instant) -> Option<u64> {
        let is_recent = self.logged_at.is_some_and(|at| now.saturating_duration_since(at) < WINDOW);
        if refused == self.logged || is_recent {
            return None;
        }
        self.logged_at = Some(now);
        Some(refused - std::mem::replace(&mut self.logged, refused))
    }
}

fn log(reason: Reason, refused: u64) {
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
        let (mut notice, begin) = (Notice::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(notice.due(0, at(0)), None);
        assert_eq!(notice.due(7, at(1)), Some(7));
        assert_eq!([notice.due(1_000_000, at(2)), notice.due(2_000_000, at(10))], [None, None]);
        assert_eq!(notice.due(3_000_007, at(11)), Some(3_000_000));
        assert_eq!([notice.due(3_000_007, at(12)), notice.due(3_000_007, at(99))], [None, None]);
        assert_eq!(notice.due(3_000_008, at(100)), Some(1));
    }
}
