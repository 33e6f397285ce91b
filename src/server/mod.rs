//! The data listeners: accept, limits, drain. One `session` a connection.

pub mod certificate;
mod full;
mod pending;
mod reading;
pub(crate) mod reloaded;
mod request_batches;
mod requests;
mod session;
mod socket_file;
mod stream;
mod token;
mod watching;
mod wire;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::field::Empty;
use tracing::{Instrument, debug, info_span, warn};

pub use full::report_full_limits;
pub use socket_file::SocketFile;
pub use token::TokenSource;
pub use token::token_in;

use self::stream::Stream;
use crate::clock::Clock;
use crate::core::refusal::{Reason, Refusal};
use crate::core::rings::Rings;
use crate::core::store::Store;
use crate::delivery::Delivery;
use crate::metrics::Metrics;
use crate::process::panics::contained;
use crate::protocol::frame::{Body, Error, Frame, FrameType};
use crate::server::certificate::Certificate;
use crate::ticker::read_barrier::ReadBarrier;
use crate::ticker::stall_aware_timeout;

/// After a failed accept the listener rests, so that a full table of files does not become a busy loop.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// How long after GoAway connections are served at least.
pub const DRAIN_GRACE: Duration = Duration::from_millis(500);

/// The limits of connections.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The most that a frame's length may say.
    pub max_frame_length: u32,
    /// The most connections at once.
    pub max_connections: usize,
    /// How long a connection may take to say Hello.
    pub hello_timeout: Duration,
    /// A peer that is silent for two of these is gone.
    pub ping_interval: Duration,
    /// Bytes queued to a connection beyond which it is not read from and gets no batches.
    pub max_queued_bytes: usize,
    /// The most credit of a subscription.
    pub max_credit: u32,
}

/// What all connections share.
pub struct Shared {
    /// The limits.
    pub options: ServerOptions,
    /// Who may come in.
    pub token: TokenSource,
    /// The certificate of the TCP listener; it speaks plainly without one.
    pub certificate: Option<Arc<Certificate>>,
    /// Where the wheel lives: its kind, for Hello, and whether it answers.
    pub store: Arc<dyn Store>,
    /// The wheel.
    pub rings: Rings,
    /// The way to subscribers.
    pub delivery: Arc<Delivery>,
    /// The time.
    pub clock: Arc<Clock>,
    /// Where the ticker meets the connections.
    pub read_barrier: Arc<ReadBarrier>,
    /// The counters.
    pub metrics: Arc<Metrics>,
}

/// Where a data listener listens.
pub enum Listener {
    /// A TCP address.
    Tcp(TcpListener),
    /// A socket in the file system. Its file is removed at the end, before nobody listens any more: until then no other
    /// sidecar replaces the file, and no other file has its inode.
    Unix(SocketFile, UnixListener),
}

/// The phases of a server's life, as its connections see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Serving,
    Draining,
    Closed,
}

/// A running server.
pub struct Server {
    phase: watch::Sender<Phase>,
    tasks: TaskTracker,
    /// A token for each connection that has not got its last answers.
    unanswered: TaskTracker,
}

impl Server {
    /// Accepts connections from all listeners.
    #[must_use]
    pub fn start(listeners: Vec<Listener>, shared: &Arc<Shared>) -> Server {
        let (phase, _) = watch::channel(Phase::Serving);
        let (tasks, unanswered) = (TaskTracker::new(), TaskTracker::new());
        let open = Arc::new(AtomicUsize::new(0));
        for listener in listeners {
            let acceptor = Acceptor {
                shared: Arc::clone(shared),
                phase: phase.subscribe(),
                tasks: tasks.clone(),
                unanswered: unanswered.clone(),
                open: Arc::clone(&open),
            };
            tasks.spawn(acceptor.run(listener));
        }
        Server { phase, tasks, unanswered }
    }

    /// Accepts no more connections and tells those open to go; they are still served.
    pub fn drain(&self) {
        self.phase.send_replace(Phase::Draining);
    }

    /// Closes all connections, after they have got what is queued for them, and waits for their end.
    pub async fn close(&self, patience: Duration) {
        self.phase.send_replace(Phase::Closed);
        self.tasks.close();
        if stall_aware_timeout(patience, self.tasks.wait()).await.is_none() && !self.unanswered.is_empty() {
            warn!(
                connections = self.unanswered.len(),
                "some connections did not take their last answers in time and are closed: their clients repeat what was \
                 not answered, at another sidecar or after the restart"
            );
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.phase.send_replace(Phase::Closed);
    }
}

struct Acceptor {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    tasks: TaskTracker,
    unanswered: TaskTracker,
    open: Arc<AtomicUsize>,
}

impl Acceptor {
    async fn run(mut self, listener: Listener) {
        loop {
            let accepted = tokio::select! {
                accepted = accept(&listener) => accepted,
                _ = self.phase.changed() => break,
            };
            match accepted {
                Ok(accepted) => self.admit(accepted),
                Err(error) => {
                    warn!(
                        %error,
                        "a connection could not be accepted; trying again: if files run out, raise the limit \
                         (ulimit -n, LimitNOFILE of systemd)"
                    );
                    tokio::time::sleep(ACCEPT_REST).await;
                }
            }
        }
    }

