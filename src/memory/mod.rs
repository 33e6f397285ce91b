//! The memory wing: the wheel lives in the process, and one logic node owns it.

mod attempt;
mod entry;
mod expire;
mod in_flight;
mod lease;
mod options;
mod outbox;
mod places;
mod ring;
mod saved_outbox;
mod saving;
mod shard;
mod sorted;
mod state;
mod state_file;
mod store;
mod submit;
mod table;

pub use lease::AlwaysLeads;
pub use options::{MemoryOptions, RingOptions, expiry_time, most_kept};
pub use outbox::MemoryOutbox;
pub use ring::MemoryRing;
pub use state_file::StateError;
pub use store::{Beginning, MemoryStore};
