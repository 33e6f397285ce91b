//! The memory wing: the wheel lives in the process, and one logic node owns it.

mod entry;
mod expire;
mod lease;
mod lists;
mod outbox;
mod ring;
mod saved_outbox;
mod state;
mod store;

pub use outbox::MemoryOutbox;
pub use ring::{MemoryRing, RingOptions};
pub use state::StateError;
pub use store::{MemoryOptions, MemoryStore, OpenError};
