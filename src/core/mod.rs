//! The pure core: ticks, messages, batches and groups, and the contracts that every store implements.
//!
//! The core does no I/O, starts no task and reads no clock. `now` is a parameter, and effects are return values. The
//! stores (`memory`, `redis`) implement the contracts. Server, delivery and ticker use only the contracts.

pub mod batch;
#[cfg(feature = "sidecar")]
pub mod completions;
#[cfg(feature = "sidecar")]
pub(crate) mod dispatch;
pub mod group;
pub mod latency_histogram;
#[cfg(feature = "sidecar")]
pub mod lease;
pub mod message;
#[cfg(feature = "sidecar")]
pub mod outbox;
#[cfg(feature = "sidecar")]
pub mod outboxes;
pub mod refusal;
pub mod request_batch;
#[cfg(feature = "sidecar")]
pub mod ring;
#[cfg(feature = "sidecar")]
pub mod rings;
#[cfg(test)]
#[cfg(feature = "sidecar")]
#[path = "../../tests/support/single_request.rs"]
pub(crate) mod single_request;
pub mod stall_aware_clock;
#[cfg(feature = "sidecar")]
pub mod store;
pub mod tick;
pub mod tick_schedule;

pub use message::{AddOutcome, Client, DelOutcome, Message, MsgId};
