//! Options of the Redis store, and settings of its connections.

use std::time::Duration;

use crate::core::{Retention, StormRule, Wheel};
use crate::redis::topology::endpoint::CredentialFiles;
use crate::redis::topology::store_url::StoreUrl;

/// Maximum time without any answer from Redis while requests wait. After that time, the sidecar treats Redis as
/// unreachable. The limit is far above the run time of any script, and low enough to refuse an AddNewMsg within a
/// second. A single answer may take longer if Redis answers other requests in that time
/// ([`redis_health`](crate::redis::connection::redis_health)).
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a starting sidecar waits for an unreachable Redis.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(10);

/// How long Redis may take to answer a startup check. This limit is higher than [`RESPONSE_TIMEOUT`], because no client
/// waits for a check.
pub(super) const CHECK_TIMEOUT: Duration = Duration::from_secs(3);

/// Options of the Redis store.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    /// Address of Redis: `redis://`, `rediss://` or `redis+unix://`, with user and password if Redis requires them.
    /// [`Topology::parse`](crate::redis::Topology::parse) describes addresses of Sentinels and of a Cluster.
    pub url: StoreUrl,
    /// Files with credentials for Redis.
    pub files: CredentialFiles,
    /// The first part of all keys. Sidecars with the same namespace share the rings.
    pub namespace: String,
    /// Number of rings. A hash of the message determines its ring.
    pub rings: u16,
    /// Number of slots and length of a tick, for each ring.
    pub wheel: Wheel,
    /// Minimum number and minimum share of timeouts that make a tick a storm. The cause of so many timeouts is more
    /// likely a fault of the servers than offline clients.
    pub storm: StormRule,
    /// How long batches are kept, and how many messages the batches of all rings may contain together.
    pub retention: Retention,
    /// Maximum number of messages in flight, in all rings together.
    pub max_in_flight: u64,
    /// Maximum number of acknowledged messages (DelMsg) that this sidecar keeps while Redis is unreachable, for all
    /// rings together.
    pub max_held_acks: u64,
    /// The name of this sidecar in the status.
    pub name: String,
    /// Whether this sidecar never becomes the leader of a ring.
    pub never_lead: bool,
    /// Whether ticks expire even while no majority of the Sentinels, or of the Cluster's primaries, confirms that the
    /// Redis of a ring is the primary.
    pub expire_without_majority: bool,
    /// How long a sidecar stays leader of a ring without renewing its lease.
    pub lease: Duration,
    /// How long no tick expires after an outage of Redis, so that all sidecars can first send the Acks that they kept.
    pub outage_grace: Duration,
    /// Maximum number of missed ticks that a leader expires one after the other without waiting. If more ticks were
    /// missed, all deadlines are shifted by the rest.
    pub catch_up_max_ticks: u16,
}

impl RedisOptions {
    /// Returns the same options for one ring, with its share of each limit on a number of messages.
    pub(super) fn of_one_ring(&self) -> RedisOptions {
        let share = |bound: u64| bound.div_ceil(u64::from(self.rings));
        RedisOptions {
            // A hash spreads messages evenly over the rings. So in a storm each ring has about the same number of
            // timeouts.
            storm: StormRule { min: share(self.storm.min), ..self.storm },
            retention: Retention { max_ids: share(self.retention.max_ids), ..self.retention },
            max_in_flight: share(self.max_in_flight),
            max_held_acks: share(self.max_held_acks),
            ..self.clone()
        }
    }
}
