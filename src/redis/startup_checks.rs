//! Checks the version and the settings of every Redis server that has a ring, at the start and then once a minute.
//! Warns of settings with which messages can be lost. Defines the error of a store that cannot be opened.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{ErrorKind, InfoDict, RedisResult, ServerErrorKind};
use tracing::{debug, warn};

use crate::clock::Clock;
use crate::core::{ServerReport, StoreReport};
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::options::{CHECK_TIMEOUT, START_TIMEOUT};
use crate::redis::topology::dial::RedisConnection;
use crate::redis::topology::majority::Slot;
use crate::redis::topology::{Topology, TopologyKind};

/// The oldest major version of Redis that has all commands that the scripts use. Valkey also reports a
/// `redis_version`: that of the Redis with which it is compatible. So one check serves both.
const OLDEST_MAJOR: u64 = 7;

/// The pause between two attempts to reach Redis at the start.
const START_RETRY: Duration = Duration::from_millis(200);

/// How often the checks are repeated.
const REPEAT_EVERY: Duration = Duration::from_secs(60);

/// The settings that are checked.
const SETTINGS: [&str; 6] =
    ["maxmemory-policy", "appendonly", "save", "appendfsync", "min-replicas-to-write", "min-replicas-max-lag"];

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

/// The settings of a Redis server: from the name of a setting to its value.
type Settings = BTreeMap<String, String>;

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
    /// The key of the versions of all sidecars, in the Redis of the first ring.
    pub(super) versions: String,
    /// The unique name of this sidecar.
    pub(super) sidecar: String,
}

impl StartupChecks {
    /// Waits for Redis for up to [`START_TIMEOUT`], checks it, and logs the findings. Returns an error at once if Redis
    /// denies access or is too old, because waiting would not help.
    pub(super) async fn first(&self) -> Result<(), RedisStoreError> {
        let mut cause = None;
        let reached = async {
            loop {
                match self.check_all().await {
                    Ok(findings) => return Ok(findings),
                    Err(fault) if matches!(fault.kind, FaultKind::Forbidden | FaultKind::Unfit) => {
                        return Err(RedisStoreError::Unusable(fault.with_remedy()));
                    }
                    Err(Fault { text, .. }) => {
                        if cause.replace(text.clone()).is_none() {
                            let hint = hint(&text);
                            warn!(cause = text, "Redis cannot be reached; trying for {START_TIMEOUT:?}: {hint}");
                        }
                    }
                }
                tokio::time::sleep(START_RETRY).await;
            }
        };
        let findings = tokio::time::timeout(START_TIMEOUT, reached).await.unwrap_or_else(|_| {
            Err(RedisStoreError::Unreachable(cause.unwrap_or_else(|| String::from("no answer"))))
        })?;
        self.report(findings);
        Ok(())
    }

