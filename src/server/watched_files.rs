//! A value made of files, such as a token or a certificate, that is made again when the content of a file changes.
//!
//! The files are read every second and compared by content: `cp -p`, rsync and mounted volumes keep the time of
//! modification. They are read on the blocking pool, so that a file system that hangs stops no user of the value.

use std::convert::Infallible;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use rustix::fs::OFlags;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// How often the files are read.
const INTERVAL: Duration = Duration::from_secs(1);

/// Changed content is used if it is still the same after this time: a file may be in the middle of being written.
const SETTLE_TIME: Duration = Duration::from_millis(50);

/// Reading that takes longer is logged.
const SLOW: Duration = Duration::from_secs(5);

/// The longest file that is read, in bytes.
const MAX_LENGTH: u64 = 1024 * 1024;

/// A value, and the files that it is made of. Clones share both.
pub(super) struct WatchedFiles<T>(Arc<Inner<T>>);

struct Inner<T> {
    paths: Vec<PathBuf>,
    make: fn(&[FileContent]) -> io::Result<T>,
    current: RwLock<Arc<T>>,
    last_read: Mutex<LastRead>,
}

struct LastRead {
    /// The content that `current` is made of.
    used: Vec<FileContent>,
    /// Why newer content cannot be used.
    error: Option<String>,
}

/// A file and its content, without a byte order mark.
#[derive(PartialEq, Eq)]
pub(super) struct FileContent {
    path: PathBuf,
    pub(super) bytes: Vec<u8>,
}

/// The result of a check of the files.
#[derive(Debug)]
pub(super) enum Change {
    None,
    /// The value was made of new content.
    Used,
    /// The files have changed and cannot be used; the value stays. Each reason is returned once.
    Unusable(io::Error),
}

impl<T: Send + Sync + 'static> WatchedFiles<T> {
    /// Reads the files and makes the value. An error names the file.
    pub(super) fn new(
        paths: Vec<PathBuf>,
        make: fn(&[FileContent]) -> io::Result<T>,
    ) -> io::Result<WatchedFiles<T>> {
        let used = paths.iter().map(|path| FileContent::read(path)).collect::<io::Result<Vec<_>>>()?;
        let current = RwLock::new(Arc::new(make(&used)?));
        let last_read = Mutex::new(LastRead { used, error: None });
        Ok(WatchedFiles(Arc::new(Inner { paths, make, current, last_read })))
    }

    /// The value, as it was made last. Never waits for a file.
    pub(super) fn current(&self) -> Arc<T> {
        Arc::clone(&self.0.current.read())
    }

    /// Checks the files again and again, for as long as it is awaited. Logs changes of `what`, and the `remedy` if they
    /// cannot be used. Calls `after_check` after each check, with whether the value is new.
    pub(super) async fn watch(&self, what: &str, remedy: &str, mut after_check: impl FnMut(bool)) -> Infallible {
        loop {
            sleep(INTERVAL).await;
            let change = self.check_in_background().await;
            match &change {
                Change::None => {}
                Change::Used => info!(paths = ?self.0.paths, "the {what} has changed and was read again"),
                Change::Unusable(error) => {
                    warn!(%error, "the changed {what} cannot be used, and the old {what} stays: {remedy}");
                }
            }
            after_check(matches!(change, Change::Used));
        }
    }

    async fn check_in_background(&self) -> Change {
        let inner = Arc::clone(&self.0);
        let mut checking = tokio::task::spawn_blocking(move || inner.check());
        if let Ok(change) = timeout(SLOW, &mut checking).await {
            return change.unwrap_or(Change::None);
        }
        let paths = &self.0.paths;
        warn!(
            ?paths,
            "files cannot be read again, and their old content stays: their file system does not answer"
        );
        checking.await.unwrap_or(Change::None)
    }

    /// Checks the files once, and waits for their file system.
    #[cfg(test)]
    pub(super) fn check(&self) -> Change {
        self.0.check()
    }
}

