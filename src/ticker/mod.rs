//! The ticker of a ring, which moves the pointer from tick to tick. Each move expires a tick: its unacknowledged
//! messages time out. Nothing else calls `Ring::advance`.
//!
//! Each ring has one ticker, which is one task. The ticker maintains the lease and moves the pointer. Before each
//! move, the ticker makes the connections read their sockets (`read_barrier`), so that Acks that have arrived count.
//! Between the moves, the ticker publishes expired messages to the outbox in small steps.

pub(crate) mod precise_timer;
pub(crate) mod read_barrier;
mod reports;
mod turn;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::warn;

use self::precise_timer::PreciseTimer;
use self::read_barrier::ReadBarrier;
use self::reports::Reports;
use crate::clock::Clock;
use crate::core::{CLOCK_BEAT, DrainOutcome, Reason, Refusal, RingParts, Tick, TickCounts};
use crate::metrics::Metrics;

/// The liveness limit. The process is live if the loop of each ticker ran within this time.
pub const LIVENESS: Duration = Duration::from_secs(5);

/// The number of expired ticks that are kept for `/status`. With the default wheel, this is a minute, or four
/// revolutions.
pub const RECENT_TICKS: usize = 60;

/// The ticker of one ring.
pub struct Ticker {
    drains: mpsc::UnboundedReceiver<DrainReply>,
    parts: RingParts,
    clock: Arc<Clock>,
    read_barrier: Arc<ReadBarrier>,
    handle: TickerHandle,
    reports: Reports,
    /// Notified when the lease may be free.
    vacancy: Arc<Notify>,
    role: Role,
    /// The epoch in which this sidecar led last.
    last_epoch: Option<u64>,
    /// When this sidecar may be a candidate again if it loses the lease: when the first renewal after its election was
    /// due. A lease that is lost so soon may be lost again after each election, and elections stop the pointer.
    candidate_again_at: Option<Instant>,
    /// When to maintain the lease again; `None` if no other sidecar can lead.
    next_lease_call: Option<Instant>,
    /// When to call `Ring::advance` next.
    next_advance: Instant,
    /// When the ticker goes on after a refusal of the store.
    resume_at: Instant,
    /// When the last read barrier ended.
    read_at: Option<Instant>,
    /// Whether the last read barrier ended by its timeout.
    read_timed_out: bool,
    /// Whether there may be expired messages to publish, or memory to reclaim.
    expiring: bool,
    /// Whether the ring has listed all messages that it lists before the next move.
    prelisted: bool,
    /// The time spent on reclaiming memory and on listing messages before a move, since the last pause.
    reclaim_time: Duration,
}

/// The role of this sidecar for the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The role is unknown. Either the lease has not answered yet, or the lease says that this sidecar leads and the
    /// ring says that it does not.
    Unknown,
    /// This sidecar leads, and no other sidecar can lead.
    SoleLeader,
    /// This sidecar leads as long as it renews its lease.
    Leader,
    /// Another sidecar leads, or no sidecar leads.
    Follower,
    /// This sidecar has drained and left the ring to other sidecars.
    Resigned,
}

impl Role {
    fn is_leading(self) -> bool {
        matches!(self, Role::SoleLeader | Role::Leader)
    }
}

impl Ticker {
    /// Creates a ticker for a ring, and its handle.
    pub fn new(
        parts: &RingParts,
        clock: Arc<Clock>,
        read_barrier: Arc<ReadBarrier>,
        metrics: Arc<Metrics>,
    ) -> (Ticker, TickerHandle) {
        let now = clock.now();
        let (sender, drains) = mpsc::unbounded_channel();
        let handle = TickerHandle::new(sender, now);
        let vacancy = Arc::new(Notify::new());
        let notified = Arc::clone(&vacancy);
        parts.lease.on_lease_free(Box::new(move || notified.notify_one()));
        let ticker = Ticker {
            drains,
            parts: parts.clone(),
            clock,
            read_barrier,
            handle: handle.clone(),
            reports: Reports { metrics, behind_since: None, refused_at: None },
            vacancy,
            role: Role::Unknown,
            last_epoch: None,
            candidate_again_at: None,
            next_lease_call: Some(now),
            next_advance: now,
            resume_at: now,
            read_at: None,
            read_timed_out: false,
            expiring: true,
            prelisted: false,
            reclaim_time: Duration::ZERO,
        };
        (ticker, handle)
    }

