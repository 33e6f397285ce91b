//! A configuration becomes a running sidecar, and a handle to it. `serve`, tests and examples use it.

mod error;
mod listening;
mod prepared;
mod stores;

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span, error, error_span, info, warn};

pub use self::error::StartError;
use self::listening::Listening;
use self::prepared::Prepared;
use self::stores::open_store;
use crate::admin::{self, Health};
use crate::clock::Clock;
use crate::config::{Config, StoreKind};
use crate::core::outbox::GroupBacklog;
use crate::core::outboxes::Outboxes;
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::Handover;
use crate::core::rings::Rings;
use crate::core::store::{RingParts, Store};
use crate::delivery::Delivery;
use crate::logging;
use crate::metrics::{Limits, Metrics};
use crate::process::thread::RuntimeThread;
use crate::server::{self, DRAIN_GRACE, Server};
use crate::ticker::precise_timer::PreciseTimer;
use crate::ticker::read_barrier::ReadBarrier;
use crate::ticker::{Ticker, TickerHandle};

/// How often a drain looks whether all batches are acknowledged.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// How long connections may take for their last answers.
const CLOSE_PATIENCE: Duration = Duration::from_secs(1);

/// How long it may take to give back what departed subscribers held.
const LEAVE_PATIENCE: Duration = Duration::from_millis(500);

/// How long the store may take to close, and how long after the begin of a drain: it is to end within 10 s.
const STORE_PATIENCE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_millis(9_700));

/// A running sidecar. Dropping it ends its tasks at once; [`Sidecar::drain`] ends it properly.
///
/// If one of its tasks panics, the rest cannot go on: `serve`, and a program of your own that starts a sidecar, call
/// [`panics::end_the_process`](crate::process::panics::end_the_process) first.
pub struct Sidecar {
    name: String,
    address: SocketAddr,
    admin_address: SocketAddr,
    store: Arc<dyn Store>,
    clock: Arc<Clock>,
    delivery: Arc<Delivery>,
    health: Arc<Health>,
    server: Option<Server>,
    tickers: Vec<TickerHandle>,
    _threads: [RuntimeThread; 2],
    ticking: Vec<JoinHandle<()>>,
    tasks: Vec<JoinHandle<()>>,
    drain_timeout: Duration,
}

impl Sidecar {
    /// Listens, opens the store, and starts to turn the wheel. Whoever drops this before it is done loses nothing.
    ///
    /// # Errors
    ///
    /// When an address is in use, the store cannot be opened, or the system has no thread to give.
    pub async fn start(config: Config) -> Result<Sidecar, StartError> {
        let prepared = Prepared::new(&config).await?;
        let store = open_store(&config, &prepared).await?;
        // To wait for Redis was not to stand still.
        prepared.clock.beat();
        Ok(Sidecar::start_from(config, prepared, store))
    }

    /// The same on a store of the caller's, in place of the one that the configuration names.
    ///
    /// # Errors
    ///
    /// When an address is in use, or the system has no thread to give.
    pub async fn start_on(config: Config, store: Arc<dyn Store>) -> Result<Sidecar, StartError> {
        let prepared = Prepared::new(&config).await?;
        Ok(Sidecar::start_from(config, prepared, store))
    }

