//! The map msg_id → tick of one shard: message → entry, in a table made for batches, for scans and for growth
//! without a pause.
//!
//! ```text
//!  hash ──▶ segment ──▶ group: 15 tags + overflow count, 15 ticks   (one half of a cache line)
//!                          └──▶ 15 entries
//! ```
//!
//! - A *group* is fifteen places. Seven bits of the hash, the tag, tell nearly always which of them to look at, and
//!   the lowest bits of each deadline stand beside the tags: who looks for the messages of one tick reads two bytes
//!   a place, in order, and the entries of that tick only. This is what replaces a list of message ids per tick.
//! - An entry lies in the group that its hash names or, where that is full, in the next that has room. Each group
//!   counts the entries that had to go on from it: a search ends at the first group that none had to leave. So
//!   nothing is left behind by a removal, and a table at constant load never has to be cleaned.
//! - A *segment* is a small table of its own, at most [`MAX_LOAD_PERCENT`] full. It grows by a quarter. Segments
//!   are split one at a time as the table grows (linear hashing: Litwin, "Linear Hashing: A New Tool for File and
//!   Table Addressing", VLDB 1980), each when the mean is exceeded, and merged as it shrinks: no step moves
//!   more than about twice [`MEAN_SEGMENT`] entries, however many there are.
//!
//! [`Table::warm`] asks for the cache lines of many messages before the first of them is used: the processor waits
//! for memory once for all of them.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;

use super::entry::{Entry, ShortTick};
use crate::core::message::Message;

/// Places in a group. A tick has a byte beside each tag; the sixteenth byte of the tags counts overflows.
const PLACES: usize = 15;
const OVERFLOWS: usize = PLACES;

/// Messages a segment has on average when another is made.
const MEAN_SEGMENT: usize = 1_024;

/// A segment that would be fuller than this grows.
const MAX_LOAD_PERCENT: usize = 85;

/// A segment emptier than this is made smaller when memory is given back.
const MIN_LOAD_PERCENT: usize = 45;

/// An overflow count that has reached this is not exact any more, and stays until the segment is rebuilt.
const SATURATED: u8 = u8::MAX;

/// How messages are hashed.
pub(super) trait HashMessage {
    fn hash_of(&self, message: Message) -> Hash;
}

/// By a key of this process: ids come from clients, and none may choose them so that all fall together.
#[derive(Clone, Debug, Default)]
pub(super) struct Keyed(RandomState);

impl HashMessage for Keyed {
    fn hash_of(&self, message: Message) -> Hash {
        Hash(self.0.hash_one(message))
    }
}

/// A hash of a message: which bits say what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hash(pub(super) u64);

impl Hash {
    /// Bits 0 to 25.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    const fn segment(self) -> usize {
        (self.0 as u32 & 0x03ff_ffff) as usize
    }

    /// Bits 26 to 49, spread over so many groups.
    #[expect(clippy::cast_possible_truncation, reason = "less than the number of groups")]
    const fn group(self, groups: usize) -> usize {
        (((self.0 >> 26 & 0x00ff_ffff) * groups as u64) >> 24) as usize
    }

    /// Bits 50 to 56, and one that tells a tag from an empty place.
    #[expect(clippy::cast_possible_truncation, reason = "seven bits fit a byte")]
    const fn tag(self) -> u8 {
        0x80 | (self.0 >> 50 & 0x7f) as u8
    }

    /// Which of `1 << bits` shards: bits 57 to 63, the highest first.
    #[expect(clippy::cast_possible_truncation, reason = "at most seven bits")]
    pub(super) const fn shard(self, bits: u32) -> usize {
        // Two shifts, since one by 64 is none.
        (self.0 >> 1 >> (63 - bits)) as usize
    }
}

/// Bits of a hash that may name a shard.
pub(super) const MAX_SHARD_BITS: u32 = 7;

/// What is said of a group's places: read together, so it lies in one half of a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Group {
    /// 0 where a place is empty; the last byte counts the entries that found no place here.
    tags: [u8; PLACES + 1],
    /// The lowest bits of the deadlines; the last byte is not used.
    ticks: [u8; PLACES + 1],
}

