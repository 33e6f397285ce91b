//! ackwheel: an ack-timeout tracker for IM servers.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

#[cfg(feature = "client")]
pub mod client;
pub mod core;
#[cfg(feature = "client")]
pub mod protocol;
