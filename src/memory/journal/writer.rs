//! The thread that writes the journal. With `--journal-sync always` it also syncs what it writes. Otherwise other threads
//! sync, and the writer waits for them only if many segments are unsynced.
//!
//! ```text
//!             no room for a spare segment             room again
//! recording ─────────────────────────────▶ full ────────────────▶ recording
//!     │ a write or a sync fails              │ the same
//!     ▼                                      ▼
//!  failed ──▶ a new segment can be written ──▶ rebuilding ── checkpoint complete ──▶ recording
//! ```

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io;
use std::mem;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::{error, info};

use super::SyncPolicy;
use super::buffer::Buffer;
use super::condition::Condition;
use super::folder::{Folder, SEGMENT_LENGTH};
use super::progress::{Progress, whole_segments};
use super::records::{Boundary, Taken};
use super::segment::{BLOCK_HEAD_LENGTH, BlockHead, HEAD_LENGTH, SegmentHead};
use crate::core::Tick;

/// How long the writer waits for records before it looks at its spare segments again.
const PATIENCE: Duration = Duration::from_millis(100);

/// The pause between two attempts to write again after a failure, or to make room.
const RETRY: Duration = Duration::from_secs(1);

/// The number of segments that another thread still has to sync, at which the writer waits for that.
pub(super) const MOST_UNSYNCED_SEGMENTS: usize = 8;

/// The bytes that an Ack takes, at most, in a write with others.
const ACK_LENGTH: u64 = 17;

pub(super) struct Writer {
    pub(super) folder: Arc<Folder>,
    pub(super) buffer: Arc<Buffer>,
    pub(super) progress: Arc<Progress>,
    pub(super) sync: SyncPolicy,
    /// The head of the current segment.
    pub(super) head: SegmentHead,
    /// The current segment, or `None` after a failure.
    pub(super) file: Option<File>,
    /// The length of the current segment up to the last block.
    pub(super) length: u64,
    /// The first segment that is not a spare file yet.
    pub(super) first: u32,
    /// The segment with which recovery begins.
    pub(super) checkpoint: u32,
    /// The segment in which the current checkpoint began, until all of it is on the disk.
    pub(super) begun: Option<u32>,
    pub(super) epoch: u64,
    /// Files that are ready to become segments.
    pub(super) spare: VecDeque<PathBuf>,
    /// The number of the last spare file.
    pub(super) spares: u64,
    pub(super) next_attempt: Instant,
}

impl Writer {
    /// Writes until the journal closes. Fails if not everything could be written.
    pub(super) fn run(mut self) -> Result<(), String> {
        let mut taken = Taken::default();
        loop {
            self.buffer.take(&mut taken, PATIENCE);
            if self.file.is_none() {
                self.try_again();
            } else {
                match self.write(&mut taken) {
                    Ok(()) => self.buffer.written(taken.last),
                    Err(error) => self.failed(&error),
                }
                self.make_room();
                self.count_segments();
            }
            if taken.is_closing {
                let ended = self.end();
                // Nothing may wait for a writer that has ended.
                self.buffer.fail();
                return ended;
            }
        }
    }

    /// Writes the taken records.
    fn write(&mut self, taken: &mut Taken) -> io::Result<()> {
        if mem::take(&mut self.progress.state.lock().is_complete) {
            self.recycle()?;
        }
        match taken.boundary {
            Some(Boundary::Begin) => self.begun = Some(self.head.number),
            Some(Boundary::Complete) => self.checkpoint = self.begun.unwrap_or(self.checkpoint),
            None => {}
        }
        self.write_block(&mut taken.block)?;
        if self.sync == SyncPolicy::Always && taken.block.len() > BLOCK_HEAD_LENGTH {
            self.progress.timed(&self.buffer.clock, || self.file()?.sync_data())?;
        }
        if self.progress.sync_failed.swap(false, Ordering::Relaxed) {
            return Err(io::Error::other("a sync failed"));
        }
        self.progress.written(taken.last);
        Ok(())
    }

