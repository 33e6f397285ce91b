//! Requests under way to a ring, and what they are answered or refused with.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::oneshot;

use crate::core::message::{DelOutcome, Message};
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::{AddNewMsgAnswer, DelMsgAnswer};

/// What a frame asks for, and who waits for the answer.
pub(super) enum Request {
    Add {
        messages: Vec<Message>,
        ack_timeout_ticks: u16,
        attempt: u8,
        reply: oneshot::Sender<Result<AddNewMsgAnswer, Refusal>>,
    },
    Del {
        messages: Vec<Message>,
        withdraw: bool,
        counted: Counted,
        reply: oneshot::Sender<Result<DelMsgAnswer, Refusal>>,
    },
    /// Told once everything before it is answered or refused.
    Barrier(oneshot::Sender<()>),
}

/// Counts the messages of a DelMsg for as long as they are not answered.
#[derive(Debug)]
pub(super) struct Counted {
    count: u64,
    of: Arc<AtomicU64>,
}

impl Counted {
    /// Counts `count` messages; also returns how many were counted before.
    pub(super) fn new(count: u64, of: &Arc<AtomicU64>) -> (Counted, u64) {
        let before = of.fetch_add(count, Ordering::Relaxed);
        (Counted { count, of: Arc::clone(of) }, before)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.of.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// A request under way.
pub(super) struct Frame {
    pub(super) messages: Vec<Message>,
    /// Whether any of it was sent.
    pub(super) sent: bool,
    pub(super) work: Work,
}

pub(super) enum Work {
    Add {
        ack_timeout_ticks: u16,
        attempt: u8,
        answer: AddNewMsgAnswer,
        reply: oneshot::Sender<Result<AddNewMsgAnswer, Refusal>>,
    },
    Del {
        withdraw: bool,
        answer: DelMsgAnswer,
        /// Whoever asked may go; it is held all the same, and counts until it is answered.
        counted: Counted,
        reply: oneshot::Sender<Result<DelMsgAnswer, Refusal>>,
    },
}

impl Frame {
    pub(super) fn is_add(&self) -> bool {
        matches!(self.work, Work::Add { .. })
    }

    pub(super) fn is_complete(&self) -> bool {
        let answered = match &self.work {
            Work::Add { answer, .. } => answer.outcomes.len(),
            Work::Del { answer, .. } => answer.outcomes.len(),
        };
        answered == self.messages.len()
    }

    /// Whoever asked may have gone; what was asked for is done all the same.
    pub(super) fn answer(self) {
        match self.work {
            Work::Add { answer, reply, .. } => {
                let _ = reply.send(Ok(answer));
            }
            Work::Del { answer, reply, counted, .. } => {
                drop(counted);
                let _ = reply.send(Ok(answer));
            }
        }
    }

    pub(super) fn refuse(self, refusal: Refusal) {
        match self.work {
            Work::Add { reply, .. } => drop(reply.send(Err(refusal))),
            Work::Del { reply, .. } => drop(reply.send(Err(refusal))),
        }
    }
}

pub(super) fn outcome(letter: u8) -> DelOutcome {
    match letter {
        b'k' => DelOutcome::Acked,
        b'l' | b'L' => DelOutcome::Late,
        b'w' => DelOutcome::Withdrawn,
        _ => DelOutcome::Unknown,
    }
}

/// Redis is known to be away.
pub(super) fn away() -> Refusal {
    Refusal::new(Reason::StoreAway, "Redis is away and takes no new messages now: try again")
}

pub(super) fn silent(text: &str) -> Refusal {
    Refusal::new(
        Reason::StoreSilent,
        format!("Redis did not answer ({text}); any part of the request may be applied: repeat it"),
    )
}

pub(super) fn too_many(in_flight: Option<u64>, count: usize, max: u64) -> Refusal {
    let in_flight = in_flight.unwrap_or(max);
    Refusal::new(
        Reason::MaxInFlight,
        format!(
            "{in_flight} messages are in flight and {count} more would exceed the limit of {max}: try again when some \
             are acknowledged or have timed out, or raise --max-in-flight"
        ),
    )
}
