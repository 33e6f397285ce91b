//! The trait of a store, which has one or more rings, each with an outbox and a lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::lease::Lease;
use super::outbox::Outbox;
use super::refusal::Refusal;
use super::ring::Ring;

/// A moment, both by the monotonic clock and by the wall clock. Only the wall clock goes on across a restart.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// The time by the monotonic clock.
    pub now: Instant,
    /// The time since the Unix epoch by the wall clock, which an administrator can set.
    pub unix_time: Duration,
}

impl Moment {
    /// Returns the time since the Unix epoch in ms.
    pub fn unix_ms(&self) -> u64 {
        u64::try_from(self.unix_time.as_millis()).unwrap_or(u64::MAX)
    }
}

/// One ring of a store, with its outbox and its lease.
#[derive(Clone)]
pub struct RingParts {
    /// The wheel with the messages in flight.
    pub ring: Arc<dyn Ring>,
    /// The outbox for the timeout batches of the wheel.
    pub outbox: Arc<dyn Outbox>,
    /// The lease. The sidecar that holds it may move the pointer of the wheel.
    pub lease: Arc<dyn Lease>,
}

/// The servers and sidecars of a shared store, as one sidecar saw them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreReport {
    /// The servers that have a ring, checked once a minute.
    pub servers: Vec<ServerReport>,
    /// Settings of servers with which messages can be lost, each with the servers that it concerns.
    pub warnings: BTreeMap<String, Vec<String>>,
    /// The version of each sidecar that has reported within the last three minutes, by its unique name.
    pub sidecars: BTreeMap<String, String>,
}

/// A server of a shared store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerReport {
    /// The address of the server.
    pub address: String,
    /// The version of the server; null if it does not report it.
    pub version: Option<String>,
    /// The number of connected replicas; null if the server does not report it.
    pub replicas: Option<u64>,
    /// The settings that decide whether messages can be lost. Empty if the server does not report them.
    pub settings: BTreeMap<String, String>,
}

/// The state of the journal of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JournalStatus {
    /// The number of damaged parts at the start.
    pub damaged: u64,
    /// The bytes in the segments in use.
    pub log_bytes: u64,
    /// The bytes that wait for the writer.
    pub unwritten_bytes: u64,
    /// Whether new messages are refused because of the journal.
    #[serde(rename = "refusing")]
    pub is_refusing: bool,
    /// The number of failed writes and syncs.
    pub errors: u64,
    /// The number of syncs.
    pub syncs: u64,
    /// The time that all syncs took together.
    pub sync_seconds: f64,
}

/// The storage for messages in flight and timeout batches.
#[async_trait]
pub trait Store: Send + Sync {
    /// Returns the kind of the store, as shown in the Welcome frame and in `/status`.
    fn kind(&self) -> &'static str;

    /// Returns the rings, at least one. Ring i is at index i.
    fn rings(&self) -> &[RingParts];

    /// Returns whether the store answers.
    fn is_up(&self) -> bool;

    /// Returns whether the store has refused requests within the last ten seconds because it has no memory. It still
    /// takes acknowledgements.
    fn is_full(&self) -> bool {
        false
    }

    /// Returns the state of the journal, if the store has one.
    fn journal(&self) -> Option<JournalStatus> {
        None
    }

    /// Returns the last report about servers and sidecars. A store that is not shared has none.
    fn report(&self) -> StoreReport {
        StoreReport::default()
    }

    /// Saves the state, if the store can do so. Must be called after the last request. Returns a sentence for the log, or
    /// a refusal if messages or batches are lost.
    async fn close(&self) -> Result<String, Refusal>;
}
