//! The map msg_id → tick of one shard: message → entry, in a table made for batches, for scans and for growth
//! without a pause.
//!
//! ```text
//!  hash ──▶ segment ──▶ group: 30 tags, 30 ticks, overflows   (a cache line)
//!                          └──▶ 30 entries
//! ```
//!
//! - A *group* is thirty places. Eight bits of the hash, the tag, nearly always name the right one, and
//!   the lowest bits of each deadline stand beside the tags: a search for the messages of one tick reads two bytes
//!   a place, in order, and the entries of that tick only. This is what replaces a list of message ids per tick.
//! - An entry lies in the group that its hash names or, where that is full, in the next that has room. Each group
//!   counts the entries that had to go on from it, and keeps four bits of each of their tags: a search ends at the
//!   first group that none like it had to leave. So nothing is left behind by a removal for long, and a table at
//!   constant load never has to be cleaned. The more places a group has, the fewer are full: of fifteen one add in four
//!   had to look further, and no processor guesses which (docs/PERFORMANCE.md).
//! - A *segment* is a small table of its own, at most 78% full. It grows by an eighth. Segments
//!   are split one at a time as the table grows (linear hashing: Litwin, "Linear Hashing: A New Tool for File and
//!   Table Addressing", VLDB 1980), each when the mean is exceeded, and merged as it shrinks: no step moves
//!   more than about twice [`growth::MEAN_SEGMENT`] entries, however many there are.
//!
//! [`Table::fetch_group`] and [`Table::fetch_entry`] ask for the cache lines of many messages before the first of
//! them is used: the processor waits for memory once for all of them, where one after the other would wait for each.

mod group_mask;
mod growth;
mod hash;
mod segment;
mod segments;
#[cfg(test)]
mod tests;

use self::segment::Segment;
use self::segments::Segments;
use super::entry::Entry;
use crate::core::message::Message;

pub(super) use self::growth::Kept;
pub(super) use self::hash::{Hash, HashMessage, Keyed, MAX_SHARD_BITS};

/// The group at which the search for a message begins; valid as long as [`Table::shape`] is the same.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Home {
    segment: u32,
    group: u32,
}

/// An entry that was found.
#[derive(Debug)]
pub(super) struct Found<'a> {
    in_segment: segment::Found<'a>,
    len: &'a mut usize,
}

impl Found<'_> {
    pub(super) fn entry(&mut self) -> &mut Entry {
        self.in_segment.entry
    }

    /// Takes it away.
    #[inline]
    pub(super) fn remove(self) {
        self.in_segment.remove();
        *self.len -= 1;
    }
}

/// Message → entry.
#[derive(Debug)]
pub(super) struct Table<S> {
    hasher: S,
    /// Segment `n` is split into itself and segment `n + 2^k`, the lowest `n` first.
    segments: Segments,
    /// The bits of a hash that name a segment, if there is one of this number; else one bit less.
    mask: usize,
    len: usize,
    shape: u32,
}

impl<S: HashMessage> Table<S> {
    pub(super) fn new(hasher: S) -> Table<S> {
        Table { hasher, segments: Segments::one(Segment::with_groups(1)), mask: 0, len: 0, shape: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// GroupMask for entries, free ones included.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.segments.iter().map(|segment| segment.entries.len() * group_mask::PLACES).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.segments.iter().flat_map(Segment::iter)
    }

    /// Changes whenever entries were moved.
    pub(super) fn shape(&self) -> u32 {
        self.shape
    }

    #[expect(clippy::cast_possible_truncation, reason = "26 bits name a segment, 23 a group")]
    #[inline]
    pub(super) fn home(&self, hash: Hash) -> Home {
        let segment = self.segment_of(hash);
        Home { segment: segment as u32, group: hash.group(self.segments[segment].groups.len()) as u32 }
    }

    /// Asks for the group in which the search for a message begins, and for the room of its segment; returns where that is.
    #[inline]
    pub(super) fn fetch_group(&self, hash: Hash) -> Home {
        let home = self.home(hash);
        fetch(self.segments.room(home.segment as usize));
        fetch(&self.segments[home.segment as usize].groups[home.group as usize]);
        home
    }

    /// Asks for the entry of a message, or for the place where it would go: its group should be there.
    #[inline]
    pub(super) fn fetch_entry(&self, hash: Hash, home: Home) {
        let entry = self.segments[home.segment as usize].likely(hash.tag(), home.group as usize);
        fetch_whole(entry);
    }

    /// The entry of a message.
    #[expect(
        clippy::inline_always,
        reason = "left to the compiler it is a call, and a pair takes 9 % more instructions"
    )]
    #[inline(always)]
    pub(super) fn find(&mut self, hash: Hash, home: Home, message: Message) -> Option<Found<'_>> {
        let (segment, room) = self.segments.at(home.segment as usize);
        let in_segment = segment.find(room, hash.tag(), home.group as usize, message)?;
        Some(Found { in_segment, len: &mut self.len })
    }

    /// Puts in an entry; returns the one that the message had before.
    #[expect(
        clippy::inline_always,
        reason = "left to the compiler it is a call, and a pair takes 9 % more instructions"
    )]
    #[inline(always)]
    pub(super) fn put(&mut self, hash: Hash, home: Home, entry: Entry) -> Option<Entry> {
        let (segment, room) = self.segments.at(home.segment as usize);
        if segment.insert_at_home(room, hash.tag(), home.group as usize, &entry) {
            self.len += 1;
            return None;
        }
        self.put_anywhere(hash, home, entry)
    }

    #[inline(never)]
    fn put_anywhere(&mut self, hash: Hash, home: Home, entry: Entry) -> Option<Entry> {
        let (segment, room) = self.segments.at(home.segment as usize);
        if let Some(found) = segment.find(room, hash.tag(), home.group as usize, entry.message) {
            return Some(found.replace(entry));
        }
        self.len += 1;
        if room.is_none() {
            self.make_room(hash);
            self.move_in(&entry);
        } else {
            segment.insert(room, hash.tag(), home.group as usize, &entry);
        }
        None
    }

    #[inline]
    fn segment_of(&self, hash: Hash) -> usize {
        let wide = hash.segment() & self.mask;
        if wide < self.segments.len() { wide } else { wide & (self.mask >> 1) }
    }
}

/// Asks for an entry, which may lie in two cache lines.
#[inline]
fn fetch_whole(entry: &Entry) {
    fetch(&entry.message);
    fetch(&entry.marks);
}

/// Asks for the cache line of a value without waiting for it.
#[cfg(target_arch = "x86_64")]
fn fetch<T>(value: &T) {
    safe_arch::prefetch_t0(value);
}

/// Where no such instruction is at hand, the processor finds out by itself how much it can do at the same time.
#[cfg(not(target_arch = "x86_64"))]
fn fetch<T>(_value: &T) {}
