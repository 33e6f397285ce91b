//! Who gets which batch: credit, redelivery and the order of both, for the members of one group.
//!
//! A state machine without I/O. The delivery ([`crate::delivery`]) owns one a group, tells it what
//! happened and at what time, and carries out what it says.
//!
//! ```text
//!                    hand                ack
//!   outbox ─ take ─▶ Handed ──────────────────────▶ forgotten (settled)
//!                    │    ▲
//!     nack, overdue,  │    │ hand (delivery count + 1)
//!     member left    ▼    │
//!                    Waiting ── last member left ──▶ released to the outbox
//! ```
//!
//! Where the outbox is shared with other sidecars, what waits and no member here can have now is lent: given back,
//! so that members elsewhere get it at once, and still known here. It is handed out again once its delay is over,
//! if nobody else took it.
//!
//! # Invariants
//!
//! 1. A batch known here is handed to exactly one member, or waits to be handed out again.
//! 2. `out` of a member is the number of messages in the batches handed to it. A member gets a batch only
//!    while `out < credit`, so it overshoots by at most one batch. The same holds for what is on the way to it, unread:
//!    that is more where it was overdue meanwhile.
//! 3. Every batch has one alarm: when it is overdue, or when its delay is over. No batch can be forgotten.
//! 4. What is lent is in nobody's hands here, and is at most [`MAX_LENT`] batches.

mod members;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub use self::members::MemberId;

use self::members::{Members, Place};
use super::batch::BatchId;

/// The shortest delay of a nack: members that give a batch back at once do not pass it around in a circle
/// without pause.
const SHORTEST_DELAY: Duration = Duration::from_millis(10);

/// For how long an overdue batch is left to others before whoever let it become overdue may have it again.
const YIELDS: Duration = Duration::from_secs(1);

/// How many batches that were passed by are asked about before giving up for now.
const MAX_PASSED_ASKED: usize = 64;

/// The most batches that are lent at a time: each `take` from the outbox must leave them out. What is beyond stays
/// here and is handed out again after its delay.
pub const MAX_LENT: usize = 64;

#[derive(Debug)]
struct Known {
    /// Number of its messages.
    ids: u64,
    /// Who holds it; nobody while it waits.
    holder: Option<MemberId>,
    /// How often it was nacked.
    nacks: u32,
    /// Members that gave it back or let it become overdue, each with the time before which it does not get it.
    passed_by: Vec<(MemberId, Instant)>,
    /// When it is overdue, or somebody's delay is over: its entry in the alarms.
    timer: Instant,
    /// Whether it was given back for members elsewhere, and is known here all the same.
    lent: bool,
}

impl Known {
    /// It is not for this member before then.
    fn pass(&mut self, member: MemberId, until: Instant) {
        self.passed_by.retain(|(before, _)| *before != member);
        self.passed_by.push((member, until));
    }

    fn is_passed_by(&self, member: MemberId) -> bool {
        self.passed_by.iter().any(|(passed, _)| *passed == member)
    }
}

/// The batches of one group that are in the hands of members here.
#[derive(Debug)]
pub struct Dispatch {
    redeliver_after: Duration,
    /// Whether there may be members elsewhere, to whom batches are lent.
    is_shared: bool,
    members: Members,
    known: BTreeMap<BatchId, Known>,
    /// Batches that nobody holds and anyone may have.
    waiting: BTreeSet<BatchId>,
    /// Batches that nobody holds and somebody passed by, as far as another member may want them.
    passed: BTreeSet<BatchId>,
    /// Batches that nobody holds and that are not lent.
    unlent: BTreeSet<BatchId>,
    /// Number of batches lent.
    lent: usize,
    alarms: BTreeSet<(Instant, BatchId)>,
}

