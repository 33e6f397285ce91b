//! The head of a group, which is thirty cells of the table. For each cell, it has one byte of the hash (the *tag*) and
//! one byte of the deadline (the *tick*).

use std::hint::select_unpredictable;

use wide::u8x32;

use super::super::entry::Entry;

/// The number of cells in a group.
pub(super) const CELLS: usize = 30;

/// One byte for each cell, and two more bytes. One SIMD instruction compares all 32 bytes.
type Lane = [u8; CELLS + 2];

/// A set of cells of a group. Each cell has one bit; the first cell has the lowest bit.
#[derive(Clone, Debug)]
pub(super) struct GroupMask(u32);

impl GroupMask {
    const ALL: u32 = (1 << CELLS) - 1;

    /// Returns the cells whose byte is `wanted`.
    fn equal(lane: Lane, wanted: u8) -> GroupMask {
        GroupMask(u8x32::new(lane).simd_eq(u8x32::splat(wanted)).to_bitmask() & GroupMask::ALL)
    }

    /// Returns these cells, or `others` if there are none. Uses no branch, because adds and dels arrive in no
    /// predictable order.
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

/// The index in `tags` of the overflow count: the number of entries that found no empty cell in this group.
const OVERFLOWS: usize = CELLS;

/// The index in `ticks` of the first of two bytes with the overflow bits. These bits show which tags the overflowed
/// entries may have.
const OVERFLOWN: usize = CELLS;

/// The highest overflow count. A count that has reached this value may be too low, so it does not change until the
/// segment of the group is rebuilt.
const SATURATED: u8 = u8::MAX;

/// A tag byte and a tick byte for each cell. They fill one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Group {
    /// The tag of each cell; 0 if the cell is empty. After the tags come the overflow count and an unused byte.
    pub(super) tags: Lane,
    /// The lowest eight bits of the deadline of each cell. After them come 16 overflow bits, one for each remainder of
    /// a tag modulo 16. The overflow bits are cleared when the overflow count falls to 0. Without these bits, a search
    /// would have to go on to the next group after every group with an overflow.
    pub(super) ticks: Lane,
}

const _: () = assert!(size_of::<Group>() == 64, "a group is a cache line");

impl Group {
    pub(super) const EMPTY: Group = Group { tags: [0; size_of::<Lane>()], ticks: [0; size_of::<Lane>()] };

    /// Returns the cells with this tag.
    pub(super) fn tagged(&self, tag: u8) -> GroupMask {
        GroupMask::equal(self.tags, tag)
    }

    /// Returns the occupied cells whose deadline has these lowest bits.
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

    /// Returns whether an entry with this tag may have overflowed from this group.
    #[inline]
    pub(super) fn overflew(&self, tag: u8) -> bool {
        self.ticks[Group::overflown(tag)] & Group::bit(tag) != 0
    }

    /// Counts an entry that overflows from this group.
    pub(super) fn overflow(&mut self, tag: u8) {
        self.tags[OVERFLOWS] = self.tags[OVERFLOWS].saturating_add(1);
        self.ticks[Group::overflown(tag)] |= Group::bit(tag);
    }

    /// Counts the removal of an entry that had overflowed from this group.
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

    /// Returns the index in `ticks` of the byte with the overflow bit of a tag.
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
    fn the_first_thirty_bytes_stand_for_cells_and_the_last_two_do_not() {
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
