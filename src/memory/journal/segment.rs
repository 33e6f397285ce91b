//! The segments of a journal. A segment is a file with a head and blocks, and a block is the result of one write.
//!
//! ```text
//! segment: magic 16, SegmentHead in postcard, zeros up to 76, crc u32, blocks
//! block:   BlockHead in postcard, zeros up to 60, crc u32, records
//! ```
//!
//! Numbers are little-endian. The head of a block has the number of its segment, and an epoch that is not below that of
//! the segment. So blocks of an earlier use of a recycled file are not valid, also if a power failure reverted the
//! renaming.

use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::core::{Tick, Wheel};

/// The first bytes of a segment. The digit is the version of the layout.
pub(super) const MAGIC: &[u8; 16] = b"ackwheel log   3";

/// The length of the head of a segment.
pub(super) const HEAD_LENGTH: usize = 80;

/// The length of the head of a block.
pub(super) const BLOCK_HEAD_LENGTH: usize = 64;

/// The head of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SegmentHead {
    pub(super) number: u32,
    pub(super) wheel: Wheel,
    /// The epoch of the process that began the segment.
    pub(super) epoch: u64,
    /// The length of the valid blocks of the segment before, with its head. A shorter segment is damaged.
    pub(super) previous_length: u64,
}

impl SegmentHead {
    pub(super) fn encode(&self) -> [u8; HEAD_LENGTH] {
        let mut bytes = [0; HEAD_LENGTH];
        bytes[..MAGIC.len()].copy_from_slice(MAGIC);
        seal(self, &mut bytes[MAGIC.len()..]);
        bytes
    }

    /// Returns `None` if the bytes are not a whole head of this version.
    pub(super) fn decode(bytes: &[u8]) -> Option<SegmentHead> {
        let head: SegmentHead = unseal(bytes.get(..HEAD_LENGTH)?.strip_prefix(MAGIC)?)?;
        Wheel::new(head.wheel.slots(), head.wheel.tick_length()).is_ok().then_some(head)
    }
}

/// The head of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BlockHead {
    pub(super) segment: u32,
    /// The epoch of the process that wrote the block.
    pub(super) epoch: u64,
    /// The segment with which recovery begins, because the last complete checkpoint begins in it.
    pub(super) checkpoint: u32,
    /// A tick at which the pointer stood a short time before.
    pub(super) pointer: Tick,
    /// How long the wheel has lived, without the time in which no process ran.
    pub(super) lived_ms: u64,
    /// The wall clock.
    pub(super) unix_ms: u64,
    /// The length of the records, which is not 0.
    pub(super) length: u32,
    /// The checksum of the records.
    pub(super) crc: u32,
}

impl BlockHead {
    /// Fills in the first [`BLOCK_HEAD_LENGTH`] bytes of a block, whose records follow them. Sets the length and the
    /// checksum.
    pub(super) fn fill_in(mut self, block: &mut [u8]) {
        let (head, records) = block.split_at_mut(BLOCK_HEAD_LENGTH);
        self.length = u32::try_from(records.len()).expect("a block is far shorter than 4 GiB");
        self.crc = crc32fast::hash(records);
        seal(&self, head);
    }
}

/// Writes a value, zeros and a checksum of [`MAGIC`] and both, which fill `bytes`. So the heads of other versions are not
/// valid.
fn seal(value: &impl Serialize, bytes: &mut [u8]) {
    let (body, crc) = bytes.split_last_chunk_mut().expect("there is room for a checksum");
    body.fill(0);
    postcard::to_slice(value, body).expect("the longest head has room");
    *crc = checksum(body).to_le_bytes();
}

/// Reads what [`seal`] wrote. Returns `None` if the checksum is another.
fn unseal<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    let (body, crc) = bytes.split_last_chunk()?;
    let is_valid = checksum(body) == u32::from_le_bytes(*crc);
    is_valid.then(|| postcard::from_bytes(body).ok())?
}

fn checksum(body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(MAGIC);
    hasher.update(body);
    hasher.finalize()
}

/// A valid block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block<'a> {
    pub(super) head: BlockHead,
    pub(super) records: &'a [u8],
}

/// Reads the block at the beginning of `bytes`. Returns `None` if it is not a valid block of this segment, whose epoch is
/// `epoch`.
pub(super) fn block_at(segment: u32, epoch: u64, bytes: &[u8]) -> Option<Block<'_>> {
    let (head, rest) = bytes.split_at_checked(BLOCK_HEAD_LENGTH)?;
    let head: BlockHead = unseal(head)?;
    if head.segment != segment || head.epoch < epoch || head.length == 0 {
        return None;
    }
    let records = rest.get(..head.length as usize)?;
    (crc32fast::hash(records) == head.crc).then_some(Block { head, records })
}

/// Returns the first segment of a journal with a block for each of these records, which need not be valid.
#[cfg(fuzzing)]
pub fn first_segment_of(wheel: Wheel, blocks: &[&[u8]]) -> Vec<u8> {
    let head = SegmentHead { number: 1, wheel, epoch: 7, previous_length: 0 };
    let mut segment = head.encode().to_vec();
    for records in blocks {
        let mut block = vec![0; BLOCK_HEAD_LENGTH];
        block.extend_from_slice(records);
        let head = BlockHead {
            segment: 1,
            epoch: 7,
            checkpoint: 1,
            pointer: Tick(1_700_000_000),
            lived_ms: 9,
            unix_ms: 1_700_000_000_009,
            ..BlockHead::default()
        };
        head.fill_in(&mut block);
        segment.append(&mut block);
    }
    segment
}

impl Block<'_> {
    pub(super) fn length(&self) -> usize {
        BLOCK_HEAD_LENGTH + self.records.len()
    }
}

/// Finds the valid blocks in the bytes of a segment with this number and epoch. `known` is the length that the next
/// segment knows, or 0. Returns the damaged parts, and the length up to the end of the last valid block.
pub(super) fn scan<'a>(
    number: u32,
    epoch: u64,
    bytes: &'a [u8],
    known: usize,
    mut on_block: impl FnMut(usize, Block<'a>),
) -> (Vec<Range<usize>>, u64) {
    let (mut damages, mut at) = (Vec::new(), HEAD_LENGTH);
    loop {
        if let Some(block) = block_at(number, epoch, &bytes[at.min(bytes.len())..]) {
            on_block(at, block);
            at += block.length();
            continue;
        }
        let valid = |at: &usize| block_at(number, epoch, &bytes[*at..]).is_some();
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
