//! Combines the adds and dels of all connections in shared scripts.

pub(crate) mod chunk;
pub(crate) mod congestion;
pub(crate) mod driver;
pub(crate) mod fair_queue;
pub(crate) mod incoming_requests;
pub(crate) mod queue;
