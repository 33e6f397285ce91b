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

/// Opens the state file for reading. Refuses a symbolic link, a pipe or device, and a file of another user. Otherwise
/// another user of the folder could give the sidecar a state.
pub(super) fn open_own(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
            return Err(io::Error::other("it is a symbolic link"));
        }
        opened => opened?,
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != geteuid().as_raw() {
        return Err(io::Error::other("it is not a file of this user"));
    }
    Ok(file)
}

/// Returns the path of a file whose name is that of `path` with an ending.
pub(super) fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_a_regular_file_of_this_user_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let [own, link, pipe] = ["own", "link", "pipe"].map(|name| folder.path().join(name));
        fs::write(&own, "state").unwrap();
        symlink(&own, &link).unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let why = |path: &Path| open_own(path).err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(
            [&own, &link, &pipe].map(|path| why(path)),
            ["", "it is a symbolic link", "it is not a file of this user"]
        );
        // Only root may give a file away. Another user finds a file of root.
        let foreign = if geteuid().is_root() {
            chown(&own, Some(1), None).map(|()| own).unwrap()
        } else {
            "/etc/passwd".into()
        };
        assert_eq!(why(&foreign), "it is not a file of this user");
    }
}
