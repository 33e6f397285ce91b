//! Two clients beside the load, for the lateness of timeouts: one collects the batches, one asks which tick it is.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::load_state::{LoadState, Phase};
use super::{BenchError, lost};
use crate::client::{AddOptions, Client, SubscribeOptions, Subscription};
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
pub(super) async fn collect_timeouts(shared: &Arc<LoadState>) -> Result<(), BenchError> {
    let group = SubscribeOptions { credit: CREDIT, ephemeral: true, ..SubscribeOptions::default() };
    let options = &shared.options;
    let subscription = Subscription::open(options.address.clone(), group, options.client.clone()).await;
    let subscription = subscription.map_err(|error| lost(error.to_string()))?;
    tokio::spawn(collect(subscription, Arc::clone(shared)));
    Ok(())
}

async fn collect(mut subscription: Subscription, shared: Arc<LoadState>) {
    let mut reconnects = 0;
    while let Some(next) = subscription.next().await {
        let delivered = match next {
            Ok(delivered) => Arc::new(delivered),
            Err(error) => return shared.errors.record(format!("the subscription ended: {error}")),
        };
        shared.timeouts.lock().unchecked.push((Arc::clone(&delivered), shared.now()));
        if subscription.reconnects() > reconnects {
            reconnects = subscription.reconnects();
            shared.errors.record("the subscription was lost, and batches with it");
        }
        // The next batch is not to wait for this answer: it would count as late.
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            if let Err(error) = delivered.ack().await {
                shared.errors.record(format!("a batch could not be acknowledged: {error}"));
            }
            sleep(UNLOOKED_AT).await;
            shared.timeouts.lock().check(&shared.errors);
        });
    }
}

/// Asks the server for its tick, on a connection of its own, whenever no answer to the load has named it for a while,
/// until the load is over. The task ends once its last message is deleted.
pub(super) async fn ask_for_ticks(
    shared: &Arc<LoadState>,
    phases: watch::Receiver<Phase>,
) -> Result<JoinHandle<()>, BenchError> {
    let options = &shared.options;
    let client = Client::connect(options.address.clone(), options.client.clone()).await;
    let client = client.map_err(|error| lost(error.to_string()))?;
    Ok(tokio::spawn(ask(client, Arc::clone(shared), phases)))
}

/// Adds a message and deletes it, again and again: the answer to an AddNewMsg names the tick.
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
