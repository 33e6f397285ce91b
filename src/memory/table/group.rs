//! The head of a group: for each of its thirty cells a byte of the hash and a byte of the deadline.

use std::hint::select_unpredictable;

use wide::u8x32;

use super::super::entry::Entry;

/// Cells of a group.
pub(super) const CELLS: usize = 30;

/// A byte for each cell, and two more: compared together.
type Lane = [u8; CELLS + 2];

/// A set of cells of a group: a bit for each, the first cell in the lowest.
#[derive(Clone, Debug)]
pub(super) struct GroupMask(u32);

impl GroupMask {
    const ALL: u32 = (1 << CELLS) - 1;

    /// The cells whose byte is `wanted`.
    fn equal(lane: Lane, wanted: u8) -> GroupMask {
        GroupMask(u8x32::new(lane).simd_eq(u8x32::splat(wanted)).to_bitmask() & GroupMask::ALL)
    }

    /// These cells or, if there are none, the others. Without a branch: adds and dels arrive in no predictable order.
    pub(super) fn or(self, others: GroupMask) -> GroupMask {
        select_unpredictable(self.is_none(), others, self)
    }

    pub(super) const fn is_none(&self) -> bool {
        self.0 == 0
    }

    pub(super) const fn first(&self) -> Option<usize> {
        if self.is_none() { None } else { Some(self.0.trailing_zeros() as usize) }
    }
}

impl Iterator for GroupMask {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let first = self.first()?;
        self.0 &= self.0 - 1;
        Some(first)
    }
}

/// The byte behind the tags that counts overflows: entries that found no empty cell in their group.
const OVERFLOWS: usize = CELLS;

/// The first of two bytes behind the ticks that keep bits of the tags of those entries.
const OVERFLOWN: usize = CELLS;

/// An overflow count that has reached this is not exact any more, and stays until the segment is rebuilt.
const SATURATED: u8 = u8::MAX;

/// A tag byte and a tick byte for each cell, in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Group {
    /// 0 if a cell is empty. Behind the tags: the count of overflows, and an unused byte.
    pub(super) tags: Lane,
    /// The lowest bits of the deadlines. Behind them: a bit for each remainder by 16 of the tags that overflowed. These bits
    /// are reset when the last overflow returns. Without them a search would go on from every group with an overflow.
    pub(super) ticks: Lane,
}

const _: () = assert!(size_of::<Group>() == 64, "a group is a cache line");

impl Group {
    pub(super) const EMPTY: Group = Group { tags: [0; size_of::<Lane>()], ticks: [0; size_of::<Lane>()] };

    /// The cells with this tag.
    pub(super) fn tagged(&self, tag: u8) -> GroupMask {
        GroupMask::equal(self.tags, tag)
    }

    /// The occupied cells whose deadline has these lowest bits.
    pub(super) fn ticking(&self, lowest: u8) -> GroupMask {
        GroupMask(GroupMask::equal(self.ticks, lowest).0 & self.occupied().0)
    }

    pub(super) fn occupied(&self) -> GroupMask {
        GroupMask(!self.empty().0 & GroupMask::ALL)
    }

    pub(super) fn empty(&self) -> GroupMask {
        GroupMask::equal(self.tags, 0)
    }

    #[inline]
    pub(super) fn occupy(&mut self, cell: usize, tag: u8, entry: &Entry) {
        self.tags[cell] = tag;
        self.ticks[cell] = entry.deadline.lowest();
    }

    /// Whether an entry of this tag may have overflowed from here.
    #[inline]
    pub(super) fn overflew(&self, tag: u8) -> bool {
        self.ticks[Group::overflown(tag)] & Group::bit(tag) != 0
    }

    /// Counts an entry that overflows from here.
    pub(super) fn overflow(&mut self, tag: u8) {
        self.tags[OVERFLOWS] = self.tags[OVERFLOWS].saturating_add(1);
        self.ticks[Group::overflown(tag)] |= Group::bit(tag);
    }

    /// Counts an entry that had overflowed from here and was removed.
    pub(super) fn return_overflow(&mut self) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_those_of_the_bytes_and_the_last_two_bytes_are_none() {
        let mut tags = [0_u8; 32];
        for (cell, tag) in [(0, 0x85), (3, 0x85), (17, 0x85), (29, 0x9f), (30, 0x85), (31, 0x9f)] {
            tags[cell] = tag;
        }
        let group = Group { tags, ticks: tags };
        let listed = |cells: GroupMask| cells.collect::<Vec<usize>>();
        assert_eq!(listed(group.tagged(0x85)), [0, 3, 17]);
        assert_eq!(listed(group.occupied()), [0, 3, 17, 29]);
        assert_eq!(listed(group.empty()).len(), 26);
        assert_eq!(listed(group.ticking(0x9f)), [29]);
        assert!(listed(group.ticking(0)).is_empty(), "empty cells have no tick");
        assert_eq!(group.tagged(0x9f).first(), Some(29));
        assert_eq!(group.tagged(0x9e).first(), None);
        assert_eq!(listed(group.tagged(0x9f).or(group.tagged(0x85))), [29]);
        assert_eq!(listed(group.tagged(0x9e).or(group.tagged(0x85))), [0, 3, 17]);
    }
}
