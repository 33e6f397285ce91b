//! The memory store: the wheel is in the memory of one sidecar process.

mod batch_by_shard;
mod entry;
mod expiry;
mod in_flight_limit;
mod journal;
mod options;
mod outbox;
mod queue;
mod shard;
mod shards;
mod store;
mod submit;
mod table;
mod wheel;

#[cfg(fuzzing)]
pub use journal::first_segment_of;
pub use journal::{Damage, JournalError, JournalOptions, Recovered, SyncPolicy};
pub use options::{MemoryOptions, expiry_time, most_kept};
pub use outbox::MemoryOutbox;
pub use store::{AlwaysLeads, MemoryRing, MemoryStore};
