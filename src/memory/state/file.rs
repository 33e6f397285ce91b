//! The state file, which keeps the content of a memory store across a planned restart.
//!
//! Layout: the magic bytes, the CRC-32 of the body (u32), the length of the body (u64), and the body. Numbers are
//! little-endian. The body is [`Saved`] in the postcard format.
//!
//! - The state is written to a new file in the same folder, synced and renamed. So a state file is always complete.
//! - The state file is removed after it is restored, so that a later crash cannot bring an old state back.
//! - A lock file in the same folder is locked from the start of the sidecar. Otherwise two sidecars with the same
//!   state file would overwrite each other's state. The lock file is never removed. Its length is a flag: one byte
//!   means that a crash would lose messages. No byte means that the state is saved, or that nothing is left to save.
//!   By this flag the next sidecar sees whether the previous one drained.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crc32fast::Hasher;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use serde::Serialize;
use tracing::warn;

use super::private_file::{OTHERS, beside, open_beside, open_own};
use super::saved::Saved;
use crate::core::Wheel;

/// The first bytes of a state file. The digit is the version of the layout.
const MAGIC: &[u8; 16] = b"ackwheel state 1";
const HEAD_LENGTH: usize = MAGIC.len() + 4 + 8;

/// The size of the write buffer in bytes.
const BUFFER: usize = 1 << 16;

/// The ending of the name of the new file, which is renamed once it is complete.
const NEW: &str = ".new";

/// The ending of the name of the lock file.
const LOCK: &str = ".lock";

/// How long [`Attempt::abandon`] waits for a rename that is in progress.
const RENAME_TIMEOUT: Duration = Duration::from_millis(500);

/// The reason why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Reading or writing failed.
    #[error("cannot {what} the state file {path}: {cause}; check --state and the permissions of its folder")]
    Io {
        /// The action that failed.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// Another process uses the state file.
    #[error("another sidecar keeps its wheel in {path}: give each sidecar its own --state")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file is not a complete state file of this version.
    #[error(
        "{path} is not a whole state file of this version ({why}): move it away to start with an empty wheel, \
         or name another with --state"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// The file was written by a ring of other dimensions.
    #[error(
        "{path} was written by a ring of {} slots and {}ms ticks, and this one has {} slots and {}ms ticks: \
         start with --slots {} --tick {}ms, or move the file away to start with an empty wheel",
        saved.slots(), saved.tick_ms(), asked.slots(), asked.tick_ms(), saved.slots(), saved.tick_ms()
    )]
    OtherWheel {
        /// The file.
        path: PathBuf,
        /// The dimensions in the file.
        saved: Wheel,
        /// The dimensions of this ring.
        asked: Wheel,
    },
}

/// The path of a state file, and the lock on it. The state file itself need not exist yet.
#[derive(Debug)]
pub(in crate::memory) struct StateFile {
    pub(super) path: PathBuf,
    /// The lock file. It stays locked while it is open.
    lock: File,
}

