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
//! [`Table::fetch_group`] and [`Table::fetch_entry`] ask for the cache lines of many messages before the first of
//! them is used: the processor waits for memory once for all of them, where one after the other would wait for each.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;

use super::entry::{Entry, ShortTick};
use super::places::{Lane, PLACES, Places};
use crate::core::message::Message;

/// The byte of a group's tags that counts overflows.
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
    tags: Lane,
    /// The lowest bits of the deadlines; the last byte is not used.
    ticks: Lane,
}

impl Group {
    const EMPTY: Group = Group { tags: [0; PLACES + 1], ticks: [0; PLACES + 1] };

    /// Places whose tag may be this one.
    fn tagged(&self, tag: u8) -> Places {
        Places::equal(self.tags, tag)
    }

    /// Occupied places whose tick may have these lowest bits.
    fn ticking(&self, lowest: u8) -> Places {
        Places::equal(self.ticks, lowest).and(self.occupied())
    }

    fn occupied(&self) -> Places {
        Places::marked(self.tags)
    }

    fn empty(&self) -> Places {
        Places::unmarked(self.tags)
    }

    fn overflows(&self) -> u8 {
        self.tags[OVERFLOWS]
    }
}

/// Where the search for a message begins; good for as long as [`Table::shape`] is the same.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Home {
    segment: u32,
    group: u32,
}

/// Where an entry lies; good until the table is changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    home: Home,
    group: usize,
    place: usize,
}

/// A small table.
#[derive(Debug)]
struct Segment {
    groups: Box<[Group]>,
    entries: Box<[Entry]>,
    len: usize,
    /// As many entries as it may have.
    limit: usize,
}

