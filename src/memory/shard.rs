//! A shard: a part of the ring under one lock. It has a table of messages, and for each tick the counts of its
//! messages.
//!
//! A message is changed only under the lock of its shard. So exactly one operation, a request or the expiry of a tick,
//! determines the outcome of the message. The counts change together with the table, under the same lock.
//!
//! A message is *listed* when it is put on the list from which the batches of its tick are made.

use std::ops::Range;

use super::batch_by_shard::{Item, Verb};
use super::entry::{Entry, Marks, ShortTick};
use super::table::{Hash, Home, Table};
use crate::core::{
    LatencyHistogram, Message, MessageState, Outcome, RandomHasher, RequestBatch, Stamp, Tick, TimedOut, Wheel,
};

/// The number of messages that are prefetched together. This is twice the number of cache misses that a processor
/// handles at the same time.
const FETCHED: usize = 64;

/// The number of cells of the table that a scan visits before it unlocks the shard. It limits how long a request waits
/// for the shard.
pub(super) const LOCKED_STEP: usize = 32 * 1_024;

/// The position of the wheel while a request batch is processed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    pub(super) wheel: Wheel,
    pub(super) pointer: Tick,
    /// The index of the counts of the pointer's tick in [`Shard::ticks`].
    pub(super) pointer_index: usize,
    /// Ticks before this tick have expired. It is the tick of the pointer, or after a drain a tick later than every
    /// deadline.
    pub(super) expired_below: Tick,
    /// The tick that is due by the clock.
    pub(super) due: Tick,
    pub(super) now: Stamp,
}

impl Position {
    /// Returns the deadline of a message that is added now.
    pub(super) fn deadline(&self, ack_timeout_ticks: u16) -> Tick {
        self.wheel.deadline(self.due.max(self.expired_below), ack_timeout_ticks)
    }

    pub(super) fn is_expired(&self, entry: &Entry) -> bool {
        entry.deadline.is_before(ShortTick::of(self.expired_below))
    }

    fn is_remembered(&self, entry: &Entry) -> bool {
        self.wheel.is_late_known(entry.deadline.seen_from(self.pointer), self.pointer)
    }
}

/// Returns an upper bound for the number of ticks that can have messages in flight at a time. The first of them is the
/// tick of the pointer. The tick that is due by the clock is at most one tick later. A deadline is at most one
/// revolution after the tick that is due.
pub(super) fn horizon(wheel: Wheel) -> u64 {
    u64::from(wheel.slots()) + 4
}

/// Returns the index of the counts of a tick in [`Shard::ticks`].
#[expect(clippy::cast_possible_truncation, reason = "a remainder of a few thousand fits a length")]
pub(super) fn index(tick: Tick, wheel: Wheel) -> usize {
    (tick.0 % horizon(wheel)) as usize
}

/// The counts of the messages of one tick.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TickCount {
    /// Messages in flight.
    pub(super) in_flight: u64,
    /// Messages that were acknowledged in time.
    pub(super) acked: u64,
}

/// A part of the ring. The caller locks it.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) table: Table,
    /// The counts of each tick that has not expired, at its [`index`]. All other counts are 0.
    ticks: Box<[TickCount]>,
    /// Messages that expired and were added again before they were listed for the batches of their expired tick.
    /// [`Shard::list`] still lists them for that tick.
    overtaken: Vec<(ShortTick, TimedOut)>,
    /// Messages that expired and that the current run added again, listed or not. A journal needs them, because recovery
    /// does not find them in the table, and their batch may not be published yet.
    pub(super) added_again: Vec<(ShortTick, TimedOut)>,
    /// Messages that left the tick of the pointer after they were listed. No batch of that tick may contain them.
    pub(super) unlisted: Vec<Message>,
}

impl Shard {
    pub(super) fn new(wheel: Wheel, hasher: RandomHasher) -> Shard {
        let ticks = (0..horizon(wheel)).map(|_| TickCount::default()).collect();
        let (overtaken, added_again, unlisted) = (Vec::new(), Vec::new(), Vec::new());
        Shard { table: Table::new(hasher), ticks, overtaken, added_again, unlisted }
    }

    /// Returns the counts of a tick that has not expired.
    pub(super) fn of_tick(&mut self, tick: Tick, wheel: Wheel) -> &mut TickCount {
        &mut self.ticks[index(tick, wheel)]
    }

    /// Returns the counts of the tick of a message in flight. This avoids the division in [`Shard::of_tick`].
    #[inline]
    fn of_deadline(&mut self, deadline: ShortTick, position: &Position) -> &mut TickCount {
        let ahead = usize::from(deadline.since(ShortTick::of(position.pointer)));
        debug_assert!(ahead < self.ticks.len(), "no message outlives the horizon");
        let index = position.pointer_index + ahead;
        let wraps = index >= self.ticks.len();
        &mut self.ticks[if wraps { index - self.ticks.len() } else { index }]
    }

