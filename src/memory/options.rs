//! The options of a memory store, and the time that expiring a tick takes.

use std::time::Duration;

use crate::core::{Retention, StormRule, Wheel};

/// The most ns for each message in flight that the two scans of an expired tick take. docs/PERFORMANCE.md says how this was
/// measured.
const EXPIRY_NS_A_MESSAGE: u64 = 4;

/// The longest time that expiring a tick takes with this number of messages in flight. A shorter tick would fall behind.
pub const fn expiry_time(in_flight: u64) -> Duration {
    Duration::from_nanos(in_flight.saturating_mul(EXPIRY_NS_A_MESSAGE))
}

/// The most messages in flight with which no tick of this length falls behind: the reverse of [`expiry_time`].
pub fn most_kept(tick_length: Duration) -> u64 {
    u64::try_from(tick_length.as_nanos()).unwrap_or(u64::MAX) / EXPIRY_NS_A_MESSAGE
}

/// The options of a memory store.
#[derive(Clone, Copy, Debug)]
pub struct MemoryOptions {
    /// The dimensions of its ring.
    pub wheel: Wheel,
    /// When a tick is a storm.
    pub storm: StormRule,
    /// The limits of its outbox.
    pub retention: Retention,
    /// The most messages in flight.
    pub max_in_flight: u64,
    /// Number of threads that submit requests, at least 1.
    pub threads: usize,
}
