//! The journal of a memory store: one log with incremental checkpoints, which keeps messages, batches and groups across
//! the end of the process.
//!
//! ```text
//!  requests, ticks, batches ──▶ Buffer ──▶ Writer ──▶ log-00000007 … log-00000012
//!        ▲                        │                        │
//!        └─ answers, once written ┘                        └──▶ recovery ──▶ wheel, outbox
//!  Checkpoint: walks through the wheel, and appends all of it to the same log
//! ```
//!
//! # Rules
//!
//! 1. A change is appended under the lock under which it is made. So the order of the log is the order of the changes,
//!    and the replay of the log gives the wheel.
//! 2. No answer, batch or tick leaves the store before all records up to that moment are written. Only the threads of
//!    the journal wait for the disk.
//! 3. A checkpoint is a part of the log: it appends every entry as it is at that moment, while requests go on. Once it is
//!    complete and on the disk, the segments before that of its first record are used again.
//! 4. After a failed write or sync nothing more is written to that segment. The wheel in memory is right, and a
//!    checkpoint in new segments replaces the log.

mod buffer;
mod checkpoint;
mod condition;
mod folder;
mod log;
mod options;
mod outbox_replay;
mod progress;
mod records;
mod recovery;
mod segment;
#[cfg(test)]
mod tests;
mod waiting;
mod writer;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::{error, warn};

pub(super) use self::buffer::Buffer;
use self::checkpoint::Checkpointer;
pub(super) use self::condition::Condition;
use self::folder::{Folder, Found};
pub use self::log::Damage;
use self::log::Log;
pub use self::options::{JournalError, JournalOptions, Recovered, SyncPolicy};
use self::progress::Progress;
pub(super) use self::records::Event;
use self::segment::SegmentHead;
#[cfg(fuzzing)]
pub use self::segment::first_segment_of;
use self::writer::Writer;
use super::options::MemoryOptions;
use super::outbox::MemoryOutbox;
use super::wheel::MemoryWheel;
use crate::clock::Clock;
use crate::core::{GroupName, JournalStatus, Tick};
use crate::process::parking;

/// A journal that is open.
pub(super) struct Journal {
    pub(super) buffer: Arc<Buffer>,
    progress: Arc<Progress>,
    /// The writer, until it is closed.
    writer: Mutex<Option<JoinHandle<Result<(), String>>>>,
    pub(super) path: PathBuf,
    /// The number of damaged parts at the start.
    damaged: u64,
}

impl Journal {
    /// Opens a journal, and rebuilds the wheel and the outbox that it keeps.
    pub(super) fn open(
        journal: &JournalOptions,
        options: MemoryOptions,
        clock: &Arc<Clock>,
    ) -> Result<(Journal, Arc<MemoryWheel>, Recovered), JournalError> {
        let moment = clock.moment();
        let folder = Arc::new(Folder::open(&journal.folder)?);
        let found = folder.find()?;
        if let Some((head, _)) = found.segments.iter().find(|(head, _)| head.wheel != options.wheel) {
            let path = journal.folder.clone();
            return Err(JournalError::OtherWheel { path, saved: head.wheel, asked: options.wheel });
        }
        let mut log = Log::open(&found, options.wheel)?;
        let last_epoch = log.last_epoch().max(folder.last_epoch());
        let epoch = moment.unix_ms().max(last_epoch + 1);
        let lived = Duration::from_millis(log.lived_ms());
        let origin = moment.now.checked_sub(lived).unwrap_or(moment.now);
        let names = folder.open_names().map_err(|cause| JournalError::Io {
            what: "open",
            path: journal.folder.clone(),
            cause,
        })?;
        let progress = Arc::new(Progress::new(names));
        let buffer = Arc::new_cyclic(|buffer: &Weak<Buffer>| {
            let buffer = Weak::clone(buffer);
            let wakes_late = parking::on_park(move || {
                if let Some(buffer) = buffer.upgrade() {
                    buffer.wake_writer();
                }
            });
            Buffer::new(clock, origin, wakes_late)
        });
        let outbox = Arc::new(MemoryOutbox::with_journal(options.retention, moment.now, Arc::clone(&buffer)));
        let start = Tick(moment.unix_ms() / u64::from(options.wheel.tick_ms()));
        let wheel = Arc::new(MemoryWheel {
            origin,
            journal: Some(Arc::clone(&buffer)),
            ..MemoryWheel::new(options, (epoch, start), outbox, moment.now)
        });
        let in_flight = log.apply(&folder, &wheel, moment)?;
        for Damage { path, offset, bytes } in &log.damages {
            error!(
                path = %path.display(), offset, bytes,
                "a part of the journal is damaged: the messages in it are lost, and all others are kept; check the disk"
            );
        }
        let recovered = Recovered { in_flight, is_old: log.checkpoint().is_some(), damages: log.damages.clone() };
        let writer = open_writer(&folder, found, &log, &wheel, &buffer, &progress, journal.sync)
            .map_err(|cause| JournalError::Io { what: "write to", path: journal.folder.clone(), cause })?;
        let checkpointer = Checkpointer::new(&wheel, &buffer, &progress);
        let started = start_threads(writer, checkpointer, journal.sync, &progress, clock);
        let writer = started.map_err(JournalError::Thread)?;
        if !recovered.is_old {
            buffer.append_event(&Event::Opened { group: GroupName::default_group(), next: 0 });
        }
        let damaged = recovered.damages.len() as u64;
        let (writer, path) = (Mutex::new(Some(writer)), journal.folder.clone());
        Ok((Journal { buffer, progress, writer, path, damaged }, wheel, recovered))
    }

