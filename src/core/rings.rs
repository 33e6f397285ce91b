//! The rings of a store. This file determines the ring of a message, and submits requests to one ring or several.
//!
//! A ring is a complete wheel with its own pointer, lease and outbox. A hash of the message id and the client id
//! determines the ring of a message. So all sidecars of a store agree on the ring.
//!
//! ```text
//!   submit ──▶ one ring: the batch as it is   ──▶ completed in the call, or later in the completions
//!          ──▶ several: one batch for each    ──▶ the completions; `poll` joins the parts of split requests
//! ```

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use futures_util::future::try_join_all;

use super::completions::Completions;
use super::message::{Message, MessageState};
use super::refusal::{Refusal, merge_refusals};
use super::request_batch::{Outcome, Request, RequestBatch};
use super::ring::{ConnectionId, Ring, Submitted};
use super::store::RingParts;
use super::tick::Wheel;

/// The largest number of rings of a store.
pub const MAX_RINGS: u16 = 64;

/// The mark of a part of a split request: the highest byte of the part's request id. Connections use ids below 2^63,
/// whose highest byte is lower.
const PART: u8 = 0x80;

/// The maximum capacity, in messages, with which a batch of [`PARTS`] is kept for reuse. Larger buffers are freed.
const MAX_KEPT_MESSAGES: usize = 4_096;

thread_local! {
    /// One batch for each ring. All requesters of the thread reuse them.
    static PARTS: Cell<Vec<RequestBatch>> = const { Cell::new(Vec::new()) };
}

/// All rings of a store. Ring i is at index i.
#[derive(Clone)]
pub struct Rings(Arc<[Arc<dyn Ring>]>);

impl Rings {
    /// Collects the rings of a store. `rings` must not be empty.
    pub fn new(rings: &[RingParts]) -> Rings {
        Rings(rings.iter().map(|parts| Arc::clone(&parts.ring)).collect())
    }

    /// Returns the number of slots and the length of a tick. All rings have the same.
    ///
    /// # Panics
    ///
    /// Panics if there are no rings.
    pub fn wheel(&self) -> Wheel {
        self.0[0].wheel()
    }

    /// Returns the state of each message, and changes nothing.
    ///
    /// # Errors
    ///
    /// If the store is unreachable.
    pub async fn get(&self, messages: Vec<Message>, now: Instant) -> Result<Vec<MessageState>, Refusal> {
        if let [ring] = &*self.0 {
            return ring.get(&messages, now).await;
        }
        let rings = u16::try_from(self.0.len()).expect("a store has at most 64 rings");
        let mut parts: Vec<(Vec<usize>, Vec<Message>)> = vec![Default::default(); self.0.len()];
        for (index, message) in messages.iter().enumerate() {
            let (indexes, part) = &mut parts[usize::from(ring_of(*message, rings))];
            indexes.push(index);
            part.push(*message);
        }
        let asked = self.0.iter().zip(&parts).filter(|(_, (indexes, _))| !indexes.is_empty());
        let answers = try_join_all(asked.map(|(ring, (_, part))| ring.get(part, now))).await?;
        let mut states = vec![MessageState::Unknown; messages.len()];
        for ((indexes, _), part) in parts.iter().filter(|(indexes, _)| !indexes.is_empty()).zip(answers) {
            for (index, state) in indexes.iter().zip(part) {
                states[*index] = state;
            }
        }
        Ok(states)
    }

    /// Creates a requester for a new connection.
    pub fn requester(&self) -> Requester {
        Requester {
            rings: self.clone(),
            connection: ConnectionId::unique(),
            completions: Arc::default(),
            split: HashMap::new(),
            next_number: 0,
        }
    }
}

/// The access of one connection to the rings. It submits requests, and returns them when they are complete.
pub struct Requester {
    rings: Rings,
    connection: ConnectionId,
    completions: Arc<Completions>,
    /// The pending requests whose messages belong to several rings. The key is the number in the ids of their parts.
    split: HashMap<u32, SplitRequest>,
    next_number: u32,
}

