//! Builds and runs a sidecar from its configuration. `serve`, tests and examples use it.

mod drain;
mod error;
mod prepared;
mod stores;

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tracing::{Instrument, Span, error_span, warn};

pub use self::error::StartError;
use self::prepared::Prepared;
use self::stores::open_store;
use crate::admin::{self, Health, SharedAnswer};
use crate::config::Config;
use crate::core::outboxes::Outboxes;
use crate::core::rings::Rings;
use crate::core::store::Store;
use crate::delivery::Delivery;
use crate::logging;
use crate::metrics::{Metrics, gauge_value};
use crate::process::thread::RuntimeThread;
use crate::server::{self, Server};
use crate::ticker::Ticker;
use crate::ticker::precise_timer::PreciseTimer;
use crate::ticker::read_barrier::ReadBarrier;

/// A running sidecar. Dropping it ends its tasks at once; [`Sidecar::drain`] ends it properly.
///
/// If one of its tasks panics, the rest cannot go on: `serve`, and a program of your own that starts a sidecar, call
/// [`panics::end_the_process`](crate::process::panics::end_the_process) first.
pub struct Sidecar {
    address: SocketAddr,
    admin_address: SocketAddr,
    health: Arc<Health>,
    /// Taken by a drain.
    server: Option<Server>,
    _threads: [RuntimeThread; 2],
    /// The tickers.
    ticking: Vec<JoinHandle<()>>,
    tasks: Vec<JoinHandle<()>>,
    drain_timeout: Duration,
}

impl Sidecar {
    /// Listens, opens the store, and starts the tickers. If the future is dropped before it is complete, nothing is lost.
    ///
    /// # Errors
    ///
    /// When an address is in use, the store cannot be opened, or the system has no thread left.
    pub async fn start(config: Config) -> Result<Sidecar, StartError> {
        let prepared = Prepared::new(&config).await?;
        let store = open_store(&config, &prepared).await?;
        // Waiting for Redis was no stall.
        prepared.clock.beat();
        Ok(Sidecar::start_from(config, prepared, store))
    }

    /// Like [`Sidecar::start`], on a store of the caller in place of the one that the configuration names.
    ///
    /// # Errors
    ///
    /// When an address is in use, or the system has no thread left.
    pub async fn start_on(config: Config, store: Arc<dyn Store>) -> Result<Sidecar, StartError> {
        let prepared = Prepared::new(&config).await?;
        Ok(Sidecar::start_from(config, prepared, store))
    }

    fn start_from(config: Config, prepared: Prepared, store: Arc<dyn Store>) -> Sidecar {
        let Prepared { clock, metrics, ticker_thread, admin_thread, .. } = prepared;
        export_settings(&config, store.rings().len(), &metrics);
        let delivery = Arc::new(Delivery::new(
            Outboxes::of(store.rings()),
            Arc::clone(&clock),
            Arc::clone(&metrics),
            config.redeliver_after,
        ));
        let read_barrier = ReadBarrier::new();
        let (mut tickers, mut ticking) = (Vec::new(), Vec::new());
        for (ring, parts) in store.rings().iter().enumerate() {
            let (ticker, handle) =
                Ticker::new(parts, Arc::clone(&clock), Arc::clone(&read_barrier), Arc::clone(&metrics));
            let run = async move { ticker.run(PreciseTimer::precise()).await };
            ticking.push(ticker_thread.spawn(run.instrument(span_of(ring, &*store))));
            tickers.push(handle);
        }
        let shared = Arc::new(server::Shared {
            options: config.server,
            token: config.token,
            certificate: config.certificate,
            rings: Rings::new(store.rings()),
            store,
            delivery: Arc::clone(&delivery),
            clock: Arc::clone(&clock),
            read_barrier,
            metrics: Arc::clone(&metrics),
        });
        let health = Arc::new(Health {
            name: prepared.name,
            shared: Arc::clone(&shared),
            tickers,
            draining: false.into(),
            metrics_answer: SharedAnswer::made_on(&prepared.answer_thread),
            status_answer: SharedAnswer::made_on(&prepared.answer_thread),
        });
        let tasks = vec![
            tokio::spawn(async move { delivery.maintain().await }),
            tokio::spawn(async move { match server::report_reached_limits(metrics, clock).await {} }),
            admin_thread.spawn(admin::serve(prepared.admin_listener, Arc::clone(&health))),
            tokio::spawn(watch_files(Arc::clone(&shared))),
        ];
        Sidecar {
            address: prepared.address,
            admin_address: prepared.admin_address,
            health,
            server: Some(Server::start(prepared.listeners, &shared)),
            _threads: [ticker_thread, admin_thread],
            ticking,
            tasks,
            drain_timeout: config.drain_timeout,
        }
    }

    /// Its name among sidecars that share a store.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.health.name
    }

    /// The TCP address for logic nodes.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address of metrics, probes and status.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// The state that the probes report.
    #[must_use]
    pub fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Files that are open beside connections: listeners, links to Redis, timers, and the process' own.
const OTHER_FILES: u64 = 64;

/// Raises the limit of open files of this process, and warns if that is too low for the connections.
pub fn raise_open_files_limit(config: &Config) {
    let connections = (config.server.max_connections as u64).saturating_add(admin::MAX_CONNECTIONS as u64);
    let wanted = connections.saturating_add(OTHER_FILES);
    match rlimit::increase_nofile_limit(u64::MAX) {
        Ok(limit) if limit >= wanted => {}
        Ok(limit) => warn!(
            "only {limit} files may be open, and --max-connections needs {wanted}: raise the limit (ulimit -n, LimitNOFILE \
             of systemd), or lower --max-connections"
        ),
        Err(error) => {
            warn!(%error, "the limit of open files could not be raised: raise it (ulimit -n, LimitNOFILE of systemd)");
        }
    }
}

/// Reads the files of token and certificate again when their content changes.
async fn watch_files(shared: Arc<server::Shared>) {
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

/// Exports the limits and settings that dashboards and alerts compare with.
fn export_settings(config: &Config, rings: usize, metrics: &Metrics) {
    let max_held_acks = config.redis.as_ref().map_or(0, |redis| redis.0.max_held_acks);
    metrics.max_in_flight.set(gauge_value(config.max_in_flight));
    metrics.max_held_acks.set(gauge_value(max_held_acks));
    metrics.outbox_max_ids.set(gauge_value(config.retention.max_ids));
    metrics.max_connections.set(gauge_value(config.server.max_connections as u64));
    metrics.rings.set(gauge_value(rings as u64));
    metrics.ack_timeout.set(config.wheel.ticks(config.wheel.slots().into()).as_secs_f64());
}

/// The span of log lines about a ring: where there are several it names the ring, also with `--log error`.
fn span_of(ring: usize, store: &dyn Store) -> Span {
    if store.rings().len() > 1 { error_span!(logging::RING, ring) } else { Span::none() }
}
