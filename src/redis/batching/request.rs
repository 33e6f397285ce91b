//! Requests under way to a ring, and what they are answered or refused with.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::Waker;
use std::time::Duration;

use crate::core::completions::Completions;
use crate::core::refusal::{Reason, Refusal};
use crate::core::request_batch::{Operation, Outcome, RequestBatch};
use crate::core::ring::ConnectionId;
use crate::core::tick::Tick;

/// How far the requests of a link are answered.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Messages of dels that are not answered.
    pub(crate) unanswered_acks: AtomicU64,
    /// The number of the last chunk whose answer came.
    pub(crate) answered_chunk: AtomicU64,
}

/// What a frame asks for, and who waits for the answer. Unanswered it never ends: where it is dropped, it is refused.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) operation: Operation,
    pub(crate) connection: ConnectionId,
    id: u64,
    messages: usize,
    /// None once it is answered.
    completions: Option<Arc<Completions>>,
}

impl Asked {
    pub(crate) fn new(
        operation: Operation,
        connection: ConnectionId,
        id: u64,
        messages: usize,
        completions: &Arc<Completions>,
    ) -> Asked {
        Asked { operation, connection, id, messages, completions: Some(Arc::clone(completions)) }
    }

    pub(crate) fn is_add(&self) -> bool {
        matches!(self.operation, Operation::Add { .. })
    }

    /// Answers with a letter for each message. Whoever asked may have gone; what was asked for is done all the same.
    pub(crate) fn answer(mut self, deadline: Tick, letters: &[u8]) -> Option<Waker> {
        let completions = self.completions.take()?;
        completions.put(|batch| self.write(batch, deadline, letters))
    }

    fn write(&self, batch: &mut RequestBatch, deadline: Tick, letters: &[u8]) {
        let outcomes = letters.iter().map(|letter| outcome(*letter));
        batch.push_completed(self.id, self.operation, deadline, outcomes);
    }

    pub(crate) fn refuse(mut self, refusal: Refusal) -> Option<Waker> {
        self.end(refusal)
    }

    /// Puts something beside the answer.
    pub(crate) fn note(&self, write: impl FnOnce(&mut RequestBatch)) {
        if let Some(completions) = &self.completions {
            completions.note(write);
        }
    }

    fn end(&mut self, refusal: Refusal) -> Option<Waker> {
        let (id, operation, messages) = (self.id, self.operation, self.messages);
        self.completions.take()?.put(|batch| batch.push_refused(id, operation, messages, Arc::new(refusal)))
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if self.completions.is_some()
            && let Some(waker) = self.end(away())
        {
            waker.wake();
        }
    }
}

/// Requests of one connection that are done, one behind the other: they are answered together.
#[derive(Default)]
pub(crate) struct Run {
    done: Vec<(Asked, Tick)>,
    /// A letter for each message of them all.
    letters: Vec<u8>,
    latencies: Vec<Duration>,
    /// Messages of those that are dels.
    acks: u64,
}

impl Run {
    /// Whether it is empty, or this request comes from the same connection.
    pub(crate) fn takes(&self, asked: &Asked) -> bool {
        let same = |(last, _): &(Asked, Tick)| match (&last.completions, &asked.completions) {
            (Some(last), Some(completions)) => Arc::ptr_eq(last, completions),
            _ => false,
        };
        self.done.last().is_none_or(same)
    }

    /// Appends a request with a letter for each of its messages, and how long those acknowledged were in flight.
    pub(crate) fn push(
        &mut self,
        asked: Asked,
        deadline: Tick,
        letters: &[u8],
        latencies: impl Iterator<Item = Duration>,
    ) {
        self.acks += if asked.is_add() { 0 } else { letters.len() as u64 };
        self.letters.extend_from_slice(letters);
        self.latencies.extend(latencies);
        self.done.push((asked, deadline));
    }

    /// Messages of its dels.
    pub(crate) fn acks(&self) -> u64 {
        self.acks
    }

    /// Answers all of it.
    pub(crate) fn answer(&mut self) -> Option<Waker> {
        let Run { done, letters, latencies, acks } = self;
        let completions = Arc::clone(done.first()?.0.completions.as_ref()?);
        *acks = 0;
        completions.put(|batch| {
            latencies.drain(..).for_each(|latency| batch.ack_latency.record(latency, 1));
            let mut rest = &letters[..];
            for (mut asked, deadline) in done.drain(..) {
                let (own, others) = rest.split_at(asked.messages);
                rest = others;
                asked.completions = None;
                asked.write(batch, deadline, own);
            }
            letters.clear();
        })
    }
}

/// Completes the requests of a batch that are refused.
pub(crate) fn complete_refused(batch: &RequestBatch, completions: &Completions) {
    let mut refused = batch.requests.iter().filter(|request| request.refusal.is_some()).peekable();
    if refused.peek().is_none() {
        return;
    }
    if let Some(waker) =
        completions.put(|completed| refused.for_each(|request| completed.push_from(batch, request)))
    {
        waker.wake();
    }
}

fn outcome(letter: u8) -> Outcome {
    match letter {
        b'a' => Outcome::Added,
        b'r' => Outcome::Rearmed,
        b'k' => Outcome::Acked,
        b'l' | b'L' => Outcome::Late,
        b'w' => Outcome::Withdrawn,
        _ => Outcome::Unknown,
    }
}

/// Redis is known to be away.
pub(crate) fn away() -> Refusal {
    Refusal::new(Reason::StoreAway, "Redis is away and takes no new messages now: try again")
}

pub(crate) fn silent(text: &str) -> Refusal {
    Refusal::new(
        Reason::StoreSilent,
        format!("Redis did not answer ({text}); any part of the request may be applied: repeat it"),
    )
}

pub(crate) fn too_many(in_flight: Option<u64>, count: usize, max: u64) -> Refusal {
    let in_flight = in_flight.unwrap_or(max);
    Refusal::new(
        Reason::MaxInFlight,
        format!(
            "{in_flight} messages are in flight and {count} more would exceed the limit of {max}: try again when some \
             are acknowledged or have timed out, or raise --max-in-flight"
        ),
    )
}
