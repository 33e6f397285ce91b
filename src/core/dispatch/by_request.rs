//! Members that get batches by request, and kept batches.

use std::time::{Duration, Instant};

use super::member::{Credit, KEPT, MAX_CREDIT, Member, MemberId};
use super::{Dispatch, PendingBatch};
use crate::core::batch::BatchId;

impl Dispatch {
    /// Sets the number of further batches for a member, instead of its credit before. Returns `false` and sets 0 if the
    /// member holds [`MAX_CREDIT`] messages or more.
    pub(crate) fn request(&mut self, id: MemberId, batches: u32) -> bool {
        let Some(member) = self.member(id) else { return true };
        let has_room = member.out < u64::from(MAX_CREDIT);
        member.credit = Credit::Batches(if has_room { batches } else { 0 });
        has_room || batches == 0
    }

    /// Returns how many of the batches that a member requested are not delivered yet.
    pub(crate) fn requested(&self, id: MemberId) -> u32 {
        match self.members.iter().find(|member| member.id == id) {
            Some(Member { credit: Credit::Batches(batches), .. }) => *batches,
            _ => 0,
        }
    }

    /// Returns whether a member gets batches only by request.
    pub(crate) fn takes_by_request(&self, id: MemberId) -> bool {
        self.members.iter().any(|member| member.id == id && matches!(member.credit, Credit::Batches(_)))
    }

    /// Detaches a batch from the member that holds it. Does nothing if the member does not hold the batch.
    pub(crate) fn keep(&mut self, from: MemberId, batch: BatchId) {
        if self.batches.get(&batch).is_some_and(|pending| pending.holder == Some(from))
            && let Some(pending) = self.remove(batch)
        {
            self.insert(batch, PendingBatch { holder: Some(KEPT), ..pending });
        }
    }

    /// Returns whether there are kept batches.
    pub(crate) fn has_kept(&self) -> bool {
        self.batches.values().any(|pending| pending.holder == Some(KEPT))
    }

    /// Removes all batches, kept ones too, and returns them. The caller must release them to the outbox.
    pub(crate) fn release_all(&mut self) -> Vec<BatchId> {
        self.remove_all(|_| true)
    }

    /// Removes the waiting batches that no member here awaits, and returns them. The caller must release them to the
    /// outbox. If the group has no member, these are all waiting batches. If no member has requested batches and the
    /// outbox is shared, these are the waiting batches without exclusions, because members elsewhere may get them.
    /// Such batches are not lent, because members here may request nothing for long, and lending is limited.
    pub(crate) fn release_idle(&mut self) -> Vec<BatchId> {
        let is_idle = |member: &Member| member.credit == Credit::Batches(0);
        let idle: Vec<BatchId> = if self.members.is_empty() {
            self.free.iter().chain(&self.restricted).chain(&self.blocked).copied().collect()
        } else if self.is_shared && self.members.iter().all(is_idle) {
            self.free.iter().copied().collect()
        } else {
            Vec::new()
        };
        for batch in &idle {
            self.remove(*batch);
        }
        idle
    }

    /// Records a nack like [`Dispatch::nack`], for the member that holds the batch. The batch may also be kept. Returns
    /// `false` if no member here holds the batch, and the batch is not kept.
    pub(crate) fn nack_of_any(&mut self, batch: BatchId, delay: Duration, now: Instant) -> bool {
        let holder = self.batches.get(&batch).and_then(|pending| pending.holder);
        holder.is_some_and(|holder| self.nack(holder, batch, delay, now))
    }

