//! Several outboxes as one: the outboxes of all rings, for the delivery.
//!
//! A group exists in all of them. Its batches are taken in turns, so that no ring waits for another, and what
//! is said of a batch goes to the ring that its id names. Within a ring earlier ticks still go first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::batch::{BatchId, Delivery};
use super::group::GroupName;
use super::outbox::{Backlog, Dropped, GroupBacklog, Opening, Outbox, Settled};
use super::ring::Reply;
use super::rings::{all, together};
use super::store::RingParts;

/// The outboxes of several rings.
pub struct Outboxes {
    outboxes: Arc<[Arc<dyn Outbox>]>,
    /// Which is asked first the next time.
    turn: AtomicUsize,
}

impl Outboxes {
    /// The outboxes of `seats` as one; that of a single seat is the one itself.
    ///
    /// # Panics
    ///
    /// If there is no seat.
    #[must_use]
    pub fn of(seats: &[RingParts]) -> Arc<dyn Outbox> {
        match seats {
            [] => panic!("a store has at least one ring"),
            [seat] => Arc::clone(&seat.outbox),
            seats => Arc::new(Outboxes {
                outboxes: seats.iter().map(|seat| Arc::clone(&seat.outbox)).collect(),
                turn: AtomicUsize::new(0),
            }),
        }
    }

    /// The outbox of the ring that a batch came from. A client can name rings that there are not.
    fn of_batch(&self, batch: BatchId) -> Option<&Arc<dyn Outbox>> {
        self.outboxes.get(usize::from(batch.ring))
    }

    /// Asks each ring about its own batches.
    fn by_ring<T>(&self, batches: &[BatchId], ask: impl Fn(&dyn Outbox, &[BatchId]) -> Reply<T>) -> Vec<Reply<T>> {
        let mut parts: BTreeMap<u16, Vec<BatchId>> = BTreeMap::new();
        for batch in batches {
            parts.entry(batch.ring).or_default().push(*batch);
        }
        let asked = parts.into_values().filter_map(|part| Some(ask(&**self.of_batch(*part.first()?)?, &part)));
        asked.collect()
    }

    /// Asks all rings; the answer is made of theirs.
    fn ask_all<T: Send + Unpin + 'static, A>(
        &self,
        ask: impl Fn(&dyn Outbox) -> Reply<T>,
        merge: impl FnOnce(Vec<T>) -> A + Send + 'static,
    ) -> Reply<A> {
        merged(self.outboxes.iter().map(|outbox| ask(&**outbox)).collect(), merge)
    }
}

fn merged<T: Send + Unpin + 'static, A>(
    replies: Vec<Reply<T>>,
    merge: impl FnOnce(Vec<T>) -> A + Send + 'static,
) -> Reply<A> {
    Reply::Later(Box::pin(async move { Ok(merge(together(all(replies).await)?)) }))
}

impl Outbox for Outboxes {
    fn open_group(&self, group: &GroupName, opening: Opening, now: Instant) -> Reply<bool> {
        self.ask_all(|outbox| outbox.open_group(group, opening, now), any)
    }

    fn leave_group(&self, group: &GroupName) -> Reply<()> {
        self.ask_all(|outbox| outbox.leave_group(group), |_| ())
    }

