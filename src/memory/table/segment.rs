//! A segment: groups of places, and the entries in them.

use super::super::entry::Entry;
use super::group_mask::{GroupMask, Lane, PLACES};
use crate::core::message::Message;

/// The byte of a group's tags that counts overflows.
const OVERFLOWS: usize = PLACES;

/// The first of two bytes of a group's ticks that hold bits of their tags.
const OVERFLOWN: usize = PLACES;

/// A segment is never fuller than this.
const MAX_LOAD_PERCENT: usize = 78;

/// An overflow count that has reached this is not exact any more, and stays until the segment is rebuilt.
const SATURATED: u8 = u8::MAX;

/// The head of a group: a tag byte and a tick byte for each place, in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Group {
    /// 0 where a place is empty; behind them the count of the entries that found no place here, and a byte without use.
    tags: Lane,
    /// The lowest bits of the deadlines; behind them a bit for each remainder by 16 that the tag of such an entry had. They
    /// are forgotten when none of them is left. Without them a search would go on from every group that has such an entry.
    pub(super) ticks: Lane,
}

const _: () = assert!(size_of::<Group>() == 64, "a group is a cache line");

impl Group {
    const EMPTY: Group = Group { tags: [0; size_of::<Lane>()], ticks: [0; size_of::<Lane>()] };

    /// GroupMask whose tag may be this one.
    pub(super) fn tagged(&self, tag: u8) -> GroupMask {
        GroupMask::equal(self.tags, tag)
    }

    /// Occupied places whose tick may have these lowest bits.
    pub(super) fn ticking(&self, lowest: u8) -> GroupMask {
        GroupMask::equal(self.ticks, lowest).and(&self.occupied())
    }

    fn occupied(&self) -> GroupMask {
        GroupMask::unequal(self.tags, 0)
    }

    pub(super) fn empty(&self) -> GroupMask {
        GroupMask::equal(self.tags, 0)
    }

    /// Says of a place whose it is.
    #[inline]
    fn occupy(&mut self, place: usize, tag: u8, entry: &Entry) {
        self.tags[place] = tag;
        self.ticks[place] = entry.deadline.lowest();
    }

    /// Whether an entry of this tag may have found no place here.
    #[inline]
    fn overflew(&self, tag: u8) -> bool {
        self.ticks[Group::overflown(tag)] & Group::bit(tag) != 0
    }

    /// Notes an entry that finds no place here.
    fn overflow(&mut self, tag: u8) {
        self.tags[OVERFLOWS] = self.tags[OVERFLOWS].saturating_add(1);
        self.ticks[Group::overflown(tag)] |= Group::bit(tag);
    }

    /// Forgets one of them.
    fn return_overflow(&mut self) {
        let overflows = &mut self.tags[OVERFLOWS];
        if *overflows == SATURATED {
            return;
        }
        *overflows -= 1;
        if *overflows == 0 {
            self.ticks[OVERFLOWN..].fill(0);
        }
    }

    /// The byte that has the bit of a tag.
    const fn overflown(tag: u8) -> usize {
        OVERFLOWN + (tag / 8 % 2) as usize
    }

    const fn bit(tag: u8) -> u8 {
        1 << (tag % 8)
    }
}

/// A small table.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) groups: Box<[Group]>,
    /// Of each group, its entries.
    pub(super) entries: Box<[[Entry; PLACES]]>,
}

/// How many more entries a segment may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room(u32);

impl Room {
    #[inline]
    pub(super) fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// An entry that was found, and what changes when it is taken away.
#[derive(Debug)]
pub(super) struct Found<'a> {
    pub(super) entry: &'a mut Entry,
    groups: &'a mut [Group],
    /// The group at which the search for it began.
    home: usize,
    /// Its group, and its place there.
    at: usize,
    place: usize,
    room: &'a mut Room,
}

impl Found<'_> {
    /// Puts another entry of the same message in its place; returns the one that was there.
    pub(super) fn replace(self, entry: Entry) -> Entry {
        self.groups[self.at].ticks[self.place] = entry.deadline.lowest();
        std::mem::replace(self.entry, entry)
    }

    /// Takes it away.
    #[inline]
    pub(super) fn remove(self) {
        self.groups[self.at].tags[self.place] = 0;
        self.room.0 += 1;
        if self.at != self.home {
            pass(self.groups, self.home, self.at);
        }
    }
}