    /// Runs until the task is aborted. Aborting the task between two moves loses nothing. `timer` wakes the task.
    pub async fn run(mut self, mut timer: PreciseTimer) {
        loop {
            self.beat();
            let wait = self.turn().await;
            if wait.is_zero() {
                // Looks for a drain here too, so that the drain does not wait until all messages of a large tick are
                // published.
                if let Ok(reply) = self.drains.try_recv() {
                    self.drain_and_reply(reply).await;
                }
                tokio::task::yield_now().await;
                continue;
            }
            let now = self.clock.now();
            tokio::select! {
                () = timer.until(now, now + wait.min(CLOCK_BEAT)) => {}
                () = self.vacancy.notified(), if self.role == Role::Follower => {
                    self.next_lease_call = Some(self.clock.now());
                }
                Some(reply) = self.drains.recv() => self.drain_and_reply(reply).await,
            }
        }
    }

    /// Drains the ring, and sends the answer, even if no one waits for it any more.
    async fn drain_and_reply(&mut self, reply: DrainReply) {
        let _ = reply.send(self.drain().await);
    }

    async fn drain(&mut self) -> Result<DrainOutcome, Refusal> {
        // Acks that have arrived are read first, because the drain may expire their messages.
        if matches!(self.role, Role::SoleLeader | Role::Unknown) {
            self.read_timed_out = false;
            self.wait_until_read().await;
        }
        let handover = self.with_heartbeat(self.parts.ring.drain(self.clock.now())).await?;
        match handover {
            DrainOutcome::Kept => self.resign().await,
            DrainOutcome::Published => loop {
                let step = self.publish_expired().await?;
                if step.reclaimed || !step.more {
                    break;
                }
                self.beat();
                tokio::task::yield_now().await;
            },
        }
        Ok(handover)
    }

    /// Releases the lease, if other sidecars can lead, so that the next leader can begin at once and misses no tick.
    async fn resign(&mut self) {
        if self.role == Role::SoleLeader {
            return;
        }
        self.role = Role::Resigned;
        if let Err(refusal) = self.with_heartbeat(self.parts.lease.release(self.clock.now())).await {
            warn!(%refusal, "the lease could not be released: another sidecar leads once it has expired");
        }
    }

    fn beat(&self) {
        self.handle.record_heartbeat(self.clock.now());
        self.reports.stall(self.clock.beat());
    }

    /// Awaits `work` with a regular heartbeat, so that the wait does not count as a stall.
    async fn with_heartbeat<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep(CLOCK_BEAT) => self.beat(),
            }
        }
    }
}

/// The sender for the answer to a drain.
type DrainReply = oneshot::Sender<Result<DrainOutcome, Refusal>>;

/// A handle through which other parts of the sidecar use a ticker.
#[derive(Clone, Debug)]
pub struct TickerHandle {
    drains: mpsc::UnboundedSender<DrainReply>,
    /// When the loop of the ticker ran last.
    heartbeat: Arc<Mutex<Instant>>,
    /// The last ticks that this sidecar expired. A follower does not see ticks that another sidecar expires. A tick
    /// is missing if the answer of the store was lost.
    recent_ticks: Arc<Mutex<VecDeque<(Tick, TickCounts)>>>,
}

impl TickerHandle {
    fn new(drains: mpsc::UnboundedSender<DrainReply>, now: Instant) -> TickerHandle {
        TickerHandle { drains, heartbeat: Arc::new(Mutex::new(now)), recent_ticks: Arc::default() }
    }

    /// Returns the time since the loop of the ticker ran last.
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.heartbeat.lock())
    }

    /// Returns the last expired ticks, oldest first: at most [`RECENT_TICKS`], each once.
    pub fn recent(&self) -> Vec<(Tick, TickCounts)> {
        self.recent_ticks.lock().iter().copied().collect()
    }

    /// Makes the ring refuse new messages, and waits for the end of the drain. If the store does not keep the messages
    /// in flight, all of them are in the outbox at the end. If the store keeps them and is shared, the lease is
    /// released at the end, so that another sidecar can lead at once.
    ///
    /// # Errors
    ///
    /// Fails if the store refuses or the ticker has ended.
    pub async fn drain(&self) -> Result<DrainOutcome, Refusal> {
        let (reply, drained) = oneshot::channel();
        let ended = || Refusal::new(Reason::StoreTimeout, "the ticker has ended");
        self.drains.send(reply).map_err(|_| ended())?;
        drained.await.unwrap_or_else(|_| Err(ended()))
    }

    fn record_heartbeat(&self, now: Instant) {
        *self.heartbeat.lock() = now;
    }

    /// Records an expired tick. A tick of a drain is left out, because its messages did not time out.
    fn record_tick(&self, tick: Tick, counts: TickCounts) {
        if counts.drained {
            return;
        }
        let mut ticks = self.recent_ticks.lock();
        // A ring that was lost and recreated may expire a tick a second time.
        while ticks.back().is_some_and(|(last, _)| *last >= tick) {
            ticks.pop_back();
        }
        if ticks.len() == RECENT_TICKS {
            ticks.pop_front();
        }
        ticks.push_back((tick, counts));
    }
}

#[cfg(test)]
mod tests;
