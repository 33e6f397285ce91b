//! How a store in memory is to be.

use std::path::PathBuf;

use crate::core::batch::StormRule;
use crate::core::outbox::Retention;
use crate::core::tick::{Tick, Wheel};

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
