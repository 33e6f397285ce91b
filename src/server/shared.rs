//! The parts of a sidecar that all connections share, and the limits of connections.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use super::credentials::{Certificate, Token};
use super::socket_file::SocketFile;
use crate::clock::Clock;
use crate::core::{Rings, Store};
use crate::delivery::Delivery;
use crate::metrics::Metrics;
use crate::ticker::read_barrier::ReadBarrier;

/// After GoAway, connections are served for at least this time.
pub const DRAIN_GRACE: Duration = Duration::from_millis(500);

/// The maximum credit of a subscription.
pub(super) const MAX_CREDIT: u32 = 1_048_576;

/// The limits of connections.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The maximum length of a frame.
    pub max_frame_length: u32,
    /// The maximum number of connections.
    pub max_connections: usize,
    /// The time within which a connection must send Hello.
    pub hello_timeout: Duration,
    /// A peer that is silent for this time is pinged; after twice the time its connection is closed.
    pub ping_interval: Duration,
    /// With more bytes queued, a connection is not read from and gets no batches.
    pub max_queued_bytes: usize,
}

/// The parts of a sidecar that all connections share.
#[expect(missing_docs, reason = "each is described by its type")]
pub struct Shared {
    pub options: ServerOptions,
    /// A permit for each connection that may still be accepted, of at most `options.max_connections`.
    pub free_connections: Arc<Semaphore>,
    /// Without one, clients need no token.
    pub token: Option<Token>,
    /// The certificate of the TCP listener; without one the listener does not speak TLS.
    pub certificate: Option<Certificate>,
    pub store: Arc<dyn Store>,
    /// The rings of `store`.
    pub rings: Rings,
    pub delivery: Arc<Delivery>,
    pub clock: Arc<Clock>,
    pub read_barrier: Arc<ReadBarrier>,
    pub metrics: Arc<Metrics>,
}

/// A listener for logic nodes.
pub enum Listener {
    /// A TCP address.
    Tcp(TcpListener),
    /// A Unix socket. Its file is removed before the listener closes: until then no other sidecar replaces the file,
    /// and no other file has its inode.
    Unix(SocketFile, UnixListener),
}

/// The phases of a server's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Serving,
    Draining,
    Closed,
}
