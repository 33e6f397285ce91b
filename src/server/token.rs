//! The token that a client must present.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};

use subtle::ConstantTimeEq;
use tracing::{info, warn};

use crate::protocol::frame::MAX_TOKEN_LENGTH;
use crate::server::reloaded::{FileContent, Look, Reloaded};

/// Where the token comes from. A file is read again when its content changes.
#[derive(Debug)]
pub enum TokenSource {
    /// No token is asked for.
    None,
    /// The content of a file without the white space around it.
    File(TokenFile),
}

/// A file with a token.
#[derive(Debug)]
pub struct TokenFile(Reloaded<Vec<u8>>);

impl TokenSource {
    /// The token in a file.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is empty, or holds more than a token. The error names the file.
    pub fn file(path: PathBuf) -> io::Result<TokenSource> {
        Reloaded::new(vec![path], |files| token(&files[0])).map(|file| TokenSource::File(TokenFile(file)))
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
            TokenSource::File(TokenFile(file)) => file.current().ct_eq(presented).into(),
        }
    }

    /// Reads the file again when its content changes, for as long as it is awaited.
    pub async fn maintain(&self) -> Infallible {
        let TokenSource::File(TokenFile(file)) = self else { return pending().await };
        loop {
            match file.next_look().await {
                Look::Unchanged => {}
                Look::Changed => info!("the token file has changed and was read again"),
                Look::Unusable(error) => warn!(
                    %error,
                    "the changed token file cannot be used, and the old token stays: correct the file, or its \
                     permissions"
                ),
            }
        }
    }
}

/// The token in a file, without the white space around it.
///
/// # Errors
///
/// When the file cannot be read, or holds none, or one that is too long. The error names the file.
pub fn token_in(path: &Path) -> io::Result<Vec<u8>> {
    token(&FileContent::read(path)?)
}

fn token(file: &FileContent) -> io::Result<Vec<u8>> {
    let token = file.bytes().trim_ascii();
    if (1..=MAX_TOKEN_LENGTH).contains(&token.len()) {
        return Ok(token.to_vec());
    }
    Err(file.wrong(&format_args!("a token has 1 to {MAX_TOKEN_LENGTH} bytes, and this file has {}", token.len())))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_changed_file_changes_the_token_and_a_broken_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "first\n").unwrap();
        let source = TokenSource::file(path.clone()).unwrap();
        assert!(source.admits(b"first") && !source.admits(b"second") && !source.admits(b""));
        let TokenSource::File(TokenFile(file)) = &source else { panic!("it is a file") };
        fs::write(&path, "second").unwrap();
        assert!(matches!(file.look(), Look::Changed));
        assert!(source.admits(b"second") && !source.admits(b"first"));
        fs::write(&path, "").unwrap();
        assert!(matches!(file.look(), Look::Unusable(_)));
        assert!(source.admits(b"second"), "an empty file admits nobody new and locks nobody out");
    }
}
