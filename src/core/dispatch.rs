//! Chooses which member of a consumer group gets which batch. The *members* are the subscribers of the group on this
//! sidecar. Each member has a *credit*: a number of messages that it may hold, or a number of batches that it requested.
//!
//! A batch is *overdue* if its holder has not acknowledged it within a set time. With a *nack*, a member returns a
//! batch. A member that nacked a batch, or let it become overdue, is *excluded* from the batch for a delay. A *kept*
//! batch is detached from its member: it stays held when this member leaves.
//!
//! [`Dispatch`] does no I/O. The module [`crate::delivery`] has a `Dispatch` for each group, calls it for each event,
//! and carries out the results.
//!
//! ```text
//!                    deliver             ack
//!   outbox ─ take ─▶ held ────────────────────────▶ forgotten (settled)
//!                    │    ▲
//!     nack, overdue, │    │ deliver (delivery count + 1)
//!     member left    ▼    │
//!                    waiting ── last member left ──▶ released to the outbox
//! ```
//!
//! A kept batch is released too, once it is overdue or nacked while the group has no member here.
//!
//! The outbox may be shared with other sidecars. If no member here can get a waiting batch, the batch is *lent*: other
//! sidecars may take it from the outbox at once. This sidecar keeps its record of the batch. Once a member here can
//! get the batch, the batch is delivered here again, unless another sidecar has taken it.
//!
//! # Invariants
//!
//! 1. Every recorded batch is held by exactly one member, or kept, or waits for redelivery.
//! 2. `out` is the number of messages in the batches that a member holds. `unread` is the number of messages that were
//!    sent to the member and that it has not read. A member has *room* while both are below its limit, and gets
//!    batches only then. So a member exceeds its limit by less than one batch. `unread` can exceed `out`: an overdue
//!    batch no longer counts in `out`, but may still be unread. A member with a credit of batches has the limit
//!    [`MAX_CREDIT`], and room only for as many batches as it requested.
//! 3. Every batch has one timer. It expires when a held batch becomes overdue, or when the next exclusion from a
//!    waiting batch ends. So no batch is forgotten.
//! 4. No member here holds a lent batch. At most [`MAX_LENT`] batches are lent at a time.

mod by_request;
mod member;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub(crate) use self::member::{Credit, MAX_CREDIT, MemberId};
use self::member::{KEPT, Member};
use super::batch::BatchId;

/// The minimum time for which a nack excludes a member. Without it, members that nack at once would pass a batch
/// around in a busy loop.
const SHORTEST_DELAY: Duration = Duration::from_millis(10);

/// How long a member is excluded from a batch that it let become overdue. Other members can get the batch at once.
const OVERDUE_EXCLUSION: Duration = Duration::from_secs(1);

/// The maximum number of batches with exclusions that a search for a redelivery, or for a batch to lend, checks.
const MAX_SEARCHED: usize = 64;

/// The maximum number of batches that are lent at a time. The number is limited, because each `take` from the outbox
/// must skip the lent batches. Further batches are not lent, and wait for a member here.
pub(crate) const MAX_LENT: usize = 64;

#[derive(Debug)]
struct PendingBatch {
    /// The number of messages in the batch.
    ids: u64,
    /// The member that holds the batch; `None` while the batch waits.
    holder: Option<MemberId>,
    nacks: u32,
    /// Members that nacked the batch or let it become overdue, each with the time until which the member is excluded.
    excluded: BTreeMap<MemberId, Instant>,
    /// When a held batch becomes overdue, or when the next exclusion from a waiting batch ends. A waiting batch
    /// without exclusions gets a timer of `redeliver_after` too, but the expiry of this timer has no effect.
    timer: Instant,
    lent: bool,
}

/// The members of a group on this sidecar, and the batches that they hold or wait for.
#[derive(Debug, Default)]
pub(crate) struct Dispatch {
    redeliver_after: Duration,
    is_shared: bool,
    /// The members in the order of their turns. The first member with room gets the next batch.
    members: Vec<Member>,
    batches: BTreeMap<BatchId, PendingBatch>,
    /// Waiting batches without exclusions.
    free: BTreeSet<BatchId>,
    /// Waiting batches from which some members are excluded, but not all.
    restricted: BTreeSet<BatchId>,
    /// Waiting batches from which all members are excluded.
    blocked: BTreeSet<BatchId>,
    /// Number of lent batches.
    lent: usize,
    timers: BTreeSet<(Instant, BatchId)>,
}