    /// Repeats the checks every minute, because settings may change, and another server may become the primary. Never
    /// ends.
    pub(super) async fn repeat(self) {
        loop {
            tokio::time::sleep(REPEAT_EVERY).await;
            match self.check_all().await {
                Ok(findings) => self.report(findings),
                Err(Fault { kind: FaultKind::Unfit, text }) => {
                    let last = self.known.lock().clone();
                    self.report(StoreReport { warnings: Findings::from([(text, Vec::new())]), ..last });
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
        let servers: BTreeMap<String, _> = found.into_iter().map(|found| (found.to_string(), found)).collect();
        let mut report = StoreReport::default();
        for (name, server) in servers {
            let mut connection = server.connect("checks", Some(CHECK_TIMEOUT)).await?;
            let version = version(&mut connection).await?;
            if let Some(text) = version.as_deref().and_then(too_old) {
                return Err(Fault::new(FaultKind::Unfit, format!("{name}: {text}")));
            }
            let settings = settings(&mut connection).await;
            for warning in self.check_settings(&settings) {
                report.warnings.entry(warning).or_default().push(name.clone());
            }
            let replicas = redis::cmd("INFO").arg("replication").query_async::<InfoDict>(&mut connection).await;
            let replicas = replicas.ok().and_then(|info| info.get("connected_slaves"));
            if name == first {
                report.sidecars = self.exchange_versions(&mut connection).await.unwrap_or_else(|error| {
                    debug!(%error, "the versions of the sidecars cannot be read and are not reported");
                    BTreeMap::new()
                });
            }
            report.servers.push(ServerReport { address: name, version, replicas, settings });
        }
        Ok(report)
    }

    /// Records the version of this sidecar in Redis, and returns those of all sidecars that did so recently. Removes
    /// the others.
    async fn exchange_versions(&self, connection: &mut RedisConnection) -> RedisResult<BTreeMap<String, String>> {
        let (now, _): (u64, u64) = redis::cmd("TIME").query_async(connection).await?;
        let mine = format!("{} {now}", env!("CARGO_PKG_VERSION"));
        let mut commands = redis::pipe();
        commands.hset(&self.versions, &self.sidecar, mine).ignore().hgetall(&self.versions);
        let (all,): (BTreeMap<String, String>,) = commands.query_async(connection).await?;
        let (recent, old) = recent_versions(all, now);
        if !old.is_empty() {
            redis::cmd("HDEL").arg(&self.versions).arg(&old).query_async::<()>(connection).await?;
        }
        Ok(recent)
    }

    fn check_settings(&self, settings: &Settings) -> Vec<String> {
        // Without settings, nothing is known.
        if settings.is_empty() {
            return Vec::new();
        }
        // A replica becomes the primary only with Sentinels or in a Cluster. So the settings for replicas matter only
        // there.
        let may_be_replaced = self.topology.kind != TopologyKind::Standalone;
        let of_replicas = may_be_replaced.then(|| replicas(settings, self.ack_timeout)).flatten();
        [policy(settings), persistence(settings).map(str::to_owned), of_replicas].into_iter().flatten().collect()
    }
}

/// Reads the settings that are checked. Returns none if Redis does not report them.
async fn settings(connection: &mut RedisConnection) -> Settings {
    redis::cmd("CONFIG").arg("GET").arg(&SETTINGS).query_async(connection).await.unwrap_or_else(|error| {
        // Hosted services and ACLs may forbid CONFIG GET.
        debug!(%error, ?SETTINGS, "these settings of Redis cannot be read and are not checked");
        Settings::new()
    })
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

/// Reads the version of Redis. Returns none if Redis does not report it.
async fn version(connection: &mut RedisConnection) -> RedisResult<Option<String>> {
    match redis::cmd("INFO").arg("server").query_async::<InfoDict>(connection).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
            debug!(%error, "the version of Redis cannot be read and is not checked");
            Ok(None)
        }
        answered => Ok(answered?.get("redis_version")),
    }
}

fn too_old(version: &str) -> Option<String> {
    let major = version.split('.').next().and_then(|major| major.parse::<u64>().ok()).unwrap_or_default();
    (major < OLDEST_MAJOR)
        .then(|| format!("it is version {version}, and ackwheel needs Redis 7 or Valkey 7.2 or later: update it"))
}

fn policy(settings: &Settings) -> Option<String> {
    let policy = settings.get("maxmemory-policy")?;
    (policy != "noeviction").then(|| {
        format!(
            "Redis may evict keys when its memory is full (maxmemory-policy {policy}): messages in flight would be \
             lost; set maxmemory-policy noeviction, so that adds are refused instead"
        )
    })
}

fn persistence(settings: &Settings) -> Option<&'static str> {
    let setting = |name: &str| settings.get(name).map(String::as_str).unwrap_or_default();
    match (setting("appendonly"), setting("save"), setting("appendfsync")) {
        ("yes", _, "no") => Some(
            "Redis leaves it to the system when its append-only file reaches the disk (appendfsync no): a crash of the \
             machine loses up to half a minute; set appendfsync everysec or always",
        ),
        ("yes", _, _) => None,
        (_, "", _) => Some(
            "Redis keeps nothing on disk (appendonly no, save \"\"): a restart of Redis loses messages in flight \
             and the outbox; set appendonly yes",
        ),
        _ => Some(
            "Redis keeps snapshots only (appendonly no): a restart of Redis goes back to the last one, so that \
             acknowledged messages come back and time out; set appendonly yes",
        ),
    }
}

fn replicas(settings: &Settings, ack_timeout: Duration) -> Option<String> {
    let least = settings.get("min-replicas-to-write")?;
    if least == "0" {
        return Some(String::from(
            "Redis takes writes also when no replica follows it (min-replicas-to-write 0): adds and acknowledgements \
             may be lost while another takes over; set min-replicas-to-write 1, so that they are refused or held until \
             then, with at least two replicas: with one, Redis refuses writes while it is down",
        ));
    }
    let max_lag = Duration::from_secs(settings.get("min-replicas-max-lag")?.parse().ok()?);
    if max_lag.is_zero() {
        return Some(format!(
            "min-replicas-max-lag 0 switches min-replicas-to-write {least} off: Redis takes writes also when no \
             replica follows it; set min-replicas-max-lag to less than the ack timeout of {ack_timeout:?}"
        ));
    }
    (max_lag >= ack_timeout).then(|| {
        format!(
            "a primary without its replicas takes writes for min-replicas-max-lag {max_lag:?} more, and the ack \
             timeout is {ack_timeout:?}: messages are added, acknowledged and time out in that time, and all of it may \
             be lost when another takes over; set min-replicas-max-lag to less than the ack timeout"
        )
    })
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
    (
        "maxclients",
        "a sidecar has two connections to Redis for each ring, and opens one for a moment once a minute",
    ),
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

    const TIMEOUT: Duration = Duration::from_secs(15);

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn settings_that_lose_messages_are_named_with_their_remedy() {
        let text = policy(&settings(&[("maxmemory-policy", "allkeys-lru")])).unwrap();
        assert!(text.contains("allkeys-lru") && text.contains("noeviction"), "{text}");
        assert_eq!(policy(&settings(&[("maxmemory-policy", "noeviction")])), None);
        for (save, word) in [("", "keeps nothing"), ("3600 1", "snapshots only")] {
            let text = persistence(&settings(&[("appendonly", "no"), ("save", save)])).unwrap();
            assert!(text.contains(word) && text.contains("appendonly yes"), "{text}");
        }
        assert_eq!(persistence(&settings(&[("appendonly", "yes"), ("appendfsync", "everysec")])), None);
        let text = replicas(&settings(&[("min-replicas-to-write", "0")]), TIMEOUT).unwrap();
        assert!(text.contains("set min-replicas-to-write 1"), "{text}");
        assert_eq!(replicas(&settings(&[("min-replicas-to-write", "1")]), TIMEOUT), None);
    }

    #[test]
    fn a_lag_of_replicas_as_long_as_the_ack_timeout_is_named() {
        let lag = |lag, timeout| {
            replicas(&settings(&[("min-replicas-to-write", "1"), ("min-replicas-max-lag", lag)]), timeout)
        };
        assert_eq!(lag("10", TIMEOUT), None);
        for (seconds, timeout) in [("10", Duration::from_secs(10)), ("10", Duration::from_secs(5))] {
            let text = lag(seconds, timeout).unwrap();
            assert!(text.contains("min-replicas-max-lag 10s") && text.contains(&format!("{timeout:?}")), "{text}");
        }
        assert!(lag("0", TIMEOUT).unwrap().contains("off"));
    }

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