    /// One ring after the other, so that a group that is in use is refused before any ring has deleted it.
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
            together(answers).map(any)
        }))
    }

    fn is_shared(&self) -> bool {
        self.outboxes.iter().any(|outbox| outbox.is_shared())
    }

    /// One ring after the other, since each takes as much of the window as it can fill. What was taken is handed
    /// out even if another ring refuses: nobody would learn of it again.
    fn take(&self, group: &GroupName, window: u64, now: Instant) -> Reply<Vec<Delivery>> {
        let (outboxes, group) = (Arc::clone(&self.outboxes), group.clone());
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % outboxes.len();
        Reply::Later(Box::pin(async move {
            let (mut taken, mut left, mut refused) = (Vec::new(), window, None);
            for outbox in outboxes.iter().cycle().skip(first).take(outboxes.len()) {
                match outbox.take(&group, left, now).await {
                    Ok(deliveries) => {
                        let ids: u64 =
                            deliveries.iter().map(|delivery| delivery.batch.messages.len() as u64).sum();
                        taken.extend(deliveries);
                        left = left.saturating_sub(ids);
                    }
                    Err(refusal) => refused = refused.or(Some(refusal)),
                }
                if left == 0 {
                    break;
                }
            }
            match refused {
                Some(refusal) if taken.is_empty() => Err(refusal),
                _ => Ok(taken),
            }
        }))
    }

    fn take_again(&self, group: &GroupName, batches: &[BatchId], now: Instant) -> Reply<Vec<Delivery>> {
        match batches.first().and_then(|batch| self.of_batch(*batch)) {
            Some(outbox) => outbox.take_again(group, batches, now),
            None => Reply::ok(Vec::new()),
        }
    }

    /// A ring that refuses does not hide what the others settled.
    fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Reply<Settled> {
        let replies = self.by_ring(batches, |outbox, part| outbox.settle(group, part));
        Reply::Later(Box::pin(async move {
            let mut sum = Settled::default();
            let parts = all(replies).await.into_iter().map(|part| sum.add(part)).collect();
            match together(parts) {
                Err(refusal) if sum.batches.is_empty() => Err(refusal),
                parts => Ok(Settled { refusal: parts.err(), ..sum }),
            }
        }))
    }

    fn release(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        merged(self.by_ring(batches, |outbox, part| outbox.release(group, part)), |_| ())
    }

    fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        merged(self.by_ring(batches, |outbox, part| outbox.lend(group, part)), |_| ())
    }

    /// A ring that refuses does not hide what the others dropped: that is told once.
    fn maintain(&self, attended: &[GroupName], now: Instant) -> Reply<Dropped> {
        let replies = self.outboxes.iter().map(|outbox| outbox.maintain(attended, now)).collect();
        Reply::Later(Box::pin(async move {
            let (mut sum, mut refused) = (Dropped::default(), None);
            for answer in all(replies).await {
                match answer {
                    Ok(dropped) => add_dropped(&mut sum, dropped),
                    Err(refusal) => refused = refused.or(Some(refusal)),
                }
            }
            match refused {
                Some(refusal) if sum == Dropped::default() => Err(refusal),
                _ => Ok(sum),
            }
        }))
    }

    fn backlog(&self, now: Instant) -> Reply<Backlog> {
        self.ask_all(|outbox| outbox.backlog(now), merge_backlogs)
    }

    fn on_news(&self, tell: Box<dyn Fn() + Send + Sync>) {
        let tell: Arc<dyn Fn() + Send + Sync> = Arc::from(tell);
        for outbox in self.outboxes.iter() {
            let tell = Arc::clone(&tell);
            outbox.on_news(Box::new(move || tell()));
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "answers are consumed where they are merged")]
fn any(answers: Vec<bool>) -> bool {
    answers.contains(&true)
}

/// Adds up what two rings dropped; a group that both dropped is one group.
fn add_dropped(sum: &mut Dropped, dropped: Dropped) {
    sum.ids += dropped.ids;
    sum.batches += dropped.batches;
    for group in dropped.groups {
        if !sum.groups.contains(&group) {
            sum.groups.push(group);
        }
    }
}

/// What the outboxes of several rings hold together.
#[must_use]
pub fn merge_backlogs(of_rings: Vec<Backlog>) -> Backlog {
    let ids = of_rings.iter().map(|backlog| backlog.ids).sum();
    let mut merged: BTreeMap<GroupName, GroupBacklog> = BTreeMap::new();
    for backlog in of_rings.into_iter().flat_map(|backlog| backlog.groups) {
        match merged.get_mut(&backlog.group) {
            None => {
                merged.insert(backlog.group.clone(), backlog);
            }
            Some(sum) => {
                sum.batches += backlog.batches;
                sum.unacked += backlog.unacked;
                sum.oldest = sum.oldest.max(backlog.oldest);
            }
        }
    }
    Backlog { ids, groups: merged.into_values().collect() }
}
