//! A request batch: AddNewMsg and DelMsg requests (*adds* and *dels*) that were read together from one connection, and
//! their outcomes.
//!
//! A ring may process the messages of a batch in any order. It keeps only the order of requests for the same message.

use std::hint::select_unpredictable;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use super::latency_histogram::LatencyHistogram;
use super::message::{AddOutcome, DelOutcome, Message};
use super::refusal::Refusal;
use super::tick::Tick;

/// The outcome of a request for one message. A journal keeps these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// See [`AddOutcome::Added`].
    Added = 0,
    /// See [`AddOutcome::Rearmed`].
    Rearmed = 1,
    /// See [`DelOutcome::Unknown`].
    Unknown = 2,
    /// See [`DelOutcome::Acked`].
    Acked = 3,
    /// See [`DelOutcome::Late`].
    Late = 4,
    /// See [`DelOutcome::Withdrawn`].
    Withdrawn = 5,
}

/// The number of different outcomes.
const OUTCOMES: usize = Outcome::Withdrawn as usize + 1;

impl Outcome {
    /// Converts the outcome of an add. Must not be called for a del.
    pub const fn of_add(self) -> AddOutcome {
        if matches!(self, Outcome::Rearmed) { AddOutcome::Rearmed } else { AddOutcome::Added }
    }

    /// Converts the outcome of a del. Must not be called for an add.
    pub const fn of_del(self) -> DelOutcome {
        match self {
            Outcome::Acked => DelOutcome::Acked,
            Outcome::Late => DelOutcome::Late,
            Outcome::Withdrawn => DelOutcome::Withdrawn,
            _ => DelOutcome::Unknown,
        }
    }
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// AddNewMsg.
    Add {
        /// The ack timeout in ticks, from 1 to the number of slots. In a request that was just read, 0 stands for the
        /// default.
        ack_timeout_ticks: u16,
        /// The attempt number, which the timeout batch repeats.
        attempt: u8,
    },
    /// DelMsg.
    Del {
        /// Whether the messages are withdrawn because their push failed at once.
        withdraw: bool,
    },
}

impl Operation {
    /// Returns whether this is an add.
    pub const fn is_add(self) -> bool {
        matches!(self, Operation::Add { .. })
    }

    /// Returns the operation, with `ticks` in place of an ack timeout of 0.
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

    /// Returns the ack timeout in ticks, or 0 for a del.
    pub fn ack_timeout_ticks(self) -> u16 {
        let (is_add, ticks) = match self {
            Operation::Add { ack_timeout_ticks, .. } => (true, ack_timeout_ticks),
            Operation::Del { .. } => (false, 0),
        };
        // A processor would often predict a branch wrongly, because adds and dels arrive in no predictable order.
        select_unpredictable(is_add, ticks, 0)
    }
}

/// A request of a batch.
#[derive(Clone, Debug)]
pub struct Request {
    /// The id of the request, which the answer repeats.
    pub id: u64,
    /// The operation with its parameters.
    pub operation: Operation,
    /// The deadline of the messages. It is valid only if the request is an add that was applied.
    pub deadline: Tick,
    /// The refusal, if the request was refused.
    pub refusal: Option<Arc<Refusal>>,
    first: u32,
    count: u32,
}

impl Request {
    /// Returns whether this is an add that was not refused.
    pub const fn adds(&self) -> bool {
        self.operation.is_add() & self.refusal.is_none()
    }

    /// Returns the indexes of the request's messages in the batch.
    pub const fn range(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.count as usize
    }
}

/// Requests with their messages and outcomes. Clearing and reusing a batch avoids allocations.
#[derive(Debug, Default)]
pub struct RequestBatch {
    /// The messages of all requests. They are not stored in a batch of completed requests.
    messages: Vec<Message>,
    /// The requests, in the order of arrival.
    pub requests: Vec<Request>,
    /// The outcome of each message.
    outcomes: Vec<Outcome>,
    /// The number of messages with each outcome.
    totals: [u64; OUTCOMES],
    /// The time from the add to the Ack of each acknowledged message. Acks that arrived after the timeout count too.
    pub ack_latency: LatencyHistogram,
}

impl RequestBatch {
    /// Returns whether the batch has no requests.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns the messages of all requests, in the order of the requests.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Returns the outcome of each message. The outcomes are valid once the batch is complete.
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Appends a request with its messages. A message may occur several times; the ring applies the operation each
    /// time.
    pub fn push(&mut self, id: u64, operation: Operation, messages: impl Iterator<Item = Message>) {
        let first = self.messages.len();
        self.messages.extend(messages);
        let count = self.messages.len() - first;
        let (first, count) = (number(first), number(count));
        self.requests.push(Request { id, operation, deadline: Tick(0), refusal: None, first, count });
    }

    /// Returns the request that was pushed last.
    pub(super) fn last_request(&mut self) -> &mut Request {
        self.requests.last_mut().expect("a request was pushed")
    }

