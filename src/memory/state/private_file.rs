//! Opens the files beside the state file, so that only their user can read them and nobody can redirect them.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::geteuid;

/// The permissions of the group and of other users.
pub(super) const OTHERS: u32 = 0o077;

/// Opens a file in the folder of the state file, which only this user can read. Existing bytes, such as reserved room,
/// stay until they are overwritten. Refuses a symbolic link and a file with another name or owner, through which another
/// user of the folder could redirect or read the state. Returns an error if the file is a pipe, because a plain open
/// would wait for a reader forever.
pub(super) fn open_beside(path: &Path, ending: &str) -> io::Result<File> {
    let path = beside(path, ending);
    let mut options = OpenOptions::new();
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags.bits().cast_signed());
    let refused = |why| Err(io::Error::other(format!("{} {why}: remove it", path.display())));
    let file = match options.open(&path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            return refused("is a symbolic link");
        }
        opened => opened?,
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.nlink() != 1 || metadata.uid() != geteuid().as_raw() {
        return refused("is not a file of this user with one name");
    }
    if metadata.mode() & OTHERS != 0 {
        file.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

/// Returns the path of a file whose name is that of `path` with an ending.
pub(super) fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}
