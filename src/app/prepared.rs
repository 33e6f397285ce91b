//! Opens the listeners and starts the threads of a sidecar, before its store is opened.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::error::StartError;
use crate::clock::Clock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::process::thread::RuntimeThread;
use crate::server::{Listener, SocketFile};

/// The files with the name of a host.
const HOST_NAME_FILES: [&str; 2] = ["/proc/sys/kernel/hostname", "/etc/hostname"];

/// The parts of a sidecar that need no store.
pub(super) struct Prepared {
    pub(super) name: String,
    /// The listeners for logic nodes.
    pub(super) listeners: Vec<Listener>,
    /// The address of the first of them.
    pub(super) address: SocketAddr,
    pub(super) admin_listener: TcpListener,
    pub(super) admin_address: SocketAddr,
    pub(super) clock: Arc<Clock>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) ticker_thread: RuntimeThread,
    /// The thread of the admin endpoints, to which their listener belongs.
    pub(super) admin_thread: RuntimeThread,
    /// The thread of the answers of the admin endpoints that need the store.
    pub(super) answer_thread: Arc<RuntimeThread>,
}

impl Prepared {
    /// Does all that can fail. To open a store comes after it: that uses up a state file.
    pub(super) async fn new(config: &Config) -> Result<Prepared, StartError> {
        let (listener, address) = listen("--listen", config.listen).await?;
        let mut listeners = vec![Listener::Tcp(listener)];
        let (admin_listener, admin_address) = listen("--admin", config.admin).await?;
        if let Some(path) = &config.socket {
            listeners.push(listen_unix(path).await?);
        }
        let name = config.name.clone().unwrap_or_else(|| format!("{}:{}", host_name(), address.port()));
        let start = |name| RuntimeThread::start(name).map_err(StartError::Thread);
        let (ticker_thread, admin_thread) = (start("ticker")?, start("admin")?);
        Ok(Prepared {
            name,
            listeners,
            address,
            admin_listener: admin_thread.adopt(admin_listener).map_err(StartError::Thread)?,
            admin_address,
            clock: Arc::new(Clock::start()),
            metrics: Arc::new(Metrics::default()),
            ticker_thread,
            admin_thread,
            answer_thread: Arc::new(start("answers")?),
        })
    }
}

/// Listens on a TCP address; returns the address too, in which port 0 is replaced.
async fn listen(flag: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |cause| StartError::Listen { flag, address: address.to_string(), cause };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

async fn listen_unix(path: &Path) -> Result<Listener, StartError> {
    let failed = |cause| StartError::Listen { flag: "--socket", address: path.display().to_string(), cause };
    SocketFile::listen(path).await.map(|(file, listener)| Listener::Unix(file, listener)).map_err(failed)
}

fn host_name() -> String {
    let names = HOST_NAME_FILES.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    names
        .map(|name| name.trim().to_owned())
        .find(|name| !name.is_empty())
        .unwrap_or_else(|| String::from("sidecar"))
}
