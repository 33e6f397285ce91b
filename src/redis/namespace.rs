//! Deletes a namespace from Redis: all keys of all its rings.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use crate::clock::Clock;
use crate::core::MAX_RINGS;
use crate::redis::connection::errors::Fault;
use crate::redis::options::CHECK_TIMEOUT;
use crate::redis::topology::cluster::slot_of;
use crate::redis::topology::dial::RedisConnection;
use crate::redis::{CredentialFiles, StoreUrl, Topology};

/// The pause between two looks at the heartbeats.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How often the heartbeats are looked at: for 5 s. A sidecar sends one every second. So a sidecar without any in this
/// time is dead, or cannot reach Redis.
const LOOKS: u32 = 10;

/// The number of keys that Redis looks at in one step of a scan.
const SCANNED_AT_ONCE: usize = 1_000;

/// The maximum number of keys that are removed in one command.
const REMOVED_AT_ONCE: usize = 100;

/// The reason why a namespace was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The URL is not valid.
    #[error("{0}; write it as docs/REDIS.md says")]
    Address(String),
    /// Redis cannot be reached, or refuses a command.
    #[error("{0}; the user in --store needs HGETALL, SCAN and UNLINK on all keys of the namespace")]
    Redis(String),
    /// Sidecars of the namespace run.
    #[error("sidecars of the namespace run: {0}; stop them first (SIGTERM)")]
    InUse(String),
}

impl From<redis::RedisError> for NamespaceError {
    fn from(error: redis::RedisError) -> NamespaceError {
        Fault::from(error).into()
    }
}

impl From<Fault> for NamespaceError {
    fn from(fault: Fault) -> NamespaceError {
        NamespaceError::Redis(fault.text)
    }
}

/// A Redis server, and the rings whose keys it has.
struct Server {
    connection: RedisConnection,
    rings: Vec<u16>,
}

/// For each sidecar, its heartbeats and groups in all rings, as one text. The text changes while the sidecar runs.
type Heartbeats = BTreeMap<String, String>;

/// A namespace in Redis, without a running sidecar.
pub struct UnusedNamespace {
    servers: Vec<Server>,
    name: String,
}

impl UnusedNamespace {
    /// Connects to Redis and observes the heartbeats of the sidecars of the namespace `name`, for a few seconds.
    ///
    /// # Errors
    ///
    /// Returns an error if a sidecar of the namespace runs, or if Redis cannot be reached.
    pub async fn open(
        url: &StoreUrl,
        files: &CredentialFiles,
        name: &str,
    ) -> Result<UnusedNamespace, NamespaceError> {
        let topology = Topology::with_files(url, files).map_err(NamespaceError::Address)?;
        let slots: Vec<_> = (0..MAX_RINGS).map(|ring| slot_of(&format!("{name}:{ring}"))).collect();
        let mut servers = BTreeMap::new();
        for (ring, found) in (0..).zip(topology.find_all(&slots, &Clock::start()).await?) {
            servers.entry(found.to_string()).or_insert_with(|| (found, Vec::new())).1.push(ring);
        }
        let mut namespace = UnusedNamespace { servers: Vec::new(), name: name.to_owned() };
        for (found, rings) in servers.into_values() {
            let connection = found.connect("namespace", Some(CHECK_TIMEOUT)).await?;
            namespace.servers.push(Server { connection, rings });
        }
        namespace.refuse_if_used().await?;
        Ok(namespace)
    }

    async fn refuse_if_used(&mut self) -> Result<(), NamespaceError> {
        let first = self.heartbeats().await?;
        let looks = if first.is_empty() { 0 } else { LOOKS };
        for _ in 0..looks {
            tokio::time::sleep(LOOK_EVERY).await;
            let changed = |(sidecar, number): &(String, String)| first.get(sidecar) != Some(number);
            let alive: Vec<String> = self.heartbeats().await?.into_iter().filter(changed).map(name_of).collect();
            if !alive.is_empty() {
                return Err(NamespaceError::InUse(alive.join(", ")));
            }
        }
        Ok(())
    }

