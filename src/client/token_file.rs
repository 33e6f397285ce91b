//! Reads the token that a client presents from a file.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::protocol::token_file::first_token;

/// Returns the first token in a file. An error names the file.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let wrong = |why: &str| io::Error::new(ErrorKind::InvalidData, format!("{}: {why}", path.display()));
    let metadata = fs::metadata(path).map_err(|error| wrong(&error.to_string()))?;
    // A pipe could be read only once, and reading it would wait for a writer.
    if !metadata.is_file() {
        return Err(wrong("this is no regular file, and cannot be read again: write the token to a file"));
    }
    let bytes = fs::read(path).map_err(|error| wrong(&error.to_string()))?;
    first_token(&bytes).map(<[u8]>::to_vec).map_err(|why| wrong(&why))
}
