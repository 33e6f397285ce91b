//! The table of one shard, which maps messages to entries. It is made for request batches, for scans by tick, and for
//! growth without a pause.
//!
//! ```text
//!  hash ──▶ segment ──▶ group: 30 tags, 30 ticks, overflows   (a cache line)
//!                          └──▶ 30 entries
//! ```
//!
//! - A *group* has thirty cells, each with room for an entry. The *tag* of a cell is eight bits of the hash. It nearly
//!   always identifies the right cell. Next to the tags are the *ticks*, the lowest eight bits of each deadline. A
//!   scan for the messages of one tick reads the ticks and the tags of all cells, and only the entries whose tick byte
//!   fits. These scans replace a list of message ids for each tick.
//! - An entry is in the group that its hash selects. If that group is full, the entry *overflows* to the next group
//!   with an empty cell. Each group counts the entries that overflowed from it, and records the lowest four bits of
//!   their tags. A search ends at the first group from which no entry with the same four bits overflowed. The counts
//!   fall when entries are removed, so a table at constant load never has to be cleaned. With more cells in a group,
//!   fewer groups are full. With only fifteen cells, one add in four would search a second group, and a processor
//!   cannot predict such adds.
//! - A *segment* is a small table of its own, at most 78% full. It grows by an eighth. A growing table splits one
//!   segment whenever the mean size of its segments exceeds a limit. A shrinking table merges two segments. No step
//!   moves more than about twice [`growth::MEAN_SEGMENT`] entries, however large the table is. This is linear
//!   hashing (Litwin, "Linear Hashing: A New Tool for File and Table Addressing", VLDB 1980).
//!
//! [`Table::fetch_group`] and [`Table::fetch_entry`] request the cache lines of many messages before the first message
//! is processed. So the processor waits for memory once for all of them.

mod group;
mod growth;
mod segment;
#[cfg(test)]
mod tests;

use std::hash::BuildHasher;

use self::segment::{Found, Segment};
use super::entry::Entry;
use crate::core::{Message, RandomHasher};

/// The hash of a message. It selects the shard, the segment, the group and the tag, each by different bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hash(u64);

/// The maximum number of hash bits that select a shard.
pub(super) const MAX_SHARD_BITS: u32 = 7;

impl Hash {
    /// Hashes a message. `hasher` has a random key in each process. Otherwise a logic node could choose message ids
    /// whose hashes collide.
    #[inline]
    pub(super) fn of(message: Message, hasher: &impl BuildHasher) -> Hash {
        Hash(hasher.hash_one(message))
    }

    /// Returns bits 0 to 25, which select the segment.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    const fn segment(self) -> usize {
        (self.0 as u32 & 0x03ff_ffff) as usize
    }

    /// Returns the index of the group, from bits 26 to 48 and the number of groups.
    const fn group(self, groups: usize) -> usize {
        (((self.0 >> 26 & 0x007f_ffff) * groups as u64) >> 23) as usize
    }

    /// Returns the tag: bits 49 to 56. A tag of 0 becomes 1, because 0 marks an empty cell.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    const fn tag(self) -> u8 {
        let tag = (self.0 >> 49) as u8;
        tag | (tag == 0) as u8
    }

    /// Returns the index of the shard among `1 << bits` shards. Takes the highest `bits` bits of the hash, all of them
    /// above bit 56.
    pub(super) const fn shard(self, bits: u32) -> usize {
        // Two shifts, because a single shift by 64 would overflow if `bits` is 0.
        (self.0 >> 1 >> (63 - bits)) as usize
    }
}

/// The segment and the group at which the search for a message begins. Valid until [`Table::shape`] changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Home {
    segment: u32,
    group: u32,
}

/// A table that maps messages to entries.
#[derive(Debug)]
pub(super) struct Table<S = RandomHasher> {
    hasher: S,
    /// The segments. A split divides segment `n` into segments `n` and `n + 2^k`. Here `2^k` is the largest power of
    /// two that is not larger than the number of segments. Segments are split in ascending order of `n`.
    segments: Vec<Segment>,
    /// How many more entries each segment can take. These numbers change with every entry, but the segments seldom do.
    /// So the numbers are stored apart from the segments. Sixteen numbers share a cache line, and only these lines
    /// move between the caches of processors.
    free: Vec<u32>,
    /// The mask of the hash bits that select a segment. If no segment has the selected number, the highest of these
    /// bits is ignored.
    mask: usize,
    /// The number of entries in the table.
    pub(super) len: usize,
    /// A number that changes whenever entries are moved to other groups.
    pub(super) shape: u32,
}

