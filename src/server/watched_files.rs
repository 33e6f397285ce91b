//! Keeps a value that is made from files, such as a token or a certificate. Makes the value again when the content of a
//! file changes.
//!
//! The files are read twice a second, and their content is compared. Their modification time would not show every change,
//! because `cp -p`, rsync and mounted volumes may keep it. The files are read in Tokio's blocking pool, so that a
//! hanging file system does not block tasks that use the value.

use std::fmt;
use std::io::{self, Read};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::process::files::open_regular;

/// How often the files are read.
const INTERVAL: Duration = Duration::from_millis(500);

/// How long changed content must stay the same before it is used, because another process may still be writing the
/// file.
const SETTLE_TIME: Duration = Duration::from_millis(50);

/// How long reading may take before a warning is logged.
const SLOW: Duration = Duration::from_secs(5);

/// The maximum length of a file, in bytes.
const MAX_LENGTH: u64 = 1024 * 1024;

/// A value made from the last usable content of its files.
pub(super) struct WatchedFiles<T> {
    make: fn(&[FileContent]) -> io::Result<T>,
    current: RwLock<Arc<Made<T>>>,
    /// The reason why the newest content cannot be used; `None` if it can be used.
    error: Mutex<Option<String>>,
}

/// A value, and the files from which it was made.
pub(super) struct Made<T> {
    files: Vec<FileContent>,
    pub(super) value: T,
}

/// A file and its content, without a byte order mark.
#[derive(PartialEq, Eq)]
pub(super) struct FileContent {
    pub(super) path: PathBuf,
    pub(super) bytes: Vec<u8>,
}

impl<T: Send + Sync + 'static> WatchedFiles<T> {
    /// Reads the files and makes the value with `make`. An error names the file.
    pub(super) fn new(
        paths: &[PathBuf],
        make: fn(&[FileContent]) -> io::Result<T>,
    ) -> io::Result<WatchedFiles<T>> {
        let files = paths.iter().map(|path| FileContent::read(path)).collect::<io::Result<Vec<_>>>()?;
        let current = Made { value: make(&files)?, files };
        Ok(WatchedFiles { make, current: RwLock::new(Arc::new(current)), error: Mutex::default() })
    }

    /// Returns the value that was made last. Never waits for a file.
    pub(super) fn current(&self) -> Arc<Made<T>> {
        Arc::clone(&self.current.read())
    }

    /// Waits half a second, then checks the files. Logs that the value is new, or why the new content cannot be used. Logs
    /// the same reason only once in a row. `what` names the value in these lines, and `remedy` says how to repair the
    /// files. Returns whether the value is new.
    pub(super) async fn next_check(&self, what: &str, remedy: &str) -> bool {
        sleep(INTERVAL).await;
        let checked = self.check().await;
        match &checked {
            Ok(true) => info!(paths = ?self.current().files, "the {what} has changed and was read again"),
            Ok(false) => {}
            Err(error) => warn!(%error, "the changed {what} cannot be used, and the old {what} stays: {remedy}"),
        }
        checked.unwrap_or(false)
    }

    /// Reads the files, and makes the value again if their content has changed. Returns whether the value is new. If
    /// the previous check failed with the same error, returns `false` instead of the error.
    pub(super) async fn check(&self) -> io::Result<bool> {
        let (current, make) = (self.current(), self.make);
        let mut reading = tokio::task::spawn_blocking(move || current.read_again(make));
        let read = if let Ok(read) = timeout(SLOW, &mut reading).await {
            read
        } else {
            warn!(
                paths = ?self.current().files,
                "files cannot be read again, and their old content stays: their file system does not answer"
            );
            reading.await
        };
        // The task cannot fail: a panic in it would end the process.
        let read = read.unwrap_or(Ok(None));
        let error = read.as_ref().err().map(ToString::to_string);
        let is_known = mem::replace(&mut *self.error.lock(), error.clone()) == error;
        match read {
            Ok(None) => Ok(false),
            Ok(Some(new)) => {
                *self.current.write() = Arc::new(new);
                Ok(true)
            }
            Err(_) if is_known => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl<T> Made<T> {
    /// Makes the value from the present content of the files. Returns `None` if the content is unchanged, or is still
    /// being written.
    fn read_again(&self, make: fn(&[FileContent]) -> io::Result<T>) -> io::Result<Option<Made<T>>> {
        let paths = || self.files.iter().map(|file| &file.path);
        let read = || paths().map(|path| FileContent::read(path)).collect::<io::Result<Vec<_>>>();
        let found = read()?;
        if found == self.files {
            return Ok(None);
        }
        thread::sleep(SETTLE_TIME);
        if read()? != found {
            return Ok(None);
        }
        Ok(Some(Made { value: make(&found)?, files: found }))
    }
}

/// Shows the files only: the value may be secret.
impl<T> fmt::Debug for WatchedFiles<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.current.read().files.fmt(f)
    }
}

