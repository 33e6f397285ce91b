//! The contract of a store: one or more rings, each with an outbox and a lease.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::lease::Lease;
use super::outbox::Outbox;
use super::refusal::Refusal;
use super::ring::Ring;

/// A moment by the monotonic clock and by the wall clock, which survives a restart.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// By the monotonic clock.
    pub now: Instant,
    /// Time since the Unix epoch by the wall clock, which can be set.
    pub unix_time: Duration,
}

impl Moment {
    /// ms since the Unix epoch.
    pub fn unix_ms(&self) -> u64 {
        u64::try_from(self.unix_time.as_millis()).unwrap_or(u64::MAX)
    }
}

/// One ring of a store, with its outbox and its lease.
#[derive(Clone)]
pub struct RingParts {
    /// The wheel.
    pub ring: Arc<dyn Ring>,
    /// The timeout batches of the wheel.
    pub outbox: Arc<dyn Outbox>,
    /// The leadership over the wheel.
    pub lease: Arc<dyn Lease>,
}

/// The place that holds the messages in flight.
#[async_trait]
pub trait Store: Send + Sync {
    /// Its kind, as in Welcome and in the status.
    fn kind(&self) -> &'static str;

    /// Its rings, at least one. Ring i is at index i.
    fn rings(&self) -> &[RingParts];

    /// Whether the store answers.
    fn is_up(&self) -> bool;

    /// Saves its state after the last request, if it can. Returns a sentence for the log.
    async fn close(&self, moment: Moment) -> Result<String, Refusal>;
}
