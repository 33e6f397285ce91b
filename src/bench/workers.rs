//! The threads of a load.

use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::connection::{Arrival, Connection, Phase, idle};
use super::coordinator::Coordinator;
use super::latency::Recorder;
use super::shared::{Plan, Shared};
use super::traffic::Traffic;
use super::{BenchError, BenchOptions, Progress, Report};
use crate::client::{self, ClientError, OpenConnection};

/// Makes a load whose options are possible.
pub(super) fn run(
    options: &BenchOptions,
    progress: &(dyn Fn(Progress) + Send + Sync),
) -> Result<Report, BenchError> {
    let shared = Shared::new(options);
    let (phases, _) = watch::channel(Phase::Connect);
    let (arrivals, arrived) = mpsc::unbounded_channel();
    let recorders: Vec<Arc<Mutex<Recorder>>> = (0..options.threads).map(|_| Arc::default()).collect();
    let coordinating = runtime()?;
    thread::scope(|scope| {
        let start_all = || -> Result<Report, BenchError> {
            for (number, recorder) in recorders.iter().enumerate() {
                let runtime = runtime()?;
                let worker = Worker {
                    shared: shared.clone(),
                    number,
                    recorder: Arc::clone(recorder),
                    phases: phases.subscribe(),
                    arrivals: arrivals.clone(),
                };
                thread::Builder::new()
                    .name(format!("load-{number}"))
                    .spawn_scoped(scope, || worker.run(runtime))?;
            }
            let coordinator = Coordinator::new(shared.clone(), &phases, arrived, &recorders, progress);
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
    shared: Shared,
    number: usize,
    recorder: Arc<Mutex<Recorder>>,
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
                lost = self.work() => {
                    // The coordinator ends the load on this error; it may have ended already.
                    let _ = self.arrivals.send(Err(lost));
                }
            }
        });
    }

    /// Makes the connections and has them work; returns what went wrong with them.
    async fn work(&self) -> String {
        let options = &self.shared.options;
        let mut tasks = JoinSet::new();
        // First those that only listen, so that they are there when the load begins. Their Pings are answered on this
        // thread too: one more would take a processor from the server, or from the load, for each of them.
        for _ in (self.number..options.idle_connections).step_by(options.threads) {
            match client::open(&options.address, &options.client_options()).await {
                Ok(open) => {
                    tasks.spawn(listen(open, Arc::clone(&self.shared.plan)));
                }
                Err(error) => return error.to_string(),
            }
        }
        for number in (self.number..options.connections).step_by(options.threads) {
            match self.connect(number).await {
                Ok(connection) => {
                    let options = options.clone();
                    let schedule = move |from| options.schedule(number, from);
                    tasks.spawn(connection.serve(self.phases.clone(), self.arrivals.clone(), schedule));
                }
                Err(error) => return error.to_string(),
            }
        }
        // Tasks end when the load does, or after they have said themselves why they cannot go on.
        while let Some(ended) = tasks.join_next().await {
            if let Err(panic) = ended {
                return format!("a connection of the load failed: {panic}");
            }
        }
        std::future::pending().await
    }

    async fn connect(&self, number: usize) -> Result<Connection, ClientError> {
        let Shared { options, plan, stopwatch, welcome } = &self.shared;
        let open = client::open(&options.address, &options.client_options()).await?;
        welcome.get_or_init(|| open.welcome.clone());
        let window = options.share_of(number);
        let traffic = Traffic::new(Arc::clone(plan), number, window, Arc::clone(&self.recorder));
        Ok(Connection::new(open, traffic, stopwatch.clone()))
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

async fn listen(open: OpenConnection, plan: Arc<Plan>) {
    let cause = idle(open).await;
    plan.errors.record(format!("an idle connection ended: {cause}"));
}
