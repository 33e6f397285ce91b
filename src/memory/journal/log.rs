//! The segments of a journal as they were found: their valid blocks, and what is damaged.
//!
//! A segment ends with its first block that is not valid. In the last segment this is a torn write, which nobody was
//! told of. Elsewhere, or if a valid block follows, it is damage: it is reported with its place, and all other blocks are
//! kept.

use std::path::PathBuf;
use std::time::Duration;

use tracing::error;

use super::JournalError;
use super::folder::{Folder, Found};
use super::records::read;
use super::recovery::{Replay, stamp_of};
use super::segment::{Block, BlockHead, HEAD_LENGTH, SegmentHead, block_at};
use crate::core::Moment;
use crate::memory::wheel::MemoryWheel;

/// A part of a segment that is not valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// The offset of its first byte.
    pub offset: usize,
    /// The number of damaged bytes.
    pub bytes: usize,
}

/// The valid blocks of a segment, by the offset of each.
struct Segment {
    head: SegmentHead,
    path: PathBuf,
    blocks: Vec<usize>,
    /// The length up to the end of the last valid block.
    length: u64,
}

/// The log of a journal, before its records are applied.
pub(super) struct Log {
    segments: Vec<Segment>,
    last: Option<BlockHead>,
    pub(super) damages: Vec<Damage>,
}

impl Log {
    /// Verifies all segments.
    pub(super) fn verify(folder: &Folder, found: &Found) -> Result<Log, JournalError> {
        let mut log = Log { segments: Vec::new(), last: None, damages: Vec::new() };
        let segments = log.with_heads(found);
        for (number, (head, path)) in segments.iter().enumerate() {
            let bytes = Folder::read(path)?;
            let next = segments.get(number + 1).filter(|(next, _)| next.number == head.number + 1);
            // A segment that ends before the length that its successor knows is damaged.
            let known = next.map_or(0, |(next, _)| usize::try_from(next.previous_length).unwrap_or(usize::MAX));
            let (mut blocks, mut at) = (Vec::new(), HEAD_LENGTH);
            loop {
                if let Some(block) = block_at(head.number, &bytes[at.min(bytes.len())..]) {
                    blocks.push(at);
                    log.last = Some(block.head);
                    at += block.length();
                    continue;
                }
                let valid = |at: &usize| block_at(head.number, &bytes[*at..]).is_some();
                // Behind the last write are zeros, or blocks of an earlier use of the file.
                let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                let follows = (at + 1..used).find(valid);
                if follows.is_some() || at < known {
                    let end = follows.unwrap_or(known);
                    log.damages.push(Damage { path: path.clone(), offset: at, bytes: end - at });
                }
                match follows {
                    Some(next) => at = next,
                    None => break,
                }
            }
            let length = at as u64;
            log.segments.push(Segment { head: head.clone(), path: path.clone(), blocks, length });
        }
        // Segments before the last complete checkpoint are not needed any more.
        let checkpoint = log.last.map_or(0, |last| last.checkpoint);
        log.segments.retain(|segment| segment.head.number >= checkpoint);
        let is_old = |path: &PathBuf| segments.iter().any(|(head, of)| of == path && head.number < checkpoint);
        log.damages.retain(|damage| !is_old(&damage.path));
        let numbers: Vec<u32> = log.segments.iter().map(|segment| segment.head.number).collect();
        for missing in (checkpoint.max(1)..numbers.last().map_or(0, |last| *last)).filter(|n| !numbers.contains(n))
        {
            log.damages.push(Damage { path: folder.segment(missing), offset: 0, bytes: 0 });
        }
        Ok(log)
    }

    /// Returns all segments in their order. A damaged head is replaced by that of a neighbour, whose fields are nearly
    /// the same. Without a neighbour the segment cannot be read, and stays where it is.
    fn with_heads(&mut self, found: &Found) -> Vec<(SegmentHead, PathBuf)> {
        let mut segments = found.segments.clone();
        for (number, path) in &found.headless {
            let before = found.segments.iter().rev().find(|(head, _)| head.number < *number);
            let Some((neighbour, _)) = before.or(found.segments.first()) else {
                let bytes = path.metadata().map_or(0, |file| usize::try_from(file.len()).unwrap_or(usize::MAX));
                self.damages.push(Damage { path: path.clone(), offset: 0, bytes });
                continue;
            };
            self.damages.push(Damage { path: path.clone(), offset: 0, bytes: HEAD_LENGTH });
            segments
                .push((SegmentHead { number: *number, previous_length: 0, ..neighbour.clone() }, path.clone()));
        }
        segments.sort_by_key(|(head, _)| head.number);
        segments
    }

    /// Returns the head and the length of the last segment.
    pub(super) fn end(&self) -> Option<(&SegmentHead, u64)> {
        self.segments.last().map(|segment| (&segment.head, segment.length))
    }

    /// Returns the segment with which recovery begins.
    pub(super) fn checkpoint(&self) -> Option<u32> {
        self.last.map(|last| last.checkpoint)
    }

    /// Returns how long the wheel has lived.
    pub(super) fn lived_ms(&self) -> u64 {
        self.last.map_or(0, |last| last.lived_ms)
    }

    /// Applies all records to an empty wheel. Returns the number of messages in flight.
    pub(super) fn apply(&self, wheel: &MemoryWheel, moment: Moment) -> Result<u64, JournalError> {
        let Some(first) = self.segments.first() else { return Ok(0) };
        let mut replay = Replay::new(wheel, first.head.pointer);
        let mut epoch = first.head.epoch;
        for segment in &self.segments {
            if std::mem::replace(&mut epoch, segment.head.epoch) != segment.head.epoch {
                replay.begin_process();
            }
            let bytes = Folder::read(&segment.path)?;
            for at in &segment.blocks {
                let Some(Block { head, records }) = block_at(segment.head.number, &bytes[*at..]) else { continue };
                let stamp = stamp_of(head.lived_ms);
                if read(records, |part| replay.apply(part, stamp)).is_none() {
                    error!(
                        path = %segment.path.display(),
                        offset = at,
                        "a block of the journal has records of another version: they are left out"
                    );
                }
            }
        }
        let last = self.last.map_or(moment.unix_ms(), |last| last.unix_ms);
        let away = Duration::from_millis(moment.unix_ms().saturating_sub(last));
        Ok(replay.finish(self.lived_ms(), away, moment.now))
    }
}

/// Returns the largest epoch of all segments, and of none 0.
pub(super) fn last_epoch(found: &Found) -> u64 {
    found.segments.iter().map(|(head, _)| head.epoch).max().unwrap_or(0)
}
