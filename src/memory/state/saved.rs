//! The content of a state file: the ring and the outbox of a memory store.
//!
//! Messages and batches are serialized directly from the ring and the outbox. A copy would need as much memory again,
//! which might be too much. Ephemeral groups are left out: they are deleted with their last subscriber, and no
//! subscriber survives the process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::ser::SerializeSeq;
use serde::{Deserialize, Serialize, Serializer};

use crate::core::{
    BatchId, GroupName, GroupOptions, MAX_NAME_LENGTH, Message, Moment, Stamp, Tick, TickCounts, TimedOut,
    TimeoutBatch, Wheel,
};
use crate::memory::entry::{Entry, Marks, ShortTick};
use crate::memory::outbox::{Group, MemoryOutbox, Queue, Stored};
use crate::memory::table::Hash;
use crate::memory::wheel::MemoryWheel;

/// The maximum number of bytes for a message that is in flight or remembered for `late`. This constant and the next
/// ones add up the maximum lengths of all fields, because postcard stores larger numbers in more bytes.
const ENTRY_BYTES: u64 = 10 + 10 + 6 + 5 + 1 + 1;
/// The maximum number of bytes for a message of a batch.
const TIMED_OUT_BYTES: u64 = 10 + 10 + 1;
/// The maximum number of bytes for a batch without its messages.
const BATCH_BYTES: u64 = 1 + 10 + 10 + 3 + 5 + 10 + 10 + 3 + 15 + 5;
/// The maximum number of bytes for a group without the batches that it holds.
const GROUP_BYTES: u64 = 2 + MAX_NAME_LENGTH as u64 + 10 + 5 + 15;
/// The maximum number of bytes for a batch that a group holds.
const HELD_BYTES: u64 = 10 + 5;
/// The number of bytes for everything else: counts of ticks, heads of batches, and messages that arrive in the last
/// moment.
const OTHER_BYTES: u64 = 1 << 20;
/// The assumed maximum time between reserving room and saving the state. The pointer moves on during this time.
const DRAIN: Duration = Duration::from_secs(1);

/// The content of a state file. Ages count back from `unix_ms`. For writing, the type parameters are [`RingMessages`]
/// and [`OutboxBatches`], which serialize the lists without a copy.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::memory) struct Saved<Messages = Vec<SavedMessage>, Batches = Vec<Option<SavedBatch>>> {
    slots: u16,
    tick_ms: u32,
    unix_ms: u64,
    pub(in crate::memory) epoch: u64,
    pub(in crate::memory) pointer: u64,
    pub(in crate::memory) messages: Messages,
    /// For each tick that has not expired, the number of messages acknowledged so far.
    acked: Vec<(u64, u64)>,
    outbox: SavedOutbox<Batches>,
}

/// A message that is in flight, or that timed out and is remembered for `late`.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::memory) struct SavedMessage {
    message: Message,
    deadline: u64,
    age_units: u32,
    attempt: u8,
    late_counted: bool,
}

