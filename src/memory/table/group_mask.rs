//! Thirty-two bytes looked at together: which of a group's thirty places have a tag, or a tick.

use std::hint::select_unpredictable;

use wide::u8x32;

/// GroupMask in a group; the last two bytes of a lane are none.
pub(super) const PLACES: usize = 30;

/// Bytes that are looked at together.
pub(super) type Lane = [u8; PLACES + 2];

/// Some places of a group: a bit for each, the first ones first.
#[derive(Clone, Debug)]
pub(super) struct GroupMask(u32);

impl GroupMask {
    const ALL: u32 = (1 << PLACES) - 1;

    /// GroupMask whose byte is this one.
    pub(super) fn equal(lane: Lane, wanted: u8) -> GroupMask {
        GroupMask(u8x32::new(lane).simd_eq(u8x32::splat(wanted)).to_bitmask() & GroupMask::ALL)
    }

    /// GroupMask whose byte is another one.
    pub(super) fn unequal(lane: Lane, unwanted: u8) -> GroupMask {
        GroupMask(!GroupMask::equal(lane, unwanted).0 & GroupMask::ALL)
    }

    /// GroupMask that are in both.
    pub(super) const fn and(self, other: &GroupMask) -> GroupMask {
        GroupMask(self.0 & other.0)
    }

    /// These or, where there are none, the others: without a branch, since adds and dels come as they like.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_the_bytes_and_the_last_two_bytes_are_none() {
        let mut tags = [0_u8; 32];
        for (place, tag) in [(0, 0x85), (3, 0x85), (17, 0x85), (29, 0x9f), (30, 0x85), (31, 0x9f)] {
            tags[place] = tag;
        }
        let listed = |places: GroupMask| places.collect::<Vec<usize>>();
        assert_eq!(listed(GroupMask::equal(tags, 0x85)), [0, 3, 17]);
        assert_eq!(listed(GroupMask::unequal(tags, 0)), [0, 3, 17, 29]);
        assert_eq!(listed(GroupMask::equal(tags, 0)).len(), 26);
        assert_eq!(listed(GroupMask::equal(tags, 0x9f).and(&GroupMask::unequal(tags, 0))), [29]);
        assert_eq!(GroupMask::equal(tags, 0x9f).first(), Some(29));
        assert_eq!(GroupMask::equal(tags, 0x9e).first(), None);
        assert_eq!(listed(GroupMask::equal(tags, 0x9f).or(GroupMask::equal(tags, 0x85))), [29]);
        assert_eq!(listed(GroupMask::equal(tags, 0x9e).or(GroupMask::equal(tags, 0x85))), [0, 3, 17]);
    }
}