impl<T> Inner<T> {
    fn check(&self) -> Change {
        let mut last_read = self.last_read.lock();
        match self.changed(&last_read.used) {
            Ok(None) => {
                last_read.error = None;
                Change::None
            }
            Ok(Some((used, value))) => {
                *self.current.write() = Arc::new(value);
                *last_read = LastRead { used, error: None };
                Change::Used
            }
            Err(error) => {
                let text = error.to_string();
                if last_read.error.replace(text.clone()) == Some(text) {
                    Change::None
                } else {
                    Change::Unusable(error)
                }
            }
        }
    }

    /// The content and its value, if the content is another than what is used.
    fn changed(&self, used: &[FileContent]) -> io::Result<Option<(Vec<FileContent>, T)>> {
        let read = || self.paths.iter().map(|path| FileContent::read_again(path)).collect::<io::Result<Vec<_>>>();
        let found = read()?;
        if found == used {
            return Ok(None);
        }
        thread::sleep(SETTLE_TIME);
        if read()? != found {
            return Ok(None);
        }
        let value = (self.make)(&found)?;
        Ok(Some((found, value)))
    }
}

/// Shows the paths only: the content may be secret.
impl<T> fmt::Debug for WatchedFiles<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WatchedFiles").field(&self.0.paths).finish()
    }
}

impl FileContent {
    /// Reads a file of at most 1 MiB that is not in UTF-16. Waits if it is a pipe without a writer. An error names the
    /// file.
    pub(super) fn read(path: &Path) -> io::Result<FileContent> {
        FileContent::of(path, File::open(path))
    }

    /// Reads a file that existed before. Does not wait for the writer of a pipe.
    fn read_again(path: &Path) -> io::Result<FileContent> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.and_then(|file| {
            let is_regular = file.metadata()?.is_file();
            if is_regular { Ok(file) } else { Err(invalid("this is no regular file, and cannot be read again")) }
        });
        FileContent::of(path, file)
    }

    fn of(path: &Path, file: io::Result<File>) -> io::Result<FileContent> {
        let mut content = FileContent { path: path.to_owned(), bytes: Vec::new() };
        let read = file.and_then(|file| file.take(MAX_LENGTH + 1).read_to_end(&mut content.bytes));
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

    /// An error that names the file and the fault.
    pub(super) fn error(&self, why: &dyn fmt::Display) -> io::Error {
        invalid(&format!("{}: {why}", self.path.display()))
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn text(files: &[FileContent]) -> io::Result<String> {
        let text = String::from_utf8_lossy(&files[0].bytes).into_owned();
        if text.is_empty() { Err(files[0].error(&"empty")) } else { Ok(text) }
    }

    #[test]
    fn content_counts_and_not_the_time_of_a_file_and_what_cannot_be_used_is_returned_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "first").unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let write = |text: &str| {
            fs::write(&path, text).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        };
        let watched = WatchedFiles::new(vec![path.clone()], text).unwrap();
        assert!(matches!(watched.check(), Change::None));
        write("other");
        assert!(matches!(watched.check(), Change::Used));
        assert_eq!(*watched.current(), "other");
        write("");
        assert!(matches!(watched.check(), Change::Unusable(error) if error.to_string().contains("file: empty")));
        assert!(matches!(watched.check(), Change::None));
        fs::remove_file(&path).unwrap();
        assert!(matches!(watched.check(), Change::Unusable(_)), "another reason");
        assert_eq!(*watched.current(), "other", "the old value stays");
        write_new(&path, "other");
        assert!(matches!(watched.check(), Change::None), "it is back");
    }

    fn write_new(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "first").unwrap();
        let watched = WatchedFiles::new(vec![path.clone()], text).unwrap();
        fs::remove_file(&path).unwrap();
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(
            matches!(watched.check(), Change::Unusable(error) if error.to_string().contains("no regular file"))
        );
        assert_eq!(*watched.current(), "first");
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
