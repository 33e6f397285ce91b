//! What a state file holds: a memory store across a planned restart.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::entry::{Entry, Marks, ShortTick};
use super::outbox::MemoryOutbox;
use super::ring::MemoryRing;
use super::saved_outbox::SavedOutbox;
use crate::core::message::Message;
use crate::core::store::Moment;
use crate::core::tally::{STAMP_UNIT, Stamp};
use crate::core::tick::{Tick, Wheel};

/// The most bytes that a message in flight takes, or one that is remembered: numbers are as long as they are large.
const MESSAGE_BYTES: u64 = 10 + 10 + 6 + 5 + 1 + 1;
/// What all else takes but the outbox: counts of ticks, and what comes in a moment.
const OTHER_BYTES: u64 = 1 << 20;

/// What a state file holds. Ages count from `unix_ms`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Saved {
    slots: u16,
    tick_ms: u32,
    unix_ms: u64,
    pub(super) epoch: u64,
    pub(super) pointer: u64,
    messages: Vec<SavedMessage>,
    /// Messages acknowledged so far of ticks that are not decided.
    acked: Vec<(u64, u64)>,
    outbox: SavedOutbox,
}

/// A message in flight, or remembered for `late`.
#[derive(Debug, Serialize, Deserialize)]
struct SavedMessage {
    msg_id: u64,
    client: u64,
    deadline: u64,
    age_units: u32,
    attempt: u8,
    late_counted: bool,
}

impl Saved {
    /// The bytes that the store would take now, and hardly more a moment later.
    pub(super) fn most_bytes(ring: &MemoryRing, outbox: &MemoryOutbox) -> u64 {
        let messages: usize = ring.shards.iter().map(|shard| shard.lock().table.len()).sum();
        messages as u64 * MESSAGE_BYTES + outbox.most_saved_bytes() + OTHER_BYTES
    }

    /// The dimensions of the ring.
    pub(super) fn wheel(&self) -> Result<Wheel, String> {
        Wheel::new(self.slots, Duration::from_millis(u64::from(self.tick_ms))).map_err(|error| error.to_string())
    }

    /// How many messages are in flight.
    pub(super) fn in_flight(&self) -> u64 {
        self.messages.iter().filter(|message| message.deadline >= self.pointer).count() as u64
    }

    /// How many batches it holds that some group has not acknowledged.
    pub(super) fn batches(&self) -> usize {
        self.outbox.count()
    }

    pub(super) fn of(ring: &MemoryRing, outbox: &MemoryOutbox, moment: Moment) -> Saved {
        let now = moment.now;
        ring.standing.write().saved = true;
        while ring.expire_step(now).more {}
        let pointer = ring.pointer();
        let stamp = ring.stamp(now);
        let mut messages = Vec::new();
        for shard in &ring.shards {
            messages.extend(shard.lock().table.iter().map(|entry| SavedMessage::of(entry, pointer, stamp)));
        }
        if ring.next_decided().is_none() {
            // What was in flight is in the outbox.
            messages.retain(|message| message.deadline < pointer.0);
        }
        let acked = ring.alive().map(|tick| (tick.0, ring.counts(tick).acked));
        Saved {
            slots: ring.options.wheel.slots(),
            tick_ms: ring.options.wheel.tick_ms(),
            unix_ms: moment.unix_ms(),
            epoch: ring.options.epoch,
            pointer: pointer.0,
            messages,
            acked: acked.filter(|(_, acked)| *acked > 0).collect(),
            outbox: outbox.save(now),
        }
    }

    /// Puts everything back; returns the number of messages in flight.
    pub(super) fn restore(self, ring: &MemoryRing, outbox: &MemoryOutbox, moment: Moment) -> u64 {
        let now = moment.now;
        let away = Duration::from_millis(moment.unix_ms().saturating_sub(self.unix_ms));
        let stamp = ring.stamp(now);
        let acked: Vec<(Tick, u64)> = self.acked.iter().map(|(tick, acked)| (Tick(*tick), *acked)).collect();
        let entries = self.messages.iter().map(|saved| saved.entry(away, stamp));
        let in_flight = ring.restore(entries, &acked, now);
        let mut remembered: BTreeMap<Tick, u64> = BTreeMap::new();
        for message in self.messages.iter().filter(|message| message.deadline < self.pointer) {
            *remembered.entry(Tick(message.deadline)).or_default() += 1;
        }
        let mut expiry = ring.expiry.lock();
        for (tick, messages) in remembered {
            expiry.remember(tick, messages);
        }
        drop(expiry);
        outbox.restore(self.outbox, away, now);
        in_flight
    }
}

impl SavedMessage {
    fn of(entry: &Entry, pointer: Tick, now: Stamp) -> SavedMessage {
        SavedMessage {
            msg_id: entry.message.msg_id.0,
            client: entry.message.client.0,
            deadline: entry.deadline.seen_from(pointer).0,
            age_units: now.0.wrapping_sub(entry.added_at.0),
            attempt: entry.attempt,
            late_counted: entry.marks.has(Marks::LATE_COUNTED),
        }
    }

    fn entry(&self, away: Duration, now: Stamp) -> Entry {
        let age = Stamp::after(STAMP_UNIT.saturating_mul(self.age_units) + away);
        let added_at = Stamp(now.0.wrapping_sub(age.0));
        let message = Message::new(self.msg_id, self.client);
        let mut entry = Entry::in_flight(message, ShortTick::of(Tick(self.deadline)), added_at, self.attempt);
        if self.late_counted {
            entry.marks.set(Marks::LATE_COUNTED);
        }
        entry
    }
}
