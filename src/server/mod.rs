//! Serves logic nodes over the native protocol: a session for each connection, over TCP, TLS or a Unix socket.

mod accept;
mod buffered_stream;
pub mod certificate;
mod control_requests;
mod keep_alive;
mod limit_notices;
mod pending_requests;
mod requests;
mod session;
mod socket_file;
mod token;
mod watched_files;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::warn;

pub(crate) use accept::accept;
pub use limit_notices::report_reached_limits;
pub use socket_file::SocketFile;
pub use token::{TokenSource, token_in};

use self::accept::Acceptor;
use crate::clock::Clock;
use crate::core::rings::Rings;
use crate::core::store::Store;
use crate::delivery::Delivery;
use crate::metrics::Metrics;
use crate::server::certificate::Certificate;
use crate::ticker::read_barrier::ReadBarrier;
use crate::ticker::stall_aware_timeout;

/// After GoAway, connections are served for at least this time.
pub const DRAIN_GRACE: Duration = Duration::from_millis(500);

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
    /// The maximum credit of a subscription.
    pub max_credit: u32,
}

/// The parts of a sidecar that all connections share.
#[expect(missing_docs, reason = "each is described by its type")]
pub struct Shared {
    pub options: ServerOptions,
    pub token: TokenSource,
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
    /// A Unix socket. Its file is removed before the listener closes: until then no other sidecar replaces the file, and
    /// no other file has its inode.
    Unix(SocketFile, UnixListener),
}

/// The phases of a server's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    Draining,
    Closed,
}

/// A running server.
pub struct Server {
    phase: watch::Sender<Phase>,
    tasks: TaskTracker,
    /// Has a token for each connection whose peer has not got its last answers.
    unanswered: TaskTracker,
}

impl Server {
    /// Accepts connections from all listeners.
    #[must_use]
    pub fn start(listeners: Vec<Listener>, shared: &Arc<Shared>) -> Server {
        let (phase, receiver) = watch::channel(Phase::Serving);
        let (tasks, unanswered) = (TaskTracker::new(), TaskTracker::new());
        let acceptor = Acceptor {
            shared: Arc::clone(shared),
            phase: receiver,
            tasks: tasks.clone(),
            unanswered: unanswered.clone(),
            open: Arc::default(),
        };
        for listener in listeners {
            tasks.spawn(acceptor.clone().run(listener));
        }
        Server { phase, tasks, unanswered }
    }

    /// Accepts no more connections and sends GoAway to those that are open. They are still served.
    pub fn drain(&self) {
        self.phase.send_replace(Phase::Draining);
    }

    /// Sends all that is queued, closes all connections, and waits for their end.
    pub async fn close(&self, timeout: Duration) {
        self.phase.send_replace(Phase::Closed);
        self.tasks.close();
        if stall_aware_timeout(timeout, self.tasks.wait()).await.is_none() && !self.unanswered.is_empty() {
            warn!(
                connections = self.unanswered.len(),
                "some connections did not take their last answers in time and are closed: their clients repeat all \
                 requests without an answer, at another sidecar or after the restart"
            );
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.phase.send_replace(Phase::Closed);
    }
}
