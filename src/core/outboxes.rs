//! The outboxes of several rings as one, for the delivery.
//!
//! A group exists in all of them. Rings take turns in delivering. A call about a batch goes to the ring in its id.
//! Within a ring earlier ticks go first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::batch::{BatchId, Delivery};
use super::group::GroupName;
use super::outbox::{Backlog, Dropped, GroupBacklog, GroupOptions, Outbox, Settled};
use super::ring::Reply;
use super::rings::all_answers;
use super::store::RingParts;

/// The outboxes of several rings.
pub struct Outboxes {
    /// By the number of the ring.
    outboxes: Arc<[Arc<dyn Outbox>]>,
    /// The ring that the next `take` asks first, modulo their number.
    turn: AtomicUsize,
}

impl Outboxes {
    /// The outboxes of all rings as one. A single outbox is returned as it is.
    ///
    /// # Panics
    ///
    /// If there are no rings.
    #[must_use]
    pub fn of(rings: &[RingParts]) -> Arc<dyn Outbox> {
        let outboxes: Arc<[_]> = rings.iter().map(|parts| Arc::clone(&parts.outbox)).collect();
        match &*outboxes {
            [] => panic!("a store has at least one ring"),
            [single] => Arc::clone(single),
            _ => Arc::new(Outboxes { outboxes, turn: AtomicUsize::new(0) }),
        }
    }

    /// Calls all rings.
    fn call_all<T>(&self, call: impl Fn(&dyn Outbox) -> Reply<T>) -> Vec<Reply<T>> {
        self.outboxes.iter().map(|outbox| call(&**outbox)).collect()
    }

    /// Calls each ring with its own batches. A client can name rings that do not exist; their batches are left out.
    fn by_ring<T>(
        &self,
        batches: &[BatchId],
        call: impl Fn(&dyn Outbox, &[BatchId]) -> Reply<T>,
    ) -> Vec<Reply<T>> {
        let mut parts: BTreeMap<u16, Vec<BatchId>> = BTreeMap::new();
        for batch in batches {
            parts.entry(batch.ring).or_default().push(*batch);
        }
        let calls =
            parts.into_iter().map(|(ring, part)| Some(call(&**self.outboxes.get(usize::from(ring))?, &part)));
        calls.flatten().collect()
    }
}

fn merged<T: Send + 'static, A>(
    replies: Vec<Reply<T>>,
    merge: impl FnOnce(Vec<T>) -> A + Send + 'static,
) -> Reply<A> {
    Reply::Later(Box::pin(async move { all_answers(join_all(replies).await).map(merge) }))
}

impl Outbox for Outboxes {
    fn open_group(&self, group: &GroupName, opening: GroupOptions, now: Instant) -> Reply<bool> {
        merged(self.call_all(|outbox| outbox.open_group(group, opening, now)), |created| created.contains(&true))
    }

    fn leave_group(&self, group: &GroupName) -> Reply<()> {
        merged(self.call_all(|outbox| outbox.leave_group(group)), |_| ())
    }

    /// Calls one ring after the other, so that no ring deletes a group that is in use at another.
    fn delete_group(&self, group: &GroupName) -> Reply<bool> {
        let (outboxes, group) = (Arc::clone(&self.outboxes), group.clone());
        Reply::Later(Box::pin(async move {
            let mut answers = Vec::new();
            for outbox in outboxes.iter() {
                answers.push(outbox.delete_group(&group).await);
                if answers.last().is_some_and(Result::is_err) {
                    break;
                }
            }
            all_answers(answers).map(|deleted| deleted.contains(&true))
        }))
    }

    fn is_shared(&self) -> bool {
        self.outboxes.iter().any(|outbox| outbox.is_shared())
    }

