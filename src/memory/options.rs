//! How a store in memory is to be.

use std::path::PathBuf;
use std::time::Duration;

use crate::core::batch::StormRule;
use crate::core::outbox::Retention;
use crate::core::tick::{Tick, Wheel};

/// The time for a message in flight that the two passes of expiring a tick take at most, in ns. docs/PERFORMANCE.md says
/// how it was measured.
const EXPIRY_NS_A_MESSAGE: u64 = 4;

/// The time that it takes at most to expire a tick while so many messages are in flight. A shorter tick is not kept.
#[must_use]
pub const fn expiry_time(in_flight: u64) -> Duration {
    Duration::from_nanos(in_flight.saturating_mul(EXPIRY_NS_A_MESSAGE))
}

/// The most messages in flight whose ticks can surely be kept: the reverse of [`expiry_time`].
#[must_use]
pub fn most_kept(tick_length: Duration) -> u64 {
    u64::try_from(tick_length.as_nanos()).unwrap_or(u64::MAX) / EXPIRY_NS_A_MESSAGE
}

/// How a memory store is to be.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// Dimensions of its ring.
    pub wheel: Wheel,
    /// When a tick is a storm.
    pub storm: StormRule,
    /// The bounds of its outbox.
    pub retention: Retention,
    /// The most messages in flight.
    pub max_in_flight: u64,
    /// How many threads ask it, at least 1.
    pub threads: usize,
    /// Where it is kept across a planned restart.
    pub state_file: Option<PathBuf>,
}

/// How a ring in memory is to be.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    /// Its dimensions.
    pub wheel: Wheel,
    /// When a tick is a storm.
    pub storm: StormRule,
    /// The most messages in flight.
    pub max_in_flight: u64,
    /// How many threads ask it, at least 1.
    pub threads: usize,
    /// The epoch that its batches bear.
    pub epoch: u64,
    /// Where it stands at the start.
    pub pointer: Tick,
}