impl Dispatch {
    /// Creates the dispatch of a group that has no members yet. A batch becomes overdue if it is not acknowledged
    /// within `redeliver_after`. `is_shared` states whether other sidecars take batches from the same outbox.
    pub(crate) fn new(redeliver_after: Duration, is_shared: bool) -> Dispatch {
        Dispatch { redeliver_after, is_shared, ..Dispatch::default() }
    }

    /// Adds a member.
    pub(crate) fn join(&mut self, id: MemberId, credit: Credit) {
        self.members.push(Member { id, credit, out: 0, unread: 0, reserved: 0 });
        // The new member can get the batches from which all others are excluded.
        self.restricted.append(&mut self.blocked);
    }

    /// Removes a member. The batches that it held wait for other members. If no member is left, returns all batches
    /// except kept ones, and the caller must release them to the outbox. Otherwise returns no batches.
    pub(crate) fn leave(&mut self, id: MemberId, now: Instant) -> Vec<BatchId> {
        self.members.retain(|member| member.id != id);
        if self.members.is_empty() {
            return self.remove_all(|pending| pending.holder != Some(KEPT));
        }
        let mut orphans = Vec::new();
        for (batch, pending) in &mut self.batches {
            let had_exclusions = !pending.excluded.is_empty();
            pending.excluded.remove(&id);
            if pending.holder == Some(id) || pending.holder.is_none() && had_exclusions {
                orphans.push(*batch);
            }
        }
        for batch in orphans {
            self.wait(batch, now);
        }
        Vec::new()
    }

    /// Records the number of unread messages of all members. `unread` returns the number for a member, or `None` to
    /// keep the recorded number.
    pub(crate) fn record_all_unread(&mut self, unread: impl Fn(MemberId) -> Option<u64>) {
        for member in &mut self.members {
            member.unread = unread(member.id).unwrap_or(member.unread);
        }
    }

    /// Records the number of unread messages of a member.
    pub(crate) fn record_unread(&mut self, id: MemberId, messages: u64) {
        if let Some(member) = self.member(id) {
            member.unread = messages;
        }
    }

    /// Returns how many messages all members together can take now. This is the window for `take` of the outbox.
    pub(crate) fn window(&self) -> u64 {
        self.members.iter().map(Member::window).sum()
    }

    /// Chooses the member for the next new batch. Members with room take turns. Returns `None` if no member has room.
    pub(crate) fn next_member(&mut self) -> Option<MemberId> {
        let member = self.find_member(None)?;
        Some(self.take_turn(member))
    }

    /// Chooses the next batches to redeliver, each with a member that has room. Chooses at most `most` batches, all
    /// of one ring, and none of the `unavailable` rings.
    pub(crate) fn next_redeliveries(&mut self, unavailable: &[u16], most: usize) -> Vec<(BatchId, MemberId)> {
        let mut next: Vec<(BatchId, MemberId)> = Vec::new();
        while next.len() < most {
            let is_next = |batch: &BatchId| match next.first() {
                Some((first, _)) => first.ring == batch.ring && next.iter().all(|(chosen, _)| chosen != batch),
                None => !unavailable.contains(&batch.ring),
            };
            let Some((batch, member)) = self.find_redelivery(is_next) else { break };
            self.members[member].reserved += self.batches[&batch].ids;
            next.push((batch, self.take_turn(member)));
        }
        self.members.iter_mut().for_each(|member| member.reserved = 0);
        next
    }

    /// Returns whether a batch can be redelivered now. Batches of the `unavailable` rings do not count.
    pub(crate) fn has_redeliveries(&self, unavailable: &[u16]) -> bool {
        self.find_redelivery(|batch| !unavailable.contains(&batch.ring)).is_some()
    }

