//! Where time moves: the only caller of advance.
//!
//! One task turns a ring: it tends the lease, lets the connections read what waits in their sockets before
//! each move, moves the pointer, and carries decided ticks to the outbox in small steps between the moves.

mod behind;
mod counting;
mod handle;
mod heartbeat;
mod memory_reclaim;
pub mod precise_timer;
mod prelist;
mod read;
pub mod read_barrier;
mod recent;
mod stall_aware_timeout;
mod store_errors;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::{Notify, mpsc};
use tracing::{debug, warn};

pub use handle::TickerHandle;
pub use heartbeat::LIVENESS;
pub use recent::RECENT_TICKS;
pub(crate) use stall_aware_timeout::stall_aware_timeout;

use self::behind::Behind;
use self::handle::Answer;
use self::heartbeat::Heartbeat;
use self::memory_reclaim::MemoryReclaim;
use self::recent::Recent;
use self::store_errors::StoreErrors;
use crate::clock::Clock;
use crate::core::lease::Leadership;
use crate::core::refusal::Refusal;
use crate::core::ring::{Advance, Handover, PublishStep};
use crate::core::stall_aware_clock::BEAT;
use crate::core::store::RingParts;
use crate::metrics::Metrics;
use crate::ticker::precise_timer::PreciseTimer;
use crate::ticker::read_barrier::ReadBarrier;

/// After a refusal of the store the ticker tries again this much later.
const RETRY: Duration = Duration::from_millis(100);

/// Turns one ring.
pub struct Ticker {
    drains: mpsc::UnboundedReceiver<Answer>,
    seat: RingParts,
    clock: Arc<Clock>,
    read_barrier: Arc<ReadBarrier>,
    metrics: Arc<Metrics>,
    heartbeat: Arc<Heartbeat>,
    recent: Arc<Recent>,
    /// Rings when the lease may be free.
    vacancy: Arc<Notify>,
    /// When the pointer is to move next, as far as is known.
    next_advance: Instant,
    /// When the connections had last read what waited, or had their time for it.
    read_at: Option<Instant>,
    /// When the time of those that had not was over.
    gave_up_at: Option<Instant>,
    /// Whether decided messages are on their way to the outbox, or there is something to tidy up.
    expiring: bool,
    memory_reclaim: MemoryReclaim,
    /// Whether all is listed that can be before the next move.
    prelisted: bool,
    role: Role,
    /// When the lease is to be tended next; never where nobody else could lead.
    next_tend: Option<Instant>,
    /// The epoch under which this sidecar led last.
    last_epoch: Option<u64>,
    store_errors: StoreErrors,
    behind: Behind,
    /// After a refusal nothing is tried before this.
    resume_at: Instant,
}

/// What this sidecar is to the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The lease has not answered yet.
    Unknown,
    /// It leads, and nobody else could.
    Alone,
    /// It leads for as long as it renews its lease.
    Leads,
    /// Another leads, or nobody.
    Follows,
    /// It leaves the ring to others for good.
    Resigned,
}

impl Role {
    fn is_leading(self) -> bool {
        matches!(self, Role::Alone | Role::Leads)
    }
}

impl Ticker {
    /// A ticker for the ring of a seat.
    #[must_use]
    pub fn new(
        seat: &RingParts,
        clock: Arc<Clock>,
        read_barrier: Arc<ReadBarrier>,
        metrics: Arc<Metrics>,
    ) -> (Ticker, TickerHandle) {
        let next_advance = clock.now();
        let (sender, drains) = mpsc::unbounded_channel();
        let (heartbeat, recent) = (Arc::new(Heartbeat::new(next_advance)), Arc::<Recent>::default());
        let handle =
            TickerHandle { drains: sender, heartbeat: Arc::clone(&heartbeat), recent: Arc::clone(&recent) };
        let vacancy = Arc::new(Notify::new());
        let told = Arc::clone(&vacancy);
        seat.lease.on_vacancy(Box::new(move || told.notify_one()));
        let ticker = Ticker {
            drains,
            seat: seat.clone(),
            clock,
            read_barrier,
            metrics,
            heartbeat,
            recent,
            vacancy,
            next_advance,
            read_at: None,
            gave_up_at: None,
            expiring: true,
            memory_reclaim: MemoryReclaim::default(),
            prelisted: false,
            role: Role::Unknown,
            next_tend: Some(next_advance),
            last_epoch: None,
            store_errors: StoreErrors::new(seat.ring.wheel().tick_length()),
            behind: Behind::default(),
            resume_at: next_advance,
        };
        (ticker, handle)
    }

