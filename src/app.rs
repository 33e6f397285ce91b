//! Builds a sidecar from its configuration, and runs it. The command `ackwheel serve`, tests and examples use this
//! module.
//!
//! Start and drain return boxed futures, so that their code is compiled here, once, and not in each program that awaits
//! them.

mod drain;

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, OptionFuture};
use rustix::system::uname;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::{Instrument, Span, error_span, info, warn};

use crate::admin::{self, Health};
use crate::clock::Clock;
use crate::config::{Config, RedisConfig};
use crate::core::{CombinedOutbox, Rings, Store};
use crate::delivery::Delivery;
use crate::logging;
use crate::memory::{JournalError, MemoryOptions, MemoryStore};
use crate::metrics::{Metrics, gauge_value};
use crate::process::thread::RuntimeThread;
use crate::redis::{RedisOptions, RedisStore, RedisStoreError, StoreUrl};
use crate::server::{self, Admission, Listeners, Server, Shared, SocketFile, UNAUTHENTICATED_FILES};
use crate::ticker::Ticker;
use crate::ticker::precise_timer::PreciseTimer;
use crate::ticker::read_barrier::ReadBarrier;

/// A running sidecar. Dropping this value aborts its tasks at once. [`Sidecar::drain`] first delivers or keeps the
/// messages in flight.
///
/// If one task panics, the other tasks cannot continue correctly, so the panic must end the process. Call
/// [`panics::end_the_process`](crate::process::panics::end_the_process) before you start a sidecar, as `ackwheel serve`
/// does.
pub struct Sidecar {
    /// The TCP address for logic nodes.
    pub address: SocketAddr,
    /// The TCP address of the RESP protocol, if it is served.
    pub resp_address: Option<SocketAddr>,
    /// The HTTP address of metrics, probes and the status.
    pub admin_address: SocketAddr,
    /// The parts whose state metrics, probes and `/status` report.
    pub health: Arc<Health>,
    shared: Arc<Shared>,
    server: Server,
    tickers: JoinSet<()>,
    tasks: JoinSet<()>,
    drain_timeout: Duration,
    _threads: [RuntimeThread; 2],
}