impl Dispatch {
    /// A group without members. A batch that is not acknowledged for `redeliver_after` is handed out again: at first to
    /// others than its holder, if there are any, here or, where the outbox `is_shared`, elsewhere.
    #[must_use]
    pub fn new(redeliver_after: Duration, is_shared: bool) -> Dispatch {
        Dispatch {
            redeliver_after,
            is_shared,
            members: Members::default(),
            known: BTreeMap::new(),
            waiting: BTreeSet::new(),
            passed: BTreeSet::new(),
            unlent: BTreeSet::new(),
            lent: 0,
            alarms: BTreeSet::new(),
        }
    }

    /// Number of members.
    #[must_use]
    pub fn members(&self) -> usize {
        self.members.count()
    }

    /// A subscriber joins with a window of `credit` messages.
    pub fn join(&mut self, id: MemberId, credit: u64) {
        self.members.join(id, credit);
        // What all others passed by, it may want.
        let unheld = self.known.iter().filter(|(_, known)| known.holder.is_none() && !known.passed_by.is_empty());
        self.passed.extend(unheld.map(|(batch, _)| *batch));
    }

    /// A subscriber goes. What it held waits for the others at once; if it was the last, every batch known
    /// here is returned, to be released to the outbox.
    pub fn leave(&mut self, id: MemberId, now: Instant) -> Vec<BatchId> {
        self.members.leave(id);
        if self.members.count() == 0 {
            self.waiting.clear();
            self.passed.clear();
            self.unlent.clear();
            self.lent = 0;
            self.alarms.clear();
            return std::mem::take(&mut self.known).into_keys().collect();
        }
        let mut orphans = Vec::new();
        for (batch, known) in &mut self.known {
            let passed = known.passed_by.len();
            known.passed_by.retain(|(member, _)| *member != id);
            if known.holder == Some(id) || known.holder.is_none() && known.passed_by.len() < passed {
                orphans.push(*batch);
            }
        }
        for batch in orphans {
            self.wait(batch, now);
        }
        Vec::new()
    }

    /// Notes of all members how many messages are on their way to each, which it has not read.
    pub fn note_all_unread(&mut self, unread: impl Fn(MemberId) -> Option<u64>) {
        self.members.note_all_unread(unread);
    }

    /// The same of one of them.
    pub fn note_unread(&mut self, id: MemberId, messages: u64) {
        if let Some(member) = self.members.find(id) {
            member.unread = messages;
        }
    }

    /// How many messages the members would take now: for the outbox's `take`.
    #[must_use]
    pub fn window(&self) -> u64 {
        self.members.window()
    }

    /// Whose turn it is to get a new batch: members with room, in turns.
    pub fn next_member(&mut self) -> Option<MemberId> {
        let member = self.member_for(None)?;
        Some(self.members.take_turn(member))
    }

    /// The next batches to be handed out again, each with the member that has room for it: at most `most`, all of one
    /// ring, and none of the rings that are `away`.
    pub fn next_again(&mut self, away: &[u16], most: usize) -> Vec<(BatchId, MemberId)> {
        let mut next: Vec<(BatchId, MemberId)> = Vec::new();
        while next.len() < most {
            let is_next = |batch: &BatchId| match next.first() {
                Some((first, _)) => first.ring == batch.ring && next.iter().all(|(chosen, _)| chosen != batch),
                None => !away.contains(&batch.ring),
            };
            let Some((batch, member)) = self.find_again(is_next) else { break };
            self.members.promise(member, self.known[&batch].ids);
            next.push((batch, self.members.take_turn(member)));
        }
        self.members.forget_promises();
        next
    }

    /// Whether there is one.
    #[must_use]
    pub fn has_again(&self, away: &[u16]) -> bool {
        self.find_again(|batch| !away.contains(&batch.ring)).is_some()
    }

