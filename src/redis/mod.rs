//! Implements the store in Redis, which all sidecars share. A store has one or more rings. Each ring has a pointer in
//! Redis, which moves from tick to tick. If a message is not acknowledged before the pointer leaves the tick of its
//! deadline, the message times out.
//!
//! Any sidecar adds and acknowledges messages. Only the sidecar that was elected leader of a ring moves the pointer of
//! that ring.
//!
//! | part | purpose |
//! |---|---|
//! | `keys` | names and types of all keys in Redis |
//! | `scripts` | the Lua scripts; Redis runs each of them as one atomic step |
//! | `topology` | finds Redis (standalone, Sentinel, Cluster) and the majority that confirms the primary |
//! | `connection` | the state of a ring in this sidecar, and its connection to Redis: reconnects, errors, stalls, hints |
//! | `batching` | combines the adds and dels of many clients, and sends them to Redis in one script call |
//! | `leader` | elects the leader of each ring, and balances the leaderships among the sidecars |
//! | `ring` | moves the pointer, publishes expired ticks, repairs lost keys |
//! | `outbox` | stores timeout batches in a stream, with a consumer group for each group of subscribers |
//! | `startup_checks`, `server_settings`, `store`, `options` | check Redis and open the store |

mod batching;
mod connection;
mod keys;
mod leader;
mod options;
mod outbox;
mod ring;
mod scripts;
mod server_settings;
mod startup_checks;
mod store;
mod topology;

pub use keys::{MAX_CATCH_UP, MAX_SLOTS, SCHEMA};
pub use options::RedisOptions;
pub use startup_checks::RedisStoreError;
pub use store::RedisStore;
pub use topology::endpoint::CredentialFiles;
pub use topology::store_url::StoreUrl;
pub use topology::{Topology, TopologyKind};

use std::hash::{BuildHasher, RandomState};

/// Returns 32 random hex digits, for names that must be unique. `RandomState` takes its keys from the random numbers of
/// the operating system.
fn random_name() -> String {
    let state = RandomState::new();
    format!("{:016x}{:016x}", state.hash_one(1), state.hash_one(2))
}
