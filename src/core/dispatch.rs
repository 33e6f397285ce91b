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
//! # Invariants
//!
//! 1. A batch known here is handed to exactly one member, or waits to be handed out again.
//! 2. `out` of a member is the number of messages in the batches handed to it. A member gets a batch only
//!    while `out < credit`, so it overshoots by at most one batch.
//! 3. Every batch has one alarm: when it is overdue, or when its delay is over. No batch can be forgotten.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::batch::BatchId;

/// The shortest delay of a nack: members that give a batch back at once do not pass it around in a circle
/// without pause.
const SHORTEST_DELAY: Duration = Duration::from_millis(10);

/// How many batches that were passed by are asked about before giving up for now.
const MAX_PASSED_ASKED: usize = 64;

/// A subscriber, as the member of its group; never reused within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

#[derive(Debug)]
struct Member {
    id: MemberId,
    credit: u64,
    out: u64,
}

#[derive(Debug)]
struct Known {
    /// Number of its messages.
    ids: u64,
    /// Who holds it; nobody while it waits.
    holder: Option<MemberId>,
    /// How often it was nacked.
    nacks: u32,
    /// Members that gave it back and do not get it before the delay is over.
    passed_by: Vec<MemberId>,
    /// When it is overdue, or the delay is over: its entry in the alarms.
    alarm: Instant,
    /// When the delay of the last nack is over.
    delay_over: Instant,
}

/// The batches of one group that are in the hands of members here.
#[derive(Debug)]
pub struct Dispatch {
    redeliver_after: Duration,
    members: Vec<Member>,
    turn: usize,
    known: BTreeMap<BatchId, Known>,
    /// Batches that nobody holds and anyone may have.
    waiting: BTreeSet<BatchId>,
    /// Batches that nobody holds and somebody passed by, as far as another member may want them.
    passed: BTreeSet<BatchId>,
    alarms: BTreeSet<(Instant, BatchId)>,
}

impl Dispatch {
    /// A group without members. A batch that is not acknowledged for `redeliver_after` is handed out again.
    #[must_use]
    pub fn new(redeliver_after: Duration) -> Dispatch {
        Dispatch {
            redeliver_after,
            members: Vec::new(),
            turn: 0,
            known: BTreeMap::new(),
            waiting: BTreeSet::new(),
            passed: BTreeSet::new(),
            alarms: BTreeSet::new(),
        }
    }

    /// Number of members.
    #[must_use]
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// A subscriber joins with a window of `credit` messages.
    pub fn join(&mut self, id: MemberId, credit: u64) {
        self.members.push(Member { id, credit, out: 0 });
        // What all others passed by, it may want.
        let unheld = self.known.iter().filter(|(_, known)| known.holder.is_none() && !known.passed_by.is_empty());
        self.passed.extend(unheld.map(|(batch, _)| *batch));
    }

    /// A subscriber goes. What it held waits for the others at once; if it was the last, every batch known
    /// here is returned, to be released to the outbox.
    pub fn leave(&mut self, id: MemberId, now: Instant) -> Vec<BatchId> {
        self.members.retain(|member| member.id != id);
        if self.members.is_empty() {
            self.waiting.clear();
            self.passed.clear();
            self.alarms.clear();
            return std::mem::take(&mut self.known).into_keys().collect();
        }
        let held = |known: &Known| known.holder == Some(id);
        let orphans: Vec<BatchId> =
            self.known.iter().filter(|(_, known)| held(known)).map(|(batch, _)| *batch).collect();
        for batch in orphans {
            self.wait(batch, now);
        }
        Vec::new()
    }

    /// How many messages the members would take now: for the outbox's `take`.
    #[must_use]
    pub fn window(&self) -> u64 {
        self.members.iter().map(|member| member.credit.saturating_sub(member.out)).sum()
    }

    /// Whose turn it is to get a new batch: members with room, in turns.
    pub fn next_member(&mut self) -> Option<MemberId> {
        let position = self.position_of_next(&[])?;
        Some(self.take_turn(position))
    }

