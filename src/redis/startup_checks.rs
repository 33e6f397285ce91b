//! Checks the version and the settings of every Redis server that has a ring, at the start and then once a minute.
//! Warns of settings with which messages can be lost. Defines the error of a store that cannot be opened.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{ErrorKind, InfoDict, RedisResult, ServerErrorKind};
use tracing::{debug, warn};

use crate::clock::Clock;
use crate::core::{ServerReport, StoreReport};
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::hints::MAX_CLIENTS;
use crate::redis::keys::Keys;
use crate::redis::options::{CHECK_TIMEOUT, START_TIMEOUT};
use crate::redis::server_settings::{
    Settings, connections, persistence, policy, read_settings, replicas, room, too_old,
};
use crate::redis::topology::dial::RedisConnection;
use crate::redis::topology::majority::Slot;
use crate::redis::topology::{Topology, TopologyKind};

/// The pause between two attempts to reach Redis at the start.
const START_RETRY: Duration = Duration::from_millis(200);

/// How often the checks are repeated.
const REPEAT_EVERY: Duration = Duration::from_secs(60);

/// How often the checks are repeated while Redis has no room for all connections.
const REPEAT_WITHOUT_ROOM: Duration = Duration::from_secs(5);

/// The reason why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum RedisStoreError {
    /// The URL is not valid.
    #[error("--store: {0}; write it as docs/REDIS.md says")]
    Address(String),
    /// Redis does not answer.
    #[error("Redis cannot be reached within {START_TIMEOUT:?}: {0}; {hint}", hint = hint(.0))]
    Unreachable(String),
    /// Redis answers, but cannot be used. For example, it is too old or denies access.
    #[error("this Redis cannot be used: {0}")]
    Unusable(String),
    /// A ring in Redis was created with other settings, or by an incompatible version of ackwheel.
    #[error("{0}")]
    Differs(String),
}

/// The text of each warning, with the addresses of the Redis servers that it concerns.
type Findings = BTreeMap<String, Vec<String>>;

/// The checks of all Redis servers that have one of `slots`, the Cluster hash slots of the rings.
pub(super) struct StartupChecks {
    pub(super) topology: Arc<Topology>,
    pub(super) slots: Vec<Slot>,
    pub(super) clock: Arc<Clock>,
    /// The default ack timeout. `min-replicas-max-lag` must be less.
    pub(super) ack_timeout: Duration,
    /// The report of the last check.
    pub(super) known: Arc<Mutex<StoreReport>>,
    /// The keys of the first ring. They hold the versions and the heartbeats of all sidecars.
    pub(super) keys: Keys,
}

impl StartupChecks {
    /// Waits for Redis for up to [`START_TIMEOUT`], or without end while it has no room for a connection. Checks it, and
    /// logs the findings. Returns an error at once if Redis denies access or is too old, because waiting would not help.
    pub(super) async fn first(&self) -> Result<(), RedisStoreError> {
        let last = Mutex::new(None);
        let mut reached = pin!(async {
            loop {
                match self.check_all().await {
                    Ok(findings) => return Ok(findings),
                    Err(fault) if matches!(fault.kind, FaultKind::Forbidden | FaultKind::Unfit) => {
                        return Err(RedisStoreError::Unusable(fault.with_remedy()));
                    }
                    Err(fault) => {
                        let (cause, hint) = (fault.text.clone(), hint(&fault.text));
                        if last.lock().replace(fault).is_none() {
                            warn!(cause, "Redis cannot be reached; trying again: {hint}");
                        }
                    }
                }
                tokio::time::sleep(START_RETRY).await;
            }
        });
        loop {
            let findings = tokio::time::timeout(START_TIMEOUT, &mut reached).await;
            match (findings, last.lock().take()) {
                (Ok(findings), _) => return findings.map(|findings| self.report(findings)),
                (Err(_), Some(Fault { kind: FaultKind::MaxClients, .. })) => {}
                (Err(_), fault) => {
                    let cause = fault.map_or_else(|| String::from("no answer"), |fault| fault.text);
                    return Err(RedisStoreError::Unreachable(cause));
                }
            }
        }
    }

    /// Repeats the checks every minute, because settings may change, and another server may become the primary. Never
    /// ends.
    pub(super) async fn repeat(self) {
        let mut waited = Duration::ZERO;
        loop {
            tokio::time::sleep(REPEAT_WITHOUT_ROOM).await;
            waited += REPEAT_WITHOUT_ROOM;
            if waited < REPEAT_EVERY && *self.topology.has_room.borrow() {
                continue;
            }
            waited = Duration::ZERO;
            match self.check_all().await {
                Ok(findings) => self.report(findings),
                Err(Fault { kind: FaultKind::Unfit, text }) => {
                    let last = self.known.lock().clone();
                    self.report(StoreReport { warnings: Findings::from([(text, Vec::new())]), ..last });
                }
                // Over TLS, a Redis without room ends the connection without a reason.
                Err(Fault { kind: FaultKind::Disconnected, .. }) => {
                    self.topology.has_room.send_replace(false);
                }
                // The connections of the rings already report an unreachable Redis.
                Err(_) => {}
            }
        }
    }

