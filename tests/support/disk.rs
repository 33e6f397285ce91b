//! A disk that can stall: a file system of its own in a file, which is frozen.

use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::skipped::skip;

/// Large enough for the append-only files of a run of minutes; blocks that nobody writes take no room.
const SIZE: &str = "4G";

/// A mounted file system that ends with its test.
#[derive(Debug)]
pub struct Disk {
    folder: TempDir,
    _image: TempDir,
}

impl Disk {
    /// None, and a message, where mounting is not permitted.
    pub fn mount() -> Option<Disk> {
        Disk::mount_of(SIZE)
    }

    /// The same, with a size such as 64M.
    pub fn mount_of(size: &str) -> Option<Disk> {
        let image = tempfile::tempdir().expect("a folder can be made");
        let folder = tempfile::tempdir().expect("a folder can be made");
        let file = image.path().join("image");
        let mounted = run("truncate", &["--size", size, text(&file)])
            && run("mkfs.ext4", &["-q", text(&file)])
            && run("mount", &["-o", "loop", text(&file), text(folder.path())]);
        if !mounted {
            skip("a stalled disk: mounting a file system is not permitted here");
            return None;
        }
        Some(Disk { folder, _image: image })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Has every write wait from now on.
    pub fn freeze(&self) {
        assert!(run("fsfreeze", &["--freeze", text(self.path())]), "a mounted file system can be frozen");
    }

    /// The same, until what is returned is dropped. A process that waits for a frozen disk cannot be killed, so it must be
    /// dropped before the process.
    pub fn frozen(&self) -> Frozen<'_> {
        self.freeze();
        Frozen(self)
    }

    /// Has every write fail from now on. No file may be open for writing.
    pub fn make_read_only(&self) {
        assert!(run("mount", &["-o", "remount,ro", text(self.path())]), "a file system that nobody writes to");
    }

    pub fn thaw(&self) {
        assert!(run("fsfreeze", &["--unfreeze", text(self.path())]), "a frozen file system can be thawed");
    }
}

/// A time in which a disk is frozen.
#[derive(Debug)]
pub struct Frozen<'a>(&'a Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // It is frozen only if a test failed, and a process may still have a file open.
        run("fsfreeze", &["--unfreeze", text(self.path())]);
        run("umount", &["--lazy", text(self.path())]);
    }
}

fn run(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}
