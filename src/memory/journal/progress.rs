//! The state that the threads of a journal share.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::condition::Condition;
use super::folder::SEGMENT_LENGTH;
use crate::clock::Clock;

/// The minimum length of the log at which a checkpoint begins.
const SHORTEST_LOG: u64 = 4 * SEGMENT_LENGTH;

/// The bytes that a message in the wheel or in the outbox takes in a checkpoint, rounded up.
const ENTRY_BYTES: u64 = 24;

/// The room for changes that are made while a checkpoint is written, in bytes, on a full disk. Adds are refused then.
const ROOM_FOR_CHANGES: u64 = SEGMENT_LENGTH / 4;

/// The progress of a journal, which its threads share.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The folder, whose sync makes new names last.
    names: Option<File>,
    /// Whether a segment has begun since the last sync.
    pub(super) has_new_name: AtomicBool,
    /// The number of segments from the last checkpoint on.
    pub(super) segments: AtomicU32,
    /// The room in the current segment and in the spare ones, in bytes.
    pub(super) room: AtomicU64,
    pub(super) in_flight: AtomicU64,
    /// The messages in the wheel and in the outbox.
    pub(super) held: AtomicU64,
    /// The tick at which the pointer stood a short time ago.
    pub(super) pointer: AtomicU64,
    /// Whether a sync has failed, and the writer has not noticed it yet.
    pub(super) sync_failed: AtomicBool,
    /// The segments that the next sync includes. The last one is that to which the writer writes.
    pub(super) unsynced: Mutex<Vec<Arc<File>>>,
    /// The system reports a failed sync only once. So one thread syncs at a time, and the next one sees `sync_failed`.
    syncing: Mutex<()>,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// The number of failed writes and syncs.
    pub(super) failures: u64,
    pub(super) syncs: u64,
    pub(super) sync_time: Duration,
    /// Whether a checkpoint is to begin at once.
    pub(super) is_requested: bool,
    /// The record that the current checkpoint waits for, until it is written.
    pub(super) awaited: Option<u64>,
    /// Whether a checkpoint is complete and on the disk, and what it replaces can be used again.
    pub(super) is_complete: bool,
    /// The number of complete checkpoints.
    pub(super) checkpoints: u64,
    pub(super) is_closing: bool,
}

impl Progress {
    pub(super) fn new(names: File) -> Progress {
        Progress { names: Some(names), ..Progress::default() }
    }

    /// Returns the room that the log takes from the last checkpoint on, in bytes.
    pub(super) fn log_bytes(&self) -> u64 {
        u64::from(self.segments.load(Ordering::Relaxed)) * SEGMENT_LENGTH
    }

    /// Returns the length of everything that is held, in a checkpoint.
    fn held_bytes(&self) -> u64 {
        ENTRY_BYTES * self.held.load(Ordering::Relaxed)
    }

    /// Returns the room that must be there before a checkpoint begins, in bytes. Changes that are made while it is written
    /// take some too.
    pub(super) fn checkpoint_bytes(&self) -> u64 {
        self.held_bytes() + ROOM_FOR_CHANGES
    }

    /// Returns the room that the log takes, in bytes, when a checkpoint begins.
    pub(super) fn checkpoint_at(&self) -> u64 {
        SHORTEST_LOG.max(2 * self.held_bytes())
    }

    /// Returns whether a checkpoint is due, and there is room for it. On a full disk it is due as soon as it frees room.
    pub(super) fn is_checkpoint_due(&self, condition: Condition) -> bool {
        let is_long = match condition {
            Condition::Recording => self.log_bytes() >= self.checkpoint_at(),
            Condition::Full => self.log_bytes() > SEGMENT_LENGTH + 2 * self.held_bytes(),
            Condition::Failed | Condition::Rebuilding => false,
        };
        is_long && self.room.load(Ordering::Relaxed) >= self.checkpoint_bytes()
    }

    /// Reports that all records up to `last` are written.
    pub(super) fn written(&self, last: u64) {
        if self.state.lock().awaited.take_if(|awaited| *awaited <= last).is_some() {
            self.changed.notify_all();
        }
    }

    /// Syncs everything that is written. Fails if this sync or an earlier one has failed; then the writer fails too.
    pub(super) fn sync(&self, clock: &Clock) -> io::Result<()> {
        let _syncing = self.syncing.lock();
        let files = self.unsynced.lock().clone();
        let names = self.names.iter().filter(|_| self.has_new_name.swap(false, Ordering::Relaxed));
        let synced = self.timed(clock, || {
            files.iter().try_for_each(|file| file.sync_data())?;
            names.into_iter().try_for_each(File::sync_all)
        });
        if let Err(error) = synced {
            self.has_new_name.store(true, Ordering::Relaxed);
            let unsynced = self.unsynced.lock();
            // Otherwise the writer has failed meanwhile, and uses none of these files any more.
            if files.iter().any(|file| unsynced.iter().any(|other| Arc::ptr_eq(other, file))) {
                self.sync_failed.store(true, Ordering::Relaxed);
            }
            return Err(error);
        }
        if self.sync_failed.load(Ordering::Relaxed) {
            return Err(io::Error::other("an earlier sync failed"));
        }
        // The last one may have got more meanwhile.
        let left = &files[..files.len().saturating_sub(1)];
        self.unsynced.lock().retain(|file| !left.iter().any(|left| Arc::ptr_eq(left, file)));
        Ok(())
    }

    /// Runs a sync, and measures it.
    pub(super) fn timed(&self, clock: &Clock, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let begun = clock.now();
        let result = sync();
        let mut state = self.state.lock();
        state.syncs += 1;
        state.sync_time += clock.now().saturating_duration_since(begun);
        result
    }

    /// Forgets the segments, because the journal has failed.
    pub(super) fn forget_unsynced(&self) {
        let mut unsynced = self.unsynced.lock();
        unsynced.clear();
        self.sync_failed.store(false, Ordering::Relaxed);
    }

    pub(super) fn failed(&self) {
        let mut state = self.state.lock();
        state.failures += 1;
        (state.awaited, state.is_complete) = (None, false);
        self.changed.notify_all();
    }

    pub(super) fn request_checkpoint(&self) {
        self.state.lock().is_requested = true;
        self.changed.notify_all();
    }
}

/// Returns the number of whole segments in a number of bytes.
pub(super) fn whole_segments(bytes: u64) -> usize {
    usize::try_from(bytes / SEGMENT_LENGTH).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_due_earlier_on_a_full_disk_but_only_if_there_is_room_for_it() {
        let progress = Progress::default();
        progress.held.store(7 * SEGMENT_LENGTH / 5 / ENTRY_BYTES, Ordering::Relaxed);
        let is_due = |condition, segments, room| {
            progress.segments.store(segments, Ordering::Relaxed);
            progress.room.store(room * SEGMENT_LENGTH, Ordering::Relaxed);
            progress.is_checkpoint_due(condition)
        };
        // The entries take nearly one and a half segments.
        assert!(!is_due(Condition::Recording, 3, 2));
        assert!(is_due(Condition::Recording, 4, 2));
        assert!(!is_due(Condition::Recording, 4, 1));
        assert!(!is_due(Condition::Full, 3, 2));
        assert!(is_due(Condition::Full, 4, 2));
        assert!(!is_due(Condition::Full, 4, 1));
        assert!(!is_due(Condition::Failed, 5, 2));
    }
}
