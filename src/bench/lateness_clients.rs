//! Two clients that measure how late timeouts are: one collects the timeout batches, the other asks when the server's
//! current tick (its unit of time) ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::load_state::{LoadState, Phase};
use super::{BenchError, lost};
use crate::client::{Client, SubscribeOptions, Subscription};
use crate::core::MessageState;
use crate::ticker::precise_timer::PreciseTimer;

/// How often the server is asked when its current tick ends, per tick, with pauses of 1 to 100 ms.
const ASKS_PER_TICK: u64 = 10;

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

/// Opens a connection and starts a task that asks the server when its ticks end, until the load is over. The task asks
/// for the state of a message of the load that must time out, so it adds no message.
pub(super) async fn ask_for_ticks(
    shared: &Arc<LoadState>,
    phases: watch::Receiver<Phase>,
) -> Result<JoinHandle<()>, BenchError> {
    let options = &shared.options;
    let client = Client::connect(options.address.clone(), options.client.clone()).await;
    let client = client.map_err(|error| lost(error.to_string()))?;
    Ok(tokio::spawn(ask(client, Arc::clone(shared), phases)))
}

async fn ask(client: Client, shared: Arc<LoadState>, phases: watch::Receiver<Phase>) {
    let welcome = client.welcome();
    let (ticks, tick_ms) = (shared.options.ticks(&welcome), u64::from(welcome.tick_ms));
    // A store in Redis counts in whole ms, so it can round the time up by 1 ms.
    let rounded_up = if welcome.store == "memory" { 0 } else { 1_000_000 };
    // The answers are rounded to 1 ms, and the latest end of a tick counts. So questions at different fractions of a
    // millisecond are more precise together than one.
    let pause = Duration::from_millis((tick_ms / ASKS_PER_TICK).clamp(1, 100)) + Duration::from_micros(100);
    let mut timer = PreciseTimer::precise();
    while *phases.borrow() != Phase::Done {
        let known = shared.recorders.iter().filter_map(|recorder| recorder.lock().timing_out);
        let messages: Vec<_> = known.map(|(connection, number)| shared.ids.message(connection, number)).collect();
        let sent_at = shared.now();
        match client.get_msg(&messages).await {
            Ok(states) => {
                for (tick, ends_at) in states.iter().filter_map(|state| end_of_tick(state, sent_at, tick_ms)) {
                    shared.recorders[0]
                        .lock()
                        .tick_times
                        .record(tick + u64::from(ticks), ends_at.saturating_sub(rounded_up));
                }
            }
            Err(error) => {
                return shared.errors.record(format!("the server did not say which tick it is: {error}"));
            }
        }
        let now = shared.moment(shared.now());
        timer.until(now, now + pause).await;
    }
}

/// Returns the current tick of the server, according to the state of a message that was asked for at `sent_at`, and a
/// time before which the tick does not end. Both times are in ns since the load began. Returns `None` if the message is
/// not in flight, or if the pointer is late.
fn end_of_tick(state: &MessageState, sent_at: u64, tick_ms: u64) -> Option<(u64, u64)> {
    let MessageState::InFlight { deadline, remaining_ms: remaining_ms @ 1.., .. } = *state else { return None };
    let remaining = u64::from(remaining_ms);
    let current = deadline.0.checked_sub(remaining.checked_div(tick_ms)?)?;
    Some((current, sent_at + remaining % tick_ms * 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Tick;

    #[test]
    fn the_time_that_a_message_has_left_tells_when_the_current_tick_ends() {
        let in_flight = |remaining_ms| MessageState::InFlight { deadline: Tick(115), remaining_ms, attempt: 1 };
        for (state, expected) in [
            (in_flight(15_999), Some((100, 999_000_007))),
            (in_flight(15_000), Some((100, 7))),
            (in_flight(14_999), Some((101, 999_000_007))),
            (in_flight(1), Some((115, 1_000_007))),
            (in_flight(0), None),
            (in_flight(u32::MAX), None),
            (MessageState::Late, None),
            (MessageState::Unknown, None),
        ] {
            assert_eq!(end_of_tick(&state, 7, 1_000), expected, "{state:?}");
        }
    }
}
