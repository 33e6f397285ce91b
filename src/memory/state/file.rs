//! The state file: where a memory store is kept across a planned restart.
//!
//! Layout: the magic, then u32 CRC-32 and u64 length of what follows (little-endian), then [`Saved`] in
//! postcard. It is written beside its place, synced and renamed, so that there is a whole file or none; and
//! it is removed once it was taken over, so that a later crash cannot bring an old wheel back. A file beside it that
//! stays is locked from the start on: two sidecars with one state file would each lose the other's wheel. While a wheel
//! is in use it has one byte, and none once that is kept or over: so a sidecar knows that the one before did not drain.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crc32fast::Hasher;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use serde::Serialize;
use tracing::{error, warn};

use super::attempt::Attempt;
use super::saved::Saved;
use crate::core::tick::Wheel;

/// The first bytes of a state file; the digit is the version of its layout.
const MAGIC: &[u8; 16] = b"ackwheel state 1";
const HEAD_LENGTH: usize = MAGIC.len() + 4 + 8;

/// So much goes to the system at once.
const BUFFER: usize = 1 << 16;

/// The ending of what it is written into.
const NEW: &str = ".new";

/// The ending of what is locked.
const LOCK: &str = ".lock";

/// Why a state file could not be used.
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
    /// Another process keeps its wheel there.
    #[error("another sidecar keeps its wheel in {path}: give each one a --state of its own")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file is not what was written.
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
    /// The file is of a ring of other dimensions.
    #[error(
        "{path} was written by a ring of {} slots and {}ms ticks, and this one has {} slots and {}ms ticks: \
         start with --slots {} --tick {}ms, or move the file away to start with an empty wheel",
        saved.slots(), saved.tick_ms(), asked.slots(), asked.tick_ms(), saved.slots(), saved.tick_ms()
    )]
    OtherWheel {
        /// The file.
        path: PathBuf,
        /// The dimensions that it holds.
        saved: Wheel,
        /// The dimensions asked for.
        asked: Wheel,
    },
}

/// A state file, which may be there or not.
#[derive(Debug)]
pub(in crate::memory) struct StateFile {
    path: PathBuf,
    /// Locked as long as it is open.
    lock: File,
}

impl StateFile {
    /// Locks it, so that no other process uses it.
    pub(in crate::memory) fn open(path: PathBuf) -> Result<StateFile, StateError> {
        let failed = |what, cause| StateError::Io { what, path: path.clone(), cause };
        // A device or a pipe may have no end.
        if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Err(failed("read", io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")));
        }
        let lock = open_beside(&path, LOCK).map_err(|cause| failed("write", cause))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(StateError::InUse { path }),
            Err(TryLockError::Error(error)) => {
                warn!(%error, "the state file cannot be locked where it is: see that no other sidecar has this --state");
            }
        }
        Ok(StateFile { path, lock })
    }

    pub(in crate::memory) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the wheel of the sidecar before was in use to its end.
    pub(in crate::memory) fn is_in_use(&self) -> bool {
        self.lock.metadata().is_ok_and(|metadata| metadata.len() > 0)
    }

    /// Notes whether a wheel is in use that a crash would lose. That needs no room on the disk.
    pub(in crate::memory) fn mark_in_use(&self, in_use: bool) {
        if let Err(error) = self.lock.set_len(u64::from(in_use)).and_then(|()| self.lock.sync_all()) {
            warn!(%error, "the next sidecar will not know whether this one drained: see that the folder of --state can be written");
        }
    }

