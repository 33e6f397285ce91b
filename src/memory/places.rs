//! Sixteen bytes looked at in one step: which of a group's fifteen places have a tag, or a tick.

use wide::u8x16;

/// Places in a group; the sixteenth byte is not one.
pub(super) const PLACES: usize = 15;

/// Bytes that are looked at together.
pub(super) type Lane = [u8; PLACES + 1];

/// Some places of a group: a bit for each, the first ones first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places(u32);

impl Places {
    const ALL: u32 = (1 << PLACES) - 1;

    /// Places whose byte is this one.
    pub(super) fn equal(lane: Lane, wanted: u8) -> Places {
        Places(u8x16::new(lane).simd_eq(u8x16::splat(wanted)).to_bitmask() & Places::ALL)
    }

    /// Places whose byte has its highest bit set.
    pub(super) fn marked(lane: Lane) -> Places {
        Places(u8x16::new(lane).to_bitmask() & Places::ALL)
    }

    /// Places whose byte has not.
    pub(super) fn unmarked(lane: Lane) -> Places {
        Places(!u8x16::new(lane).to_bitmask() & Places::ALL)
    }

    /// Places that are in both.
    pub(super) const fn and(self, other: Places) -> Places {
        Places(self.0 & other.0)
    }

    pub(super) fn first(self) -> Option<usize> {
        (self.0 != 0).then(|| self.0.trailing_zeros() as usize)
    }
}

impl Iterator for Places {
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
    fn places_are_those_of_the_bytes_and_the_last_byte_is_none() {
        let mut tags = [0_u8; 16];
        (tags[0], tags[3], tags[14], tags[15]) = (0x85, 0x85, 0x9f, 0x85);
        let listed = |places: Places| places.collect::<Vec<usize>>();
        assert_eq!(listed(Places::equal(tags, 0x85)), [0, 3]);
        assert_eq!(listed(Places::marked(tags)), [0, 3, 14]);
        assert_eq!(listed(Places::unmarked(tags)), [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
        assert_eq!(listed(Places::equal(tags, 0x9f).and(Places::marked(tags))), [14]);
    }
}
