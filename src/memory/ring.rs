//! The ring in memory.
//!
//! # Two structures, one truth
//!
//! `messages` (message → entry) is the truth; `lists` (tick → messages) only say where to look. Every
//! outcome is decided under the map's guard of that one message, by comparing the entry's deadline with
//! `decided_below`:
//!
//! | what | under the guard of the message | afterwards, without it |
//! |---|---|---|
//! | add | `deadline >= decided_below`, else try again with the tick due now; put the entry | vacate the place of the entry replaced |
//! | del | entry is there and not decided: take it out, count it | vacate its place |
//! | decide tick D | (first `decided_below = D + 1`, then take the list:) entry has this deadline and this place: mark it listed | — |
//! | forget D | entry still has this deadline: take it out | — |
//!
//! The order makes each race come out one way. An add takes its place in the list *before* it puts the
//! entry, so whoever decides a tick meets every entry of it. An add that was overtaken by the decision sees
//! that under the guard and goes to a later tick. A message that is decided but not yet listed can be added
//! again only by handing it to `overtaken`, from where it joins its batch. After the decision the entry
//! stays, as the memory of what is `late`, until a revolution has passed.
//!
//! No guard of the map is held while another message is touched, nor across an await.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dashmap::mapref::entry::Entry as MapEntry;
use parking_lot::{Mutex, RwLock};

use super::entry::{Entry, Messages};
use super::expire::Expiry;
use super::lists::Lists;
use super::options::RingOptions;
use super::outbox::MemoryOutbox;
use crate::core::batch::TimedOut;
use crate::core::message::{AddOutcome, DelOutcome, Message};
use crate::core::pace::{Pace, Turn};
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::{
    AddNewMsg, AddNewMsgAnswer, Advance, DelMsg, DelMsgAnswer, Expired, Handover, Reply, Ring, RingStatus,
};
use crate::core::tally::{LatencyTally, Stamp};
use crate::core::tick::{Tick, Wheel};

/// A ring that lives in the process.
pub struct MemoryRing {
    pub(super) options: RingOptions,
    /// Where stamps count from.
    pub(super) origin: Instant,
    pub(super) messages: Messages,
    pub(super) lists: Lists,
    pub(super) pace: RwLock<Pace>,
    /// The latest time that any request brought, in ns since the origin: see [`MemoryRing::turn`].
    latest_ns: AtomicU64,
    /// Ticks below this one are decided. It is the pointer, and after a drain beyond every deadline.
    pub(super) decided_below: AtomicU64,
    pub(super) in_flight: AtomicU64,
    /// Whether new messages are refused; an add holds it for reading from its check to its end.
    pub(super) draining: RwLock<bool>,
    pub(super) expiry: Mutex<Expiry>,
    pub(super) outbox: Arc<MemoryOutbox>,
}

impl MemoryRing {
    /// An empty ring whose batches go to `outbox`.
    #[must_use]
    pub fn new(options: RingOptions, outbox: Arc<MemoryOutbox>, now: Instant) -> MemoryRing {
        MemoryRing {
            options,
            origin: now,
            messages: Messages::with_hasher(foldhash::quality::RandomState::default()),
            lists: Lists::new(options.wheel, options.pointer),
            pace: RwLock::new(Pace::new(options.wheel.tick_length(), options.pointer, now)),
            latest_ns: AtomicU64::new(0),
            decided_below: AtomicU64::new(options.pointer.0),
            in_flight: AtomicU64::new(0),
            draining: RwLock::new(false),
            expiry: Mutex::new(Expiry::default()),
            outbox,
        }
    }

    pub(super) fn stamp(&self, now: Instant) -> Stamp {
        Stamp::after(now.saturating_duration_since(self.origin))
    }

    pub(super) fn decided_below(&self) -> Tick {
        Tick(self.decided_below.load(Ordering::SeqCst))
    }

    pub(super) fn expire_step(&self, now: Instant) -> Expired {
        self.expiry.lock().step(self, now)
    }

    fn add(&self, request: AddNewMsg<'_>, now: Instant) -> Result<AddNewMsgAnswer, Refusal> {
        let draining = self.draining.read();
        if *draining {
            return Err(Refusal::new(
                Reason::Draining,
                "this sidecar is draining and takes no new messages: add them through another one",
            ));
        }
        let reserved = self.reserve(request.messages)?;
        let stamp = self.stamp(now);
        self.see(now);
        let due = self.pace.read().tick_due(now);
        let mut answer = AddNewMsgAnswer { deadline: due, outcomes: Vec::with_capacity(request.messages.len()) };
        for message in request.messages {
            let outcome;
            (outcome, answer.deadline) = self.add_one(*message, request, due, stamp);
            answer.outcomes.push(outcome);
        }
        let added = (answer.outcomes.len() - answer.rearmed()) as u64;
        // More than was reserved is added only if a message left in the very moment that it was counted.
        self.in_flight.fetch_sub(reserved.saturating_sub(added), Ordering::Relaxed);
        self.in_flight.fetch_add(added.saturating_sub(reserved), Ordering::Relaxed);
        Ok(answer)
    }

