//! Drains a sidecar: ends it without losing its messages in flight. Either the store keeps these messages
//! (`DrainOutcome::Kept`), or they are delivered early in timeout batches (`DrainOutcome::Published`).

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, join_all};
use tracing::{Instrument, error, info, warn};

use super::{Sidecar, span_of};
use crate::clock::Clock;
use crate::core::{DrainOutcome, GroupBacklog, Reason, Refusal, RingParts};
use crate::delivery::Delivery;
use crate::server::{DRAIN_GRACE, Shared};
use crate::ticker::TickerHandle;

/// How often a drain checks whether all batches are acknowledged.
const BACKLOG_POLL: Duration = Duration::from_millis(10);

/// How long connections may take to send their last answers.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the sidecar may take to release the batches of subscribers that have left.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long the store may take to close.
const STORE_TIMEOUT: Duration = Duration::from_secs(6);

/// The maximum time from the beginning of a drain until the store is closed. It is below 10 s, because the process must
/// end within 10 s of the beginning.
const STORE_DEADLINE: Duration = Duration::from_millis(9_700);

impl Sidecar {
    /// Refuses new messages, delivers or keeps all messages in flight, and ends all tasks.
    ///
    /// # Errors
    ///
    /// If messages in flight or batches are lost, or if the store could not save its state. All other steps of the drain
    /// are done even then.
    pub fn drain(self) -> BoxFuture<'static, Result<(), Refusal>> {
        Box::pin(self.drain_and_end())
    }

    async fn drain_and_end(self) -> Result<(), Refusal> {
        let Sidecar { health, shared, server, mut tickers, mut tasks, drain_timeout, _threads, .. } = self;
        let begun = shared.clock.now();
        let deadline = begun + drain_timeout;
        health.draining.store(true, Ordering::Relaxed);
        server.drain();
        info!("draining: new messages are refused");
        // Drain the rings first. If other sidecars share the store, another sidecar can then lead the rings while this
        // sidecar still serves.
        let handover = drain_rings(&shared, health.tickers(), deadline).await;
        if handover == DrainOutcome::Published {
            wait_for_subscribers(&shared, deadline).await;
        }
        // Serve for at least this time, because a client that has not read GoAway yet may still send requests.
        tokio::time::sleep_until((begun + DRAIN_GRACE).into()).await;
        // Stop the tickers before the server closes: no tick is allowed to expire once Acks are no longer read. This
        // also stops a ticker that is moving its pointer.
        tickers.shutdown().await;
        server.close(CLOSE_TIMEOUT).await;
        shared.delivery.wait_until_groups_left(LEAVE_TIMEOUT).await;
        if handover == DrainOutcome::Published {
            for GroupBacklog { group, batches, .. } in unacknowledged(&shared.delivery).await {
                error!(
                    %group,
                    batches,
                    "this group did not acknowledge its last batches, and they end with the process: subscribe before \
                     the sidecar stops, or keep the wheel with --journal"
                );
            }
        }
        tasks.shutdown().await;
        let last = (begun + STORE_DEADLINE).min(shared.clock.now() + STORE_TIMEOUT);
        let closing = shared.store.close();
        let Ok(kept) = tokio::time::timeout_at(last.into(), closing).await else {
            if shared.store.rings().iter().any(|seat| !seat.outbox.is_shared()) {
                let text = "the journal was not written in time, and its last changes end with this process";
                return Err(Refusal::new(Reason::StoreTimeout, text));
            }
            warn!(
                "drained, but the store did not end in time: the other sidecars take over its batches by themselves"
            );
            return Ok(());
        };
        info!("drained; {}", kept?);
        Ok(())
    }
}

/// Drains all rings at the same time. Returns `Published` if at least one ring delivers its messages early, and
/// otherwise `Kept`.
async fn drain_rings(shared: &Shared, tickers: &[TickerHandle], deadline: Instant) -> DrainOutcome {
    let rings = shared.store.rings().iter().zip(tickers).enumerate();
    let draining = rings.map(|(ring, (parts, ticker))| {
        drain_ring(parts, ticker, &shared.clock, deadline).instrument(span_of(ring, &*shared.store))
    });
    let handovers = join_all(draining).await;
    if handovers.contains(&DrainOutcome::Published) { DrainOutcome::Published } else { DrainOutcome::Kept }
}

async fn drain_ring(parts: &RingParts, ticker: &TickerHandle, clock: &Clock, deadline: Instant) -> DrainOutcome {
    let drained = tokio::time::timeout_at(deadline.into(), ticker.drain()).await;
    match &drained {
        Ok(Ok(DrainOutcome::Kept)) => return DrainOutcome::Kept,
        Ok(Ok(DrainOutcome::Published)) => {}
        Ok(Err(refusal)) => warn!(
            %refusal,
            "the store refused to drain a ring: look at the store; other sidecars continue with the messages in Redis"
        ),
        Err(_) => error!(
            "a ring could not be drained in time: Redis keeps its messages, but the memory store loses them when the \
             process ends; keep them with --journal, or raise --drain-timeout"
        ),
    }
    // Release the lease here, because the ticker has done so only if it returned `Kept`.
    if let Err(refusal) = parts.lease.release(clock.now()).await {
        warn!(%refusal, "the lease could not be released: another sidecar leads once the lease expires");
    }
    if parts.outbox.is_shared() { DrainOutcome::Kept } else { DrainOutcome::Published }
}

/// Waits until every group with a subscriber on this sidecar has acknowledged all batches, but at most until
/// `deadline`. Stops waiting if the outbox does not report its batches.
async fn wait_for_subscribers(shared: &Shared, deadline: Instant) {
    let delivery = &shared.delivery;
    while shared.clock.now() < deadline
        && unacknowledged(delivery).await.iter().any(|backlog| delivery.subscribers(&backlog.group) > 0)
    {
        tokio::time::sleep(BACKLOG_POLL).await;
    }
}

/// Returns the groups that have not acknowledged all batches. If the outbox does not report its batches, logs this and
/// returns no groups.
async fn unacknowledged(delivery: &Delivery) -> Vec<GroupBacklog> {
    match delivery.backlog().await {
        Ok(backlog) => backlog.groups.into_iter().filter(|group| group.batches > 0).collect(),
        Err(refusal) => {
            warn!(%refusal, "the outbox does not report its batches, and the drain does not wait: look at the store");
            Vec::new()
        }
    }
}
