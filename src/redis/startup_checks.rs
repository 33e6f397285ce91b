//! What is looked at in a Redis, at the start and then regularly: its version, and settings that would lose messages.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, InfoDict, RedisResult, ServerErrorKind};
use tracing::debug;

/// The oldest major version that has what the scripts use. Valkey names a Redis version too.
const OLDEST_MAJOR: u64 = 7;

/// Looks at settings, and says what they would do to messages of this ack timeout.
type Judge = fn(&HashMap<String, String>, Duration) -> Option<String>;

/// The settings that are looked at together, and who judges them.
const JUDGED: [(&[&str], Judge); 2] =
    [(&["maxmemory-policy"], policy), (&["appendonly", "save", "appendfsync"], persistence)];

/// Those that matter where another Redis may take over.
const JUDGED_IF_REPLACED: (&[&str], Judge) = (&["min-replicas-to-write", "min-replicas-max-lag"], replicas);

/// Checks a server, in whose place another may come or not. Returns why it cannot be used, or what is merely unwise.
pub(super) async fn check(
    connection: &mut MultiplexedConnection,
    may_be_replaced: bool,
    ack_timeout: Duration,
) -> RedisResult<Result<Vec<String>, String>> {
    match redis::cmd("INFO").arg("server").query_async::<InfoDict>(connection).await {
        Ok(server) => {
            if let Some(text) = too_old(&server) {
                return Ok(Err(text));
            }
        }
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => {
            debug!(%error, "the version of Redis cannot be read and is not checked");
        }
        Err(error) => return Err(error),
    }
    let mut unwise = Vec::new();
    for (settings, judge) in JUDGED.into_iter().chain(may_be_replaced.then_some(JUDGED_IF_REPLACED)) {
        match redis::cmd("CONFIG").arg("GET").arg(settings).query_async(connection).await {
            Ok(found) => unwise.extend(judge(&found, ack_timeout)),
            // Hosted services and ACLs forbid it.
            Err(error) => debug!(%error, ?settings, "these settings of Redis cannot be read and are not checked"),
        }
    }
    Ok(Ok(unwise))
}

fn too_old(server: &InfoDict) -> Option<String> {
    let version: String = server.get("redis_version")?;
    let major = version.split('.').next().and_then(|major| major.parse::<u64>().ok()).unwrap_or_default();
    (major < OLDEST_MAJOR)
        .then(|| format!("it is version {version}, and ackwheel needs Redis 7 or Valkey 7.2 or later: update it"))
}

fn policy(settings: &HashMap<String, String>, _: Duration) -> Option<String> {
    let policy = settings.get("maxmemory-policy")?;
    (policy != "noeviction").then(|| {
        format!(
            "Redis may evict keys when its memory is full (maxmemory-policy {policy}): messages in flight would vanish; \
             set maxmemory-policy noeviction, so that adds are refused instead"
        )
    })
}

fn persistence(settings: &HashMap<String, String>, _: Duration) -> Option<String> {
    let setting = |name: &str| settings.get(name).map(String::as_str).unwrap_or_default();
    match (setting("appendonly"), setting("save"), setting("appendfsync")) {
        ("yes", _, "no") => Some(String::from(
            "Redis leaves it to the system when its append-only file reaches the disk (appendfsync no): a crash of the \
             machine loses up to half a minute; set appendfsync everysec or always",
        )),
        ("yes", _, _) => None,
        (_, "", _) => Some(String::from(
            "Redis keeps nothing on disk (appendonly no, save \"\"): a restart of Redis loses what is in flight and \
             the outbox; set appendonly yes",
        )),
        _ => Some(String::from(
            "Redis keeps snapshots only (appendonly no): a restart of Redis goes back to the last one, so that \
             acknowledged messages come back and time out; set appendonly yes",
        )),
    }
}

fn replicas(settings: &HashMap<String, String>, ack_timeout: Duration) -> Option<String> {
    let least = settings.get("min-replicas-to-write")?;
    if least == "0" {
        return Some(String::from(
            "Redis takes writes also when no replica follows it (min-replicas-to-write 0): what is added and acknowledged \
             while another takes over may be lost; set min-replicas-to-write 1, so that it is refused or held until then, \
             if there are two replicas: with one, nothing is written while that is away",
        ));
    }
    let max_lag = Duration::from_secs(settings.get("min-replicas-max-lag")?.parse().ok()?);
    if max_lag.is_zero() {
        return Some(format!(
            "min-replicas-max-lag 0 switches min-replicas-to-write {least} off: Redis takes writes also when no replica \
             follows it; set min-replicas-max-lag to less than the ack timeout of {ack_timeout:?}"
        ));
    }
    (max_lag >= ack_timeout).then(|| {
        format!(
            "a primary without its replicas takes writes for min-replicas-max-lag {max_lag:?} more, and the ack timeout is \
             {ack_timeout:?}: messages are added, acknowledged and time out in that time, and all of it may be lost when \
             another takes over; set min-replicas-max-lag to less than the ack timeout"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(15);

    fn settings(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn settings_that_lose_messages_are_named_with_their_remedy() {
        let text = policy(&settings(&[("maxmemory-policy", "allkeys-lru")]), TIMEOUT).unwrap();
        assert!(text.contains("allkeys-lru") && text.contains("noeviction"), "{text}");
        assert_eq!(policy(&settings(&[("maxmemory-policy", "noeviction")]), TIMEOUT), None);
        for (save, word) in [("", "keeps nothing"), ("3600 1", "snapshots only")] {
            let text = persistence(&settings(&[("appendonly", "no"), ("save", save)]), TIMEOUT).unwrap();
            assert!(text.contains(word) && text.contains("appendonly yes"), "{text}");
        }
        assert_eq!(persistence(&settings(&[("appendonly", "yes"), ("appendfsync", "everysec")]), TIMEOUT), None);
        let text = replicas(&settings(&[("min-replicas-to-write", "0")]), TIMEOUT).unwrap();
        assert!(text.contains("set min-replicas-to-write 1"), "{text}");
        assert_eq!(replicas(&settings(&[("min-replicas-to-write", "1")]), TIMEOUT), None);
    }

    #[test]
    fn a_lag_of_replicas_that_the_ack_timeout_does_not_outlast_is_named() {
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
