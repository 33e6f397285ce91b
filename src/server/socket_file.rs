//! Creates and removes the file of a Unix socket, without removing the file of another process.

use std::fs::{self, File, TryLockError};
use std::future::pending;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{info, warn};

/// How often the sidecar looks whether the file is there.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The file of a Unix socket. Dropping this value removes the file, unless another process has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file.
    identity: (u64, u64),
}

impl SocketFile {
    /// Listens on a Unix socket at `path`. Replaces a socket file on which no process listens: a killed sidecar does
    /// not remove its file.
    ///
    /// # Errors
    ///
    /// If another process listens at `path`, if the file at `path` is not a socket, or if its folder cannot be written.
    pub async fn listen(path: &Path) -> io::Result<(SocketFile, UnixListener)> {
        // Two sidecars may start at the same time. The lock keeps the second from removing the socket of the first.
        let _locked = lock_folder_of(path).await;
        if let Ok(found) = fs::symlink_metadata(path) {
            if !found.file_type().is_socket() {
                let text = "there is a file of that name, and it is no socket: it is left as it is";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            let nobody_listens = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            if UnixStream::connect(path).await.is_err_and(nobody_listens) {
                fs::remove_file(path)?;
            }
        }
        let listener = UnixListener::bind(path)?;
        Ok((SocketFile { path: path.to_owned(), identity: identity(path)? }, listener))
    }

    /// Waits until the file is removed, for example by a job that cleans its folder. Then listens again. Never resolves
    /// without a file.
    pub(super) async fn listen_again(file: &Mutex<Option<SocketFile>>) -> UnixListener {
        loop {
            sleep(CHECK_INTERVAL).await;
            let known = file.lock().as_ref().map(|file| (file.path.clone(), file.identity));
            let Some((path, identity)) = known else { return pending().await };
            let found = tokio::fs::symlink_metadata(&path).await;
            if found.is_ok_and(|found| (found.dev(), found.ino()) == identity) {
                continue;
            }
            // Files are not waited for on the thread that accepts connections.
            let attempt = spawn_blocking({
                let path = path.clone();
                move || Handle::current().block_on(SocketFile::listen(&path))
            });
            match attempt.await.unwrap_or_else(|error| Err(io::Error::other(error))) {
                Ok((mut new, listener)) => {
                    // The server may have stopped meanwhile. Then the new file is dropped, and so removed.
                    let Some(file) = &mut *file.lock() else { return pending().await };
                    file.identity = new.identity;
                    new.path.clear();
                    warn!(path = %path.display(), "the file of --socket was gone, and is there again: spare it when its folder is cleaned");
                    return listener;
                }
                Err(error) => {
                    warn!(%error, path = %path.display(), "the file of --socket is gone or was replaced, and no client can connect there: look at its folder");
                }
            }
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let path = self.path.display();
        let removed = match identity(&self.path) {
            Ok(found) if found == self.identity => fs::remove_file(&self.path),
            Ok(_) => {
                return info!(%path, "another process has put its own file in the place of the socket: the file stays");
            }
            Err(error) => Err(error),
        };
        if let Err(error) = removed
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(
                %error,
                %path,
                "the socket could not be removed: look at the permissions of its folder; the next sidecar with permission replaces it"
            );
        }
    }
}

/// Locks the folder of a file until the returned value is dropped. Returns `None` if the folder cannot be locked within
/// a second; the caller then continues without the lock.
async fn lock_folder_of(path: &Path) -> Option<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = File::open(folder).ok()?;
    for _ in 0..100 {
        match folder.try_lock() {
            Ok(()) => return Some(folder),
            Err(TryLockError::WouldBlock) => sleep(Duration::from_millis(10)).await,
            Err(TryLockError::Error(_)) => break,
        }
    }
    None
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}
