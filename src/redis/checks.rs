//! What is looked at before a store in Redis is opened: its version, and settings that would lose messages.

use std::collections::HashMap;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, InfoDict, RedisResult, ServerErrorKind};
use tracing::debug;

/// The oldest major version that has what the scripts use. Valkey names a Redis version too.
const OLDEST_MAJOR: u64 = 7;

/// Looks at settings, and says what they would do.
type Judge = fn(&HashMap<String, String>) -> Option<String>;

/// The settings that are looked at together, and who judges them.
const JUDGED: [(&[&str], Judge); 2] =
    [(&["maxmemory-policy"], policy), (&["appendonly", "save", "appendfsync"], persistence)];

/// Those that matter where another Redis may take over.
const JUDGED_IF_REPLACED: (&[&str], Judge) = (&["min-replicas-to-write"], replicas);

/// Checks a server, in whose place another may come or not. Returns why it cannot be used, or what is merely unwise.
pub(super) async fn check(
    connection: &mut MultiplexedConnection,
    may_be_replaced: bool,
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
            Ok(found) => unwise.extend(judge(&found)),
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

fn policy(settings: &HashMap<String, String>) -> Option<String> {
    let policy = settings.get("maxmemory-policy")?;
    (policy != "noeviction").then(|| {
        format!(
            "Redis may evict keys when its memory is full (maxmemory-policy {policy}): messages in flight would vanish; \
             set maxmemory-policy noeviction, so that adds are refused instead"
        )
    })
}

fn persistence(settings: &HashMap<String, String>) -> Option<String> {
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

fn replicas(settings: &HashMap<String, String>) -> Option<String> {
    let least = settings.get("min-replicas-to-write")?;
    (least == "0").then(|| {
        String::from(
            "Redis takes writes also when no replica follows it (min-replicas-to-write 0): what is added and acknowledged \
             while another takes over may be lost; set min-replicas-to-write 1, so that it is refused or held until then, \
             if there are two replicas: with one, nothing is written while that is away",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> HashMap<String, String> {
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
        let text = replicas(&settings(&[("min-replicas-to-write", "0")])).unwrap();
        assert!(text.contains("set min-replicas-to-write 1"), "{text}");
        assert_eq!(replicas(&settings(&[("min-replicas-to-write", "1")])), None);
    }
}
