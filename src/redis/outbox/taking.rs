//! Taking batches, for the first time or again.

use tracing::error;

use crate::core::batch::{BatchId, Delivery};
use crate::core::group::GroupName;
use crate::core::refusal::Refusal;
use crate::redis::outbox::Shared;
use crate::redis::outbox::entry::Unreadable;
use crate::redis::outbox::hand::Hand;

impl Shared {
    /// One script alone, unless it finds nothing that can be read: what it took is handed out before there is more,
    /// and the hand is soon free again.
    pub(super) async fn take(&self, group: &GroupName, window: u64) -> Result<Vec<Delivery>, Refusal> {
        let hand = self.hands.of(group);
        let mut hand = hand.lock().await;
        self.recover(group, &mut hand).await?;
        loop {
            let sure_in = hand.doubt();
            let found = self.calls.take(group, window, &hand.lent).await;
            let found = hand.told(sure_in, found)?;
            let is_all = found.is_empty();
            let taken = self.hold(group, &mut hand, found);
            if is_all || !taken.is_empty() {
                return Ok(taken);
            }
        }
    }

    /// A delivery, or none where it cannot be read: that is told, and nobody is offered the entry again.
    fn readable(
        &self,
        group: &GroupName,
        hand: &mut Hand,
        read: Result<Delivery, Unreadable>,
    ) -> Option<Delivery> {
        let Unreadable { entry, why } = match read {
            Ok(delivery) => return Some(delivery),
            Err(unreadable) => unreadable,
        };
        let (ring, outbox) = (self.calls.ring, &self.calls.link.keys().outbox);
        error!(
            ring,
            %group,
            entry,
            why,
            "a batch in the outbox cannot be read and is not handed out: update this sidecar if a newer one wrote it; \
             `redis-cli XACK {outbox} {group} {entry}` removes it from the group"
        );
        hand.unreadable.insert(entry);
        None
    }

    pub(super) async fn take_again(
        &self,
        group: &GroupName,
        batches: &[BatchId],
    ) -> Result<Vec<Delivery>, Refusal> {
        if batches.is_empty() {
            return Ok(Vec::new());
        }
        let hand = self.hands.of(group);
        let mut hand = hand.lock().await;
        // If the answer is lost, Redis may hold for us what is lent: then that is given back, for others to take.
        let sure_in = hand.doubt();
        let found = self.calls.take_again(group, batches).await;
        let found = hand.told(sure_in, found)?;
        for batch in batches {
            hand.lent.remove(batch);
            hand.held.remove(batch);
        }
        Ok(self.hold(group, &mut hand, found))
    }

    /// What was taken and can be read is in the hand from now on.
    fn hold(&self, group: &GroupName, hand: &mut Hand, found: Vec<Result<Delivery, Unreadable>>) -> Vec<Delivery> {
        let taken: Vec<Delivery> = found.into_iter().filter_map(|read| self.readable(group, hand, read)).collect();
        hand.held.extend(taken.iter().map(|delivery| delivery.batch.id));
        taken
    }
}
