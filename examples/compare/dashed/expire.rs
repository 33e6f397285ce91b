//! The rest of an expired tick: its ids are looked up again, in steps, and those still there go out in batches.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use ackwheel::core::{
    BatchId, MAX_BATCH_MESSAGES, PublishStep, Published, StormRule, Tick, TickCounts, TimedOut, TimeoutBatch,
};

use super::ring::DashRing;
use super::slots::{Piece, Slot};

/// Decided ticks on their way out.
#[derive(Debug, Default)]
pub struct Expiry(VecDeque<Decided>);

/// A decided tick.
#[derive(Debug)]
struct Decided {
    tick: Tick,
    due_at: Instant,
    counts: TickCounts,
    /// Whether the counts were returned to the caller.
    told: bool,
    /// Its ids, for each shard; a piece is looked up in one step, under one lock.
    ids: Vec<Vec<Piece>>,
    /// The shard whose ids are looked up.
    shard: usize,
    timed_out: Vec<TimedOut>,
    published: u64,
    batches: u32,
}

impl Expiry {
    /// Takes over a tick when it is decided.
    pub fn freeze(&mut self, tick: Tick, taken: Vec<Slot>, storm: StormRule, due_at: Instant) {
        let (acked, left) = (taken.iter().map(|slot| slot.acked).sum(), taken.iter().map(|slot| slot.left).sum());
        self.0.push_back(Decided {
            tick,
            due_at,
            counts: storm.count(acked, left, false),
            told: false,
            ids: taken.into_iter().map(Slot::into_pieces).collect(),
            shard: 0,
            timed_out: Vec::new(),
            published: 0,
            batches: 0,
        });
    }

    /// Does one step; says whether there is more to do.
    pub fn step(&mut self, ring: &DashRing, now: Instant) -> PublishStep {
        let Some(front) = self.0.front_mut() else { return PublishStep::default() };
        if !std::mem::replace(&mut front.told, true) {
            return PublishStep {
                counted: Some((front.tick, front.counts)),
                more: true,
                ..PublishStep::default()
            };
        }
        front.list(ring);
        let published = front.publish(ring, now);
        if front.published == front.counts.timed_out() {
            for (slots, pieces) in ring.slots.iter().zip(std::mem::take(&mut front.ids)) {
                let mut slots = slots.lock();
                for piece in pieces {
                    slots.keep(piece);
                }
            }
            self.0.pop_front();
        }
        PublishStep { published, more: true, ..PublishStep::default() }
    }
}

impl Decided {
    /// Looks up the next ids, unless all that were counted are found.
    fn list(&mut self, ring: &DashRing) {
        if self.published + self.timed_out.len() as u64 == self.counts.timed_out() {
            return;
        }
        let Some(piece) = self.ids[self.shard].pop() else {
            self.timed_out.extend(ring.slots[self.shard].lock().take_overtaken(self.tick));
            self.shard += 1;
            return;
        };
        let mut shard = ring.map.shards()[self.shard].write();
        for key in &piece {
            let hash = ring.map.hash_usize(key) as u64;
            let found = shard.get(hash, |(known, _)| known == key);
            let Some(flight) = found.map(|(_, flight)| *flight.get()) else { continue };
            if flight.deadline == self.tick {
                shard.remove_entry(hash, |(known, _)| known == key);
                self.timed_out.push(flight.timed_out(*key));
            }
        }
        ring.slots[self.shard].lock().keep(piece);
    }

    /// Hands the next batch to the outbox, if one is full or it is the last.
    fn publish(&mut self, ring: &DashRing, now: Instant) -> Option<Published> {
        let left = self.counts.timed_out() - self.published;
        let known = self.timed_out.len();
        if known == 0 || (known < MAX_BATCH_MESSAGES && (known as u64) < left) {
            return None;
        }
        let messages = self.timed_out.split_off(known.saturating_sub(MAX_BATCH_MESSAGES));
        let count = messages.len() as u64;
        let id = BatchId { tick: self.tick, epoch: ring.epoch, ring: 0, seq: self.batches };
        let batch = TimeoutBatch { id, counts: self.counts, last: count == left, messages };
        ring.outbox.publish(Arc::new(batch), self.due_at);
        self.batches += 1;
        self.published += count;
        let lateness = (!self.counts.drained).then(|| now.saturating_duration_since(self.due_at));
        Some(Published { messages: count, lateness })
    }
}
