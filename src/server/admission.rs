//! Decides whether a connection is admitted: by the bounds of its listener, and by its Hello.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::body::Bytes;
use futures_util::future::OptionFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tracing::{debug, warn};

use super::access::{Access, Client, Grant, Peer};
use super::credentials::Certificate;
use super::memory_budget::MemoryBudget;
use super::shared::{Phase, ServerOptions, Shared};
use super::unauthenticated::Unauthenticated;
use crate::clock::Clock;
use crate::core::{Reason, Refusal};
use crate::metrics::{Listener, Metrics, gauge_value};
use crate::protocol::frame::{Hello, VERSIONS};

/// The maximum numbers of unauthenticated connections of `--listen`, of the Unix socket, and of `--resp`.
const MAX_UNAUTHENTICATED: [usize; 3] = [512, 64, 512];

/// The number of files that unauthenticated connections may need.
pub const UNAUTHENTICATED_FILES: usize = MAX_UNAUTHENTICATED[0] + MAX_UNAUTHENTICATED[1] + MAX_UNAUTHENTICATED[2];

/// The number of bytes that all unauthenticated connections may have together. The limits of each let them have less,
/// except those with the right token that wait for the store.
pub const MAX_UNAUTHENTICATED_MEMORY: usize = 40 * 1_024 * 1_024;

/// Returns the status of the sidecar as JSON.
pub type StatusSource =
    Box<dyn Fn() -> Pin<Box<dyn Future<Output = Result<Bytes, Refusal>> + Send>> + Send + Sync>;

/// The parts that check a new connection. They exist before the store is open.
pub struct Admission {
    /// The limits and timeouts of connections.
    pub options: ServerOptions,
    /// The tokens that clients must present.
    pub access: Arc<Access>,
    /// The certificate of the TCP listener. With `None`, the listener does not speak TLS.
    pub certificate: Option<Certificate>,
    /// The memory of the buffers of all admitted connections.
    pub memory: Arc<MemoryBudget>,
    /// The memory of all unauthenticated connections.
    pub unauthenticated_memory: Arc<MemoryBudget>,
    /// The clock of the sidecar.
    pub clock: Arc<Clock>,
    /// The metrics of the sidecar.
    pub metrics: Arc<Metrics>,
    /// The phase of the server. A change of tokens or names also notifies its receivers, while the server serves.
    pub(super) phase: watch::Sender<Phase>,
    /// The parts that sessions share. Not set while the store is being opened.
    shared: OnceLock<Arc<Shared>>,
    /// The source of the status. Not set while the store is being opened.
    status: OnceLock<StatusSource>,
    /// When the sidecar started.
    pub(super) started: Instant,
    /// The connections of each [`Listener`].
    listeners: [Connections; 3],
}

/// The connections of one listener.
pub(super) struct Connections {
    pub(super) unauthenticated: Arc<Unauthenticated>,
    /// The permits for further admitted connections. Each admitted connection holds one.
    free: Arc<Semaphore>,
}

impl Admission {
    /// Creates the parts. Until [`Admission::open`], every Hello is refused with `starting`, and clients of the RESP protocol
    /// wait.
    pub fn new(
        options: ServerOptions,
        access: Access,
        certificate: Option<Certificate>,
        clock: Arc<Clock>,
        metrics: Arc<Metrics>,
    ) -> Admission {
        let listeners = MAX_UNAUTHENTICATED.map(|max| Connections {
            unauthenticated: Unauthenticated::new(max),
            free: Arc::new(Semaphore::new(options.max_connections)),
        });
        Admission {
            memory: Arc::new(MemoryBudget::new(options.max_connection_memory)),
            unauthenticated_memory: Arc::new(MemoryBudget::new(MAX_UNAUTHENTICATED_MEMORY)),
            options,
            access: Arc::new(access),
            certificate,
            started: clock.now(),
            clock,
            metrics,
            phase: watch::Sender::new(Phase::Serving),
            shared: OnceLock::new(),
            status: OnceLock::new(),
            listeners,
        }
    }

    /// Admits clients from now on. Must be called once.
    pub fn open(&self, shared: &Arc<Shared>, status: StatusSource) {
        let _ = self.status.set(status);
        let _ = self.shared.set(Arc::clone(shared));
    }

    /// Keeps the tokens, the names of client certificates and the certificate up to date with their files. Returns at once
    /// if none is configured, and otherwise never.
    pub async fn maintain(&self) {
        let certificate = OptionFuture::from(self.certificate.as_ref().map(Certificate::maintain));
        let changed = || {
            self.phase.send_if_modified(|phase| *phase == Phase::Serving);
        };
        tokio::join!(self.access.maintain(changed), certificate);
    }

    /// Returns the status of the sidecar as JSON.
    pub(super) async fn status(&self) -> Result<Bytes, Refusal> {
        match self.status.get() {
            Some(status) => status().await,
            None => Err(starting()),
        }
    }