impl StateFile {
    /// Locks the state file, so that no other process uses it.
    pub(in crate::memory) fn open(path: PathBuf) -> Result<StateFile, StateError> {
        let failed = |what, cause| StateError::Io { what, path: path.clone(), cause };
        // Reading a device or a pipe might never end.
        if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Err(failed("read", io::Error::new(ErrorKind::InvalidInput, "it is not a file")));
        }
        let lock = open_beside(&path, LOCK).map_err(|cause| failed("write", cause))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StateError::InUse { path }),
            Err(TryLockError::Error(error)) => {
                warn!(%error, "this file system cannot lock the state file: make sure that no other sidecar uses this --state");
            }
        }
        Ok(StateFile { path, lock })
    }

    /// Returns whether the previous sidecar ended without saving its state. Must be called before
    /// [`StateFile::mark_in_use`].
    pub(in crate::memory) fn is_in_use(&self) -> bool {
        self.lock.metadata().is_ok_and(|metadata| metadata.len() > 0)
    }

    /// Records whether a crash would lose messages from now on. This needs no room on the disk.
    pub(in crate::memory) fn mark_in_use(&self, in_use: bool) {
        if let Err(error) = self.lock.set_len(u64::from(in_use)).and_then(|()| self.lock.sync_all()) {
            warn!(%error, "the next sidecar cannot tell whether this one drained: make sure that the folder of --state is writable");
        }
    }

    /// Reads the state file. If there is none, checks that a file can be written there.
    pub(in crate::memory) fn load(&self, wheel: Wheel) -> Result<Option<Saved>, StateError> {
        let mut bytes = Vec::new();
        let opened = open_own(&self.path).and_then(|mut file| {
            file.read_to_end(&mut bytes)?;
            file.metadata()
        });
        let metadata = match opened {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let written = open_beside(&self.path, NEW).and_then(|_| fs::remove_file(beside(&self.path, NEW)));
                return written.map(|()| None).map_err(|cause| self.error("write", cause));
            }
            Err(cause) => return Err(self.error("read", cause)),
        };
        if metadata.mode() & OTHERS != 0 {
            warn!(
                path = %self.path.display(),
                "other users can read or write the state file: the next one is for this user only; see that the folder \
                 is too"
            );
        }
        let damaged = |why| StateError::Damaged { path: self.path.clone(), why };
        let saved = decode(&bytes).map_err(damaged)?;
        let saved_wheel = saved.wheel().map_err(damaged)?;
        if saved_wheel != wheel {
            return Err(StateError::OtherWheel { path: self.path.clone(), saved: saved_wheel, asked: wheel });
        }
        Ok(Some(saved))
    }

    /// Removes the state file after it is restored.
    pub(in crate::memory) fn remove(&self) -> Result<(), StateError> {
        match fs::remove_file(&self.path) {
            Ok(()) => self.sync_folder("a power cut within seconds may bring the old wheel back"),
            Err(cause) if cause.kind() == ErrorKind::NotFound => {}
            Err(cause) => return Err(self.error("remove", cause)),
        }
        Ok(())
    }

    /// Reserves this number of bytes at the beginning of a drain, so that [`StateFile::save`] does not fail for lack
    /// of room.
    pub(super) fn reserve(&self, bytes: u64) -> Result<(), StateError> {
        let reserve = |file: File| match retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, bytes)) {
            // Some file systems cannot reserve room.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        };
        open_beside(&self.path, NEW).and_then(reserve).map_err(|cause| self.give_up(cause))
    }

    /// Writes the state file, with little memory. If the attempt is abandoned, an earlier file stays as it was.
    pub(super) fn save(&self, saved: &impl Serialize, attempt: &Attempt) -> Result<(), StateError> {
        let write = || -> io::Result<()> {
            drop(attempt.check()?);
            let mut file = open_beside(&self.path, NEW)?;
            // The head contains the checksum and the length of the body, so it is written last.
            file.seek(SeekFrom::Start(HEAD_LENGTH as u64))?;
            let crc = write_body(saved, &file, attempt)?;
            let end = file.stream_position()?;
            file.set_len(end)?;
            file.rewind()?;
            let length = end - HEAD_LENGTH as u64;
            file.write_all(&[MAGIC, &crc.to_le_bytes()[..], &length.to_le_bytes()].concat())?;
            file.sync_all()?;
            let mut stage = attempt.check()?;
            fs::rename(beside(&self.path, NEW), &self.path)?;
            *stage = Stage::Renamed;
            Ok(())
        };
        write().map_err(|cause| self.give_up(cause))?;
        self.sync_folder("the wheel is kept, unless the power fails within seconds");
        Ok(())
    }

    /// Removes the unfinished file. A part of a state is of no use, and the file may fill the disk.
    pub(super) fn remove_unfinished(&self) {
        let _ = fs::remove_file(beside(&self.path, NEW));
    }

    fn give_up(&self, cause: io::Error) -> StateError {
        self.remove_unfinished();
        self.error("write", cause)
    }

    fn error(&self, what: &'static str, cause: io::Error) -> StateError {
        StateError::Io { what, path: self.path.clone(), cause }
    }

    /// Syncs the folder, so that a rename or a removal survives a power cut. If this fails, logs a warning that ends
    /// with `risk`, the consequence. Logs nothing if the file system or the permissions do not allow the sync.
    fn sync_folder(&self, risk: &str) {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let synced = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        if let Err(error) = synced
            && !matches!(
                error.kind(),
                ErrorKind::PermissionDenied | ErrorKind::InvalidInput | ErrorKind::Unsupported
            )
        {
            warn!(%error, "the folder of the state file could not be synced: {risk}");
        }
    }
}

