//! Adds and dels that were read together, and what became of their messages.
//!
//! A ring may do the messages of a batch in any order, except that it does the requests for one message in their order.

use std::hint::select_unpredictable;
use std::iter::repeat_n;
use std::ops::Range;
use std::sync::Arc;

use super::latency_histogram::LatencyHistogram;
use super::message::{AddOutcome, DelOutcome, Message};
use super::refusal::Refusal;
use super::tick::Tick;

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// See [`AddOutcome::Added`].
    Added,
    /// See [`AddOutcome::Rearmed`].
    Rearmed,
    /// See [`DelOutcome::Unknown`].
    Unknown,
    /// See [`DelOutcome::Acked`].
    Acked,
    /// See [`DelOutcome::Late`].
    Late,
    /// See [`DelOutcome::Withdrawn`].
    Withdrawn,
}

/// How many outcomes there are.
const OUTCOMES: usize = Outcome::Withdrawn as usize + 1;

impl Outcome {
    /// As the answer to an AddNewMsg; a DelMsg has no such outcome.
    #[must_use]
    pub const fn of_add(self) -> AddOutcome {
        match self {
            Outcome::Rearmed => AddOutcome::Rearmed,
            _ => AddOutcome::Added,
        }
    }

    /// As the answer to a DelMsg; an AddNewMsg has no such outcome.
    #[must_use]
    pub const fn of_del(self) -> DelOutcome {
        match self {
            Outcome::Acked => DelOutcome::Acked,
            Outcome::Late => DelOutcome::Late,
            Outcome::Withdrawn => DelOutcome::Withdrawn,
            _ => DelOutcome::Unknown,
        }
    }
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// AddNewMsg.
    Add {
        /// Ticks that the messages may stay in flight, 1..=slots.
        ack_timeout_ticks: u16,
        /// Comes back with the timeout.
        attempt: u8,
    },
    /// DelMsg.
    Del {
        /// Whether their push failed at once.
        withdraw: bool,
    },
}

impl Operation {
    /// Whether it is an add.
    #[must_use]
    pub const fn is_add(self) -> bool {
        matches!(self, Operation::Add { .. })
    }

    /// The same, where an ack timeout of 0 means this many ticks.
    #[inline]
    #[must_use]
    pub const fn with_default_timeout(self, ticks: u16) -> Operation {
        match self {
            Operation::Add { ack_timeout_ticks: 0, attempt } => {
                Operation::Add { ack_timeout_ticks: ticks, attempt }
            }
            given => given,
        }
    }

    /// Ticks that the messages may stay in flight; a del leaves them none.
    #[must_use]
    pub fn ack_timeout_ticks(self) -> u16 {
        let (is_add, ticks) = match self {
            Operation::Add { ack_timeout_ticks, .. } => (true, ack_timeout_ticks),
            Operation::Del { .. } => (false, 0),
        };
        // Adds and dels come as they like.
        select_unpredictable(is_add, ticks, 0)
    }
}

/// A request of a batch.
#[derive(Clone, Debug)]
pub struct Request {
    /// By which its answer is known.
    pub id: u64,
    /// What it asks for.
    pub operation: Operation,
    /// The deadline of its messages, where it is an add that was done; otherwise it says nothing.
    pub deadline: Tick,
    /// Why it was not done, if it was not.
    pub refusal: Option<Arc<Refusal>>,
    first: u32,
    count: u32,
}

impl Request {
    /// Whether it adds messages, and was not refused.
    #[must_use]
    pub const fn adds(&self) -> bool {
        self.operation.is_add() & self.refusal.is_none()
    }

    /// Which of the batch's messages are its own.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.count as usize
    }
}

/// Requests, their messages, and what became of them. Cleared and used again, it allocates nothing.
#[derive(Debug, Default)]
pub struct RequestBatch {
    messages: Vec<Message>,
    /// The requests, in the order in which they came.
    pub requests: Vec<Request>,
    /// For each message.
    outcomes: Vec<Outcome>,
    /// How many messages had each outcome.
    totals: [u64; OUTCOMES],
    /// From add to del of those acknowledged, in time or late.
    pub ack_latency: LatencyHistogram,
}

