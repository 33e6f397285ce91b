//! A segment of a table: groups of cells, and the entries in these cells.

use super::super::entry::Entry;
use super::group::{CELLS, Group};
use crate::core::Message;

/// The maximum fill level of a segment, in percent of its cells.
const MAX_LOAD_PERCENT: usize = 78;

/// A part of a table, and a small table of its own. The whole table stores `free`: the number of entries that the
/// segment can still take.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) groups: Box<[Group]>,
    /// The entries of each group, one for each cell.
    pub(super) entries: Box<[[Entry; CELLS]]>,
}

/// An entry that a search found, and everything that its removal changes.
#[derive(Debug)]
pub(in crate::memory) struct Found<'a> {
    pub(in crate::memory) entry: &'a mut Entry,
    pub(super) groups: &'a mut [Group],
    /// The group at which the search for the entry began.
    pub(super) home: usize,
    /// The group that contains the entry.
    pub(super) at: usize,
    pub(super) cell: usize,
    pub(super) free: &'a mut u32,
    /// The number of entries in the table.
    pub(super) len: &'a mut usize,
}

impl Found<'_> {
    /// Replaces the entry with another entry of the same message. Returns the old entry.
    pub(super) fn replace(self, entry: Entry) -> Entry {
        self.groups[self.at].ticks[self.cell] = entry.deadline.lowest();
        std::mem::replace(self.entry, entry)
    }

    #[inline]
    pub(in crate::memory) fn remove(self) {
        self.groups[self.at].tags[self.cell] = 0;
        *self.free += 1;
        *self.len -= 1;
        if self.at != self.home {
            return_overflows(self.groups, self.home, self.at);
        }
    }
}

/// Counts the removal of an overflowed entry in each group that was full when the entry was inserted: from `home` to
/// the one before `at`.
#[inline(never)]
fn return_overflows(groups: &mut [Group], home: usize, at: usize) {
    let mut passed = home;
    while passed != at {
        groups[passed].return_overflow();
        passed = if passed + 1 == groups.len() { 0 } else { passed + 1 };
    }
}

impl Segment {
    pub(super) fn with_groups(groups: usize) -> Segment {
        Segment {
            groups: vec![Group::EMPTY; groups].into_boxed_slice(),
            entries: vec![[Entry::EMPTY; CELLS]; groups].into_boxed_slice(),
        }
    }

    /// Returns the maximum number of entries.
    #[expect(clippy::cast_possible_truncation, reason = "a segment has a few thousand cells")]
    pub(super) fn limit(&self) -> u32 {
        (self.groups.len() * CELLS * MAX_LOAD_PERCENT / 100) as u32
    }

    /// Returns the number of groups that `len` entries need.
    pub(super) fn groups_for(len: usize) -> usize {
        (len * 100).div_ceil(CELLS * MAX_LOAD_PERCENT).max(1)
    }

    fn next(&self, group: usize) -> usize {
        if group + 1 == self.groups.len() { 0 } else { group + 1 }
    }

    /// Finds the entry of a message.
    #[inline]
    pub(super) fn find<'a>(
        &'a mut self,
        (free, len): (&'a mut u32, &'a mut usize),
        tag: u8,
        home: usize,
        message: Message,
    ) -> Option<Found<'a>> {
        let (group, entries) = (&self.groups[home], &self.entries[home]);
        let (at, cell) = match group.tagged(tag).find(|cell| entries[*cell].message == message) {
            Some(cell) => (home, cell),
            None if !group.overflew(tag) => return None,
            None => self.find_beyond(tag, home, |entry| entry.message == message)?,
        };
        let entry = &mut self.entries[at][cell];
        Some(Found { entry, groups: &mut self.groups, home, at, cell, free, len })
    }

    /// Returns the entry that a search for this tag would probably find, or the cell that a new entry with this tag
    /// would get. Compares only the tags, so the entry may belong to another message.
    #[inline]
    pub(super) fn likely(&self, tag: u8, home: usize) -> &Entry {
        let group = &self.groups[home];
        let tagged = group.tagged(tag);
        if tagged.is_none() & group.overflew(tag) {
            return self.likely_beyond(tag, home);
        }
        &self.entries[home][tagged.or(group.empty()).first().unwrap_or(0)]
    }

    #[inline(never)]
    fn likely_beyond(&self, tag: u8, home: usize) -> &Entry {
        let empty = || (home, self.groups[home].empty().first().unwrap_or(0));
        let (at, cell) = self.find_beyond(tag, home, |_| true).unwrap_or_else(empty);
        &self.entries[at][cell]
    }

    /// Finds an entry outside of its home group. Returns the group and the cell.
    #[inline(never)]
    fn find_beyond(&self, tag: u8, home: usize, is_wanted: impl Fn(&Entry) -> bool) -> Option<(usize, usize)> {
        let mut at = self.next(home);
        // The search ends at `home` at the latest, even if every group has overflows.
        while at != home {
            let (group, entries) = (&self.groups[at], &self.entries[at]);
            if let Some(cell) = group.tagged(tag).find(|cell| is_wanted(&entries[*cell])) {
                return Some((at, cell));
            }
            if !group.overflew(tag) {
                return None;
            }
            at = self.next(at);
        }
        None
    }

    /// Inserts an entry, if the segment has room and the home group alone shows that the message is not in the table.
    /// This is nearly always so. Returns whether the entry was inserted.
    #[expect(clippy::inline_always, reason = "a call would add 9 % to the instructions of an add and its del")]
    #[inline(always)]
    pub(super) fn insert_at_home(&mut self, free: &mut u32, tag: u8, home: usize, entry: &Entry) -> bool {
        let (group, entries) = (&mut self.groups[home], &mut self.entries[home]);
        if group.overflew(tag) || group.tagged(tag).any(|cell| entries[cell].message == entry.message) {
            return false;
        }
        let Some(cell) = group.empty().first() else { return false };
        if *free == 0 {
            return false;
        }
        group.occupy(cell, tag, entry);
        entries[cell] = *entry;
        *free -= 1;
        true
    }

    /// Inserts an entry. The segment must have room for the entry, and must have no entry of the same message.
    pub(super) fn insert(&mut self, free: &mut u32, tag: u8, home: usize, entry: &Entry) {
        debug_assert!(*free > 0, "the caller makes room first");
        let mut at = home;
        let cell = loop {
            let group = &mut self.groups[at];
            if let Some(cell) = group.empty().first() {
                break cell;
            }
            group.overflow(tag);
            at = self.next(at);
        };
        self.groups[at].occupy(cell, tag, entry);
        self.entries[at][cell] = *entry;
        *free -= 1;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let groups = self.groups.iter().zip(&self.entries);
        groups.flat_map(|(group, entries)| group.occupied().map(|cell| &entries[cell]))
    }
}
