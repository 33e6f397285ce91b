//! Rebuilds a wheel and its outbox from the segments of a journal.
//!
//! 1. The last valid block says with which segment to begin.
//! 2. The records of all valid blocks from there on are applied in their order.
//! 3. The messages of expired ticks that are in no batch are put back into the expiry, and batches without a group are
//!    dropped.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::records::{Change, Event, GroupRecord, Part};
use crate::core::{
    GroupName, GroupOptions, Message, RandomHasher, Stamp, Tick, TickCounts, TickSchedule, TimedOut,
};
use crate::memory::entry::{Entry, Marks, ShortTick};
use crate::memory::outbox::MemoryOutbox;
use crate::memory::queue::{Group, Queue};
use crate::memory::shard::Shard;
use crate::memory::table::{Hash, Home};
use crate::memory::wheel::MemoryWheel;

/// Returns the stamp of a moment in the life of the wheel.
pub(super) fn stamp_of(lived_ms: u64) -> Stamp {
    Stamp::after(Duration::from_millis(lived_ms))
}

/// The number of steps whose places in the table are fetched at the same time.
const FETCHED: usize = 64;

/// A change of the table.
enum Step {
    Put(Entry),
    Remove {
        message: Message,
        /// The shard that counted the Ack, in the process that wrote the journal. `None` for a withdrawal.
        acked_in: Option<u8>,
    },
}

/// The state of a replay.
pub(super) struct Replay<'a> {
    wheel: &'a MemoryWheel,
    /// All shards, locked until the end of the replay.
    shards: Vec<MutexGuard<'a, Shard>>,
    steps: Vec<(Hash, usize, Home, Step)>,
    pointer: Tick,
    /// The Acks of each tick that a shard of the process that wrote the journal had counted.
    acked: HashMap<(u8, Tick), u64, RandomHasher>,
    /// The Acks that shards of earlier processes had counted.
    acked_before: HashMap<Tick, u64>,
    /// Whether the records are those of the process that wrote the checkpoint. Later processes count the Acks of earlier
    /// ones in a shard of theirs, so their counts would count them twice.
    is_first_process: bool,
    overtaken: Vec<(Tick, TimedOut)>,
    /// The expired ticks that are not known to be in batches completely.
    expired: BTreeMap<Tick, ExpiredTick>,
    queue: Queue,
    /// When the tick of each batch in the queue expired.
    expired_lived_ms: HashMap<u64, u64>,
    groups: HashMap<String, GroupRecord>,
}

#[derive(Default)]
struct ExpiredTick {
    counts: TickCounts,
    published: HashSet<Message, RandomHasher>,
    is_published: bool,
}

