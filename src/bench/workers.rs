//! Runs the threads of a load (one run of the bench).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::thread;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::connection::{Arrival, Connection, PATIENCE, idle};
use super::coordinator::Coordinator;
use super::load_state::{LoadState, Phase};
use super::{BenchError, BenchOptions, Progress, Report};
use crate::client;

/// Runs a load and waits for its end. This function blocks and starts its own threads: within a Tokio runtime, call it
/// with `spawn_blocking`. Wrong answers of the server are no failure: the report counts them.
///
/// # Errors
///
/// Fails if the options are not possible, or if a connection cannot be opened or is lost.
pub fn run(options: &BenchOptions, progress: &(dyn Fn(Progress) + Sync)) -> Result<Report, BenchError> {
    options.check().map_err(BenchError::Options)?;
    let name = concat!("ackwheel-bench/", env!("CARGO_PKG_VERSION"));
    let options = BenchOptions {
        client: options.client.clone().client_name(name).request_timeout(PATIENCE),
        pipeline: Some(options.pipeline()),
        ..options.clone()
    };
    // With a random seed, each load has its own ids, so it does not count the messages of an earlier load as its own.
    // The standard library seeds `RandomState` at random.
    let seed = RandomState::new().build_hasher().finish();
    let shared = Arc::new(LoadState::new(options, seed));
    let (phases, _) = watch::channel(Phase::Rest);
    let (arrivals, arrived) = mpsc::unbounded_channel();
    let coordinating = runtime()?;
    thread::scope(|scope| {
        let start_all = || -> Result<Report, BenchError> {
            for number in 0..shared.options.threads {
                let runtime = runtime()?;
                let work = work(Arc::clone(&shared), number, phases.subscribe(), arrivals.clone());
                let thread = thread::Builder::new().name(format!("load-{number}"));
                thread.spawn_scoped(scope, || finish(runtime, work))?;
            }
            let shared = Arc::clone(&shared);
            let (phases, counters_of, reported) = (&phases, Vec::new(), (0, 0));
            let coordinator = Coordinator { shared, phases, arrived, progress, counters_of, reported };
            // The coordinator needs its own thread, because the caller's thread may belong to a runtime, where
            // `block_on` panics.
            let thread = thread::Builder::new().name("load".to_owned());
            let coordinator = thread.spawn_scoped(scope, || finish(coordinating, coordinator.run()))?;
            coordinator.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let outcome = start_all();
        // Ends all workers, also after an error.
        phases.send_replace(Phase::Done);
        outcome
    })
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Runs `work` to its end. Does not wait for name lookups that are still running.
fn finish<T>(runtime: Runtime, work: impl Future<Output = T>) -> T {
    let outcome = runtime.block_on(work);
    runtime.shutdown_background();
    outcome
}

/// Opens one thread's share of the connections and runs them until the load is over.
async fn work(
    shared: Arc<LoadState>,
    number: usize,
    mut phases: watch::Receiver<Phase>,
    arrivals: mpsc::UnboundedSender<Arrival>,
) {
    if shared.options.busy_poll {
        tokio::spawn(stay_awake());
    }
    let connected = connect_all(&shared, number, phases.clone(), &arrivals);
    tokio::select! {
        _ = phases.wait_for(|phase| *phase == Phase::Done) => {}
        Err(lost) = connected => {
            // This error makes the coordinator end the load, unless it has already ended.
            let _ = arrivals.send(Err(lost));
        }
    }
}

/// Opens the connections of a thread and runs them. Returns only if a connection fails.
async fn connect_all(
    shared: &Arc<LoadState>,
    thread: usize,
    phases: watch::Receiver<Phase>,
    arrivals: &mpsc::UnboundedSender<Arrival>,
) -> Result<(), String> {
    let options = &shared.options;
    let connect =
        || async { client::open(&options.address, &options.client).await.map_err(|error| error.to_string()) };
    let mut tasks = JoinSet::new();
    // Idle connections come first, so that they are open when the load begins. They share this thread: a separate
    // thread would take a processor from the server or from the load.
    for _ in (thread..options.idle_connections).step_by(options.threads) {
        tasks.spawn(idle(connect().await?, Arc::clone(shared)));
    }
    for number in (thread..options.connections).step_by(options.threads) {
        let socket = connect().await?;
        shared.welcome.get_or_init(|| socket.welcome.clone());
        let connection = Connection::new(socket, Arc::clone(shared), number);
        tasks.spawn(connection.serve(phases.clone(), arrivals.clone()));
    }
    // A task ends when the load ends, or after it has reported its error.
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|panic| format!("a connection of the load failed: {panic}"))?;
    }
    std::future::pending().await
}

/// Keeps the runtime of a thread polling its sockets without a pause, so that the thread never sleeps.
///
/// A server on the same machine would have to wake a sleeping thread with its answers. On virtual processors, a wake-up
/// takes as long as dozens of requests.
pub async fn stay_awake() {
    loop {
        tokio::task::yield_now().await;
    }
}