/// Shows the path only: the content may be secret.
impl fmt::Debug for FileContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.fmt(f)
    }
}

impl FileContent {
    /// Reads a regular file. Refuses files of more than 1 MiB and files in UTF-16. An error names the file.
    pub(super) fn read(path: &Path) -> io::Result<FileContent> {
        let mut content = FileContent { path: path.to_owned(), bytes: Vec::new() };
        let read = open_regular(path).and_then(|file| file.take(MAX_LENGTH + 1).read_to_end(&mut content.bytes));
        read.map_err(|error| content.error(&error))?;
        if content.bytes.len() as u64 > MAX_LENGTH {
            return Err(content.error(&format_args!("this file is longer than {MAX_LENGTH} bytes")));
        }
        if content.bytes.starts_with(b"\xff\xfe") || content.bytes.starts_with(b"\xfe\xff") {
            return Err(content.error(&"this file is in UTF-16: save it as UTF-8"));
        }
        if content.bytes.starts_with("\u{feff}".as_bytes()) {
            content.bytes.drain(.."\u{feff}".len());
        }
        Ok(content)
    }

    /// Returns an error that names the file and the fault.
    pub(super) fn error(&self, why: &dyn fmt::Display) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::slice::from_ref;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn text(files: &[FileContent]) -> io::Result<String> {
        let text = String::from_utf8_lossy(&files[0].bytes).into_owned();
        if text.is_empty() { Err(files[0].error(&"empty")) } else { Ok(text) }
    }

    #[tokio::test]
    async fn new_content_makes_a_new_value_and_each_error_is_returned_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "first").unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let write = |text: &str| {
            fs::write(&path, text).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        };
        let watched = WatchedFiles::new(from_ref(&path), text).unwrap();
        assert!(!watched.check().await.unwrap());
        write("other");
        assert!(watched.check().await.unwrap());
        assert_eq!(watched.current().value, "other");
        write("");
        assert!(matches!(watched.check().await, Err(error) if error.to_string().contains("file: empty")));
        assert!(!watched.check().await.unwrap());
        fs::remove_file(&path).unwrap();
        assert!(watched.check().await.is_err(), "a missing file is another error than an empty file");
        assert_eq!(watched.current().value, "other", "the old value stays");
        write_new(&path, "other");
        assert!(!watched.check().await.unwrap(), "the file has its old content again");
    }

    fn write_new(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
    }

    #[tokio::test]
    async fn a_pipe_in_the_place_of_a_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "first").unwrap();
        let watched = WatchedFiles::new(from_ref(&path), text).unwrap();
        fs::remove_file(&path).unwrap();
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(WatchedFiles::new(from_ref(&path), text).is_err(), "nor at the start");
        assert!(matches!(watched.check().await, Err(error) if error.to_string().contains("no regular file")));
        assert_eq!(watched.current().value, "first");
    }

    #[test]
    fn a_byte_order_mark_is_no_content_and_utf_16_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "\u{feff}secret").unwrap();
        assert_eq!(FileContent::read(&path).unwrap().bytes, b"secret");
        fs::write(&path, b"\xff\xfes\0e\0").unwrap();
        let error = FileContent::read(&path).err().unwrap().to_string();
        assert!(error.contains("file: this file is in UTF-16: save it as UTF-8"), "{error}");
        fs::write(&path, vec![b'x'; 1024 * 1024 + 1]).unwrap();
        assert!(FileContent::read(&path).is_err());
    }
}