impl Sidecar {
    /// Opens the listeners and the store, and starts the tasks. While the store is being opened, the admin endpoints
    /// already answer, and every Hello is refused with `starting`. Dropping the future before it completes loses no
    /// data, because nothing is awaited after the store is open.
    ///
    /// # Errors
    ///
    /// If an address cannot be listened on, if the store cannot be opened, or if the system has no thread or no file
    /// descriptor left.
    pub fn start(config: Config) -> BoxFuture<'static, Result<Sidecar, StartError>> {
        Box::pin(Sidecar::start_with(config, None))
    }

    /// Like [`Sidecar::start`], but uses `store` instead of the store that the configuration names.
    ///
    /// # Errors
    ///
    /// If an address cannot be listened on, or if the system has no thread or no file descriptor left.
    pub fn start_on(config: Config, store: Arc<dyn Store>) -> BoxFuture<'static, Result<Sidecar, StartError>> {
        Box::pin(Sidecar::start_with(config, Some(store)))
    }

    async fn start_with(mut config: Config, store: Option<Arc<dyn Store>>) -> Result<Sidecar, StartError> {
        let (listeners, address, resp_address) = open_listeners(&config).await?;
        let (admin_listener, admin_address) = listen("--admin", config.admin).await?;
        let start_thread = |name| RuntimeThread::start(name).map_err(StartError::Thread);
        let (ticker_thread, admin_thread) = (start_thread("ticker")?, start_thread("admin")?);
        let answer_thread = start_thread("answers")?;
        let admin_listener = admin_thread.adopt(admin_listener).map_err(StartError::Thread)?;
        let host = || uname().nodename().to_string_lossy().into_owned();
        let name = config.name.clone().unwrap_or_else(|| format!("{}:{}", host(), address.port()));
        let (clock, metrics) = (Arc::new(Clock::start()), Arc::new(Metrics::default()));
        let (access, certificate) = (mem::take(&mut config.access), config.certificate.take());
        let admission =
            Admission::new(config.server.clone(), access, certificate, Arc::clone(&clock), Arc::clone(&metrics));
        let admission = Arc::new(admission);
        let health = Arc::new(Health::new(&name, &admission, answer_thread));
        let mut tasks = JoinSet::new();
        let hosts = mem::take(&mut config.admin_hosts);
        tasks.spawn_on(admin::serve(admin_listener, Arc::clone(&health), hosts), &admin_thread.handle);
        tasks.spawn(server::report_reached_limits(Arc::clone(&metrics)));
        let watched = Arc::clone(&admission);
        tasks.spawn(async move { watched.maintain().await });
        tasks.spawn_on(Arc::clone(&health).sample(), &admin_thread.handle);
        let server = Server::start(listeners, &admission).map_err(StartError::Thread)?;
        if config.redis.is_some() {
            info!(listen = %address, admin = %admin_address, "opening the store");
        }
        let store = match store {
            Some(store) => store,
            None => open_store(&config, &name, &clock, &metrics).await?,
        };
        // Opening the store may have taken long. Without this beat of the clock, the ticker would take that time for a
        // stall of the process.
        clock.beat();
        export_settings(&config, store.rings().len(), &metrics);
        let outbox = CombinedOutbox::of(store.rings());
        let delivery = Delivery::new(outbox, Arc::clone(&clock), Arc::clone(&metrics), config.redeliver_after);
        let read_barrier = ReadBarrier::new();
        let (mut tickers, mut handles) = (JoinSet::new(), Vec::new());
        for (ring, parts) in store.rings().iter().enumerate() {
            let (ticker, handle) =
                Ticker::new(parts, Arc::clone(&clock), Arc::clone(&read_barrier), Arc::clone(&metrics));
            let run = async move { ticker.run(PreciseTimer::precise()).await };
            tickers.spawn_on(run.instrument(span_of(ring, &*store)), &ticker_thread.handle);
            handles.push(handle);
        }
        let shared = Arc::new(Shared {
            options: config.server,
            rings: Rings::new(store.rings()),
            store,
            delivery: Arc::clone(&delivery),
            clock: Arc::clone(&clock),
            read_barrier,
            metrics,
        });
        health.open(handles, &shared);
        tasks.spawn(async move { delivery.maintain().await });
        Ok(Sidecar {
            address,
            resp_address,
            admin_address,
            health,
            shared,
            server,
            tickers,
            tasks,
            drain_timeout: config.drain_timeout,
            _threads: [ticker_thread, admin_thread],
        })
    }
}

/// Opens the configured store. `name` is the name of the sidecar.
async fn open_store(
    config: &Config,
    name: &str,
    clock: &Arc<Clock>,
    metrics: &Arc<Metrics>,
) -> Result<Arc<dyn Store>, StartError> {
    let Some(RedisConfig(options)) = &config.redis else {
        return Ok(Arc::new(open_memory(config, clock)?));
    };
    let options = RedisOptions { name: name.to_owned(), ..options.clone() };
    match RedisStore::open(&options, clock, metrics).await {
        Ok(store) => Ok(Arc::new(store)),
        Err(cause) => Err(StartError::Redis { url: options.url, cause }),
    }
}

fn open_memory(config: &Config, clock: &Arc<Clock>) -> Result<MemoryStore, JournalError> {
    let options = MemoryOptions {
        wheel: config.wheel,
        storm: config.storm,
        retention: config.retention,
        max_in_flight: config.max_in_flight,
        threads: config.threads,
    };
    let Some(journal) = &config.journal else { return Ok(MemoryStore::new(options, clock.moment())) };
    let (store, recovered) = MemoryStore::open(options, journal, clock)?;
    let (messages, path) = (recovered.in_flight, journal.folder.display());
    if recovered.is_old {
        info!(messages, %path, "messages in flight taken over from the journal");
        // No client could send Acks while no sidecar ran. So the next tick expires only after clients had time to
        // connect.
        store.wait_for_clients(clock.now());
    } else {
        info!(%path, "there is no journal yet, and the wheel begins empty");
    }
    Ok(store)
}