impl Group {
    const EMPTY: Group = Group { tags: [0; PLACES + 1], ticks: [0; PLACES + 1] };

    /// Places whose tag may be this one.
    fn tagged(&self, tag: u8) -> Places {
        Places::equal(u128::from_le_bytes(self.tags), tag)
    }

    /// Occupied places whose tick may have these lowest bits.
    fn ticking(&self, lowest: u8) -> Places {
        Places(Places::equal(u128::from_le_bytes(self.ticks), lowest).0 & self.occupied().0)
    }

    fn occupied(&self) -> Places {
        Places(u128::from_le_bytes(self.tags) & Places::ALL)
    }

    fn empty(&self) -> Places {
        Places(!u128::from_le_bytes(self.tags) & Places::ALL)
    }

    fn overflows(&self) -> u8 {
        self.tags[OVERFLOWS]
    }
}

/// Some places of a group: the highest bit of a byte for each.
#[derive(Clone, Copy, Debug)]
struct Places(u128);

impl Places {
    /// The highest bit of each byte but the last.
    const ALL: u128 = 0x0080_8080_8080_8080_8080_8080_8080_8080;
    const ONES: u128 = 0x0101_0101_0101_0101_0101_0101_0101_0101;

    /// Bytes of `bytes` that equal `wanted`, and at times one more behind such a byte: who asks compares the entry.
    fn equal(bytes: u128, wanted: u8) -> Places {
        let differs = bytes ^ (Places::ONES * u128::from(wanted));
        Places(differs.wrapping_sub(Places::ONES) & !differs & Places::ALL)
    }

    fn first(self) -> Option<usize> {
        (self.0 != 0).then(|| self.0.trailing_zeros() as usize / 8)
    }
}

impl Iterator for Places {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let first = self.first()?;
        self.0 &= self.0 - 1;
        Some(first)
    }
}

/// Where an entry lies; good until the table is changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    segment: usize,
    group: usize,
    place: usize,
}

/// A small table.
#[derive(Debug)]
struct Segment {
    groups: Box<[Group]>,
    entries: Box<[Entry]>,
    len: usize,
}

impl Segment {
    fn with_groups(groups: usize) -> Segment {
        Segment {
            groups: vec![Group::EMPTY; groups].into_boxed_slice(),
            entries: vec![Entry::EMPTY; groups * PLACES].into_boxed_slice(),
            len: 0,
        }
    }

    /// Groups enough for so many entries.
    fn groups_for(len: usize) -> usize {
        (len * 100).div_ceil(PLACES * MAX_LOAD_PERCENT).max(1)
    }

    /// One that has room for so many.
    fn with_room(len: usize) -> Segment {
        Segment::with_groups(Segment::groups_for(len))
    }

    fn is_full(&self) -> bool {
        (self.len + 1) * 100 > self.entries.len() * MAX_LOAD_PERCENT
    }

    fn next(&self, group: usize) -> usize {
        if group + 1 == self.groups.len() { 0 } else { group + 1 }
    }

    fn find(&self, hash: Hash, message: Message) -> Option<(usize, usize)> {
        let mut at = hash.group(self.groups.len());
        for _ in 0..self.groups.len() {
            let group = &self.groups[at];
            let is_there = |place: &usize| self.entries[at * PLACES + place].message == message;
            if let Some(place) = group.tagged(hash.tag()).find(is_there) {
                return Some((at, place));
            }
            if group.overflows() == 0 {
                return None;
            }
            at = self.next(at);
        }
        None
    }

    /// Puts in an entry that is not there. There is room.
    fn insert(&mut self, hash: Hash, entry: Entry) {
        let mut at = hash.group(self.groups.len());
        let place = loop {
            let group = &mut self.groups[at];
            if let Some(place) = group.empty().first() {
                break place;
            }
            group.tags[OVERFLOWS] = group.overflows().saturating_add(1);
            at = self.next(at);
        };
        let group = &mut self.groups[at];
        group.tags[place] = hash.tag();
        group.ticks[place] = entry.deadline.lowest();
        self.entries[at * PLACES + place] = entry;
        self.len += 1;
    }

