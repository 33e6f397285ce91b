//! A segment: groups of places, and the entries in them.

use super::super::entry::Entry;
use super::super::places::{Lane, PLACES, Places};
use crate::core::message::Message;

/// The byte of a group's tags that counts overflows.
const OVERFLOWS: usize = PLACES;

/// A segment is never fuller than this.
const MAX_LOAD_PERCENT: usize = 85;

/// An overflow count that has reached this is not exact any more, and stays until the segment is rebuilt.
const SATURATED: u8 = u8::MAX;

/// What is said of a group's places: read together, so it lies in one half of a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(super) struct Group {
    /// 0 where a place is empty; the last byte counts the entries that found no place here.
    tags: Lane,
    /// The lowest bits of the deadlines; the last byte is not used.
    pub(super) ticks: Lane,
}

impl Group {
    const EMPTY: Group = Group { tags: [0; PLACES + 1], ticks: [0; PLACES + 1] };

    /// Places whose tag may be this one.
    pub(super) fn tagged(&self, tag: u8) -> Places {
        Places::equal(self.tags, tag)
    }

    /// Occupied places whose tick may have these lowest bits.
    pub(super) fn ticking(&self, lowest: u8) -> Places {
        Places::equal(self.ticks, lowest).and(&self.occupied())
    }

    fn occupied(&self) -> Places {
        Places::marked(self.tags)
    }

    pub(super) fn empty(&self) -> Places {
        Places::unmarked(self.tags)
    }

    pub(super) fn overflows(&self) -> u8 {
        self.tags[OVERFLOWS]
    }
}

/// A small table.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) groups: Box<[Group]>,
    pub(super) entries: Box<[Entry]>,
    pub(super) len: usize,
    /// As many entries as it may have.
    limit: usize,
}

impl Segment {
    pub(super) fn with_groups(groups: usize) -> Segment {
        Segment {
            groups: vec![Group::EMPTY; groups].into_boxed_slice(),
            entries: vec![Entry::EMPTY; groups * PLACES].into_boxed_slice(),
            len: 0,
            limit: groups * PLACES * MAX_LOAD_PERCENT / 100,
        }
    }

    /// Groups enough for so many entries.
    pub(super) fn groups_for(len: usize) -> usize {
        (len * 100).div_ceil(PLACES * MAX_LOAD_PERCENT).max(1)
    }

    /// One that has room for so many.
    pub(super) fn with_room(len: usize) -> Segment {
        Segment::with_groups(Segment::groups_for(len))
    }

    pub(super) fn is_full(&self) -> bool {
        self.len >= self.limit
    }

    fn next(&self, group: usize) -> usize {
        if group + 1 == self.groups.len() { 0 } else { group + 1 }
    }

    /// Group and place of a message.
    #[inline]
    pub(super) fn find(&self, tag: u8, home: usize, message: Message) -> Option<(usize, usize)> {
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
    pub(super) fn insert(&mut self, tag: u8, home: usize, entry: Entry) {
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
    pub(super) fn remove(&mut self, home: usize, group: usize, place: usize) {
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

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let groups = self.groups.iter().zip(self.entries.chunks_exact(PLACES));
        groups.flat_map(|(group, entries)| group.occupied().map(|place| &entries[place]))
    }
}