    /// Appends a request of one message.
    #[inline]
    pub fn push_single(&mut self, id: u64, operation: Operation, message: Message) {
        let first = number(self.messages.len());
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
        self.outcomes.extend(outcomes.inspect(|outcome| self.totals[*outcome as usize] += 1));
        self.push_of_outcomes(first, id, operation);
        self.last_request().deadline = deadline;
    }

    /// Appends a refused request. `messages` is the number of its messages.
    pub fn push_refused(&mut self, id: u64, operation: Operation, messages: usize, refusal: Arc<Refusal>) {
        let first = self.outcomes.len();
        self.outcomes.resize(first + messages, Outcome::Unknown);
        self.push_of_outcomes(first, id, operation);
        self.last_request().refusal = Some(refusal);
    }

    /// Appends a request with the outcomes from `first` on.
    fn push_of_outcomes(&mut self, first: usize, id: u64, operation: Operation) {
        let count = self.outcomes.len() - first;
        let (first, count) = (number(first), number(count));
        self.requests.push(Request { id, operation, deadline: Tick(0), refusal: None, first, count });
    }

    /// Appends a copy of a completed request of another batch.
    pub fn push_from(&mut self, batch: &RequestBatch, request: &Request) {
        let Request { id, operation, deadline, .. } = *request;
        match &request.refusal {
            None => self.push_completed(id, operation, deadline, batch.outcomes[request.range()].iter().copied()),
            Some(refusal) => self.push_refused(id, operation, request.range().len(), Arc::clone(refusal)),
        }
    }

    /// Appends copies of all requests of a completed batch.
    pub fn extend_completed(&mut self, batch: &RequestBatch) {
        let first = number(self.outcomes.len());
        self.outcomes.extend_from_slice(&batch.outcomes);
        let requests = batch.requests.iter();
        self.requests.extend(requests.map(|request| Request { first: first + request.first, ..request.clone() }));
        for (total, more) in self.totals.iter_mut().zip(batch.totals) {
            *total += more;
        }
        self.ack_latency.add(&batch.ack_latency);
    }

    /// Moves the outcomes of a completed batch into this one, which is empty, with copies of its requests.
    pub fn take_outcomes(&mut self, batch: &mut RequestBatch) {
        self.requests.extend_from_slice(&batch.requests);
        mem::swap(&mut self.outcomes, &mut batch.outcomes);
        mem::swap(&mut self.totals, &mut batch.totals);
        mem::swap(&mut self.ack_latency, &mut batch.ack_latency);
    }

    /// Moves all requests of a completed batch to the end of this one. `batch` then has no useful content.
    pub fn take_completed(&mut self, batch: &mut RequestBatch) {
        if self.is_empty() {
            mem::swap(self, batch);
        } else {
            self.extend_completed(batch);
        }
    }

    /// Resets all outcomes, their totals and the latencies. Must be called before the batch is processed.
    pub fn open(&mut self) {
        self.outcomes.clear();
        self.outcomes.resize(self.messages.len(), Outcome::Unknown);
        self.totals = [0; OUTCOMES];
        self.ack_latency = LatencyHistogram::default();
    }

    /// Returns the number of messages in all adds that are not refused.
    pub fn messages_to_add(&self) -> u64 {
        self.requests.iter().filter(|request| request.adds()).map(|request| u64::from(request.count)).sum()
    }

    /// Refuses all adds that are not refused yet.
    pub fn refuse_adds(&mut self, refusal: impl Into<Arc<Refusal>>) {
        let refusal = refusal.into();
        for request in self.requests.iter_mut().filter(|request| request.adds()) {
            request.refusal = Some(Arc::clone(&refusal));
        }
    }

    /// Sets the outcome of the message with this index.
    pub fn set(&mut self, message: usize, outcome: Outcome) {
        self.outcomes[message] = outcome;
        self.totals[outcome as usize] += 1;
    }

    /// Returns by how much the outcomes so far changed the number of messages in flight. A negative change wraps
    /// around.
    pub const fn in_flight_change(&self) -> u64 {
        let left = self.total(Outcome::Acked) + self.total(Outcome::Withdrawn);
        self.total(Outcome::Added).wrapping_sub(left)
    }

    /// Returns the number of messages with this outcome.
    pub const fn total(&self, outcome: Outcome) -> u64 {
        self.totals[outcome as usize]
    }

    /// Removes all requests. Frees the buffers if they have room for more than `most` messages.
    pub fn clear(&mut self, most: usize) {
        self.requests.clear();
        self.messages.clear();
        self.open();
        if self.messages.capacity().max(self.outcomes.capacity()) > most {
            *self = RequestBatch::default();
        }
    }
}

#[inline]
fn number(number: usize) -> u32 {
    u32::try_from(number).expect("a request batch ends far below 4 billion messages")
}
