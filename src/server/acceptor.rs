//! Accepts connections on a thread of its own: makes TLS handshakes, reads Hello, and checks the token. Only an
//! admitted connection goes to the threads that serve, so an unauthenticated peer costs the clients no time there.
//!
//! ```text
//!   accept ──▶ TLS handshake ──▶ Hello ──▶ admit ──▶ session on a serving thread
//!      │             │             │          └──▶ Error, and the connection closes
//!      └─────────────┴─────────────┴──▶ closed: Hello timeout, or too many unauthenticated connections
//! ```

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::either::Either;
use tokio_util::task::TaskTracker;
use tracing::field::Empty;
use tracing::{Instrument, Span, debug, info_span, warn};

use super::access::{Client, Grant, Peer};
use super::admission::{Admission, Admitted, log_refusal};
use super::buffered_stream::BufferedStream;
use super::credentials::{certificate_name, log_failed_handshake};
use super::memory_budget::Charge;
use super::native::Greeting;
use super::session::{CLOSE_TIMEOUT, ClientProtocol, Session};
use super::shared::{Phase, Shared};
use super::socket::{IoEvent, Socket, Stream, Traffic, tls_socket};
use super::socket_file::SocketFile;
use super::throttle::Source;
use super::unauthenticated::Place;
use crate::clock::stall_aware_timeout;
use crate::core::{Reason, Refusal};
use crate::metrics::Listener;
use crate::process::panics::contained;
use crate::protocol::frame::{Body, Frame, FrameType, Hello, MAX_GREETING_LENGTH};
use crate::protocol::{Codec, DecodeError, Decoded};

/// How long the acceptor pauses after a failed accept. Otherwise a process without free file descriptors would repeat
/// the failing accept in a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The same pause if an unauthenticated connection was closed: its file is free after one turn of the thread.
const EVICTION_PAUSE: Duration = Duration::from_millis(1);

/// The maximum length of a client name in the log, in characters.
const MAX_LOGGED_NAME: usize = 64;

/// How many bytes a TLS connection may send before it is admitted: its handshake, with a chain of client certificates, and
/// its Hello.
const MAX_TLS_GREETING: u64 = 24 * 1_024;

/// The memory that TLS may need for a connection before it is admitted.
const TLS_MEMORY: usize = 28 * 1_024;

/// How long the peer of a connection without Pings may be unreachable before the kernel ends the connection.
const DEAD_AFTER: Duration = Duration::from_secs(30);

/// The task that accepts connections. It runs on a thread of its own.
#[derive(Clone)]
pub(super) struct Acceptor {
    pub(super) admission: Arc<Admission>,
    pub(super) phase: watch::Receiver<Phase>,
    /// The runtime of the sessions.
    pub(super) serving: Handle,
    /// Counts the sessions.
    pub(super) sessions: TaskTracker,
    /// Counts the connections whose last answers are not written yet. Each such connection holds a token of this
    /// tracker.
    pub(super) unanswered: TaskTracker,
    /// The file of the Unix socket, until the server stops accepting connections.
    pub(super) socket_file: Arc<Mutex<Option<SocketFile>>>,
}