/// The content of an outbox. Positions count from the oldest batch. A position has no batch if all groups have settled
/// the batch.
#[derive(Debug, Serialize, Deserialize)]
struct SavedOutbox<Batches = Vec<Option<SavedBatch>>> {
    batches: Batches,
    groups: Vec<SavedGroup>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(in crate::memory) struct SavedBatch {
    id: BatchId,
    counts: TickCounts,
    last: bool,
    age: Duration,
    messages: Vec<TimedOut>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedGroup {
    name: String,
    next: u64,
    /// The positions before `next` that the group has not settled, with their delivery counts.
    held: Vec<(u64, u32)>,
    unattended: Duration,
}

impl Saved {
    /// Returns the maximum size of the state in bytes, now or at the end of a drain that begins now.
    pub(super) fn most_bytes(wheel: &MemoryWheel) -> u64 {
        let messages = wheel.shards.len();
        // Messages that time out during the drain count twice: they go to the outbox, and they are remembered in the
        // table.
        let moves = DRAIN.as_millis().div_ceil(wheel.shards.options.wheel.tick_length().as_millis()) as usize;
        let open = wheel.shards.open_ticks(wheel.pointer());
        let timing_out: u64 = open.take(moves + 1).map(|tick| wheel.shards.counts(tick).in_flight).sum();
        messages as u64 * ENTRY_BYTES
            + timing_out * TIMED_OUT_BYTES
            + SavedOutbox::most_bytes(&wheel.outbox)
            + OTHER_BYTES
    }

    /// Returns the dimensions of the ring.
    pub(super) fn wheel(&self) -> Result<Wheel, String> {
        Wheel::new(self.slots, Duration::from_millis(u64::from(self.tick_ms))).map_err(|error| error.to_string())
    }

    /// Restores the state into an empty ring and its outbox. Returns the number of messages in flight.
    pub(in crate::memory) fn restore(self, wheel: &MemoryWheel, moment: Moment) -> u64 {
        let now = moment.now;
        // The wall clock may have been set since the state was saved. Only the ages of batches depend on it.
        let away = Duration::from_millis(moment.unix_ms().saturating_sub(self.unix_ms));
        let position = wheel.position(&wheel.state.read(), now);
        let (mut in_flight, mut remembered) = (0, BTreeMap::<u64, u64>::new());
        for message in &self.messages {
            let entry = message.entry(position.now);
            let hash = Hash::of(entry.message, &wheel.shards.hasher);
            let shard = &wheel.shards.list[hash.shard(wheel.shards.bits)];
            if shard.lock().restore(hash, entry, &position) {
                in_flight += 1;
            } else {
                *remembered.entry(message.deadline).or_default() += 1;
            }
        }
        wheel.in_flight.change(in_flight);
        for (tick, acked) in self.acked {
            // The counts of a tick are summed over all shards, so these counts can be in any shard.
            wheel.shards.list[0].lock().of_tick(Tick(tick), wheel.shards.options.wheel).acked += acked;
        }
        let mut expiry = wheel.expiry.lock();
        for (tick, messages) in remembered {
            expiry.remember(Tick(tick), messages);
        }
        drop(expiry);
        self.outbox.restore(&wheel.outbox, away, now);
        in_flight
    }
}

impl<'a> Saved<RingMessages<'a>, OutboxBatches<'a>> {
    /// Stops all changes, publishes all expired messages, and returns the state of the ring and its outbox.
    pub(in crate::memory) fn of(wheel: &'a MemoryWheel, moment: Moment) -> Self {
        let now = moment.now;
        wheel.state.write().saved = true;
        while wheel.publish_expired(now).more {}
        let pointer = wheel.pointer();
        let acked = wheel.shards.open_ticks(pointer).map(|tick| (tick.0, wheel.shards.counts(tick).acked));
        Saved {
            slots: wheel.shards.options.wheel.slots(),
            tick_ms: wheel.shards.options.wheel.tick_ms(),
            unix_ms: moment.unix_ms(),
            epoch: wheel.epoch,
            pointer: pointer.0,
            messages: RingMessages { wheel, pointer, now: wheel.stamp(now) },
            acked: acked.filter(|(_, acked)| *acked > 0).collect(),
            outbox: SavedOutbox::of(&wheel.outbox, now),
        }
    }
}

/// The messages of a ring, for serialization.
pub(in crate::memory) struct RingMessages<'a> {
    wheel: &'a MemoryWheel,
    pointer: Tick,
    now: Stamp,
}

impl Serialize for RingMessages<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // After a drain that expired all ticks, messages whose deadline is the pointer or later are in the outbox.
        let all_expired = self.wheel.next_expired().is_none();
        let is_kept = |entry: &&Entry| !all_expired || entry.deadline.is_before(ShortTick::of(self.pointer));
        let shards = &self.wheel.shards.list;
        let count = shards.iter().map(|shard| shard.lock().table.iter().filter(is_kept).count()).sum();
        let mut sequence = serializer.serialize_seq(Some(count))?;
        for shard in shards {
            let shard = shard.lock();
            for entry in shard.table.iter().filter(is_kept) {
                sequence.serialize_element(&SavedMessage::of(entry, self.pointer, self.now))?;
            }
        }
        sequence.end()
    }
}

