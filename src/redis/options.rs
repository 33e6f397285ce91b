//! Options of the Redis store, and settings of its connections.

use std::time::Duration;

use crate::core::{Retention, StormRule, Wheel};

/// Redis is unreachable if it answers nothing for so long while requests wait. Much longer than any script takes, and
/// short enough that an AddNewMsg is refused within a second. A single answer may take longer
/// ([`redis_health`](crate::redis::connection::redis_health)).
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a sidecar that starts waits for a Redis that is not there yet.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(10);

/// How long Redis may take for an answer to the startup checks: nothing else waits for it, and it may be busy.
pub(super) const CHECK_TIMEOUT: Duration = Duration::from_secs(3);

/// How long connecting may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Options of the Redis store.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    /// Where Redis is: `redis://`, `rediss://` or `redis+unix://`, with user and password if it wants them, or as
    /// [`Topology::parse`](crate::redis::Topology::parse) has it for Sentinels and a Cluster.
    pub url: String,
    /// The prefix of all keys.
    pub namespace: String,
    /// Number of rings.
    pub rings: u16,
    /// Dimensions of each.
    pub wheel: Wheel,
    /// When a tick is a storm.
    pub storm: StormRule,
    /// The bounds of the outboxes together.
    pub retention: Retention,
    /// The most messages in flight, over all rings.
    pub max_in_flight: u64,
    /// The most messages of DelMsg that are held while Redis is unreachable, over all rings.
    pub max_held_acks: u64,
    /// The name of this sidecar in the status.
    pub name: String,
    /// Whether it never stands for election.
    pub never_lead: bool,
    /// Whether ticks expire also while no majority of the Sentinels, or of the Cluster's primaries, confirms which
    /// Redis is the primary.
    pub expire_without_majority: bool,
    /// How long a lease lasts without being renewed.
    pub lease: Duration,
    /// How long the pointer waits after an outage, for the Acks that all sidecars hold.
    pub outage_grace: Duration,
    /// The most missed ticks that are caught up.
    pub catch_up_max_ticks: u16,
}

impl RedisOptions {
    /// The same options for one of the rings, with its share of each bound.
    pub(super) fn of_one_ring(&self) -> RedisOptions {
        let share = |bound: u64| bound.div_ceil(u64::from(self.rings));
        RedisOptions {
            // Messages are spread evenly over the rings, and so is a storm.
            storm: StormRule { min: share(self.storm.min), ..self.storm },
            retention: Retention { max_ids: share(self.retention.max_ids), ..self.retention },
            max_in_flight: share(self.max_in_flight),
            max_held_acks: share(self.max_held_acks),
            ..self.clone()
        }
    }
}
