//! Rebuilds a wheel and its outbox from the segments of a journal.
//!
//! 1. The last valid block says with which segment to begin.
//! 2. The records of all valid blocks from there on are applied in their order.
//! 3. The messages of expired ticks that are in no batch are put back into the expiry, and batches without a group are
//!    dropped.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use super::records::{Event, Part};
use crate::core::{Message, RandomHasher, Tick, TickCounts, TickSchedule, TimedOut};
use crate::memory::entry::{Marks, ShortTick};
use crate::memory::queue::Queue;
use crate::memory::shard::{Shard, horizon};
use crate::memory::table::{Hash, Home};
use crate::memory::wheel::MemoryWheel;

/// How far the pointer moves until the messages far behind it are taken out of the table. An entry has only the lowest
/// sixteen bits of its tick, so all entries must stay near the pointer.
const SWEPT_TICKS: u64 = 8_192;

/// The number of steps whose places in the table are fetched at the same time.
const FETCHED: usize = 64;

/// The state of a replay.
pub(super) struct Replay<'a> {
    wheel: &'a MemoryWheel,
    /// All shards, locked until the end of the replay.
    shards: Vec<MutexGuard<'a, Shard>>,
    /// Changes of the table.
    steps: Vec<(Hash, usize, Home, Part)>,
    pointer: Tick,
    /// The pointer at the last sweep.
    swept_at: Tick,
    /// The number of Acks of each tick.
    acked: HashMap<Tick, u64>,
    overtaken: Vec<(Tick, TimedOut)>,
    /// The expired ticks that are not known to be in batches completely.
    expired: BTreeMap<Tick, ExpiredTick>,
    queue: Queue,
    /// How long no process ran before this one.
    away: Duration,
}

#[derive(Default)]
struct ExpiredTick {
    counts: TickCounts,
    published: HashSet<Message, RandomHasher>,
    is_published: bool,
}

impl ExpiredTick {
    /// Returns whether no batch that is known has this message.
    fn lacks(&self, message: Message) -> bool {
        !self.is_published && !self.published.contains(&message)
    }
}

