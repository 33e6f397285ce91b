//! The token that a client must present.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};

use subtle::ConstantTimeEq;

use super::watched_files::{FileContent, WatchedFiles};
use crate::protocol::frame::MAX_TOKEN_LENGTH;

/// The token that is asked for, if any.
#[derive(Debug, Default)]
pub struct TokenSource {
    /// Holds the token, which may have white space around it.
    file: Option<WatchedFiles<Vec<u8>>>,
}

impl TokenSource {
    /// The token in a file, which is read again when its content changes.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is empty, or holds more than a token. The error names the file.
    pub fn file(path: PathBuf) -> io::Result<TokenSource> {
        let file = WatchedFiles::new(vec![path], |files| token(&files[0]))?;
        Ok(TokenSource { file: Some(file) })
    }

    /// Whether a token is asked for.
    #[must_use]
    pub fn is_required(&self) -> bool {
        self.file.is_some()
    }

    /// Whether `presented` is the token. Takes the same time however much of it is right.
    #[must_use]
    pub fn admits(&self, presented: &[u8]) -> bool {
        self.file.as_ref().is_none_or(|file| file.current().ct_eq(presented).into())
    }

    /// Reads the file again when its content changes, for as long as it is awaited.
    pub async fn maintain(&self) -> Infallible {
        match &self.file {
            Some(file) => file.watch("token", "correct the token file, or its permissions", |_| {}).await,
            None => pending().await,
        }
    }
}

/// The token in a file, without the white space around it.
///
/// # Errors
///
/// When the file cannot be read, is empty, or holds more than a token. The error names the file.
pub fn token_in(path: &Path) -> io::Result<Vec<u8>> {
    token(&FileContent::read(path)?)
}

fn token(file: &FileContent) -> io::Result<Vec<u8>> {
    let token = file.bytes.trim_ascii();
    if (1..=MAX_TOKEN_LENGTH).contains(&token.len()) {
        return Ok(token.to_vec());
    }
    Err(file.error(&format_args!("a token has 1 to {MAX_TOKEN_LENGTH} bytes, and this file has {}", token.len())))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::server::watched_files::Change;

    #[test]
    fn a_changed_file_changes_the_token_and_a_broken_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "first\n").unwrap();
        let source = TokenSource::file(path.clone()).unwrap();
        assert!(source.admits(b"first") && !source.admits(b"second") && !source.admits(b""));
        fs::write(&path, "second").unwrap();
        assert!(matches!(source.file.as_ref().unwrap().check(), Change::Used));
        assert!(source.admits(b"second") && !source.admits(b"first"));
        fs::write(&path, "").unwrap();
        assert!(matches!(source.file.as_ref().unwrap().check(), Change::Unusable(_)));
        assert!(source.admits(b"second"), "an empty file admits nobody new and locks nobody out");
    }
}
