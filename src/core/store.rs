//! The contract of a store: its rings, each with an outbox and a lease, and what they need as a whole.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lease::Lease;
use super::outbox::Outbox;
use super::ring::{Reply, Ring};

/// A moment by both clocks: the one that measures, and the one that survives a restart.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// By the monotonic clock.
    pub now: Instant,
    /// Since the Unix epoch, by a clock that can be set.
    pub unix_time: Duration,
}

impl Moment {
    /// ms since the Unix epoch.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        u64::try_from(self.unix_time.as_millis()).unwrap_or(u64::MAX)
    }
}

/// One ring of a store, with its outbox and its lease.
#[derive(Clone)]
pub struct RingParts {
    /// The wheel.
    pub ring: Arc<dyn Ring>,
    /// Its batches.
    pub outbox: Arc<dyn Outbox>,
    /// Who turns it.
    pub lease: Arc<dyn Lease>,
}

/// Where the wheel lives, in one ring or in several.
pub trait Store: Send + Sync {
    /// Its kind, as Hello and the status say it.
    fn kind(&self) -> &'static str;

    /// Its rings, at least one: ring i stands at index i.
    fn rings(&self) -> &[RingParts];

    /// Whether it answers.
    fn is_up(&self) -> bool;

    /// Puts away what is to be kept, after the last request; says in words what it did.
    fn close(&self, moment: Moment) -> Reply<String>;
}