    /// Logs a warning for each finding that is new since the last check. Keeps `report` for the next comparison.
    fn report(&self, report: StoreReport) {
        let mut known = self.known.lock();
        for (text, nodes) in new(&report.warnings, &known.warnings) {
            warn!(redis = nodes.join(", "), "{text}");
        }
        *known = report;
    }

    /// Checks every Redis server. Returns an error if one of them is unreachable or too old.
    async fn check_all(&self) -> Result<StoreReport, Fault> {
        let found = self.topology.find_all(&self.slots, &self.clock).await?;
        let first = found[0].to_string();
        let mut servers = BTreeMap::new();
        for server in found {
            // The Redis of the first ring comes first, because it knows all sidecars.
            let name = server.to_string();
            servers.entry((name != first, name)).or_insert((server, 0)).1 += 1;
        }
        let (mut report, mut sidecars, mut has_room) = (StoreReport::default(), 1, true);
        let mut of_first_ring = None;
        for ((_, name), (server, rings)) in servers {
            let mut connection = self.topology.connect(&server, "checks", Some(CHECK_TIMEOUT)).await?;
            let info = info(&mut connection).await?;
            let version = info.get::<String>("redis_version");
            if let Some(text) = version.as_deref().and_then(too_old) {
                return Err(Fault::new(FaultKind::Unfit, format!("{name}: {text}")));
            }
            let settings = read_settings(&mut connection, &info).await;
            let mut warnings = self.check_settings(&settings);
            if name == first {
                (report.sidecars, sidecars) =
                    self.exchange_versions(&mut connection).await.unwrap_or_else(|error| {
                        debug!(%error, "the versions of the sidecars cannot be read and are not reported");
                        (BTreeMap::new(), 1)
                    });
            }
            // Replicas count for `maxclients` too. The connection of this check is among those that are missing.
            let [connected, followers] =
                ["connected_clients", "connected_slaves"].map(|name| info.get::<usize>(name).unwrap_or_default());
            let connected = (connected + followers).saturating_sub(usize::from(self.is_first()));
            if let Some(warning) = room(&settings, rings, sidecars, connected + self.missing(rings)) {
                has_room = false;
                warnings.push(warning);
            }
            for warning in warnings {
                report.warnings.entry(warning).or_default().push(name.clone());
            }
            let replicas = info.get("connected_slaves");
            report.servers.push(ServerReport { address: name, version, replicas, settings });
            of_first_ring.get_or_insert(connection);
        }
        if !has_room
            && self.is_first()
            && let Some(mut connection) = of_first_ring
        {
            // The others then close their connections for hints, which this sidecar needs for requests.
            let mut hint = redis::cmd("XADD");
            hint.arg(&self.keys.news).arg("MAXLEN").arg(16).arg("*").arg(MAX_CLIENTS).arg(1);
            let _ = hint.exec_async(&mut connection).await;
        }
        self.topology.has_room.send_replace(has_room);
        Ok(report)
    }

    /// Returns whether no check has succeeded yet. The sidecar then has no other connection to Redis.
    fn is_first(&self) -> bool {
        self.known.lock().servers.is_empty()
    }

    /// Returns the number of connections to a Redis with `rings` rings that this sidecar still opens.
    fn missing(&self, rings: usize) -> usize {
        match *self.topology.has_room.borrow() {
            true => 0,
            false if self.is_first() => connections(rings),
            false => rings,
        }
    }

    /// Records the version of this sidecar in Redis, and returns those of all sidecars that did so recently. Removes
    /// the others. Also returns the number of live sidecars, with this one.
    async fn exchange_versions(
        &self,
        connection: &mut RedisConnection,
    ) -> RedisResult<(BTreeMap<String, String>, usize)> {
        let (now, _): (u64, u64) = redis::cmd("TIME").query_async(connection).await?;
        let mine = format!("{} {now}", env!("CARGO_PKG_VERSION"));
        let mut commands = redis::pipe();
        commands.hset(&self.keys.versions, &self.keys.sidecar, mine).ignore().hgetall(&self.keys.versions);
        commands.hlen(&self.keys.sidecars).hexists(&self.keys.sidecars, &self.keys.sidecar);
        let (all, live, is_counted): (BTreeMap<String, String>, usize, bool) =
            commands.query_async(connection).await?;
        let (recent, old) = recent_versions(all, now);
        if !old.is_empty() {
            redis::cmd("HDEL").arg(&self.keys.versions).arg(&old).query_async::<()>(connection).await?;
        }
        Ok((recent, live + usize::from(!is_counted)))
    }

    fn check_settings(&self, settings: &Settings) -> Vec<String> {
        // A replica becomes the primary only with Sentinels or in a Cluster. So the settings for replicas matter only
        // there.
        let may_be_replaced = self.topology.kind != TopologyKind::Standalone;
        let of_replicas = may_be_replaced.then(|| replicas(settings, self.ack_timeout)).flatten();
        [policy(settings), persistence(settings).map(str::to_owned), of_replicas].into_iter().flatten().collect()
    }
}

