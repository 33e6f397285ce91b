//! Observes the server beside the load: a subscriber takes the timeouts, and a client asks for the tick.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::latency::TickTimes;
use super::shared::Plan;
use super::shared::Shared;
use super::timeouts::Timeouts;
use super::{BenchError, lost};
use crate::client::{AddOptions, Client, ClientError, SubscribeOptions, Subscription};
use crate::ticker::precise_timer::PreciseTimer;

/// The server is asked for its tick if no answer to the load has named it for so long.
const UNKNOWN_FOR: Duration = Duration::from_millis(1);

/// It is asked again so long after it has answered: by as much, and what the answer takes, timeouts count as later than
/// they are.
const ASKED_AGAIN: Duration = Duration::from_micros(100);

/// How long a batch waits for its check. A check at once would delay the reading of the next batch, which would then
/// count as late.
const UNLOOKED_AT: Duration = Duration::from_millis(10);

/// Messages that the subscriber holds unacknowledged.
const CREDIT: u32 = 262_144;

/// Subscribes, and takes every timeout batch for as long as the runtime lives.
pub(super) async fn collect_timeouts(shared: &Shared, timeouts: &Arc<Mutex<Timeouts>>) -> Result<(), BenchError> {
    let Shared { options, plan, stopwatch, .. } = shared.clone();
    let group = SubscribeOptions { credit: CREDIT, ephemeral: true, ..SubscribeOptions::default() };
    let subscription = Subscription::open(options.address.clone(), group, options.client_options()).await;
    let mut subscription = subscription.map_err(|error| no_connection(&error))?;
    let (came, timeouts) = (Arc::new(Notify::new()), Arc::clone(timeouts));
    tokio::spawn(check(Arc::clone(&came), Arc::clone(&timeouts), Arc::clone(&plan)));
    tokio::spawn(async move {
        let mut reconnects = 0;
        while let Some(next) = subscription.next().await {
            let delivered = match next {
                Ok(delivered) => delivered,
                Err(error) => return plan.errors.record(format!("the subscription ended: {error}")),
            };
            let delivered = Arc::new(delivered);
            timeouts.lock().push(Arc::clone(&delivered), stopwatch.now());
            came.notify_one();
            if subscription.reconnects() > reconnects {
                reconnects = subscription.reconnects();
                plan.errors.record("the subscription was lost, and batches with it");
            }
            // The next batch is not to wait for this answer: it would count as late.
            let plan = Arc::clone(&plan);
            tokio::spawn(async move {
                if let Err(error) = delivered.ack().await {
                    plan.errors.record(format!("a batch could not be acknowledged: {error}"));
                }
            });
        }
    });
    Ok(())
}

/// Looks at what has come, a little later, for as long as the runtime lives.
async fn check(came: Arc<Notify>, timeouts: Arc<Mutex<Timeouts>>, plan: Arc<Plan>) {
    loop {
        came.notified().await;
        sleep(UNLOOKED_AT).await;
        timeouts.lock().check(&plan.errors);
    }
}

/// Asks the server for its tick, on a connection of its own, whenever no answer to the load has named it for a while. It
/// adds a message and deletes it: the answer to an AddNewMsg names the tick.
pub(super) async fn ask_for_ticks(
    shared: &Shared,
    tick_times: &Arc<Mutex<TickTimes>>,
) -> Result<TickRequester, BenchError> {
    let Shared { options, plan, stopwatch, .. } = shared.clone();
    let client = Client::connect(options.address.clone(), options.client_options()).await;
    let client = client.map_err(|error| no_connection(&error))?;
    let ticks = Some(options.ack_timeout_ticks).filter(|ticks| *ticks > 0);
    let tick_times = Arc::clone(tick_times);
    let stopped = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&stopped);
    let task = tokio::spawn(async move {
        let mut timer = PreciseTimer::precise();
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            let sent_at = stopwatch.now();
            let now = stopwatch.moment(sent_at);
            if Duration::from_nanos(sent_at.saturating_sub(plan.live.ticked_at())) < UNKNOWN_FOR {
                timer.until(now, now + UNKNOWN_FOR).await;
                continue;
            }
            let messages = [plan.ids.message(plan.ids.clock_connection(), number)];
            number += 1;
            let options = AddOptions { ack_timeout_ticks: ticks, ..AddOptions::default() };
            match tokio::join!(client.add_new_msg(&messages, options), client.del_msg(&messages)) {
                (Ok(answer), Ok(_)) => {
                    tick_times.lock().record(answer.deadline.0, sent_at);
                    let now = stopwatch.moment(stopwatch.now());
                    timer.until(now, now + ASKED_AGAIN).await;
                }
                (Err(error), _) | (_, Err(error)) => {
                    return plan.errors.record(format!("the server did not say which tick it is: {error}"));
                }
            }
        }
    });
    Ok(TickRequester { task, stopped })
}

/// The task that asks the server for its tick.
pub(super) struct TickRequester {
    task: JoinHandle<()>,
    stopped: Arc<AtomicBool>,
}

impl TickRequester {
    /// Ends it once its last message is deleted.
    pub(super) async fn stop(self) {
        self.stopped.store(true, Ordering::Relaxed);
        // It does not panic, and what it has to say it has noted.
        let _ = self.task.await;
    }
}

fn no_connection(error: &ClientError) -> BenchError {
    lost(error.to_string())
}