    async fn heartbeats(&mut self) -> Result<Heartbeats, NamespaceError> {
        let mut all = Heartbeats::new();
        for Server { connection, rings } in &mut self.servers {
            for ring in rings {
                let key = format!("{{{}:{ring}}}:sidecars", self.name);
                let of_ring: Heartbeats = redis::cmd("HGETALL").arg(key).query_async(connection).await?;
                // A sidecar sends heartbeats to all rings. One of them that goes on is enough.
                for (sidecar, number) in of_ring {
                    let _ = write!(all.entry(sidecar).or_default(), "{ring}: {number}; ");
                }
            }
        }
        Ok(all)
    }

    /// Returns the number of keys of the namespace.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis does not answer.
    pub async fn keys(&mut self) -> Result<u64, NamespaceError> {
        let mut count = 0;
        for server in &mut self.servers {
            count += server.keys(&self.name).await?.values().map(|keys| keys.len() as u64).sum::<u64>();
        }
        Ok(count)
    }

    /// Removes all keys of the namespace in small steps. Returns their number.
    ///
    /// # Errors
    ///
    /// Returns an error if Redis does not answer. Some keys may then be removed, and another call removes the others.
    pub async fn delete(mut self) -> Result<u64, NamespaceError> {
        let mut removed = 0;
        for server in &mut self.servers {
            // In a Cluster, all keys of a command must have the same hash tag.
            for keys in server.keys(&self.name).await?.into_values() {
                let keys: Vec<String> = keys.into_iter().collect();
                for some in keys.chunks(REMOVED_AT_ONCE) {
                    removed += redis::cmd("UNLINK").arg(some).query_async::<u64>(&mut server.connection).await?;
                }
            }
        }
        Ok(removed)
    }
}

impl Server {
    /// Returns the keys of the namespace on this server, by ring.
    async fn keys(&mut self, namespace: &str) -> Result<BTreeMap<u16, BTreeSet<String>>, NamespaceError> {
        let (mut keys, mut cursor) = (BTreeMap::<u16, BTreeSet<String>>::new(), String::from("0"));
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(&cursor).arg("MATCH").arg(format!("{{{namespace}:*}}:*")).arg("COUNT").arg(SCANNED_AT_ONCE);
            let (next, found): (String, Vec<String>) = scan.query_async(&mut self.connection).await?;
            for key in found {
                if let Some(ring) = ring_of(&key, namespace) {
                    keys.entry(ring).or_default().insert(key);
                }
            }
            if next == "0" {
                return Ok(keys);
            }
            cursor = next;
        }
    }
}

/// Returns the ring of a key, or `None` if the key does not belong to the namespace.
fn ring_of(key: &str, namespace: &str) -> Option<u16> {
    let (ring, _) = key.strip_prefix('{')?.strip_prefix(namespace)?.strip_prefix(':')?.split_once("}:")?;
    ring.parse().ok().filter(|ring| *ring < MAX_RINGS)
}

/// Returns the name of a sidecar without the random digits that make it unique in Redis.
fn name_of((sidecar, _): (String, String)) -> String {
    sidecar.rsplit_once('-').map_or_else(|| sidecar.clone(), |(name, _)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keys_of_the_namespace_have_a_ring() {
        for (key, ring) in [
            ("{im:0}:meta", Some(0)),
            ("{im:63}:link:a}:b", Some(63)),
            ("{im:64}:meta", None),
            ("{im2:0}:meta", None),
            ("{im:0:1}:meta", None),
            ("{im:x}:meta", None),
            ("im:0}:meta", None),
            ("{im:0}", None),
        ] {
            assert_eq!(ring_of(key, "im"), ring, "{key}");
        }
        assert_eq!(name_of((String::from("node-1:7415-00ff"), String::new())), "node-1:7415");
    }
}