/// An attempt to write a state file. Until the file is renamed, another thread may abandon the attempt.
#[derive(Debug, Default)]
pub(super) struct Attempt(Mutex<Stage>);

#[derive(Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Writing,
    Abandoned,
    Renamed,
}

impl Attempt {
    /// Returns an error if the attempt is abandoned. Otherwise returns the locked stage. While the caller holds this
    /// lock, the attempt cannot be abandoned.
    fn check(&self) -> io::Result<MutexGuard<'_, Stage>> {
        let stage = self.0.lock();
        if *stage == Stage::Abandoned { Err(ErrorKind::TimedOut.into()) } else { Ok(stage) }
    }

    /// Abandons the attempt. Returns false if the file is already renamed, otherwise true. If a rename is in progress,
    /// waits for its end. If the rename takes longer than [`RENAME_TIMEOUT`], returns true, although the rename may
    /// still succeed.
    pub(super) fn abandon(&self) -> bool {
        // Only a rename locks the stage for long. If the disk does not answer, this thread must not wait for the
        // rename.
        let Some(mut stage) = self.0.try_lock_for(RENAME_TIMEOUT) else { return true };
        if *stage == Stage::Renamed {
            return false;
        }
        *stage = Stage::Abandoned;
        true
    }
}

/// Writes the body. Returns its checksum.
fn write_body(saved: &impl Serialize, file: &File, attempt: &Attempt) -> io::Result<u32> {
    let mut body = BufWriter::with_capacity(BUFFER, Body { file, attempt, crc: Hasher::new(), failed: None });
    let written = postcard::to_io(saved, &mut body).map(drop);
    let (Body { crc, failed, .. }, _) = body.into_parts();
    match written {
        Ok(()) => Ok(crc.finalize()),
        // The error of postcard does not state the cause. It could also mean a type that postcard cannot write, but a
        // state has no such type.
        Err(_) => Err(failed.unwrap_or_else(|| ErrorKind::WriteZero.into())),
    }
}

/// The writer of the body.
struct Body<'a> {
    file: &'a File,
    attempt: &'a Attempt,
    crc: Hasher,
    failed: Option<io::Error>,
}

impl Write for Body<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let checked = self.attempt.check().map(drop);
        let written = checked.and_then(|()| self.file.write(bytes)).map_err(|error| {
            let kind = error.kind();
            self.failed = Some(error);
            kind
        })?;
        self.crc.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn decode(bytes: &[u8]) -> Result<Saved, String> {
    let Some((head, body)) = bytes.split_at_checked(HEAD_LENGTH) else {
        return Err(format!("it has only {} bytes", bytes.len()));
    };
    let (magic, numbers) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(String::from("it does not begin like a state file"));
    }
    let (crc, length) = numbers.split_at(4);
    if length != (body.len() as u64).to_le_bytes() {
        return Err(format!("the length in its head does not match the {} bytes that follow", body.len()));
    }
    if crc != crc32fast::hash(body).to_le_bytes() {
        return Err(String::from("its checksum is wrong"));
    }
    postcard::from_bytes(body).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_is_abandoned_or_renamed_and_never_both() {
        let (abandoned, renamed) = (Attempt::default(), Attempt::default());
        assert!(abandoned.check().is_ok() && abandoned.abandon() && abandoned.check().is_err());
        *renamed.check().unwrap() = Stage::Renamed;
        assert!(!renamed.abandon() && renamed.check().is_ok());
    }

    #[test]
    fn an_abandoned_attempt_leaves_the_file_as_it_was_and_a_failed_rename_is_not_complete() {
        let folder = tempfile::tempdir().unwrap();
        let file = StateFile::open(folder.path().join("state")).unwrap();
        fs::write(&file.path, "old").unwrap();
        let abandoned = Attempt::default();
        assert!(abandoned.abandon() && file.save(&1_u32, &abandoned).is_err());
        assert_eq!(fs::read(&file.path).unwrap(), b"old");
        assert!(!beside(&file.path, NEW).exists());
        let saved = Attempt::default();
        assert!(file.save(&1_u32, &saved).is_ok() && !saved.abandon());
        // A file cannot replace a folder, so the rename fails.
        fs::remove_file(&file.path).unwrap();
        fs::create_dir(&file.path).unwrap();
        let failed = Attempt::default();
        assert!(file.save(&1_u32, &failed).is_err() && failed.abandon());
    }
}
