//! How a connection submits its requests, to one ring or to several.
//!
//! ```text
//!   submit ──▶ one ring: the batch as it is      ──▶ completed in the call, or later in the completions
//!          ──▶ several: a batch for each of them ──▶ the completions; parts of a request are joined as they are taken
//! ```

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::completions::Completions;
use super::refusal::Refusal;
use super::request_batch::{Operation, Outcome, Request, RequestBatch};
use super::ring::{ConnectionId, Submitted};
use super::rings::{Rings, one_refusal, ring_of};
use super::tick::Tick;

/// The first byte of the id of a part of a request. Connections have lower ids.
const PART: u8 = 0x80;

/// Room for so many messages is kept for each ring from one batch of a thread to the next.
const MAX_KEPT_MESSAGES: usize = 4_096;

thread_local! {
    /// A batch for each ring, used again by every batch of a thread.
    static PARTS: Cell<Vec<RequestBatch>> = const { Cell::new(Vec::new()) };
}

/// Submits the requests of one connection, and takes them when they are complete.
pub struct Requester {
    rings: Rings,
    connection: ConnectionId,
    completions: Arc<Completions>,
    split: SplitRequests,
}

impl Requester {
    /// A requester with a connection id of its own.
    pub(super) fn new(rings: Rings) -> Requester {
        Requester {
            rings,
            connection: ConnectionId::unique(),
            completions: Arc::default(),
            split: SplitRequests::default(),
        }
    }

    /// Submits a batch: see [`super::ring::Ring::submit`]. The ids of its requests are below 2^63, and none is that of a
    /// request that is still pending.
    pub fn submit(&mut self, batch: &mut RequestBatch, now: Instant) -> Submitted {
        if let [ring] = self.rings.all() {
            return ring.submit(batch, self.connection, &self.completions, now);
        }
        let mut parts = PARTS.take();
        parts.resize_with(self.rings.all().len(), RequestBatch::default);
        self.split.partition(batch, &mut parts);
        let mut waker = None;
        for (ring, part) in self.rings.all().iter().zip(&mut parts).filter(|(_, part)| !part.is_empty()) {
            if ring.submit(part, self.connection, &self.completions, now) == Submitted::Completed {
                let put = |completed: &mut RequestBatch| {
                    completed.ack_latency.add(&part.ack_latency);
                    part.requests.iter().for_each(|request| completed.push_from(part, request));
                };
                waker = waker.or(self.completions.put(put));
            }
            part.clear(MAX_KEPT_MESSAGES);
        }
        PARTS.set(parts);
        if let Some(waker) = waker {
            waker.wake();
        }
        Submitted::Pending
    }

    /// Takes the requests that are complete, in exchange for an empty batch. If there are none, the caller is woken later.
    pub fn poll(&mut self, context: &mut Context<'_>, completed: &mut RequestBatch) -> Poll<()> {
        if self.rings.all().len() == 1 {
            return self.completions.poll(context, completed);
        }
        while completed.is_empty() {
            let mut taken = RequestBatch::default();
            ready!(self.completions.poll(context, &mut taken));
            self.split.join(&taken, completed);
        }
        Poll::Ready(())
    }
}

/// Requests whose messages belong to several rings.
#[derive(Default)]
struct SplitRequests {
    /// Those that are not complete, by number.
    pending: HashMap<u32, SplitRequest>,
    next: u32,
}

/// A request whose parts are complete one after the other.
struct SplitRequest {
    id: u64,
    operation: Operation,
    /// For each message.
    ring_of_each: Vec<u16>,
    outcomes: Vec<Outcome>,
    /// The latest of the complete parts.
    deadline: Tick,
    parts: usize,
    pending_parts: usize,
    refusals: Vec<Refusal>,
}

