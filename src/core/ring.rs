//! The contract of a ring: requests, the pointer, and expiry.
//!
//! # Invariants
//!
//! 1. A message accepted while tick `t` is due is in flight until tick `t + k` expires ([`super::tick`]), unless it
//!    is acknowledged, withdrawn or re-armed before.
//! 2. The operation that removes a message from the ring determines its outcome. DelMsg and expiry may race; exactly
//!    one wins.
//! 3. An advance expires a tick. From then on DelMsg answers `late` for the rest of its messages, for one revolution.
//!    The counts, flags and batches of the tick no longer change.
//! 4. An expired message is in the ring or in the outbox, in exactly one batch of its tick.
//! 5. For each tick, `added = acked + timed_out`. Withdrawn and re-armed messages count in neither.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::batch::TickCounts;
use super::completions::Completions;
use super::refusal::Refusal;
use super::request_batch::RequestBatch;
use super::tick::{Tick, Wheel};

/// The id of a connection. A ring applies the requests of one connection in order, and serves connections in turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub(crate) u64);

impl ConnectionId {
    /// A new id. The default id is for callers without a connection.
    pub fn unique() -> ConnectionId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        ConnectionId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The result of an advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advance {
    /// The pointer is up to date, or waits after a stall. Call again at this time.
    Waiting(Instant),
    /// The pointer moved by one tick, and the tick that it left expired.
    Moved {
        /// The expired tick.
        expired: Tick,
        /// How long after its due time the pointer moved.
        lateness: Duration,
        /// Whole ticks by which all deadlines were shifted before: by a stall, an outage, or a time without a leader.
        shifted: u64,
        /// When the pointer is due to move next.
        next: Instant,
    },
    /// Nothing moved: another sidecar leads, or the lease has expired. Ask the lease again.
    Deposed,
}

/// The result of one step of expiry. A step does a bounded amount of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublishStep {
    /// An expired tick with its final counts.
    pub counted: Option<(Tick, TickCounts)>,
    /// The batch that this step put into the outbox.
    pub published: Option<Published>,
    /// Whether more work is left.
    pub more: bool,
    /// Whether this step only reclaimed memory. The ticker pauses between such steps.
    pub reclaimed: bool,
    /// Whether nothing was done, because another sidecar leads or the lease has expired. Ask the lease again.
    pub deposed: bool,
    /// With `counted`: number of earlier ticks that were not completely published when this one expired.
    pub behind: usize,
}

/// A batch that was put into the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Number of its messages.
    pub messages: u64,
    /// How long after its tick was due to expire; `None` if a drain published it earlier.
    pub lateness: Option<Duration>,
}

/// The fate of the messages in flight when the sidecar drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainOutcome {
    /// The store keeps them.
    Kept,
    /// They expire now, in batches flagged `drained`.
    Published,
}

/// The state of a ring for the metrics and, as JSON, for `/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RingStatus {
    /// The number of the ring.
    pub ring: u16,
    /// The tick at which the pointer stands.
    pub pointer: Tick,
    /// The epoch of its leader.
    pub epoch: u64,
    /// The name of its leader; null if no sidecar leads.
    pub leader: Option<String>,
    /// How long the leader has led; absent if no other sidecar could lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_age_seconds: Option<f64>,
    /// Whether this sidecar leads it.
    #[serde(default)]
    pub leads: bool,
    /// How long the pointer is behind its due time.
    #[serde(default)]
    pub pointer_lag_seconds: f64,
    /// Why this sidecar may not move the pointer although its store answers; absent if it may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Messages in flight, those in the closing tick included.
    pub in_flight: u64,
    /// Messages in each slot, those in the closing tick not included.
    pub slots: Vec<u64>,
    /// Messages of the closing tick. They can still be acknowledged.
    pub closing: u64,
    /// The ticks that this sidecar expired last, the oldest first, at most 60. The ticker knows them, not the ring.
    #[serde(default)]
    pub recent: Vec<TickReport>,
}

/// The final counts of an expired tick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TickReport {
    /// The number of the tick.
    pub tick: u64,
    /// Messages whose final deadline it was: those acknowledged and those timed out.
    pub added: u64,
    /// Messages that were acknowledged in time.
    pub acked: u64,
    /// Messages that timed out.
    pub timed_out: u64,
    /// Whether so many timed out that a fault on our side is likelier than that many dead clients.
    pub storm: bool,
}

/// When the requests of a submitted batch complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Submitted {
    /// In the call: the batch has their outcomes.
    Completed,
    /// Later: the ring puts each request once into the completions.
    Pending,
}

/// One wheel with its messages in flight.
#[async_trait]
pub trait Ring: Send + Sync {
    /// Number of slots and length of a tick.
    fn wheel(&self) -> Wheel;

    /// Applies the requests of a batch. A request that already has a refusal completes with it.
    ///
    /// An AddNewMsg is applied to all of its messages or, if it is refused, to none. When this returns, the requests
    /// have their place in the order of their connection.
    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted;

    /// Moves the pointer by at most one tick, if it is due. Only the ticker calls this.
    async fn advance(&self, now: Instant) -> Result<Advance, Refusal>;

    /// Does one step of the work for the next expiry that can be done in advance. Returns whether more is left.
    fn prelist(&self) -> bool {
        false
    }

    /// Does the next step of expiry: publishes expired messages to the outbox, then frees their memory.
    async fn publish_expired(&self, now: Instant) -> Result<PublishStep, Refusal>;

    /// Refuses new messages from now on. Returns what happens to those in flight.
    async fn drain(&self, now: Instant) -> Result<DrainOutcome, Refusal>;

    /// The current state.
    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal>;
}
