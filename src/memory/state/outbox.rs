//! The outbox in a state file.
//!
//! Ephemeral groups are left out: they go with their last subscriber, and none survives the process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::ser::SerializeSeq;
use serde::{Deserialize, Serialize, Serializer};

use crate::core::batch::{BatchId, TickCounts, TimedOut, TimeoutBatch};
use crate::core::group::{GroupName, MAX_NAME_LENGTH};
use crate::core::message::Message;
use crate::core::outbox::GroupOptions;
use crate::core::tick::Tick;
use crate::memory::outbox::{Group, MemoryOutbox, Stored};

/// An outbox in a state file. Positions count from the oldest batch saved.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::memory) struct SavedOutbox<Batches = Vec<Option<SavedBatch>>> {
    batches: Batches,
    groups: Vec<SavedGroup>,
}

/// The batches of an outbox, written one at a time from where they are.
pub(in crate::memory) struct StoredBatches<'a> {
    outbox: &'a MemoryOutbox,
    /// The position of the oldest.
    first: u64,
    places: usize,
    now: Instant,
}

impl SavedOutbox<StoredBatches<'_>> {
    /// How many batches some group has not acknowledged.
    pub(in crate::memory) fn count(&self) -> usize {
        self.batches.outbox.queue.lock().places.iter().flatten().count()
    }
}

impl Serialize for StoredBatches<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut sequence = serializer.serialize_seq(Some(self.places))?;
        for position in (self.first..).take(self.places) {
            // Nothing is locked while it is written.
            let save = |stored: &Stored| (Arc::clone(&stored.batch), stored.expired_at);
            let batch = self.outbox.queue.lock().stored(position).map(save);
            let batch = batch.map(|(batch, expired_at)| SavedBatch::of(&batch, expired_at, self.now));
            sequence.serialize_element(&batch)?;
        }
        sequence.end()
    }
}

/// A batch in a state file.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::memory) struct SavedBatch {
    tick: u64,
    epoch: u64,
    ring: u16,
    seq: u32,
    added: u64,
    acked: u64,
    storm: bool,
    drained: bool,
    last: bool,
    age: Duration,
    /// msg_id, client, attempt.
    messages: Vec<(u64, u64, u8)>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedGroup {
    name: String,
    next: u64,
    /// Positions before `next` that are not settled, with their delivery counts.
    held: Vec<(u64, u32)>,
    unattended: Duration,
}

/// The most bytes that a message of a batch takes: numbers are as long as they are large.
pub(in crate::memory) const MESSAGE_BYTES: u64 = 10 + 10 + 1;
/// And a batch, without them.
const BATCH_BYTES: u64 = 1 + 10 + 10 + 3 + 5 + 10 + 10 + 3 + 15 + 5;
/// And a group, with its name and without the batches that it holds.
const GROUP_BYTES: u64 = 2 + MAX_NAME_LENGTH as u64 + 10 + 5 + 15;
/// And one of those.
const HELD_BYTES: u64 = 10 + 5;

impl MemoryOutbox {
    /// The most bytes that it takes in a state file.
    pub(in crate::memory) fn most_saved_bytes(&self) -> u64 {
        let queue = self.queue.lock();
        let held: usize = queue.groups.values().map(|group| group.taken.len() + group.released.len()).sum();
        queue.ids * MESSAGE_BYTES
            + queue.places.len() as u64 * BATCH_BYTES
            + queue.groups.len() as u64 * GROUP_BYTES
            + held as u64 * HELD_BYTES
    }

    /// The state to keep, which does not change any more.
    pub(in crate::memory) fn save(&self, now: Instant) -> SavedOutbox<StoredBatches<'_>> {
        let queue = self.queue.lock();
        let save_group = |(name, group): (&GroupName, &Group)| SavedGroup {
            name: name.to_string(),
            next: group.next.max(queue.first) - queue.first,
            held: (group.taken.iter().chain(&group.released))
                .map(|(position, count)| (position - queue.first, *count))
                .collect(),
            unattended: now.saturating_duration_since(group.attended_at),
        };
        SavedOutbox {
            batches: StoredBatches { outbox: self, first: queue.first, places: queue.places.len(), now },
            groups: queue.groups.iter().filter(|(_, group)| !group.ephemeral).map(save_group).collect(),
        }
    }

    /// Puts back what was saved `away` ago. After a restart no subscriber holds a batch: all are released. Retention
    /// starts again, since no subscriber could take them before; so a wrong clock drops nothing.
    pub(in crate::memory) fn restore(&self, saved: SavedOutbox, away: Duration, now: Instant) {
        let before = |age: Duration| now.checked_sub(age.saturating_add(away)).unwrap_or(now);
        let mut queue = self.queue.lock();
        queue.groups.clear();
        for group in saved.groups {
            let Ok(name) = group.name.parse::<GroupName>() else { continue };
            let group = Group {
                next: group.next,
                taken: BTreeMap::new(),
                released: group.held.into_iter().collect(),
                unsettled: 0,
                // While the sidecar was away no subscriber could attend.
                attended_at: now.checked_sub(group.unattended).unwrap_or(now),
                ephemeral: false,
            };
            queue.groups.insert(name, group);
        }
        for (position, batch) in (0..).zip(saved.batches) {
            let wants = |group: &Group| position >= group.next || group.released.contains_key(&position);
            let unsettled = queue.groups.values().filter(|group| wants(group)).count();
            // A batch that only an ephemeral group had not settled is dropped.
            let Some(batch) = batch.filter(|_| unsettled > 0) else {
                queue.places.push_back(None);
                continue;
            };
            let expired_at = before(batch.age);
            queue.append(Arc::new(batch.restore()), expired_at, now);
            // Appended for all; some had settled it.
            queue.groups.values_mut().filter(|group| !wants(group)).for_each(|group| group.unsettled -= 1);
            if let Some(Some(stored)) = queue.places.back_mut() {
                stored.unsettled = unsettled;
            }
        }
        queue.drop_empty_places();
        queue.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        queue.restored_at = Some(now);
    }
}

