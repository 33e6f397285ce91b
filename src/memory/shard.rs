//! A part of the ring under one lock: a table of messages, and for each tick the counts of its messages here.
//!
//! Everything about a message happens under the lock of its shard, so the request or expiry that takes it out of flight
//! determines its outcome. The table is the one truth; the counts change with it, under the same lock.

use std::ops::RangeInclusive;

use super::entry::{Entry, Marks, ShortTick};
use super::partition::{Item, Verb};
use super::table::{Hash, HashMessage, Home, Kept, Table};
use super::wheel_state::{Position, horizon, index};
use crate::core::batch::TimedOut;
use crate::core::latency_histogram::LatencyHistogram;
use crate::core::message::Message;
use crate::core::request_batch::{Outcome, RequestBatch};
use crate::core::tick::{Tick, Wheel};

/// Messages whose memory is asked for together: as many as a processor has requests to memory on their way, twice.
const FETCHED: usize = 64;

/// Counts of the messages of one tick.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TickCount {
    /// In flight.
    pub(super) left: u64,
    /// Acknowledged in time.
    pub(super) acked: u64,
}

impl TickCount {
    pub(super) fn plus(self, other: TickCount) -> TickCount {
        TickCount { left: self.left + other.left, acked: self.acked + other.acked }
    }
}

/// A part of the ring.
#[derive(Debug)]
pub(super) struct Shard<S> {
    pub(super) table: Table<S>,
    /// For each tick that can be alive, by its remainder; 0 for all others.
    ticks: Box<[TickCount]>,
    /// Messages that expired, and were added again before they were listed.
    overtaken: Vec<(ShortTick, TimedOut)>,
    /// Messages that were prelisted and then left their tick.
    unlisted: Vec<Message>,
}

impl<S: HashMessage> Shard<S> {
    pub(super) fn new(wheel: Wheel, hasher: S) -> Shard<S> {
        let ticks = (0..horizon(wheel)).map(|_| TickCount::default()).collect();
        Shard { table: Table::new(hasher), ticks, overtaken: Vec::new(), unlisted: Vec::new() }
    }

    /// The counts of a tick that is alive.
    pub(super) fn of_tick(&mut self, tick: Tick, wheel: Wheel) -> &mut TickCount {
        &mut self.ticks[index(tick, wheel)]
    }

    /// The counts of the tick of a message in flight: without the division of [`Shard::of_tick`].
    #[inline]
    fn of_deadline(&mut self, deadline: ShortTick, position: &Position) -> &mut TickCount {
        let ahead = usize::from(deadline.since(ShortTick::of(position.pointer)));
        debug_assert!(ahead < self.ticks.len(), "no message outlives the horizon");
        let index = position.pointer_index + ahead;
        let wraps = index >= self.ticks.len();
        &mut self.ticks[if wraps { index - self.ticks.len() } else { index }]
    }

