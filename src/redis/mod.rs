//! A wheel in Redis that sidecars share. Any sidecar adds and acknowledges messages, and the leader moves the pointer.
//!
//! | part | purpose |
//! |---|---|
//! | `keys` | defines the schema |
//! | `scripts` | the Lua scripts, each one atomic step |
//! | `topology` | finds Redis (standalone, Sentinel, Cluster) and the majority that confirms the primary |
//! | `connection` | the link of a ring: reconnects, classifies errors, detects stalls, receives hints |
//! | `batching` | combines adds and dels of all connections in shared scripts |
//! | `leader` | the lease, the leadership term, and how sidecars share the rings |
//! | `ring` | the ring: advance, publish, repair |
//! | `outbox` | batches in a stream, with a consumer group for each group |
//! | `startup_checks`, `store`, `options` | check Redis and open the store |

mod batching;
mod connection;
mod keys;
mod leader;
mod options;
mod outbox;
mod ring;
mod scripts;
mod startup_checks;
mod store;
mod topology;

pub use keys::{MAX_CATCH_UP, MAX_SLOTS, SCHEMA};
pub use options::RedisOptions;
pub use startup_checks::RedisStoreError;
pub use store::RedisStore;
pub use topology::{Topology, TopologyKind};

use std::hash::{BuildHasher, RandomState};

/// Returns 32 unique hex digits. The operating system provides the keys of `RandomState`.
fn random_name() -> String {
    let state = RandomState::new();
    format!("{:016x}{:016x}", state.hash_one(1), state.hash_one(2))
}