    /// Marks waiting batches as lent, oldest first, if each member here is excluded or has no room. Returns these
    /// batches. The caller must also lend them in the outbox, so that members on other sidecars can get them. Lends
    /// nothing if the outbox is not shared.
    pub(crate) fn lend(&mut self) -> Vec<BatchId> {
        let room = if self.is_shared { MAX_LENT.saturating_sub(self.lent) } else { 0 };
        let is_unavailable = |batch: &&BatchId| self.find_member(self.batches.get(batch)).is_none();
        let mut batches: Vec<BatchId> = self.lendable(room).filter(is_unavailable).copied().collect();
        batches.sort_unstable();
        batches.truncate(room);
        for batch in &batches {
            if let Some(pending) = self.remove(*batch) {
                self.insert(*batch, PendingBatch { lent: true, ..pending });
            }
        }
        batches
    }

    /// Returns the batches from which [`Dispatch::lend`] chooses at most `room`. Their number is limited, however many
    /// batches wait. At most [`MAX_LENT`] lent batches are skipped on the way.
    fn lendable(&self, room: usize) -> impl Iterator<Item = &BatchId> {
        // A member that has room can get any free batch.
        let most_free = if self.find_member(None).is_none() { room } else { 0 };
        let searched = if room > 0 { MAX_SEARCHED } else { 0 };
        let sets = [(&self.free, most_free), (&self.restricted, searched), (&self.blocked, room)];
        let is_unlent = |batch: &&BatchId| !self.batches[*batch].lent;
        sets.into_iter().flat_map(move |(waiting, most)| waiting.iter().filter(is_unlent).take(most))
    }

    /// Records that a batch with `ids` messages is delivered to a member.
    pub(crate) fn deliver(&mut self, batch: BatchId, ids: u64, to: MemberId, now: Instant) {
        let earlier = self.remove(batch);
        if let Some(member) = self.member(to) {
            member.out += ids;
            if let Credit::Batches(left) = &mut member.credit {
                *left = left.saturating_sub(1);
            }
        }
        let (nacks, excluded) = earlier.map(|pending| (pending.nacks, pending.excluded)).unwrap_or_default();
        let timer = now + self.redeliver_after;
        self.insert(batch, PendingBatch { ids, holder: Some(to), nacks, excluded, timer, lent: false });
    }

    /// Removes a batch that is settled or no longer in the outbox.
    pub(crate) fn forget(&mut self, batch: BatchId) {
        self.remove(batch);
    }

    /// Records a nack: the batch waits for redelivery. Another member can get the batch at once, the same member only
    /// after a delay. `delay` is the delay after the first nack of the batch. The delay doubles with every further
    /// nack, up to `redeliver_after`. Returns false if the member does not hold the batch.
    pub(crate) fn nack(&mut self, from: MemberId, batch: BatchId, delay: Duration, now: Instant) -> bool {
        let held = self.batches.get_mut(&batch).filter(|pending| pending.holder == Some(from));
        let Some(pending) = held else { return false };
        // No member is excluded from a kept batch, because no member holds it.
        let delay = delay.max(SHORTEST_DELAY).saturating_mul(1 << pending.nacks.min(20)).min(self.redeliver_after);
        if from != KEPT {
            pending.excluded.insert(from, now + delay);
        }
        pending.nacks += 1;
        self.wait(batch, now);
        true
    }

    /// Handles expired timers: overdue batches wait for redelivery, and exclusions end.
    pub(crate) fn handle_timers(&mut self, now: Instant) {
        while let Some((_, batch)) = self.timers.first().copied().filter(|(timer, _)| *timer <= now) {
            // Without the exclusion, a silent member could get the same batch again and again.
            if (self.is_shared || self.members.len() > 1)
                && let Some(pending) = self.batches.get_mut(&batch)
                && let Some(holder) = pending.holder.filter(|holder| *holder != KEPT)
            {
                pending.excluded.insert(holder, now + OVERDUE_EXCLUSION);
            }
            self.wait(batch, now);
        }
    }