    fn remove(&mut self, hash: Hash, group: usize, place: usize) {
        self.groups[group].tags[place] = 0;
        let mut at = hash.group(self.groups.len());
        while at != group {
            let passed = &mut self.groups[at];
            if passed.overflows() != SATURATED {
                passed.tags[OVERFLOWS] -= 1;
            }
            at = self.next(at);
        }
        self.len -= 1;
    }

    fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.groups
            .iter()
            .zip(self.entries.chunks_exact(PLACES))
            .flat_map(|(group, entries)| group.occupied().map(|place| &entries[place]))
    }
}

/// Message → entry.
#[derive(Debug)]
pub(super) struct Table<S> {
    hasher: S,
    /// Segment `n` is split into itself and segment `n + 2^k`, the lowest `n` first.
    segments: Vec<Segment>,
    len: usize,
}

impl<S: HashMessage> Table<S> {
    pub(super) fn new(hasher: S) -> Table<S> {
        Table { hasher, segments: vec![Segment::with_groups(1)], len: 0 }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Places for entries, free ones included.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.segments.iter().map(|segment| segment.entries.len()).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.segments.iter().flat_map(Segment::iter)
    }

    /// Brings what these messages need into the cache: all requests to memory are on their way before the first has
    /// come back, where one message after the other would wait for each.
    pub(super) fn warm(&self, hashes: impl Iterator<Item = Hash> + Clone) {
        let mut read = 0_usize;
        for hash in hashes.clone() {
            let segment = &self.segments[self.segment_of(hash)];
            read += usize::from(segment.groups[hash.group(segment.groups.len())].overflows());
        }
        // Another loop, so that no entry is asked for before the groups are there.
        let mut read = std::hint::black_box(read);
        for hash in hashes {
            let segment = &self.segments[self.segment_of(hash)];
            let at = hash.group(segment.groups.len());
            let group = &segment.groups[at];
            let place = group.tagged(hash.tag()).first().or_else(|| group.empty().first()).unwrap_or(0);
            read += usize::from(segment.entries[at * PLACES + place].attempt);
        }
        std::hint::black_box(read);
    }

    pub(super) fn find(&self, hash: Hash, message: Message) -> Option<Spot> {
        let segment = self.segment_of(hash);
        let (group, place) = self.segments[segment].find(hash, message)?;
        Some(Spot { segment, group, place })
    }

    pub(super) fn at(&mut self, spot: Spot) -> &mut Entry {
        &mut self.segments[spot.segment].entries[spot.group * PLACES + spot.place]
    }

    /// Puts another entry of the same message into its place; returns the one that was there.
    pub(super) fn replace(&mut self, spot: Spot, entry: Entry) -> Entry {
        let segment = &mut self.segments[spot.segment];
        segment.groups[spot.group].ticks[spot.place] = entry.deadline.lowest();
        std::mem::replace(&mut segment.entries[spot.group * PLACES + spot.place], entry)
    }

    /// Puts in an entry of a message that is not there.
    pub(super) fn insert(&mut self, hash: Hash, entry: Entry) {
        let mut segment = self.segment_of(hash);
        if self.segments[segment].is_full() {
            self.make_room(segment);
            segment = self.segment_of(hash);
        }
        self.segments[segment].insert(hash, entry);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, hash: Hash, spot: Spot) {
        self.segments[spot.segment].remove(hash, spot.group, spot.place);
        self.len -= 1;
    }

    fn segment_of(&self, hash: Hash) -> usize {
        let count = self.segments.len();
        let wide = hash.segment() & (count.next_power_of_two() - 1);
        if wide < count { wide } else { wide & ((count.next_power_of_two() >> 1) - 1) }
    }
}

