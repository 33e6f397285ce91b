use std::collections::HashMap;
use std::hash::Hasher;
use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::core::Stamp;
use crate::memory::entry::ShortTick;

/// A hasher that computes the hash of a message from its id alone.
struct ById<F>(F);

impl<F: Fn(u64) -> u64 + Copy> BuildHasher for ById<F> {
    type Hasher = IdHasher<F>;

    fn build_hasher(&self) -> IdHasher<F> {
        IdHasher { of: self.0, id: None }
    }
}

struct IdHasher<F> {
    of: F,
    id: Option<u64>,
}

impl<F: Fn(u64) -> u64> Hasher for IdHasher<F> {
    fn finish(&self) -> u64 {
        (self.of)(self.id.expect("a message has an id"))
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("ids are written as numbers");
    }

    fn write_u64(&mut self, number: u64) {
        self.id.get_or_insert(number);
    }
}

/// Returns hashes that differ in few bits, so that groups overflow and tags collide.
fn poor(id: u64) -> u64 {
    /// Tag 0 marks an empty cell, so hash bits of 0 become tag 1, which is also the second tag here. The overflow bits
    /// of tags 1 and 9 are in different bytes.
    const TAGS: [u64; 3] = [0, 1, 9];
    ((id % 7) << 26) | (TAGS[(id % 3) as usize] << 49) | (id % 5)
}

/// Returns a hash that puts the ids in `second` into one half of the segments, and all other ids into the other half.
fn in_halves(second: Range<u64>) -> impl Fn(u64) -> u64 + Copy {
    let (from, to) = (second.start, second.end);
    move |id| id.wrapping_mul(0x9e37_79b9_7f4a_7c15) & !0x03ff_ffff | u64::from((from..to).contains(&id))
}

fn entry(id: u64, deadline: u16) -> Entry {
    Entry::in_flight(Message::new(id, id ^ 1), ShortTick(deadline), Stamp(0), 1)
}

/// A table, and a map that gets the same operations for comparison.
struct Pair<S> {
    table: Table<S>,
    map: HashMap<Message, u16>,
}

impl<S: BuildHasher> Pair<S> {
    fn new(hasher: S) -> Pair<S> {
        Pair { table: Table::new(hasher), map: HashMap::new() }
    }

    fn put(&mut self, id: u64, deadline: u16) {
        let entry = entry(id, deadline);
        let hash = Hash::of(entry.message, &self.table.hasher);
        let earlier = self.table.put(hash, self.table.home(hash), entry);
        assert_eq!(earlier.map(|entry| entry.deadline.0), self.map.insert(entry.message, deadline));
    }

    fn remove(&mut self, id: u64) {
        let message = entry(id, 0).message;
        let hash = Hash::of(message, &self.table.hasher);
        let mut found = self.table.find(hash, self.table.home(hash), message);
        assert_eq!(found.as_mut().map(|found| found.entry.deadline.0), self.map.remove(&message));
        if let Some(found) = found {
            found.remove();
        }
    }

    /// Removes all messages of a tick, by scans of `budget` cells.
    fn remove_tick(&mut self, deadline: u16, budget: usize) {
        let mut at = 0;
        while !self.table.scan(&mut at, budget, Some(ShortTick(deadline)), |entry| {
            let keep = entry.deadline.0 != deadline;
            assert!(keep || self.map.remove(&entry.message) == Some(deadline));
            keep
        }) {}
        assert!(self.map.values().all(|found| *found != deadline), "a scan misses no entry");
    }

    fn shrink(&mut self) {
        let mut at = 0;
        while !self.table.reclaim(&mut at) {}
    }

