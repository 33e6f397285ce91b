//! ackwheel: an ack-timeout tracker for IM servers.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

#[cfg(feature = "sidecar")]
pub mod admin;
#[cfg(feature = "sidecar")]
pub mod app;
#[cfg(feature = "sidecar")]
pub mod cli;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "sidecar")]
pub mod clock;
#[cfg(feature = "sidecar")]
pub mod config;
pub mod core;
#[cfg(feature = "sidecar")]
pub mod delivery;
#[cfg(feature = "sidecar")]
pub mod gate;
#[cfg(feature = "sidecar")]
pub mod memory;
#[cfg(feature = "sidecar")]
pub mod metrics;
#[cfg(feature = "client")]
pub mod protocol;
#[cfg(feature = "sidecar")]
pub mod server;
#[cfg(feature = "sidecar")]
pub mod ticker;