    /// Turns the ring until the task is aborted; aborting it between two moves loses nothing. `alarm` wakes it.
    pub async fn run(mut self, mut timer: PreciseTimer) {
        loop {
            self.beat();
            let wait = self.turn().await;
            if wait.is_zero() {
                // Whoever goes does not wait for the end of a large tick.
                if let Ok(answer) = self.drains.try_recv() {
                    self.drain_for(answer).await;
                }
                tokio::task::yield_now().await;
                continue;
            }
            let now = self.clock.now();
            tokio::select! {
                () = timer.until(now, now + wait.min(BEAT)) => {}
                () = self.vacancy.notified(), if self.role == Role::Follows => {
                    self.next_tend = Some(self.clock.now());
                }
                Some(answer) = self.drains.recv() => self.drain_for(answer).await,
            }
        }
    }

    /// Drains. Whoever asked may have given up; the ring is drained all the same.
    async fn drain_for(&mut self, answer: Answer) {
        let _ = answer.send(self.drain().await);
    }

    /// Does a step and says how long to wait after it. StoreErrors is told when it begins and when it is over.
    async fn turn(&mut self) -> Duration {
        let now = self.clock.now();
        if now < self.resume_at {
            return self.resume_at - now;
        }
        match self.step().await {
            Ok(wait) => {
                self.store_errors.none(self.clock.now(), self.role);
                wait
            }
            Err(refusal) => {
                self.store_errors.met(&refusal, self.clock.now());
                self.resume_at = self.clock.now() + RETRY;
                RETRY
            }
        }
    }

    async fn drain(&mut self) -> Result<Handover, Refusal> {
        // Acknowledgements that have arrived come before the decision, if this is one.
        if matches!(self.role, Role::Alone | Role::Unknown) {
            self.gave_up_at = None;
            self.pass_read_barrier().await;
        }
        let handover = self.beating(self.seat.ring.drain(self.clock.now())).await?;
        match handover {
            Handover::Kept => self.resign().await,
            Handover::HandedOut => loop {
                let expired = self.publish_expired().await?;
                if expired.reclaimed || !expired.more {
                    break;
                }
                self.beat();
                tokio::task::yield_now().await;
            },
        }
        Ok(handover)
    }

    /// Leaves the ring to others, if there can be others: the next leader is to miss no tick.
    async fn resign(&mut self) {
        if self.role == Role::Alone {
            return;
        }
        self.role = Role::Resigned;
        if let Err(refusal) = self.beating(self.seat.lease.release(self.clock.now())).await {
            warn!(%refusal, "the lease could not be given up: another sidecar leads by itself when it has run out");
        }
    }

