//! The status report that `GET /status` answers as JSON.

use serde::{Deserialize, Serialize};

/// The report that `GET /status` and `ackwheel status --json` print.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// The name of the sidecar that reports.
    #[serde(default)]
    pub sidecar: String,
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

/// The state of a ring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RingReport {
    /// The number of the ring.
    pub ring: u16,
    /// The tick at which its pointer is.
    pub pointer: u64,
    /// The epoch of its leader.
    pub epoch: u64,
    /// The name of its leader; null without a leader.
    pub leader: Option<String>,
    /// How long that has been its leader; absent if no other sidecar could lead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_age_seconds: Option<f64>,
    /// Whether the sidecar that reports is the leader.
    #[serde(default)]
    pub leads: bool,
    /// How long the pointer is behind its schedule.
    #[serde(default)]
    pub pointer_lag_seconds: f64,
    /// Why the sidecar that reports may not move the pointer, though its store answers; absent if it may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Messages in flight, those closing included.
    pub in_flight: u64,
    /// Messages in each slot, those closing not included.
    pub slots: Vec<u64>,
    /// Messages whose tick is the pointer's: the next advance expires them.
    pub closing: u64,
    /// The ticks that this sidecar expired last, the oldest first, at most 60.
    #[serde(default)]
    pub recent: Vec<TickReport>,
}

/// An expired tick: its counts are final.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TickReport {
    /// The number of the tick.
    pub tick: u64,
    /// Messages whose final deadline it was: those acknowledged and those timed out.
    pub added: u64,
    /// Messages that were acknowledged in time.
    pub acked: u64,
    /// Messages that timed out.
    pub timed_out: u64,
    /// Whether so many timed out that a fault on our side is likelier than that many dead clients.
    pub storm: bool,
}

/// The state of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// Its name.
    pub group: String,
    /// Its subscribers at this sidecar.
    pub subscribers: u64,
    /// Batches that it has not acknowledged, those delivered included.
    pub outbox_batches: u64,
    /// Batches that were delivered and not acknowledged.
    pub unacked_batches: u64,
    /// Age of its oldest batch in seconds; 0 without one.
    pub oldest_seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_an_older_sidecar_is_understood() {
        let text = r#"{"store":"memory","slots":1,"tick_ms":1000,"groups":[],"rings":[{"ring":0,"pointer":7,
            "epoch":1,"leader":null,"in_flight":3,"slots":[2],"closing":1}]}"#;
        let report: StatusReport = serde_json::from_str(text).expect("what was added since has a default");
        assert_eq!(report.sidecar, "");
        assert!(!report.rings[0].leads && report.rings[0].recent.is_empty());
        let again = serde_json::to_string(&report).expect("a report can be written");
        assert_eq!(serde_json::from_str::<StatusReport>(&again).expect("and read"), report);
    }
}
