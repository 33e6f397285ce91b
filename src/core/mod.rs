//! The pure core: what a wheel, a message, a batch and a group *are*, and what may happen to them.
//!
//! Nothing in here does I/O, starts a task, or looks at a clock: `now` is always a parameter, and what
//! happened is returned for the layer above to act on and to count. The stores ([`crate::memory`]) keep
//! the contracts written here; the server, the delivery and the ticker know only the contracts.

pub mod batch;
pub mod completions;
pub mod dispatch;
pub mod group;
pub mod latency_histogram;
pub mod lease;
pub mod message;
pub mod outbox;
pub mod outboxes;
pub mod refusal;
pub mod request_batch;
pub mod requester;
pub mod ring;
pub mod rings;
pub mod single_request;
pub mod stall_aware_clock;
pub mod store;
pub mod tick;
pub mod tick_schedule;

pub use batch::{BatchId, Delivery, TimedOut, TimeoutBatch};
pub use group::GroupName;
pub use message::{AddOutcome, Client, DelOutcome, Message, MsgId};
pub use refusal::{Promise, Reason, Refusal};
pub use ring::{AddNewMsgAnswer, DelMsgAnswer};
pub use tick::{Slot, Tick, Wheel};
