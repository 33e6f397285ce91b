//! Logs that a limit is reached. Repeats this every ten seconds while requests are refused because of the limit.
//!
//! At a limit, every further request is refused. A line for each refusal would flood the log. So refusals are only
//! counted, and this module logs by how much the counters have grown.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::time::sleep;
use tracing::{error, warn};

use crate::core::Reason;
use crate::logging::WINDOW;
use crate::metrics::Metrics;

/// How often the counters are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The limits that an operator sets. Each has the reason of its refusals, and the line to log when the limit is
/// reached.
const LIMITS: [(Reason, &str); 4] = [
    (
        Reason::MaxInFlight,
        "max-in-flight reached: rejecting adds, so their messages are not tracked; raise --max-in-flight, or \
         find out why messages are not acknowledged",
    ),
    (
        Reason::MaxHeldAcks,
        "max-held-acks reached while Redis is unreachable: rejecting Acks, and their messages will time out; repair \
         Redis, or raise --max-held-acks",
    ),
    (
        Reason::TooManyConnections,
        "max-connections reached: closing new connections; share connections, or raise --max-connections",
    ),
    (
        Reason::ConnectionMemory,
        "max-connection-memory reached: closing the connections with the largest buffers; find clients that do not \
         read or send half requests, or raise --max-connection-memory",
    ),
];

/// Logs each limit that is reached. Never returns.
pub async fn report_reached_limits(metrics: Arc<Metrics>) {
    let refusals = LIMITS.map(|(reason, text)| {
        let counter = metrics.refusals.of(reason).clone();
        report(move || counter.get(), move |refused| error!(refused, "{text}"))
    });
    let evicted = metrics.connections_evicted.clone();
    let evictions = report(
        move || evicted.get(),
        |closed| {
            warn!(
                closed,
                "too many connections have not sent an accepted Hello: closing the oldest of the address with the most; \
                 admitted clients are still served; look for a port scan, or for clients without the token"
            );
        },
    );
    join(join_all(refusals), evictions).await;
}

/// Calls `log` with the number of new refusals: within a second after the first, and then at most once per [`WINDOW`].
/// `refusals` returns the total number of refusals.
async fn report(refusals: impl Fn() -> u64, mut log: impl FnMut(u64)) -> Infallible {
    let mut logged = 0;
    loop {
        sleep(CHECK_INTERVAL).await;
        let refused = refusals();
        if refused > logged {
            log(refused - logged);
            logged = refused;
            sleep(WINDOW.saturating_sub(CHECK_INTERVAL)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn refusals_are_reported_at_once_and_then_together() {
        let refused = Arc::new(AtomicU64::new(0));
        let (counter, (log, logged)) = (Arc::clone(&refused), mpsc::channel());
        let log = move |count| log.send(count).unwrap();
        tokio::spawn(report(move || counter.load(Ordering::Relaxed), log));
        let begin = tokio::time::Instant::now();
        for (at, total, reported) in [
            (0, 0, None),
            (1, 7, Some(7)),
            (2, 1_000_000, None),
            (10, 2_000_000, None),
            (11, 3_000_007, Some(3_000_000)),
            (12, 3_000_007, None),
            (99, 3_000_007, None),
            (100, 3_000_008, Some(1)),
        ] {
            refused.store(total, Ordering::Relaxed);
            tokio::time::sleep_until(begin + Duration::from_secs(at) + CHECK_INTERVAL / 2).await;
            assert_eq!(logged.try_recv().ok(), reported, "after {at} s");
        }
    }
}
