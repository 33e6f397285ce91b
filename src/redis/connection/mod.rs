//! The connections to Redis: requests, probes, hints, faults, and recovery after an outage.

pub(crate) mod errors;
pub(crate) mod hints;
pub(crate) mod link;
pub(crate) mod peer;
pub(crate) mod reconnect;
pub(crate) mod recovery;
pub(crate) mod stall_detector;
