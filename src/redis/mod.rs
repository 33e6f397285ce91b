//! A wheel that lives in Redis and is shared: any sidecar adds, any other acknowledges, an elected one turns it.
//!
//! | file | what it is for |
//! |---|---|
//! | `keys` | the schema |
//! | `script`, `lua/` | the scripts: each one atomic step |
//! | `place`, `nodes`, `sentinels`, `cluster` | where Redis is, and who of several has a ring |
//! | `majority`, `confirmation` | what a majority says of that: no tick expires without one |
//! | `link`, `keeper`, `connections`, `fault` | a connection that heals, and what can go wrong with it |
//! | `peer`, `silence` | whether a Redis answers, by all that this process asks of it |
//! | `request`, `inbox`, `frames`, `chunk`, `applied`, `queue`, `congestion`, `coalesce` | adds and dels of all connections travel together |
//! | `answered`, `recovery` | Acks that Redis lost, or that were held in an outage, are applied before the pointer moves |
//! | `ring` | the ring: the pointer's time, expiry |
//! | `lease`, `office`, `leaderships` | who leads, what lease and ring share, and how sidecars share the rings |
//! | `outbox` | batches on a stream, a consumer group for each group |
//! | `news` | hints from other sidecars |
//! | `checks`, `findings`, `store`, `options` | opening it all, and what is unwise about a Redis |
//! | `direct` | the script of adds and dels alone, to be measured |

mod answered;
mod applied;
mod checks;
mod chunk;
mod cluster;
mod coalesce;
mod confirmation;
mod congestion;
mod connections;
mod direct;
mod fault;
mod findings;
mod flying;
mod frames;
mod fullness;
mod inbox;
mod keeper;
mod keys;
mod lanes;
mod leaderships;
mod lease;
mod link;
mod majority;
mod mends;
mod news;
mod nodes;
mod office;
mod options;
mod outbox;
mod peer;
mod place;
mod queue;
mod recovery;
mod request;
mod ring;
mod script;
mod sentinels;
mod silence;
mod store;
mod worth;

#[doc(hidden)]
pub use direct::DirectCalls;
pub use keys::{MAX_CATCH_UP, MAX_SLOTS, SCHEMA};
pub use options::RedisOptions;
pub use place::{Place, Several};
pub use store::{RedisStore, RedisStoreError};

use std::hash::{BuildHasher, RandomState};

/// A number that nobody can foresee.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// 32 hex digits that nobody has had before: the keys of `RandomState` come from the operating system.
fn random_name() -> String {
    let state = RandomState::new();
    format!("{:016x}{:016x}", state.hash_one(1), state.hash_one(2))
}
