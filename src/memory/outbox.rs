//! The outbox in memory: one queue of batches, and the position of each group in this queue.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};

use crate::core::{
    Backlog, BatchId, Delivery, Dropped, GroupBacklog, GroupName, GroupOptions, MAX_GROUPS, Outbox, Reason,
    Refusal, Retention, Settled, TimeoutBatch,
};

type Listener = Box<dyn Fn() + Send + Sync>;

/// An outbox in the memory of the process.
pub struct MemoryOutbox {
    retention: Retention,
    pub(super) queue: Mutex<Queue>,
    listeners: RwLock<Vec<Listener>>,
}

/// The batches that not all groups have settled, and the groups.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// The batches, each at its position in the order of publication.
    pub(super) batches: BTreeMap<u64, Stored>,
    /// The position of the next batch. Positions are never reused.
    pub(super) end: u64,
    positions: HashMap<BatchId, u64>,
    /// The number of messages in all batches.
    pub(super) ids: u64,
    pub(super) groups: HashMap<GroupName, Group>,
    /// When the queue was restored from a state file. For [`RESTORED_FOR`] after that, groups without a subscriber are
    /// not dropped.
    pub(super) restored_at: Option<Instant>,
}

/// The maximum number of batches in one `take`. The call occupies a thread, and publishing waits for its lock.
const MOST_TAKEN: usize = 512;

/// How long after a restart no group is dropped, or the retention time if that is shorter.
const RESTORED_FOR: Duration = Duration::from_secs(3_600);

#[derive(Debug)]
pub(super) struct Stored {
    pub(super) batch: Arc<TimeoutBatch>,
    pub(super) expired_at: Instant,
    /// The beginning of the batch's retention time: when its tick expired, or when this process restored the batch from
    /// a state file.
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

impl MemoryOutbox {
    /// Creates an empty outbox with the default group.
    pub fn new(retention: Retention, now: Instant) -> MemoryOutbox {
        let mut queue = Queue::default();
        queue.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        MemoryOutbox { retention, queue: Mutex::new(queue), listeners: RwLock::default() }
    }