impl Requester {
    /// Submits a batch: see [`super::ring::Ring::submit`]. The caller must choose request ids below 2^63 that differ
    /// from those of all pending requests.
    pub fn submit(&mut self, batch: &mut RequestBatch, now: Instant) -> Submitted {
        if let [ring] = &*self.rings.0 {
            return ring.submit(batch, self.connection, &self.completions, now);
        }
        let mut parts = PARTS.take();
        parts.resize_with(self.rings.0.len(), RequestBatch::default);
        self.partition(batch, &mut parts);
        let mut waker = None;
        for (ring, part) in self.rings.0.iter().zip(&mut parts).filter(|(_, part)| !part.is_empty()) {
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
        waker.into_iter().for_each(Waker::wake);
        Submitted::Pending
    }

    /// Moves the completed requests into `completed`, which must be empty. If there are none, registers the waker of
    /// `context` and returns `Pending`.
    pub fn poll(&mut self, context: &mut Context<'_>, completed: &mut RequestBatch) -> Poll<()> {
        if self.rings.0.len() == 1 {
            return self.completions.poll(context, completed);
        }
        while completed.is_empty() {
            let mut taken = RequestBatch::default();
            ready!(self.completions.poll(context, &mut taken));
            self.join(&taken, completed);
        }
        Poll::Ready(())
    }

    /// Adds each request to the batch of its ring. A request whose messages belong to several rings is split into one
    /// part per ring.
    fn partition(&mut self, batch: &RequestBatch, parts: &mut [RequestBatch]) {
        let rings = u16::try_from(parts.len()).expect("a store has at most 64 rings");
        for request in &batch.requests {
            let messages = &batch.messages()[request.range()];
            // A request without messages goes to the first ring.
            let first = messages.first().map_or(0, |message| ring_of(*message, rings));
            if messages.iter().all(|message| ring_of(*message, rings) == first) {
                let part = &mut parts[usize::from(first)];
                part.push(request.id, request.operation, messages.iter().copied());
                part.last_request().refusal.clone_from(&request.refusal);
                continue;
            }
            let ring_of_each: Vec<u16> = messages.iter().map(|message| ring_of(*message, rings)).collect();
            let mut pending_parts = 0;
            for (ring, part) in (0..).zip(&mut *parts).filter(|(ring, _)| ring_of_each.contains(ring)) {
                let own = messages.iter().zip(&ring_of_each).filter(|(_, of)| **of == ring);
                let own = own.map(|(message, _)| *message);
                part.push(part_id(ring, self.next_number), request.operation, own);
                part.last_request().refusal.clone_from(&request.refusal);
                pending_parts += 1;
            }
            let (request, outcomes) = (request.clone(), vec![Outcome::Unknown; messages.len()]);
            let (parts, refusals) = (pending_parts, Vec::new());
            let split = SplitRequest { request, ring_of_each, outcomes, parts, pending_parts, refusals };
            self.split.insert(self.next_number, split);
            self.next_number = self.next_number.wrapping_add(1);
        }
    }

    /// Moves completed requests from `taken` to `completed`. A split request is moved only when its last part is
    /// complete.
    fn join(&mut self, taken: &RequestBatch, completed: &mut RequestBatch) {
        completed.ack_latency.add(&taken.ack_latency);
        for request in &taken.requests {
            let Some((ring, number)) = part_of(request.id) else {
                completed.push_from(taken, request);
                continue;
            };
            let split = self.split.get_mut(&number).expect("it is pending until its last part is complete");
            split.complete(ring, request, &taken.outcomes()[request.range()]);
            if split.pending_parts == 0 {
                self.split.remove(&number).expect("it was pending").push_to(completed);
            }
        }
    }
}

/// A request whose messages belong to several rings. Each of these rings completes one part.
struct SplitRequest {
    /// The request as the connection sent it. Its deadline becomes the latest deadline of the completed parts.
    request: Request,
    ring_of_each: Vec<u16>,
    outcomes: Vec<Outcome>,
    parts: usize,
    pending_parts: usize,
    refusals: Vec<Refusal>,
}

impl SplitRequest {
    fn complete(&mut self, ring: u16, part: &Request, outcomes: &[Outcome]) {
        self.pending_parts -= 1;
        if let Some(refusal) = &part.refusal {
            return self.refusals.push(Refusal::clone(refusal));
        }
        self.request.deadline = self.request.deadline.max(part.deadline);
        let own = self.outcomes.iter_mut().zip(&self.ring_of_each).filter(|(_, of)| **of == ring);
        own.zip(outcomes).for_each(|((own, _), outcome)| *own = *outcome);
    }