impl RequestBatch {
    /// Whether nothing is asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The messages of all requests, one request behind the other.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// What became of each message, once they are done.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Appends a request with its messages, repeats in order.
    pub fn push(&mut self, id: u64, operation: Operation, messages: impl Iterator<Item = Message>) {
        let first = self.messages.len();
        self.messages.extend(messages);
        let count = self.messages.len() - first;
        let number = |number| u32::try_from(number).expect("a request batch ends far below 4 billion messages");
        let (first, count) = (number(first), number(count));
        self.requests.push(Request { id, operation, deadline: Tick(0), refusal: None, first, count });
    }

    /// Appends a request of one message.
    #[inline]
    pub fn push_single(&mut self, id: u64, operation: Operation, message: Message) {
        let first = u32::try_from(self.messages.len()).expect("a request batch ends far below 4 billion messages");
        self.messages.push(message);
        self.requests.push(Request { id, operation, deadline: Tick(0), refusal: None, first, count: 1 });
    }

    /// Appends a completed request with the outcome of each of its messages.
    pub fn push_completed(
        &mut self,
        id: u64,
        operation: Operation,
        deadline: Tick,
        outcomes: impl Iterator<Item = Outcome>,
    ) {
        let first = self.outcomes.len();
        self.outcomes.extend(outcomes);
        for outcome in &self.outcomes[first..] {
            self.totals[*outcome as usize] += 1;
        }
        let completed = self.outcomes.len() - first;
        self.push(id, operation, repeat_n(Message::default(), completed));
        self.requests.last_mut().expect("it was pushed").deadline = deadline;
    }

    /// Appends a refused request of so many messages.
    pub fn push_refused(&mut self, id: u64, operation: Operation, messages: usize, refusal: Arc<Refusal>) {
        self.outcomes.resize(self.outcomes.len() + messages, Outcome::Unknown);
        self.push(id, operation, repeat_n(Message::default(), messages));
        self.requests.last_mut().expect("it was pushed").refusal = Some(refusal);
    }

    /// Appends a completed request of another batch.
    pub fn push_from(&mut self, batch: &RequestBatch, request: &Request) {
        let Request { id, operation, deadline, .. } = *request;
        match &request.refusal {
            None => self.push_completed(id, operation, deadline, batch.outcomes[request.range()].iter().copied()),
            Some(refusal) => self.push_refused(id, operation, request.range().len(), Arc::clone(refusal)),
        }
    }

    /// Makes the batch ready to be done: nothing has an outcome yet.
    pub fn open(&mut self) {
        self.outcomes.clear();
        self.outcomes.resize(self.messages.len(), Outcome::Unknown);
        self.totals = [0; OUTCOMES];
        self.ack_latency = LatencyHistogram::default();
    }

    /// How many messages its adds have, those refused left out.
    #[must_use]
    pub fn messages_to_add(&self) -> u64 {
        self.requests.iter().filter(|request| request.adds()).map(|request| u64::from(request.count)).sum()
    }

    /// Refuses all adds that are not refused yet.
    pub fn refuse_adds(&mut self, refusal: &Refusal) {
        let refusal = Arc::new(refusal.clone());
        for request in self.requests.iter_mut().filter(|request| request.adds()) {
            request.refusal = Some(Arc::clone(&refusal));
        }
    }

    /// Says what became of a message.
    pub fn set(&mut self, message: usize, outcome: Outcome) {
        self.outcomes[message] = outcome;
        self.totals[outcome as usize] += 1;
    }

    /// How many more messages are in flight for what was done so far, as a number that wraps around.
    #[must_use]
    pub const fn in_flight_change(&self) -> u64 {
        let left = self.total(Outcome::Acked) + self.total(Outcome::Withdrawn);
        self.total(Outcome::Added).wrapping_sub(left)
    }

    /// How many messages had this outcome.
    #[must_use]
    pub const fn total(&self, outcome: Outcome) -> u64 {
        self.totals[outcome as usize]
    }

    /// Forgets everything. Room for more than `most` messages is given back.
    pub fn clear(&mut self, most: usize) {
        self.requests.clear();
        self.messages.clear();
        self.outcomes.clear();
        self.totals = [0; OUTCOMES];
        self.ack_latency = LatencyHistogram::default();
        if self.messages.capacity() > most {
            *self = RequestBatch::default();
        }
    }
}
