//! Which bits of a message's hash say what.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;

use crate::core::message::Message;

/// How messages are hashed.
pub(in crate::memory) trait HashMessage {
    fn hash_of(&self, message: Message) -> Hash;
}

/// By a key of this process: ids come from clients, and none may choose them so that all fall together.
#[derive(Clone, Debug, Default)]
pub(in crate::memory) struct Keyed(RandomState);

impl HashMessage for Keyed {
    fn hash_of(&self, message: Message) -> Hash {
        Hash(self.0.hash_one(message))
    }
}

/// A hash of a message: which bits say what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory) struct Hash(pub(in crate::memory) u64);

impl Hash {
    /// Bits 0 to 25.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    pub(super) const fn segment(self) -> usize {
        (self.0 as u32 & 0x03ff_ffff) as usize
    }

    /// Bits 26 to 48, spread over so many groups.
    pub(super) const fn group(self, groups: usize) -> usize {
        (((self.0 >> 26 & 0x007f_ffff) * groups as u64) >> 23) as usize
    }

    /// Bits 49 to 56, where 0, which is the tag of an empty place, counts as 1.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    pub(super) const fn tag(self) -> u8 {
        let tag = (self.0 >> 49) as u8;
        tag | (tag == 0) as u8
    }

    /// Which of `1 << bits` shards: bits 57 to 63, the highest first.
    pub(in crate::memory) const fn shard(self, bits: u32) -> usize {
        // Two shifts, since one by 64 is none.
        (self.0 >> 1 >> (63 - bits)) as usize
    }
}

/// Bits of a hash that may name a shard.
pub(in crate::memory) const MAX_SHARD_BITS: u32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bit_says_two_things() {
        const GROUPS: usize = 1 << 23;
        let plain = Hash(0);
        for bit in 0..u64::BITS {
            let hash = Hash(1 << bit);
            let changed = [
                hash.segment() != plain.segment(),
                hash.group(GROUPS) != plain.group(GROUPS),
                // The tag of 0 is that of 1.
                hash.tag() != plain.tag() || bit == 49,
                hash.shard(MAX_SHARD_BITS) != plain.shard(MAX_SHARD_BITS),
            ];
            assert_eq!(changed.iter().filter(|changed| **changed).count(), 1, "bit {bit}");
            assert_ne!(hash.tag(), 0);
        }
    }
}
