//! The table of one shard: message → entry, made for batches, for scans by tick, and for growth without a pause.
//!
//! ```text
//!  hash ──▶ segment ──▶ group: 30 tags, 30 ticks, overflows   (a cache line)
//!                          └──▶ 30 entries
//! ```
//!
//! - A *group* has thirty cells. Eight bits of the hash, the tag, nearly always name the right one. The lowest bits of
//!   each deadline stand beside the tags: a scan for the messages of one tick reads two bytes a cell, in order, and
//!   the entries of that tick only. This replaces a list of message ids per tick.
//! - An entry lies in the group that its hash names or, if that is full, in the next one with an empty cell. Each group
//!   counts the entries that overflowed from it, and keeps four bits of each of their tags: a search ends at the
//!   first group without an overflow like the wanted one. So a removal leaves nothing behind for long, and a table at
//!   constant load never has to be cleaned. The more cells a group has, the fewer groups are full: with fifteen, one add in
//!   four had to look further, and no processor predicts which (docs/PERFORMANCE.md).
//! - A *segment* is a small table of its own, at most 78% full. It grows by an eighth. Segments
//!   are split one at a time as the table grows (linear hashing: Litwin, "Linear Hashing: A New Tool for File and
//!   Table Addressing", VLDB 1980), each when the mean is exceeded, and merged as it shrinks: no step moves
//!   more than about twice [`growth::MEAN_SEGMENT`] entries, however many there are.
//!
//! [`Table::fetch_group`] and [`Table::fetch_entry`] request the cache lines of many messages before the first of
//! them is used: the processor waits for memory once for all of them, instead of once for each.

mod group;
mod growth;
mod segment;
#[cfg(test)]
mod tests;

use std::hash::BuildHasher;

use foldhash::quality::RandomState;

use self::segment::{Found, Segment};
use super::entry::Entry;
use crate::core::Message;

/// The hash of a message. Each part has bits of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hash(u64);

/// Bits of a hash that may name a shard.
pub(super) const MAX_SHARD_BITS: u32 = 7;

impl Hash {
    /// `hasher` has a random key in each process: clients choose the ids, and none may choose them so that all collide.
    #[inline]
    pub(super) fn of(message: Message, hasher: &impl BuildHasher) -> Hash {
        Hash(hasher.hash_one(message))
    }

    /// Bits 0 to 25.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    const fn segment(self) -> usize {
        (self.0 as u32 & 0x03ff_ffff) as usize
    }

    /// Bits 26 to 48, spread over so many groups.
    const fn group(self, groups: usize) -> usize {
        (((self.0 >> 26 & 0x007f_ffff) * groups as u64) >> 23) as usize
    }

    /// Bits 49 to 56, where 0, which is the tag of an empty cell, counts as 1.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    const fn tag(self) -> u8 {
        let tag = (self.0 >> 49) as u8;
        tag | (tag == 0) as u8
    }

    /// Which of `1 << bits` shards: bits 57 to 63, the highest first.
    pub(super) const fn shard(self, bits: u32) -> usize {
        // Two shifts, since a shift by 64 overflows.
        (self.0 >> 1 >> (63 - bits)) as usize
    }
}

/// The group at which the search for a message begins; valid as long as [`Table::shape`] is the same.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Home {
    segment: u32,
    group: u32,
}

/// Message → entry.
#[derive(Debug)]
pub(super) struct Table<S = RandomState> {
    hasher: S,
    /// Segment `n` is split into itself and segment `n + 2^k`, the lowest `n` first.
    segments: Vec<Segment>,
    /// How many more entries each segment may have. These numbers change with every entry, and the segments seldom do.
    /// Apart from them, sixteen share a cache line, and only these lines move between processors.
    free: Vec<u32>,
    /// The bits of a hash that name a segment, if there is one of this number; else one bit less.
    mask: usize,
    /// The number of entries.
    pub(super) len: usize,
    /// Changes whenever entries were moved.
    pub(super) shape: u32,
}

impl<S: BuildHasher> Table<S> {
    pub(super) fn new(hasher: S) -> Table<S> {
        let only = Segment::with_groups(1);
        Table { hasher, free: vec![only.limit()], segments: vec![only], mask: 0, len: 0, shape: 0 }
    }

    /// Cells for entries, empty ones included.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.segments.iter().map(|segment| segment.entries.len() * group::CELLS).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.segments.iter().flat_map(Segment::iter)
    }

    #[expect(clippy::cast_possible_truncation, reason = "26 bits name a segment, 23 a group")]
    #[inline]
    pub(super) fn home(&self, hash: Hash) -> Home {
        let segment = self.segment_of(hash);
        Home { segment: segment as u32, group: hash.group(self.segments[segment].groups.len()) as u32 }
    }

    /// Requests the group in which the search for a message begins, and the free cells of its segment; returns where that is.
    #[inline]
    pub(super) fn fetch_group(&self, hash: Hash) -> Home {
        let home = self.home(hash);
        fetch(&self.free[home.segment as usize]);
        fetch(&self.segments[home.segment as usize].groups[home.group as usize]);
        home
    }

    /// Requests the entry of a message, or the cell that it would get: its group should be there.
    #[inline]
    pub(super) fn fetch_entry(&self, hash: Hash, home: Home) {
        let entry = self.segments[home.segment as usize].likely(hash.tag(), home.group as usize);
        fetch_whole(entry);
    }

    /// The entry of a message.
    #[expect(clippy::inline_always, reason = "as a call it makes a pair take 9 % more instructions")]
    #[inline(always)]
    pub(super) fn find(&mut self, hash: Hash, home: Home, message: Message) -> Option<Found<'_>> {
        let (segment, free) = (&mut self.segments[home.segment as usize], &mut self.free[home.segment as usize]);
        segment.find((free, &mut self.len), hash.tag(), home.group as usize, message)
    }

    /// Inserts an entry; returns the one that the message had before.
    #[expect(clippy::inline_always, reason = "as a call it makes a pair take 9 % more instructions")]
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

/// Requests an entry, which may lie in two cache lines.
#[inline]
fn fetch_whole(entry: &Entry) {
    fetch(&entry.message);
    fetch(&entry.marks);
}

/// Requests the cache line of a value without waiting for it.
#[cfg(target_arch = "x86_64")]
fn fetch<T>(value: &T) {
    safe_arch::prefetch_t0(value);
}

/// Without such an instruction, the processor itself finds memory accesses that it can overlap.
#[cfg(not(target_arch = "x86_64"))]
fn fetch<T>(_value: &T) {}
