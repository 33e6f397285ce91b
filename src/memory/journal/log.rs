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
use super::recovery::Replay;
use super::segment::{BlockHead, HEAD_LENGTH, SegmentHead, scan};
use crate::core::{Moment, Stamp, Wheel};
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

/// The log of a journal, before its records are applied.
pub(super) struct Log {
    /// All segments, in their order.
    pub(super) segments: Vec<(SegmentHead, PathBuf)>,
    /// The head of the last valid block.
    last: Option<BlockHead>,
    /// The length of the last segment up to the end of its last valid block.
    pub(super) length: u64,
    pub(super) damages: Vec<Damage>,
}

impl Log {
    /// Finds the segments, and the last valid block.
    pub(super) fn open(found: &Found, wheel: Wheel) -> Result<Log, JournalError> {
        let mut log = Log { segments: Vec::new(), last: None, length: HEAD_LENGTH as u64, damages: Vec::new() };
        log.segments = log.with_heads(found, wheel);
        for (number, (head, path)) in log.segments.iter().enumerate().rev() {
            let bytes = Folder::read(path)?;
            let (_, length) = scan(head.number, head.epoch, &bytes, 0, |_, block| log.last = Some(block.head));
            if number + 1 == log.segments.len() {
                log.length = length;
            }
            if log.last.is_some() {
                break;
            }
        }
        Ok(log)
    }

    /// Returns all segments in their order, those with a damaged head too.
    fn with_heads(&mut self, found: &Found, wheel: Wheel) -> Vec<(SegmentHead, PathBuf)> {
        let mut segments = found.segments.clone();
        for (number, epoch, path) in &found.headless {
            self.damages.push(Damage { path: path.clone(), offset: 0, bytes: HEAD_LENGTH });
            let head = SegmentHead { number: *number, wheel, epoch: *epoch, previous_length: 0 };
            segments.push((head, path.clone()));
        }
        segments.sort_by_key(|(head, _)| head.number);
        segments
    }

    /// Returns the segment with which recovery begins.
    pub(super) fn checkpoint(&self) -> Option<u32> {
        self.last.map(|last| last.checkpoint)
    }

    /// Returns the segment of the last valid block.
    pub(super) fn last_segment(&self) -> u32 {
        self.last.map_or(0, |last| last.segment)
    }

    /// Returns the epoch of the last process whose records are there.
    pub(super) fn last_epoch(&self) -> u64 {
        let head = self.segments.last().map_or(0, |(head, _)| head.epoch);
        self.last.map_or(head, |last| last.epoch.max(head))
    }

    /// Returns how long the wheel has lived.
    pub(super) fn lived_ms(&self) -> u64 {
        self.last.map_or(0, |last| last.lived_ms)
    }

    /// Applies all records from the last complete checkpoint on to an empty wheel, and records what is damaged or missing.
    /// Records before the checkpoint in its segment change nothing that it does not set again. Returns the number of
    /// messages in flight.
    pub(super) fn apply(
        &mut self,
        folder: &Folder,
        wheel: &MemoryWheel,
        moment: Moment,
    ) -> Result<u64, JournalError> {
        // Segments before the last complete checkpoint are not needed any more.
        let checkpoint = self.last.map_or(0, |last| last.checkpoint);
        let first = self.segments.partition_point(|(head, _)| head.number < checkpoint);
        let needed = &self.segments[first..];
        self.damages.retain(|damage| self.segments[..first].iter().all(|(_, path)| *path != damage.path));
        if needed.is_empty() {
            return Ok(0);
        }
        let last = self.last.map_or(moment.unix_ms(), |last| last.unix_ms);
        let away = Duration::from_millis(moment.unix_ms().saturating_sub(last));
        let (mut replay, mut is_first) = (Replay::new(wheel, away), true);
        let mut expected = checkpoint.max(1);
        for (number, (head, path)) in needed.iter().enumerate() {
            if let Some((_, next)) = needed.get(number + 1) {
                Folder::read_ahead(next);
            }
            for missing in expected..head.number {
                self.damages.push(Damage { path: folder.segment(missing), offset: 0, bytes: 0 });
            }
            expected = head.number + 1;
            let bytes = Folder::read(path)?;
            // A segment that ends before the length that its successor knows is damaged.
            let next = needed.get(number + 1).filter(|(next, _)| next.number == expected);
            let known = next.map_or(0, |(next, _)| usize::try_from(next.previous_length).unwrap_or(usize::MAX));
            let (damages, _) = scan(head.number, head.epoch, &bytes, known, |offset, block| {
                if std::mem::take(&mut is_first) {
                    replay.begin_at(block.head.pointer);
                }
                let stamp = Stamp::after(Duration::from_millis(block.head.lived_ms));
                if read(block.records, stamp, |part| replay.apply(part)).is_none() {
                    error!(
                        path = %path.display(),
                        offset,
                        "a block of the journal has records of another version: they are left out"
                    );
                }
            });
            let damages =
                damages.into_iter().map(|at| Damage { path: path.clone(), offset: at.start, bytes: at.len() });
            self.damages.extend(damages);
        }
        Ok(replay.finish(moment.now))
    }
}
