//! The outbox in memory: one queue of batches, and the position of each group in this queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Mutex, RwLock};

use super::journal::{Buffer, Event};
use super::queue::{Group, Queue, Stored};
use crate::core::{
    Backlog, BatchId, Delivery, Dropped, GroupBacklog, GroupName, GroupOptions, MAX_GROUPS, Outbox, Reason,
    Refusal, Retention, Settled, TimeoutBatch,
};

type Listener = Box<dyn Fn() + Send + Sync>;

/// An outbox in the memory of the process.
pub struct MemoryOutbox {
    retention: Retention,
    pub(super) queue: Mutex<Queue>,
    /// The journal that records all changes, if there is one.
    journal: Option<Arc<Buffer>>,
    listeners: RwLock<Vec<Listener>>,
}

/// The maximum number of batches in one `take`. The call occupies a thread, and publishing waits for its lock.
const MOST_TAKEN: usize = 512;

/// How long after a restart no group is dropped, or the retention time if that is shorter.
const RESTORED_FOR: Duration = Duration::from_secs(3_600);

impl MemoryOutbox {
    /// Creates an empty outbox with the default group.
    pub fn new(retention: Retention, now: Instant) -> MemoryOutbox {
        let mut queue = Queue::default();
        queue.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        MemoryOutbox { retention, queue: Mutex::new(queue), journal: None, listeners: RwLock::default() }
    }

    /// The same, with a journal that records all changes.
    pub(super) fn with_journal(retention: Retention, now: Instant, journal: Arc<Buffer>) -> MemoryOutbox {
        MemoryOutbox { journal: Some(journal), ..MemoryOutbox::new(retention, now) }
    }

    /// Records an event. The caller has locked the queue, so that the order of the records is that of the changes.
    fn record(&self, event: impl FnOnce() -> Event) {
        if let Some(journal) = &self.journal {
            journal.append_event(&event());
        }
    }

    /// Waits until the journal has written everything that was recorded.
    pub(super) async fn recorded(&self) {
        if let Some(journal) = &self.journal {
            journal.all_written().await;
        }
    }

    /// Appends a batch of a tick that expired at `expired_at`.
    pub fn publish(&self, batch: Arc<TimeoutBatch>, expired_at: Instant) {
        let mut queue = self.queue.lock();
        queue.groups.values_mut().for_each(|group| group.unsettled += 1);
        let unsettled = queue.groups.len();
        self.record(|| {
            let expired_lived_ms = self.journal.as_ref().map_or(0, |journal| journal.lived_ms(expired_at));
            Event::Batch { position: queue.end, expired_lived_ms, batch: Arc::clone(&batch) }
        });
        queue.append(Stored { batch, expired_at, kept_since: expired_at, unsettled });
        drop(queue);
        self.listeners.read().iter().for_each(|notify| notify());
    }
}

impl MemoryOutbox {
    fn take_now(&self, name: &GroupName, window: u64, now: Instant) -> Vec<Delivery> {
        let queue = &mut *self.queue.lock();
        let (mut deliveries, mut taken, mut ids) = (Vec::new(), Vec::new(), 0);
        let Some(group) = queue.groups.get_mut(name) else { return deliveries };
        while ids < window && deliveries.len() < MOST_TAKEN {
            let (position, count) = if let Some((position, count)) = group.released.pop_first() {
                (position, count + 1)
            } else {
                let Some((position, _)) = queue.batches.range(group.next..).next() else { break };
                group.next = position + 1;
                (*position, 1)
            };
            group.taken.insert(position, count);
            taken.push((position, count));
            if let Some(stored) = queue.batches.get(&position) {
                ids += stored.batch.messages.len() as u64;
                deliveries.push(stored.deliver(count, now));
            }
        }
        if !taken.is_empty() && !group.ephemeral {
            self.record(|| Event::Taken { group: name.clone(), batches: taken });
        }
        deliveries
    }

    fn retake_now(&self, name: &GroupName, batches: &[BatchId], now: Instant) -> Vec<Delivery> {
        let queue = &mut *self.queue.lock();
        let Some(group) = queue.groups.get_mut(name) else { return Vec::new() };
        let mut taken = Vec::new();
        let retake = |batch: &BatchId| {
            let position = queue.positions.get(batch)?;
            let count = group.taken.get_mut(position)?;
            *count += 1;
            taken.push((*position, *count));
            Some(queue.batches.get(position)?.deliver(*count, now))
        };
        let deliveries = batches.iter().filter_map(retake).collect();
        if !taken.is_empty() && !group.ephemeral {
            self.record(|| Event::Taken { group: name.clone(), batches: taken });
        }
        deliveries
    }
}

#[async_trait]
impl Outbox for MemoryOutbox {
    async fn open_group(&self, group: &GroupName, opening: GroupOptions, now: Instant) -> Result<bool, Refusal> {
        let is_new = {
            let mut queue = self.queue.lock();
            if !queue.groups.contains_key(group) && queue.groups.len() >= MAX_GROUPS {
                return Err(Refusal::new(
                    Reason::TooManyGroups,
                    format!("there are {MAX_GROUPS} groups already: delete one with `ackwheel group delete NAME`"),
                ));
            }
            let is_new = queue.open_group(group, opening, now);
            if is_new && !opening.ephemeral {
                let next = queue.groups.get(group).map_or(0, |group| group.next);
                self.record(|| Event::Opened { group: group.clone(), next });
            }
            is_new
        };
        self.recorded().await;
        Ok(is_new)
    }

    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        let mut queue = self.queue.lock();
        if queue.groups.get(group).is_some_and(|group| group.ephemeral) {
            queue.delete_group(group);
        }
        Ok(())
    }

    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let is_deleted = {
            let mut queue = self.queue.lock();
            self.record(|| Event::Deleted { group: group.clone() });
            queue.delete_group(group)
        };
        self.recorded().await;
        Ok(is_deleted)
    }

    async fn take(&self, group: &GroupName, window: u64, now: Instant) -> Result<Vec<Delivery>, Refusal> {
        let deliveries = self.take_now(group, window, now);
        if !deliveries.is_empty() {
            self.recorded().await;
        }
        Ok(deliveries)
    }

    async fn retake(
        &self,
        group: &GroupName,
        batches: &[BatchId],
        now: Instant,
    ) -> Result<Vec<Delivery>, Refusal> {
        let deliveries = self.retake_now(group, batches, now);
        if !deliveries.is_empty() {
            self.recorded().await;
        }
        Ok(deliveries)
    }

    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let count = {
            let mut queue = self.queue.lock();
            let positions: Vec<u64> = batches.iter().filter_map(|batch| queue.settle(group, *batch)).collect();
            let count = positions.len() as u64;
            if count > 0 && !queue.groups.get(group).is_some_and(|group| group.ephemeral) {
                self.record(|| Event::Settled { group: group.clone(), positions });
            }
            count
        };
        self.recorded().await;
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
            self.record(|| Event::DroppedBefore { position: position + 1 });
        }
        let restored_for = self.retention.time.min(RESTORED_FOR);
        let is_restored = queue.restored_at.is_some_and(|since| lasts(since, restored_for));
        let others = queue.groups.iter().filter(|(name, _)| !is_restored && !name.is_default());
        let abandoned = others.filter(|(_, group)| is_old(group.attended_at));
        dropped.groups = abandoned.map(|(name, _)| name.clone()).collect();
        for group in &dropped.groups {
            self.record(|| Event::Deleted { group: group.clone() });
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
