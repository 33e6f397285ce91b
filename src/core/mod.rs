//! The core without I/O: the types of ticks, messages, batches and groups, and the traits that every store implements.
//!
//! The core does no I/O, starts no task and reads no clock. Callers pass the time as `now`, and do the I/O for which
//! the returned values ask. The stores (`memory`, `redis`) implement the traits. Server, delivery and ticker call a
//! store only through these traits.
//!
//! Other modules write `core::Tick`, without the name of the file.

mod batch;
#[cfg(feature = "sidecar")]
mod combined_outbox;
#[cfg(feature = "sidecar")]
mod completions;
#[cfg(feature = "sidecar")]
mod dispatch;
mod group;
mod latency_histogram;
#[cfg(feature = "sidecar")]
mod lease;
mod message;
#[cfg(feature = "sidecar")]
mod outbox;
#[cfg(feature = "sidecar")]
mod random_hasher;
mod refusal;
mod request_batch;
#[cfg(feature = "sidecar")]
mod ring;
#[cfg(feature = "sidecar")]
mod rings;
#[cfg(all(test, feature = "sidecar"))]
#[path = "../../tests/support/single_request.rs"]
#[expect(unreachable_pub, reason = "it is a file of the integration tests")]
pub(crate) mod single_request;
mod stall_aware_clock;
#[cfg(feature = "sidecar")]
mod store;
mod tick;
mod tick_schedule;

pub use batch::{BatchId, Delivery, MAX_BATCH_MESSAGES, StormRule, TickCounts, TimedOut, TimeoutBatch};
pub use group::{GroupName, GroupNameError, MAX_GROUPS, MAX_NAME_LENGTH};
pub use latency_histogram::{LATENCY_BOUNDS, LatencyHistogram, STAMP_UNIT, Stamp};
pub use message::{AddNewMsgAnswer, AddOutcome, Client, DelOutcome, Message, MessageState, MsgId};
pub use refusal::{Promise, Reason, Refusal};
pub use request_batch::{Operation, Outcome, Request, RequestBatch};
pub use stall_aware_clock::{CLOCK_BEAT, SHORTEST_STALL, StallAwareClock, WAKING_TIME};
pub use tick::{MAX_SLOTS, Tick, Wheel};
pub use tick_schedule::{DueAction, TickSchedule};

#[cfg(feature = "sidecar")]
pub use self::{
    combined_outbox::{CombinedOutbox, merge_backlogs},
    completions::Completions,
    lease::{Leadership, Lease},
    outbox::{Backlog, Dropped, GroupBacklog, GroupOptions, MAX_RETAKEN, Outbox, Retention, Settled},
    random_hasher::RandomHasher,
    ring::{Advance, ConnectionId, DrainOutcome, PublishStep, Published, Ring, RingStatus, Submitted, TickReport},
    rings::{MAX_RINGS, Requester, Rings, ring_of},
    store::{JournalStatus, Moment, RingParts, ServerReport, Store, StoreReport},
};

#[cfg(feature = "sidecar")]
pub(crate) use self::{
    dispatch::{Credit, Dispatch, MAX_CREDIT, MemberId},
    lease::{Candidate, Observed, PointerPosition},
    rings::mix,
};
