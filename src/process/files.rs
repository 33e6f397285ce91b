//! Opens files that settings name, and warns of files that other users can read.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

/// The permission bits with which a file is not secret: any access of other users, and writing by the group.
const NOT_SECRET: u32 = 0o027;

/// Opens a regular file. Refuses a pipe or a device, so that the call never waits for a writer.
///
/// # Errors
///
/// If the file cannot be opened, or is not a regular file.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let text = "this is no regular file, and cannot be read again: a pipe such as <(...) or a device is not possible, so \
                write the content to a file";
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Reads a regular file as text.
///
/// # Errors
///
/// If the file cannot be read, is not a regular file, or is not UTF-8.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open_regular(path)?.read_to_string(&mut text)?;
    Ok(text)
}

/// Returns a warning if other users can read or write a file with a secret. `flag` names the file in the warning.
pub(crate) fn exposure(flag: &str, path: &Path) -> Option<String> {
    let mode = fs::metadata(path).ok()?.mode() & 0o777;
    (mode & NOT_SECRET != 0).then(|| {
        let (path, allowed) = (path.display(), mode & !NOT_SECRET);
        format!("{flag}: other users can read or change {path} (mode {mode:04o}): run chmod {allowed:04o} {path}")
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_that_is_not_secret_is_named_with_the_remedy() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (mode, remedy) in
            [(0o600, None), (0o440, None), (0o644, Some("chmod 0640")), (0o660, Some("chmod 0640"))]
        {
            file.as_file().set_permissions(fs::Permissions::from_mode(mode)).unwrap();
            let warning = exposure("--token-file", file.path());
            assert_eq!(warning.is_some(), remedy.is_some(), "{mode:o}");
            assert!(warning.unwrap_or_default().contains(remedy.unwrap_or_default()), "{mode:o}");
        }
    }
}
