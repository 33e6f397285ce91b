//! Where time moves: the only caller of advance.
//!
//! One task turns the ring: it tends the lease, lets the connections read what waits in their sockets when
//! it is late, moves the pointer, and carries decided ticks to the outbox in small steps between the moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, warn};

use crate::clock::Clock;
use crate::core::alive::BEAT;
use crate::core::lease::{Leadership, Lease};
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::{Advance, Expired, Handover, Ring};
use crate::core::store::Store;
use crate::core::tally::LatencyTally;
use crate::gate::ReadGate;
use crate::metrics::Metrics;

/// How long a decision or a drain waits for the sockets at most, and never longer than half a tick: a move that
/// is late by a whole one counts as a stall.
const READ_PATIENCE: Duration = Duration::from_secs(1);

/// After a refusal of the store the ticker tries again this much later.
const RETRY: Duration = Duration::from_millis(100);

/// The sidecar is alive if the ticker's loop ran within this time.
pub const LIVENESS: Duration = Duration::from_secs(5);

/// Turns one ring.
pub struct Ticker {
    drains: mpsc::UnboundedReceiver<oneshot::Sender<Result<Handover, Refusal>>>,
    ring: Arc<dyn Ring>,
    lease: Arc<dyn Lease>,
    clock: Arc<Clock>,
    gate: Arc<ReadGate>,
    metrics: Arc<Metrics>,
    pulse: Arc<Pulse>,
    /// When the pointer is to move next, as far as is known.
    next_advance: Instant,
    /// Whether decided messages are on their way to the outbox.
    expiring: bool,
    renew_at: Option<Instant>,
    epoch: Option<u64>,
}

/// Asks a ticker to drain its ring.
#[derive(Clone, Debug)]
pub struct TickerHandle {
    drains: mpsc::UnboundedSender<oneshot::Sender<Result<Handover, Refusal>>>,
}

impl TickerHandle {
    /// Has the ring refuse new messages. Where it does not keep those in flight, they are all in the outbox
    /// when this returns.
    ///
    /// # Errors
    ///
    /// When the store refuses.
    pub async fn drain(&self) -> Result<Handover, Refusal> {
        let (answer, drained) = oneshot::channel();
        let gone = || Refusal::new(Reason::StoreSilent, "the ticker has ended");
        self.drains.send(answer).map_err(|_| gone())?;
        drained.await.unwrap_or_else(|_| Err(gone()))
    }
}

/// When the ticker's loop ran last.
#[derive(Debug)]
pub struct Pulse {
    start: Instant,
    last_ms: AtomicU64,
}

impl Pulse {
    /// A pulse that beats now.
    #[must_use]
    pub fn new(now: Instant) -> Pulse {
        Pulse { start: now, last_ms: AtomicU64::new(0) }
    }

    fn beat(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.start).as_millis();
        self.last_ms.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How long ago it beat.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        now.saturating_duration_since(self.start).saturating_sub(last)
    }
}

impl Ticker {
    /// A ticker for the ring of `store`.
    #[must_use]
    pub fn new(
        store: &dyn Store,
        clock: Arc<Clock>,
        gate: Arc<ReadGate>,
        metrics: Arc<Metrics>,
        pulse: Arc<Pulse>,
    ) -> (Ticker, TickerHandle) {
        let next_advance = clock.now();
        let (sender, drains) = mpsc::unbounded_channel();
        let ticker = Ticker {
            drains,
            ring: store.ring(),
            lease: store.lease(),
            clock,
            gate,
            metrics,
            pulse,
            next_advance,
            expiring: true,
            renew_at: None,
            epoch: None,
        };
        (ticker, TickerHandle { drains: sender })
    }

    /// Turns the ring until the task is aborted; aborting it between two moves loses nothing.
    pub async fn run(mut self) {
        loop {
            self.beat();
            let wait = match self.step().await {
                Ok(wait) => wait,
                Err(refusal) => {
                    warn!(%refusal, "the store refused to turn the ring; trying again in {RETRY:?}");
                    RETRY
                }
            };
            if wait.is_zero() {
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep(wait.min(BEAT)) => {}
                Some(answer) = self.drains.recv() => {
                    // Whoever asked may have given up; the ring is drained all the same.
                    let _ = answer.send(self.drain().await);
                }
            }
        }
    }

