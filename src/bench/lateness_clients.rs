//! Two clients that measure how late timeouts are: one collects the timeout batches, the other asks for the server's
//! current tick (its unit of time).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::load_state::{LoadState, Phase};
use super::{BenchError, lost};
use crate::client::{AddOptions, Client, SubscribeOptions, Subscription};
use crate::ticker::precise_timer::PreciseTimer;

/// The time after which a client asks the server for the current tick, if the load has not learned it. The time counts
/// from the sending of the latest request whose answer told the tick.
const UNKNOWN_FOR: Duration = Duration::from_millis(1);

/// The pause between an answer and the next question for the tick. The measured lateness is too high by at most this
/// pause plus the latency of an answer.
const ASKED_AGAIN: Duration = Duration::from_micros(100);

/// The delay before a batch is checked. An immediate check would delay the reading of the next batch, which would then
/// count as late.
const UNLOOKED_AT: Duration = Duration::from_millis(10);

/// The credit of the subscriber, in messages. The server delivers another batch only while fewer messages are
/// unacknowledged.
const CREDIT: u32 = 262_144;

/// Subscribes and starts a task that collects every timeout batch until the runtime ends.
pub(super) async fn collect_timeouts(shared: &Arc<LoadState>) -> Result<(), BenchError> {
    let group = SubscribeOptions { credit: CREDIT, ephemeral: true, ..SubscribeOptions::default() };
    let options = &shared.options;
    let subscription = Subscription::open(options.address.clone(), group, options.client.clone()).await;
    let subscription = subscription.map_err(|error| lost(error.to_string()))?;
    let arrived = Arc::new(Notify::new());
    tokio::spawn(check(Arc::clone(shared), Arc::clone(&arrived)));
    tokio::spawn(collect(subscription, Arc::clone(shared), arrived));
    Ok(())
}

async fn collect(mut subscription: Subscription, shared: Arc<LoadState>, arrived: Arc<Notify>) {
    let mut reconnects = 0;
    while let Some(next) = subscription.next().await {
        let delivered = match next {
            Ok(delivered) => Arc::new(delivered),
            Err(error) => return shared.errors.record(format!("the subscription ended: {error}")),
        };
        shared.timeouts.lock().unchecked.push((Arc::clone(&delivered), shared.now()));
        arrived.notify_one();
        if subscription.reconnects() > reconnects {
            reconnects = subscription.reconnects();
            shared.errors.record("the subscription lost its connection, and batches may be missing");
        }
        // Acknowledge in another task: if this task waited for the answer, the next batch would count as late.
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            if let Err(error) = delivered.ack().await {
                shared.errors.record(format!("a batch could not be acknowledged: {error}"));
            }
        });
    }
}

/// Checks the batches that have arrived, after a delay. One task checks all of them, so that the lock is seldom taken.
async fn check(shared: Arc<LoadState>, arrived: Arc<Notify>) {
    loop {
        arrived.notified().await;
        sleep(UNLOOKED_AT).await;
        shared.timeouts.lock().check(&shared.errors);
    }
}

/// Opens a connection and starts a task that asks the server for its current tick. The task asks only if the load did
/// not learn the tick during [`UNKNOWN_FOR`]. The task ends after the load, when its last message is deleted.
pub(super) async fn ask_for_ticks(
    shared: &Arc<LoadState>,
    phases: watch::Receiver<Phase>,
) -> Result<JoinHandle<()>, BenchError> {
    let options = &shared.options;
    let client = Client::connect(options.address.clone(), options.client.clone()).await;
    let client = client.map_err(|error| lost(error.to_string()))?;
    Ok(tokio::spawn(ask(client, Arc::clone(shared), phases)))
}

/// Adds and deletes a message again and again: the answer to an AddNewMsg tells the current tick.
async fn ask(client: Client, shared: Arc<LoadState>, phases: watch::Receiver<Phase>) {
    let options = AddOptions { ack_timeout_ticks: shared.options.ack_timeout_ticks, ..AddOptions::default() };
    let mut timer = PreciseTimer::precise();
    let mut number = 0;
    while *phases.borrow() != Phase::Done {
        let sent_at = shared.now();
        let ticked_at = shared.ticked_at.load(Ordering::Relaxed);
        let wait = if Duration::from_nanos(sent_at.saturating_sub(ticked_at)) < UNKNOWN_FOR {
            UNKNOWN_FOR
        } else {
            let messages = [shared.ids.message(shared.ids.clock_connection, number)];
            number += 1;
            match tokio::join!(client.add_new_msg(&messages, options), client.del_msg(&messages)) {
                (Ok(answer), Ok(_)) => shared.recorders[0].lock().tick_times.record(answer.deadline.0, sent_at),
                (Err(error), _) | (_, Err(error)) => {
                    return shared.errors.record(format!("the server did not say which tick it is: {error}"));
                }
            }
            ASKED_AGAIN
        };
        let now = shared.moment(shared.now());
        timer.until(now, now + wait).await;
    }
}