    /// Counts messages as in flight ahead of adding them; returns how many, to be taken off when the outcome is
    /// known. Near the limit it counts only those that are not in flight already: a re-arm needs no room.
    fn reserve(&self, messages: &[Message]) -> Result<u64, Refusal> {
        let max = self.options.max_in_flight;
        let mut count = messages.len() as u64;
        for is_exact in [false, true] {
            if is_exact {
                let fresh: HashSet<_> = messages.iter().filter(|message| !self.is_in_flight(**message)).collect();
                count = fresh.len() as u64;
            }
            if self.in_flight.fetch_add(count, Ordering::Relaxed).saturating_add(count) <= max {
                return Ok(count);
            }
            self.in_flight.fetch_sub(count, Ordering::Relaxed);
        }
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        Err(Refusal::new(
            Reason::MaxInFlight,
            format!(
                "{in_flight} messages are in flight and {count} more would exceed the limit of {max}: try again when \
                 some are acknowledged or have timed out, or raise --max-in-flight"
            ),
        ))
    }

    fn is_in_flight(&self, message: Message) -> bool {
        self.messages.get(&message).is_some_and(|entry| entry.deadline >= self.decided_below())
    }

    fn add_one(&self, message: Message, request: AddNewMsg<'_>, due: Tick, stamp: Stamp) -> (AddOutcome, Tick) {
        let mut due = due;
        loop {
            let deadline = self.options.wheel.deadline(due, request.ack_timeout_ticks);
            if let Some(place) = self.lists.of(deadline).push(deadline, message) {
                let entry = Entry::in_flight(deadline, stamp, place, request.attempt);
                if let Some(outcome) = self.put(message, entry) {
                    return (outcome, deadline);
                }
                self.lists.of(deadline).vacate(deadline, place);
            }
            // The tick was decided since it was chosen: the wheel has moved on, and so do we.
            due = due.max(self.decided_below());
        }
    }

    /// Puts an entry into the map, unless its tick is decided by now.
    fn put(&self, message: Message, entry: Entry) -> Option<AddOutcome> {
        let place = self.messages.entry(message);
        // Under the guard: whoever decides the tick from here on meets this entry.
        let decided_below = self.decided_below();
        if entry.deadline < decided_below {
            return None;
        }
        let mut place = match place {
            MapEntry::Vacant(place) => {
                place.insert(entry);
                return Some(AddOutcome::Added);
            }
            MapEntry::Occupied(place) => place,
        };
        let earlier = place.insert(entry);
        if earlier.deadline < decided_below {
            if !earlier.listed {
                let timed_out = TimedOut { message, attempt: earlier.attempt };
                self.lists.of(earlier.deadline).overtaken.lock().push(timed_out);
            }
            return Some(AddOutcome::Added);
        }
        drop(place);
        self.lists.of(earlier.deadline).vacate(earlier.deadline, earlier.place);
        Some(AddOutcome::Rearmed)
    }

    fn del(&self, request: DelMsg<'_>, now: Instant) -> DelMsgAnswer {
        let pointer = self.pace.read().pointer();
        let stamp = self.stamp(now);
        let mut answer = DelMsgAnswer {
            outcomes: Vec::with_capacity(request.messages.len()),
            ack_latency: LatencyTally::default(),
        };
        let mut removed = 0;
        for message in request.messages {
            let outcome = self.del_one(*message, request.withdraw, pointer, stamp, &mut answer.ack_latency);
            removed += u64::from(matches!(outcome, DelOutcome::Acked | DelOutcome::Withdrawn));
            answer.outcomes.push(outcome);
        }
        self.in_flight.fetch_sub(removed, Ordering::Relaxed);
        answer
    }

    fn del_one(
        &self,
        message: Message,
        withdraw: bool,
        pointer: Tick,
        stamp: Stamp,
        ack_latency: &mut LatencyTally,
    ) -> DelOutcome {
        let mut outcome = DelOutcome::Unknown;
        let removed = self.messages.remove_if_mut(&message, |_, entry| {
            if entry.deadline < self.decided_below() {
                if self.options.wheel.remembers(entry.deadline, pointer) {
                    outcome = DelOutcome::Late;
                    // A withdrawal is no Ack; that can still come.
                    if !withdraw && !std::mem::replace(&mut entry.late_counted, true) {
                        ack_latency.record(stamp.since(entry.added_at), 1);
                    }
                }
                return false;
            }
            outcome = if withdraw { DelOutcome::Withdrawn } else { DelOutcome::Acked };
            if !withdraw {
                self.lists.of(entry.deadline).acked.fetch_add(1, Ordering::Relaxed);
                ack_latency.record(stamp.since(entry.added_at), 1);
            }
            true
        });
        if let Some((_, entry)) = removed {
            self.lists.of(entry.deadline).vacate(entry.deadline, entry.place);
        }
        outcome
    }

