//! Combines the outboxes of several rings into one outbox for the delivery.
//!
//! A store has one or more rings, each with its own outbox. Each consumer group exists in all of these outboxes. The
//! rings take turns in delivering. Within a ring, earlier ticks are delivered first. The id of a batch contains the
//! number of its ring, and calls about the batch go to that ring.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use futures_util::future::join_all;

use super::batch::{BatchId, Delivery};
use super::group::GroupName;
use super::outbox::{Backlog, Dropped, GroupBacklog, GroupOptions, Outbox, Settled};
use super::refusal::{Refusal, all_answers};
use super::store::RingParts;

/// The outboxes of several rings, used as one.
pub struct CombinedOutbox {
    /// The outbox of each ring. The outbox of ring i is at index i.
    outboxes: Vec<Arc<dyn Outbox>>,
    /// The number of `take` calls so far. It selects the ring at which the next call begins, so that rings take turns.
    turn: AtomicUsize,
}

impl CombinedOutbox {
    /// Combines the outboxes of all rings. A single outbox is returned without a wrapper.
    ///
    /// # Panics
    ///
    /// Panics if there are no rings.
    pub fn of(rings: &[RingParts]) -> Arc<dyn Outbox> {
        let outboxes: Vec<_> = rings.iter().map(|parts| Arc::clone(&parts.outbox)).collect();
        match &*outboxes {
            [] => panic!("a store has at least one ring"),
            [single] => Arc::clone(single),
            _ => Arc::new(CombinedOutbox { outboxes, turn: AtomicUsize::new(0) }),
        }
    }

    /// Groups batches by ring. Returns the outbox of each ring that has batches, together with these batches. Leaves
    /// out batches of rings that do not exist, because a subscriber can send any id.
    fn by_ring(&self, batches: &[BatchId]) -> Vec<(&dyn Outbox, Vec<BatchId>)> {
        let own = |ring| batches.iter().copied().filter(|batch| usize::from(batch.ring) == ring).collect();
        let parts = self.outboxes.iter().enumerate().map(|(ring, outbox)| (&**outbox, own(ring)));
        parts.filter(|(_, part): &(_, Vec<BatchId>)| !part.is_empty()).collect()
    }
}

#[async_trait]
impl Outbox for CombinedOutbox {
    async fn open_group(&self, group: &GroupName, opening: GroupOptions, now: Instant) -> Result<bool, Refusal> {
        let calls = self.outboxes.iter().map(|outbox| outbox.open_group(group, opening, now));
        Ok(all_answers(join_all(calls).await)?.contains(&true))
    }

    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        let calls = self.outboxes.iter().map(|outbox| outbox.leave_group(group));
        all_answers(join_all(calls).await).map(drop)
    }

    /// Deletes the group in one ring after the other, and stops at the first refusal. If a ring refuses because the
    /// group has subscribers, the later rings keep the group too.
    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let mut answers = Vec::new();
        for outbox in &self.outboxes {
            answers.push(outbox.delete_group(group).await);
            if answers.last().is_some_and(Result::is_err) {
                break;
            }
        }
        all_answers(answers).map(|deleted| deleted.contains(&true))
    }

    fn is_shared(&self) -> bool {
        self.outboxes.iter().any(|outbox| outbox.is_shared())
    }

    /// Takes batches from one ring after the other until they contain `window` messages. If a ring refuses, the call
    /// still returns the batches of the other rings. These batches are now taken, so no later `take` returns them.
    /// Refuses only if no batch was taken.
    async fn take(&self, group: &GroupName, window: u64, now: Instant) -> Result<Vec<Delivery>, Refusal> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % self.outboxes.len();
        let (mut taken, mut left, mut refused) = (Vec::new(), window, None);
        for outbox in self.outboxes.iter().cycle().skip(first).take(self.outboxes.len()) {
            match outbox.take(group, left, now).await {
                Ok(deliveries) => taken.extend(deliveries),
                Err(refusal) => refused = refused.or(Some(refusal)),
            }
            let messages: usize = taken.iter().map(|delivery: &Delivery| delivery.batch.messages.len()).sum();
            left = window.saturating_sub(messages as u64);
            if left == 0 {
                break;
            }
        }
        refused.filter(|_| taken.is_empty()).map_or(Ok(taken), Err)
    }

    async fn retake(
        &self,
        group: &GroupName,
        batches: &[BatchId],
        now: Instant,
    ) -> Result<Vec<Delivery>, Refusal> {
        match batches.first().and_then(|batch| self.outboxes.get(usize::from(batch.ring))) {
            Some(outbox) => outbox.retake(group, batches, now).await,
            None => Ok(Vec::new()),
        }
    }

    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let parts = self.by_ring(batches);
        Settled::sum(join_all(parts.iter().map(|(outbox, part)| outbox.settle(group, part))).await, "rings")
    }

    async fn release(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        let parts = self.by_ring(batches);
        all_answers(join_all(parts.iter().map(|(outbox, part)| outbox.release(group, part))).await).map(drop)
    }

    async fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        let parts = self.by_ring(batches);
        all_answers(join_all(parts.iter().map(|(outbox, part)| outbox.lend(group, part))).await).map(drop)
    }

    /// Enforces the retention limits in all rings. If a ring refuses, the call still returns what the other rings
    /// dropped, because no later call reports these drops.
    async fn maintain(&self, attended: &[GroupName], now: Instant) -> Result<Dropped, Refusal> {
        let (mut sum, mut refused) = (Dropped::default(), None);
        for answer in join_all(self.outboxes.iter().map(|outbox| outbox.maintain(attended, now))).await {
            match answer {
                Ok(dropped) => {
                    sum.ids += dropped.ids;
                    sum.batches += dropped.batches;
                    sum.groups.extend(dropped.groups);
                }
                Err(refusal) => refused = refused.or(Some(refusal)),
            }
        }
        // A group that several rings dropped is listed once.
        sum.groups.sort_unstable();
        sum.groups.dedup();
        refused.filter(|_| sum == Dropped::default()).map_or(Ok(sum), Err)
    }

    async fn backlog(&self, now: Instant) -> Result<Backlog, Refusal> {
        let calls = self.outboxes.iter().map(|outbox| outbox.backlog(now));
        all_answers(join_all(calls).await).map(merge_backlogs)
    }

    fn on_new_batches(&self, notify: Box<dyn Fn() + Send + Sync>) {
        let notify: Arc<dyn Fn() + Send + Sync> = Arc::from(notify);
        for outbox in &self.outboxes {
            let notify = Arc::clone(&notify);
            outbox.on_new_batches(Box::new(move || notify()));
        }
    }
}

/// Adds up the backlogs of several rings. The age of the oldest batch is the highest age in any ring.
pub fn merge_backlogs(backlogs: Vec<Backlog>) -> Backlog {
    let ids = backlogs.iter().map(|backlog| backlog.ids).sum();
    let mut merged: BTreeMap<GroupName, GroupBacklog> = BTreeMap::new();
    for backlog in backlogs.into_iter().flat_map(|backlog| backlog.groups) {
        let add = |sum: &mut GroupBacklog| {
            sum.batches += backlog.batches;
            sum.unacked += backlog.unacked;
            sum.oldest = sum.oldest.max(backlog.oldest);
        };
        merged.entry(backlog.group.clone()).and_modify(add).or_insert(backlog);
    }
    Backlog { ids, groups: merged.into_values().collect() }
}