    fn start_from(config: Config, prepared: Prepared, store: Arc<dyn Store>) -> Sidecar {
        let Prepared { name, listening, clock, metrics, ticker_thread, admin_thread, answers } = prepared;
        let Listening { listeners, address, admin_listener, admin_address } = listening;
        let read_barrier = ReadBarrier::new();
        show_settings(&config, store.rings().len(), &metrics);
        let delivery = Arc::new(Delivery::new(
            Outboxes::of(store.rings()),
            Arc::clone(&clock),
            Arc::clone(&metrics),
            config.redeliver_after,
        ));
        let (mut tickers, mut ticking) = (Vec::new(), Vec::new());
        for (ring, seat) in store.rings().iter().enumerate() {
            let (clock, read_barrier, metrics) =
                (Arc::clone(&clock), Arc::clone(&read_barrier), Arc::clone(&metrics));
            let (ticker, handle) = Ticker::new(seat, clock, read_barrier, metrics);
            let span = span_of(ring, &*store);
            ticking.push(
                ticker_thread.spawn(async move { ticker.run(PreciseTimer::precise()).await }.instrument(span)),
            );
            tickers.push(handle);
        }
        let certificate = config.certificate.map(Arc::new);
        let health = Arc::new(Health {
            name: name.clone(),
            store: Arc::clone(&store),
            delivery: Arc::clone(&delivery),
            metrics: Arc::clone(&metrics),
            clock: Arc::clone(&clock),
            tickers: tickers.clone(),
            certificate: certificate.clone(),
            draining: false.into(),
            answers,
        });
        let shared = Arc::new(server::Shared {
            options: config.server,
            token: config.token,
            certificate,
            store: Arc::clone(&store),
            rings: Rings::new(store.rings()),
            delivery: Arc::clone(&delivery),
            clock: Arc::clone(&clock),
            read_barrier,
            metrics: Arc::clone(&metrics),
        });
        let tasks = vec![
            tokio::spawn(maintain(Arc::clone(&delivery))),
            tokio::spawn({
                let clock = Arc::clone(&clock);
                async move { match server::report_full_limits(metrics, clock).await {} }
            }),
            admin_thread.spawn(admin::serve(admin_listener, Arc::clone(&health))),
            tokio::spawn(read_files_again(Arc::clone(&shared))),
        ];
        Sidecar {
            name,
            address,
            admin_address,
            clock,
            delivery,
            health,
            server: Some(Server::start(listeners, &shared)),
            tickers,
            _threads: [ticker_thread, admin_thread],
            ticking,
            tasks,
            store,
            drain_timeout: config.drain_timeout,
        }
    }