impl Segment {
    fn with_groups(groups: usize) -> Segment {
        Segment {
            groups: vec![Group::EMPTY; groups].into_boxed_slice(),
            entries: vec![Entry::EMPTY; groups * PLACES].into_boxed_slice(),
            len: 0,
            limit: groups * PLACES * MAX_LOAD_PERCENT / 100,
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
        self.len >= self.limit
    }

    fn next(&self, group: usize) -> usize {
        if group + 1 == self.groups.len() { 0 } else { group + 1 }
    }

    /// Group and place of a message.
    #[inline]
    fn find(&self, tag: u8, home: usize, message: Message) -> Option<(usize, usize)> {
        let mut at = home;
        loop {
            let group = &self.groups[at];
            let entries = &self.entries[at * PLACES..][..PLACES];
            if let Some(place) = group.tagged(tag).find(|place| entries[*place].message == message) {
                return Some((at, place));
            }
            if group.overflows() == 0 {
                return None;
            }
            at = self.next(at);
            // A table that was always full would have none without overflows.
            if at == home {
                return None;
            }
        }
    }

    /// Puts in an entry that is not there. There is room.
    #[inline]
    fn insert(&mut self, tag: u8, home: usize, entry: Entry) {
        let mut at = home;
        let place = loop {
            let group = &mut self.groups[at];
            if let Some(place) = group.empty().first() {
                break place;
            }
            group.tags[OVERFLOWS] = group.overflows().saturating_add(1);
            at = self.next(at);
        };
        let group = &mut self.groups[at];
        group.tags[place] = tag;
        group.ticks[place] = entry.deadline.lowest();
        self.entries[at * PLACES + place] = entry;
        self.len += 1;
    }

    /// Takes an entry away whose search begins at `home`.
    fn remove(&mut self, home: usize, group: usize, place: usize) {
        self.groups[group].tags[place] = 0;
        let mut at = home;
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
        let groups = self.groups.iter().zip(self.entries.chunks_exact(PLACES));
        groups.flat_map(|(group, entries)| group.occupied().map(|place| &entries[place]))
    }
}

/// Message → entry.
#[derive(Debug)]
pub(super) struct Table<S> {
    hasher: S,
    /// Segment `n` is split into itself and segment `n + 2^k`, the lowest `n` first.
    segments: Vec<Segment>,
    /// The bits of a hash that name a segment, if there is one of this number; else one bit less.
    mask: usize,
    len: usize,
    shape: u32,
}

impl<S: HashMessage> Table<S> {
    pub(super) fn new(hasher: S) -> Table<S> {
        Table { hasher, segments: vec![Segment::with_groups(1)], mask: 0, len: 0, shape: 0 }
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

    /// Changes whenever entries were moved.
    pub(super) fn shape(&self) -> u32 {
        self.shape
    }

    #[expect(clippy::cast_possible_truncation, reason = "26 bits name a segment, 24 a group")]
    #[inline]
    pub(super) fn home(&self, hash: Hash) -> Home {
        let segment = self.segment_of(hash);
        Home { segment: segment as u32, group: hash.group(self.segments[segment].groups.len()) as u32 }
    }

    /// Asks for the group in which the search for a message begins; tells where that is.
    #[inline]
    pub(super) fn fetch_group(&self, hash: Hash) -> Home {
        let home = self.home(hash);
        fetch(&self.segments[home.segment as usize].groups[home.group as usize]);
        home
    }

    /// Asks for the entry of a message, or for the place where it would go: its group should be there.
    #[inline]
    pub(super) fn fetch_entry(&self, hash: Hash, home: Home) {
        let (segment, at) = (&self.segments[home.segment as usize], home.group as usize);
        let group = &segment.groups[at];
        let place = group.tagged(hash.tag()).first().or_else(|| group.empty().first()).unwrap_or(0);
        let entry = &segment.entries[at * PLACES + place];
        // It may lie in two cache lines.
        fetch(&entry.message);
        fetch(&entry.marks);
    }

    #[inline]
    pub(super) fn find(&self, hash: Hash, home: Home, message: Message) -> Option<Spot> {
        let segment = &self.segments[home.segment as usize];
        let (group, place) = segment.find(hash.tag(), home.group as usize, message)?;
        Some(Spot { home, group, place })
    }

    pub(super) fn at(&mut self, spot: Spot) -> &mut Entry {
        &mut self.segments[spot.home.segment as usize].entries[spot.group * PLACES + spot.place]
    }

    /// Puts in an entry; returns the one that the message had before.
    #[inline]
    pub(super) fn put(&mut self, hash: Hash, home: Home, entry: Entry) -> Option<Entry> {
        let segment = &mut self.segments[home.segment as usize];
        if let Some((group, place)) = segment.find(hash.tag(), home.group as usize, entry.message) {
            segment.groups[group].ticks[place] = entry.deadline.lowest();
            return Some(std::mem::replace(&mut segment.entries[group * PLACES + place], entry));
        }
        self.len += 1;
        if segment.is_full() {
            self.make_room(home.segment as usize);
            self.move_in(&entry);
        } else {
            segment.insert(hash.tag(), home.group as usize, entry);
        }
        None
    }

    /// Takes an entry away.
    #[inline]
    pub(super) fn remove(&mut self, spot: Spot) {
        let segment = &mut self.segments[spot.home.segment as usize];
        segment.remove(spot.home.group as usize, spot.group, spot.place);
        self.len -= 1;
    }

    #[inline]
    fn segment_of(&self, hash: Hash) -> usize {
        let wide = hash.segment() & self.mask;
        if wide < self.segments.len() { wide } else { wide & (self.mask >> 1) }
    }
}

/// Asks for the cache line of a value without waiting for it.
#[cfg(target_arch = "x86_64")]
fn fetch<T>(value: &T) {
    safe_arch::prefetch_t0(value);
}

/// Where no such instruction is at hand, the processor finds out by itself how much it can do at the same time.
#[cfg(not(target_arch = "x86_64"))]
fn fetch<T>(_value: &T) {}

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

    /// Puts in an entry that is not there, and for which there is room.
    fn move_in(&mut self, entry: &Entry) {
        let hash = self.hasher.hash_of(entry.message);
        let home = self.home(hash);
        self.segments[home.segment as usize].insert(hash.tag(), home.group as usize, *entry);
    }

    fn rebuild(&mut self, segment: usize, groups: usize) {
        let old = std::mem::replace(&mut self.segments[segment], Segment::with_groups(groups));
        self.shape = self.shape.wrapping_add(1);
        old.iter().for_each(|entry| self.move_in(entry));
    }

    /// To be called when the number of segments has changed.
    fn reshape(&mut self) {
        self.mask = self.segments.len().next_power_of_two() - 1;
        self.shape = self.shape.wrapping_add(1);
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
        self.reshape();
        for entry in old.iter() {
            let segment = self.segment_of(self.hasher.hash_of(entry.message));
            if self.segments[segment].is_full() {
                self.rebuild(segment, self.segments[segment].groups.len() + 1);
            }
            self.move_in(entry);
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
            self.reshape();
            first.iter().chain(last.iter()).for_each(|entry| self.move_in(entry));
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
                        let home = self.hasher.hash_of(entry.message).group(segment.groups.len());
                        segment.remove(home, group, place);
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