    /// Reads it, if it is there, and makes sure that it can be written.
    pub(in crate::memory) fn load(&self, wheel: Wheel) -> Result<Option<Saved>, StateError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let written = open_beside(&self.path, NEW).and_then(|_| fs::remove_file(beside(&self.path, NEW)));
                return written.map(|()| None).map_err(|cause| self.error("write", cause));
            }
            Err(cause) => return Err(self.error("read", cause)),
        };
        let damaged = |why| StateError::Damaged { path: self.path.clone(), why };
        let saved = decode(&bytes).map_err(damaged)?;
        let saved_wheel = saved.wheel().map_err(damaged)?;
        if saved_wheel != wheel {
            return Err(StateError::OtherWheel { path: self.path.clone(), saved: saved_wheel, asked: wheel });
        }
        Ok(Some(saved))
    }

    /// Removes it, once it was taken over.
    pub(in crate::memory) fn consume(&self) -> Result<(), StateError> {
        match fs::remove_file(&self.path) {
            Ok(()) => {
                // Its state is in memory alone now, also if the folder cannot be synced.
                if let Err(error) = self.sync_folder() {
                    warn!(
                        %error,
                        "the folder of the state file could not be synced: a power cut within seconds may bring the old wheel back"
                    );
                }
                Ok(())
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(cause) => Err(self.error("remove", cause)),
        }
    }

    /// Makes room for so many bytes, at the begin of a drain; whether [`StateFile::save`] can be relied on.
    pub(in crate::memory) fn reserve(&self, bytes: u64) -> bool {
        let reserved = open_beside(&self.path, NEW).and_then(|file| {
            match retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, bytes)) {
                // There are file systems that cannot tell.
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
                Err(error) => Err(error.into()),
            }
        });
        if let Err(cause) = reserved {
            error!(
                error = %self.give_up(cause),
                "the wheel cannot be kept: what is in flight is delivered now instead, in batches flagged drained"
            );
            return false;
        }
        true
    }

    /// Writes it, as it is read by [`StateFile::load`]; it takes no memory worth naming. An attempt that is abandoned
    /// leaves the file as it was.
    pub(super) fn save(&self, saved: &impl Serialize, attempt: &Attempt) -> Result<(), StateError> {
        let write = || -> io::Result<()> {
            attempt.check()?;
            let mut file = open_beside(&self.path, NEW)?;
            // The head is of what follows, so it comes last.
            file.seek(SeekFrom::Start(HEAD_LENGTH as u64))?;
            let (crc, length) = write_body(saved, &mut file, attempt)?;
            file.set_len(HEAD_LENGTH as u64 + length)?;
            file.rewind()?;
            file.write_all(&[MAGIC, &crc.to_le_bytes()[..], &length.to_le_bytes()].concat())?;
            file.sync_all()?;
            attempt.finish(|| fs::rename(beside(&self.path, NEW), &self.path))
        };
        write().map_err(|cause| self.give_up(cause))?;
        if let Err(error) = self.sync_folder() {
            warn!(
                %error,
                "the folder of the state file could not be synced: the wheel is kept, unless the power fails within seconds"
            );
        }
        Ok(())
    }

    /// Abandons an attempt to write it, and removes what was written; returns whether it is not in its place.
    pub(super) fn abandon(&self, attempt: &Attempt) -> bool {
        let is_abandoned = attempt.abandon();
        if is_abandoned {
            let _ = fs::remove_file(beside(&self.path, NEW));
        }
        is_abandoned
    }

    /// Removes the unfinished file: a part of a state is of no use, and the disk may be full.
    fn give_up(&self, cause: io::Error) -> StateError {
        let _ = fs::remove_file(beside(&self.path, NEW));
        self.error("write", cause)
    }

    fn error(&self, what: &'static str, cause: io::Error) -> StateError {
        StateError::Io { what, path: self.path.clone(), cause }
    }

    /// Makes a rename or a removal last, a power cut included; where the file system can, and we may read the folder.
    fn sync_folder(&self) -> io::Result<()> {
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let synced = File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all());
        match synced {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                ) =>
            {
                Ok(())
            }
            synced => synced,
        }
    }
}

/// Opens a file beside it. Bytes that are there, such as reserved room, stay until they are overwritten. A pipe of that
/// name is an error: to wait for its reader would be to hang.
fn open_beside(path: &Path, ending: &str) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options.open(beside(path, ending))
}

fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// Returns the checksum of what was written, and its length.
fn write_body(saved: &impl Serialize, file: &mut File, attempt: &Attempt) -> io::Result<(u32, u64)> {
    let mut body =
        BufWriter::with_capacity(BUFFER, Body { file, attempt, crc: Hasher::new(), length: 0, failed: None });
    let written = postcard::to_io(saved, &mut body).map(drop);
    let (Body { crc, length, failed, .. }, _) = body.into_parts();
    match written {
        Ok(()) => Ok((crc.finalize(), length)),
        // The error does not say why. A type that postcard cannot write could fail too, and a state has none.
        Err(_) => Err(failed.unwrap_or_else(|| io::ErrorKind::WriteZero.into())),
    }
}

/// The writer of all that follows the head.
struct Body<'a> {
    file: &'a mut File,
    attempt: &'a Attempt,
    crc: Hasher,
    length: u64,
    failed: Option<io::Error>,
}

impl Write for Body<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match self.attempt.check().and_then(|()| self.file.write(bytes)) {
            Ok(written) => written,
            Err(error) => {
                let kind = error.kind();
                self.failed = Some(error);
                return Err(kind.into());
            }
        };
        self.crc.update(&bytes[..written]);
        self.length += written as u64;
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
        return Err(String::from("it begins with other bytes"));
    }
    let (crc, length) = numbers.split_at(4);
    if length != (body.len() as u64).to_le_bytes() {
        return Err(format!("its length is not the {} bytes that follow", body.len()));
    }
    if crc != crc32fast::hash(body).to_le_bytes() {
        return Err(String::from("its checksum is wrong"));
    }
    postcard::from_bytes(body).map_err(|error| error.to_string())
}