    fn push_to(self, completed: &mut RequestBatch) {
        let Request { id, operation, deadline, .. } = self.request;
        match merge_refusals(self.parts, "rings", self.refusals) {
            None => completed.push_completed(id, operation, deadline, self.outcomes.into_iter()),
            Some(refusal) => completed.push_refused(id, operation, self.outcomes.len(), Arc::new(refusal)),
        }
    }
}

/// Returns the request id for the part of split request `number` that goes to `ring`.
fn part_id(ring: u16, number: u32) -> u64 {
    u64::from(PART) << 56 | u64::from(ring) << 32 | u64::from(number)
}

/// Returns the ring and the number of the split request if `id` stands for a part, otherwise `None`.
#[expect(clippy::cast_possible_truncation, reason = "the id is taken apart")]
const fn part_of(id: u64) -> Option<(u16, u32)> {
    if id >> 48 == (PART as u64) << 8 { Some(((id >> 32) as u16, id as u32)) } else { None }
}

/// Returns the number of the ring, out of `rings` rings, to which a message belongs. This is `mix(mix(msg_id) ^
/// client) mod rings`. All sidecars and all versions must compute the same ring.
///
/// # Panics
///
/// Panics if `rings` is 0.
pub fn ring_of(message: Message, rings: u16) -> u16 {
    let hash = mix(mix(message.msg_id.0) ^ message.client.0);
    u16::try_from(hash % u64::from(rings)).expect("a remainder of a u16 fits a u16")
}

/// Mixes the bits of a number with the finalizer of splitmix64, so that each bit of the input affects each bit of the
/// result. See Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; the constants are those
/// of Stafford's variant 13.
pub(crate) const fn mix(mut bits: u64) -> u64 {
    bits ^= bits >> 30;
    bits = bits.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^= bits >> 27;
    bits = bits.wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_never_changes() {
        for (message, of_2, of_3, of_64) in [
            (Message::new(0, 0), 0, 0, 0),
            (Message::new(1, 0), 1, 1, 61),
            (Message::new(2, 0), 0, 2, 40),
            (Message::new(101, 7), 0, 0, 38),
            (Message::new(102, 7), 0, 2, 18),
            (Message::new(u64::MAX, u64::MAX), 1, 0, 11),
            (Message::new(1 << 53, (1 << 53) + 1), 0, 1, 38),
        ] {
            let found = [1, 2, 3, 64].map(|rings| ring_of(message, rings));
            assert_eq!(found, [0, of_2, of_3, of_64], "{message}");
        }
    }

    #[test]
    fn messages_spread_evenly_whatever_pattern_their_ids_have() {
        const RINGS: u16 = 8;
        const MESSAGES: u64 = 80_000;
        let patterns: [fn(u64) -> Message; 4] = [
            |index| Message::new(index, 0),
            |index| Message::new(index << 32, 0),
            |index| Message::new(7, index),
            |index| Message::new(index, index),
        ];
        for pattern in patterns {
            let mut counts = [0_u64; RINGS as usize];
            (0..MESSAGES).for_each(|index| counts[usize::from(ring_of(pattern(index), RINGS))] += 1);
            let fair = MESSAGES / u64::from(RINGS);
            assert!(counts.iter().all(|count| count.abs_diff(fair) < fair / 20), "{counts:?}");
        }
    }
}
