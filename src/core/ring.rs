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

use super::answers::Answers;
use super::batch::TickCounts;
use super::burst::{Asks, Burst};
use super::message::{AddOutcome, DelOutcome, Message};
use super::refusal::Refusal;
use super::tally::LatencyTally;
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

/// Who asks: requests of one asker are dealt with in their order, and askers have turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Asker(pub(crate) u64);

impl Asker {
    /// One that is no other, where the default is whoever does not say who it is.
    #[must_use]
    pub fn unique() -> Asker {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Asker(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Messages that were pushed.
#[derive(Clone, Copy, Debug)]
pub struct AddNewMsg<'a> {
    /// The messages; repeats apply in order.
    pub messages: &'a [Message],
    /// Ticks that they may stay in flight, 1..=slots.
    pub ack_timeout_ticks: u16,
    /// Comes back with the timeout.
    pub attempt: u8,
    /// Who asks.
    pub asker: Asker,
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

/// Messages whose Ack arrived, or whose push failed.
#[derive(Clone, Copy, Debug)]
pub struct DelMsg<'a> {
    /// The messages; repeats apply in order.
    pub messages: &'a [Message],
    /// Whether their push failed at once: they count neither as acknowledged nor in the latency.
    pub withdraw: bool,
    /// Who asks.
    pub asker: Asker,
}

/// What became of a DelMsg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DelMsgAnswer {
    /// For each message, in order.
    pub outcomes: Vec<DelOutcome>,
    /// From add to del of those acknowledged, in time or late; a late message counts once.
    pub ack_latency: LatencyTally,
}

/// What an advance did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// The pointer stands where it should, or waits after a stall; come back then.
    Waiting(Instant),
    /// The pointer moved by one tick and decided the one it left.
    Moved {
        /// The tick that is decided.
        decided: Tick,
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
pub struct Expired {
    /// A tick whose messages are now all known, with its counts.
    pub counted: Option<(Tick, TickCounts)>,
    /// Messages that went to the outbox in this step, in one batch.
    pub published: Option<Published>,
    /// Whether there is more to do.
    pub more: bool,
    /// Whether this step only tidied up, which is better done with pauses: others want the processor.
    pub tidied: bool,
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

/// A ring that never waits: it answers in the call.
pub trait AtOnce: Send + Sync {
    /// Does what a burst asks for, as [`Ring::add_new_msg`] and [`Ring::del_msg`] would one by one, except for
    /// requests that have a refusal already.
    fn do_all(&self, burst: &mut Burst, now: Instant);

    /// Does one AddNewMsg, for [`Ring::add_new_msg`].
    fn add_at_once(&self, request: AddNewMsg<'_>, now: Instant) -> Reply<AddNewMsgAnswer> {
        let mut burst = Burst::default();
        let asks = Asks::Add { ack_timeout_ticks: request.ack_timeout_ticks, attempt: request.attempt };
        burst.push(0, asks, request.messages.iter().copied());
        self.do_all(&mut burst, now);
        let done = burst.requests.pop().expect("one was pushed");
        match done.refusal {
            Some(refusal) => Reply::refused(Arc::unwrap_or_clone(refusal)),
            None => Reply::ok(AddNewMsgAnswer {
                deadline: done.deadline,
                outcomes: burst.outcomes().iter().map(|outcome| outcome.of_add()).collect(),
            }),
        }
    }

    /// Does one DelMsg, for [`Ring::del_msg`].
    fn del_at_once(&self, request: DelMsg<'_>, now: Instant) -> Reply<DelMsgAnswer> {
        let mut burst = Burst::default();
        burst.push(0, Asks::Del { withdraw: request.withdraw }, request.messages.iter().copied());
        self.do_all(&mut burst, now);
        let done = burst.requests.pop().expect("one was pushed");
        match done.refusal {
            Some(refusal) => Reply::refused(Arc::unwrap_or_clone(refusal)),
            None => Reply::ok(DelMsgAnswer {
                outcomes: burst.outcomes().iter().map(|outcome| outcome.of_del()).collect(),
                ack_latency: burst.ack_latency,
            }),
        }
    }
}

/// A ring that answers many requests together, when it can.
pub trait Later: Send + Sync {
    /// Takes over what a burst asks for, as [`Ring::add_new_msg`] and [`Ring::del_msg`] would one by one. Each
    /// request is answered in `answers`, once; one that has a refusal already, with that. The requests have their
    /// place in the order of the asker when this returns.
    fn take_over(&self, burst: &mut Burst, asker: Asker, answers: &Arc<Answers>);
}

/// One wheel.
pub trait Ring: Send + Sync {
    /// Its dimensions.
    fn wheel(&self) -> Wheel;

    /// The ring as one that never waits, if it is one.
    fn at_once(&self) -> Option<&dyn AtOnce> {
        None
    }

    /// The ring as one that answers many requests together, if it is one.
    fn later(&self) -> Option<&dyn Later> {
        None
    }

    /// Takes messages into flight, all of them or, where it refuses, none.
    fn add_new_msg(&self, request: AddNewMsg<'_>, now: Instant) -> Reply<AddNewMsgAnswer>;

    /// Takes messages out of flight.
    fn del_msg(&self, request: DelMsg<'_>, now: Instant) -> Reply<DelMsgAnswer>;

    /// Moves the pointer by at most one tick, if the clock asks for it. Called by the ticker alone.
    fn advance(&self, now: Instant) -> Reply<Advance>;

    /// Does a step of what can be done for the next decision ahead of it; says whether there is more. Where nothing can,
    /// nothing is done.
    fn list_ahead(&self) -> bool {
        false
    }

    /// Does the next step with what is decided: towards the outbox, then out of memory.
    fn expire(&self, now: Instant) -> Reply<Expired>;

    /// Refuses new messages from now on and says what becomes of those in flight.
    fn drain(&self, now: Instant) -> Reply<Handover>;

    /// The ring at a glance.
    fn status(&self, now: Instant) -> Reply<RingStatus>;
}
