//! A burst: the adds and dels that came in one read, which a ring that never waits does all together, and which one
//! that answers later takes over together.
//!
//! Order is kept per message, which is all that anyone can tell: a ring may group the messages of a burst as it
//! likes, and the answers go out in the order of the requests.

use std::hint::select_unpredictable;
use std::iter::repeat_n;
use std::ops::Range;
use std::sync::Arc;

use super::message::{AddOutcome, DelOutcome, Message};
use super::refusal::Refusal;
use super::tally::LatencyTally;
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
pub enum Asks {
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

impl Asks {
    /// Whether it is an add.
    #[must_use]
    pub const fn is_add(self) -> bool {
        matches!(self, Asks::Add { .. })
    }

    /// Ticks that the messages may stay in flight; a del leaves them none.
    #[must_use]
    pub fn ack_timeout_ticks(self) -> u16 {
        let (is_add, ticks) = match self {
            Asks::Add { ack_timeout_ticks, .. } => (true, ack_timeout_ticks),
            Asks::Del { .. } => (false, 0),
        };
        // Adds and dels come as they like.
        select_unpredictable(is_add, ticks, 0)
    }
}

/// A request of a burst.
#[derive(Clone, Debug)]
pub struct Request {
    /// By which its answer is known.
    pub correlation: u32,
    /// What it asks for.
    pub asks: Asks,
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
        self.asks.is_add() & self.refusal.is_none()
    }

    /// Which of the burst's messages are its own.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.count as usize
    }
}

/// Requests, their messages, and what became of them. Cleared and used again, it allocates nothing.
#[derive(Debug, Default)]
pub struct Burst {
    messages: Vec<Message>,
    /// The requests, in the order in which they came.
    pub requests: Vec<Request>,
    /// For each message.
    outcomes: Vec<Outcome>,
    /// How many messages had each outcome.
    totals: [u64; OUTCOMES],
    /// From add to del of those acknowledged, in time or late.
    pub ack_latency: LatencyTally,
}

impl Burst {
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
    pub fn push(&mut self, correlation: u32, asks: Asks, messages: impl Iterator<Item = Message>) {
        let first = self.messages.len();
        self.messages.extend(messages);
        let count = self.messages.len() - first;
        let number = |number| u32::try_from(number).expect("a burst ends far below 4 billion messages");
        let (first, count) = (number(first), number(count));
        self.requests.push(Request { correlation, asks, deadline: Tick(0), refusal: None, first, count });
    }

    /// Appends a request of one message.
    #[inline]
    pub fn push_single(&mut self, correlation: u32, asks: Asks, message: Message) {
        let first = u32::try_from(self.messages.len()).expect("a burst ends far below 4 billion messages");
        self.messages.push(message);
        self.requests.push(Request { correlation, asks, deadline: Tick(0), refusal: None, first, count: 1 });
    }

    /// Appends a request that is done, with what became of each of its messages.
    pub fn push_answered(
        &mut self,
        correlation: u32,
        asks: Asks,
        deadline: Tick,
        outcomes: impl Iterator<Item = Outcome>,
    ) {
        let first = self.outcomes.len();
        self.outcomes.extend(outcomes);
        for outcome in &self.outcomes[first..] {
            self.totals[*outcome as usize] += 1;
        }
        let answered = self.outcomes.len() - first;
        self.push(correlation, asks, repeat_n(Message::default(), answered));
        self.requests.last_mut().expect("it was pushed").deadline = deadline;
    }

    /// Appends a request of so many messages that was refused.
    pub fn push_refused(&mut self, correlation: u32, asks: Asks, messages: usize, refusal: Refusal) {
        self.outcomes.resize(self.outcomes.len() + messages, Outcome::Unknown);
        self.push(correlation, asks, repeat_n(Message::default(), messages));
        self.requests.last_mut().expect("it was pushed").refusal = Some(Arc::new(refusal));
    }

    /// Makes the burst ready to be done: nothing has an outcome yet.
    pub fn open(&mut self) {
        self.outcomes.clear();
        self.outcomes.resize(self.messages.len(), Outcome::Unknown);
        self.totals = [0; OUTCOMES];
        self.ack_latency = LatencyTally::default();
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
        self.ack_latency = LatencyTally::default();
        if self.messages.capacity() > most {
            *self = Burst::default();
        }
    }
}
