//! Sends the adds and dels of all client connections to Redis, many of them in one script.

pub(crate) mod chunk;
pub(crate) mod congestion;
pub(crate) mod driver;
pub(crate) mod fair_queue;
pub(crate) mod incoming_requests;
pub(crate) mod queue;
