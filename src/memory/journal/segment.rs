//! The segments of a journal. A segment is a file with a head and blocks, and a block is the result of one write.
//!
//! ```text
//! head:   magic 16, segment u32, slots u16, tick_ms u32, epoch u64, pointer u64, previous_length u64, crc u32
//! block:  length u32, checkpoint u32, lived_ms u64, unix_ms u64, crc of the records u32, crc of the head u32, records
//! ```
//!
//! Numbers are little-endian. The checksum of the head of a block covers the number of the segment too. So blocks of an
//! earlier use of a recycled file are not valid, and a search through what such a use left behind reads no records.

use std::ops::Range;
use std::time::Duration;

use crc32fast::Hasher;

use crate::core::{Tick, Wheel};

/// The first bytes of a segment. The digit is the version of the layout.
pub(super) const MAGIC: &[u8; 16] = b"ackwheel log   1";

/// The length of the head of a segment.
pub(super) const HEAD_LENGTH: usize = 16 + 4 + 2 + 4 + 8 + 8 + 8 + 4;

/// The length of the head of a block.
pub(super) const BLOCK_HEAD_LENGTH: usize = 4 + 4 + 8 + 8 + 4 + 4;

/// The head of a segment.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SegmentHead {
    pub(super) number: u32,
    pub(super) wheel: Wheel,
    pub(super) epoch: u64,
    pub(super) pointer: Tick,
    /// The length of the valid blocks of the segment before, with its head. A shorter segment is damaged.
    pub(super) previous_length: u64,
}

impl SegmentHead {
    pub(super) fn encode(&self) -> [u8; HEAD_LENGTH] {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.wheel.slots().to_le_bytes());
        bytes.extend(self.wheel.tick_ms().to_le_bytes());
        bytes.extend(self.epoch.to_le_bytes());
        bytes.extend(self.pointer.0.to_le_bytes());
        bytes.extend(self.previous_length.to_le_bytes());
        let crc = crc32fast::hash(&bytes);
        bytes.extend(crc.to_le_bytes());
        bytes.try_into().expect("the fields add up to the length")
    }

    /// Returns `None` if the bytes are not a whole head of this version.
    pub(super) fn decode(bytes: &[u8]) -> Option<SegmentHead> {
        let (body, crc) = bytes.get(..HEAD_LENGTH)?.split_last_chunk::<4>()?;
        let rest = body.strip_prefix(MAGIC)?;
        if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
            return None;
        }
        let u32_at = |at: usize| Some(u32::from_le_bytes(rest.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(rest.get(at..at + 8)?.try_into().ok()?));
        let slots = u16::from_le_bytes(rest.get(4..6)?.try_into().ok()?);
        let tick_length = Duration::from_millis(u64::from(u32_at(6)?));
        Some(SegmentHead {
            number: u32_at(0)?,
            wheel: Wheel::new(slots, tick_length).ok()?,
            epoch: u64_at(10)?,
            pointer: Tick(u64_at(18)?),
            previous_length: u64_at(26)?,
        })
    }
}

/// The head of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockHead {
    /// The segment with which recovery begins, because the last complete checkpoint begins there.
    pub(super) checkpoint: u32,
    /// How long the wheel has lived, without the time in which no process ran.
    pub(super) lived_ms: u64,
    /// The wall clock.
    pub(super) unix_ms: u64,
}

impl BlockHead {
    /// Fills in the first [`BLOCK_HEAD_LENGTH`] bytes of a block, whose records follow them.
    pub(super) fn fill_in(self, segment: u32, block: &mut [u8]) {
        let length = u32::try_from(block.len() - BLOCK_HEAD_LENGTH).expect("a block is far shorter than 4 GiB");
        let records = crc32fast::hash(&block[BLOCK_HEAD_LENGTH..]);
        block[..4].copy_from_slice(&length.to_le_bytes());
        block[4..8].copy_from_slice(&self.checkpoint.to_le_bytes());
        block[8..16].copy_from_slice(&self.lived_ms.to_le_bytes());
        block[16..24].copy_from_slice(&self.unix_ms.to_le_bytes());
        block[24..28].copy_from_slice(&records.to_le_bytes());
        let head = head_checksum(segment, block);
        block[28..32].copy_from_slice(&head.to_le_bytes());
    }
}

fn head_checksum(segment: u32, block: &[u8]) -> u32 {
    let mut crc = Hasher::new();
    crc.update(&segment.to_le_bytes());
    crc.update(&block[..BLOCK_HEAD_LENGTH - 4]);
    crc.finalize()
}

/// A valid block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block<'a> {
    pub(super) head: BlockHead,
    pub(super) records: &'a [u8],
}

/// Reads the block at the beginning of `bytes`. Returns `None` if it is not valid.
pub(super) fn block_at(segment: u32, bytes: &[u8]) -> Option<Block<'_>> {
    let head = bytes.get(..BLOCK_HEAD_LENGTH)?;
    let u32_at = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    let length = u32_at(0) as usize;
    // A block is not empty. So zeros are no block, and need no checksum.
    if length == 0 || head_checksum(segment, head) != u32_at(28) {
        return None;
    }
    let records = bytes.get(BLOCK_HEAD_LENGTH..BLOCK_HEAD_LENGTH + length)?;
    if crc32fast::hash(records) != u32_at(24) {
        return None;
    }
    let head = BlockHead { checkpoint: u32_at(4), lived_ms: u64_at(8), unix_ms: u64_at(16) };
    Some(Block { head, records })
}

impl Block<'_> {
    pub(super) fn length(&self) -> usize {
        BLOCK_HEAD_LENGTH + self.records.len()
    }
}

/// Finds the valid blocks in the bytes of a segment. `known` is the length that the next segment knows, or 0. Returns the
/// damaged parts, and the length up to the end of the last valid block.
pub(super) fn scan<'a>(
    number: u32,
    bytes: &'a [u8],
    known: usize,
    mut on_block: impl FnMut(usize, Block<'a>),
) -> (Vec<Range<usize>>, u64) {
    let (mut damages, mut at) = (Vec::new(), HEAD_LENGTH);
    loop {
        if let Some(block) = block_at(number, &bytes[at.min(bytes.len())..]) {
            on_block(at, block);
            at += block.length();
            continue;
        }
        let valid = |at: &usize| block_at(number, &bytes[*at..]).is_some();
        // Behind the last write are zeros, or blocks of an earlier use of the file.
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let follows = (at + 1..used).find(valid);
        if follows.is_some() || at < known {
            damages.push(at..follows.unwrap_or(known));
        }
        match follows {
            Some(next) => at = next,
            None => return (damages, at as u64),
        }
    }
}
