//! A connection to Redis that reconnects, and what is known of the Redis behind it.

pub(crate) mod answered;
pub(crate) mod errors;
pub(crate) mod hints;
pub(crate) mod link;
pub(crate) mod open;
pub(crate) mod peer;
pub(crate) mod reconnect;
pub(crate) mod recovery;
pub(crate) mod stall_detector;