    /// What it is called among sidecars that share a store.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where logic nodes connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where metrics, probes and status are.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// What the probes are told.
    #[must_use]
    pub fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
    }

    /// Refuses new work, finishes the old, and goes.
    ///
    /// # Errors
    ///
    /// When the store could not put away what it keeps. All the rest was done.
    pub async fn drain(mut self) -> Result<(), Refusal> {
        let begun = self.clock.now();
        let (deadline, grace_over) = (begun + self.drain_timeout, begun + DRAIN_GRACE);
        self.health.draining.store(true, std::sync::atomic::Ordering::Relaxed);
        let server = self.server.take().expect("only a drain takes the server, and it consumes the sidecar");
        server.drain();
        info!("draining: new messages are refused");
        // Before anything is waited for: where others could lead, one of them does from here on.
        let handover = self.drain_rings(deadline).await;
        if handover == Handover::HandedOut {
            self.wait_for_subscribers(deadline).await;
        }
        // Clients that have not seen GoAway yet still get their answers.
        tokio::time::sleep_until(grace_over.into()).await;
        // Who is not heard any more is not judged either: nothing is decided from here on.
        end_all(&mut self.ticking).await;
        server.close(CLOSE_PATIENCE).await;
        self.delivery.deserted(LEAVE_PATIENCE).await;
        if handover == Handover::HandedOut {
            self.tell_what_is_left().await;
        }
        end_all(&mut self.tasks).await;
        let last = (begun + STORE_PATIENCE.1).min(self.clock.now() + STORE_PATIENCE.0);
        let closing = self.store.close(self.clock.moment());
        let Ok(kept) = tokio::time::timeout_at(last.into(), closing).await else {
            if self.store.rings().iter().any(|seat| !seat.outbox.is_shared()) {
                let text = "the state file was not written in time, and the wheel ends with this process";
                return Err(Refusal::new(Reason::StoreSilent, text));
            }
            warn!(
                "drained, but the store did not end in time: the other sidecars see to what is left by themselves"
            );
            return Ok(());
        };
        info!("drained; {}", kept?);
        Ok(())
    }

    /// Drains all rings at the same time; says whether any of them hands out what was in flight.
    async fn drain_rings(&self, deadline: Instant) -> Handover {
        let rings = self.store.rings().iter().zip(&self.tickers).enumerate();
        let draining = rings.map(|(ring, (seat, ticker))| {
            self.drain_ring(seat, ticker, deadline).instrument(span_of(ring, &*self.store))
        });
        let handovers = join_all(draining).await;
        if handovers.contains(&Handover::HandedOut) { Handover::HandedOut } else { Handover::Kept }
    }

    async fn drain_ring(&self, seat: &RingParts, ticker: &TickerHandle, deadline: Instant) -> Handover {
        let drained = tokio::time::timeout_at(deadline.into(), ticker.drain()).await;
        match &drained {
            Ok(Ok(Handover::Kept)) => return Handover::Kept,
            Ok(Ok(Handover::HandedOut)) => {}
            Ok(Err(refusal)) => warn!(
                %refusal,
                "the store refused to drain a ring: look at the store; what Redis has, other sidecars go on with"
            ),
            Err(_) => error!(
                "a ring could not be drained in time: in Redis it stays, but in memory what is not handed out yet ends \
                 with the process; keep it with --state, or leave --drain-timeout as long as it can be"
            ),
        }
        // Its ticker has not given the lease up.
        if let Err(refusal) = seat.lease.release(self.clock.now()).await {
            warn!(%refusal, "the lease could not be given up: another sidecar leads by itself when it has run out");
        }
        // What ends with the process is handed out as far as it came.
        if seat.outbox.is_shared() { Handover::Kept } else { Handover::HandedOut }
    }

    /// Waits until every group with a subscriber has acknowledged everything.
    async fn wait_for_subscribers(&self, deadline: Instant) {
        while self.clock.now() < deadline {
            let left = self.left().await;
            if !left.iter().any(|of| self.delivery.subscribers(&of.group) > 0) {
                return;
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }

    /// Says what no one will acknowledge any more.
    async fn tell_what_is_left(&self) {
        for of in self.left().await {
            error!(
                group = %of.group,
                batches = of.batches,
                "this group did not acknowledge its last batches, and they end with the process, unless a state \
                 file with room for them keeps them: subscribe before the sidecar stops, or keep the \
                 wheel with --state"
            );
        }
    }

    /// The groups that have not acknowledged everything.
    async fn left(&self) -> Vec<GroupBacklog> {
        match self.delivery.backlog().await {
            Ok(backlog) => backlog.groups.into_iter().filter(|of| of.batches > 0).collect(),
            Err(refusal) => {
                warn!(%refusal, "the outbox does not say what is left, and is not waited for: look at the store");
                Vec::new()
            }
        }
    }
}

async fn maintain(delivery: Arc<Delivery>) {
    delivery.maintain().await;
}

/// Reads the files of token and certificate again when their content changes.
async fn read_files_again(shared: Arc<server::Shared>) {
    let certificate = async {
        match &shared.certificate {
            Some(certificate) => certificate.maintain().await,
            None => pending().await,
        }
    };
    tokio::select! {
        never = shared.token.maintain() => match never {},
        never = certificate => match never {},
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Shows what dashboards and alerts measure the rest against.
fn show_settings(config: &Config, rings: usize, metrics: &Metrics) {
    let max_held_acks = match &config.store {
        StoreKind::Memory => 0,
        StoreKind::Redis(shared) => shared.max_held_acks,
    };
    let Config { wheel, max_in_flight, retention, .. } = *config;
    let max_connections = config.server.max_connections;
    metrics.show_limits(&Limits {
        max_in_flight,
        max_held_acks,
        outbox_max_ids: retention.max_ids,
        max_connections,
    });
    metrics.show_wheel(rings, wheel.ticks(wheel.slots().into()));
}

/// Ends tasks. One may be in the middle of a move, and what comes next must be after that.
async fn end_all(tasks: &mut Vec<JoinHandle<()>>) {
    for task in tasks.drain(..) {
        task.abort();
        let _ = task.await;
    }
}

/// What is logged of a ring says which, where there are several; with `--log error` too.
fn span_of(ring: usize, store: &dyn Store) -> Span {
    if store.rings().len() > 1 { error_span!(logging::RING, ring) } else { Span::none() }
}
