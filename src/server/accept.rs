//! Accepts connections, limits their number, and makes TLS handshakes.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::watch;
use tokio_util::either::Either;
use tokio_util::task::TaskTracker;
use tracing::field::Empty;
use tracing::{Instrument, debug, info_span, warn};

use super::buffered_stream::{Socket, Stream};
use super::session::Session;
use super::shared::{Listener, Phase, Shared};
use crate::core::refusal::{Reason, Refusal};
use crate::process::panics::contained;
use crate::protocol::Codec;
use crate::protocol::frame::FrameType;
use crate::ticker::stall_aware_timeout;

/// After a failed accept the listener pauses: without files it would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Clone)]
pub(super) struct Acceptor {
    pub(super) shared: Arc<Shared>,
    pub(super) phase: watch::Receiver<Phase>,
    pub(super) tasks: TaskTracker,
    pub(super) unanswered: TaskTracker,
    /// The number of open connections.
    pub(super) open: Arc<AtomicUsize>,
}

impl Acceptor {
    pub(super) async fn run(mut self, listener: Listener) {
        loop {
            tokio::select! {
                socket = accept("a connection", || accept_from(&listener)) => self.admit(socket),
                _ = self.phase.changed() => break,
            }
        }
    }

    fn admit(&self, socket: Socket) {
        if self.open.fetch_add(1, Ordering::Relaxed) >= self.shared.options.max_connections {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return self.turn_away(&socket);
        }
        let open = OpenConnection { open: Arc::clone(&self.open), shared: Arc::clone(&self.shared) };
        self.shared.metrics.connections.inc();
        self.shared.metrics.connections_opened.inc();
        let (phase, mut closing, unanswered) = (self.phase.clone(), self.phase.clone(), self.unanswered.clone());
        let peer = match &socket {
            Either::Left(tcp) => tcp.peer_addr().map_or_else(|_| String::new(), |peer| peer.to_string()),
            Either::Right(_) => String::from("unix"),
        };
        let span = info_span!("connection", %peer, client = Empty);
        let connection = async move {
            let stream = tokio::select! {
                stream = open.shared.handshake(socket) => stream,
                _ = closing.wait_for(|phase| *phase == Phase::Closed) => None,
            };
            if let Some(stream) = stream {
                let session = Session::new(stream, Arc::clone(&open.shared), phase);
                session.run(unanswered.token()).await;
            }
        };
        self.tasks.spawn(contained(connection.instrument(span)));
    }

    /// Refuses a connection that is one too many, as far as the socket takes the Error at once.
    fn turn_away(&self, socket: &Socket) {
        let max = self.shared.options.max_connections;
        let refusal = Refusal::new(
            Reason::TooManyConnections,
            format!("this sidecar has {max} connections already: share connections, or raise --max-connections"),
        );
        self.shared.metrics.count_refusal(refusal.reason);
        let mut bytes = BytesMut::new();
        Codec::default().encode_refusal(0, &refusal, &mut bytes);
        // If it fails, the peer still sees that the connection is closed.
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

/// Accepts a connection. After a failure it logs that `what` could not be accepted, pauses, and tries again.
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

/// Counts a connection for as long as its task lives, also if that panics.
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
    /// Makes the TLS handshake, if the listener speaks TLS.
    async fn handshake(&self, socket: Socket) -> Option<Stream> {
        let (tcp, certificate) = match (socket, &self.certificate) {
            (Either::Left(tcp), Some(certificate)) => (tcp, certificate),
            (socket, _) => return Some(Either::Left(socket)),
        };
        let handshake = async {
            // A probe of the port closes or resets the connection and sends nothing: no handshake has failed.
            let has_begun = matches!(tcp.peek(&mut [0]).await, Ok(1..));
            if has_begun { Some(certificate.acceptor().accept(tcp).await) } else { None }
        };
        match stall_aware_timeout(self.options.hello_timeout, handshake).await {
            Some(Some(Ok(stream))) => return Some(Either::Right(Box::new(stream))),
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