/// Forgets an overflow of the groups from `home` to the one before `at`.
#[inline(never)]
fn pass(groups: &mut [Group], home: usize, at: usize) {
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
            entries: vec![[Entry::EMPTY; PLACES]; groups].into_boxed_slice(),
        }
    }

    /// As many entries as it may have.
    #[expect(clippy::cast_possible_truncation, reason = "a segment has a few thousand places")]
    fn limit(&self) -> u32 {
        (self.groups.len() * PLACES * MAX_LOAD_PERCENT / 100) as u32
    }

    /// The room that it has while it is empty.
    pub(super) fn empty_room(&self) -> Room {
        Room(self.limit())
    }

    /// How many entries it has.
    pub(super) fn len(&self, room: Room) -> usize {
        (self.limit() - room.0) as usize
    }

    /// Groups enough for so many entries.
    pub(super) fn groups_for(len: usize) -> usize {
        (len * 100).div_ceil(PLACES * MAX_LOAD_PERCENT).max(1)
    }

    /// One that has room for so many.
    pub(super) fn with_room(len: usize) -> Segment {
        Segment::with_groups(Segment::groups_for(len))
    }

    fn next(&self, group: usize) -> usize {
        if group + 1 == self.groups.len() { 0 } else { group + 1 }
    }

    /// The entry of a message.
    #[inline]
    pub(super) fn find<'a>(
        &'a mut self,
        room: &'a mut Room,
        tag: u8,
        home: usize,
        message: Message,
    ) -> Option<Found<'a>> {
        let (group, entries) = (&self.groups[home], &self.entries[home]);
        let (at, place) = match group.tagged(tag).find(|place| entries[*place].message == message) {
            Some(place) => (home, place),
            None if !group.overflew(tag) => return None,
            None => self.find_beyond(tag, home, message)?,
        };
        let entry = &mut self.entries[at][place];
        Some(Found { entry, groups: &mut self.groups, home, at, place, room })
    }

    /// The group at which the search for a tag will end, or that takes an entry of this tag, as far as the tags show.
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
        let mut at = self.next(home);
        while at != home {
            if let Some(place) = self.groups[at].tagged(tag).first() {
                return &self.entries[at][place];
            }
            if !self.groups[at].overflew(tag) {
                break;
            }
            at = self.next(at);
        }
        &self.entries[home][self.groups[home].empty().first().unwrap_or(0)]
    }

    /// Group and place of a message that is not in the group where the search begins.
    #[inline(never)]
    fn find_beyond(&self, tag: u8, home: usize, message: Message) -> Option<(usize, usize)> {
        let mut at = self.next(home);
        // A table that was always full would have no group without overflows.
        while at != home {
            let (group, entries) = (&self.groups[at], &self.entries[at]);
            if let Some(place) = group.tagged(tag).find(|place| entries[*place].message == message) {
                return Some((at, place));
            }
            if !group.overflew(tag) {
                return None;
            }
            at = self.next(at);
        }
        None
    }

    /// Puts in an entry, if there is room and its group alone shows that it is not there: nearly always. Returns
    /// whether it did.
    #[expect(
        clippy::inline_always,
        reason = "left to the compiler it is a call, and a pair takes 9 % more instructions"
    )]
    #[inline(always)]
    pub(super) fn insert_at_home(&mut self, room: &mut Room, tag: u8, home: usize, entry: &Entry) -> bool {
        let (group, entries) = (&mut self.groups[home], &mut self.entries[home]);
        if group.overflew(tag) || group.tagged(tag).any(|place| entries[place].message == entry.message) {
            return false;
        }
        let Some(place) = group.empty().first() else { return false };
        if room.is_none() {
            return false;
        }
        group.occupy(place, tag, entry);
        entries[place] = *entry;
        room.0 -= 1;
        true
    }

    /// Puts in an entry that is not there. There is room.
    pub(super) fn insert(&mut self, room: &mut Room, tag: u8, home: usize, entry: &Entry) {
        debug_assert!(!room.is_none(), "the caller makes room first");
        let mut at = home;
        let place = loop {
            let group = &mut self.groups[at];
            if let Some(place) = group.empty().first() {
                break place;
            }
            group.overflow(tag);
            at = self.next(at);
        };
        self.groups[at].occupy(place, tag, entry);
        self.entries[at][place] = *entry;
        room.0 -= 1;
    }

    /// Takes away the entry in a place whose search begins at `home`.
    pub(super) fn remove(&mut self, room: &mut Room, home: usize, at: usize, place: usize) {
        let entry = &mut self.entries[at][place];
        Found { entry, groups: &mut self.groups, home, at, place, room }.remove();
    }

    pub(super) fn visit(&mut self, visit: &mut impl FnMut(&mut Entry)) {
        for (group, entries) in self.groups.iter().zip(&mut self.entries) {
            group.occupied().for_each(|place| visit(&mut entries[place]));
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        let groups = self.groups.iter().zip(&self.entries);
        groups.flat_map(|(group, entries)| group.occupied().map(|place| &entries[place]))
    }
}