impl SavedMessage {
    fn of(entry: &Entry, pointer: Tick, now: Stamp) -> SavedMessage {
        SavedMessage {
            message: entry.message,
            deadline: entry.deadline.seen_from(pointer).0,
            age_units: now.0.wrapping_sub(entry.added_at.0),
            attempt: entry.attempt,
            late_counted: entry.marks.has(Marks::LATE_COUNTED),
        }
    }

    fn entry(&self, now: Stamp) -> Entry {
        // The time without a sidecar does not count for the age of the message.
        let added_at = Stamp(now.0.wrapping_sub(self.age_units));
        let mut entry = Entry::in_flight(self.message, ShortTick::of(Tick(self.deadline)), added_at, self.attempt);
        if self.late_counted {
            entry.marks.set(Marks::LATE_COUNTED);
        }
        entry
    }
}

/// The batches of an outbox, for serialization.
pub(in crate::memory) struct OutboxBatches<'a> {
    outbox: &'a MemoryOutbox,
    now: Instant,
}

impl Serialize for OutboxBatches<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let positions = self.outbox.queue.lock().positions();
        let mut sequence = serializer.serialize_seq(Some(positions.clone().count()))?;
        for position in positions {
            // The queue is not locked while a batch is written.
            let save = |stored: &Stored| (Arc::clone(&stored.batch), stored.expired_at);
            let batch = self.outbox.queue.lock().batches.get(&position).map(save);
            let batch = batch.map(|(batch, expired_at)| SavedBatch::of(&batch, expired_at, self.now));
            sequence.serialize_element(&batch)?;
        }
        sequence.end()
    }
}

impl<'a> SavedOutbox<OutboxBatches<'a>> {
    fn of(outbox: &'a MemoryOutbox, now: Instant) -> Self {
        let queue = outbox.queue.lock();
        let first = queue.positions().start;
        let save_group = |(name, group): (&GroupName, &Group)| SavedGroup {
            name: name.to_string(),
            next: group.next.max(first) - first,
            held: (group.taken.iter().chain(&group.released))
                .map(|(position, count)| (position - first, *count))
                .collect(),
            unattended: now.saturating_duration_since(group.attended_at),
        };
        let groups = queue.groups.iter().filter(|(_, group)| !group.ephemeral).map(save_group).collect();
        SavedOutbox { batches: OutboxBatches { outbox, now }, groups }
    }
}

impl SavedOutbox {
    fn most_bytes(outbox: &MemoryOutbox) -> u64 {
        let queue = outbox.queue.lock();
        let held: usize = queue.groups.values().map(|group| group.taken.len() + group.released.len()).sum();
        queue.ids * TIMED_OUT_BYTES
            + queue.positions().count() as u64 * BATCH_BYTES
            + queue.groups.len() as u64 * GROUP_BYTES
            + held as u64 * HELD_BYTES
    }

    /// Restores an outbox. `away` is the time since it was saved. No subscriber holds a batch after a restart, so all
    /// taken batches are released. The retention time begins again, because no subscriber could take batches during
    /// the restart. Therefore no batch is dropped because the wall clock is wrong.
    fn restore(self, outbox: &MemoryOutbox, away: Duration, now: Instant) {
        let before = |age: Duration| now.checked_sub(age.saturating_add(away)).unwrap_or(now);
        let mut queue = Queue::default();
        for group in self.groups {
            let Ok(name) = group.name.parse::<GroupName>() else { continue };
            let group = Group {
                next: group.next,
                taken: BTreeMap::new(),
                released: group.held.into_iter().collect(),
                unsettled: 0,
                // The time without a sidecar does not count as time without a subscriber.
                attended_at: now.checked_sub(group.unattended).unwrap_or(now),
                ephemeral: false,
            };
            queue.groups.insert(name, group);
        }
        for (position, batch) in (0..).zip(self.batches) {
            let wants = |group: &&mut Group| position >= group.next || group.released.contains_key(&position);
            let mut unsettled = 0;
            for group in queue.groups.values_mut().filter(wants) {
                group.unsettled += u64::from(batch.is_some());
                unsettled += 1;
            }
            match batch {
                // A batch is dropped here if only ephemeral groups had not settled it.
                Some(SavedBatch { id, counts, last, age, messages }) if unsettled > 0 => {
                    let batch = Arc::new(TimeoutBatch { id, counts, last, messages });
                    queue.append(Stored { batch, expired_at: before(age), kept_since: now, unsettled });
                }
                _ => queue.end += 1,
            }
        }
        queue.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        queue.restored_at = Some(now);
        *outbox.queue.lock() = queue;
    }
}

