//! Reads the files that the options of a client name.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::protocol::token_file::first_token;

/// Returns the first token in a file.
pub(crate) fn read_token(path: &Path) -> io::Result<Vec<u8>> {
    first_token(&read(path)?).map(<[u8]>::to_vec).map_err(|why| wrong(path, &why))
}

/// Reads a regular file. An error names the file.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe could be read only once, and reading it would wait for a writer.
    if !fs::metadata(path).map_err(|error| wrong(path, &error))?.is_file() {
        return Err(wrong(
            path,
            &"this is no regular file, and cannot be read again: write the content to a file",
        ));
    }
    fs::read(path).map_err(|error| wrong(path, &error))
}

/// Returns an error that names the file and the fault.
pub(super) fn wrong(path: &Path, why: &dyn fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("{}: {why}", path.display()))
}