    /// Returns the connections of a listener.
    pub(super) fn connections(&self, listener: Listener) -> &Connections {
        &self.listeners[listener as usize]
    }

    /// Returns the number of admitted connections of a listener.
    pub fn admitted_at(&self, listener: Listener) -> u64 {
        (self.options.max_connections - self.connections(listener).free.available_permits()) as u64
    }

    /// Returns the number of admitted connections.
    pub(super) fn admitted(&self) -> u64 {
        Listener::ALL.iter().map(|listener| self.admitted_at(*listener)).sum()
    }

    /// Returns the parts that sessions share, or `None` while the store is being opened.
    pub fn shared(&self) -> Option<&Arc<Shared>> {
        self.shared.get()
    }

    /// Returns the number of admitted connections of the listener that has most of them.
    pub fn busiest_listener(&self) -> usize {
        let free = self.listeners.iter().map(|listener| listener.free.available_permits()).min();
        self.options.max_connections - free.unwrap_or_default()
    }

    /// Sets the gauges of connections and of the certificate.
    pub fn set_gauges(&self) {
        let sum = |count: fn(&Connections) -> usize| self.listeners.iter().map(count).sum::<usize>() as u64;
        for listener in Listener::ALL {
            self.metrics.connections.of(listener).set(gauge_value(self.admitted_at(listener)));
        }
        let unauthenticated = sum(|listener| listener.unauthenticated.count());
        self.metrics.unauthenticated_connections.set(gauge_value(unauthenticated));
        let expiry = self.certificate.as_ref().and_then(Certificate::expiry);
        self.metrics.certificate_expiry.set(expiry.unwrap_or_default());
    }

    /// Checks the Hello of a client: its versions, its token, and the limit of connections. Returns the parts that the
    /// session needs.
    pub(super) fn admit(&self, hello: &Hello, client: &Client) -> Result<(u8, Admitted), Refusal> {
        let (first, last) = VERSIONS.into_inner();
        let Hello { lowest_version: lowest, highest_version: highest, .. } = *hello;
        if last.min(highest) < first.max(lowest) {
            let text = format!(
                "this server speaks versions {first} to {last} of the protocol, and the client {lowest} to {highest}: \
                 update the older one"
            );
            return Err(Refusal::new(Reason::UnsupportedVersion, text));
        }
        Ok((last.min(highest), self.admit_token(&hello.token.0, client)?))
    }

    /// Checks the token of a client, and the limit of connections. Returns the parts that the session needs.
    pub(super) fn admit_token(&self, token: &[u8], client: &Client) -> Result<Admitted, Refusal> {
        let grant = self.access.admit(token, client, self.clock.now())?;
        let shared = self.shared().ok_or_else(starting)?;
        let (free, max) = (&self.connections(client.listener).free, self.options.max_connections);
        let permit = Arc::clone(free).try_acquire_owned().ok();
        let Some(permit) = permit.filter(|_| grant.may_have_place(free.available_permits(), max)) else {
            let text = format!(
                "this sidecar has {max} connections already, or keeps the last of them for clients of other names: \
                 share connections, or raise --max-connections"
            );
            return Err(Refusal::new(Reason::TooManyConnections, text));
        };
        Ok(Admitted { shared: Arc::clone(shared), grant, permit })
    }

    /// Closes an unauthenticated connection of the listener at which one source has the most. Returns whether there was
    /// one.
    pub(super) fn close_one(&self) -> bool {
        let all = self.listeners.iter().map(|listener| &listener.unauthenticated);
        let most = all.max_by_key(|found| found.most()).filter(|found| found.count() > 0);
        if let Some(found) = most {
            found.close_one();
            self.metrics.connections_evicted.inc();
        }
        most.is_some()
    }
}

/// A client whose Hello was accepted.
pub(super) struct Admitted {
    pub(super) shared: Arc<Shared>,
    pub(super) grant: Grant,
    pub(super) permit: OwnedSemaphorePermit,
}

fn starting() -> Refusal {
    Refusal::new(
        Reason::Starting,
        "this sidecar is starting, and its store is being opened: connect again in a second",
    )
}

/// Logs a refusal before Welcome.
pub(super) fn log_refusal(refusal: &Refusal, peer: Peer) {
    match refusal.reason {
        Reason::Unauthorized => warn!(%refusal, "a client is not admitted"),
        Reason::TooManyAttempts => {
            let Peer::Tcp(address) = peer else { return };
            warn!(address = %address.ip(), "too many wrong tokens from this address: find the client that sends them");
        }
        Reason::UnsupportedVersion => {
            warn!(%refusal, "a client that has no protocol version in common with this server is turned away");
        }
        _ => debug!(%refusal, "refused"),
    }
}