impl<S: BuildHasher> Table<S> {
    pub(super) fn new(hasher: S) -> Table<S> {
        let only = Segment::with_groups(1);
        Table { hasher, free: vec![only.limit()], segments: vec![only], mask: 0, len: 0, shape: 0 }
    }

    /// Returns the number of cells, empty ones included.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.segments.iter().map(|segment| segment.entries.len() * group::CELLS).sum()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.segments.iter().flat_map(Segment::iter)
    }

    #[expect(clippy::cast_possible_truncation, reason = "26 bits name a segment, 23 a group")]
    #[inline]
    pub(super) fn home(&self, hash: Hash) -> Home {
        let segment = self.segment_of(hash);
        Home { segment: segment as u32, group: hash.group(self.segments[segment].groups.len()) as u32 }
    }

    /// Prefetches the group at which the search for a message begins, and the free count of its segment. Returns the
    /// position of the group.
    #[inline]
    pub(super) fn fetch_group(&self, hash: Hash) -> Home {
        let home = self.home(hash);
        fetch(&self.free[home.segment as usize]);
        fetch(&self.segments[home.segment as usize].groups[home.group as usize]);
        home
    }

    /// Prefetches the entry of a message, or the cell that the message would get. The group should be in the cache
    /// already.
    #[inline]
    pub(super) fn fetch_entry(&self, hash: Hash, home: Home) {
        let entry = self.segments[home.segment as usize].likely(hash.tag(), home.group as usize);
        fetch_whole(entry);
    }

    /// Finds the entry of a message.
    #[expect(clippy::inline_always, reason = "a call would add 9 % to the instructions of an add and its del")]
    #[inline(always)]
    pub(super) fn find(&mut self, hash: Hash, home: Home, message: Message) -> Option<Found<'_>> {
        let (segment, free) = (&mut self.segments[home.segment as usize], &mut self.free[home.segment as usize]);
        segment.find((free, &mut self.len), hash.tag(), home.group as usize, message)
    }

    /// Inserts an entry. Returns the earlier entry of the same message, if there was one.
    #[expect(clippy::inline_always, reason = "a call would add 9 % to the instructions of an add and its del")]
    #[inline(always)]
    pub(super) fn put(&mut self, hash: Hash, home: Home, entry: Entry) -> Option<Entry> {
        let (segment, free) = (&mut self.segments[home.segment as usize], &mut self.free[home.segment as usize]);
        if segment.insert_at_home(free, hash.tag(), home.group as usize, &entry) {
            self.len += 1;
            return None;
        }
        self.put_anywhere(hash, home, entry)
    }

    #[inline(never)]
    fn put_anywhere(&mut self, hash: Hash, home: Home, entry: Entry) -> Option<Entry> {
        if let Some(found) = self.find(hash, home, entry.message) {
            return Some(found.replace(entry));
        }
        self.len += 1;
        let (segment, free) = (&mut self.segments[home.segment as usize], &mut self.free[home.segment as usize]);
        if *free > 0 {
            segment.insert(free, hash.tag(), home.group as usize, &entry);
        } else {
            self.make_room(hash);
            self.move_in(&entry);
        }
        None
    }

    #[inline]
    fn segment_of(&self, hash: Hash) -> usize {
        let wide = hash.segment() & self.mask;
        if wide < self.segments.len() { wide } else { wide & (self.mask >> 1) }
    }
}

/// Prefetches an entry, which may lie across two cache lines.
#[inline]
fn fetch_whole(entry: &Entry) {
    fetch(&entry.message);
    fetch(&entry.marks);
}

/// Prefetches the cache line of a value, without waiting for it.
#[cfg(target_arch = "x86_64")]
fn fetch<T>(value: &T) {
    safe_arch::prefetch_t0(value);
}

/// Does nothing on processors for which no prefetch function is available. They overlap some memory accesses by
/// themselves.
#[cfg(not(target_arch = "x86_64"))]
fn fetch<T>(_value: &T) {}
