//! Carries a plan out: pushes, phones that answer, and the subscribers that learn who did not.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ackwheel::client::{AddOptions, Client, Subscription};
use ackwheel::core::Message;
use anyhow::Context;
use futures_util::future::join_all;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::ledger::Ledger;
use crate::mismatch::Kind;
use crate::plan::Planned;

/// Messages due within this time on one connection go out in one frame.
const FRAME_WINDOW: Duration = Duration::from_millis(5);

/// Before the start, batches that others left over are over once none came for this long …
const QUIET: Duration = Duration::from_millis(300);
/// … and are not waited for any longer than this.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(10);

/// How long outcomes that are missing after the last allowed moment are waited for: one that comes then is
/// late, and one that never comes is lost, and the difference is worth knowing.
const MISSING_PATIENCE: Duration = Duration::from_secs(5);

/// A connection that pushes, and where its phones' Acks come in.
#[derive(Clone)]
pub struct Node {
    /// The connection for adds.
    pub adds: Client,
    /// The connection for Acks: with a shared store, that of another node.
    pub acks: Client,
}

/// The ledger, shared by all tasks. No guard of it lives across an await.
#[derive(Clone)]
pub struct SharedLedger(Arc<Mutex<Ledger>>);

impl SharedLedger {
    /// Shares a ledger.
    pub fn new(ledger: Ledger) -> SharedLedger {
        SharedLedger(Arc::new(Mutex::new(ledger)))
    }

    /// Looks into it, or writes.
    pub fn lock(&self) -> MutexGuard<'_, Ledger> {
        // A task that panicked has ended the run already: its panic is carried on where it is joined.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries the plan out to its end. How many batches were left over by others before.
///
/// # Errors
///
/// When a subscription ends.
pub async fn replay(
    plan: &[Planned],
    nodes: &[Node],
    subscriptions: Vec<Subscription>,
    ledger: &SharedLedger,
) -> anyhow::Result<u64> {
    let stop = CancellationToken::new();
    let mut subscribers = JoinSet::new();
    let (arrivals, mut arrived) = tokio::sync::mpsc::channel(1);
    for subscription in subscriptions {
        subscribers.spawn(receive(subscription, ledger.clone(), arrivals.clone(), stop.clone()));
    }
    let give_up = Instant::now() + LEFTOVER_PATIENCE;
    while Instant::now() < give_up && timeout(QUIET, arrived.recv()).await.is_ok() {}
    let leftover = ledger.lock().open();

    let start = Instant::now();
    let mut pushers = JoinSet::new();
    for (index, node) in nodes.iter().enumerate() {
        let mine = plan.iter().skip(index).step_by(nodes.len()).copied().collect();
        pushers.spawn(push_all(mine, start, node.clone(), ledger.clone()));
    }
    pushers.join_all().await;

    let latest = ledger.lock().latest();
    sleep(latest).await;
    let give_up = Instant::now() + MISSING_PATIENCE;
    while ledger.lock().settled() < plan.len() && Instant::now() < give_up {
        sleep(Duration::from_millis(50)).await;
    }
    stop.cancel();
    while let Some(ended) = subscribers.join_next().await {
        ended??;
    }
    ledger.lock().close();
    Ok(leftover)
}

/// Pushes the messages of one connection when they are due. Ends when all Acks were answered.
async fn push_all(plan: Vec<Planned>, start: Instant, node: Node, ledger: SharedLedger) {
    let mut frames = JoinSet::new();
    let mut rest = &plan[..];
    while let Some(next) = rest.first() {
        sleep_until(start + next.due + FRAME_WINDOW).await;
        let elapsed = start.elapsed();
        let (frame, later) = rest.split_at(rest.partition_point(|planned| planned.due <= elapsed));
        frames.spawn(push(frame.to_vec(), node.clone(), ledger.clone()));
        rest = later;
    }
    frames.join_all().await;
}

/// The life of the messages of a frame: they are added, pushed, and those whose phones are online are
/// acknowledged. Frames of a connection do not wait for each other.
async fn push(frame: Vec<Planned>, node: Node, ledger: SharedLedger) {
    let messages: Vec<Message> = frame.iter().map(|planned| planned.message).collect();
    ledger.lock().sending(&messages, Instant::now());
    match node.adds.add_new_msg(&messages, AddOptions::default()).await {
        Ok(answer) => ledger.lock().added(&messages, &answer.outcomes, Instant::now()),
        Err(error) => return ledger.lock().failed(Kind::AddFailed, &messages, &error),
    }
    // Only now is anything pushed: an Ack can then come in anywhere, and finds its message.
    let pushed = Instant::now();
    let mut answering: Vec<(Duration, Message)> =
        frame.iter().filter_map(|planned| Some((planned.round_trip?, planned.message))).collect();
    answering.sort_unstable_by_key(|(round_trip, _)| *round_trip);
    let window = |round_trip: Duration| round_trip.as_millis() / FRAME_WINDOW.as_millis();
    let acks = answering.chunk_by(|(one, _), (other, _)| window(*one) == window(*other));
    join_all(acks.map(|acks| acknowledge(acks, pushed, &node.acks, &ledger))).await;
}

/// The Acks of phones that answer in the same few milliseconds.
async fn acknowledge(acks: &[(Duration, Message)], pushed: Instant, client: &Client, ledger: &SharedLedger) {
    let messages: Vec<Message> = acks.iter().map(|(_, message)| *message).collect();
    let last = acks.last().map_or(Duration::ZERO, |(round_trip, _)| *round_trip);
    sleep_until(pushed + last).await;
    match client.del_msg(&messages).await {
        Ok(outcomes) => ledger.lock().deleted(&messages, &outcomes, Instant::now()),
        Err(error) => ledger.lock().failed(Kind::AckFailed, &messages, &error),
    }
}

/// One member of the group: writes down each batch and acknowledges it, until told to stop.
async fn receive(
    mut subscription: Subscription,
    ledger: SharedLedger,
    arrivals: tokio::sync::mpsc::Sender<()>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut acks = JoinSet::new();
    while let Some(next) = stop.run_until_cancelled(subscription.next()).await {
        let batch = next.context("a subscription ended")?.context("a subscription failed")?;
        ledger.lock().delivered(&batch, Instant::now());
        // Full means that an arrival is to be noticed already; closed, that nobody looks any more.
        let _ = arrivals.try_send(());
        // An acknowledgement that fails is repeated by the subscription.
        acks.spawn(async move { batch.ack().await });
        while acks.try_join_next().is_some() {}
    }
    acks.join_all().await;
    Ok(())
}
