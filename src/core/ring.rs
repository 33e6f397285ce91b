//! The contract of a ring: what every store's ring does, and how it is asked.
//!
//! # Invariants
//!
//! 1. A message accepted while tick `t` is due is in flight until it is acknowledged, withdrawn, re-armed,
//!    or decided with the tick `t + k` ([`super::tick`]).
//! 2. Whoever takes a message out of flight decides its outcome, and nobody else sees it in flight after
//!    that: DelMsg and expiry may race, one wins.
//! 3. The advance decides a tick. From then on DelMsg answers `late` for what was left in it, for one
//!    revolution, and the tick's counts, flags and batches no longer change.
//! 4. A decided message is in the ring or in the outbox, in exactly one batch of its tick.
//! 5. For each tick, `added = acked + timed_out`; withdrawn and re-armed messages count in neither.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::batch::TickCounts;
use super::completions::Completions;
use super::latency_histogram::LatencyHistogram;
use super::message::{AddOutcome, DelOutcome};
use super::refusal::Refusal;
use super::request_batch::RequestBatch;
use super::tick::{Tick, Wheel};

/// An answer that is there already or comes later.
///
/// A request takes its place in the order of its asker when it is made, not when it is awaited.
pub enum Reply<T> {
    /// It is there. `None` once it was taken.
    Ready(Option<Result<T, Refusal>>),
    /// It comes.
    Later(Pin<Box<dyn Future<Output = Result<T, Refusal>> + Send>>),
}

impl<T> Reply<T> {
    /// An answer that is there.
    #[must_use]
    pub fn ok(answer: T) -> Reply<T> {
        Reply::Ready(Some(Ok(answer)))
    }

    /// A refusal that is there.
    #[must_use]
    pub fn refused(refusal: Refusal) -> Reply<T> {
        Reply::Ready(Some(Err(refusal)))
    }
}

impl<T: Unpin> Future for Reply<T> {
    type Output = Result<T, Refusal>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Reply::Ready(answer) => Poll::Ready(answer.take().expect("a reply is not polled after its answer")),
            Reply::Later(answer) => answer.as_mut().poll(context),
        }
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reply::Ready(_) => "Reply::Ready",
            Reply::Later(_) => "Reply::Later",
        })
    }
}

/// A connection. The ring does the requests of a connection in their order, and serves connections in turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub(crate) u64);

impl ConnectionId {
    /// An id that no other connection has, nor a caller without one, which uses the default.
    #[must_use]
    pub fn unique() -> ConnectionId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        ConnectionId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What became of an AddNewMsg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddNewMsgAnswer {
    /// The deadline of its messages (of the last of them, where the wheel moved on meanwhile).
    pub deadline: Tick,
    /// For each message, in order.
    pub outcomes: Vec<AddOutcome>,
}

impl AddNewMsgAnswer {
    /// How many messages were re-armed; the others were added.
    #[must_use]
    pub fn rearmed(&self) -> usize {
        self.outcomes.iter().filter(|outcome| **outcome == AddOutcome::Rearmed).count()
    }
}

/// What became of a DelMsg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DelMsgAnswer {
    /// For each message, in order.
    pub outcomes: Vec<DelOutcome>,
    /// From add to del of those acknowledged, in time or late; a late message counts once.
    pub ack_latency: LatencyHistogram,
}

/// What an advance did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// The pointer stands where it should, or waits after a stall; come back then.
    Waiting(Instant),
    /// The pointer moved by one tick and decided the one it left.
    Moved {
        /// The tick that is decided.
        expired: Tick,
        /// How long after its time that was.
        lateness: Duration,
        /// The whole ticks by which every deadline was shifted before that: by a stall, an outage, or as nobody led.
        shifted: u64,
        /// When the pointer is to move next.
        next: Instant,
    },
    /// Nothing was moved: another leads, or the lease has run out. Ask the lease again.
    Deposed,
}

/// What one step of expiry did. Each step does a bounded amount of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishStep {
    /// A tick whose messages are now all known, with its counts.
    pub counted: Option<(Tick, TickCounts)>,
    /// Messages that went to the outbox in this step, in one batch.
    pub published: Option<Published>,
    /// Whether there is more to do.
    pub more: bool,
    /// Whether this step only tidied up, which is better done with pauses: others want the processor.
    pub reclaimed: bool,
    /// Whether nothing was done, because another leads or the lease has run out: ask the lease again.
    pub deposed: bool,
    /// With `counted`: earlier ticks whose work was not done when this one expired. Expiry that keeps up has none.
    pub behind: usize,
}

/// A batch that went to the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Number of its messages.
    pub messages: u64,
    /// How long after its tick was due to be decided, if it was: a drain hands messages out before that.
    pub lateness: Option<Duration>,
}

/// What becomes of the messages in flight when the sidecar goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// The store keeps them.
    Kept,
    /// They are decided now and will be handed out in batches flagged `drained`.
    HandedOut,
}

/// A ring at a glance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RingStatus {
    /// Which ring.
    pub ring: u16,
    /// The tick at which it stands.
    pub pointer: Tick,
    /// How long the pointer is behind its time.
    pub pointer_lag: Duration,
    /// The epoch of its leader.
    pub epoch: u64,
    /// The name of its leader; none where nobody leads.
    pub leader: Option<String>,
    /// How long that has been its leader; none where nobody else could lead.
    pub lease_age: Option<Duration>,
    /// Whether this sidecar is its leader.
    pub leads: bool,
    /// Why this sidecar may not move the pointer, though its store answers; none where it may.
    pub waits: Option<String>,
    /// Messages in flight, those in the closing tick included.
    pub in_flight: u64,
    /// Messages in each slot, those in the closing tick not included.
    pub slots: Vec<u64>,
    /// Messages of the tick at which the pointer stands: they can still be acknowledged.
    pub closing: u64,
}

/// When the requests of a submitted batch are complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Submitted {
    /// Now: their outcomes are in the batch.
    Completed,
    /// Later: each request is put into the completions once.
    Pending,
}

/// One wheel.
pub trait Ring: Send + Sync {
    /// Its dimensions.
    fn wheel(&self) -> Wheel;

    /// Adds and deletes what the requests of a batch name. A request that has a refusal already is completed with that.
    ///
    /// An AddNewMsg is applied to all of its messages or, if it is refused, to none. When this returns, the requests have
    /// their place in the order of their connection.
    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted;

    /// Moves the pointer by at most one tick, if the clock asks for it. Called by the ticker alone.
    fn advance(&self, now: Instant) -> Reply<Advance>;

    /// Does a step of what can be done for the next decision ahead of it; says whether there is more. Where nothing can,
    /// nothing is done.
    fn prelist(&self) -> bool {
        false
    }

    /// Does the next step with what is decided: towards the outbox, then out of memory.
    fn publish_expired(&self, now: Instant) -> Reply<PublishStep>;

    /// Refuses new messages from now on and says what becomes of those in flight.
    fn drain(&self, now: Instant) -> Reply<Handover>;

    /// The ring at a glance.
    fn status(&self, now: Instant) -> Reply<RingStatus>;
}