    async fn drain(&mut self) -> Result<Handover, Refusal> {
        // Acknowledgements that have arrived come before the decision.
        self.pass_gate().await;
        let handover = self.ring.drain(self.clock.now()).await?;
        loop {
            let expired = self.ring.expire(self.clock.now()).await?;
            self.count(&expired);
            if !expired.more {
                return Ok(handover);
            }
            self.beat();
            tokio::task::yield_now().await;
        }
    }

    fn beat(&mut self) {
        self.pulse.beat(self.clock.now());
        let stalled = self.clock.beat();
        if !stalled.is_zero() {
            self.metrics.stalls.inc();
            warn!(?stalled, "this process stood still; nobody is judged by their silence meanwhile");
        }
    }

    /// Does what the time asks for; returns how long there is nothing to do.
    async fn step(&mut self) -> Result<Duration, Refusal> {
        let now = self.clock.now();
        if let Some(retry_after) = self.tend_lease(now).await? {
            return Ok(retry_after);
        }
        if now >= self.next_advance {
            self.advance().await?;
            return Ok(Duration::ZERO);
        }
        if self.expiring {
            let expired = self.ring.expire(now).await?;
            self.expiring = expired.more;
            self.count(&expired);
            return Ok(Duration::ZERO);
        }
        Ok(self.next_advance - now)
    }

    /// Makes sure that this sidecar leads, or says when to ask again.
    async fn tend_lease(&mut self, now: Instant) -> Result<Option<Duration>, Refusal> {
        if self.epoch.is_some() && self.renew_at.is_none_or(|renew_at| now < renew_at) {
            return Ok(None);
        }
        match self.lease.tend(now).await? {
            Leadership::Leads { epoch, renew_at } => {
                if self.epoch.replace(epoch) != Some(epoch) {
                    self.metrics.leader_changes.inc();
                    self.expiring = true;
                }
                self.renew_at = renew_at;
                Ok(None)
            }
            Leadership::Follows { retry_after } => {
                self.epoch = None;
                Ok(Some(retry_after))
            }
        }
    }

    async fn advance(&mut self) -> Result<(), Refusal> {
        // Always, since a stall may end just as the move is due: nothing is late then, and yet Acks wait unread.
        self.pass_gate().await;
        match self.ring.advance(self.clock.now()).await? {
            Advance::Waiting(until) => self.next_advance = until,
            Advance::Moved { decided, lateness, next } => {
                debug!(tick = %decided, ?lateness, "decided");
                self.next_advance = next;
                self.expiring = true;
            }
            Advance::Shifted { missed, next } => {
                self.next_advance = next;
                self.metrics.shifted_ticks.inc_by(missed);
                warn!(
                    ticks = missed,
                    "the pointer could not move for that long: every deadline is shifted by it, so that nobody is \
                     declared offline for a stall on our side; look for a paused or starved process"
                );
            }
        }
        Ok(())
    }

    /// Has every connection read what waits in its socket. To wait for them is not to stand still.
    async fn pass_gate(&mut self) {
        let patience = READ_PATIENCE.min(self.ring.wheel().tick_length() / 2);
        let gate = Arc::clone(&self.gate);
        let mut passing = std::pin::pin!(gate.pass(patience));
        loop {
            tokio::select! {
                biased;
                all_passed = &mut passing => {
                    if !all_passed {
                        warn!("some connections were not read within {patience:?} before a decision; it is made now");
                    }
                    return;
                }
                () = tokio::time::sleep(BEAT) => self.beat(),
            }
        }
    }

    fn count(&self, expired: &Expired) {
        if let Some((tick, counts)) = expired.counted {
            let timed_out =
                if counts.drained { &self.metrics.messages_drained } else { &self.metrics.messages_timed_out };
            timed_out.inc_by(counts.timed_out());
            if counts.storm {
                self.metrics.storm_ticks.inc();
                error!(
                    %tick,
                    added = counts.added,
                    acked = counts.acked,
                    timed_out = counts.timed_out(),
                    "storm: more messages of one tick timed out than dead clients explain; its batches are \
                     flagged, look for a fault between the clients and the logic nodes before marking them offline"
                );
            }
        }
        if let Some(published) = expired.published {
            self.metrics.batches_published.inc();
            let mut tally = LatencyTally::default();
            tally.record(published.lateness, published.messages);
            self.metrics.timeout_lateness.add(&tally);
        }
    }
}
