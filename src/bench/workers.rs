//! The threads of a load.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::thread;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::connection::{Arrival, Connection, idle};
use super::coordinator::Coordinator;
use super::shared::{Phase, Shared};
use super::{BenchError, BenchOptions, Progress, Report};
use crate::client::{Greeted, greet};

/// Makes a load whose options are possible.
pub(super) fn run(
    options: BenchOptions,
    progress: &(dyn Fn(Progress) + Send + Sync),
) -> Result<Report, BenchError> {
    // Each load has ids of its own: what an earlier one left behind is not its. The chance is that of the standard
    // library's hash seeds.
    let seed = RandomState::new().build_hasher().finish();
    let shared = Arc::new(Shared::new(options, seed));
    let (phases, _) = watch::channel(Phase::Rest);
    let (arrivals, arrived) = mpsc::unbounded_channel();
    let coordinating = runtime()?;
    thread::scope(|scope| {
        let start_all = || -> Result<Report, BenchError> {
            for number in 0..shared.options.threads {
                let runtime = runtime()?;
                let worker = Worker {
                    shared: Arc::clone(&shared),
                    number,
                    phases: phases.subscribe(),
                    arrivals: arrivals.clone(),
                };
                thread::Builder::new()
                    .name(format!("load-{number}"))
                    .spawn_scoped(scope, || worker.run(runtime))?;
            }
            let coordinator = Coordinator::new(Arc::clone(&shared), &phases, arrived, progress);
            // On a thread of its own, since the caller's may belong to a runtime already.
            let thread = thread::Builder::new().name("load".to_owned());
            let coordinator = thread.spawn_scoped(scope, || finish(coordinating, coordinator.run()))?;
            coordinator.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let outcome = start_all();
        // All workers end, also after an error.
        phases.send_replace(Phase::Done);
        outcome
    })
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Runs it to its end, which waits for no resolver that is still asked.
fn finish<T>(runtime: Runtime, work: impl Future<Output = T>) -> T {
    let outcome = runtime.block_on(work);
    runtime.shutdown_background();
    outcome
}

/// A thread with its share of the connections.
struct Worker {
    shared: Arc<Shared>,
    number: usize,
    phases: watch::Receiver<Phase>,
    arrivals: mpsc::UnboundedSender<Arrival>,
}

impl Worker {
    fn run(self, runtime: Runtime) {
        finish(runtime, async {
            if self.shared.options.busy_poll {
                tokio::spawn(stay_awake());
            }
            let mut phases = self.phases.clone();
            tokio::select! {
                _ = phases.wait_for(|phase| *phase == Phase::Done) => {}
                Err(lost) = self.work() => {
                    // The coordinator ends the load on this error; it may have ended already.
                    let _ = self.arrivals.send(Err(lost));
                }
            }
        });
    }

    /// Makes the connections and has them work, without end; an error if one cannot.
    async fn work(&self) -> Result<(), String> {
        let options = &self.shared.options;
        let mut tasks = JoinSet::new();
        // First those that only listen, so that they are there when the load begins. Their Pings are answered on this
        // thread too: one more would take a processor from the server, or from the load, for each of them.
        for _ in (self.number..options.idle_connections).step_by(options.threads) {
            tasks.spawn(listen(self.connect().await?, Arc::clone(&self.shared)));
        }
        for number in (self.number..options.connections).step_by(options.threads) {
            let socket = self.connect().await?;
            self.shared.welcome.get_or_init(|| socket.welcome.clone());
            let connection = Connection::new(socket, Arc::clone(&self.shared), number);
            tasks.spawn(connection.serve(self.phases.clone(), self.arrivals.clone()));
        }
        // Tasks end when the load does, or after they have reported why they cannot go on.
        while let Some(ended) = tasks.join_next().await {
            ended.map_err(|panic| format!("a connection of the load failed: {panic}"))?;
        }
        std::future::pending().await
    }

    async fn connect(&self) -> Result<Greeted, String> {
        let options = &self.shared.options;
        greet(&options.address, &options.client).await.map_err(|error| error.to_string())
    }
}

/// Keeps the runtime of a thread looking for what has come, so that the thread never sleeps.
///
/// A server on the same machine has to wake a sleeping thread when it answers, and on virtual processors that takes
/// as long as dozens of requests.
pub async fn stay_awake() {
    loop {
        tokio::task::yield_now().await;
    }
}

async fn listen(socket: Greeted, shared: Arc<Shared>) {
    let Err(cause) = idle(socket).await;
    shared.errors.record(format!("an idle connection ended: {cause}"));
}
