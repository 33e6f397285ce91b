//! Reads and judges the settings of a Redis server. A judgement is a warning with a remedy, or `None`.

use std::collections::BTreeMap;
use std::time::Duration;

use redis::InfoDict;
use tracing::debug;

use crate::redis::topology::dial::RedisConnection;

/// The oldest major version of Redis that has all commands that the scripts use. Valkey also reports a
/// `redis_version`: that of the Redis with which it is compatible. So one check serves both.
const OLDEST_MAJOR: u64 = 7;

/// The settings that are checked.
const SETTINGS: [&str; 7] = [
    "maxmemory-policy",
    "maxclients",
    "appendonly",
    "save",
    "appendfsync",
    "min-replicas-to-write",
    "min-replicas-max-lag",
];

/// The settings of a Redis server: from the name of a setting to its value.
pub(super) type Settings = BTreeMap<String, String>;

/// Reads the settings that are checked. INFO has some of them too.
pub(super) async fn read_settings(connection: &mut RedisConnection, info: &InfoDict) -> Settings {
    let answered = redis::cmd("CONFIG").arg("GET").arg(&SETTINGS).query_async::<Settings>(connection).await;
    let mut settings = answered.unwrap_or_else(|error| {
        // Hosted services and ACLs may forbid CONFIG GET.
        debug!(%error, ?SETTINGS, "some of these settings of Redis cannot be read and are not checked");
        Settings::new()
    });
    for (name, field) in [("maxmemory-policy", "maxmemory_policy"), ("maxclients", "maxclients")] {
        if let Some(value) = info.get(field) {
            settings.entry(name.to_owned()).or_insert(value);
        }
    }
    settings
}

pub(super) fn too_old(version: &str) -> Option<String> {
    let major = version.split('.').next().and_then(|major| major.parse::<u64>().ok()).unwrap_or_default();
    (major < OLDEST_MAJOR)
        .then(|| format!("it is version {version}, and ackwheel needs Redis 7 or Valkey 7.2 or later: update it"))
}

pub(super) fn policy(settings: &Settings) -> Option<String> {
    let policy = settings.get("maxmemory-policy")?;
    let lost = if policy.starts_with("volatile-") {
        "ackwheel's have no TTL and stay, unless another program gives them one"
    } else {
        "messages in flight would be lost, and with noeviction adds are refused instead"
    };
    (policy != "noeviction").then(|| {
        format!(
            "Redis may evict keys when its memory is full (maxmemory-policy {policy}): {lost}; set \
             maxmemory-policy noeviction"
        )
    })
}

/// Returns the number of connections of a sidecar to a Redis with `rings` rings: two for each ring, one for probes, and
/// one for checks or for a majority.
pub(super) fn connections(rings: usize) -> usize {
    2 * rings + 2
}

/// Returns a warning if Redis allows fewer connections than `sidecars` or `needed` require.
pub(super) fn room(settings: &Settings, rings: usize, sidecars: usize, needed: usize) -> Option<String> {
    let most: usize = settings.get("maxclients")?.parse().ok()?;
    let of_all = sidecars * connections(rings);
    (needed.max(of_all) > most).then(|| {
        format!(
            "Redis has no room for the connections of all sidecars (maxclients {most}): they need {of_all} (rings: \
             {rings}, sidecars: {sidecars}), beside those of other programs; until there is room, they do without \
             hints, so batches come up to a second later, and a ring without a connection refuses adds; raise \
             maxclients"
        )
    })
}

pub(super) fn persistence(settings: &Settings) -> Option<&'static str> {
    let setting = |name: &str| settings.get(name).map(String::as_str).unwrap_or_default();
    match (settings.get("appendonly")?.as_str(), setting("save"), setting("appendfsync")) {
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

pub(super) fn replicas(settings: &Settings, ack_timeout: Duration) -> Option<String> {
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
        let text = policy(&settings(&[("maxmemory-policy", "volatile-lru")])).unwrap();
        assert!(!text.contains("messages in flight would be lost") && text.contains("noeviction"), "{text}");
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
}