    /// Those of its messages that are not in flight, with repeats.
    pub(super) fn new_messages<'a>(
        &'a mut self,
        items: &'a [Item],
        batch: &'a RequestBatch,
        position: &'a Position,
    ) -> impl Iterator<Item = Message> + 'a {
        let messages = items.iter().map(|item| (item.hash, batch.messages()[item.index()]));
        let new = messages.filter(|(hash, message)| {
            let found = self.table.find(*hash, self.table.home(*hash), *message);
            found.is_none_or(|mut found| position.is_expired(found.entry()))
        });
        new.map(|(_, message)| message)
    }

    /// Does the adds and dels of its messages.
    pub(super) fn run(&mut self, items: &[Item], batch: &mut RequestBatch, position: &Position) {
        let mut homes = [Home::default(); FETCHED];
        for items in items.chunks(FETCHED) {
            let shape = self.table.shape();
            for (item, home) in items.iter().zip(&mut homes) {
                *home = self.table.fetch_group(item.hash);
            }
            for (item, home) in items.iter().zip(&homes) {
                self.table.fetch_entry(item.hash, *home);
            }
            for (item, home) in items.iter().zip(&homes) {
                let home = if shape == self.table.shape() { *home } else { self.table.home(item.hash) };
                self.run_one(item, home, batch, position);
            }
        }
    }

    #[inline]
    fn run_one(&mut self, item: &Item, home: Home, batch: &mut RequestBatch, position: &Position) {
        let message = batch.messages()[item.index()];
        let outcome = match item.verb() {
            Verb::Add { deadline, attempt } => {
                let entry = Entry::in_flight(message, deadline, position.now, attempt);
                self.add((item.hash, home), entry, position)
            }
            Verb::Del { withdraw } => {
                self.del((item.hash, home), message, withdraw, position, &mut batch.ack_latency)
            }
        };
        batch.set(item.index(), outcome);
    }

    /// Takes a message into flight.
    #[inline]
    fn add(&mut self, (hash, home): (Hash, Home), entry: Entry, position: &Position) -> Outcome {
        self.of_deadline(entry.deadline, position).left += 1;
        let Some(earlier) = self.table.put(hash, home, entry) else { return Outcome::Added };
        if !position.is_expired(&earlier) {
            self.of_deadline(earlier.deadline, position).left -= 1;
            if earlier.marks.has(Marks::LISTED) {
                self.unlist(earlier.message);
            }
            return Outcome::Rearmed;
        }
        if !earlier.marks.has(Marks::LISTED) {
            let timed_out = TimedOut { message: earlier.message, attempt: earlier.attempt };
            self.overtaken.push((earlier.deadline, timed_out));
        }
        Outcome::Added
    }

    /// Takes a message out of flight.
    #[inline]
    fn del(
        &mut self,
        (hash, home): (Hash, Home),
        message: Message,
        withdraw: bool,
        position: &Position,
        ack_latency: &mut LatencyHistogram,
    ) -> Outcome {
        let Some(mut found) = self.table.find(hash, home, message) else { return Outcome::Unknown };
        let entry = found.entry();
        if position.is_expired(entry) {
            if !position.is_remembered(entry) {
                return Outcome::Unknown;
            }
            // A withdrawal is no Ack; that can still come.
            if !withdraw && !entry.marks.set(Marks::LATE_COUNTED) {
                ack_latency.record_between(entry.added_at, position.now);
            }
            return Outcome::Late;
        }
        let (deadline, added_at, is_listed) = (entry.deadline, entry.added_at, entry.marks.has(Marks::LISTED));
        found.remove();
        if is_listed {
            self.unlist(message);
        }
        let of_tick = self.of_deadline(deadline, position);
        of_tick.left -= 1;
        if withdraw {
            return Outcome::Withdrawn;
        }
        of_tick.acked += 1;
        ack_latency.record_between(added_at, position.now);
        Outcome::Acked
    }

    /// Notes that a message left its tick, though it is on the list.
    #[cold]
    fn unlist(&mut self, message: Message) {
        self.unlisted.push(message);
    }

    /// The messages that left the tick that expires in this moment after they were prelisted.
    pub(super) fn take_unlisted(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.unlisted)
    }

    /// Puts back an entry that a state file held; returns whether it is in flight.
    pub(super) fn restore(&mut self, hash: Hash, mut entry: Entry, position: &Position) -> bool {
        let in_flight = !position.is_expired(&entry);
        if in_flight {
            self.of_deadline(entry.deadline, position).left += 1;
        } else {
            // A state is saved once every expired tick is listed.
            entry.marks.set(Marks::LISTED);
        }
        self.table.put(hash, self.table.home(hash), entry);
        in_flight
    }

    /// Lists messages of a tick that is expired, or will be next, from segment `at` on, and marks them; looks at about
    /// `budget` places. Returns whether all were listed.
    pub(super) fn list(&mut self, tick: Tick, at: &mut usize, budget: usize, listed: &mut Vec<TimedOut>) -> bool {
        let tick = ShortTick::of(tick);
        self.table.scan(at, budget, tick, |entry| {
            if entry.deadline == tick && !entry.marks.set(Marks::LISTED) {
                listed.push(TimedOut { message: entry.message, attempt: entry.attempt });
            }
            Kept::Yes
        });
        let all = self.table.is_scanned(*at);
        if all {
            let of_tick = self.overtaken.extract_if(.., |(of, _)| *of == tick);
            listed.extend(of_tick.map(|(_, timed_out)| timed_out));
        }
        all
    }

    /// Lists messages of all these ticks in one walk, each with the number of its tick among them, and marks them.
    /// Otherwise as [`Shard::list`]; nothing is added any more.
    pub(super) fn list_all(
        &mut self,
        ticks: RangeInclusive<Tick>,
        at: &mut usize,
        budget: usize,
        mut listed: impl FnMut(usize, TimedOut),
    ) -> bool {
        let (first, last) = (ShortTick::of(*ticks.start()), ShortTick::of(*ticks.end()));
        self.table.visit(at, budget, |entry| {
            let ahead = entry.deadline.since(first);
            if ahead <= last.since(first) && !entry.marks.set(Marks::LISTED) {
                listed(ahead.into(), TimedOut { message: entry.message, attempt: entry.attempt });
            }
        });
        self.table.is_scanned(*at)
    }

    /// Forgets messages of a tick whose revolution is over; returns whether all are forgotten.
    pub(super) fn forget(&mut self, tick: Tick, at: &mut usize, budget: usize) -> bool {
        let tick = ShortTick::of(tick);
        self.table.scan(at, budget, tick, |entry| if entry.deadline == tick { Kept::No } else { Kept::Yes });
        self.table.is_scanned(*at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::Keyed;
    use super::*;
    use crate::core::latency_histogram::Stamp;

    #[test]
    fn what_was_listed_before_a_restart_is_not_listed_again() {
        let wheel = Wheel::default();
        let (pointer, now) = (Tick(1_000), Stamp(0));
        let position = Position {
            wheel,
            pointer,
            pointer_index: index(pointer, wheel),
            expired_below: pointer,
            due: pointer,
            now,
        };
        let (mut shard, message) = (Shard::new(wheel, Keyed::default()), Message::new(7, 1));
        let hash = Keyed::default().hash_of(message);
        let entry = |tick| Entry::in_flight(message, ShortTick::of(tick), now, 1);
        assert!(!shard.restore(hash, entry(Tick(995)), &position));
        let home = shard.table.home(hash);
        assert_eq!(shard.add((hash, home), entry(position.deadline(15)), &position), Outcome::Added);
        assert!(shard.overtaken.is_empty(), "its batch went out before the restart");
    }
}