    fn write_block(&mut self, block: &mut [u8]) -> io::Result<()> {
        if block.len() == BLOCK_HEAD_LENGTH {
            return Ok(());
        }
        if self.length + block.len() as u64 > SEGMENT_LENGTH && self.length > HEAD_LENGTH as u64 {
            self.next_segment()?;
        }
        let moment = self.buffer.clock.moment();
        let head = BlockHead {
            segment: self.head.number,
            epoch: self.epoch,
            checkpoint: self.checkpoint,
            pointer: Tick(self.progress.pointer.load(Ordering::Relaxed)),
            lived_ms: self.buffer.lived_ms(moment.now),
            unix_ms: moment.unix_ms(),
            ..BlockHead::default()
        };
        head.fill_in(block);
        self.file()?.write_all_at(block, self.length)?;
        self.length += block.len() as u64;
        Ok(())
    }

    fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| io::Error::other("an earlier write failed"))
    }

    /// Begins the next segment.
    pub(super) fn next_segment(&mut self) -> io::Result<()> {
        let number = self.head.number + 1;
        let spare = match self.spare.pop_front() {
            Some(spare) => spare,
            None => self.create_spare()?,
        };
        let file = match self.folder.make_segment(&spare, number) {
            Ok(file) => file,
            Err(error) => {
                if spare.exists() {
                    self.spare.push_front(spare);
                }
                return Err(error);
            }
        };
        let (epoch, previous_length) = (self.epoch, self.length);
        let head = SegmentHead { number, epoch, previous_length, ..self.head.clone() };
        file.write_all_at(&head.encode(), 0)?;
        if self.sync == SyncPolicy::Always {
            file.sync_data()?;
            self.folder.sync()?;
        }
        (self.head, self.length) = (head, HEAD_LENGTH as u64);
        self.write_to(file)
    }

    /// Writes to a file from now on, which is the current segment.
    pub(super) fn write_to(&mut self, file: File) -> io::Result<()> {
        // The system reports a failed sync once for each time that a file was opened, and this thread syncs too.
        let other = self.folder.open_segment(self.head.number)?;
        if self.progress.unsynced.lock().len() >= MOST_UNSYNCED_SEGMENTS {
            // The disk writes, but does not sync. The answers must wait for it.
            self.progress.sync(&self.buffer.clock)?;
        }
        self.progress.has_new_name.store(true, Ordering::Relaxed);
        let mut unsynced = self.progress.unsynced.lock();
        if self.begun.is_none() && !matches!(self.sync, SyncPolicy::Every(_)) {
            unsynced.clear();
        }
        unsynced.push(Arc::new(other));
        drop(unsynced);
        self.file = Some(file);
        self.count_segments();
        Ok(())
    }

    fn count_segments(&self) {
        self.progress.segments.store(self.head.number + 1 - self.checkpoint, Ordering::Relaxed);
        let room = SEGMENT_LENGTH.saturating_sub(self.length) + SEGMENT_LENGTH * self.spare.len() as u64;
        self.progress.room.store(room, Ordering::Relaxed);
    }

    /// Makes the segments before the checkpoint spare, now that all of it is on the disk.
    fn recycle(&mut self) -> io::Result<()> {
        self.begun = None;
        for number in mem::replace(&mut self.first, self.checkpoint)..self.checkpoint {
            let segment = self.folder.segment(number);
            if segment.exists() {
                self.make_spare(&segment)?;
            }
        }
        // There is room now.
        self.next_attempt = self.buffer.clock.now();
        if self.buffer.condition() == Condition::Rebuilding {
            self.buffer.set_condition(Condition::Recording);
            info!("the journal is whole again, and messages are accepted");
        }
        self.progress.state.lock().checkpoints += 1;
        Ok(())
    }

    /// Keeps enough spare segments, and not many more. Otherwise refuses adds.
    fn make_room(&mut self) {
        let now = self.buffer.clock.now();
        if self.file.is_none() || now < self.next_attempt {
            return;
        }
        match self.create_spares(self.wanted_spares()) {
            Ok(()) if self.buffer.condition() == Condition::Full => {
                self.buffer.set_condition(Condition::Recording);
                info!("the journal has room again, and messages are accepted");
            }
            Ok(()) => {}
            Err(error) => {
                self.next_attempt = now + RETRY;
                if self.buffer.condition() == Condition::Recording {
                    self.buffer.set_condition(Condition::Full);
                    error!(%error, "the journal has no room for more messages: adds are refused, and acknowledgements count; make room on the disk of --journal");
                }
            }
        }
    }

    /// Returns the number of spare segments for the next changes, for the rest of a whole checkpoint, and for the Acks of
    /// all messages in flight. So a checkpoint can always be written, and frees what was written before it.
    fn wanted_spares(&self) -> usize {
        let acks = ACK_LENGTH * self.progress.in_flight.load(Ordering::Relaxed);
        let reserved = whole_segments(self.progress.checkpoint_bytes() + acks);
        let used = self.begun.map_or(0, |begun| self.head.number - begun);
        1 + reserved.saturating_sub(used as usize)
    }

    /// Creates spare segments until there are so many. Removes one if there are many more.
    fn create_spares(&mut self, wanted: usize) -> io::Result<()> {
        if self.spare.len() > wanted + whole_segments(self.progress.checkpoint_at())
            && let Some(spare) = self.spare.pop_back()
        {
            // If it stays, the next start finds it.
            let _ = fs::remove_file(spare);
        }
        while self.spare.len() < wanted {
            let spare = self.create_spare()?;
            self.spare.push_back(spare);
        }
        Ok(())
    }

    /// Makes a segment that is no longer needed a spare file.
    pub(super) fn make_spare(&mut self, segment: &Path) -> io::Result<()> {
        self.spares += 1;
        self.spare.push_back(self.folder.make_spare(segment, self.spares)?);
        Ok(())
    }

    fn create_spare(&mut self) -> io::Result<PathBuf> {
        self.spares += 1;
        self.folder.create_spare(self.spares)
    }

    #[cold]
    pub(super) fn failed(&mut self, error: &io::Error) {
        error!(%error, "the journal could not be written: adds are refused, and acknowledgements count, but a crash would forget them; look at the disk of --journal");
        self.file = None;
        self.progress.forget_unsynced();
        // Before the failure counts, so that no checkpoint begins that counts it and loses its first record.
        self.buffer.fail();
        self.progress.failed();
        self.begun = None;
        self.next_attempt = self.buffer.clock.now() + RETRY;
    }

    /// Begins a new segment after a failure, once the disk has room for a whole checkpoint and syncs. The wheel in memory
    /// is right, so the checkpoint replaces the log.
    fn try_again(&mut self) {
        let now = self.buffer.clock.now();
        if now < self.next_attempt {
            return;
        }
        self.next_attempt = now + RETRY;
        let (head, length) = (self.head.clone(), self.length);
        let wanted = whole_segments(self.progress.checkpoint_bytes());
        let attempt =
            self.next_segment().and_then(|()| self.create_spares(wanted)).and_then(|()| self.file()?.sync_data());
        if attempt.is_ok() {
            self.buffer.set_condition(Condition::Rebuilding);
            self.progress.request_checkpoint();
            info!("the journal can be written again: a checkpoint replaces what is missing in it");
            return;
        }
        self.file = None;
        self.progress.forget_unsynced();
        // The segment of an attempt that failed is spare again, so that attempts take no room.
        if self.head.number > head.number && self.make_spare(&self.folder.segment(self.head.number)).is_ok() {
            (self.head, self.length) = (head, length);
        }
    }

    /// Syncs everything. Fails if not everything is written.
    fn end(&mut self) -> Result<(), String> {
        if self.buffer.condition() == Condition::Failed || self.buffer.condition() == Condition::Rebuilding {
            return Err(String::from("the journal could not be written"));
        }
        self.progress.sync(&self.buffer.clock).map_err(|error| error.to_string())
    }
}
