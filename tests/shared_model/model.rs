//! The naive model: one map, and the rules of time as docs/REDIS.md tells them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ackwheel::core::{AddOutcome, Advance, DelOutcome, Message, Tick, TickCounts, TimedOut};

use super::{CATCH_UP, SLACK_MS, STORES, TICK_MS};
use crate::support::frozen_redis::FrozenRedis;

/// The wheel as it is told, without a thought for cost.
#[derive(Default)]
pub struct Model {
    pub slots: u64,
    pub now: u64,
    pub pointer: u64,
    pub due: u64,
    pub leader: Option<usize>,
    /// The last elected leader, its pointer, and by how many ms every deadline was shifted then.
    pub elected: Option<(usize, u64, u64)>,
    /// When each store that believes it leads means to move the pointer.
    pub next: [Option<u64>; STORES],
    /// By how many ms the next move of each was put off.
    pub shifted: [u64; STORES],
    /// The pointer as each store has seen it while another led, when it was due there, and since when it has stalled.
    pub seen: [Option<(u64, u64, u64)>; STORES],
    /// Message → deadline, attempt, and the time before which it must not time out.
    pub in_flight: BTreeMap<Message, (u64, u8, u64)>,
    pub late: BTreeMap<Message, u64>,
    pub acked: BTreeMap<u64, u64>,
    pub decided: BTreeMap<u64, (BTreeSet<TimedOut>, u64)>,
    pub unpublished: u64,
    /// The counts of each tick when it was published.
    pub counted: BTreeMap<u64, TickCounts>,
    /// The store that has lost an answer about publishing, and not asked again.
    pub in_doubt: Option<usize>,
    /// How many such answers were never made up for, since the store no longer led: so many ticks may go uncounted.
    pub untold: usize,
}

impl Model {
    pub fn tick_due(&self) -> u64 {
        self.pointer + (self.now.saturating_sub(self.due) / TICK_MS).min(CATCH_UP)
    }

    pub fn add(&mut self, message: Message, ack_timeout_ticks: u16, attempt: u8) -> AddOutcome {
        let deadline = self.tick_due() + u64::from(ack_timeout_ticks);
        self.late.remove(&message);
        let not_before = self.now + u64::from(ack_timeout_ticks) * TICK_MS;
        match self.in_flight.insert(message, (deadline, attempt, not_before)) {
            Some(_) => AddOutcome::Rearmed,
            None => AddOutcome::Added,
        }
    }

    pub fn del(&mut self, message: Message, withdraw: bool) -> DelOutcome {
        if let Some((deadline, ..)) = self.in_flight.remove(&message) {
            if withdraw {
                return DelOutcome::Withdrawn;
            }
            *self.acked.entry(deadline).or_default() += 1;
            return DelOutcome::Acked;
        }
        match self.late.get(&message) {
            Some(deadline) if self.pointer - (deadline + 1) < self.slots => DelOutcome::Late,
            _ => DelOutcome::Unknown,
        }
    }

    /// A look at the clock of a store, which leads or believes it does.
    pub fn advance(&mut self, store: usize, time: &FrozenRedis) -> Advance {
        let Some(next) = self.next[store] else { return Advance::Deposed };
        let Some(late) = self.now.checked_sub(next) else { return Advance::Waiting(time.at(next)) };
        if late >= CATCH_UP * TICK_MS {
            let missed = late / TICK_MS - CATCH_UP + 1;
            let next = next + missed * TICK_MS;
            self.next[store] = Some(next);
            self.shifted[store] += missed * TICK_MS;
            return Advance::Waiting(time.at(next));
        }
        if self.leader != Some(store) {
            self.next[store] = None;
            return Advance::Deposed;
        }
        let by_clock = self.now - late;
        let kept = self.due + TICK_MS;
        self.due = if by_clock > kept + SLACK_MS { by_clock } else { kept };
        let next = self.due + TICK_MS;
        self.next[store] = Some(next);
        let decided = self.pointer;
        self.pointer += 1;
        self.unpublished += 1;
        let expired: Vec<Message> =
            self.in_flight.iter().filter(|(_, life)| life.0 == decided).map(|(message, _)| *message).collect();
        let mut timed_out = BTreeSet::new();
        for message in expired {
            let (_, attempt, not_before) = self.in_flight.remove(&message).expect("it was found there");
            assert!(self.now >= not_before, "{message} times out {} ms early", not_before - self.now);
            self.late.insert(message, decided);
            timed_out.insert(TimedOut { message, attempt });
        }
        let acked = self.acked.remove(&decided).unwrap_or_default();
        self.decided.insert(decided, (timed_out, acked));
        let lateness = Duration::from_millis(self.now - self.due);
        // A part of a tick counts later.
        let shifted = self.shifted[store] / TICK_MS;
        self.shifted[store] %= TICK_MS;
        Advance::Moved { expired: Tick(decided), lateness, shifted, next: time.at(next) }
    }

    /// Whether a store leads in its present session.
    pub fn leads(&self, store: usize) -> bool {
        self.leader == Some(store) && self.next[store].is_some()
    }

    pub fn acquire(&mut self, store: usize) {
        // A leader that is elected again still asks what became of its last answer; one that had lost the lease does not.
        let is_own = self.leader == Some(store);
        self.untold += usize::from(self.in_doubt.take_if(|asked| !is_own || *asked != store).is_some());
        let (gap, due_before) = (self.now - self.due, self.due);
        if gap >= TICK_MS {
            let seen = self.seen[store].filter(|seen| (seen.0, seen.1) == (self.pointer, self.due));
            let own = seen.map_or(0, |seen| self.now - seen.2);
            self.due = self.due.max(self.now - own.min(CATCH_UP * TICK_MS));
        }
        self.next[store] = Some(self.due + TICK_MS);
        // Shifts that no move has returned are returned with the next one, if the same leader makes it.
        let own =
            self.elected.filter(|(by, at, _)| self.leader == Some(store) && (*by, *at) == (store, self.pointer));
        self.shifted[store] = self.due - due_before + own.map_or(0, |(.., shifted)| shifted);
        self.elected = Some((store, self.pointer, self.shifted[store]));
        self.leader = Some(store);
    }

    pub fn sees(&mut self, store: usize) {
        if self.seen[store].is_none_or(|seen| (seen.0, seen.1) != (self.pointer, self.due)) {
            // It may be due only later.
            self.seen[store] = Some((self.pointer, self.due, self.now.max(self.due)));
        }
    }
}
