//! The listeners of a sidecar.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use tokio::net::{TcpListener, UnixListener, UnixStream};

use super::error::StartError;
use crate::server::{Listener, SocketFile};

/// Listens on a TCP address.
pub(super) async fn listen(flag: &'static str, address: SocketAddr) -> Result<TcpListener, StartError> {
    let failed = |cause| StartError::Listen { flag, address: address.to_string(), cause };
    TcpListener::bind(address).await.map_err(failed)
}

/// Where it listens: port 0 is any that is free.
pub(super) fn local_address(
    flag: &'static str,
    asked: SocketAddr,
    listener: &TcpListener,
) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|cause| StartError::Listen { flag, address: asked.to_string(), cause })
}

/// Listens on a Unix socket; one that a killed sidecar left behind is replaced.
pub(super) async fn listen_unix(path: &Path) -> Result<Listener, StartError> {
    let failed = |cause| StartError::Listen { flag: "--socket", address: path.display().to_string(), cause };
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            let text = "there is a file of that name, and it is no socket: it is left as it is";
            return Err(failed(io::Error::new(io::ErrorKind::AlreadyExists, text)));
        }
        let nobody_listens = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if UnixStream::connect(path).await.is_err_and(nobody_listens) {
            std::fs::remove_file(path).map_err(failed)?;
        }
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    Ok(Listener::Unix(listener, SocketFile::new(path)))
}