impl SavedBatch {
    fn of(batch: &TimeoutBatch, expired_at: Instant, now: Instant) -> SavedBatch {
        let TimeoutBatch { id, counts, last, messages } = batch.clone();
        SavedBatch { id, counts, last, age: now.saturating_duration_since(expired_at), messages }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::core::single_request::{AddNewMsg, SingleRequest};
    use crate::core::{Advance, Dropped, Outbox, Retention, Ring, StormRule};
    use crate::memory::{MemoryOptions, MemoryRing};

    #[test]
    fn the_layout_of_a_file_does_not_change_with_the_fields_of_core_types() {
        let message = SavedMessage {
            message: Message::new(1, 2),
            deadline: 3,
            age_units: 4,
            attempt: 5,
            late_counted: true,
        };
        assert_eq!(postcard::to_stdvec(&message).unwrap(), [1, 2, 3, 4, 5, 1]);
        let batch = SavedBatch {
            id: BatchId { tick: Tick(1), epoch: 2, ring: 3, seq: 4 },
            counts: TickCounts { added: 5, acked: 6, storm: true, drained: false },
            last: true,
            age: Duration::new(7, 8),
            messages: vec![TimedOut { message: Message::new(9, 10), attempt: 11 }],
        };
        assert_eq!(postcard::to_stdvec(&batch).unwrap(), [1, 2, 3, 4, 5, 6, 1, 0, 1, 7, 8, 1, 9, 10, 11]);
    }

    #[test]
    fn room_is_made_for_what_times_out_while_it_drains() {
        let (start, tick) = (Instant::now(), Duration::from_millis(10));
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), start));
        let options = MemoryOptions {
            wheel: Wheel::new(15, tick).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 1_000_000,
            threads: 1,
        };
        let ring = MemoryRing::new(options, (1, Tick(u64::MAX / 4)), outbox, start);
        for ticks in 1..=15_u16 {
            let messages: Vec<Message> =
                (0..7_000).map(|id| Message::new(u64::MAX - id, u64::MAX - u64::from(ticks))).collect();
            let request = AddNewMsg { messages: &messages, ack_timeout_ticks: ticks, attempt: 1 };
            ring.add_new_msg(request, start).now_or_never().unwrap().unwrap();
        }
        let said = Saved::most_bytes(&ring.wheel);
        let mut now = start;
        for _ in 0..16 {
            now += tick;
            let advanced = ring.advance(now).now_or_never().unwrap().unwrap();
            assert!(matches!(advanced, Advance::Moved { .. }), "{advanced:?}");
            while ring.wheel.publish_expired(now).more {}
        }
        let saved =
            postcard::to_stdvec(&Saved::of(&ring.wheel, Moment { now, unix_time: Duration::ZERO })).unwrap();
        let messages = postcard::from_bytes::<Saved>(&saved).unwrap().messages.len();
        assert_eq!((ring.wheel.in_flight.count(), messages), (0, 15 * 7_000));
        let bytes = saved.len() as u64;
        assert!(bytes <= said, "{bytes} bytes of {said}");
    }

    /// Returns the outbox as read back from a state file.
    fn reread(saved: &SavedOutbox<OutboxBatches<'_>>) -> SavedOutbox {
        postcard::from_bytes(&postcard::to_stdvec(saved).unwrap()).unwrap()
    }

    #[test]
    fn a_group_was_not_left_alone_while_the_sidecar_was_away() {
        let (begun, hour) = (Instant::now(), Duration::from_secs(3_600));
        let retention = Retention { time: 3 * hour, ..Retention::default() };
        let group: GroupName = "logic".parse().unwrap();
        let outbox = MemoryOutbox::new(retention, begun);
        outbox.open_group(&group, GroupOptions::default(), begun).now_or_never().unwrap().unwrap();
        // For two hours there is no subscriber. Then there is no sidecar for ten hours. After that there is again no
        // subscriber.
        let saved = SavedOutbox::of(&outbox, begun + 2 * hour);
        let back = begun + 12 * hour;
        let restored = MemoryOutbox::new(retention, back);
        reread(&saved).restore(&restored, 10 * hour, back);
        let dropped = |now| restored.maintain(&[], now).now_or_never().unwrap().unwrap().groups;
        assert_eq!(dropped(back + hour / 2), []);
        assert_eq!(dropped(back + 2 * hour), [group]);
    }

    #[test]
    fn retention_starts_again_after_a_restart_of_any_length() {
        let (begun, hour) = (Instant::now(), Duration::from_secs(3_600));
        let retention = Retention { time: 3 * hour, ..Retention::default() };
        let outbox = MemoryOutbox::new(retention, begun);
        let group: GroupName = "logic".parse().unwrap();
        outbox.open_group(&group, GroupOptions::default(), begun).now_or_never().unwrap().unwrap();
        let id = BatchId { tick: Tick(7), epoch: 1, ring: 0, seq: 0 };
        let counts = TickCounts { added: 1, acked: 0, storm: false, drained: false };
        let message = TimedOut { message: Message::from(1), attempt: 1 };
        outbox.publish(Arc::new(TimeoutBatch { id, counts, last: true, messages: vec![message] }), begun);
        let saved = reread(&SavedOutbox::of(&outbox, begun + 2 * hour));
        let back = begun + 4 * hour;
        let restored = MemoryOutbox::new(retention, back);
        // The wall clock was set ten years forwards.
        let years = 87_600 * hour;
        saved.restore(&restored, years, back);
        let dropped = |now| restored.maintain(&[], now).now_or_never().unwrap().unwrap();
        assert_eq!(dropped(back + hour), Dropped::default());
        assert_eq!(dropped(back + 3 * hour).batches, 0, "the batch is kept for the whole retention time");
        let taken = restored.take(&group, 1, back + hour).now_or_never().unwrap().unwrap();
        assert_eq!(taken, [], "the group is dropped, but the default group still has the batch");
        let taken = restored.take(&GroupName::default_group(), 1, back + hour).now_or_never().unwrap().unwrap();
        assert_eq!(taken.len(), 1);
        assert_eq!(dropped(back + 3 * hour + Duration::from_secs(1)).batches, 1);
    }

    #[test]
    fn no_outbox_takes_more_than_it_says() {
        let now = Instant::now();
        let outbox = MemoryOutbox::new(Retention::default(), now);
        let group: GroupName = "g".repeat(MAX_NAME_LENGTH).parse().unwrap();
        outbox.open_group(&group, GroupOptions::default(), now).now_or_never().unwrap().unwrap();
        let most = |outbox: &MemoryOutbox| {
            let bytes = postcard::to_stdvec(&SavedOutbox::of(outbox, now)).unwrap().len() as u64;
            let said = SavedOutbox::most_bytes(outbox);
            assert!(bytes <= said, "{bytes} bytes of {said}");
        };
        most(&outbox);
        for seq in 0..2_000 {
            let id = BatchId { tick: Tick(u64::MAX), epoch: u64::MAX, ring: u16::MAX, seq: u32::MAX - seq };
            let counts = TickCounts { added: u64::MAX, acked: 0, storm: false, drained: false };
            let message = TimedOut { message: Message::new(u64::MAX, u64::MAX), attempt: u8::MAX };
            let batch = TimeoutBatch { id, counts, last: true, messages: vec![message] };
            outbox.publish(Arc::new(batch), now);
        }
        most(&outbox);
        while !outbox.take(&group, u64::MAX, now).now_or_never().unwrap().unwrap().is_empty() {}
        most(&outbox);
    }
}