    /// The next batch to be handed out again and to whom, if there is one at `now`.
    pub fn next_again(&mut self) -> Option<(BatchId, MemberId)> {
        let free = self.waiting.first().and_then(|batch| Some((*batch, self.position_of_next(&[])?)));
        // Bounded, since each batch must be asked about: what lies further back is free for all after its delay.
        let passed = self.passed.iter().take(MAX_PASSED_ASKED).find_map(|batch| {
            let position = self.position_of_next(&self.known[batch].passed_by)?;
            Some((*batch, position))
        });
        let (batch, position) = free.into_iter().chain(passed).min()?;
        Some((batch, self.take_turn(position)))
    }

    /// A batch of `ids` messages goes to a member.
    pub fn hand(&mut self, batch: BatchId, ids: u64, to: MemberId, now: Instant) {
        let earlier = self.remove(batch);
        if let Some(member) = self.member(to) {
            member.out += ids;
        }
        let (nacks, passed_by, delay_over) =
            earlier.map_or((0, Vec::new(), now), |known| (known.nacks, known.passed_by, known.delay_over));
        let alarm = now + self.redeliver_after;
        self.insert(batch, Known { ids, holder: Some(to), nacks, passed_by, alarm, delay_over });
    }

    /// A batch is settled or gone.
    pub fn forget(&mut self, batch: BatchId) {
        self.remove(batch);
    }

    /// A member gives a batch back. It goes to a member that did not, or to anyone after the delay, which
    /// doubles with every nack up to `redeliver_after`. Returns whether the member held it.
    pub fn nack(&mut self, from: MemberId, batch: BatchId, delay: Duration, now: Instant) -> bool {
        let Some(known) = self.known.get_mut(&batch) else { return false };
        if known.holder != Some(from) {
            return false;
        }
        let delay = delay.max(SHORTEST_DELAY).saturating_mul(1 << known.nacks.min(20)).min(self.redeliver_after);
        if known.delay_over <= now {
            known.passed_by.clear();
        }
        known.passed_by.push(from);
        known.delay_over = known.delay_over.max(now + delay);
        known.nacks += 1;
        self.wait(batch, now);
        true
    }

    /// Rings the alarms of `now`: overdue batches wait to be handed out again, delays are over.
    pub fn ring_alarms(&mut self, now: Instant) {
        while let Some((alarm, batch)) = self.alarms.first().copied() {
            if alarm > now {
                break;
            }
            self.wait(batch, now);
        }
    }

    /// When the next alarm rings.
    #[must_use]
    pub fn next_alarm(&self) -> Option<Instant> {
        self.alarms.first().map(|(alarm, _)| *alarm)
    }

    /// Lets a batch wait for a member that did not pass it by; for any member once its delay is over.
    fn wait(&mut self, batch: BatchId, now: Instant) {
        let Some(mut known) = self.remove(batch) else { return };
        known.holder = None;
        if known.delay_over <= now {
            known.passed_by.clear();
        }
        known.alarm = if known.passed_by.is_empty() { now + self.redeliver_after } else { known.delay_over };
        self.insert(batch, known);
    }

    fn insert(&mut self, batch: BatchId, known: Known) {
        self.alarms.insert((known.alarm, batch));
        if known.holder.is_none() && known.passed_by.is_empty() {
            self.waiting.insert(batch);
        } else if known.holder.is_none() && self.members.iter().any(|member| !known.passed_by.contains(&member.id))
        {
            self.passed.insert(batch);
        }
        self.known.insert(batch, known);
    }

    fn remove(&mut self, batch: BatchId) -> Option<Known> {
        let known = self.known.remove(&batch)?;
        self.alarms.remove(&(known.alarm, batch));
        self.waiting.remove(&batch);
        self.passed.remove(&batch);
        if let Some(member) = known.holder.and_then(|holder| self.member(holder)) {
            member.out -= known.ids;
        }
        Some(known)
    }