    fn check(&self) {
        assert_eq!(self.table.len, self.map.len());
        let found: HashMap<Message, u16> =
            self.table.iter().map(|entry| (entry.message, entry.deadline.0)).collect();
        assert_eq!(found, self.map);
        for (number, segment) in self.table.segments.iter().enumerate() {
            assert_eq!(self.table.entries_in(number), segment.iter().count(), "segment {number}");
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put(u64, u16),
    /// Adds 500 messages, so that the table gets several segments.
    PutMany(u64),
    Remove(u64),
    RemoveTick(u16),
    Shrink,
    Reserve(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        60 => (0..400_u64, 0..600_u16).prop_map(|(id, deadline)| Step::Put(id, deadline)),
        1 => (0..4_000_u64).prop_map(Step::PutMany),
        30 => (0..400_u64).prop_map(Step::Remove),
        2 => (0..600_u16).prop_map(Step::RemoveTick),
        1 => Just(Step::Shrink),
        1 => (0..20_000_usize).prop_map(Step::Reserve),
    ]
}

fn walk(pair: &mut Pair<impl BuildHasher>, steps: Vec<Step>) {
    for step in steps {
        match step {
            Step::Put(id, deadline) => pair.put(id, deadline),
            Step::PutMany(first) => (first..first + 500).for_each(|id| pair.put(id, 1)),
            Step::Remove(id) => pair.remove(id),
            Step::RemoveTick(deadline) => pair.remove_tick(deadline, 1),
            Step::Shrink => pair.shrink(),
            Step::Reserve(len) => pair.table.reserve(len),
        }
    }
    pair.check();
}

proptest! {
    #[test]
    fn the_table_does_what_a_map_does(steps in prop::collection::vec(step(), 0..1_500)) {
        walk(&mut Pair::new(RandomHasher::default()), steps);
    }

    #[test]
    fn hashes_that_fall_together_cost_time_and_nothing_else(steps in prop::collection::vec(step(), 0..1_500)) {
        walk(&mut Pair::new(ById(poor)), steps);
    }
}

#[test]
fn a_segment_that_a_split_leaves_full_has_room_made_for_the_next() {
    let mut all_in_one = Pair::new(ById(in_halves(0..0)));
    let split_by = (0..10_000).find(|id| {
        all_in_one.put(*id, 1);
        all_in_one.table.segments.len() == 2
    });
    let before = split_by.expect("it grows");
    // Different numbers of entries go to the two halves. One of these splits makes a half exactly full, wherever its
    // limit is.
    for first in before / 2..before * 2 / 3 {
        let mut pair = Pair::new(ById(in_halves(first..before)));
        (0..=before).for_each(|id| pair.put(id, 1));
        pair.check();
        (before + 1..before + 20).for_each(|id| pair.put(id, 1));
        pair.check();
    }
}

#[test]
fn it_grows_and_shrinks_by_segments_and_is_never_much_larger_than_it_must() {
    const MANY: u64 = 150_000;
    let mut pair = Pair::new(RandomHasher::default());
    for id in 0..MANY {
        pair.put(id, u16::try_from(id % 15).unwrap());
    }
    pair.check();
    assert!(pair.table.segments.len() > 100, "{} segments", pair.table.segments.len());
    let largest = (0..pair.table.segments.len()).map(|segment| pair.table.entries_in(segment)).max().unwrap();
    assert!(largest < 3 * growth::MEAN_SEGMENT, "the largest step would move {largest}");
    let capacity = pair.table.capacity();
    assert!(capacity as u64 * 100 < MANY * 170, "room for {capacity}");
    // Scans one segment at a time, or several.
    (0..14).for_each(|tick| pair.remove_tick(tick, [1, 32 * 1_024][usize::from(tick % 2)]));
    pair.shrink();
    pair.check();
    assert!(pair.table.capacity() * 4 < capacity, "room for {} of {capacity} is kept", pair.table.capacity());
    (0..MANY).for_each(|id| pair.remove(id));
    pair.shrink();
    assert_eq!((pair.table.segments.len(), pair.table.len), (1, 0));
    assert!(pair.table.capacity() < 100);
}

#[test]
fn few_segments_grow_for_entries_whose_room_was_reserved() {
    const MANY: u32 = 150_000;
    let mut pair = Pair::new(RandomHasher::default());
    pair.table.reserve(MANY as usize);
    let (shape, segments) = (pair.table.shape, pair.table.segments.len());
    (0..u64::from(MANY)).for_each(|id| pair.put(id, 1));
    let grown = pair.table.shape - shape;
    assert!(grown as usize * 4 < segments, "{grown} of {segments} segments grew");
    let capacity = pair.table.capacity();
    assert!(capacity * 100 < MANY as usize * 170, "room for {capacity}");
}

#[test]
fn each_bit_of_a_hash_belongs_to_one_part() {
    const GROUPS: usize = 1 << 23;
    let plain = Hash(0);
    for bit in 0..u64::BITS {
        let hash = Hash(1 << bit);
        let changed = [
            hash.segment() != plain.segment(),
            hash.group(GROUPS) != plain.group(GROUPS),
            // Bit 49 alone makes the tag 1, which is also the tag for 0.
            hash.tag() != plain.tag() || bit == 49,
            hash.shard(MAX_SHARD_BITS) != plain.shard(MAX_SHARD_BITS),
        ];
        assert_eq!(changed.iter().filter(|changed| **changed).count(), 1, "bit {bit}");
        assert_ne!(hash.tag(), 0);
    }
}