impl SavedBatch {
    fn of(batch: &TimeoutBatch, expired_at: Instant, now: Instant) -> SavedBatch {
        let TimeoutBatch { id, counts, last, messages } = batch;
        let message =
            |timed_out: &TimedOut| (timed_out.message.msg_id.0, timed_out.message.client.0, timed_out.attempt);
        SavedBatch {
            tick: id.tick.0,
            epoch: id.epoch,
            ring: id.ring,
            seq: id.seq,
            added: counts.added,
            acked: counts.acked,
            storm: counts.storm,
            drained: counts.drained,
            last: *last,
            age: now.saturating_duration_since(expired_at),
            messages: messages.iter().map(message).collect(),
        }
    }

    fn restore(self) -> TimeoutBatch {
        let message = |(msg_id, client, attempt)| TimedOut { message: Message::new(msg_id, client), attempt };
        TimeoutBatch {
            id: BatchId { tick: Tick(self.tick), epoch: self.epoch, ring: self.ring, seq: self.seq },
            counts: TickCounts { added: self.added, acked: self.acked, storm: self.storm, drained: self.drained },
            last: self.last,
            messages: self.messages.into_iter().map(message).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::core::outbox::{Dropped, Outbox, Retention};

    /// The outbox after a round through a state file.
    fn reread(saved: &SavedOutbox<StoredBatches<'_>>) -> SavedOutbox {
        postcard::from_bytes(&postcard::to_stdvec(saved).unwrap()).unwrap()
    }

    #[test]
    fn a_group_was_not_left_alone_while_the_sidecar_was_away() {
        let (begun, hour) = (Instant::now(), Duration::from_secs(3_600));
        let retention = Retention { time: 3 * hour, ..Retention::default() };
        let group: GroupName = "logic".parse().unwrap();
        let outbox = MemoryOutbox::new(retention, begun);
        outbox.open_group(&group, GroupOptions::default(), begun).now_or_never().unwrap().unwrap();
        // For two hours there is no subscriber, then for ten no sidecar, and then again no subscriber.
        let saved = outbox.save(begun + 2 * hour);
        let back = begun + 12 * hour;
        let restored = MemoryOutbox::new(retention, back);
        restored.restore(reread(&saved), 10 * hour, back);
        let dropped = |now| restored.maintain(&[], now).now_or_never().unwrap().unwrap().groups;
        assert_eq!(dropped(back + hour / 2), []);
        assert_eq!(dropped(back + 2 * hour), [group]);
    }

    #[test]
    fn retention_counts_anew_after_a_restart_however_long_the_clock_says_it_took() {
        let (begun, hour) = (Instant::now(), Duration::from_secs(3_600));
        let retention = Retention { time: 3 * hour, ..Retention::default() };
        let outbox = MemoryOutbox::new(retention, begun);
        let group: GroupName = "logic".parse().unwrap();
        outbox.open_group(&group, GroupOptions::default(), begun).now_or_never().unwrap().unwrap();
        let id = BatchId { tick: Tick(7), epoch: 1, ring: 0, seq: 0 };
        let counts = TickCounts { added: 1, acked: 0, storm: false, drained: false };
        let message = TimedOut { message: Message::from(1), attempt: 1 };
        outbox.publish(Arc::new(TimeoutBatch { id, counts, last: true, messages: vec![message] }), begun);
        let saved = reread(&outbox.save(begun + 2 * hour));
        let back = begun + 4 * hour;
        let restored = MemoryOutbox::new(retention, back);
        // The clock was set ten years forwards.
        let years = 87_600 * hour;
        restored.restore(saved, years, back);
        let dropped = |now| restored.maintain(&[], now).now_or_never().unwrap().unwrap();
        assert_eq!(dropped(back + hour), Dropped::default());
        assert_eq!(dropped(back + 3 * hour).batches, 0, "as long as any other");
        let taken = restored.take(&group, 1, back + hour).now_or_never().unwrap().unwrap();
        assert_eq!(taken, [], "the group was gone by then, and the batch is there for the default group");
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
            let bytes = postcard::to_stdvec(&outbox.save(now)).unwrap().len() as u64;
            let said = outbox.most_saved_bytes();
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
