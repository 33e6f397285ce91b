//! The outbox in memory: one queue of batches, and for each group a position in it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};

use crate::core::batch::{BatchId, Delivery, TimeoutBatch};
use crate::core::group::{GroupName, MAX_GROUPS};
use crate::core::outbox::{Backlog, Dropped, GroupBacklog, GroupOptions, Outbox, Retention, Settled};
use crate::core::refusal::{Reason, Refusal};

type Tell = Box<dyn Fn() + Send + Sync>;

/// An outbox that lives in the process.
pub struct MemoryOutbox {
    retention: Retention,
    pub(super) queue: Mutex<Queue>,
    listeners: RwLock<Vec<Tell>>,
}

/// Batches by position, which counts up for ever, and the groups that read them.
#[derive(Debug)]
pub(super) struct Queue {
    /// The position of the first place.
    pub(super) first: u64,
    /// A place is empty once every group has settled its batch.
    pub(super) places: VecDeque<Option<Stored>>,
    positions: HashMap<BatchId, u64>,
    /// Messages in all batches stored.
    pub(super) ids: u64,
    pub(super) groups: HashMap<GroupName, Group>,
    /// When it was taken over from a state file: groups without a subscriber are kept for a while after that.
    pub(super) restored_at: Option<Instant>,
}

/// The most batches that are taken together. The caller holds a thread meanwhile, and the lock that publishing needs.
const MOST_TAKEN: usize = 512;

/// For how long no group is dropped after a restart, where one is kept for so long at all.
const RESTORED_FOR: Duration = Duration::from_secs(3_600);

#[derive(Debug)]
pub(super) struct Stored {
    pub(super) batch: Arc<TimeoutBatch>,
    pub(super) expired_at: Instant,
    /// Since when it could be taken: its time in a process before this one does not count.
    kept_since: Instant,
    /// Groups that have not settled it.
    pub(super) unsettled: usize,
}

/// The position of a group. It has settled every batch before `next` that is neither taken nor released.
#[derive(Debug)]
pub(super) struct Group {
    /// The first position never taken.
    pub(super) next: u64,
    /// Taken positions, with their delivery counts.
    pub(super) taken: BTreeMap<u64, u32>,
    /// Positions taken before and given back, with their delivery counts.
    pub(super) released: BTreeMap<u64, u32>,
    /// Batches that it has not settled.
    pub(super) unsettled: u64,
    /// When it last had a subscriber.
    pub(super) attended_at: Instant,
    /// Whether it goes with its last subscriber.
    pub(super) ephemeral: bool,
}

impl MemoryOutbox {
    /// An empty outbox with the default group.
    #[must_use]
    pub fn new(retention: Retention, now: Instant) -> MemoryOutbox {
        let mut queue = Queue {
            first: 0,
            places: VecDeque::new(),
            positions: HashMap::new(),
            ids: 0,
            groups: HashMap::new(),
            restored_at: None,
        };
        queue.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        MemoryOutbox { retention, queue: Mutex::new(queue), listeners: RwLock::new(Vec::new()) }
    }

    /// Appends a batch of a tick that expired at `expired_at`.
    pub fn publish(&self, batch: Arc<TimeoutBatch>, expired_at: Instant) {
        self.queue.lock().append(batch, expired_at, expired_at);
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
        Ok(self.queue.lock().take(group, window, now))
    }

    async fn retake(
        &self,
        group: &GroupName,
        batches: &[BatchId],
        now: Instant,
    ) -> Result<Vec<Delivery>, Refusal> {
        let mut queue = self.queue.lock();
        Ok(batches.iter().filter_map(|batch| queue.retake(group, *batch, now)).collect())
    }

    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let mut queue = self.queue.lock();
        let count = batches.iter().map(|batch| u64::from(queue.settle(group, *batch))).sum();
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
        let mut queue = self.queue.lock();
        for group in attended {
            if let Some(group) = queue.groups.get_mut(group) {
                group.attended_at = now;
            }
        }
        Ok(queue.keep_bounds(self.retention, now))
    }

    async fn backlog(&self, now: Instant) -> Result<Backlog, Refusal> {
        let queue = self.queue.lock();
        let mut groups: Vec<_> =
            queue.groups.iter().map(|(name, group)| queue.backlog(name, group, now)).collect();
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(Backlog { ids: queue.ids, groups })
    }

    fn on_new_batches(&self, tell: Tell) {
        self.listeners.write().push(tell);
    }
}

impl Queue {
    fn end(&self) -> u64 {
        self.first + self.places.len() as u64
    }

    /// The batch at a position, if some group has not settled it.
    pub(super) fn stored(&self, position: u64) -> Option<&Stored> {
        self.places.get(index(position.checked_sub(self.first)?))?.as_ref()
    }

    pub(super) fn append(&mut self, batch: Arc<TimeoutBatch>, expired_at: Instant, kept_since: Instant) {
        self.ids += batch.messages.len() as u64;
        self.groups.values_mut().for_each(|group| group.unsettled += 1);
        self.positions.insert(batch.id, self.end());
        self.places.push_back(Some(Stored { batch, expired_at, kept_since, unsettled: self.groups.len() }));
    }

    pub(super) fn open_group(&mut self, name: &GroupName, opening: GroupOptions, now: Instant) -> bool {
        if let Some(group) = self.groups.get_mut(name) {
            group.attended_at = now;
            return false;
        }
        let (next, wanted) = if opening.from_end { (self.end(), 0) } else { (self.first, self.places.len()) };
        let mut unsettled = 0;
        for stored in self.places.iter_mut().take(wanted).flatten() {
            stored.unsettled += 1;
            unsettled += 1;
        }
        let group = Group {
            next,
            taken: BTreeMap::new(),
            released: BTreeMap::new(),
            unsettled,
            attended_at: now,
            ephemeral: opening.ephemeral,
        };
        self.groups.insert(name.clone(), group);
        true
    }