impl Acceptor {
    /// Accepts connections until the sidecar drains. Closes the listeners then.
    pub(super) async fn run(
        mut self,
        tcp: TcpListener,
        mut unix: Option<UnixListener>,
        resp: Option<TcpListener>,
    ) {
        let socket_file = Arc::clone(&self.socket_file);
        let mut next_unix = pin!(SocketFile::listen_again(&socket_file));
        let accept_resp = async || match &resp {
            Some(listener) => listener.accept().await,
            None => std::future::pending().await,
        };
        loop {
            let accept_unix = async || match &unix {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            };
            let accepted = tokio::select! {
                accepted = tcp.accept() => accepted.map(|(tcp, _)| (Either::Left(tcp), Listener::Listen)),
                accepted = accept_unix() => accepted.map(|(unix, _)| (Either::Right(unix), Listener::Socket)),
                accepted = accept_resp() => accepted.map(|(tcp, _)| (Either::Left(tcp), Listener::Resp)),
                listener = &mut next_unix => {
                    unix = Some(listener);
                    next_unix.set(SocketFile::listen_again(&socket_file));
                    continue;
                }
                _ = self.phase.wait_for(|phase| *phase != Phase::Serving) => return,
            };
            match accepted {
                Ok((socket, listener)) => {
                    self.receive(socket, listener);
                    // Let the other connections of this thread make progress after each new one.
                    tokio::task::yield_now().await;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    log_failed_accept("a connection", &error);
                    let pause = if self.admission.close_one() { EVICTION_PAUSE } else { ACCEPT_PAUSE };
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    /// Starts the task of a new connection.
    fn receive(&self, socket: Socket, listener: Listener) {
        let admission = Arc::clone(&self.admission);
        admission.metrics.connections_opened.inc();
        let (peer, source, address) = match &socket {
            Either::Left(tcp) => {
                // These calls fail only if the connection has ended already.
                let _ = tcp.set_nodelay(true);
                if listener == Listener::Resp {
                    // This protocol has no Pings by which a dead peer is found.
                    let _ = SockRef::from(tcp).set_tcp_keepalive(&keep_alive());
                    let _ = SockRef::from(tcp).set_tcp_user_timeout(Some(DEAD_AFTER));
                }
                match tcp.peer_addr() {
                    Ok(address) => (Peer::Tcp(address), Source::of(address.ip()), address.to_string()),
                    Err(_) => return,
                }
            }
            Either::Right(unix) => {
                let user = unix.peer_cred().map_or(u32::MAX, |peer| peer.uid());
                (Peer::Unix, Source::User(user), String::from("unix"))
            }
        };
        let span = info_span!("connection", peer = %address, name = Empty, client = Empty);
        let (acceptor, mut closing) = (self.clone(), self.phase.clone());
        let start = |place| {
            let greeting = async move {
                tokio::select! {
                    () = acceptor.greet(socket, listener, peer, place) => {}
                    _ = closing.wait_for(|phase| *phase == Phase::Closed) => {}
                }
            };
            tokio::spawn(contained(greeting.instrument(span))).abort_handle()
        };
        if admission.connections(listener).unauthenticated.add(source, start) {
            admission.metrics.connections_evicted.inc();
        }
    }

    /// Makes the TLS handshake of a connection, reads its greeting, and starts its session if the client is admitted.
    /// Holds `place` until the client is admitted or the connection is closed.
    async fn greet(self, socket: Socket, listener: Listener, peer: Peer, place: Place) {
        let (clock, timeout) = (Arc::clone(&self.admission.clock), self.admission.options.hello_timeout);
        let begun = clock.stall_aware_now();
        let Some(ready) = stall_aware_timeout(timeout, self.handshake(socket)).await else {
            debug!("the TLS handshake took too long");
            return self.admission.metrics.refusals.of(Reason::TlsHandshake).inc();
        };
        let Some((stream, charge)) = ready else { return };
        let client = Client { peer, listener, certificate_name: certificate_name(&stream) };
        let stream = self.buffered(stream, listener, charge);
        // The handshake and the greeting share the time.
        let left = timeout.saturating_sub(clock.stall_aware_now().saturating_duration_since(begun));
        match listener {
            Listener::Listen | Listener::Socket => self.greet_native(stream, client, left, place).await,
            Listener::Resp => self.greet_resp(stream, client, left, place).await,
        }
    }

    async fn greet_native(self, mut stream: BufferedStream, client: Client, left: Duration, place: Place) {
        let admission = &*self.admission;
        let received = stall_aware_timeout(left, self.receive_hello(&mut stream)).await;
        let text = || format!("no Hello came within {:?}", admission.options.hello_timeout);
        let received = received.unwrap_or_else(|| Err(Some((0, Refusal::new(Reason::HelloTimeout, text())))));
        let admitted = match received {
            Ok((correlation, hello)) => admission
                .admit(&hello, &client)
                .map(|(version, admitted)| (Greeting { correlation, version }, hello, admitted))
                .map_err(|refusal| (correlation, refusal)),
            Err(Some(refused)) => Err(refused),
            Err(None) => return,
        };
        match admitted {
            Ok((greeting, hello, admitted)) => {
                drop(place);
                Span::current()
                    .record("client", hello.client_name.chars().take(MAX_LOGGED_NAME).collect::<String>());
                let start =
                    move |stream, grant, shared, phase| Session::welcome(stream, greeting, grant, shared, phase);
                self.serve(stream, admitted, start);
            }
            Err((correlation, refusal)) => {
                log_refusal(&refusal, client.peer);
                admission.metrics.refusals.of(refusal.reason).inc();
                admission.metrics.count_frame(FrameType::Error);
                stream.write(|codec, out| codec.encode_refusal(correlation, &refusal, out));
                let _ = stall_aware_timeout(CLOSE_TIMEOUT, stream.close(self.unanswered.token())).await;
            }
        }
    }

    /// Moves an admitted connection to a serving thread, where `start` makes its session.
    pub(super) fn serve<P: ClientProtocol>(
        &self,
        stream: BufferedStream,
        Admitted { shared, grant, permit }: Admitted,
        start: impl FnOnce(BufferedStream, Grant, Arc<Shared>, watch::Receiver<Phase>) -> Session<P> + Send + 'static,
    ) {
        Span::current().record("name", grant.name.as_deref());
        let stream = match stream.move_to(&self.serving, &self.admission.memory) {
            Ok(stream) => stream,
            Err(error) => return warn!(%error, "an admitted connection could not be served, and is closed"),
        };
        let (phase, unanswered) = (self.phase.clone(), self.unanswered.token());
        let session = async move {
            // Hold the permit until the end of the task. It is released even if the task panics.
            let _permit = permit;
            start(stream, grant, shared, phase).run(unanswered).await;
        };
        self.sessions.spawn_on(contained(session.instrument(Span::current())), &self.serving);
    }

    /// Gives a connection its buffers, with the limits of an unauthenticated one.
    fn buffered(&self, stream: Stream, listener: Listener, charge: Charge) -> BufferedStream {
        let (codec, max_queued) = (Codec::new(MAX_GREETING_LENGTH), self.admission.options.max_queued_bytes);
        let metrics = &self.admission.metrics;
        let traffic = Traffic {
            received: metrics.received_bytes.of(listener).clone(),
            sent: metrics.sent_bytes.of(listener).clone(),
        };
        BufferedStream::new(stream, codec, max_queued, charge, traffic)
    }

    /// Reads the Hello. Returns it with its correlation id, or the refusal to send; without a refusal, the connection ended.
    async fn receive_hello(&self, stream: &mut BufferedStream) -> Result<(u32, Hello), Option<(u32, Refusal)>> {
        loop {
            match stream.decode() {
                Ok(None) => {}
                Ok(Some(Decoded::Frame(Frame { correlation, body }))) => {
                    self.admission.metrics.count_frame(body.frame_type());
                    return match body {
                        Body::Hello(hello) => Ok((correlation, hello)),
                        other => {
                            let found = other.frame_type().as_str();
                            let text =
                                format!("the first frame of a connection must be hello, but this one is {found}");
                            Err(Some((correlation, Refusal::new(Reason::HelloExpected, text))))
                        }
                    };
                }
                Ok(Some(Decoded::Refused { correlation, refusal })) => {
                    return Err(Some((correlation, not_hello(refusal))));
                }
                Err(DecodeError { correlation, refusal }) => return Err(Some((correlation, refusal))),
            }
            match stream.read_or_write(true).await {
                Ok(IoEvent::Ended | IoEvent::OverBudget) => return Err(None),
                Ok(_) => {}
                Err(error) => {
                    debug!(%error, "connection lost");
                    return Err(None);
                }
            }
            // Let the other connections of this thread make progress after each read.
            tokio::task::yield_now().await;
        }
    }

    /// Makes the TLS handshake of a TCP connection if the server has a certificate. Other connections need no
    /// handshake. Returns the stream with the charge of its memory, or `None` if the handshake fails.
    async fn handshake(&self, socket: Socket) -> Option<(Stream, Charge)> {
        let mut charge = self.admission.unauthenticated_memory.open();
        let (tcp, certificate) = match (socket, &self.admission.certificate) {
            (Either::Left(tcp), Some(certificate)) => (tcp, certificate),
            (socket, _) => return Some((Either::Left(socket), charge)),
        };
        charge.set(TLS_MEMORY);
        // A port probe closes or resets the connection without sending a byte. This does not count as a failed
        // handshake.
        if !matches!(tcp.peek(&mut [0]).await, Ok(1..)) {
            debug!("the connection was closed before a TLS handshake began");
            return None;
        }
        match certificate.acceptor().accept(tls_socket(tcp, MAX_TLS_GREETING)).await {
            Ok(stream) => Some((Either::Right(Box::new(stream)), charge)),
            Err(error) => {
                self.admission.metrics.refusals.of(Reason::TlsHandshake).inc();
                log_failed_handshake(&error);
                None
            }
        }
    }
}

/// Returns the options by which the kernel finds a peer that no longer answers.
fn keep_alive() -> TcpKeepalive {
    TcpKeepalive::new().with_time(DEAD_AFTER / 2).with_interval(DEAD_AFTER / 6).with_retries(3)
}

/// Accepts a connection. After a failure, logs that `what` could not be accepted, pauses, and tries again.
pub(crate) async fn accept<T, F: Future<Output = io::Result<T>>>(what: &str, accept: impl Fn() -> F) -> T {
    loop {
        match accept().await {
            Ok(accepted) => return accepted,
            Err(error) => log_failed_accept(what, &error),
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

fn log_failed_accept(what: &str, error: &io::Error) {
    warn!(
        %error,
        "{what} could not be accepted; trying again: if files run out, raise the limit (ulimit -n, LimitNOFILE of systemd)"
    );
}

/// Returns the refusal to send for a first frame that cannot be decoded. Returns `refusal`, which is the refusal of the
/// decoder, if its reason closes the connection. Otherwise returns `HelloExpected`, because the first frame must be a
/// Hello.
fn not_hello(refusal: Refusal) -> Refusal {
    if refusal.reason.closes() {
        return refusal;
    }
    let text = format!("the first frame of a connection must be hello, but this one is not: {}", refusal.text);
    Refusal::new(Reason::HelloExpected, text)
}