    /// Calls one ring after the other, since each takes as much of the window as it can fill. Batches that were taken
    /// are delivered even if another ring refuses, because no later call returns them.
    fn take(&self, group: &GroupName, window: u64, now: Instant) -> Reply<Vec<Delivery>> {
        let (outboxes, group) = (Arc::clone(&self.outboxes), group.clone());
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % outboxes.len();
        Reply::Later(Box::pin(async move {
            let (mut taken, mut left, mut refused) = (Vec::new(), window, None);
            for outbox in outboxes.iter().cycle().skip(first).take(outboxes.len()) {
                match outbox.take(&group, left, now).await {
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
        }))
    }

    fn retake(&self, group: &GroupName, batches: &[BatchId], now: Instant) -> Reply<Vec<Delivery>> {
        match batches.first().and_then(|batch| self.outboxes.get(usize::from(batch.ring))) {
            Some(outbox) => outbox.retake(group, batches, now),
            None => Reply::ok(Vec::new()),
        }
    }

    /// If a ring refuses, the batches that others settled are returned all the same.
    fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Reply<Settled> {
        let replies = self.by_ring(batches, |outbox, part| outbox.settle(group, part));
        Reply::Later(Box::pin(async move {
            let mut sum = Settled::default();
            let parts = join_all(replies).await.into_iter().map(|part| sum.add(part)).collect();
            let refusal = all_answers(parts).err();
            match refusal {
                Some(refusal) if sum.batches.is_empty() => Err(refusal),
                refusal => Ok(Settled { refusal, ..sum }),
            }
        }))
    }

    fn release(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        merged(self.by_ring(batches, |outbox, part| outbox.release(group, part)), |_| ())
    }

    fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        merged(self.by_ring(batches, |outbox, part| outbox.lend(group, part)), |_| ())
    }

    /// If a ring refuses, the drops of the others are returned all the same, because no later call reports them.
    fn maintain(&self, attended: &[GroupName], now: Instant) -> Reply<Dropped> {
        let replies = self.call_all(|outbox| outbox.maintain(attended, now));
        Reply::Later(Box::pin(async move {
            let (mut sum, mut refused) = (Dropped::default(), None);
            for answer in join_all(replies).await {
                match answer {
                    Ok(dropped) => {
                        sum.ids += dropped.ids;
                        sum.batches += dropped.batches;
                        sum.groups.extend(dropped.groups);
                    }
                    Err(refusal) => refused = refused.or(Some(refusal)),
                }
            }
            // A group that several rings dropped is one group.
            sum.groups.sort_unstable();
            sum.groups.dedup();
            refused.filter(|_| sum == Dropped::default()).map_or(Ok(sum), Err)
        }))
    }

    fn backlog(&self, now: Instant) -> Reply<Backlog> {
        merged(self.call_all(|outbox| outbox.backlog(now)), merge_backlogs)
    }

    fn on_new_batches(&self, notify: Box<dyn Fn() + Send + Sync>) {
        let notify: Arc<dyn Fn() + Send + Sync> = Arc::from(notify);
        for outbox in self.outboxes.iter() {
            let notify = Arc::clone(&notify);
            outbox.on_new_batches(Box::new(move || notify()));
        }
    }
}

/// The sum of the backlogs of several rings.
#[must_use]
pub fn merge_backlogs(backlogs: Vec<Backlog>) -> Backlog {
    let ids = backlogs.iter().map(|backlog| backlog.ids).sum();
    let mut merged: BTreeMap<GroupName, GroupBacklog> = BTreeMap::new();
    for backlog in backlogs.into_iter().flat_map(|backlog| backlog.groups) {
        let GroupBacklog { group, batches, unacked, oldest } = backlog;
        let empty = GroupBacklog { group: group.clone(), batches: 0, unacked: 0, oldest: Duration::ZERO };
        let sum = merged.entry(group).or_insert(empty);
        sum.batches += batches;
        sum.unacked += unacked;
        sum.oldest = sum.oldest.max(oldest);
    }
    Backlog { ids, groups: merged.into_values().collect() }
}