    fn delete_group(&mut self, name: &GroupName) -> bool {
        let Some(group) = self.groups.remove(name) else { return false };
        let untaken = group.next.max(self.first)..self.end();
        for position in group.taken.into_keys().chain(group.released.into_keys()).chain(untaken) {
            self.settled_by_one(position);
        }
        true
    }

    fn take(&mut self, name: &GroupName, window: u64, now: Instant) -> Vec<Delivery> {
        let (mut deliveries, mut ids) = (Vec::new(), 0);
        while ids < window && deliveries.len() < MOST_TAKEN {
            let Some((position, delivery_count)) = self.take_position(name) else { break };
            if let Some(stored) = self.stored(position) {
                ids += stored.batch.messages.len() as u64;
                deliveries.push(stored.deliver(delivery_count, now));
            }
        }
        deliveries
    }

    /// The next position for a group: what was released comes before what was never taken.
    fn take_position(&mut self, name: &GroupName) -> Option<(u64, u32)> {
        let (first, end) = (self.first, self.end());
        let group = self.groups.get_mut(name)?;
        let (position, count) = if let Some((position, count)) = group.released.pop_first() {
            (position, count + 1)
        } else {
            // A place is empty where every group that existed then has settled it: this one opened later.
            let is_stored = |position: &u64| self.places[index(*position - first)].is_some();
            let position = (group.next.max(first)..end).find(is_stored);
            group.next = position.map_or(end, |position| position + 1);
            (position?, 1)
        };
        group.taken.insert(position, count);
        Some((position, count))
    }

    fn retake(&mut self, name: &GroupName, batch: BatchId, now: Instant) -> Option<Delivery> {
        let position = *self.positions.get(&batch)?;
        let count = self.groups.get_mut(name)?.taken.get_mut(&position)?;
        *count += 1;
        let count = *count;
        Some(self.stored(position)?.deliver(count, now))
    }

    fn settle(&mut self, name: &GroupName, batch: BatchId) -> bool {
        let Some(position) = self.positions.get(&batch).copied() else { return false };
        let Some(group) = self.groups.get_mut(name) else { return false };
        let held = group.taken.remove(&position).or_else(|| group.released.remove(&position)).is_some();
        if held {
            group.unsettled -= 1;
            self.settled_by_one(position);
        }
        held
    }

    /// Notes that one group more has settled a batch; the last one removes it.
    fn settled_by_one(&mut self, position: u64) {
        let Some(index) = position.checked_sub(self.first).map(index) else { return };
        let Some(Some(stored)) = self.places.get_mut(index) else { return };
        stored.unsettled -= 1;
        if stored.unsettled == 0 {
            self.ids -= stored.batch.messages.len() as u64;
            self.positions.remove(&stored.batch.id);
            self.places[index] = None;
            self.drop_empty_places();
        }
    }

    pub(super) fn drop_empty_places(&mut self) {
        while let Some(None) = self.places.front() {
            self.places.pop_front();
            self.first += 1;
        }
    }

    fn keep_bounds(&mut self, retention: Retention, now: Instant) -> Dropped {
        let mut dropped = Dropped::default();
        let lasts = |since: Instant, time: Duration| now.saturating_duration_since(since) <= time;
        let is_old = |since: Instant| !lasts(since, retention.time);
        let is_back = self.restored_at.is_some_and(|since| lasts(since, retention.time.min(RESTORED_FOR)));
        while let Some(Some(oldest)) = self.places.front() {
            if self.ids <= retention.max_ids && !is_old(oldest.kept_since) {
                break;
            }
            let ids = oldest.batch.messages.len() as u64;
            self.positions.remove(&oldest.batch.id);
            for group in self.groups.values_mut() {
                let untaken = group.next <= self.first;
                let held = group.taken.remove(&self.first).or_else(|| group.released.remove(&self.first));
                group.unsettled -= u64::from(untaken || held.is_some());
            }
            self.places.pop_front();
            self.first += 1;
            self.ids -= ids;
            dropped.ids += ids;
            dropped.batches += 1;
            self.drop_empty_places();
        }
        let others = self.groups.iter().filter(|(name, _)| !is_back && !name.is_default());
        let abandoned = others.filter(|(_, group)| is_old(group.attended_at));
        dropped.groups = abandoned.map(|(name, _)| name.clone()).collect();
        for group in &dropped.groups {
            self.delete_group(group);
        }
        dropped
    }

    fn backlog(&self, name: &GroupName, group: &Group, now: Instant) -> GroupBacklog {
        let oldest_untaken =
            (group.next.max(self.first)..self.end()).find(|position| self.stored(*position).is_some());
        let (taken, released) = (group.taken.keys().next(), group.released.keys().next());
        let oldest = taken.into_iter().chain(released).copied().chain(oldest_untaken).min();
        let oldest = oldest.and_then(|position| self.stored(position));
        GroupBacklog {
            group: name.clone(),
            batches: group.unsettled,
            unacked: group.taken.len() as u64,
            oldest: oldest
                .map_or_else(Default::default, |stored| now.saturating_duration_since(stored.expired_at)),
        }
    }
}

/// A distance between positions as an index: no queue in memory is longer than an index can say.
fn index(distance: u64) -> usize {
    usize::try_from(distance).expect("a place lies in memory")
}

impl Stored {
    fn deliver(&self, delivery_count: u32, now: Instant) -> Delivery {
        let age = now.saturating_duration_since(self.expired_at);
        Delivery { batch: Arc::clone(&self.batch), delivery_count, age }
    }
}
