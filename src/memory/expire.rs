//! From a decided tick to its batches, and out of memory a revolution later.
//!
//! A tick is decided in an instant; what was left in it is listed, published and later forgotten in steps
//! of bounded work, so that a tick of a million messages holds nobody up:
//!
//! ```text
//!  decided ──▶ walked: each place is asked for in the map ──▶ counted ──▶ published, batch by batch
//!                                                                            │ one revolution
//!                                                              forgotten ◀───┘
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::lists::Part;
use super::ring::MemoryRing;
use crate::core::batch::{BatchId, MAX_BATCH_MESSAGES, TickCounts, TimedOut, TimeoutBatch};
use crate::core::ring::{Expired, Published};
use crate::core::tick::Tick;

/// Messages asked for in the map in one step: about a millisecond.
const STEP: usize = 8_192;

/// A shard of the map gives memory back when it has room for this many times its messages.
const SHRINK_FACTOR: usize = 4;

/// Shards with less room than this are left as they are.
const SHRINK_FLOOR: usize = 4_096;

/// Decided ticks on their way out.
#[derive(Debug, Default)]
pub(super) struct Expiry {
    frozen: VecDeque<Frozen>,
    /// Published ticks that are remembered for `late`.
    pub(super) remembered: VecDeque<(Tick, Vec<Arc<TimeoutBatch>>)>,
    next_shard_to_shrink: usize,
}

/// A decided tick.
#[derive(Debug)]
struct Frozen {
    tick: Tick,
    due_at: Instant,
    drained: bool,
    parts: Vec<Part>,
    position: usize,
    timed_out: Vec<TimedOut>,
    counts: Option<TickCounts>,
    /// Whether the counts were returned to the caller.
    told: bool,
    published: Vec<Arc<TimeoutBatch>>,
}

impl Expiry {
    /// Takes over what was left of a tick when it was decided.
    pub(super) fn freeze(&mut self, tick: Tick, parts: Vec<Part>, due_at: Instant, drained: bool) {
        self.frozen.push_back(Frozen {
            tick,
            due_at,
            drained,
            parts,
            position: 0,
            timed_out: Vec::new(),
            counts: None,
            told: false,
            published: Vec::new(),
        });
    }

    /// Walks over all ticks decided so far.
    pub(super) fn finish_walks(&mut self, ring: &MemoryRing) {
        for frozen in &mut self.frozen {
            while frozen.counts.is_none() {
                frozen.walk(ring);
            }
        }
    }

    /// Does one step; says whether there is more to do.
    pub(super) fn step(&mut self, ring: &MemoryRing, now: Instant) -> Expired {
        let Some(front) = self.frozen.front_mut() else {
            return Expired { more: self.forget_one_step(ring), ..Expired::default() };
        };
        if front.counts.is_none() {
            front.walk(ring);
        }
        let Some(counts) = front.counts else { return Expired { more: true, ..Expired::default() } };
        if !std::mem::replace(&mut front.told, true) {
            return Expired { counted: Some((front.tick, counts)), more: true, ..Expired::default() };
        }
        let published = front.publish(ring, now);
        if front.timed_out.is_empty() {
            let done = self.frozen.pop_front().expect("the front is there");
            if !done.published.is_empty() {
                self.remembered.push_back((done.tick, done.published));
            }
        }
        Expired { published, more: true, ..Expired::default() }
    }

    /// Forgets a part of what timed out a revolution ago, or gives memory back.
    fn forget_one_step(&mut self, ring: &MemoryRing) -> bool {
        let pointer = ring.pace.read().pointer();
        let Some((tick, batches)) = self.remembered.front_mut() else { return self.shrink(ring) };
        if ring.options.wheel.remembers(*tick, pointer) {
            return self.shrink(ring);
        }
        if let Some(batch) = batches.pop() {
            for timed_out in &batch.messages {
                ring.messages.remove_if(&timed_out.message, |_, entry| entry.deadline == *tick);
            }
        }
        if batches.is_empty() {
            self.remembered.pop_front();
        }
        true
    }