impl Replay<'_> {
    pub(super) fn new(wheel: &MemoryWheel, pointer: Tick) -> Replay<'_> {
        Replay {
            wheel,
            shards: wheel.shards.list.iter().map(|shard| shard.lock()).collect(),
            steps: Vec::with_capacity(FETCHED),
            pointer,
            acked: HashMap::default(),
            acked_before: HashMap::new(),
            is_first_process: true,
            overtaken: Vec::new(),
            expired: BTreeMap::new(),
            queue: Queue::default(),
            expired_lived_ms: HashMap::new(),
            groups: HashMap::new(),
        }
    }

    /// The records that follow are those of another process, with other shards.
    pub(super) fn begin_process(&mut self) {
        self.run_steps();
        self.is_first_process = false;
        for ((_, tick), acked) in self.acked.drain() {
            *self.acked_before.entry(tick).or_default() += acked;
        }
    }

    pub(super) fn apply(&mut self, part: Part, stamp: Stamp) {
        match part {
            Part::Change(_, message, Change::Added { deadline, attempt }) => {
                self.queue(message, Step::Put(Entry::in_flight(message, deadline, stamp, attempt)));
            }
            Part::Change(shard, message, change) => {
                let acked_in = (change == Change::Acked).then_some(shard);
                self.queue(message, Step::Remove { message, acked_in });
            }
            Part::Entry { message, deadline, attempt, age } => {
                let added_at = Stamp(stamp.0.wrapping_sub(age));
                self.queue(message, Step::Put(Entry::in_flight(message, deadline, added_at, attempt)));
            }
            Part::Event(event) => {
                self.run_steps();
                self.apply_event(event);
            }
        }
    }

    /// Queues a step. Its place in the table is fetched meanwhile: to wait for the memory at each step would take most of
    /// the time of a recovery.
    fn queue(&mut self, message: Message, step: Step) {
        let hash = Hash::of(message, &self.wheel.shards.hasher);
        let shard = hash.shard(self.wheel.shards.bits);
        let home = self.shards[shard].table.fetch_group(hash);
        self.steps.push((hash, shard, home, step));
        if self.steps.len() == FETCHED {
            self.run_steps();
        }
    }

    fn run_steps(&mut self) {
        for (hash, shard, home, _) in &self.steps {
            self.shards[*shard].table.fetch_entry(*hash, *home);
        }
        for (hash, shard, _, step) in self.steps.drain(..) {
            let table = &mut self.shards[shard].table;
            // An earlier step may have changed the shape of the table.
            let home = table.home(hash);
            match step {
                Step::Put(entry) => drop(table.put(hash, home, entry)),
                Step::Remove { message, acked_in } => {
                    let Some(found) = table.find(hash, home, message) else { continue };
                    let tick = found.entry.deadline.seen_from(self.pointer);
                    found.remove();
                    if let Some(shard) = acked_in {
                        *self.acked.entry((shard, tick)).or_default() += 1;
                    }
                }
            }
        }
    }

    fn apply_event(&mut self, event: Event) {
        match event {
            Event::Begin { published_below } => {
                self.pointer = self.pointer.max(published_below);
                self.expired.retain(|tick, _| *tick >= published_below);
                self.overtaken.retain(|(tick, _)| *tick >= published_below);
            }
            Event::Complete => {}
            Event::Counts { .. } if !self.is_first_process => {}
            Event::Counts { shard, acked } => {
                self.acked.retain(|(of, _), _| *of != shard);
                self.acked.extend(acked.into_iter().map(|(tick, acked)| ((shard, tick), acked)));
            }
            Event::Overtaken { tick, timed_out } => {
                if self.expired.get(&tick).is_some_and(|expired| !expired.is_published) {
                    self.overtaken.push((tick, timed_out));
                }
            }
            Event::Expired { tick, counts } => {
                self.pointer = self.pointer.max(tick.plus(1));
                self.expired.insert(tick, ExpiredTick { counts, ..ExpiredTick::default() });
            }
            Event::Batch(record) => {
                let position = record.position;
                self.expired_lived_ms.insert(position, record.expired_lived_ms);
                let batch = record.batch();
                if let Some(expired) = self.expired.get_mut(&batch.id.tick) {
                    expired.published.extend(batch.messages.iter().map(|timed_out| timed_out.message));
                    if batch.last {
                        *expired = ExpiredTick { is_published: true, ..ExpiredTick::default() };
                    }
                }
                self.queue.insert(position, batch, self.wheel.origin());
            }
            Event::Taken { group, batches } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    for (position, count) in batches {
                        group.next = group.next.max(position + 1);
                        group.held.retain(|(held, _)| *held != position);
                        group.held.push((position, count));
                    }
                }
            }
            Event::Settled { group, positions } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    group.held.retain(|(held, _)| !positions.contains(held));
                }
            }
            Event::Opened { group, next } => {
                self.groups.insert(group.clone(), GroupRecord { name: group, next, held: Vec::new() });
            }
            Event::Deleted { group } => drop(self.groups.remove(&group)),
            Event::DroppedBefore { position } => self.drop_before(position),
            Event::Groups { begin, end, groups } => {
                self.groups = groups.into_iter().map(|group| (group.name.clone(), group)).collect();
                self.drop_before(begin);
                self.queue.end = self.queue.end.max(end);
            }
        }
    }

    fn drop_before(&mut self, position: u64) {
        self.queue.drop_before(position);
        for group in self.groups.values_mut() {
            group.held.retain(|(held, _)| *held >= position);
        }
    }

    /// Completes the wheel and its outbox. Returns the number of messages in flight.
    pub(super) fn finish(mut self, lived_ms: u64, away: Duration, now: Instant) -> u64 {
        self.run_steps();
        self.shards.clear();
        let (pointer, wheel) = (self.pointer, self.wheel);
        {
            let mut state = wheel.state.write();
            state.schedule = TickSchedule::new(wheel.shards.options.wheel.tick_length(), pointer, now);
            state.expired_below = pointer;
        }
        let in_flight = self.finish_messages(now);
        self.finish_outbox(&wheel.outbox, lived_ms, away, now);
        in_flight
    }

    /// Counts the messages of each tick, marks those that are in batches, and has the others published.
    fn finish_messages(&mut self, now: Instant) -> u64 {
        let (pointer, wheel) = (self.pointer, self.wheel);
        let options = wheel.shards.options;
        let (mut in_flight, mut remembered) = (0, BTreeMap::<Tick, u64>::new());
        let mut unpublished = BTreeMap::<Tick, u64>::new();
        for shard in &wheel.shards.list {
            let mut shard = shard.lock();
            let mut counts = BTreeMap::<Tick, u64>::new();
            let all = shard.table.scan(&mut 0, usize::MAX, None, |entry| {
                let tick = entry.deadline.seen_from(pointer);
                if tick >= pointer {
                    *counts.entry(tick).or_default() += 1;
                    return true;
                }
                match self.expired.get(&tick) {
                    Some(expired) if !expired.is_published && !expired.published.contains(&entry.message) => {
                        *unpublished.entry(tick).or_default() += 1;
                        return true;
                    }
                    _ => {}
                }
                entry.marks.set(Marks::LISTED);
                let is_late_known = options.wheel.is_late_known(tick, pointer);
                if is_late_known {
                    *remembered.entry(tick).or_default() += 1;
                }
                is_late_known
            });
            debug_assert!(all);
            for (tick, count) in counts {
                in_flight += count;
                shard.of_tick(tick, options.wheel).in_flight += count;
            }
        }
        wheel.in_flight.change(in_flight);
        let mut first = wheel.shards.list[0].lock();
        for ((_, tick), acked) in self.acked.drain() {
            *self.acked_before.entry(tick).or_default() += acked;
        }
        for (tick, acked) in self.acked_before.drain().filter(|(tick, _)| *tick >= pointer) {
            first.of_tick(tick, options.wheel).acked += acked;
        }
        for (tick, timed_out) in self.overtaken.drain(..) {
            let expired = self.expired.get(&tick);
            if expired
                .is_some_and(|expired| !expired.is_published && !expired.published.contains(&timed_out.message))
            {
                *unpublished.entry(tick).or_default() += 1;
                first.overtake(ShortTick::of(tick), timed_out);
            }
        }
        drop(first);
        let mut expiry = wheel.expiry.lock();
        expiry.begin_at(pointer);
        for (tick, expired) in std::mem::take(&mut self.expired) {
            let left = unpublished.remove(&tick).unwrap_or_default();
            if left > 0 {
                let published = expired.published.len() as u64;
                let added = expired.counts.acked + published + left;
                expiry.push_restored(tick, TickCounts { added, ..expired.counts }, published, now);
            }
        }
        for (tick, messages) in remembered {
            expiry.remember(tick, messages);
        }
        in_flight
    }

    /// Completes the outbox. No subscriber holds a batch after a restart, so all batches are released. Retention begins
    /// again, because no subscriber could take batches meanwhile.
    fn finish_outbox(self, outbox: &MemoryOutbox, lived_ms: u64, away: Duration, now: Instant) {
        let mut queue = self.queue;
        for group in self.groups.into_values() {
            let Some(name) = group.group() else { continue };
            queue.groups.insert(name, Group::restored(group.next, group.held, now));
        }
        queue.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        let age = |position: u64| {
            let expired = self.expired_lived_ms.get(&position).copied().unwrap_or(lived_ms);
            Duration::from_millis(lived_ms.saturating_sub(expired)) + away
        };
        queue.complete(|position| now.checked_sub(age(position)).unwrap_or(now), now);
        *outbox.queue.lock() = queue;
    }
}