impl Replay<'_> {
    pub(super) fn new(wheel: &MemoryWheel, away: Duration) -> Replay<'_> {
        Replay {
            wheel,
            shards: wheel.shards.list.iter().map(|shard| shard.lock()).collect(),
            steps: Vec::with_capacity(FETCHED),
            pointer: wheel.pointer(),
            swept_at: wheel.pointer(),
            acked: HashMap::new(),
            overtaken: Vec::new(),
            expired: BTreeMap::new(),
            queue: Queue::default(),
            away,
        }
    }

    /// Sets the pointer to where it stood before the first record.
    pub(super) fn begin_at(&mut self, pointer: Tick) {
        (self.pointer, self.swept_at) = (pointer, pointer);
    }

    pub(super) fn apply(&mut self, part: Part) {
        match part {
            Part::Put(entry) => {
                // A deadline is near the pointer, so one that is not shows that the pointer had moved.
                let farthest = horizon(self.wheel.shards.options.wheel) - 1;
                let tick = entry.deadline.seen_from(self.pointer);
                if tick > self.pointer.plus(farthest) {
                    // The records of the ticks between are damaged.
                    self.run_steps();
                    self.move_pointer(Tick(tick.0 - farthest));
                }
                self.queue_step(entry.message, part);
            }
            Part::Remove { message, .. } => self.queue_step(message, part),
            Part::Event(event) => {
                self.run_steps();
                self.apply_event(event);
            }
        }
    }

    /// Queues a step. Its place in the table is fetched meanwhile: to wait for the memory at each step would take most of
    /// the time of a recovery.
    fn queue_step(&mut self, message: Message, step: Part) {
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
                Part::Put(entry) => drop(table.put(hash, home, entry)),
                Part::Remove { message, is_acked } => {
                    let Some(found) = table.find(hash, home, message) else { continue };
                    let tick = found.entry.deadline.seen_from(self.pointer);
                    found.remove();
                    if is_acked {
                        *self.acked.entry(tick).or_default() += 1;
                    }
                }
                Part::Event(_) => unreachable!("events are applied at once"),
            }
        }
    }

    fn apply_event(&mut self, event: Event) {
        match event {
            Event::Begin { published_below, held } => {
                self.move_pointer(published_below);
                self.reserve(held);
            }
            Event::Complete => {}
            Event::Acked { ticks } => self.acked.extend(ticks),
            Event::Overtaken { tick, timed_out } => {
                if self.expired.get(&tick).is_some_and(|expired| !expired.is_published) {
                    self.overtaken.push((tick, timed_out));
                }
            }
            Event::Expired { tick, counts } => {
                self.expired.insert(tick, ExpiredTick { counts, ..ExpiredTick::default() });
                self.move_pointer(tick.plus(1));
            }
            Event::Batch { position, expired_lived_ms, batch } => {
                // Its tick has expired, also if the journal had failed then.
                self.move_pointer(batch.id.tick.plus(1));
                if let Some(expired) = self.expired.get_mut(&batch.id.tick) {
                    expired.published.extend(batch.messages.iter().map(|timed_out| timed_out.message));
                    if batch.last {
                        *expired = ExpiredTick { is_published: true, ..ExpiredTick::default() };
                    }
                }
                let expired_at = self.wheel.origin.checked_add(Duration::from_millis(expired_lived_ms));
                let expired_at = expired_at.and_then(|at| at.checked_sub(self.away));
                self.queue.insert(position, batch, expired_at.unwrap_or(self.wheel.origin));
            }
            event => self.queue.replay(event, self.wheel.origin),
        }
    }

    /// Makes room for the messages of a checkpoint. To grow step by step would move each of them several times.
    fn reserve(&mut self, held: u64) {
        let most = self.wheel.shards.options.max_in_flight;
        let len = usize::try_from(held.min(most)).unwrap_or(0) / self.shards.len();
        self.shards.iter_mut().for_each(|shard| shard.table.reserve(len));
    }

    /// Moves the pointer forward.
    fn move_pointer(&mut self, to: Tick) {
        if to <= self.pointer {
            return;
        }
        let has_record = to == self.pointer.plus(1) && self.expired.contains_key(&self.pointer);
        if !has_record || to.since(self.swept_at) >= SWEPT_TICKS {
            self.sweep(to);
        }
        self.pointer = to;
    }

    /// Takes the messages whose timeouts are no longer remembered out of the table, before the pointer moves. Ticks that
    /// expire without a record are those of a journal that had failed, or their records are damaged. Their messages count
    /// as not published: a timeout that is reported twice is better than one that is lost.
    fn sweep(&mut self, to: Tick) {
        let (pointer, wheel) = (self.pointer, self.wheel.shards.options.wheel);
        let (expired, overtaken) = (&mut self.expired, &mut self.overtaken);
        for shard in &mut self.shards {
            let all = shard.table.scan(&mut 0, usize::MAX, None, |entry| {
                let tick = entry.deadline.seen_from(pointer);
                if tick >= to {
                    return true;
                }
                if tick >= pointer {
                    expired.entry(tick).or_default();
                }
                if wheel.is_late_known(tick, to) {
                    return true;
                }
                if expired.get(&tick).is_some_and(|expired| expired.lacks(entry.message)) {
                    overtaken.push((tick, entry.timed_out()));
                }
                false
            });
            debug_assert!(all);
        }
        // Nothing more is known of the other ticks.
        let unpublished: HashSet<Tick> = overtaken.iter().map(|(tick, _)| *tick).collect();
        expired.retain(|tick, _| wheel.is_late_known(*tick, to) || unpublished.contains(tick));
        self.swept_at = to;
    }

    /// Completes the wheel and its outbox. Returns the number of messages in flight.
    pub(super) fn finish(mut self, now: Instant) -> u64 {
        self.run_steps();
        self.shards.clear();
        let (pointer, wheel) = (self.pointer, self.wheel);
        {
            let mut state = wheel.state.write();
            state.schedule = TickSchedule::new(wheel.shards.options.wheel.tick_length(), pointer, now);
            state.expired_below = pointer;
        }
        let in_flight = self.finish_messages(now);
        self.queue.complete(now);
        *wheel.outbox.queue.lock() = self.queue;
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
                    Some(expired) if expired.lacks(entry.message) => {
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
        for (tick, acked) in self.acked.drain() {
            if tick >= pointer {
                first.of_tick(tick, options.wheel).acked += acked;
            } else if let Some(expired) = self.expired.get_mut(&tick)
                && expired.counts == TickCounts::default()
            {
                expired.counts.acked = acked;
            }
        }
        for (tick, timed_out) in self.overtaken.drain(..) {
            if self.expired.get(&tick).is_some_and(|expired| expired.lacks(timed_out.message)) {
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
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::core::{BatchId, GroupName, Retention, Stamp, StormRule, TimeoutBatch, Wheel};
    use crate::memory::entry::Entry;
    use crate::memory::{MemoryOptions, MemoryOutbox};

    const SLOTS: u16 = 15;

    fn empty_wheel() -> MemoryWheel {
        let options = MemoryOptions {
            wheel: Wheel::new(SLOTS, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 1_000_000,
            threads: 1,
        };
        let now = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), now));
        MemoryWheel::new(options, (1, Tick(100)), outbox, now)
    }

    /// The wheel that records give, the number of its messages in flight, and the messages that it still publishes.
    fn recovered(parts: impl IntoIterator<Item = Part>) -> (MemoryWheel, u64, Vec<Message>) {
        let (wheel, now) = (empty_wheel(), Instant::now());
        let mut replay = Replay::new(&wheel, Duration::ZERO);
        parts.into_iter().for_each(|part| replay.apply(part));
        let in_flight = replay.finish(now);
        let before = wheel.outbox.queue.lock().ids;
        while wheel.publish_expired(now).more {}
        let queue = wheel.outbox.queue.lock();
        let batches = queue.batches.values().flat_map(|stored| stored.batch.messages.iter());
        let published =
            batches.map(|timed_out| timed_out.message).skip(usize::try_from(before).unwrap()).collect();
        drop(queue);
        (wheel, in_flight, published)
    }

    fn added(id: u64, deadline: Tick) -> Part {
        Part::Put(Entry::in_flight(Message::from(id), ShortTick::of(deadline), Stamp(0), 1))
    }

    fn expired(tick: Tick) -> Part {
        Part::Event(Event::Expired { tick, counts: TickCounts::default() })
    }

    fn published(id: u64, tick: Tick) -> Part {
        let timed_out = TimedOut { message: Message::from(id), attempt: 1 };
        let id = BatchId { tick, epoch: 1, ring: 0, seq: 0 };
        let batch = TimeoutBatch { id, counts: TickCounts::default(), last: true, messages: vec![timed_out] };
        Part::Event(Event::Batch { position: 0, expired_lived_ms: 0, batch: Arc::new(batch) })
    }

    #[test]
    fn a_timeout_of_long_ago_is_neither_in_flight_nor_published_again() {
        for age in [1, 1_000, 30_000, 33_000, 65_536, 100_000] {
            let ticks = 101..100 + age;
            let life = [added(1, Tick(100)), expired(Tick(100)), published(1, Tick(100))];
            let (wheel, in_flight, published) =
                recovered(life.into_iter().chain(ticks.map(|tick| expired(Tick(tick)))));
            assert_eq!((in_flight, published), (0, vec![]), "{age} ticks ago");
            assert_eq!(wheel.shards.len(), usize::from(age <= u64::from(SLOTS)), "{age} ticks ago");
        }
    }

    #[test]
    fn a_timeout_of_long_ago_that_is_in_no_batch_is_published() {
        for age in [1, 1_000, 33_000, 100_000] {
            let life = [added(1, Tick(100)), expired(Tick(100))];
            let (_, in_flight, published) =
                recovered(life.into_iter().chain((101..100 + age).map(|tick| expired(Tick(tick)))));
            assert_eq!((in_flight, published), (0, vec![Message::from(1)]), "{age} ticks ago");
        }
    }

    #[test]
    fn ticks_that_expired_while_the_journal_had_failed_are_published() {
        for gap in [0, 1, 20, 1_000, 40_000, 100_000] {
            let begin = || Part::Event(Event::Begin { published_below: Tick(101 + gap), held: 2 });
            let expired_later = (gap > 0).then(|| expired(Tick(100 + gap)));
            for end in [Some(begin()), expired_later].into_iter().flatten() {
                let (wheel, in_flight, published) = recovered([added(1, Tick(100)), added(2, Tick(114)), end]);
                let mut lost: Vec<u64> = (1..=2).filter(|id| *id == 1 || gap >= 14).collect();
                lost.retain(|id| !published.contains(&Message::from(*id)));
                assert_eq!((lost, in_flight), (vec![], u64::from(gap < 14)), "{gap} ticks");
                assert_eq!(wheel.pointer(), Tick(101 + gap));
            }
        }
    }

    #[test]
    fn a_deadline_far_ahead_shows_that_the_pointer_had_moved() {
        let (wheel, in_flight, published) = recovered([added(1, Tick(100)), added(2, Tick(5_000))]);
        assert_eq!((in_flight, published), (1, vec![Message::from(1)]));
        assert!(wheel.pointer().plus(horizon(wheel.shards.options.wheel)) > Tick(5_000));
        // Each shows one tick more.
        let (wheel, in_flight, published) = recovered((100..200).map(|tick| added(tick, Tick(tick))));
        let expired = wheel.pointer().since(Tick(100));
        assert_eq!((in_flight, published.len() as u64), (100 - expired, expired));
        assert!(wheel.pointer() > Tick(180));
    }

    #[test]
    fn messages_of_a_batch_are_not_published_again_without_a_record_of_their_tick() {
        let (wheel, in_flight, published_again) = recovered([added(1, Tick(100)), published(1, Tick(100))]);
        assert_eq!((in_flight, published_again), (0, vec![]));
        assert_eq!(wheel.pointer(), Tick(101));
    }

    #[test]
    fn acks_count_in_the_batch_of_a_tick_without_a_record() {
        let acked = Part::Remove { message: Message::from(1), is_acked: true };
        let begin = Part::Event(Event::Begin { published_below: Tick(101), held: 1 });
        let (wheel, ..) = recovered([added(1, Tick(100)), added(2, Tick(100)), acked, begin]);
        let queue = wheel.outbox.queue.lock();
        let counts = queue.batches.values().next().unwrap().batch.counts;
        assert_eq!((counts.added, counts.acked), (2, 1));
    }

    #[test]
    fn a_checkpoint_makes_room_for_its_messages_but_not_for_more_than_may_be_in_flight() {
        for (held, expected) in [(100_000, 100_000..200_000), (u64::MAX, 1_000_000..2_000_000)] {
            let wheel = empty_wheel();
            let mut replay = Replay::new(&wheel, Duration::ZERO);
            replay.apply(Part::Event(Event::Begin { published_below: Tick(101), held }));
            let room: usize = replay.shards.iter().map(|shard| shard.table.capacity()).sum();
            assert!(expected.contains(&room), "room for {room} of {held}");
        }
    }

    #[test]
    fn a_recovery_forgets_idle_ticks() {
        let wheel = empty_wheel();
        let mut replay = Replay::new(&wheel, Duration::ZERO);
        (100..100_000).for_each(|tick| replay.apply(expired(Tick(tick))));
        assert!((replay.expired.len() as u64) < SWEPT_TICKS + 2 * u64::from(SLOTS), "{}", replay.expired.len());
    }

    #[test]
    fn no_batch_takes_the_position_of_one_that_a_group_has_taken() {
        let group: GroupName = "logic".parse().unwrap();
        let opened = Part::Event(Event::Opened { group: group.clone(), next: 0 });
        let taken = Part::Event(Event::Taken { group, batches: vec![(7, 1)] });
        let (wheel, ..) = recovered([opened, taken]);
        assert_eq!(wheel.outbox.queue.lock().positions().end, 8);
    }
}
