//! The folder of a journal: its lock and its files.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;
use tracing::warn;

use super::JournalError;
use super::segment::{HEAD_LENGTH, MAGIC, SegmentHead, scan};

/// The length of a new segment. Its room on the disk is there before it is used. Unit tests and
/// fuzzing have short ones, and many.
pub(super) const SEGMENT_LENGTH: u64 = if cfg!(any(test, fuzzing)) { 8 * 1_024 } else { 16 * 1_024 * 1_024 };

/// The permissions of the group and of other users.
const OTHERS: u32 = 0o077;

/// The beginning of the name of a segment. Its number follows.
const PREFIX: &str = "log-";

/// The beginning of the name of a file that is ready to become a segment.
const SPARE: &str = "spare-";

/// The name of the lock file. It is never removed.
const LOCK: &str = "lock";

/// A folder that this process has locked.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// The lock lasts as long as this file is open. It contains the epoch of the last process.
    lock: File,
}

/// The files in a folder.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The segments with a valid head, in the order of their numbers.
    pub(super) segments: Vec<(SegmentHead, PathBuf)>,
    /// The segments whose head is damaged, and which have valid blocks: the number and the epoch of the first.
    pub(super) headless: Vec<(u32, u64, PathBuf)>,
    /// The segments without a block, and without a valid head of theirs: a process ended before it had written that.
    pub(super) empty: Vec<PathBuf>,
    /// The files that are ready to become segments.
    pub(super) spare: Vec<PathBuf>,
}

impl Folder {
    /// Locks the folder, and creates it if it is missing.
    pub(super) fn open(path: &Path) -> Result<Folder, JournalError> {
        let failed = |cause| JournalError::Io { what: "open", path: path.to_owned(), cause };
        if !path.exists() {
            fs::create_dir_all(path).map_err(failed)?;
            fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(failed)?;
        }
        let lock = open_own(&path.join(LOCK), true).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(JournalError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(error)) => warn!(
                %error,
                "this file system cannot lock the journal: make sure that no other sidecar uses this --journal"
            ),
        }
        Ok(Folder { path: path.to_owned(), lock })
    }

    /// Returns the epoch of the last process, or 0.
    pub(super) fn last_epoch(&self) -> u64 {
        let mut epoch = [0; 8];
        self.lock.read_exact_at(&mut epoch, 0).map_or(0, |()| u64::from_le_bytes(epoch))
    }

    /// Records the epoch of this process. No room is needed for that, so it succeeds on a full disk too.
    pub(super) fn record_epoch(&self, epoch: u64) -> io::Result<()> {
        self.lock.write_all_at(&epoch.to_le_bytes(), 0)?;
        self.lock.sync_data()
    }

    /// Returns the path of a segment.
    pub(super) fn segment(&self, number: u32) -> PathBuf {
        self.path.join(format!("{PREFIX}{number:08}"))
    }

    /// Finds the files of the journal.
    pub(super) fn find(&self) -> Result<Found, JournalError> {
        let failed = |cause| JournalError::Io { what: "read", path: self.path.clone(), cause };
        let mut found = Found::default();
        for file in fs::read_dir(&self.path).map_err(failed)? {
            let file = file.map_err(failed)?;
            let name = file.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(SPARE) {
                found.spare.push(file.path());
            }
            let Some(number) = name.strip_prefix(PREFIX) else { continue };
            let Ok(number) = number.parse::<u32>() else { continue };
            match SegmentHead::decode(&Folder::read_at_most(&file.path(), HEAD_LENGTH)?) {
                Some(head) if head.number == number => found.segments.push((head, file.path())),
                _ => {
                    let bytes = Folder::read(&file.path())?;
                    let mut epoch = None;
                    scan(number, 0, &bytes, 0, |_, block| epoch = epoch.or(Some(block.head.epoch)));
                    if let Some(epoch) = epoch {
                        found.headless.push((number, epoch, file.path()));
                    } else if bytes.starts_with(MAGIC) || bytes.iter().all(|byte| *byte == 0) {
                        found.empty.push(file.path());
                    } else {
                        return Err(JournalError::NoSegment { path: file.path() });
                    }
                }
            }
        }
        found.segments.sort_by_key(|(head, _)| head.number);
        Ok(found)
    }

    /// Reads a whole segment.
    pub(super) fn read(path: &Path) -> Result<Vec<u8>, JournalError> {
        Folder::read_at_most(path, usize::MAX)
    }

    fn read_at_most(path: &Path, length: usize) -> Result<Vec<u8>, JournalError> {
        let room = usize::try_from(SEGMENT_LENGTH).unwrap_or(0).min(length);
        let mut bytes = Vec::with_capacity(room);
        open_own(path, false)
            .and_then(|file| file.take(length as u64).read_to_end(&mut bytes))
            .map_err(|cause| JournalError::Io { what: "read", path: path.to_owned(), cause })?;
        Ok(bytes)
    }

    /// Has the system read a segment in advance.
    pub(super) fn read_ahead(path: &Path) {
        // If it does not, the segment is read when it is needed.
        let _ = open_own(path, false).map(|file| fadvise(file, 0, None, Advice::WillNeed));
    }

    fn spare(&self, number: u64) -> PathBuf {
        self.path.join(format!("{SPARE}{number}"))
    }

    /// Makes a segment that is no longer needed a spare file. So a file with the name of a segment is never a spare one.
    pub(super) fn make_spare(&self, segment: &Path, number: u64) -> io::Result<PathBuf> {
        let path = self.spare(number);
        fs::rename(segment, &path)?;
        Ok(path)
    }

    /// Creates a file with room for a segment.
    pub(super) fn create_spare(&self, number: u64) -> io::Result<PathBuf> {
        let path = self.spare(number);
        open_own(&path, true).and_then(|file| reserve(&file)).inspect_err(|_| {
            // Its room is wanted elsewhere.
            let _ = fs::remove_file(&path);
        })?;
        Ok(path)
    }

    /// Makes a spare file a segment.
    pub(super) fn make_segment(&self, spare: &Path, number: u32) -> io::Result<File> {
        let path = self.segment(number);
        fs::rename(spare, &path)?;
        let file = open_own(&path, true)?;
        reserve(&file)?;
        Ok(file)
    }

    /// Opens a segment for writing.
    pub(super) fn open_segment(&self, number: u32) -> io::Result<File> {
        open_own(&self.segment(number), true)
    }

    /// Opens the folder itself. Its sync makes new names last.
    pub(super) fn open_names(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Makes new names last.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.open_names()?.sync_all()
    }
}

/// Makes room for a segment.
fn reserve(file: &File) -> io::Result<()> {
    // XFS asks for all of it again, also if it is there, and fails on a full disk.
    if file.metadata()?.blocks() * 512 >= SEGMENT_LENGTH {
        return Ok(());
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, SEGMENT_LENGTH)) {
        // Some file systems cannot reserve room.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Opens a file that only this user can read. Refuses a symbolic link, a pipe, and a file with another name or owner:
/// through these, another user could read or change the journal.
fn open_own(path: &Path, writes: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    options.read(true).write(writes).create(writes).truncate(false).mode(0o600);
    let refused = |why| Err(io::Error::other(format!("{} {why}: remove it", path.display())));
    let file = match options.custom_flags(flags.bits().cast_signed()).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            return refused("is a symbolic link");
        }
        opened => opened?,
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.nlink() != 1 || metadata.uid() != geteuid().as_raw() {
        return refused("is not a file of this user with one name");
    }
    if writes && metadata.mode() & OTHERS != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}
