//! The token that a client must present.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use parking_lot::Mutex;
use subtle::ConstantTimeEq;
use tracing::{info, warn};

use crate::protocol::frame::MAX_TOKEN_LENGTH;

/// Where the token comes from. A file is read again when it changes.
#[derive(Debug)]
pub enum TokenSource {
    /// No token is asked for.
    None,
    /// The content of a file without the white space around it.
    File(TokenFile),
}

/// A file with a token.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    read: Mutex<Read>,
}

struct Read {
    token: Vec<u8>,
    modified: Option<SystemTime>,
    /// Whether the file has changed since, to what is no token.
    is_unusable: bool,
}

/// Whoever prints a configuration must not print its secret.
impl fmt::Debug for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Read").field("modified", &self.modified).finish_non_exhaustive()
    }
}

impl TokenSource {
    /// The token in a file.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is empty, or holds more than a token.
    pub fn file(path: PathBuf) -> io::Result<TokenSource> {
        let read = Mutex::new(read(&path)?);
        Ok(TokenSource::File(TokenFile { path, read }))
    }

    /// Whether a token is asked for.
    #[must_use]
    pub fn is_required(&self) -> bool {
        matches!(self, TokenSource::File(_))
    }

    /// Whether `presented` is the token; takes the same time however much of it is right.
    #[must_use]
    pub fn admits(&self, presented: &[u8]) -> bool {
        match self {
            TokenSource::None => true,
            TokenSource::File(file) => file.current(|token| token.ct_eq(presented).into()),
        }
    }
}

impl TokenFile {
    fn current<T>(&self, with: impl FnOnce(&[u8]) -> T) -> T {
        let mut current = self.read.lock();
        let modified = fs::metadata(&self.path).and_then(|metadata| metadata.modified()).ok();
        if modified == current.modified {
            current.is_unusable = false;
        } else {
            match read(&self.path) {
                Ok(fresh) => {
                    info!(path = %self.path.display(), "the token file has changed and was read again");
                    *current = fresh;
                }
                Err(error) => {
                    // Who is just writing it may end within the grain of its time: it is read again with the next Hello.
                    if !std::mem::replace(&mut current.is_unusable, true) {
                        warn!(
                            path = %self.path.display(),
                            %error,
                            "the changed token file cannot be used, and the old token stays: mend the file, or its \
                             permissions"
                        );
                    }
                }
            }
        }
        with(&current.token)
    }
}

fn read(path: &Path) -> io::Result<Read> {
    let modified = fs::metadata(path)?.modified().ok();
    Ok(Read { token: token_in(path)?, modified, is_unusable: false })
}

/// The token in a file, without the white space around it.
///
/// # Errors
///
/// When the file cannot be read, or holds none, or one that is too long.
pub fn token_in(path: &Path) -> io::Result<Vec<u8>> {
    let token = fs::read(path)?.trim_ascii().to_vec();
    if token.is_empty() || token.len() > MAX_TOKEN_LENGTH {
        let why = format!("a token has 1 to {MAX_TOKEN_LENGTH} bytes, and this file has {}", token.len());
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_changes_the_token_and_a_broken_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "first\n").unwrap();
        let source = TokenSource::file(path.clone()).unwrap();
        assert!(source.admits(b"first") && !source.admits(b"second") && !source.admits(b""));

        let begun = SystemTime::now();
        let touch = |text: &str, seconds: u64| {
            fs::write(&path, text).unwrap();
            let later = begun + std::time::Duration::from_secs(seconds);
            fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        };
        touch("second", 10);
        assert!(source.admits(b"second") && !source.admits(b"first"));
        touch("", 20);
        assert!(source.admits(b"second"), "an empty file admits nobody new and locks nobody out");
        touch("third", 20);
        assert!(source.admits(b"third"), "it was being written, and its time did not change with the end of that");
    }
}
