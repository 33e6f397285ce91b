//! The options of a memory store, and an estimate of how long a tick takes to expire.

use std::time::Duration;

use crate::core::{Retention, StormRule, Wheel};

/// The maximum time in ns that the two scans of an expired tick take for each message in flight. The ignored test
/// `what_both_passes_of_a_tick_take` in `expiry.rs` measures it.
const EXPIRY_NS_A_MESSAGE: u64 = 4;

/// Returns the maximum time that expiring a tick takes if `in_flight` messages are in flight. If a tick is shorter than
/// this time, expiry cannot keep up.
pub const fn expiry_time(in_flight: u64) -> Duration {
    Duration::from_nanos(in_flight.saturating_mul(EXPIRY_NS_A_MESSAGE))
}

/// Returns the maximum number of messages in flight whose expiry takes no longer than a tick of this length. This is the
/// inverse of [`expiry_time`].
pub fn most_kept(tick_length: Duration) -> u64 {
    u64::try_from(tick_length.as_nanos()).unwrap_or(u64::MAX) / EXPIRY_NS_A_MESSAGE
}

/// The options of a memory store.
#[derive(Clone, Copy, Debug)]
pub struct MemoryOptions {
    /// The dimensions of the ring.
    pub wheel: Wheel,
    /// The limits. A tick that reaches them counts as a storm.
    pub storm: StormRule,
    /// The limits of the outbox.
    pub retention: Retention,
    /// The maximum number of messages in flight.
    pub max_in_flight: u64,
    /// The number of threads that submit requests, at least 1.
    pub threads: usize,
}
