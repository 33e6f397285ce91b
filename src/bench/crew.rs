//! The threads of a load.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, OnceLock};
use std::thread;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::connection::{Arrival, Connection, Phase, Stopwatch, idle};
use super::coordinator::Coordinator;
use super::errors::Errors;
use super::ids::Ids;
use super::plan::Plan;
use super::recorder::Recorder;
use super::traffic::Traffic;
use super::{Live, LoadError, LoadOptions, Progress, Report};
use crate::client::{ClientError, Greeted, greet};
use crate::protocol::frame::Welcome;

/// What the threads of a load share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) options: LoadOptions,
    pub(super) plan: Arc<Plan>,
    pub(super) stopwatch: Stopwatch,
    /// What the server said of itself.
    pub(super) welcome: Arc<OnceLock<Welcome>>,
}

impl Shared {
    fn new(options: &LoadOptions) -> Shared {
        // Each load has ids of its own: what an earlier one left behind is not its. The chance is that of the
        // standard library's hash seeds.
        let seed = RandomState::new().build_hasher().finish();
        let plan = Plan {
            op: options.op,
            ids: Ids::new(seed, options.acked, options.clients, options.connections),
            pipeline: options.pipeline(),
            ids_per_frame: options.ids_per_frame as u64,
            order: options.order,
            ack_timeout_ticks: options.ack_timeout_ticks,
            ping_length: options.ping_length(),
            errors: Errors::default(),
            live: Live::default(),
        };
        Shared {
            options: options.clone(),
            plan: Arc::new(plan),
            stopwatch: Stopwatch::start(),
            welcome: Arc::default(),
        }
    }
}

/// Makes a load whose options are possible.
pub(super) fn run(
    options: &LoadOptions,
    progress: &(dyn Fn(Progress) + Send + Sync),
) -> Result<Report, LoadError> {
    let shared = Shared::new(options);
    let (phases, _) = watch::channel(Phase::Connect);
    let (arrivals, arrived) = mpsc::unbounded_channel();
    let recorders: Vec<Arc<Mutex<Recorder>>> = (0..options.threads).map(|_| Arc::default()).collect();
    let coordinating = runtime()?;
    thread::scope(|scope| {
        let hire = || -> Result<Report, LoadError> {
            for (number, recorder) in recorders.iter().enumerate() {
                let runtime = runtime()?;
                let crew = Crew {
                    shared: shared.clone(),
                    number,
                    recorder: Arc::clone(recorder),
                    phases: phases.subscribe(),
                    arrivals: arrivals.clone(),
                };
                thread::Builder::new().name(format!("load-{number}")).spawn_scoped(scope, || crew.run(runtime))?;
            }
            let coordinator = Coordinator::new(shared.clone(), &phases, arrived, &recorders, progress);
            // On a thread of its own, since the caller's may belong to a runtime already.
            let thread = thread::Builder::new().name("load".to_owned());
            let coordinator = thread.spawn_scoped(scope, || finish(coordinating, coordinator.run()))?;
            coordinator.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let outcome = hire();
        // However it ended, nobody goes on.
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
struct Crew {
    shared: Shared,
    number: usize,
    recorder: Arc<Mutex<Recorder>>,
    phases: watch::Receiver<Phase>,
    arrivals: mpsc::UnboundedSender<Arrival>,
}

impl Crew {
    fn run(self, runtime: Runtime) {
        finish(runtime, async {
            if self.shared.options.busy_poll {
                tokio::spawn(stay_awake());
            }
            let mut phases = self.phases.clone();
            tokio::select! {
                _ = phases.wait_for(|phase| *phase == Phase::Done) => {}
                lost = self.work() => {
                    // The coordinator ends the load when it hears of it; if it has ended already, all the better.
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
            match greet(&options.address, &options.client_options()).await {
                Ok(greeted) => {
                    tasks.spawn(listen(greeted, Arc::clone(&self.shared.plan)));
                }
                Err(error) => return error.to_string(),
            }
        }
        for number in (self.number..options.connections).step_by(options.threads) {
            match self.connect(number).await {
                Ok(connection) => {
                    let options = options.clone();
                    let schedule = move |from| options.pace(number, from);
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
        let greeted = greet(&options.address, &options.client_options()).await?;
        welcome.get_or_init(|| greeted.welcome.clone());
        let window = options.share_of(number);
        let traffic = Traffic::new(Arc::clone(plan), number, window, Arc::clone(&self.recorder));
        Ok(Connection::new(greeted, traffic, stopwatch.clone()))
    }
}

/// Keeps the runtime of a thread looking for what has come, so that the thread never sleeps.
///
/// A server on the same machine has to wake whoever sleeps when it answers, and where processors are virtual that takes
/// as long as dozens of requests.
pub async fn stay_awake() {
    loop {
        tokio::task::yield_now().await;
    }
}

async fn listen(greeted: Greeted, plan: Arc<Plan>) {
    let cause = idle(greeted).await;
    plan.errors.note(format!("an idle connection ended: {cause}"));
}