    fn member(&mut self, id: MemberId) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    fn position_of_next(&self, except: &[MemberId]) -> Option<usize> {
        let count = self.members.len();
        (0..count).map(|step| (self.turn + step) % count).find(|position| {
            let member = &self.members[*position];
            member.out < member.credit && !except.contains(&member.id)
        })
    }

    fn take_turn(&mut self, position: usize) -> MemberId {
        self.turn = (position + 1) % self.members.len();
        self.members[position].id
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
        let mut dispatch = Dispatch::new(REDELIVER);
        for (id, credit) in members {
            dispatch.join(*id, *credit);
        }
        (dispatch, Instant::now())
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
    fn what_a_member_held_goes_to_the_others_at_once_oldest_first() {
        let (mut dispatch, now) = group_of(&[(A, 100)]);
        dispatch.hand(batch(1), 5, A, now);
        dispatch.hand(batch(0), 5, A, now);
        dispatch.join(B, 100);
        assert_eq!(dispatch.leave(A, now), []);
        assert_eq!(dispatch.next_again(), Some((batch(0), B)));
        dispatch.hand(batch(0), 5, B, now);
        assert_eq!(dispatch.next_again(), Some((batch(1), B)));
        assert_eq!(dispatch.leave(B, now), [batch(0), batch(1)], "the last member releases all");
        assert_eq!(dispatch.next_alarm(), None);
    }

    #[test]
    fn an_overdue_batch_is_handed_out_again_to_whoever_has_room() {
        let (mut dispatch, now) = group_of(&[(A, 5)]);
        dispatch.hand(batch(0), 5, A, now);
        assert_eq!(dispatch.next_alarm(), Some(now + REDELIVER));
        dispatch.ring_alarms(now + REDELIVER.saturating_sub(Duration::from_nanos(1)));
        assert_eq!(dispatch.next_again(), None);
        dispatch.ring_alarms(now + REDELIVER);
        assert_eq!(dispatch.next_again(), Some((batch(0), A)));
    }

    #[test]
    fn a_nack_goes_to_another_member_or_to_the_same_after_a_delay_that_doubles() {
        let (mut dispatch, now) = group_of(&[(A, 100), (B, 100)]);
        let delay = Duration::from_secs(1);
        dispatch.hand(batch(0), 5, A, now);
        assert!(!dispatch.nack(B, batch(0), delay, now), "B does not hold it");
        assert!(dispatch.nack(A, batch(0), delay, now));
        assert_eq!(dispatch.next_again(), Some((batch(0), B)));
        dispatch.hand(batch(0), 5, B, now);
        assert!(dispatch.nack(B, batch(0), delay, now));
        assert_eq!(dispatch.next_again(), None, "both passed it by");
        assert_eq!(dispatch.next_alarm(), Some(now + delay * 2), "the second delay is twice the first");
        dispatch.ring_alarms(now + delay * 2);
        assert!(dispatch.next_again().is_some());
    }

    #[test]
    fn a_delay_never_exceeds_the_time_of_redelivery() {
        let (mut dispatch, mut now) = group_of(&[(A, 100)]);
        for _ in 0..40 {
            dispatch.hand(batch(0), 5, A, now);
            assert!(dispatch.nack(A, batch(0), Duration::from_secs(1), now));
            let alarm = dispatch.next_alarm().unwrap();
            assert!(alarm <= now + REDELIVER);
            now = alarm;
            dispatch.ring_alarms(now);
        }
    }

    #[test]
    fn a_late_acknowledgement_settles_a_batch_that_went_to_another_member() {
        let (mut dispatch, now) = group_of(&[(A, 5), (B, 5)]);
        dispatch.hand(batch(0), 5, A, now);
        dispatch.ring_alarms(now + REDELIVER);
        let (again, member) = dispatch.next_again().unwrap();
        dispatch.hand(again, 5, member, now + REDELIVER);
        dispatch.forget(batch(0));
        assert_eq!((dispatch.window(), dispatch.next_alarm()), (10, None));
    }
}
