//! The queue of an outbox in memory: the batches by position, and the position of each group.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::core::{BatchId, Delivery, GroupName, GroupOptions, TimeoutBatch};

/// The batches that not all groups have settled, and the groups.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// The batches, each at its position in the order of publication.
    pub(super) batches: BTreeMap<u64, Stored>,
    /// The position of the next batch. Positions are never reused.
    pub(super) end: u64,
    pub(super) positions: HashMap<BatchId, u64>,
    /// The number of messages in all batches.
    pub(super) ids: u64,
    pub(super) groups: HashMap<GroupName, Group>,
    /// When the queue was restored from a journal. For an hour after that, groups without a subscriber are
    /// not dropped.
    pub(super) restored_at: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Stored {
    pub(super) batch: Arc<TimeoutBatch>,
    pub(super) expired_at: Instant,
    /// The beginning of the batch's retention time: when its tick expired, or when this process restored the batch from
    /// a journal.
    pub(super) kept_since: Instant,
    /// The number of groups that have not settled the batch.
    pub(super) unsettled: usize,
}

/// The state of a group in the queue. The group has settled every batch before `next` that is neither in `taken` nor
/// in `released`.
#[derive(Debug)]
pub(super) struct Group {
    /// The first position that the group has never taken.
    pub(super) next: u64,
    /// The positions of taken batches, with their delivery counts.
    pub(super) taken: BTreeMap<u64, u32>,
    /// The positions of batches that were taken and then released, with their delivery counts.
    pub(super) released: BTreeMap<u64, u32>,
    /// The number of batches that the group has not settled.
    pub(super) unsettled: u64,
    /// When the group last had a subscriber.
    pub(super) attended_at: Instant,
    /// Whether the group is deleted when its last subscriber leaves.
    pub(super) ephemeral: bool,
}

impl Queue {
    /// Returns the positions from the oldest batch to the end.
    pub(super) fn positions(&self) -> Range<u64> {
        self.batches.first_key_value().map_or(self.end, |(position, _)| *position)..self.end
    }

    pub(super) fn append(&mut self, stored: Stored) {
        self.ids += stored.batch.messages.len() as u64;
        self.positions.insert(stored.batch.id, self.end);
        self.batches.insert(self.end, stored);
        self.end += 1;
    }

    /// Removes a batch. Returns the number of its messages.
    pub(super) fn remove(&mut self, position: u64) -> u64 {
        let Some(stored) = self.batches.remove(&position) else { return 0 };
        let ids = stored.batch.messages.len() as u64;
        self.ids -= ids;
        self.positions.remove(&stored.batch.id);
        ids
    }

    pub(super) fn open_group(&mut self, name: &GroupName, opening: GroupOptions, now: Instant) -> bool {
        if let Some(group) = self.groups.get_mut(name) {
            group.attended_at = now;
            return false;
        }
        let next = if opening.from_end { self.end } else { 0 };
        let mut unsettled = 0;
        for (_, stored) in self.batches.range_mut(next..) {
            stored.unsettled += 1;
            unsettled += 1;
        }
        let (taken, released, ephemeral) = (BTreeMap::new(), BTreeMap::new(), opening.ephemeral);
        self.groups.insert(name.clone(), Group { next, taken, released, unsettled, attended_at: now, ephemeral });
        true
    }

    pub(super) fn delete_group(&mut self, name: &GroupName) -> bool {
        let Some(group) = self.groups.remove(name) else { return false };
        let untaken: Vec<u64> = self.batches.range(group.next..).map(|(position, _)| *position).collect();
        for position in group.taken.into_keys().chain(group.released.into_keys()).chain(untaken) {
            self.settle_by_one(position);
        }
        true
    }

    /// Settles a batch for a group. Returns its position, or `None` if the group does not hold it.
    pub(super) fn settle(&mut self, name: &GroupName, batch: BatchId) -> Option<u64> {
        let position = self.positions.get(&batch).copied()?;
        let group = self.groups.get_mut(name)?;
        group.taken.remove(&position).or_else(|| group.released.remove(&position))?;
        group.unsettled -= 1;
        self.settle_by_one(position);
        Some(position)
    }

    /// Inserts a batch of a journal at its position, unless it is there: a checkpoint repeats batches.
    pub(super) fn insert(&mut self, position: u64, batch: Arc<TimeoutBatch>, expired_at: Instant) {
        if self.batches.contains_key(&position) {
            return;
        }
        let end = std::mem::replace(&mut self.end, position);
        self.append(Stored { batch, expired_at, kept_since: expired_at, unsettled: self.groups.len() });
        // Others may have been published while the checkpoint was written.
        self.end = self.end.max(end);
    }

    /// Removes all batches before a position.
    pub(super) fn drop_before(&mut self, position: u64) {
        while let Some((first, _)) = self.batches.first_key_value()
            && *first < position
        {
            let first = *first;
            self.remove(first);
        }
        for group in self.groups.values_mut() {
            group.released = group.released.split_off(&position);
        }
    }

    /// Records that one more group has settled a batch. Removes the batch if this was the last group.
    pub(super) fn settle_by_one(&mut self, position: u64) {
        let Some(stored) = self.batches.get_mut(&position) else { return };
        stored.unsettled = stored.unsettled.saturating_sub(1);
        if stored.unsettled == 0 {
            self.remove(position);
        }
    }
}

impl Group {
    /// Restores a group of a journal, which has settled all batches before a position.
    pub(super) fn restored(next: u64, now: Instant) -> Group {
        let (taken, released) = (BTreeMap::new(), BTreeMap::new());
        Group { next, taken, released, unsettled: 0, attended_at: now, ephemeral: false }
    }
}

impl Stored {
    pub(super) fn deliver(&self, delivery_count: u32, now: Instant) -> Delivery {
        let age = now.saturating_duration_since(self.expired_at);
        Delivery { batch: Arc::clone(&self.batch), delivery_count, age }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::core::{Tick, TickCounts};

    #[test]
    fn a_batch_that_is_inserted_again_frees_no_position_of_a_later_one() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let batch = |seq| TimeoutBatch {
            id: BatchId { tick: Tick(7), epoch: 1, ring: 0, seq },
            counts: TickCounts::default(),
            last: false,
            messages: Vec::new(),
        };
        for position in [5, 6, 5] {
            queue.insert(
                position,
                Arc::new(batch(u32::try_from(position).unwrap())),
                now + Duration::from_secs(1),
            );
        }
        assert_eq!((queue.positions(), queue.batches.len()), (5..7, 2));
    }
}