    fn find_again(&self, may_be: impl Fn(&BatchId) -> bool) -> Option<(BatchId, Place)> {
        let may_be = |batch: &&BatchId| may_be(batch);
        let free = self.waiting.iter().find(may_be);
        let free = free.and_then(|batch| Some((*batch, self.member_for(None)?)));
        // Bounded, since each batch must be asked about: what lies further back is free for all after its delay.
        let passed = self.passed.iter().filter(may_be).take(MAX_PASSED_ASKED).find_map(|batch| {
            let member = self.member_for(self.known.get(batch))?;
            Some((*batch, member))
        });
        free.into_iter().chain(passed).min()
    }

    /// The batches that wait and that no member here can have now, oldest first: to be given back, so that members
    /// elsewhere get them. From now on they are lent.
    pub fn lend(&mut self) -> Vec<BatchId> {
        if !self.is_shared {
            return Vec::new();
        }
        let room = MAX_LENT.saturating_sub(self.lent);
        let nobody_can = |batch: &&BatchId| self.member_for(self.known.get(batch)).is_none();
        let batches: Vec<BatchId> = self.unlent.iter().filter(nobody_can).take(room).copied().collect();
        for batch in &batches {
            if let Some(known) = self.remove(*batch) {
                self.insert(*batch, Known { lent: true, ..known });
            }
        }
        batches
    }

    /// A batch of `ids` messages goes to a member.
    pub fn hand(&mut self, batch: BatchId, ids: u64, to: MemberId, now: Instant) {
        let earlier = self.remove(batch);
        if let Some(member) = self.members.find(to) {
            member.out += ids;
        }
        let (nacks, passed_by) = earlier.map_or((0, Vec::new()), |known| (known.nacks, known.passed_by));
        let timer = now + self.redeliver_after;
        self.insert(batch, Known { ids, holder: Some(to), nacks, passed_by, timer, lent: false });
    }

    /// A batch is settled or gone.
    pub fn forget(&mut self, batch: BatchId) {
        self.remove(batch);
    }

    /// A member gives a batch back. It goes to a member that did not, or to this one after the delay, which doubles
    /// with every nack of the batch up to `redeliver_after`. Returns whether the member held it.
    pub fn nack(&mut self, from: MemberId, batch: BatchId, delay: Duration, now: Instant) -> bool {
        let Some(known) = self.known.get_mut(&batch) else { return false };
        if known.holder != Some(from) {
            return false;
        }
        let delay = delay.max(SHORTEST_DELAY).saturating_mul(1 << known.nacks.min(20)).min(self.redeliver_after);
        known.pass(from, now + delay);
        known.nacks += 1;
        self.wait(batch, now);
        true
    }

    /// Rings the alarms of `now`: overdue batches wait to be handed out again, delays are over.
    pub fn ring_alarms(&mut self, now: Instant) {
        while let Some((timer, batch)) = self.alarms.first().copied() {
            if timer > now {
                break;
            }
            self.yield_overdue(batch, now);
            self.wait(batch, now);
        }
    }

    /// When the next alarm rings.
    #[must_use]
    pub fn next_alarm(&self) -> Option<Instant> {
        self.alarms.first().map(|(timer, _)| *timer)
    }

    /// Has a batch that its holder let become overdue go to somebody else first: by turns alone it could fall to the same
    /// silent member again and again.
    fn yield_overdue(&mut self, batch: BatchId, now: Instant) {
        if !self.is_shared && self.members.count() == 1 {
            return;
        }
        let Some(known) = self.known.get_mut(&batch) else { return };
        let Some(holder) = known.holder else { return };
        known.pass(holder, now + YIELDS);
    }

    /// Lets a batch wait for a member that did not pass it by, or whose delay is over.
    fn wait(&mut self, batch: BatchId, now: Instant) {
        let Some(mut known) = self.remove(batch) else { return };
        known.holder = None;
        known.passed_by.retain(|(_, until)| *until > now);
        let next = known.passed_by.iter().map(|(_, until)| *until).min();
        known.timer = next.unwrap_or(now + self.redeliver_after);
        self.insert(batch, known);
    }