    pub(super) fn status(&self) -> JournalStatus {
        let state = self.progress.state.lock();
        JournalStatus {
            damaged: self.damaged,
            log_bytes: self.progress.log_bytes(),
            unwritten_bytes: self.buffer.unwritten(),
            is_refusing: self.buffer.condition() != Condition::Recording || !self.buffer.is_prompt(),
            errors: state.failures,
            syncs: state.syncs,
            sync_seconds: state.sync_time.as_secs_f64(),
        }
    }

    /// Writes everything, and ends the threads. Fails if not everything could be written.
    pub(super) fn close(&self) -> Result<(), String> {
        self.begin_closing();
        let Some(writer) = self.writer.lock().take() else { return Ok(()) };
        writer.join().unwrap_or_else(|_| Err(String::from("its thread panicked")))
    }

    fn begin_closing(&self) {
        self.buffer.close();
        self.progress.state.lock().is_closing = true;
        self.progress.changed.notify_all();
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.begin_closing();
    }
}

/// Returns the writer of this process. It goes on in the last segment, so that a start needs no room.
fn open_writer(
    folder: &Arc<Folder>,
    found: Found,
    log: &Log,
    wheel: &MemoryWheel,
    buffer: &Arc<Buffer>,
    progress: &Arc<Progress>,
    sync: SyncPolicy,
) -> io::Result<Writer> {
    folder.record_epoch(wheel.epoch)?;
    progress.pointer.store(wheel.pointer().0, Ordering::Relaxed);
    let last_number = log.segments.last().map_or(0, |(head, _)| head.number);
    let checkpoint = log.checkpoint().unwrap_or(last_number + 1);
    let spares = found.spare.iter().filter_map(|path| number_of(path)).max().unwrap_or(0);
    let first = SegmentHead {
        number: last_number,
        wheel: wheel.shards.options.wheel,
        epoch: wheel.epoch,
        previous_length: 0,
    };
    let last = found.segments.last().filter(|(head, _)| head.number == last_number && log.checkpoint().is_some());
    let mut writer = Writer {
        folder: Arc::clone(folder),
        buffer: Arc::clone(buffer),
        progress: Arc::clone(progress),
        sync,
        head: last.map_or(first, |(head, _)| head.clone()),
        file: None,
        length: log.length,
        first: checkpoint,
        checkpoint,
        begun: None,
        epoch: wheel.epoch,
        spare: found.spare.into(),
        spares,
        next_attempt: buffer.clock.now(),
    };
    // The end of the log may not be on the disk yet. Others are told of it, and what it replaces is used again. With an
    // interval, the process before may have left other segments too that it had not synced.
    let unsynced = if sync == SyncPolicy::None { log.last_segment() } else { 0 };
    for (_, path) in log.segments.iter().filter(|(head, _)| head.number >= unsynced) {
        File::open(path)?.sync_data()?;
    }
    folder.sync()?;
    let is_old = |(head, _): &&(SegmentHead, PathBuf)| head.number < checkpoint;
    for segment in log.segments.iter().filter(is_old).map(|(_, path)| path).chain(&found.empty) {
        writer.make_spare(segment)?;
    }
    match last {
        Some(_) => writer.write_to(folder.open_segment(last_number)?)?,
        None => writer.next_segment()?,
    }
    Ok(writer)
}

/// Returns the number at the end of the name of a file.
fn number_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.rsplit('-').next()?.parse().ok()
}

fn start_threads(
    writer: Writer,
    checkpointer: Checkpointer,
    sync: SyncPolicy,
    progress: &Arc<Progress>,
    clock: &Arc<Clock>,
) -> io::Result<JoinHandle<Result<(), String>>> {
    let start = |name: &str| thread::Builder::new().name(name.to_owned());
    let writer = start("journal").spawn(move || writer.run())?;
    start("checkpoint").spawn(move || checkpointer.run())?;
    if let SyncPolicy::Every(interval) = sync {
        let (progress, clock) = (Arc::clone(progress), Arc::clone(clock));
        start("journal-sync").spawn(move || sync_at_intervals(&progress, &clock, interval))?;
    }
    Ok(writer)
}

/// Syncs again and again, until the journal closes.
fn sync_at_intervals(progress: &Progress, clock: &Clock, interval: Duration) {
    loop {
        {
            let mut state = progress.state.lock();
            while !state.is_closing && !progress.changed.wait_for(&mut state, interval).timed_out() {}
            if state.is_closing {
                return;
            }
        }
        if let Err(error) = progress.sync(clock) {
            warn!(%error, "the journal could not be synced");
        }
    }
}