    /// Appends a batch of a tick that expired at `expired_at`.
    pub fn publish(&self, batch: Arc<TimeoutBatch>, expired_at: Instant) {
        let mut queue = self.queue.lock();
        queue.groups.values_mut().for_each(|group| group.unsettled += 1);
        let unsettled = queue.groups.len();
        queue.append(Stored { batch, expired_at, kept_since: expired_at, unsettled });
        drop(queue);
        self.listeners.read().iter().for_each(|notify| notify());
    }
}

#[async_trait]
impl Outbox for MemoryOutbox {
    async fn open_group(&self, group: &GroupName, opening: GroupOptions, now: Instant) -> Result<bool, Refusal> {
        let mut queue = self.queue.lock();
        if !queue.groups.contains_key(group) && queue.groups.len() >= MAX_GROUPS {
            return Err(Refusal::new(
                Reason::TooManyGroups,
                format!("there are {MAX_GROUPS} groups already: delete one with `ackwheel group delete NAME`"),
            ));
        }
        Ok(queue.open_group(group, opening, now))
    }

    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        let mut queue = self.queue.lock();
        if queue.groups.get(group).is_some_and(|group| group.ephemeral) {
            queue.delete_group(group);
        }
        Ok(())
    }

    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        Ok(self.queue.lock().delete_group(group))
    }

    async fn take(&self, group: &GroupName, window: u64, now: Instant) -> Result<Vec<Delivery>, Refusal> {
        let queue = &mut *self.queue.lock();
        let (mut deliveries, mut ids) = (Vec::new(), 0);
        let Some(group) = queue.groups.get_mut(group) else { return Ok(deliveries) };
        while ids < window && deliveries.len() < MOST_TAKEN {
            let (position, count) = if let Some((position, count)) = group.released.pop_first() {
                (position, count + 1)
            } else {
                let Some((position, _)) = queue.batches.range(group.next..).next() else { break };
                group.next = position + 1;
                (*position, 1)
            };
            group.taken.insert(position, count);
            if let Some(stored) = queue.batches.get(&position) {
                ids += stored.batch.messages.len() as u64;
                deliveries.push(stored.deliver(count, now));
            }
        }
        Ok(deliveries)
    }

    async fn retake(
        &self,
        group: &GroupName,
        batches: &[BatchId],
        now: Instant,
    ) -> Result<Vec<Delivery>, Refusal> {
        let queue = &mut *self.queue.lock();
        let retake = |batch: &BatchId| {
            let position = queue.positions.get(batch)?;
            let count = queue.groups.get_mut(group)?.taken.get_mut(position)?;
            *count += 1;
            Some(queue.batches.get(position)?.deliver(*count, now))
        };
        Ok(batches.iter().filter_map(retake).collect())
    }

    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let mut queue = self.queue.lock();
        let count = batches.iter().filter(|batch| queue.settle(group, **batch)).count() as u64;
        Ok(Settled { count, batches: batches.to_vec(), refusal: None })
    }

    async fn release(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        let queue = &mut *self.queue.lock();
        if let Some(group) = queue.groups.get_mut(group) {
            for position in batches.iter().filter_map(|batch| queue.positions.get(batch)) {
                if let Some(count) = group.taken.remove(position) {
                    group.released.insert(*position, count);
                }
            }
        }
        Ok(())
    }

    async fn maintain(&self, attended: &[GroupName], now: Instant) -> Result<Dropped, Refusal> {
        let queue = &mut *self.queue.lock();
        for group in attended {
            if let Some(group) = queue.groups.get_mut(group) {
                group.attended_at = now;
            }
        }
        let mut dropped = Dropped::default();
        let lasts = |since: Instant, time: Duration| now.saturating_duration_since(since) <= time;
        let is_old = |since: Instant| !lasts(since, self.retention.time);
        while let Some((position, oldest)) = queue.batches.first_key_value()
            && (queue.ids > self.retention.max_ids || is_old(oldest.kept_since))
        {
            let position = *position;
            for group in queue.groups.values_mut() {
                let held = group.taken.remove(&position).or_else(|| group.released.remove(&position));
                group.unsettled -= u64::from(group.next <= position || held.is_some());
            }
            dropped.ids += queue.remove(position);
            dropped.batches += 1;
        }
        let restored_for = self.retention.time.min(RESTORED_FOR);
        let is_restored = queue.restored_at.is_some_and(|since| lasts(since, restored_for));
        let others = queue.groups.iter().filter(|(name, _)| !is_restored && !name.is_default());
        let abandoned = others.filter(|(_, group)| is_old(group.attended_at));
        dropped.groups = abandoned.map(|(name, _)| name.clone()).collect();
        for group in &dropped.groups {
            queue.delete_group(group);
        }
        Ok(dropped)
    }

    async fn backlog(&self, now: Instant) -> Result<Backlog, Refusal> {
        let queue = self.queue.lock();
        let backlog = |(name, group): (&GroupName, &Group)| {
            let untaken = queue.batches.range(group.next..).next().map(|(position, _)| position);
            let firsts = [group.taken.keys().next(), group.released.keys().next(), untaken];
            let oldest = firsts.into_iter().flatten().min().and_then(|position| queue.batches.get(position));
            let age = |stored: &Stored| now.saturating_duration_since(stored.expired_at);
            GroupBacklog {
                group: name.clone(),
                batches: group.unsettled,
                unacked: group.taken.len() as u64,
                oldest: oldest.map_or(Duration::ZERO, age),
            }
        };
        let mut groups: Vec<_> = queue.groups.iter().map(backlog).collect();
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(Backlog { ids: queue.ids, groups })
    }

    fn on_new_batches(&self, notify: Listener) {
        self.listeners.write().push(notify);
    }
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
    fn remove(&mut self, position: u64) -> u64 {
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

    fn delete_group(&mut self, name: &GroupName) -> bool {
        let Some(group) = self.groups.remove(name) else { return false };
        let untaken: Vec<u64> = self.batches.range(group.next..).map(|(position, _)| *position).collect();
        for position in group.taken.into_keys().chain(group.released.into_keys()).chain(untaken) {
            self.settle_by_one(position);
        }
        true
    }

    fn settle(&mut self, name: &GroupName, batch: BatchId) -> bool {
        let Some(position) = self.positions.get(&batch).copied() else { return false };
        let Some(group) = self.groups.get_mut(name) else { return false };
        let held = group.taken.remove(&position).or_else(|| group.released.remove(&position)).is_some();
        if held {
            group.unsettled -= 1;
            self.settle_by_one(position);
        }
        held
    }

    /// Records that one more group has settled a batch. Removes the batch if this was the last group.
    fn settle_by_one(&mut self, position: u64) {
        let Some(stored) = self.batches.get_mut(&position) else { return };
        stored.unsettled -= 1;
        if stored.unsettled == 0 {
            self.remove(position);
        }
    }
}

impl Stored {
    fn deliver(&self, delivery_count: u32, now: Instant) -> Delivery {
        let age = now.saturating_duration_since(self.expired_at);
        Delivery { batch: Arc::clone(&self.batch), delivery_count, age }
    }
}
