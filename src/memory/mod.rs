//! The memory store: the wheel lives in the process, and one logic node owns it.

mod entry;
mod expiry;
mod in_flight;
mod lease;
mod options;
mod outbox;
mod partition;
mod ring;
mod shard;
mod shards;
mod state;
mod store;
mod submit;
mod table;
mod tick_list;
mod wheel;

pub use lease::AlwaysLeads;
pub use options::{MemoryOptions, RingOptions, expiry_time, most_kept};
pub use outbox::MemoryOutbox;
pub use ring::MemoryRing;
pub use state::StateError;
pub use store::{Beginning, MemoryStore};
