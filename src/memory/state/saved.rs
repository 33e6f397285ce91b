//! The content of a state file: ring and outbox of a memory store.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use serde::ser::SerializeSeq;
use serde::{Deserialize, Serialize, Serializer};

use super::outbox::{self as saved_outbox, SavedBatch, SavedOutbox, StoredBatches};
use crate::core::latency_histogram::Stamp;
use crate::core::message::Message;
use crate::core::store::Moment;
use crate::core::tick::{Tick, Wheel};
use crate::memory::entry::{Entry, Marks, ShortTick};
use crate::memory::outbox::MemoryOutbox;
use crate::memory::wheel::MemoryWheel;

/// The most bytes that a message in flight takes, or one that is remembered: numbers are as long as they are large.
const MESSAGE_BYTES: u64 = 10 + 10 + 6 + 5 + 1 + 1;
/// Bytes for the rest without the outbox: counts of ticks, heads of batches, and what arrives in the last moment.
const OTHER_BYTES: u64 = 1 << 20;
/// The pointer moves on for so long at most between the room that is made and what is saved.
const DRAIN: Duration = Duration::from_secs(1);

/// The content of a state file. Ages count from `unix_ms`. Messages are a sequence of [`SavedMessage`], and batches one of
/// [`SavedBatch`]. Both are written from where they are: a list would take as much memory as ring or outbox, when there
/// may be no more.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::memory) struct Saved<Messages = Vec<SavedMessage>, Batches = Vec<Option<SavedBatch>>> {
    slots: u16,
    tick_ms: u32,
    unix_ms: u64,
    pub(in crate::memory) epoch: u64,
    pub(in crate::memory) pointer: u64,
    messages: Messages,
    /// Messages acknowledged so far of open ticks.
    acked: Vec<(u64, u64)>,
    outbox: SavedOutbox<Batches>,
}

/// A message in flight, or remembered for `late`.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::memory) struct SavedMessage {
    msg_id: u64,
    client: u64,
    deadline: u64,
    age_units: u32,
    attempt: u8,
    late_counted: bool,
}

impl Saved {
    /// The bytes that the store takes at most, now and at the end of a drain that begins now.
    pub(in crate::memory) fn most_bytes(wheel: &MemoryWheel, outbox: &MemoryOutbox) -> u64 {
        let messages = wheel.shards.len();
        // Messages that time out meanwhile go to the outbox too, and are remembered in the table.
        let moves = DRAIN.as_millis().div_ceil(wheel.options.wheel.tick_length().as_millis()) as usize;
        let open = wheel.shards.open_ticks(wheel.pointer());
        let timing_out: u64 = open.take(moves + 1).map(|tick| wheel.shards.counts(tick).left).sum();
        messages as u64 * MESSAGE_BYTES
            + timing_out * saved_outbox::MESSAGE_BYTES
            + outbox.most_saved_bytes()
            + OTHER_BYTES
    }

    /// The dimensions of the ring.
    pub(in crate::memory) fn wheel(&self) -> Result<Wheel, String> {
        Wheel::new(self.slots, Duration::from_millis(u64::from(self.tick_ms))).map_err(|error| error.to_string())
    }

    /// Puts everything back; returns the number of messages in flight.
    pub(in crate::memory) fn restore(self, wheel: &MemoryWheel, outbox: &MemoryOutbox, moment: Moment) -> u64 {
        let now = moment.now;
        // By a clock that may have been set meanwhile: the age of a batch shows it, and nothing depends on it.
        let away = Duration::from_millis(moment.unix_ms().saturating_sub(self.unix_ms));
        let stamp = wheel.stamp(now);
        let acked: Vec<(Tick, u64)> = self.acked.iter().map(|(tick, acked)| (Tick(*tick), *acked)).collect();
        let entries = self.messages.iter().map(|saved| saved.entry(stamp));
        let in_flight = wheel.restore(entries, &acked, now);
        let mut remembered: BTreeMap<Tick, u64> = BTreeMap::new();
        for message in self.messages.iter().filter(|message| message.deadline < self.pointer) {
            *remembered.entry(Tick(message.deadline)).or_default() += 1;
        }
        let mut expiry = wheel.expiry.lock();
        for (tick, messages) in remembered {
            expiry.remember(tick, messages);
        }
        drop(expiry);
        outbox.restore(self.outbox, away, now);
        in_flight
    }
}