    /// Removes the batches for which `is_removed` returns true, and returns their ids.
    pub(super) fn remove_all(&mut self, is_removed: impl Fn(&PendingBatch) -> bool) -> Vec<BatchId> {
        let removed = self.batches.iter().filter(|(_, pending)| is_removed(pending));
        let removed: Vec<BatchId> = removed.map(|(batch, _)| *batch).collect();
        for batch in &removed {
            self.remove(*batch);
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::dispatch::MAX_LENT;
    use crate::core::dispatch::tests::{A, B, REDELIVER, batch, next_redelivery, shared_group_of};

    #[test]
    fn a_member_gets_one_batch_for_each_that_it_requested_whatever_their_size() {
        let mut dispatch = Dispatch::new(REDELIVER, false);
        let now = Instant::now();
        dispatch.join(A, Credit::Batches(0));
        assert_eq!((dispatch.window(), dispatch.next_member()), (0, None), "nothing is requested");
        assert!(dispatch.request(A, 2));
        for seq in 0..2 {
            assert_eq!((dispatch.window(), dispatch.next_member()), (1, Some(A)), "batch {seq}");
            dispatch.deliver(batch(seq), 4_096, A, now);
        }
        assert_eq!((dispatch.window(), dispatch.requested(A)), (0, 0));
        assert!(dispatch.request(A, 5));
        assert!(dispatch.request(A, 0), "a later request replaces an earlier one");
        assert_eq!(dispatch.window(), 0);
        dispatch.leave(A, now);
        assert!(dispatch.request(A, 1), "a request that arrives after its member has left changes nothing");
        assert_eq!(dispatch.window(), 0);
    }

    #[test]
    fn redelivered_batches_use_up_a_request_too() {
        let mut dispatch = Dispatch::new(REDELIVER, false);
        let now = Instant::now();
        dispatch.join(A, Credit::Messages(100));
        dispatch.join(B, Credit::Batches(2));
        (0..3).for_each(|seq| dispatch.deliver(batch(seq), 9, A, now));
        assert_eq!(dispatch.leave(A, now), []);
        for seq in 0..2 {
            assert_eq!(dispatch.next_redeliveries(&[], 9), [(batch(seq), B)], "one at a time");
            dispatch.deliver(batch(seq), 9, B, now);
        }
        assert_eq!(dispatch.next_redeliveries(&[], 9), []);
    }

    #[test]
    fn a_member_with_the_maximum_of_messages_may_request_nothing() {
        let mut dispatch = Dispatch::new(REDELIVER, false);
        let now = Instant::now();
        dispatch.join(A, Credit::Batches(0));
        assert!(dispatch.request(A, 3));
        dispatch.deliver(batch(0), u64::from(MAX_CREDIT) - 1, A, now);
        assert_eq!(dispatch.window(), 1);
        dispatch.deliver(batch(1), 1, A, now);
        assert_eq!((dispatch.window(), dispatch.requested(A)), (0, 1), "the limit ends the request");
        assert!(!dispatch.request(A, 1));
        assert!(dispatch.request(A, 0));
        dispatch.keep(A, batch(1));
        assert!(dispatch.request(A, 1), "kept batches do not count");
    }

    #[test]
    fn a_kept_batch_outlives_its_member_and_excludes_nobody() {
        let (mut dispatch, now) = shared_group_of(&[(A, 100), (B, 100)]);
        (0..3).for_each(|seq| dispatch.deliver(batch(seq), 5, A, now));
        dispatch.keep(B, batch(0));
        assert!(!dispatch.has_kept(), "B does not hold the batch");
        dispatch.keep(A, batch(0));
        dispatch.keep(A, batch(1));
        assert!(!dispatch.nack(A, batch(0), REDELIVER, now), "A does not hold the batch any more");
        assert_eq!(dispatch.leave(A, now), []);
        assert_eq!(dispatch.next_redeliveries(&[], 9), [(batch(2), B)], "only the batch that is not kept");
        assert!(dispatch.nack_of_any(batch(1), REDELIVER, now));
        assert!(!dispatch.nack_of_any(batch(1), REDELIVER, now), "the batch waits already");
        assert!(dispatch.batches[&batch(1)].excluded.is_empty(), "no member held the batch");
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(1), B)));
        assert_eq!(dispatch.leave(B, now), [batch(1), batch(2)], "all but the kept batch");
        assert!(dispatch.has_kept());
        assert_eq!(dispatch.release_idle(), []);
        dispatch.handle_timers(now + REDELIVER);
        assert_eq!(dispatch.release_idle(), [batch(0)], "the overdue batch goes back, because no member is here");
        assert_eq!((dispatch.has_kept(), dispatch.next_timer()), (false, None));
    }

    #[test]
    fn an_overdue_kept_batch_goes_to_a_member_that_joined_later() {
        let (mut dispatch, now) = shared_group_of(&[(A, 100)]);
        dispatch.deliver(batch(0), 5, A, now);
        dispatch.keep(A, batch(0));
        assert_eq!(dispatch.leave(A, now), []);
        dispatch.join(B, Credit::Messages(100));
        assert_eq!(next_redelivery(&mut dispatch, &[]), None);
        dispatch.handle_timers(now + REDELIVER);
        assert!(dispatch.batches[&batch(0)].excluded.is_empty(), "no member held the batch");
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)));
        dispatch.deliver(batch(0), 5, B, now + REDELIVER);
        assert_eq!(dispatch.release_all(), [batch(0)]);
        assert_eq!(dispatch.window(), 100);
    }

    #[test]
    fn members_that_request_nothing_hold_up_no_batch_of_a_shared_outbox() {
        let count = u32::try_from(MAX_LENT).unwrap() + 2;
        for (is_shared, released) in [(true, count as usize - 1), (false, 0)] {
            let mut dispatch = Dispatch::new(REDELIVER, is_shared);
            let now = Instant::now();
            dispatch.join(A, Credit::Batches(0));
            dispatch.join(B, Credit::Batches(0));
            (0..count).for_each(|seq| dispatch.deliver(batch(seq), 1, A, now));
            assert!(dispatch.nack_of_any(batch(0), REDELIVER, now));
            dispatch.deliver(batch(0), 1, B, now);
            assert!(dispatch.nack_of_any(batch(0), REDELIVER, now));
            assert_eq!(dispatch.leave(A, now), []);
            assert!(dispatch.request(B, 1));
            assert_eq!(dispatch.release_idle(), [], "B can get them");
            assert!(dispatch.request(B, 0));
            assert_eq!(dispatch.release_idle().len(), released, "B is excluded from the other batch for a delay");
            assert_eq!(dispatch.lend(), if is_shared { vec![batch(0)] } else { vec![] });
        }
    }
}
