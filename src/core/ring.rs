//! The trait of a ring, which applies requests to messages, moves the pointer from tick to tick, and expires ticks.
//!
//! # Invariants
//!
//! 1. A message that is accepted while tick `t` is due, with an ack timeout of `k` ticks, stays in flight until tick
//!    `t + k` expires. [`super::tick`] explains these terms. A message leaves earlier if it is acknowledged, withdrawn
//!    or re-armed.
//! 2. The operation that removes a message from the ring determines the outcome of the message. If a DelMsg and the
//!    expiry race, exactly one of them wins.
//! 3. A move of the pointer expires a tick. For one revolution after that, DelMsg answers `late` for the messages that
//!    were still in flight. The counts, flags and batches of the tick no longer change.
//! 4. The ring keeps an expired message until the message is published. It is published in exactly one batch of its
//!    tick.
//! 5. For each tick, `added = acked + timed_out`. A withdrawn message counts in none of the three. A re-armed message
//!    counts only in the tick of its new deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::batch::TickCounts;
use super::completions::Completions;
use super::message::{Message, MessageState};
use super::refusal::Refusal;
use super::request_batch::RequestBatch;
use super::tick::{Tick, Wheel};

/// The id of a connection. A ring applies the requests of one connection in their order, and serves connections in
/// turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub(crate) u64);

impl ConnectionId {
    /// Returns a new id. Callers without a connection use the default id.
    pub fn unique() -> ConnectionId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        ConnectionId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The result of [`Ring::advance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// The pointer did not move. Either the move is not due yet, or the pointer waits after a stall. The caller must
    /// call again at this time.
    Waiting(Instant),
    /// The pointer moved by one tick. The tick at which it stood before has expired.
    Moved {
        /// The expired tick.
        expired: Tick,
        /// How late the move was.
        lateness: Duration,
        /// The number of whole ticks by which all deadlines were shifted since the last move. The cause is a stall,
        /// an outage, or a time without a leader.
        shifted: u64,
        /// When the next move is due.
        next: Instant,
    },
    /// The pointer did not move, because another sidecar leads or the lease has expired. The caller must maintain the
    /// lease again.
    Deposed,
}

/// The result of a call of [`Ring::publish_expired`]. A call does a bounded amount of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishStep {
    /// The expired tick that this step reports, and its final counts.
    pub counted: Option<(Tick, TickCounts)>,
    /// The batch that this step put into the outbox.
    pub published: Option<Published>,
    /// Whether more work is left.
    pub more: bool,
    /// Whether this step only reclaimed memory. The ticker pauses between such steps.
    pub reclaimed: bool,
    /// Whether nothing was done, because another sidecar leads or the lease has expired. The caller must then maintain
    /// the lease again.
    pub deposed: bool,
    /// If `counted` is set: the number of earlier ticks whose work was not complete when this tick expired.
    pub behind: usize,
}

/// The size and the lateness of a batch that was put into the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The number of messages in the batch.
    pub messages: u64,
    /// How long after the due time of the expiry the batch was published. `None` if a drain published it early.
    pub lateness: Option<Duration>,
}

/// The treatment of messages in flight when the sidecar drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainOutcome {
    /// The store keeps the messages in flight.
    Kept,
    /// All messages in flight expire at once, in batches flagged `drained`.
    Published,
}

/// The state of a ring for the metrics and, as JSON, for `/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RingStatus {
    /// The number of the ring.
    pub ring: u16,
    /// The tick at which the pointer stands.
    pub pointer: Tick,
    /// The epoch of the leader.
    pub epoch: u64,
    /// The name of the leader; null if no sidecar leads.
    pub leader: Option<String>,
    /// How long the leader has led; absent if the store is not shared, so that no other sidecar can lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_age_seconds: Option<f64>,
    /// Whether this sidecar leads the ring.
    #[serde(default)]
    pub leads: bool,
    /// The time since the next move of the pointer was due; 0 if it is not due yet.
    #[serde(default)]
    pub pointer_lag_seconds: f64,
    /// The reason why this sidecar must not move the pointer although its store answers; absent without such a reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Messages in flight, including those of the closing tick, which is the tick at which the pointer stands.
    pub in_flight: u64,
    /// Messages in flight in each slot, without those of the closing tick.
    pub slots: Vec<u64>,
    /// Messages in flight in the closing tick. They can still be acknowledged.
    pub closing: u64,
    /// The last ticks that this sidecar expired, oldest first, at most 60. The status report adds them;
    /// [`Ring::status`] returns none.
    #[serde(default)]
    pub recent: Vec<TickReport>,
}

/// The final counts of an expired tick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TickReport {
    /// The number of the tick.
    pub tick: u64,
    /// Messages whose latest deadline is this tick, acknowledged or timed out.
    pub added: u64,
    /// Messages that were acknowledged in time.
    pub acked: u64,
    /// Messages that timed out.
    pub timed_out: u64,
    /// Whether the tick is a storm: see [`TickCounts::storm`].
    pub storm: bool,
}

/// The answer to [`Ring::submit`]: whether the requests complete during the call or later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Submitted {
    /// All requests are complete when the call returns, and the batch contains their outcomes.
    Completed,
    /// The requests complete later. The ring puts each of them once into the [`Completions`].
    Pending,
}

/// A wheel of slots with a pointer, and the messages in flight on it.
#[async_trait]
pub trait Ring: Send + Sync {
    /// Returns the number of slots and the length of a tick.
    fn wheel(&self) -> Wheel;

    /// Applies the requests of a batch. A request that was refused before the call completes with that refusal.
    ///
    /// An AddNewMsg is applied to all of its messages or, if it is refused, to none. Requests that `connection`
    /// submits later are applied after these.
    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted;

    /// Returns the state of each message, and changes nothing. Sees all requests that are complete, and may see others.
    async fn get(&self, messages: &[Message], now: Instant) -> Result<Vec<MessageState>, Refusal>;

    /// Moves the pointer by one tick if the move is due. Only the ticker calls this.
    async fn advance(&self, now: Instant) -> Result<Advance, Refusal>;

    /// Lists some messages of the tick that expires next, so that its batches are ready earlier. Returns whether there
    /// are more to list. By default does nothing.
    fn prelist(&self) -> bool {
        false
    }

    /// Does the next step of the work for expired ticks: publishes their messages to the outbox, and later frees their
    /// memory.
    async fn publish_expired(&self, now: Instant) -> Result<PublishStep, Refusal>;

    /// Refuses new messages from now on. Returns how the ring treats the messages in flight.
    async fn drain(&self, now: Instant) -> Result<DrainOutcome, Refusal>;

    /// Returns the current state for metrics and `/status`.
    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal>;
}
