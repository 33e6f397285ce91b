//! The listeners of a sidecar.

use std::net::SocketAddr;
use std::path::Path;

use tokio::net::TcpListener;

use super::error::StartError;
use crate::config::Config;
use crate::server::{Listener, SocketFile};

/// Where a sidecar listens.
pub(super) struct Listening {
    /// For logic nodes.
    pub(super) listeners: Vec<Listener>,
    /// The address of the first of them.
    pub(super) address: SocketAddr,
    pub(super) admin_listener: TcpListener,
    pub(super) admin_address: SocketAddr,
}

impl Listening {
    /// Listens wherever the configuration says.
    pub(super) async fn open(config: &Config) -> Result<Listening, StartError> {
        let data = listen("--listen", config.listen).await?;
        let admin_listener = listen("--admin", config.admin).await?;
        let address = local_address("--listen", config.listen, &data)?;
        let admin_address = local_address("--admin", config.admin, &admin_listener)?;
        let mut listeners = vec![Listener::Tcp(data)];
        if let Some(path) = &config.socket {
            listeners.push(listen_unix(path).await?);
        }
        Ok(Listening { listeners, address, admin_listener, admin_address })
    }
}

/// Listens on a TCP address.
async fn listen(flag: &'static str, address: SocketAddr) -> Result<TcpListener, StartError> {
    let failed = |cause| StartError::Listen { flag, address: address.to_string(), cause };
    TcpListener::bind(address).await.map_err(failed)
}

/// Where it listens: port 0 is any that is free.
fn local_address(flag: &'static str, asked: SocketAddr, listener: &TcpListener) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|cause| StartError::Listen { flag, address: asked.to_string(), cause })
}

/// Listens on a Unix socket.
async fn listen_unix(path: &Path) -> Result<Listener, StartError> {
    let failed = |cause| StartError::Listen { flag: "--socket", address: path.display().to_string(), cause };
    SocketFile::listen(path).await.map(|(file, listener)| Listener::Unix(file, listener)).map_err(failed)
}
