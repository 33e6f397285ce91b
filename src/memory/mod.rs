//! The memory wing: the wheel lives in the process, and one logic node owns it.

mod burst;
mod entry;
mod expire;
mod lease;
mod options;
mod outbox;
mod places;
mod ring;
mod saved_outbox;
mod shard;
mod sorted;
mod state;
mod state_file;
mod store;
mod table;

pub use lease::AlwaysLeads;
pub use options::{MemoryOptions, RingOptions};
pub use outbox::MemoryOutbox;
pub use ring::MemoryRing;
pub use state_file::StateError;
pub use store::{Beginning, MemoryStore};