/// Splits the entries `version unix-time` of all sidecars into the versions of recent entries and the names of old
/// ones.
fn recent_versions(all: BTreeMap<String, String>, now: u64) -> (BTreeMap<String, String>, Vec<String>) {
    let (mut recent, mut old) = (BTreeMap::new(), Vec::new());
    for (sidecar, entry) in all {
        let (version, at) = entry.rsplit_once(' ').unwrap_or_default();
        match at.parse::<u64>() {
            Ok(at) if now.saturating_sub(at) <= (REPEAT_EVERY * 3).as_secs() => {
                recent.insert(sidecar, version.to_owned());
            }
            _ => old.push(sidecar),
        }
    }
    (recent, old)
}

/// Reads INFO. Returns nothing if the user of Redis may not.
async fn info(connection: &mut RedisConnection) -> RedisResult<InfoDict> {
    match redis::cmd("INFO").query_async(connection).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
            debug!(%error, "the version of Redis cannot be read and is not checked");
            Ok(InfoDict::new(""))
        }
        answered => answered,
    }
}

/// Returns the findings that are new: they concern a server for which `known` does not contain them.
fn new<'a>(findings: &'a Findings, known: &'a Findings) -> impl Iterator<Item = (&'a String, &'a Vec<String>)> {
    findings.iter().filter(|(text, nodes)| {
        known.get(*text).is_none_or(|before| nodes.iter().any(|node| !before.contains(node)))
    })
}

/// Remedies for a failed connection. A remedy fits if the text of the error contains the words before the remedy.
const HINTS: &[(&str, &str)] = &[
    ("knows no primary", "set ?master= in --store to the name that `sentinel monitor` gives the primary"),
    ("unknown command 'SENTINEL'", "name the Sentinels in --store, and not the Redis that they watch"),
    ("UnknownIssuer", "give --redis-ca the certificate of the authority that signed the certificate of Redis"),
    ("PEM", "correct the files of --redis-ca, --redis-cert and --redis-key"),
    ("certificate expired", "renew the certificate of Redis"),
    ("certificate not valid yet", "check the clocks of this host and of the host that issued the certificate"),
    ("not valid for name", "name Redis in --store by a host name that its certificate contains"),
    ("DB index", "correct the number of the database at the end of --store"),
    ("maxclients", "a sidecar has two connections to Redis for each ring, and two more"),
    ("timed out", MAYBE_TLS),
    ("reset by peer", MAYBE_TLS),
    ("InvalidContentType", MAYBE_TLS),
    ("cluster support disabled", "begin --store with redis://, since this Redis is no node of a Cluster"),
    ("no node of the Cluster answers", "are the nodes running, and are their addresses in --store right?"),
    ("no Sentinel names", "are the Sentinels running, and are their addresses in --store right?"),
];

const MAYBE_TLS: &str = "is it running, is the address in --store right, and does that begin with rediss:// where the \
                         port speaks TLS, and with redis:// where it does not?";

/// Returns the remedy for an unreachable Redis. `cause` is the text of the error.
fn hint(cause: &str) -> &'static str {
    let found = HINTS.iter().find(|(words, _)| cause.contains(words));
    found.map_or("is it running, and is the address in --store right?", |(_, hint)| hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_counts_for_three_minutes() {
        let entry = |sidecar: &str, text: &str| (sidecar.to_owned(), text.to_owned());
        let all = [entry("a", "1.0.0 1000"), entry("b", "1.1.0 820"), entry("c", "1.0.0 819"), entry("d", "?")];
        let (recent, old) = recent_versions(all.into(), 1_000);
        assert_eq!(recent, BTreeMap::from([entry("a", "1.0.0"), entry("b", "1.1.0")]));
        assert_eq!(old, ["c", "d"]);
    }

    #[test]
    fn a_finding_is_new_once_at_each_node_and_again_when_it_comes_back() {
        let findings = |pairs: &[(&str, &[&str])]| -> Findings {
            let owned = |nodes: &[&str]| nodes.iter().map(|node| (*node).to_owned()).collect();
            pairs.iter().map(|(text, nodes)| ((*text).to_owned(), owned(nodes))).collect()
        };
        let texts = |found: &Findings, known: &Findings| -> Vec<String> {
            new(found, known).map(|(text, _)| text.clone()).collect()
        };
        let first = findings(&[("evicts", &["a"]), ("forgets", &["a", "b"])]);
        assert_eq!(texts(&first, &Findings::new()), ["evicts", "forgets"]);
        assert!(texts(&first, &first).is_empty());
        let more = findings(&[("evicts", &["a", "b"]), ("forgets", &["a"])]);
        assert_eq!(texts(&more, &first), ["evicts"]);
        assert_eq!(texts(&first, &more), ["forgets"], "the last check did not find it at node b");
    }
}
