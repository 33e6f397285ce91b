//! Sends the adds and dels of all connections to Redis in shared scripts.

pub(crate) mod applied;
pub(crate) mod chunk;
pub(crate) mod congestion;
pub(crate) mod driver;
pub(crate) mod fair_queue;
pub(crate) mod frames;
pub(crate) mod in_flight;
pub(crate) mod inbox;
pub(crate) mod out_of_memory_notice;
pub(crate) mod queue;
pub(crate) mod request;
pub(crate) mod send_threshold;
