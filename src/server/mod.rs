//! Serves logic nodes, which are the IM servers that use this sidecar. Each connection has a session, over TCP, TLS or
//! a Unix socket.

mod access;
mod buffered_stream;
mod control_requests;
mod credentials;
mod keep_alive;
mod limit_notices;
mod memory_budget;
mod pending_requests;
mod requests;
mod session;
mod shared;
mod socket_file;
mod throttle;
mod tokens;
mod watched_files;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::watch;
use tokio_util::either::Either;
use tokio_util::task::TaskTracker;
use tracing::field::Empty;
use tracing::{Instrument, debug, info_span, warn};

pub use self::access::Access;
pub use self::credentials::Certificate;
pub use self::limit_notices::report_reached_limits;
pub use self::memory_budget::MemoryBudget;
pub use self::shared::{DRAIN_GRACE, Listener, ServerOptions, Shared};
pub use self::socket_file::SocketFile;

use self::access::Peer;
use self::buffered_stream::{Socket, Stream};
use self::credentials::log_failed_handshake;
use self::session::Session;
use self::shared::Phase;
use crate::clock::stall_aware_timeout;
use crate::core::{Reason, Refusal};
use crate::process::panics::contained;
use crate::protocol::Codec;
use crate::protocol::frame::FrameType;

/// How long the listener pauses after a failed accept. Otherwise a process without free file descriptors would repeat
/// the failing accept in a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A running server.
pub struct Server {
    phase: watch::Sender<Phase>,
    acceptor: Acceptor,
}

impl Server {
    /// Starts to accept connections on all listeners.
    #[must_use]
    pub fn start(listeners: Vec<Listener>, shared: &Arc<Shared>) -> Server {
        let (phase, receiver) = watch::channel(Phase::Serving);
        let (tasks, unanswered) = (TaskTracker::new(), TaskTracker::new());
        let acceptor = Acceptor { shared: Arc::clone(shared), phase: receiver, tasks, unanswered };
        for listener in listeners {
            acceptor.tasks.spawn(acceptor.clone().run(listener));
        }
        Server { phase, acceptor }
    }

    /// Stops accepting connections, and sends GoAway on every open connection. Open connections are still served.
    pub fn drain(&self) {
        self.phase.send_replace(Phase::Draining);
    }

    /// Closes all connections after their last answers are written. Waits until the connections have ended, but for at
    /// most `timeout`. Then warns if some connections have not taken their answers.
    pub async fn close(&self, timeout: Duration) {
        self.phase.send_replace(Phase::Closed);
        let Acceptor { tasks, unanswered, .. } = &self.acceptor;
        tasks.close();
        if stall_aware_timeout(timeout, tasks.wait()).await.is_none() && !unanswered.is_empty() {
            warn!(
                connections = unanswered.len(),
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

/// Accepts connections, limits their number, and makes TLS handshakes.
#[derive(Clone)]
struct Acceptor {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    tasks: TaskTracker,
    /// Counts the connections whose last answers are not written yet. Each such connection holds a token of this
    /// tracker.
    unanswered: TaskTracker,
}

impl Acceptor {
    async fn run(mut self, listener: Listener) {
        loop {
            tokio::select! {
                socket = accept("a connection", || accept_from(&listener)) => self.admit(socket),
                _ = self.phase.changed() => break,
            }
        }
    }

    fn admit(&self, socket: Socket) {
        let Ok(permit) = Arc::clone(&self.shared.free_connections).try_acquire_owned() else {
            return self.reject(&socket);
        };
        self.shared.metrics.connections_opened.inc();
        let (phase, mut closing, unanswered) = (self.phase.clone(), self.phase.clone(), self.unanswered.clone());
        let shared = Arc::clone(&self.shared);
        let (peer, address) = match &socket {
            Either::Left(tcp) => match tcp.peer_addr() {
                Ok(address) => (Peer::Tcp(address.ip()), address.to_string()),
                Err(_) => (Peer::Tcp(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), String::new()),
            },
            Either::Right(_) => (Peer::Unix, String::from("unix")),
        };
        let span = info_span!("connection", peer = %address, name = Empty, client = Empty);
        let connection = async move {
            // Hold the permit until the end of the task. It is released even if the task panics.
            let _permit = permit;
            let stream = tokio::select! {
                stream = handshake(&shared, socket) => stream,
                _ = closing.wait_for(|phase| *phase == Phase::Closed) => None,
            };
            if let Some(stream) = stream {
                Session::new(stream, peer, shared, phase).run(unanswered.token()).await;
            }
        };
        self.tasks.spawn(contained(connection.instrument(span)));
    }

    /// Rejects a connection above the limit. Sends an Error frame if the socket takes it at once. Sends nothing over
    /// TCP if the server uses TLS, because there was no handshake.
    fn reject(&self, socket: &Socket) {
        let max = self.shared.options.max_connections;
        let refusal = Refusal::new(
            Reason::TooManyConnections,
            format!("this sidecar has {max} connections already: share connections, or raise --max-connections"),
        );
        self.shared.metrics.refusals.of(refusal.reason).inc();
        let mut bytes = BytesMut::new();
        Codec::default().encode_refusal(0, &refusal, &mut bytes);
        // If the write fails, the peer still sees that the connection is closed.
        let written = match socket {
            Either::Left(_) if self.shared.certificate.is_some() => return,
            Either::Left(tcp) => tcp.try_write(&bytes),
            Either::Right(unix) => unix.try_write(&bytes),
        };
        if written.is_ok() {
            self.shared.metrics.count_frame(FrameType::Error);
        }
    }
}

/// Accepts a connection. After a failure, logs that `what` could not be accepted, pauses, and tries again.
pub(crate) async fn accept<T, F: Future<Output = io::Result<T>>>(what: &str, accept: impl Fn() -> F) -> T {
    loop {
        match accept().await {
            Ok(accepted) => return accepted,
            Err(error) => warn!(
                %error,
                "{what} could not be accepted; trying again: if files run out, raise the limit (ulimit -n, LimitNOFILE \
                 of systemd)"
            ),
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

async fn accept_from(listener: &Listener) -> io::Result<Socket> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok(Either::Left(stream))
        }
        Listener::Unix(_, listener) => Ok(Either::Right(listener.accept().await?.0)),
    }
}

/// Makes the TLS handshake of a TCP connection if the server has a certificate. Other connections need no handshake.
/// Returns `None` if the handshake fails or takes longer than the Hello timeout.
async fn handshake(shared: &Shared, socket: Socket) -> Option<Stream> {
    let (tcp, certificate) = match (socket, &shared.certificate) {
        (Either::Left(tcp), Some(certificate)) => (tcp, certificate),
        (socket, _) => return Some(Either::Left(socket)),
    };
    let handshake = async {
        // A port probe closes or resets the connection without sending a byte. This does not count as a failed
        // handshake.
        let has_begun = matches!(tcp.peek(&mut [0]).await, Ok(1..));
        if has_begun { Some(certificate.acceptor().accept(tcp).await) } else { None }
    };
    match stall_aware_timeout(shared.options.hello_timeout, handshake).await {
        Some(Some(Ok(stream))) => return Some(Either::Right(Box::new(stream))),
        Some(None) => {
            debug!("the connection was closed before a TLS handshake began");
            return None;
        }
        Some(Some(Err(error))) => log_failed_handshake(&error),
        None => debug!("the TLS handshake took too long"),
    }
    shared.metrics.refusals.of(Reason::TlsHandshake).inc();
    None
}