    /// Does what the time asks for; returns how long there is nothing to do.
    async fn step(&mut self) -> Result<Duration, Refusal> {
        let now = self.clock.now();
        if self.role == Role::Resigned {
            return Ok(BEAT);
        }
        if let Some(wait) = self.maintain_lease(now).await? {
            return Ok(wait);
        }
        // The lease may have taken a while to answer.
        let now = self.clock.now();
        if now >= self.next_advance {
            self.advance().await?;
            return Ok(Duration::ZERO);
        }
        let wait = self.next_advance.saturating_duration_since(now);
        let before_reading = wait.saturating_sub(self.read_ahead());
        if before_reading.is_zero() && !self.has_read(now) {
            self.pass_read_barrier().await;
            return Ok(Duration::ZERO);
        }
        let wait = if before_reading.is_zero() { wait } else { before_reading };
        if self.expiring {
            let expired = self.publish_expired().await?;
            self.expiring = expired.more || expired.deposed;
            if !expired.reclaimed {
                return Ok(Duration::ZERO);
            }
            let took = self.clock.now().saturating_duration_since(now);
            return Ok(self.memory_reclaim.pause(took).min(wait.saturating_sub(took)));
        }
        Ok(if before_reading.is_zero() { wait } else { self.prelist(wait) })
    }

    /// Makes sure that this sidecar leads, or says when to ask again.
    async fn maintain_lease(&mut self, now: Instant) -> Result<Option<Duration>, Refusal> {
        let wait = self.next_tend.map(|next_tend| next_tend.saturating_duration_since(now));
        if wait != Some(Duration::ZERO) {
            return Ok(wait.filter(|_| !self.role.is_leading()));
        }
        match self.beating(self.seat.lease.maintain(now)).await? {
            Leadership::Leads { epoch, renew_at } => {
                if self.last_epoch.replace(epoch) != Some(epoch) {
                    self.metrics.leader_changes.inc();
                    self.expiring = true;
                    self.next_advance = now;
                } else if self.role == Role::Follows {
                    // The lease says one thing and the ring another: ask again, but not without pause.
                    self.role = Role::Unknown;
                    self.next_tend = Some(now + RETRY);
                    return Ok(Some(RETRY));
                }
                self.role = if renew_at.is_none() { Role::Alone } else { Role::Leads };
                self.next_tend = renew_at;
                Ok(None)
            }
            Leadership::Follows { retry_after } => {
                if self.role.is_leading() {
                    // Whatever was told while it led is over; what it gave up is not for itself.
                    let _ = self.vacancy.notified().now_or_never();
                }
                self.role = Role::Follows;
                self.next_tend = Some(now + retry_after);
                Ok(Some(retry_after))
            }
        }
    }

    /// The ring says that this sidecar does not lead: the lease is asked at once.
    fn deposed(&mut self) {
        self.role = Role::Follows;
        self.next_tend = Some(self.clock.now());
    }

    async fn advance(&mut self) -> Result<(), Refusal> {
        // Not only when it is late: a stall may end just as the move is due, and then too Acks wait unread.
        if !self.has_read(self.clock.now()) {
            self.pass_read_barrier().await;
        }
        match self.beating(self.seat.ring.advance(self.clock.now())).await? {
            Advance::Waiting(until) => self.next_advance = until,
            Advance::Moved { expired, lateness, shifted, next } => {
                debug!(tick = %expired, ?lateness, "decided");
                self.next_advance = next;
                (self.expiring, self.prelisted) = (true, false);
                self.tell_shifted(shifted);
            }
            Advance::Deposed => self.deposed(),
        }
        Ok(())
    }

    fn tell_shifted(&self, ticks: u64) {
        if ticks == 0 {
            return;
        }
        self.metrics.shifted_ticks.inc_by(ticks);
        warn!(
            ticks,
            "the pointer did not move for that long: every deadline is shifted by it, so that nobody is declared \
             offline for a stall on our side; look for a paused or starved process, an outage of Redis, or a time \
             without a leader"
        );
    }

    /// Does a step of expiry.
    async fn publish_expired(&mut self) -> Result<PublishStep, Refusal> {
        let expired = self.beating(self.seat.ring.publish_expired(self.clock.now())).await?;
        self.count(&expired);
        self.note_behind(&expired);
        if expired.deposed {
            self.deposed();
        }
        Ok(expired)
    }
}

#[cfg(test)]
mod tests;
