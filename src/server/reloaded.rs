//! A value made of files, such as a token or a certificate, which is made again when the content of a file changes.
//!
//! The files are read every second and compared by content. Times of modification do not tell: `cp -p`, rsync and mounted
//! volumes keep them. Threads of the blocking pool read, so that a file system that hangs stops nobody who uses the value.

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
use tracing::warn;

/// How often the files are read.
const INTERVAL: Duration = Duration::from_secs(1);

/// Changed content is used if it is still the same after this time: a file may be in the middle of being written.
const SETTLING: Duration = Duration::from_millis(50);

/// Reading that takes longer is logged.
const SLOW: Duration = Duration::from_secs(5);

/// The longest file that is read, in bytes.
const MAX_LENGTH: u64 = 1024 * 1024;

/// A value, and the files that it is made of. Clones share both.
pub struct Reloaded<T>(Arc<Inner<T>>);

struct Inner<T> {
    paths: Vec<PathBuf>,
    make: fn(&[FileContent]) -> io::Result<T>,
    current: RwLock<Arc<T>>,
    seen: Mutex<Seen>,
}

/// What the files held when they were read last.
struct Seen {
    used: Vec<FileContent>,
    /// Why the newer content cannot be used.
    error: Option<String>,
}

/// A file and what it holds, without a byte order mark.
#[derive(PartialEq, Eq)]
pub struct FileContent {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// What a look at the files found.
#[derive(Debug)]
pub enum Look {
    /// Nothing new.
    Unchanged,
    /// The value was made of new content.
    Changed,
    /// The files have changed and cannot be used; the value stays. Each reason is returned once.
    Unusable(io::Error),
}

impl<T: Send + Sync + 'static> Reloaded<T> {
    /// Reads the files and makes the value.
    ///
    /// # Errors
    ///
    /// When a file cannot be read, or no value can be made of the files. The error names the file.
    pub fn new(paths: Vec<PathBuf>, make: fn(&[FileContent]) -> io::Result<T>) -> io::Result<Reloaded<T>> {
        let used = paths.iter().map(|path| FileContent::read(path)).collect::<io::Result<Vec<_>>>()?;
        let current = RwLock::new(Arc::new(make(&used)?));
        let seen = Mutex::new(Seen { used, error: None });
        Ok(Reloaded(Arc::new(Inner { paths, make, current, seen })))
    }

    /// The value, as it was made last. Never waits for a file.
    #[must_use]
    pub fn current(&self) -> Arc<T> {
        Arc::clone(&self.0.current.read())
    }

    /// Looks at the files, after an interval.
    pub async fn next_look(&self) -> Look {
        sleep(INTERVAL).await;
        let inner = Arc::clone(&self.0);
        let mut looking = tokio::task::spawn_blocking(move || inner.look());
        if let Ok(looked) = timeout(SLOW, &mut looking).await {
            return looked.unwrap_or(Look::Unchanged);
        }
        let paths = &self.0.paths;
        warn!(
            ?paths,
            "files cannot be read again, and their old content stays: their file system does not answer"
        );
        looking.await.unwrap_or(Look::Unchanged)
    }

    /// Looks at the files, and waits for their file system.
    #[cfg(test)]
    pub fn look(&self) -> Look {
        self.0.look()
    }
}

impl<T> Inner<T> {
    fn look(&self) -> Look {
        let mut seen = self.seen.lock();
        match self.changed(&seen.used) {
            Ok(None) => {
                seen.error = None;
                Look::Unchanged
            }
            Ok(Some((used, value))) => {
                *self.current.write() = Arc::new(value);
                *seen = Seen { used, error: None };
                Look::Changed
            }
            Err(error) => {
                let text = error.to_string();
                if seen.error.replace(text.clone()) == Some(text) {
                    Look::Unchanged
                } else {
                    Look::Unusable(error)
                }
            }
        }
    }

    /// The files and the value made of them, if the files hold something else than what is used.
    fn changed(&self, used: &[FileContent]) -> io::Result<Option<(Vec<FileContent>, T)>> {
        let read = || self.paths.iter().map(|path| FileContent::read_again(path)).collect::<io::Result<Vec<_>>>();
        let found = read()?;
        if found == used {
            return Ok(None);
        }
        thread::sleep(SETTLING);
        if read()? != found {
            return Ok(None);
        }
        let value = (self.make)(&found)?;
        Ok(Some((found, value)))
    }
}

/// Content of files may be secret, and so may what is made of it.
impl<T> fmt::Debug for Reloaded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloaded").field("paths", &self.0.paths).finish_non_exhaustive()
    }
}

impl FileContent {
    /// Reads a file. Waits if it is a pipe that nobody has written to yet.
    ///
    /// # Errors
    ///
    /// When it cannot be read, is longer than 1 MiB, or is in UTF-16. The error names the file.
    pub fn read(path: &Path) -> io::Result<FileContent> {
        FileContent::of(path, File::open(path))
    }

    /// Reads a file that was there before. Does not wait for the writer of a pipe.
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
        read.map_err(|error| content.wrong(&error))?;
        if content.bytes.len() as u64 > MAX_LENGTH {
            return Err(content.wrong(&format_args!("this file is longer than {MAX_LENGTH} bytes")));
        }
        if content.bytes.starts_with(b"\xff\xfe") || content.bytes.starts_with(b"\xfe\xff") {
            return Err(content.wrong(&"this file is in UTF-16: save it as UTF-8"));
        }
        if content.bytes.starts_with("\u{feff}".as_bytes()) {
            content.bytes.drain(.."\u{feff}".len());
        }
        Ok(content)
    }

    /// What the file holds.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// An error that names the file and says what is wrong with it.
    pub fn wrong(&self, why: &dyn fmt::Display) -> io::Error {
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
        let text = String::from_utf8_lossy(files[0].bytes()).into_owned();
        if text.is_empty() { Err(files[0].wrong(&"empty")) } else { Ok(text) }
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
        let reloaded = Reloaded::new(vec![path.clone()], text).unwrap();
        assert!(matches!(reloaded.look(), Look::Unchanged));
        write("other");
        assert!(matches!(reloaded.look(), Look::Changed));
        assert_eq!(*reloaded.current(), "other");
        write("");
        assert!(matches!(reloaded.look(), Look::Unusable(error) if error.to_string().contains("file: empty")));
        assert!(matches!(reloaded.look(), Look::Unchanged));
        fs::remove_file(&path).unwrap();
        assert!(matches!(reloaded.look(), Look::Unusable(_)), "another reason");
        assert_eq!(*reloaded.current(), "other", "the old value stays");
        write_new(&path, "other");
        assert!(matches!(reloaded.look(), Look::Unchanged), "it is back");
    }

    fn write_new(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_pipe_in_the_place_of_a_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "first").unwrap();
        let reloaded = Reloaded::new(vec![path.clone()], text).unwrap();
        fs::remove_file(&path).unwrap();
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(matches!(reloaded.look(), Look::Unusable(error) if error.to_string().contains("no regular file")));
        assert_eq!(*reloaded.current(), "first");
    }

    #[test]
    fn a_byte_order_mark_is_no_content_and_utf_16_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "\u{feff}secret").unwrap();
        assert_eq!(FileContent::read(&path).unwrap().bytes(), b"secret");
        fs::write(&path, b"\xff\xfes\0e\0").unwrap();
        let error = FileContent::read(&path).err().unwrap().to_string();
        assert!(error.contains("file: this file is in UTF-16: save it as UTF-8"), "{error}");
        fs::write(&path, vec![b'x'; 1024 * 1024 + 1]).unwrap();
        assert!(FileContent::read(&path).is_err());
    }
}
