//! The contract of a store: a ring, its outbox and its lease, and what they need as a whole.

use std::sync::Arc;
use std::time::Instant;

use super::lease::Lease;
use super::outbox::Outbox;
use super::ring::{Reply, Ring};

/// Where a wheel lives.
pub trait Store: Send + Sync {
    /// Its kind, as Hello and the status say it.
    fn kind(&self) -> &'static str;

    /// The wheel.
    fn ring(&self) -> Arc<dyn Ring>;

    /// Its batches.
    fn outbox(&self) -> Arc<dyn Outbox>;

    /// Who turns it.
    fn lease(&self) -> Arc<dyn Lease>;

    /// Whether it answers.
    fn is_up(&self) -> bool;

    /// Puts away what is to be kept, after the last request; says in words what it did.
    fn close(&self, now: Instant) -> Reply<String>;
}
