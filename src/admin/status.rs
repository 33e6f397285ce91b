//! The status report that `GET /status` returns as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::core::{JournalStatus, RingStatus, StoreReport};

/// The report that `GET /status` returns and `ackwheel status --json` prints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// The name of the sidecar that reports.
    #[serde(default)]
    pub sidecar: String,
    /// The kind of store, such as `memory`.
    pub store: String,
    /// The number of slots of a ring.
    pub slots: u16,
    /// The length of a tick in ms.
    pub tick_ms: u32,
    /// The states of all rings.
    pub rings: Vec<RingStatus>,
    /// The states of all groups.
    pub groups: Vec<GroupReport>,
    /// The names of tokens or, without tokens, of client certificates, with their open connections.
    #[serde(default)]
    pub access: Vec<AccessReport>,
    /// The listeners for clients, with their traffic.
    #[serde(default)]
    pub listeners: Vec<ListenerReport>,
    /// The commands over the RESP protocol since the start, by name.
    #[serde(default)]
    pub resp_commands: BTreeMap<String, u64>,
    /// The version of the sidecar.
    #[serde(default)]
    pub version: String,
    /// The time since the sidecar started.
    #[serde(default)]
    pub uptime_seconds: f64,
    /// Requests and timeouts per second.
    #[serde(default)]
    pub rates: RatesReport,
    /// Events of the last five minutes.
    #[serde(default)]
    pub last_minutes: LastMinutes,
    /// The limits of the sidecar, with their use.
    #[serde(default)]
    pub limits: Vec<LimitReport>,
    /// When the certificate of the sidecar expires, in Unix time; null without a certificate.
    #[serde(default)]
    pub certificate_expiry: Option<i64>,
    /// The state of the journal; null without `--journal`.
    #[serde(default)]
    pub journal: Option<JournalStatus>,
    /// Servers, settings and sidecars of a shared store. Empty with the memory store.
    #[serde(default)]
    pub shared_store: StoreReport,
}

/// Messages per second at this sidecar, over the last 10 to 20 seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RatesReport {
    /// The time over which the rates were measured.
    pub seconds: f64,
    /// Messages added or added again.
    pub adds: f64,
    /// Messages in `DelMsg` answers.
    pub dels: f64,
    /// Messages that timed out in rings that this sidecar leads.
    pub timeouts: f64,
}

/// Events at this sidecar in the last five minutes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LastMinutes {
    /// The time over which the events were counted.
    pub seconds: f64,
    /// Ticks with suspiciously many timeouts, in rings that this sidecar leads.
    pub storms: u64,
    /// How often Redis answered that it is out of memory.
    pub out_of_memory: u64,
    /// Refused requests and connections, by reason. Reasons without a refusal are absent.
    pub refusals: BTreeMap<String, u64>,
}

/// A limit and its use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitReport {
    /// The name of the limit: its flag, if it has one.
    pub name: String,
    /// How much is used.
    pub used: u64,
    /// The limit.
    pub limit: u64,
}

/// A listener for clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerReport {
    /// The name of its flag: listen, socket or resp.
    pub listener: String,
    /// The number of open connections of admitted clients.
    pub connections: u64,
    /// The bytes received since the start.
    pub received_bytes: u64,
    /// The bytes sent since the start.
    pub sent_bytes: u64,
}

/// The connections of a token or a client certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessReport {
    /// The name of the token or of the certificate.
    pub name: String,
    /// The number of open connections under this name.
    pub connections: u64,
}

/// The state of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// The name of the group.
    pub group: String,
    /// The number of its subscribers on this sidecar.
    pub subscribers: u64,
    /// The number of batches that the group has not acknowledged, including delivered batches.
    pub outbox_batches: u64,
    /// The number of batches that were delivered but not acknowledged.
    pub unacked_batches: u64,
    /// The age in seconds of the oldest batch that the group has not acknowledged; 0 without such a batch.
    pub oldest_seconds: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_an_older_sidecar_is_understood() {
        let text = r#"{"store":"memory","slots":1,"tick_ms":1000,"groups":[],"rings":[{"ring":0,"pointer":7,
            "epoch":1,"leader":null,"in_flight":3,"slots":[2],"closing":1}]}"#;
        let report: StatusReport = serde_json::from_str(text).expect("fields added later have defaults");
        assert_eq!(report.sidecar, "");
        assert!(!report.rings[0].leads && report.rings[0].recent.is_empty());
        let again = serde_json::to_string(&report).expect("a report can be written");
        assert_eq!(serde_json::from_str::<StatusReport>(&again).expect("it can be read"), report);
    }
}
