//! Options of the Redis store, and settings of its connections.

use std::time::Duration;

use crate::core::{Retention, StormRule, Wheel};

/// If Redis answers nothing for this long while requests wait, Redis is unreachable. No script takes nearly as long,
/// and an AddNewMsg is still refused within a second. A single answer may take longer
/// ([`redis_health`](crate::redis::connection::redis_health)).
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a starting sidecar waits for an unreachable Redis.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(10);

/// How long Redis may take to answer a startup check. It may take longer than for a request, because no request waits
/// and Redis may be busy.
pub(super) const CHECK_TIMEOUT: Duration = Duration::from_secs(3);

/// How long connecting may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Options of the Redis store.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    /// Address of Redis: `redis://`, `rediss://` or `redis+unix://`, with user and password if Redis requires them.
    /// [`Topology::parse`](crate::redis::Topology::parse) describes addresses of Sentinels and of a Cluster.
    pub url: String,
    /// The prefix of all keys.
    pub namespace: String,
    /// Number of rings.
    pub rings: u16,
    /// Dimensions of each ring.
    pub wheel: Wheel,
    /// The rule that makes a tick a storm.
    pub storm: StormRule,
    /// The limits of all outboxes together.
    pub retention: Retention,
    /// Maximum number of messages in flight, over all rings.
    pub max_in_flight: u64,
    /// Maximum number of messages of DelMsg held while Redis is unreachable, over all rings.
    pub max_held_acks: u64,
    /// The name of this sidecar in the status.
    pub name: String,
    /// Whether this sidecar never stands for election.
    pub never_lead: bool,
    /// Whether ticks expire even while no majority of the Sentinels, or of the Cluster's primaries, confirms the
    /// primary.
    pub expire_without_majority: bool,
    /// How long a lease lasts without renewal.
    pub lease: Duration,
    /// How long the pointer waits after an outage, for the Acks that all sidecars hold.
    pub outage_grace: Duration,
    /// Maximum number of missed ticks that are caught up.
    pub catch_up_max_ticks: u16,
}

impl RedisOptions {
    /// Returns the same options for one ring, with its share of each limit.
    pub(super) fn of_one_ring(&self) -> RedisOptions {
        let share = |bound: u64| bound.div_ceil(u64::from(self.rings));
        RedisOptions {
            // Messages are spread evenly over the rings, also in a storm.
            storm: StormRule { min: share(self.storm.min), ..self.storm },
            retention: Retention { max_ids: share(self.retention.max_ids), ..self.retention },
            max_in_flight: share(self.max_in_flight),
            max_held_acks: share(self.max_held_acks),
            ..self.clone()
        }
    }
}