/// Growing, shrinking and scanning: each step is bounded by the size of a segment or two.
impl<S: HashMessage> Table<S> {
    /// Makes room in a segment that is full: by splitting one, if it is the turn of another segment, else by growing
    /// this one.
    fn make_room(&mut self, segment: usize) {
        if self.len >= self.segments.len() * MEAN_SEGMENT && self.split() == segment {
            return;
        }
        if self.segments[segment].is_full() {
            let groups = self.segments[segment].groups.len();
            self.rebuild(segment, if groups < 16 { groups * 2 } else { groups + groups / 4 });
        }
    }

    fn rebuild(&mut self, segment: usize, groups: usize) {
        let old = std::mem::replace(&mut self.segments[segment], Segment::with_groups(groups));
        for entry in old.iter() {
            self.segments[segment].insert(self.hasher.hash_of(entry.message), *entry);
        }
    }

    /// Whose entries the segment behind the last one takes over in part; or gives back, when it is the last.
    fn partner(segment: usize) -> usize {
        segment & (((segment + 1).next_power_of_two() >> 1) - 1)
    }

    /// Splits the segment whose turn it is, and returns which one that was.
    fn split(&mut self) -> usize {
        let fresh = self.segments.len();
        let partner = Self::partner(fresh);
        // A little more than half, for half of a random choice is seldom exactly that.
        let room = self.segments[partner].len * 9 / 16 + 8;
        let old = std::mem::replace(&mut self.segments[partner], Segment::with_room(room));
        self.segments.push(Segment::with_room(room));
        for entry in old.iter() {
            let hash = self.hasher.hash_of(entry.message);
            let segment = self.segment_of(hash);
            if self.segments[segment].is_full() {
                self.rebuild(segment, self.segments[segment].groups.len() + 1);
            }
            self.segments[segment].insert(hash, *entry);
        }
        partner
    }

    /// Gives memory back: of the last segment, if there are too many, else of this one; whether there was any to give.
    pub(super) fn shrink(&mut self, segment: usize) -> bool {
        if self.len * 2 < (self.segments.len() - 1) * MEAN_SEGMENT {
            let last = self.segments.pop().expect("there is more than one");
            let partner = Self::partner(self.segments.len());
            let room = Segment::with_room(last.len + self.segments[partner].len + 8);
            let first = std::mem::replace(&mut self.segments[partner], room);
            for entry in first.iter().chain(last.iter()) {
                self.segments[partner].insert(self.hasher.hash_of(entry.message), *entry);
            }
            return true;
        }
        let (len, groups) = (self.segments[segment].len, self.segments[segment].groups.len());
        let wanted = Segment::groups_for(len * 9 / 8);
        let is_sparse = len * 100 < groups * PLACES * MIN_LOAD_PERCENT && wanted < groups;
        if is_sparse {
            self.rebuild(segment, wanted);
        }
        is_sparse
    }

    /// How many segments there are.
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Visits the entries whose deadline may be `tick` (its lowest bits are), in whole segments from number
    /// `position` on, which moves, until about `budget` places were looked at; removes those for which `visit` says
    /// so. Entries that are added meanwhile may be missed; others are not, unless [`Table::shrink`] is called
    /// between two parts of a scan.
    pub(super) fn scan(
        &mut self,
        position: &mut usize,
        budget: usize,
        tick: ShortTick,
        mut visit: impl FnMut(&mut Entry) -> Kept,
    ) {
        let mut looked_at = 0;
        while *position < self.segments.len() && looked_at < budget {
            let segment = &mut self.segments[*position];
            looked_at += segment.entries.len();
            for group in 0..segment.groups.len() {
                for place in segment.groups[group].ticking(tick.lowest()) {
                    let entry = &mut segment.entries[group * PLACES + place];
                    if visit(entry) == Kept::No {
                        let hash = self.hasher.hash_of(entry.message);
                        segment.remove(hash, group, place);
                        self.len -= 1;
                    }
                }
            }
            *position += 1;
        }
    }

    /// Whether a scan that stands at `position` is over.
    pub(super) fn is_scanned(&self, position: usize) -> bool {
        position >= self.segments.len()
    }
}

/// Whether an entry stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Yes,
    No,
}