    /// Returns when the next timer expires.
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(timer, _)| *timer)
    }

    /// Makes a batch wait until a member that is not excluded has room, or until the next exclusion ends.
    fn wait(&mut self, batch: BatchId, now: Instant) {
        let Some(mut pending) = self.remove(batch) else { return };
        pending.holder = None;
        pending.excluded.retain(|_, until| *until > now);
        pending.timer = pending.excluded.values().min().copied().unwrap_or(now + self.redeliver_after);
        self.insert(batch, pending);
    }

    fn insert(&mut self, batch: BatchId, pending: PendingBatch) {
        self.timers.insert((pending.timer, batch));
        self.lent += usize::from(pending.lent);
        if pending.holder.is_none() {
            let is_eligible = |member: &Member| !pending.excluded.contains_key(&member.id);
            let waiting = match pending.excluded.len() {
                0 => &mut self.free,
                _ if self.members.iter().any(is_eligible) => &mut self.restricted,
                _ => &mut self.blocked,
            };
            waiting.insert(batch);
        }
        self.batches.insert(batch, pending);
    }

    fn remove(&mut self, batch: BatchId) -> Option<PendingBatch> {
        let pending = self.batches.remove(&batch)?;
        self.timers.remove(&(pending.timer, batch));
        self.free.remove(&batch);
        self.restricted.remove(&batch);
        self.blocked.remove(&batch);
        self.lent -= usize::from(pending.lent);
        if let Some(member) = pending.holder.and_then(|holder| self.member(holder)) {
            member.out -= pending.ids;
        }
        Some(pending)
    }

    /// Finds the oldest waiting batch that `may_be` accepts and for which a member has room. Returns the batch and
    /// the index of the member.
    fn find_redelivery(&self, may_be: impl Fn(&BatchId) -> bool) -> Option<(BatchId, usize)> {
        let free = self.free.iter().find(|batch| may_be(batch));
        let free = free.and_then(|batch| Some((*batch, self.find_member(None)?)));
        // The number of batches is limited, because each of them needs a search for a member. Batches beyond the limit
        // are found once their exclusions have ended.
        let restricted = self.restricted.iter().filter(|batch| may_be(batch)).take(MAX_SEARCHED);
        let restricted = restricted.filter_map(|batch| Some((*batch, self.find_member(self.batches.get(batch))?)));
        free.into_iter().chain(restricted.take(1)).min()
    }

    /// Returns the index of the next member that has room and is not excluded from the batch. `None` stands for a
    /// batch without exclusions.
    fn find_member(&self, batch: Option<&PendingBatch>) -> Option<usize> {
        let is_excluded = |id: &MemberId| batch.is_some_and(|pending| pending.excluded.contains_key(id));
        self.members.iter().position(|member| member.window() > 0 && !is_excluded(&member.id))
    }

    fn member(&mut self, id: MemberId) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    /// Moves the member at `index`, and all members before it, to the end of the order of turns. Returns the id of the
    /// member.
    fn take_turn(&mut self, index: usize) -> MemberId {
        let id = self.members[index].id;
        self.members.rotate_left(index + 1);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Tick;

    pub(super) const A: MemberId = MemberId(1);
    pub(super) const B: MemberId = MemberId(2);
    pub(super) const REDELIVER: Duration = Duration::from_secs(30);

    pub(super) fn batch(seq: u32) -> BatchId {
        BatchId { tick: Tick(1), epoch: 1, ring: 0, seq }
    }

    fn group_of(members: &[(MemberId, u64)]) -> (Dispatch, Instant) {
        let mut dispatch = Dispatch::new(REDELIVER, false);
        for (id, credit) in members {
            dispatch.join(*id, Credit::Messages(*credit));
        }
        (dispatch, Instant::now())
    }

    pub(super) fn next_redelivery(dispatch: &mut Dispatch, unavailable: &[u16]) -> Option<(BatchId, MemberId)> {
        dispatch.next_redeliveries(unavailable, 1).pop()
    }

    #[test]
    fn members_take_turns_and_overshoot_by_at_most_one_batch() {
        let (mut dispatch, now) = group_of(&[(A, 10), (B, 10)]);
        for (seq, expected) in [(0, Some(A)), (1, Some(B)), (2, Some(A)), (3, Some(B)), (4, None)] {
            let member = dispatch.next_member();
            assert_eq!(member, expected, "batch {seq}");
            if let Some(member) = member {
                dispatch.deliver(batch(seq), 9, member, now);
            }
        }
        assert_eq!(dispatch.window(), 0);
        dispatch.forget(batch(0));
        assert_eq!(dispatch.window(), 1, "A holds 9 messages of its credit of 10");
        assert_eq!(dispatch.next_member(), Some(A));
    }

    #[test]
    fn a_member_that_does_not_read_gets_nothing_until_it_does() {
        let (mut dispatch, now) = group_of(&[(A, 10)]);
        dispatch.deliver(batch(0), 10, A, now);
        dispatch.record_unread(A, 10);
        let overdue = now + REDELIVER;
        dispatch.handle_timers(overdue);
        assert_eq!(
            (dispatch.window(), next_redelivery(&mut dispatch, &[])),
            (0, None),
            "A would have two unread copies of the batch"
        );
        dispatch.join(B, Credit::Messages(5));
        assert_eq!((dispatch.window(), next_redelivery(&mut dispatch, &[])), (5, Some((batch(0), B))));
        dispatch.record_unread(A, 0);
        assert_eq!((dispatch.window(), next_redelivery(&mut dispatch, &[])), (15, Some((batch(0), A))));
    }

    #[test]
    fn a_member_has_room_for_each_batch_of_a_window_whatever_is_unread() {
        for unread in 0..=10 {
            let (mut dispatch, now) = group_of(&[(A, 10), (B, 3)]);
            dispatch.record_unread(A, unread);
            let (window, mut unread) = (dispatch.window(), unread);
            assert_eq!(window, 13 - unread);
            // Like an outbox, this loop takes batches until they contain `window` messages or more.
            for seq in (0..).take_while(|seq| u64::from(*seq) * 4 < window) {
                let member = dispatch.next_member().expect("there is room");
                dispatch.deliver(batch(seq), 4, member, now);
                if member == A {
                    unread += 4;
                    dispatch.record_unread(A, unread);
                }
            }
        }
    }

    #[test]
    fn batches_of_a_member_that_left_go_to_the_others_at_once_oldest_first() {
        let (mut dispatch, now) = group_of(&[(A, 100)]);
        dispatch.deliver(batch(1), 5, A, now);
        dispatch.deliver(batch(0), 5, A, now);
        dispatch.join(B, Credit::Messages(100));
        assert_eq!(dispatch.leave(A, now), []);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)));
        dispatch.deliver(batch(0), 5, B, now);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(1), B)));
        assert_eq!(dispatch.leave(B, now), [batch(0), batch(1)], "the last member releases all");
        assert_eq!(dispatch.next_timer(), None);
    }

    #[test]
    fn an_overdue_batch_is_redelivered_to_a_member_with_room() {
        let (mut dispatch, now) = group_of(&[(A, 5)]);
        dispatch.deliver(batch(0), 5, A, now);
        assert_eq!(dispatch.next_timer(), Some(now + REDELIVER));
        dispatch.handle_timers(now + REDELIVER.saturating_sub(Duration::from_nanos(1)));
        assert_eq!(next_redelivery(&mut dispatch, &[]), None);
        dispatch.handle_timers(now + REDELIVER);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), A)));
    }

    #[test]
    fn an_overdue_batch_goes_to_another_member_in_any_turn() {
        let (mut dispatch, now) = group_of(&[(A, 100), (B, 5)]);
        for (seq, member) in [(0, A), (1, B)] {
            assert_eq!(dispatch.next_member(), Some(member));
            dispatch.deliver(batch(seq), 5, member, now);
        }
        dispatch.forget(batch(1));
        let overdue = now + REDELIVER;
        dispatch.handle_timers(overdue);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)), "A is excluded in its turn");
        // A second later A is no longer excluded, and gets the batch, because no other member has room.
        dispatch.deliver(batch(2), 5, B, overdue);
        assert_eq!(next_redelivery(&mut dispatch, &[]), None);
        assert_eq!(dispatch.next_timer(), Some(overdue + OVERDUE_EXCLUSION));
        dispatch.handle_timers(overdue + OVERDUE_EXCLUSION);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), A)));
    }

    #[test]
    fn several_redeliveries_are_chosen_as_if_one_by_one() {
        let c = MemberId(3);
        let waiting = || {
            let (mut dispatch, now) = group_of(&[(A, 1_000)]);
            (0..8).for_each(|seq| dispatch.deliver(batch(seq), 4, A, now));
            dispatch.join(B, Credit::Messages(10));
            dispatch.join(c, Credit::Messages(6));
            assert_eq!(dispatch.leave(A, now), []);
            dispatch.deliver(batch(0), 4, B, now);
            assert!(dispatch.nack(B, batch(0), REDELIVER, now));
            (dispatch, now)
        };
        let (mut dispatch, now) = waiting();
        let mut one_by_one = Vec::new();
        while let Some((again, member)) = next_redelivery(&mut dispatch, &[]) {
            dispatch.deliver(again, 4, member, now);
            one_by_one.push((again, member));
        }
        let (mut dispatch, _) = waiting();
        let several = dispatch.next_redeliveries(&[], 100);
        assert_eq!(several, [(0, c), (1, B), (2, c), (3, B), (4, B)].map(|(seq, member)| (batch(seq), member)));
        assert_eq!(several, one_by_one);
        assert_eq!(dispatch.window(), 16, "choosing a batch does not deliver it");
        assert_eq!(dispatch.next_redeliveries(&[], 2).len(), 2, "no more than are asked for");
    }

    #[test]
    fn a_nack_goes_to_another_member_or_to_the_same_after_a_delay_that_doubles() {
        let (mut dispatch, now) = group_of(&[(A, 100), (B, 100)]);
        let delay = Duration::from_secs(1);
        dispatch.deliver(batch(0), 5, A, now);
        assert!(!dispatch.nack(B, batch(0), delay, now), "B does not hold the batch");
        assert!(dispatch.nack(A, batch(0), delay, now));
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)));
        dispatch.deliver(batch(0), 5, B, now);
        assert!(dispatch.nack(B, batch(0), delay, now));
        assert_eq!(next_redelivery(&mut dispatch, &[]), None, "A and B are excluded");
        assert_eq!(dispatch.next_timer(), Some(now + delay));
        dispatch.handle_timers(now + delay);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), A)));
        assert_eq!(dispatch.leave(A, now + delay), []);
        assert_eq!(next_redelivery(&mut dispatch, &[]), None, "the second delay is twice the first");
        assert_eq!(dispatch.next_timer(), Some(now + delay * 2));
        dispatch.handle_timers(now + delay * 2);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)));
    }

    #[test]
    fn a_long_nack_delay_of_one_member_does_not_delay_others_and_a_member_that_left_is_forgotten() {
        let (mut dispatch, now) = group_of(&[(A, 100), (B, 100)]);
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(10));
        dispatch.deliver(batch(0), 5, A, now);
        assert!(dispatch.nack(A, batch(0), short, now));
        dispatch.deliver(batch(0), 5, B, now);
        assert!(dispatch.nack(B, batch(0), long, now));
        dispatch.handle_timers(now + short);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), A)), "the batch does not wait for B");
        assert_eq!(dispatch.leave(B, now + short), []);
        assert_eq!(dispatch.batches[&batch(0)].excluded, BTreeMap::new());
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), A)));
    }

    #[test]
    fn a_delay_never_exceeds_the_time_of_redelivery() {
        let (mut dispatch, mut now) = group_of(&[(A, 100)]);
        for _ in 0..40 {
            dispatch.deliver(batch(0), 5, A, now);
            assert!(dispatch.nack(A, batch(0), Duration::from_secs(1), now));
            let timer = dispatch.next_timer().unwrap();
            assert!(timer <= now + REDELIVER);
            now = timer;
            dispatch.handle_timers(now);
        }
    }

    #[test]
    fn a_late_acknowledgement_settles_a_batch_that_went_to_another_member() {
        let (mut dispatch, now) = group_of(&[(A, 5), (B, 5)]);
        dispatch.deliver(batch(0), 5, A, now);
        dispatch.handle_timers(now + REDELIVER);
        let (again, member) = next_redelivery(&mut dispatch, &[]).unwrap();
        dispatch.deliver(again, 5, member, now + REDELIVER);
        dispatch.forget(batch(0));
        assert_eq!((dispatch.window(), dispatch.next_timer()), (10, None));
    }

    /// Returns a group whose outbox is shared with other sidecars.
    pub(super) fn shared_group_of(members: &[(MemberId, u64)]) -> (Dispatch, Instant) {
        let (dispatch, now) = group_of(members);
        (Dispatch { is_shared: true, ..dispatch }, now)
    }

    #[test]
    fn an_overdue_batch_is_lent_for_a_moment_and_then_redelivered() {
        let (mut dispatch, now) = shared_group_of(&[(A, 5)]);
        dispatch.deliver(batch(0), 5, A, now);
        assert_eq!(dispatch.lend(), [], "A holds the batch");
        let overdue = now + REDELIVER;
        dispatch.handle_timers(overdue);
        assert_eq!(next_redelivery(&mut dispatch, &[]), None, "A let the batch become overdue");
        assert_eq!(dispatch.window(), 5, "A does not hold the batch any more");
        assert_eq!(dispatch.lend(), [batch(0)]);
        assert_eq!(dispatch.lend(), [], "a lent batch is not lent twice");
        assert_eq!(dispatch.next_timer(), Some(overdue + OVERDUE_EXCLUSION));
        dispatch.handle_timers(overdue + OVERDUE_EXCLUSION);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), A)), "no other sidecar took the batch");
        dispatch.deliver(batch(0), 5, A, overdue + OVERDUE_EXCLUSION);
        dispatch.handle_timers(overdue + OVERDUE_EXCLUSION + REDELIVER);
        assert_eq!(dispatch.lend(), [batch(0)], "the batch is lent again");
        dispatch.forget(batch(0));
        assert_eq!((dispatch.lent, dispatch.next_timer()), (0, None));
    }

    #[test]
    fn an_overdue_batch_goes_to_another_member_here_before_it_is_lent() {
        let (mut dispatch, now) = shared_group_of(&[(A, 5), (B, 5)]);
        dispatch.deliver(batch(0), 5, A, now);
        dispatch.handle_timers(now + REDELIVER);
        assert_eq!(dispatch.lend(), [], "B can get the batch");
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)));
        // B gets another batch first, so it has no room.
        dispatch.deliver(batch(1), 5, B, now + REDELIVER);
        assert_eq!(next_redelivery(&mut dispatch, &[]), None);
        assert_eq!(dispatch.lend(), [batch(0)]);
        dispatch.forget(batch(1));
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)), "B gets the lent batch");
    }

    #[test]
    fn a_nacked_batch_is_lent_until_its_delay_is_over_or_a_member_joins() {
        let (mut dispatch, now) = shared_group_of(&[(A, 100)]);
        let delay = Duration::from_secs(3);
        dispatch.deliver(batch(0), 5, A, now);
        assert!(dispatch.nack(A, batch(0), delay, now));
        assert_eq!(dispatch.lend(), [batch(0)]);
        assert_eq!((next_redelivery(&mut dispatch, &[]), dispatch.next_timer()), (None, Some(now + delay)));
        dispatch.join(B, Credit::Messages(100));
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), B)));
        assert_eq!(dispatch.leave(B, now), []);
        assert_eq!(dispatch.leave(A, now), [batch(0)]);
        assert_eq!(dispatch.lent, 0);
    }

    #[test]
    fn lending_is_limited_and_other_batches_wait_for_their_delay() {
        let (mut dispatch, now) = shared_group_of(&[(A, 1_000)]);
        let count = u32::try_from(MAX_LENT).unwrap() + 2;
        (0..count).for_each(|seq| dispatch.deliver(batch(seq), 1, A, now));
        dispatch.handle_timers(now + REDELIVER);
        assert_eq!(dispatch.lend().len(), MAX_LENT);
        assert_eq!(dispatch.lend(), []);
        dispatch.forget(batch(0));
        assert_eq!(dispatch.lend(), [batch(count - 2)]);
        dispatch.handle_timers(now + REDELIVER + OVERDUE_EXCLUSION);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(1), A)));
    }

    #[test]
    fn the_oldest_unavailable_batches_are_lent_and_few_are_looked_at_however_many_wait() {
        let c = MemberId(3);
        let many = 10_000;
        let looked_at = |dispatch: &Dispatch| dispatch.lendable(MAX_LENT).count();
        // C holds all batches. A and B exclude themselves from some.
        let waiting = |credit| {
            let (mut dispatch, now) = shared_group_of(&[(c, u64::MAX), (A, credit), (B, credit)]);
            for seq in 0..many {
                let excluded: &[MemberId] = match seq % 4 {
                    0 => &[A, B],
                    1 => &[A],
                    _ => &[],
                };
                for member in excluded {
                    dispatch.deliver(batch(seq), 1, *member, now);
                    assert!(dispatch.nack(*member, batch(seq), REDELIVER, now));
                }
                dispatch.deliver(batch(seq), 1, c, now);
            }
            assert_eq!(dispatch.leave(c, now), []);
            dispatch
        };
        let sequence = |batches: Vec<BatchId>| -> Vec<u32> { batches.iter().map(|batch| batch.seq).collect() };
        let first = u32::try_from(MAX_LENT).unwrap();

        let mut roomy = waiting(u64::MAX);
        assert!(looked_at(&roomy) <= 3 * MAX_LENT, "{} of {many}", looked_at(&roomy));
        assert_eq!(sequence(roomy.lend()), (0..first).map(|nth| nth * 4).collect::<Vec<_>>());
        assert_eq!((looked_at(&roomy), roomy.lend()), (2 * MAX_LENT, vec![]));

        let mut full = waiting(1);
        full.deliver(batch(many), 1, A, Instant::now());
        full.deliver(batch(many + 1), 1, B, Instant::now());
        assert!(looked_at(&full) <= 3 * MAX_LENT, "{} of {many}", looked_at(&full));
        assert_eq!(sequence(full.lend()), (0..first).collect::<Vec<_>>(), "no member has room for any batch");
    }

    #[test]
    fn a_batch_whose_last_eligible_member_left_is_lent() {
        let (mut dispatch, now) = shared_group_of(&[(A, 1_000), (B, 1_000)]);
        let count = u32::try_from(MAX_SEARCHED).unwrap() + 1;
        for seq in 0..count {
            dispatch.deliver(batch(seq), 1, A, now);
            assert!(dispatch.nack(A, batch(seq), REDELIVER, now));
        }
        assert_eq!((dispatch.restricted.len(), dispatch.lend()), (count as usize, vec![]));
        assert_eq!(dispatch.leave(B, now), []);
        assert_eq!((dispatch.restricted.len(), dispatch.blocked.len()), (0, count as usize));
        assert_eq!(dispatch.lend().len(), MAX_LENT);
        dispatch.join(B, Credit::Messages(1));
        assert_eq!((dispatch.restricted.len(), dispatch.blocked.len()), (count as usize, 0));
    }

    #[test]
    fn nothing_is_lent_where_the_outbox_is_not_shared() {
        let (mut dispatch, now) = group_of(&[(A, 100)]);
        dispatch.deliver(batch(0), 5, A, now);
        dispatch.nack(A, batch(0), OVERDUE_EXCLUSION, now);
        assert_eq!(dispatch.lend(), []);
    }

    #[test]
    fn an_unavailable_ring_does_not_delay_the_others() {
        let (mut dispatch, now) = group_of(&[(A, 100)]);
        let elsewhere = BatchId { ring: 1, ..batch(9) };
        for batch in [batch(0), elsewhere] {
            dispatch.deliver(batch, 5, A, now);
        }
        dispatch.handle_timers(now + REDELIVER);
        assert_eq!(dispatch.next_redeliveries(&[], 9), [(batch(0), A)], "only batches of one ring");
        assert_eq!(next_redelivery(&mut dispatch, &[0]), Some((elsewhere, A)));
        assert_eq!(next_redelivery(&mut dispatch, &[0, 1]), None);
        assert_eq!(next_redelivery(&mut dispatch, &[]), Some((batch(0), A)));
    }
}
