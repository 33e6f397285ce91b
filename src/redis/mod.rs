//! A wheel that lives in Redis and is shared: any sidecar adds, any other acknowledges, and the leader turns it.
//!
//! | part | purpose |
//! |---|---|
//! | `keys` | the schema |
//! | `scripts` | the Lua scripts, each one atomic step |
//! | `topology` | where Redis is (standalone, Sentinel, Cluster), and the majority that confirms it |
//! | `connection` | the link of a ring: reconnects, classifies errors, detects stalls, hears hints of other sidecars |
//! | `batching` | adds and dels of all connections travel in shared scripts |
//! | `leader` | the lease, the leadership term, and how sidecars share the rings |
//! | `ring` | the ring: advance, publish, repair |
//! | `outbox` | batches on a stream, with a consumer group for each group |
//! | `startup_checks`, `store`, `options` | opens the store, and says why it cannot |

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

/// 32 unique hex digits: the keys of `RandomState` come from the operating system.
fn random_name() -> String {
    let state = RandomState::new();
    format!("{:016x}{:016x}", state.hash_one(1), state.hash_one(2))
}
