//! Manages the connections to Redis: requests, probes, hints, faults, and writes that Redis lost.

pub(crate) mod errors;
pub(crate) mod hints;
pub(crate) mod link;
pub(crate) mod lost_writes;
pub(crate) mod reconnect;
pub(crate) mod redis_health;
pub(crate) mod stall_detector;
