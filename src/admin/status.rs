//! The status report: the ring at a glance, as JSON.

use serde::{Deserialize, Serialize};

use crate::core::group::GroupName;
use crate::core::outbox::GroupBacklog;
use crate::core::ring::RingStatus;
use crate::core::tick::Wheel;

/// What `GET /status` and `ackwheel status --json` print.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// The kind of store.
    pub store: String,
    /// Slots of the ring.
    pub slots: u16,
    /// Length of a tick in ms.
    pub tick_ms: u32,
    /// Every ring.
    pub rings: Vec<RingReport>,
    /// Every group.
    pub groups: Vec<GroupReport>,
}

/// A ring at a glance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RingReport {
    /// Which ring.
    pub ring: u16,
    /// The tick at which it stands.
    pub pointer: u64,
    /// The epoch of its leader.
    pub epoch: u64,
    /// The name of its leader; null where nobody leads.
    pub leader: Option<String>,
    /// How long that has been its leader; absent where nobody else could lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_age_seconds: Option<f64>,
    /// Messages in flight, those closing included.
    pub in_flight: u64,
    /// Messages in each slot, those closing not included.
    pub slots: Vec<u64>,
    /// Messages whose tick is the pointer's: the next advance decides them.
    pub closing: u64,
}

/// A group at a glance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// Its name.
    pub group: String,
    /// Its subscribers at this sidecar.
    pub subscribers: u64,
    /// Batches that it has not acknowledged, those handed out included.
    pub outbox_batches: u64,
    /// Batches that were handed out and not acknowledged.
    pub unacked_batches: u64,
    /// Age of its oldest batch in seconds; 0 without one.
    pub oldest_seconds: f64,
}

impl StatusReport {
    /// A report of what the store says.
    pub fn new(
        store: &str,
        wheel: Wheel,
        rings: Vec<RingStatus>,
        backlogs: Vec<GroupBacklog>,
        subscribers: impl Fn(&GroupName) -> u64,
    ) -> StatusReport {
        StatusReport {
            store: String::from(store),
            slots: wheel.slots(),
            tick_ms: wheel.tick_ms(),
            rings: rings.into_iter().map(RingReport::from).collect(),
            groups: backlogs
                .into_iter()
                .map(|backlog| GroupReport {
                    subscribers: subscribers(&backlog.group),
                    group: backlog.group.to_string(),
                    outbox_batches: backlog.batches,
                    unacked_batches: backlog.unacked,
                    oldest_seconds: backlog.oldest.as_secs_f64(),
                })
                .collect(),
        }
    }
}

impl From<RingStatus> for RingReport {
    fn from(status: RingStatus) -> RingReport {
        RingReport {
            ring: status.ring,
            pointer: status.pointer.0,
            epoch: status.epoch,
            leader: status.leader,
            lease_age_seconds: status.lease_age.map(|age| age.as_secs_f64()),
            in_flight: status.in_flight,
            slots: status.slots,
            closing: status.closing,
        }
    }
}