    fn insert(&mut self, batch: BatchId, known: Known) {
        self.alarms.insert((known.timer, batch));
        self.lent += usize::from(known.lent);
        if known.holder.is_none() && !known.lent {
            self.unlent.insert(batch);
        }
        if known.holder.is_none() && known.passed_by.is_empty() {
            self.waiting.insert(batch);
        } else if known.holder.is_none() && self.members.iter().any(|member| !known.is_passed_by(member)) {
            self.passed.insert(batch);
        }
        self.known.insert(batch, known);
    }

    fn remove(&mut self, batch: BatchId) -> Option<Known> {
        let known = self.known.remove(&batch)?;
        self.alarms.remove(&(known.timer, batch));
        self.waiting.remove(&batch);
        self.passed.remove(&batch);
        self.unlent.remove(&batch);
        self.lent -= usize::from(known.lent);
        if let Some(member) = known.holder.and_then(|holder| self.members.find(holder)) {
            member.out -= known.ids;
        }
        Some(known)
    }

    /// The next member that has room, and did not pass this batch by.
    fn member_for(&self, batch: Option<&Known>) -> Option<Place> {
        self.members.next(|member| !batch.is_some_and(|batch| batch.is_passed_by(member)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tick::Tick;

    const A: MemberId = MemberId(1);
    const B: MemberId = MemberId(2);
    const REDELIVER: Duration = Duration::from_secs(30);

    fn batch(seq: u32) -> BatchId {
        BatchId { tick: Tick(1), epoch: 1, ring: 0, seq }
    }

    fn group_of(members: &[(MemberId, u64)]) -> (Dispatch, Instant) {
        let mut dispatch = Dispatch::new(REDELIVER, false);
        for (id, credit) in members {
            dispatch.join(*id, *credit);
        }
        (dispatch, Instant::now())
    }

    fn next_again(dispatch: &mut Dispatch, away: &[u16]) -> Option<(BatchId, MemberId)> {
        dispatch.next_again(away, 1).pop()
    }

    #[test]
    fn members_take_turns_and_overshoot_by_at_most_one_batch() {
        let (mut dispatch, now) = group_of(&[(A, 10), (B, 10)]);
        for (seq, expected) in [(0, Some(A)), (1, Some(B)), (2, Some(A)), (3, Some(B)), (4, None)] {
            let member = dispatch.next_member();
            assert_eq!(member, expected, "batch {seq}");
            if let Some(member) = member {
                dispatch.hand(batch(seq), 9, member, now);
            }
        }
        assert_eq!(dispatch.window(), 0);
        dispatch.forget(batch(0));
        assert_eq!(dispatch.window(), 1, "9 of 10 are out with A");
        assert_eq!(dispatch.next_member(), Some(A));
    }

    #[test]
    fn who_does_not_read_is_passed_over_until_it_does() {
        let (mut dispatch, now) = group_of(&[(A, 10)]);
        dispatch.hand(batch(0), 10, A, now);
        dispatch.note_unread(A, 10);
        let overdue = now + REDELIVER;
        dispatch.ring_alarms(overdue);
        assert_eq!(
            (dispatch.window(), next_again(&mut dispatch, &[])),
            (0, None),
            "it would have it twice, unread"
        );
        dispatch.join(B, 5);
        assert_eq!((dispatch.window(), next_again(&mut dispatch, &[])), (5, Some((batch(0), B))));
        dispatch.note_unread(A, 0);
        assert_eq!((dispatch.window(), next_again(&mut dispatch, &[])), (15, Some((batch(0), A))));
    }

    #[test]
    fn there_is_a_member_for_each_batch_of_a_window_whatever_is_unread() {
        for unread in 0..=10 {
            let (mut dispatch, now) = group_of(&[(A, 10), (B, 3)]);
            dispatch.note_unread(A, unread);
            let (window, mut unread) = (dispatch.window(), unread);
            assert_eq!(window, 13 - unread);
            // As an outbox gives: batches, until they are as many messages or more.
            for seq in (0..).take_while(|seq| u64::from(*seq) * 4 < window) {
                let member = dispatch.next_member().expect("there is room");
                dispatch.hand(batch(seq), 4, member, now);
                if member == A {
                    unread += 4;
                    dispatch.note_unread(A, unread);
                }
            }
        }
    }

    #[test]
    fn what_a_member_held_goes_to_the_others_at_once_oldest_first() {
        let (mut dispatch, now) = group_of(&[(A, 100)]);
        dispatch.hand(batch(1), 5, A, now);
        dispatch.hand(batch(0), 5, A, now);
        dispatch.join(B, 100);
        assert_eq!(dispatch.leave(A, now), []);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), B)));
        dispatch.hand(batch(0), 5, B, now);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(1), B)));
        assert_eq!(dispatch.leave(B, now), [batch(0), batch(1)], "the last member releases all");
        assert_eq!(dispatch.next_alarm(), None);
    }

    #[test]
    fn an_overdue_batch_is_handed_out_again_to_whoever_has_room() {
        let (mut dispatch, now) = group_of(&[(A, 5)]);
        dispatch.hand(batch(0), 5, A, now);
        assert_eq!(dispatch.next_alarm(), Some(now + REDELIVER));
        dispatch.ring_alarms(now + REDELIVER.saturating_sub(Duration::from_nanos(1)));
        assert_eq!(next_again(&mut dispatch, &[]), None);
        dispatch.ring_alarms(now + REDELIVER);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), A)));
    }

    #[test]
    fn an_overdue_batch_goes_to_another_member_whose_turn_ever_it_is() {
        let (mut dispatch, now) = group_of(&[(A, 100), (B, 5)]);
        for (seq, member) in [(0, A), (1, B)] {
            assert_eq!(dispatch.next_member(), Some(member));
            dispatch.hand(batch(seq), 5, member, now);
        }
        dispatch.forget(batch(1));
        let overdue = now + REDELIVER;
        dispatch.ring_alarms(overdue);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), B)), "it was the turn of A");
        // Unless nobody else has room for it.
        dispatch.hand(batch(2), 5, B, overdue);
        assert_eq!(next_again(&mut dispatch, &[]), None);
        assert_eq!(dispatch.next_alarm(), Some(overdue + YIELDS));
        dispatch.ring_alarms(overdue + YIELDS);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), A)));
    }

    #[test]
    fn several_are_chosen_as_if_they_were_handed_out_one_by_one() {
        let c = MemberId(3);
        let waiting = || {
            let (mut dispatch, now) = group_of(&[(A, 1_000)]);
            (0..8).for_each(|seq| dispatch.hand(batch(seq), 4, A, now));
            dispatch.join(B, 10);
            dispatch.join(c, 6);
            assert_eq!(dispatch.leave(A, now), []);
            dispatch.hand(batch(0), 4, B, now);
            assert!(dispatch.nack(B, batch(0), REDELIVER, now));
            (dispatch, now)
        };
        let (mut dispatch, now) = waiting();
        let mut one_by_one = Vec::new();
        while let Some((again, member)) = next_again(&mut dispatch, &[]) {
            dispatch.hand(again, 4, member, now);
            one_by_one.push((again, member));
        }
        let (mut dispatch, _) = waiting();
        let several = dispatch.next_again(&[], 100);
        assert_eq!(several, [(0, c), (1, B), (2, c), (3, B), (4, B)].map(|(seq, member)| (batch(seq), member)));
        assert_eq!(several, one_by_one);
        assert_eq!(dispatch.window(), 16, "none of them is handed out yet");
        assert_eq!(dispatch.next_again(&[], 2).len(), 2, "no more than are asked for");
    }

    #[test]
    fn a_nack_goes_to_another_member_or_to_the_same_after_a_delay_that_doubles() {
        let (mut dispatch, now) = group_of(&[(A, 100), (B, 100)]);
        let delay = Duration::from_secs(1);
        dispatch.hand(batch(0), 5, A, now);
        assert!(!dispatch.nack(B, batch(0), delay, now), "B does not hold it");
        assert!(dispatch.nack(A, batch(0), delay, now));
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), B)));
        dispatch.hand(batch(0), 5, B, now);
        assert!(dispatch.nack(B, batch(0), delay, now));
        assert_eq!(next_again(&mut dispatch, &[]), None, "both passed it by");
        assert_eq!(dispatch.next_alarm(), Some(now + delay));
        dispatch.ring_alarms(now + delay);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), A)));
        assert_eq!(dispatch.leave(A, now + delay), []);
        assert_eq!(next_again(&mut dispatch, &[]), None, "the second delay is twice the first");
        assert_eq!(dispatch.next_alarm(), Some(now + delay * 2));
        dispatch.ring_alarms(now + delay * 2);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), B)));
    }

    #[test]
    fn a_member_that_gives_back_for_long_keeps_nothing_from_the_others_and_nothing_is_kept_of_who_has_left() {
        let (mut dispatch, now) = group_of(&[(A, 100), (B, 100)]);
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(10));
        dispatch.hand(batch(0), 5, A, now);
        assert!(dispatch.nack(A, batch(0), short, now));
        dispatch.hand(batch(0), 5, B, now);
        assert!(dispatch.nack(B, batch(0), long, now));
        dispatch.ring_alarms(now + short);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), A)), "whatever B wants");
        assert_eq!(dispatch.leave(B, now + short), []);
        assert_eq!(dispatch.known[&batch(0)].passed_by, []);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), A)));
    }

    #[test]
    fn a_delay_never_exceeds_the_time_of_redelivery() {
        let (mut dispatch, mut now) = group_of(&[(A, 100)]);
        for _ in 0..40 {
            dispatch.hand(batch(0), 5, A, now);
            assert!(dispatch.nack(A, batch(0), Duration::from_secs(1), now));
            let timer = dispatch.next_alarm().unwrap();
            assert!(timer <= now + REDELIVER);
            now = timer;
            dispatch.ring_alarms(now);
        }
    }

    #[test]
    fn a_late_acknowledgement_settles_a_batch_that_went_to_another_member() {
        let (mut dispatch, now) = group_of(&[(A, 5), (B, 5)]);
        dispatch.hand(batch(0), 5, A, now);
        dispatch.ring_alarms(now + REDELIVER);
        let (again, member) = next_again(&mut dispatch, &[]).unwrap();
        dispatch.hand(again, 5, member, now + REDELIVER);
        dispatch.forget(batch(0));
        assert_eq!((dispatch.window(), dispatch.next_alarm()), (10, None));
    }

    /// A group whose outbox is shared with other sidecars.
    fn shared_group_of(members: &[(MemberId, u64)]) -> (Dispatch, Instant) {
        let (dispatch, now) = group_of(members);
        (Dispatch { is_shared: true, ..dispatch }, now)
    }

    #[test]
    fn an_overdue_batch_is_lent_for_a_moment_and_then_handed_out_again() {
        let (mut dispatch, now) = shared_group_of(&[(A, 5)]);
        dispatch.hand(batch(0), 5, A, now);
        assert_eq!(dispatch.lend(), [], "it is held");
        let overdue = now + REDELIVER;
        dispatch.ring_alarms(overdue);
        assert_eq!(next_again(&mut dispatch, &[]), None, "A let it become overdue");
        assert_eq!(dispatch.window(), 5, "A does not hold it any more");
        assert_eq!(dispatch.lend(), [batch(0)]);
        assert_eq!(dispatch.lend(), [], "once");
        assert_eq!(dispatch.next_alarm(), Some(overdue + YIELDS));
        dispatch.ring_alarms(overdue + YIELDS);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), A)), "nobody else took it");
        dispatch.hand(batch(0), 5, A, overdue + YIELDS);
        dispatch.ring_alarms(overdue + YIELDS + REDELIVER);
        assert_eq!(dispatch.lend(), [batch(0)], "and again");
        dispatch.forget(batch(0));
        assert_eq!((dispatch.lent, dispatch.next_alarm()), (0, None));
    }

    #[test]
    fn an_overdue_batch_goes_to_another_member_here_rather_than_elsewhere() {
        let (mut dispatch, now) = shared_group_of(&[(A, 5), (B, 5)]);
        dispatch.hand(batch(0), 5, A, now);
        dispatch.ring_alarms(now + REDELIVER);
        assert_eq!(dispatch.lend(), [], "B can have it");
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), B)));
        // B takes something else before: it has no room, and cannot have it now.
        dispatch.hand(batch(1), 5, B, now + REDELIVER);
        assert_eq!(next_again(&mut dispatch, &[]), None);
        assert_eq!(dispatch.lend(), [batch(0)]);
        dispatch.forget(batch(1));
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), B)), "what is lent is taken back for B");
    }

    #[test]
    fn a_nacked_batch_is_lent_until_its_delay_is_over_or_a_member_joins() {
        let (mut dispatch, now) = shared_group_of(&[(A, 100)]);
        let delay = Duration::from_secs(3);
        dispatch.hand(batch(0), 5, A, now);
        assert!(dispatch.nack(A, batch(0), delay, now));
        assert_eq!(dispatch.lend(), [batch(0)]);
        assert_eq!((next_again(&mut dispatch, &[]), dispatch.next_alarm()), (None, Some(now + delay)));
        dispatch.join(B, 100);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), B)));
        assert_eq!(dispatch.leave(B, now), []);
        assert_eq!(dispatch.leave(A, now), [batch(0)]);
        assert_eq!(dispatch.lent, 0);
    }

    #[test]
    fn no_more_is_lent_than_may_be_and_the_rest_waits_for_its_delay() {
        let (mut dispatch, now) = shared_group_of(&[(A, 1_000)]);
        let count = u32::try_from(MAX_LENT).unwrap() + 2;
        (0..count).for_each(|seq| dispatch.hand(batch(seq), 1, A, now));
        dispatch.ring_alarms(now + REDELIVER);
        assert_eq!(dispatch.lend().len(), MAX_LENT);
        assert_eq!(dispatch.lend(), []);
        dispatch.forget(batch(0));
        assert_eq!(dispatch.lend(), [batch(count - 2)]);
        dispatch.ring_alarms(now + REDELIVER + YIELDS);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(1), A)));
    }

    #[test]
    fn nothing_is_lent_where_the_outbox_is_not_shared() {
        let (mut dispatch, now) = group_of(&[(A, 100)]);
        dispatch.hand(batch(0), 5, A, now);
        dispatch.nack(A, batch(0), YIELDS, now);
        assert_eq!(dispatch.lend(), []);
    }

    #[test]
    fn a_ring_that_is_away_does_not_hold_up_the_others() {
        let (mut dispatch, now) = group_of(&[(A, 100)]);
        let elsewhere = BatchId { ring: 1, ..batch(9) };
        for batch in [batch(0), elsewhere] {
            dispatch.hand(batch, 5, A, now);
        }
        dispatch.ring_alarms(now + REDELIVER);
        assert_eq!(dispatch.next_again(&[], 9), [(batch(0), A)], "those of one ring");
        assert_eq!(next_again(&mut dispatch, &[0]), Some((elsewhere, A)));
        assert_eq!(next_again(&mut dispatch, &[0, 1]), None);
        assert_eq!(next_again(&mut dispatch, &[]), Some((batch(0), A)));
    }
}