    /// Notes the time of a request, before the pace is asked about it.
    fn see(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.origin).as_nanos();
        self.latest_ns.fetch_max(u64::try_from(elapsed).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Does what the time asks for: the latest time that anyone has brought. If the ticker was held up after
    /// it had read its own, an add may have seen a stall that the ticker has not, and relies on the shift.
    fn turn(&self, now: Instant) -> Advance {
        let mut pace = self.pace.write();
        let latest = self.origin + Duration::from_nanos(self.latest_ns.load(Ordering::SeqCst));
        let now = now.max(latest);
        match pace.turn(now) {
            Turn::Wait(until) => Advance::Waiting(until),
            Turn::Shift { missed } => {
                pace.shifted(now);
                Advance::Shifted { missed, next: pace.next_advance() }
            }
            Turn::Advance { lateness } => {
                let (decided, due_at) = (pace.pointer(), pace.next_advance());
                pace.advanced();
                let (pointer, next) = (pace.pointer(), pace.next_advance());
                drop(pace);
                if !*self.draining.read() || self.options.keeps_on_drain {
                    self.decide_below(pointer, decided, due_at, false);
                }
                Advance::Moved { decided, lateness, next }
            }
        }
    }

    /// Decides every tick below `below`, from `first` on: from this store on, DelMsg answers `late`.
    fn decide_below(&self, below: Tick, first: Tick, due_at: Instant, drained: bool) {
        // The lists of these ticks will be used again: no earlier tick may still want its counts from them.
        let mut expiry = self.expiry.lock();
        expiry.finish_walks(self);
        self.decided_below.fetch_max(below.0, Ordering::SeqCst);
        for tick in first.0..below.0 {
            expiry.freeze(Tick(tick), self.lists.take(Tick(tick)), due_at, drained);
        }
    }
}

impl Ring for MemoryRing {
    fn wheel(&self) -> Wheel {
        self.options.wheel
    }

    fn add_new_msg(&self, request: AddNewMsg<'_>, now: Instant) -> Reply<AddNewMsgAnswer> {
        Reply::Ready(Some(self.add(request, now)))
    }

    fn del_msg(&self, request: DelMsg<'_>, now: Instant) -> Reply<DelMsgAnswer> {
        Reply::ok(self.del(request, now))
    }

    fn advance(&self, now: Instant) -> Reply<Advance> {
        Reply::ok(self.turn(now))
    }

    fn expire(&self, now: Instant) -> Reply<Expired> {
        Reply::ok(self.expire_step(now))
    }

    fn drain(&self, now: Instant) -> Reply<Handover> {
        let mut draining = self.draining.write();
        if std::mem::replace(&mut *draining, true) || self.options.keeps_on_drain {
            return Reply::ok(Handover::Kept);
        }
        drop(draining);
        let pointer = self.pace.read().pointer();
        self.decide_below(pointer.plus(self.lists.horizon()), pointer, now, true);
        Reply::ok(Handover::HandedOut)
    }

    fn status(&self, now: Instant) -> Reply<RingStatus> {
        let pace = *self.pace.read();
        let pointer = pace.pointer();
        let mut slots = vec![0; usize::from(self.options.wheel.slots())];
        for tick in pointer.0 + 1..pointer.0 + self.lists.horizon() {
            slots[usize::from(self.options.wheel.slot(Tick(tick)).0)] += self.lists.of(Tick(tick)).len(Tick(tick));
        }
        Reply::ok(RingStatus {
            ring: 0,
            pointer,
            pointer_lag: now.saturating_duration_since(pace.next_advance()),
            epoch: self.options.epoch,
            leader: Some(String::from("this process")),
            lease_age: None,
            leads: true,
            in_flight: self.in_flight.load(Ordering::Relaxed),
            slots,
            closing: self.lists.of(pointer).len(pointer),
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::outbox::Retention;

    const TICK: Duration = Duration::from_secs(1);

    #[test]
    fn a_ticker_that_was_held_up_after_it_read_the_time_shifts_all_the_same() {
        let start = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), start));
        let options = RingOptions {
            wheel: Wheel::new(3, TICK).unwrap(),
            storm: StormRule::default(),
            max_in_flight: 10,
            epoch: 1,
            pointer: Tick(7),
            keeps_on_drain: false,
        };
        let ring = MemoryRing::new(options, outbox, start);
        // The move is due at start + 1. The ticker reads that time and is held up; an add comes at 2.5.
        let woken = start + TICK * 5 / 2;
        let request = AddNewMsg { messages: &[Message::new(1, 0)], ack_timeout_ticks: 1, attempt: 1 };
        let answer = ring.add_new_msg(request, woken).now_or_never().unwrap().unwrap();
        assert_eq!(answer.deadline, Tick(8));
        let advance = |now| ring.advance(now).now_or_never().unwrap().unwrap();
        assert_eq!(advance(start + TICK), Advance::Shifted { missed: 1, next: woken + TICK });
        // So tick 8 is decided two ticks after waking, and not at once.
        assert_eq!(advance(woken), Advance::Waiting(woken + TICK));
    }
}