    /// Gives back memory of one shard in turn, where it has much more room than messages.
    fn shrink(&mut self, ring: &MemoryRing) -> bool {
        let shards = ring.messages.shards();
        self.next_shard_to_shrink = (self.next_shard_to_shrink + 1) % shards.len();
        let mut shard = shards[self.next_shard_to_shrink].write();
        let (len, capacity) = (shard.len(), shard.capacity());
        if capacity > SHRINK_FLOOR && capacity > len * SHRINK_FACTOR {
            shard.shrink_to(len * 2, |(message, _)| ring.messages.hash_usize(message) as u64);
        }
        false
    }
}

impl Frozen {
    /// Asks the map about the next places. When all were asked for, the counts are final.
    fn walk(&mut self, ring: &MemoryRing) {
        let (tick, timed_out) = (self.tick, &mut self.timed_out);
        let mut budget = STEP;
        while let Some(part) = self.parts.last() {
            budget -= budget.min(part.walk(&mut self.position, budget, |place, message| {
                // A place is stale where the message was acknowledged, withdrawn or re-armed meanwhile.
                let entry = ring.messages.get_mut(&message);
                if let Some(mut entry) = entry.filter(|entry| entry.deadline == tick && entry.place == place) {
                    entry.listed = true;
                    timed_out.push(TimedOut { message, attempt: entry.attempt });
                }
            }));
            if !part.is_walked(self.position) {
                return;
            }
            self.parts.pop();
            self.position = 0;
        }
        let (acked, overtaken) = ring.lists.of(tick).settle();
        self.timed_out.extend(overtaken);
        let left = self.timed_out.len() as u64;
        ring.in_flight.fetch_sub(left, Ordering::Relaxed);
        self.counts = Some(ring.options.storm.count(acked, left, self.drained));
    }

    /// Hands the next batch to the outbox; `None` if nothing timed out.
    fn publish(&mut self, ring: &MemoryRing, now: Instant) -> Option<Published> {
        let counts = self.counts?;
        if self.timed_out.is_empty() {
            return None;
        }
        let messages = self.timed_out.split_off(self.timed_out.len().saturating_sub(MAX_BATCH_MESSAGES));
        let published =
            Published { messages: messages.len() as u64, lateness: now.saturating_duration_since(self.due_at) };
        let batch = Arc::new(TimeoutBatch {
            id: BatchId {
                tick: self.tick,
                epoch: ring.options.epoch,
                ring: 0,
                seq: u32::try_from(self.published.len()).expect("fewer batches than messages"),
            },
            counts,
            last: self.timed_out.is_empty(),
            messages,
        });
        self.published.push(Arc::clone(&batch));
        ring.outbox.publish(batch, self.due_at);
        Some(published)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::message::Message;
    use crate::core::outbox::Retention;
    use crate::core::ring::{AddNewMsg, Ring};
    use crate::core::tick::Wheel;
    use crate::memory::{MemoryOutbox, RingOptions};

    #[test]
    fn memory_returns_when_load_falls() {
        let mut now = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), now));
        let options = RingOptions {
            wheel: Wheel::new(3, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            max_in_flight: 1_000_000,
            epoch: 1,
            pointer: Tick(1),
            keeps_on_drain: false,
        };
        let ring = MemoryRing::new(options, outbox, now);
        let messages: Vec<Message> = (0..200_000).map(Message::from).collect();
        let request = AddNewMsg { messages: &messages, ack_timeout_ticks: 3, attempt: 1 };
        ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
        let peak = ring.messages.capacity();
        // They time out, are remembered for a revolution and forgotten; then each tick shrinks a shard.
        for _ in 0..8 + ring.messages.shards().len() {
            now += Duration::from_secs(1);
            ring.advance(now).now_or_never().unwrap().unwrap();
            while ring.expire_step(now).more {}
        }
        assert!(ring.messages.is_empty());
        let capacity = ring.messages.capacity();
        assert!(capacity < peak / 20, "room for {capacity} of {peak} is kept");
    }
}