impl<'a> Saved<StoredMessages<'a>, StoredBatches<'a>> {
    /// The state to keep of both, which do not change any more from here on.
    pub(in crate::memory) fn of(wheel: &'a MemoryWheel, outbox: &'a MemoryOutbox, moment: Moment) -> Self {
        let now = moment.now;
        wheel.state.write().saved = true;
        while wheel.publish_expired(now).more {}
        let pointer = wheel.pointer();
        let acked = wheel.shards.open_ticks(pointer).map(|tick| (tick.0, wheel.shards.counts(tick).acked));
        Saved {
            slots: wheel.options.wheel.slots(),
            tick_ms: wheel.options.wheel.tick_ms(),
            unix_ms: moment.unix_ms(),
            epoch: wheel.options.epoch,
            pointer: pointer.0,
            messages: StoredMessages {
                wheel,
                pointer,
                all_expired: wheel.next_expired().is_none(),
                stamp: wheel.stamp(now),
            },
            acked: acked.filter(|(_, acked)| *acked > 0).collect(),
            outbox: outbox.save(now),
        }
    }

    /// How many messages are in flight.
    pub(in crate::memory) fn in_flight(&self) -> usize {
        self.messages.count(|message| message.deadline >= self.pointer)
    }

    /// How many batches it holds that some group has not acknowledged.
    pub(in crate::memory) fn batches(&self) -> usize {
        self.outbox.count()
    }
}

/// The messages of a ring that are to be kept.
pub(in crate::memory) struct StoredMessages<'a> {
    wheel: &'a MemoryWheel,
    pointer: Tick,
    /// Whether what was in flight is in the outbox.
    all_expired: bool,
    stamp: Stamp,
}

impl StoredMessages<'_> {
    fn try_each<E>(&self, mut to: impl FnMut(&SavedMessage) -> Result<(), E>) -> Result<(), E> {
        for shard in self.wheel.shards.list.iter() {
            let shard = shard.lock();
            let messages = shard.table.iter().map(|entry| SavedMessage::of(entry, self.pointer, self.stamp));
            let mut kept = messages.filter(|message| !self.all_expired || message.deadline < self.pointer.0);
            kept.try_for_each(|message| to(&message))?;
        }
        Ok(())
    }

    fn count(&self, of: impl Fn(&SavedMessage) -> bool) -> usize {
        let mut count = 0;
        let Ok(()) = self.try_each::<Infallible>(|message| {
            count += usize::from(of(message));
            Ok(())
        });
        count
    }
}

impl Serialize for StoredMessages<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut sequence = serializer.serialize_seq(Some(self.count(|_| true)))?;
        self.try_each(|message| sequence.serialize_element(message))?;
        sequence.end()
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

    fn entry(&self, now: Stamp) -> Entry {
        // While the sidecar was not there, no time passed for the message.
        let added_at = Stamp(now.0.wrapping_sub(self.age_units));
        let message = Message::new(self.msg_id, self.client);
        let mut entry = Entry::in_flight(message, ShortTick::of(Tick(self.deadline)), added_at, self.attempt);
        if self.late_counted {
            entry.marks.set(Marks::LATE_COUNTED);
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use futures_util::FutureExt;

    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::outbox::Retention;
    use crate::core::ring::{Advance, Ring};
    use crate::core::single_request::{AddNewMsg, SingleRequest};
    use crate::memory::{MemoryRing, RingOptions};

    #[test]
    fn room_is_made_for_what_times_out_while_it_drains() {
        let (start, tick) = (Instant::now(), Duration::from_millis(10));
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), start));
        let options = RingOptions {
            wheel: Wheel::new(15, tick).unwrap(),
            storm: StormRule::default(),
            max_in_flight: 1_000_000,
            threads: 1,
            epoch: 1,
            pointer: Tick(u64::MAX / 4),
        };
        let ring = MemoryRing::new(options, Arc::clone(&outbox), start);
        for ticks in 1..=15_u16 {
            let messages: Vec<Message> =
                (0..7_000).map(|id| Message::new(u64::MAX - id, u64::MAX - u64::from(ticks))).collect();
            let request = AddNewMsg { messages: &messages, ack_timeout_ticks: ticks, attempt: 1 };
            ring.add_new_msg(request, start).now_or_never().unwrap().unwrap();
        }
        let said = Saved::most_bytes(&ring.wheel, &outbox);
        let mut now = start;
        for _ in 0..16 {
            now += tick;
            let advanced = ring.advance(now).now_or_never().unwrap().unwrap();
            assert!(matches!(advanced, Advance::Moved { .. }), "{advanced:?}");
            while ring.wheel.publish_expired(now).more {}
        }
        let saved = Saved::of(&ring.wheel, &outbox, Moment { now, unix_time: Duration::ZERO });
        assert_eq!((saved.in_flight(), saved.messages.count(|_| true)), (0, 15 * 7_000));
        let bytes = postcard::to_stdvec(&saved).unwrap().len() as u64;
        assert!(bytes <= said, "{bytes} bytes of {said}");
    }
}