/// Opens the listeners for logic nodes. Also returns the addresses of `--listen` and `--resp`.
async fn open_listeners(config: &Config) -> Result<(Listeners, SocketAddr, Option<SocketAddr>), StartError> {
    let (tcp, address) = listen("--listen", config.listen).await?;
    let resp = OptionFuture::from(config.resp.map(|address| listen("--resp", address))).await.transpose()?;
    let (resp, resp_address) = resp.unzip();
    let mut listeners = Listeners { tcp, unix: None, resp };
    if let Some(path) = &config.socket {
        let failed = |cause| StartError::Listen { flag: "--socket", address: path.display().to_string(), cause };
        listeners.unix = Some(SocketFile::listen(path).await.map_err(failed)?);
    }
    Ok((listeners, address, resp_address))
}

/// Listens on a TCP address. Also returns the address, with the real port in place of port 0.
async fn listen(flag: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |cause| StartError::Listen { flag, address: address.to_string(), cause };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// The number of open files that the process may need in addition to connections of clients: listeners, connections to
/// Redis, timers and others.
const OTHER_FILES: u64 = 64;

/// Raises the limit of open files of this process as far as possible. Warns if the limit is too low for the maximum
/// number of connections.
pub fn raise_open_files_limit(config: &Config) {
    let listeners = 1 + u64::from(config.socket.is_some()) + u64::from(config.resp.is_some());
    let connections = (config.server.max_connections as u64).saturating_mul(listeners);
    let others = (admin::MAX_CONNECTIONS + UNAUTHENTICATED_FILES) as u64 + OTHER_FILES;
    let wanted = connections.saturating_add(others);
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

/// Exports the limits and settings that dashboards and alerts compare with other metrics.
fn export_settings(config: &Config, rings: usize, metrics: &Metrics) {
    let max_held_acks = config.redis.as_ref().map_or(0, |redis| redis.0.max_held_acks);
    metrics.max_in_flight.set(gauge_value(config.max_in_flight));
    metrics.max_held_acks.set(gauge_value(max_held_acks));
    metrics.outbox_max_ids.set(gauge_value(config.retention.max_ids));
    metrics.max_connections.set(gauge_value(config.server.max_connections as u64));
    metrics.rings.set(gauge_value(rings as u64));
    metrics.ack_timeout.set(config.wheel.ticks(config.wheel.slots().into()).as_secs_f64());
}

/// Returns the span for log lines about a ring. With several rings, the span contains the number of the ring. With one
/// ring, there is no span. The level of the span is error, so that it also appears with `--log error`.
fn span_of(ring: usize, store: &dyn Store) -> Span {
    if store.rings().len() > 1 { error_span!(logging::RING, ring) } else { Span::none() }
}

/// The reason why a sidecar could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address could not be listened on.
    #[error("cannot listen on {address}: {cause}{}; choose another {flag}", likely_cause(cause))]
    Listen {
        /// The flag that names the address.
        flag: &'static str,
        /// The address.
        address: String,
        /// The cause.
        cause: io::Error,
    },
    /// A thread for the tickers, for the admin endpoints or for new connections could not be started.
    #[error(
        "a thread for the wheel, --admin or --listen could not be started: {0}; look at the limits of processes and open files"
    )]
    Thread(io::Error),
    /// The memory store could not be opened.
    #[error(transparent)]
    Memory(#[from] JournalError),
    /// The Redis store could not be opened.
    #[error("--store {url}: {cause}")]
    Redis {
        /// The URL of the store.
        url: StoreUrl,
        /// The cause.
        cause: RedisStoreError,
    },
}

/// Returns the likely reason why an address cannot be listened on, or an empty text.
fn likely_cause(cause: &io::Error) -> &'static str {
    if cause.kind() == io::ErrorKind::AddrInUse { "; is another sidecar running there?" } else { "" }
}