    fn admit(&self, accepted: Accepted) {
        let max = self.shared.options.max_connections;
        if self.open.fetch_add(1, Ordering::Relaxed) >= max {
            self.open.fetch_sub(1, Ordering::Relaxed);
            self.turn_away(&accepted, max);
            return;
        }
        let guard = OpenConnection { open: Arc::clone(&self.open), shared: Arc::clone(&self.shared) };
        self.shared.metrics.connections.inc();
        self.shared.metrics.connections_opened.inc();
        let (phase, mut closing, unanswered) = (self.phase.clone(), self.phase.clone(), self.unanswered.clone());
        let span = info_span!("connection", peer = %accepted.peer(), client = Empty);
        let connection = async move {
            let greeted = tokio::select! {
                greeted = guard.shared.greet(accepted) => greeted,
                _ = closing.wait_for(|phase| *phase == Phase::Closed) => None,
            };
            if let Some(stream) = greeted {
                let session = session::Session::new(stream, Arc::clone(&guard.shared), phase);
                session.run(unanswered.token()).await;
            }
        };
        self.tasks.spawn(contained(connection.instrument(span)));
    }

    /// Says why, as far as the socket takes it at once.
    fn turn_away(&self, accepted: &Accepted, max: usize) {
        let refusal = Refusal::new(
            Reason::TooManyConnections,
            format!("this sidecar has {max} connections already: share connections, or raise --max-connections"),
        );
        self.shared.metrics.count_refusal(refusal.reason);
        let mut bytes = bytes::BytesMut::new();
        let frame = Frame::new(0, Body::Error(Error::from(&refusal)));
        crate::protocol::Codec::default().encode_frame(&frame, &mut bytes);
        // Best effort: the peer also sees that the connection is closed.
        let told = match accepted {
            Accepted::Tcp(_) if self.shared.certificate.is_some() => return,
            Accepted::Tcp(stream) => stream.try_write(&bytes),
            Accepted::Unix(stream) => stream.try_write(&bytes),
        };
        if told.is_ok() {
            self.shared.metrics.count_frame(FrameType::Error);
        }
    }
}

/// Counts a connection for as long as its task lives.
struct OpenConnection {
    open: Arc<AtomicUsize>,
    shared: Arc<Shared>,
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
        self.shared.metrics.connections.dec();
    }
}

impl Shared {
    /// Shakes hands, where the listener speaks TLS.
    async fn greet(&self, accepted: Accepted) -> Option<Stream> {
        let tcp = match accepted {
            Accepted::Unix(stream) => return Some(Stream::Unix(stream)),
            Accepted::Tcp(stream) => stream,
        };
        let Some(certificate) = &self.certificate else { return Some(Stream::Tcp(tcp)) };
        let handshake = async {
            // A probe of the port closes or resets the connection and sends nothing: no handshake has failed.
            let has_begun = matches!(tcp.peek(&mut [0]).await, Ok(1..));
            if has_begun { Some(certificate.acceptor().accept(tcp).await) } else { None }
        };
        match stall_aware_timeout(self.options.hello_timeout, handshake).await {
            Some(Some(Ok(stream))) => return Some(Stream::Tls(Box::new(stream))),
            Some(None) => {
                debug!("the connection was closed before a TLS handshake began");
                return None;
            }
            Some(Some(Err(error))) => warn!(
                %error,
                "a client made no TLS handshake: does it speak TLS, and trust the certificate of --tls-cert?"
            ),
            None => debug!("the TLS handshake took too long"),
        }
        self.metrics.count_refusal(Reason::TlsHandshake);
        None
    }
}

/// A connection before its first word.
enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Accepted {
    /// Who it is from, for logs.
    fn peer(&self) -> String {
        match self {
            Accepted::Tcp(stream) => stream.peer_addr().map_or_else(|_| String::new(), |peer| peer.to_string()),
            Accepted::Unix(_) => String::from("unix"),
        }
    }
}

async fn accept(listener: &Listener) -> io::Result<Accepted> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok(Accepted::Tcp(stream))
        }
        Listener::Unix(_, listener) => Ok(Accepted::Unix(listener.accept().await?.0)),
    }
}