    /// Returns the messages among `items` that are not in flight. It can return the same message several times.
    pub(super) fn new_messages<'a>(
        &'a mut self,
        items: &'a [Item],
        batch: &'a RequestBatch,
        position: &'a Position,
    ) -> impl Iterator<Item = Message> + 'a {
        let messages = items.iter().map(|item| (item.hash, batch.messages()[item.index as usize]));
        let new = messages.filter(|(hash, message)| {
            let found = self.table.find(*hash, self.table.home(*hash), *message);
            found.is_none_or(|found| position.is_expired(found.entry))
        });
        new.map(|(_, message)| message)
    }

    /// Applies adds and dels to the messages of this shard.
    pub(super) fn run(&mut self, items: &[Item], batch: &mut RequestBatch, position: &Position) {
        self.added_again.clear();
        let mut homes = [Home::default(); FETCHED];
        for items in items.chunks(FETCHED) {
            let shape = self.table.shape;
            for (item, home) in items.iter().zip(&mut homes) {
                *home = self.table.fetch_group(item.hash);
            }
            for (item, home) in items.iter().zip(&homes) {
                self.table.fetch_entry(item.hash, *home);
            }
            for (item, home) in items.iter().zip(&homes) {
                let home = if shape == self.table.shape { *home } else { self.table.home(item.hash) };
                self.run_one(item, home, batch, position);
            }
        }
    }

    #[inline]
    fn run_one(&mut self, item: &Item, home: Home, batch: &mut RequestBatch, position: &Position) {
        let message = batch.messages()[item.index as usize];
        let outcome = match item.verb.unpack() {
            Verb::Add { deadline, attempt } => {
                let entry = Entry::in_flight(message, deadline, position.now, attempt);
                self.add((item.hash, home), entry, position)
            }
            Verb::Del { withdraw } => {
                self.del((item.hash, home), message, withdraw, position, &mut batch.ack_latency)
            }
        };
        batch.set(item.index as usize, outcome);
    }

    /// Adds a message, or re-arms it if it is in flight.
    #[inline]
    fn add(&mut self, (hash, home): (Hash, Home), entry: Entry, position: &Position) -> Outcome {
        self.of_deadline(entry.deadline, position).in_flight += 1;
        let Some(earlier) = self.table.put(hash, home, entry) else { return Outcome::Added };
        if !position.is_expired(&earlier) {
            self.of_deadline(earlier.deadline, position).in_flight -= 1;
            if earlier.marks.has(Marks::LISTED) {
                self.unlist(earlier.message);
            }
            return Outcome::Rearmed;
        }
        self.add_again(&earlier);
        Outcome::Added
    }

    /// Records that a message of an expired tick was added again.
    #[cold]
    fn add_again(&mut self, earlier: &Entry) {
        let expired = (earlier.deadline, earlier.timed_out());
        self.added_again.push(expired);
        if !earlier.marks.has(Marks::LISTED) {
            self.overtaken.push(expired);
        }
    }

    /// Acknowledges or withdraws a message.
    #[inline]
    fn del(
        &mut self,
        (hash, home): (Hash, Home),
        message: Message,
        withdraw: bool,
        position: &Position,
        ack_latency: &mut LatencyHistogram,
    ) -> Outcome {
        let Some(found) = self.table.find(hash, home, message) else { return Outcome::Unknown };
        let entry = &mut *found.entry;
        if position.is_expired(entry) {
            if !position.is_remembered(entry) {
                return Outcome::Unknown;
            }
            // A withdrawal is not an Ack, so it records no latency. The Ack may still arrive.
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
        of_tick.in_flight -= 1;
        if withdraw {
            return Outcome::Withdrawn;
        }
        of_tick.acked += 1;
        ack_latency.record_between(added_at, position.now);
        Outcome::Acked
    }

    /// Returns the state of a message, without the time that remains. It is rare: inlined, it would cost other callers of
    /// the table instructions.
    #[cold]
    #[inline(never)]
    pub(super) fn get(&mut self, hash: Hash, message: Message, position: &Position) -> MessageState {
        let Some(found) = self.table.find(hash, self.table.home(hash), message) else {
            return MessageState::Unknown;
        };
        let entry = &*found.entry;
        match (position.is_expired(entry), position.is_remembered(entry)) {
            (false, _) => {
                let deadline = entry.deadline.seen_from(position.pointer);
                MessageState::InFlight { deadline, remaining_ms: 0, attempt: entry.attempt }
            }
            (true, true) => MessageState::Late,
            (true, false) => MessageState::Unknown,
        }
    }

    /// Records that a listed message has left its tick.
    #[cold]
    fn unlist(&mut self, message: Message) {
        self.unlisted.push(message);
    }

    /// Records that a message of this expired tick was added again before it was listed.
    pub(super) fn overtake(&mut self, tick: ShortTick, timed_out: TimedOut) {
        self.overtaken.push((tick, timed_out));
    }

    /// Lists and marks messages of `ticks`, which have expired or expire next. Starts at segment `at` of the table,
    /// and moves `at`. Calls `listed` for each message, with the index of its tick in `ticks`. Returns whether all
    /// messages are listed.
    pub(super) fn list(
        &mut self,
        ticks: &Range<Tick>,
        at: &mut usize,
        mut listed: impl FnMut(usize, TimedOut),
    ) -> bool {
        let first = ShortTick::of(ticks.start);
        let count = ShortTick::of(ticks.end).since(first);
        let all = self.table.scan(at, LOCKED_STEP, (count == 1).then_some(first), |entry| {
            let number = entry.deadline.since(first);
            if number < count && !entry.marks.set(Marks::LISTED) {
                listed(number.into(), entry.timed_out());
            }
            true
        });
        if all {
            for (of, timed_out) in self.overtaken.extract_if(.., |(of, _)| of.since(first) < count) {
                listed(of.since(first).into(), timed_out);
            }
        }
        all
    }

    /// Removes messages of an expired tick, so that DelMsg no longer answers `late` for them. Starts at segment `at`
    /// of the table, and moves `at`. Returns whether all are removed.
    pub(super) fn forget(&mut self, tick: Tick, at: &mut usize) -> bool {
        let tick = ShortTick::of(tick);
        self.table.scan(at, LOCKED_STEP, Some(tick), |entry| entry.deadline != tick)
    }
}