impl SplitRequests {
    /// Gives each ring its part of a batch.
    fn partition(&mut self, batch: &RequestBatch, parts: &mut [RequestBatch]) {
        let rings = u16::try_from(parts.len()).expect("a store has at most 64 rings");
        for request in &batch.requests {
            let messages = &batch.messages()[request.range()];
            // A request without messages is answered by the first ring.
            let first = messages.first().map_or(0, |message| ring_of(*message, rings));
            if messages.iter().all(|message| ring_of(*message, rings) == first) {
                let part = &mut parts[usize::from(first)];
                part.push(request.id, request.operation, messages.iter().copied());
                part.requests.last_mut().expect("it was pushed").refusal.clone_from(&request.refusal);
            } else {
                let ring_of_each = messages.iter().map(|message| ring_of(*message, rings)).collect();
                self.split(request, batch, ring_of_each, parts);
            }
        }
    }

    fn split(
        &mut self,
        request: &Request,
        batch: &RequestBatch,
        ring_of_each: Vec<u16>,
        parts: &mut [RequestBatch],
    ) {
        let messages = &batch.messages()[request.range()];
        let (number, mut count) = (self.next, 0);
        for (ring, part) in (0_u16..).zip(parts) {
            let of_this_ring = messages.iter().zip(&ring_of_each).filter(|(_, of)| **of == ring);
            let mut of_this_ring = of_this_ring.map(|(message, _)| *message).peekable();
            if of_this_ring.peek().is_some() {
                part.push(part_id(ring, number), request.operation, of_this_ring);
                part.requests.last_mut().expect("it was pushed").refusal.clone_from(&request.refusal);
                count += 1;
            }
        }
        let split = SplitRequest {
            id: request.id,
            operation: request.operation,
            outcomes: vec![Outcome::Unknown; ring_of_each.len()],
            ring_of_each,
            deadline: Tick(0),
            parts: count,
            pending_parts: count,
            refusals: Vec::new(),
        };
        self.pending.insert(number, split);
        self.next = self.next.wrapping_add(1);
    }

    /// Moves whole requests to those that are complete, and joins the parts of the others.
    fn join(&mut self, taken: &RequestBatch, completed: &mut RequestBatch) {
        completed.ack_latency.add(&taken.ack_latency);
        for request in &taken.requests {
            let Some((ring, number)) = part_of(request.id) else {
                completed.push_from(taken, request);
                continue;
            };
            let split = self.pending.get_mut(&number).expect("it is pending until its last part is complete");
            split.complete(ring, request, &taken.outcomes()[request.range()]);
            if split.pending_parts == 0 {
                self.pending.remove(&number).expect("it was pending").push_to(completed);
            }
        }
    }
}

impl SplitRequest {
    fn complete(&mut self, ring: u16, part: &Request, outcomes: &[Outcome]) {
        self.pending_parts -= 1;
        if let Some(refusal) = &part.refusal {
            return self.refusals.push(Refusal::clone(refusal));
        }
        self.deadline = self.deadline.max(part.deadline);
        let own = self.outcomes.iter_mut().zip(&self.ring_of_each).filter(|(_, of)| **of == ring);
        own.zip(outcomes).for_each(|((own, _), outcome)| *own = *outcome);
    }

    fn push_to(self, completed: &mut RequestBatch) {
        match one_refusal(self.parts, self.refusals) {
            None => completed.push_completed(self.id, self.operation, self.deadline, self.outcomes.into_iter()),
            Some(refusal) => {
                completed.push_refused(self.id, self.operation, self.outcomes.len(), Arc::new(refusal));
            }
        }
    }
}

/// The id of the part that a ring has in a split request.
const fn part_id(ring: u16, number: u32) -> u64 {
    let ([ring_high, ring_low], [n0, n1, n2, n3]) = (ring.to_be_bytes(), number.to_be_bytes());
    u64::from_be_bytes([PART, 0, ring_high, ring_low, n0, n1, n2, n3])
}

/// The ring and the number of the split request, if this is the id of a part.
const fn part_of(id: u64) -> Option<(u16, u32)> {
    match id.to_be_bytes() {
        [PART, 0, ring_high, ring_low, n0, n1, n2, n3] => {
            Some((u16::from_be_bytes([ring_high, ring_low]), u32::from_be_bytes([n0, n1, n2, n3])))
        }
        _ => None,
    }
}
