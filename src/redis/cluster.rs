//! A Redis Cluster: which of its nodes has a ring. All keys of a ring lie in one hash slot, so that a ring is on one
//! node, and its link goes there.
//!
//! A node that has lost a slot says so to whoever writes to it (MOVED), and the link looks for the new one.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::ConnectionAddr;

use super::fault::{Fault, FaultKind};
use super::nodes::{Manner, Node, answers, together};
use super::place::Found;

/// A hash slot of a Cluster.
pub(super) type Slot = u16;

const SLOTS: u16 = 16_384;

/// The slot of a key with a hash tag, the text between its first braces.
pub(super) fn slot_of(key: &str) -> Slot {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or(key, |(tag, _)| tag);
    crc16::State::<crc16::XMODEM>::calculate(tag.as_bytes()) % SLOTS
}

/// The nodes that are known.
pub(super) struct Cluster {
    /// Those that `--store` names.
    seeds: Vec<Arc<Node>>,
    /// Those that were told of when they were last asked, so that it does not matter which of the seeds live.
    learnt: Mutex<Vec<Arc<Node>>>,
    manner: Manner,
}

/// Slots from the first to the last, and who has them.
#[derive(Clone)]
struct Owned {
    first: Slot,
    last: Slot,
    by: Found,
}

/// Who has which slots, as several nodes see it.
pub(super) struct Map(Vec<Owned>);

impl Map {
    /// Where there is one Redis, it has all of them.
    pub(super) fn of(by: Found) -> Map {
        Map(vec![Owned { first: 0, last: SLOTS - 1, by }])
    }

    /// Who has a slot, by the latest that is known.
    pub(super) fn owner(&self, slot: Slot) -> Result<Found, Fault> {
        let owns = |owned: &&Owned| (owned.first..=owned.last).contains(&slot);
        let latest = self.0.iter().filter(owns).max_by_key(|owned| owned.by.config_epoch);
        latest.map(|owned| owned.by.clone()).ok_or_else(|| Fault {
            kind: FaultKind::Clustered,
            text: format!("no node of the Cluster has slot {slot}"),
        })
    }
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Node>, manner: Manner) -> Cluster {
        Cluster { seeds: seeds.into_iter().map(Arc::new).collect(), learnt: Mutex::default(), manner }
    }

    /// Asks all nodes who has which slots.
    pub(super) async fn look(&self) -> Result<Map, Fault> {
        let learnt = self.learnt.lock().clone();
        let known: Vec<&Arc<Node>> = self.seeds.iter().chain(&learnt).collect();
        let told = answers(known.iter().map(|node| self.ask(node))).await;
        let told = told.map_err(|faults| together(&faults, "no node of the Cluster answers"))?;
        self.learn(told.iter().flatten().map(|owned| &owned.by));
        Ok(Map(told.into_iter().flatten().collect()))
    }

    async fn ask(&self, node: &Node) -> Result<Vec<Owned>, Fault> {
        let told = node.ask::<String>(redis::cmd("CLUSTER").arg("NODES")).await.map_err(|error| {
            let Fault { kind, text } = Fault::from(error);
            Fault { kind, text: format!("{node}: {text}") }
        })?;
        Ok(told.lines().filter_map(|line| self.owned(line, node.address())).flatten().collect())
    }

    /// What a line of CLUSTER NODES says that a node owns: nothing, where it is a replica, or failed.
    ///
    /// `id host:port@bus[,name] flags primary ping pong config-epoch link slot…`
    fn owned(&self, line: &str, asked: &ConnectionAddr) -> Option<Vec<Owned>> {
        let words: Vec<&str> = line.split(' ').collect();
        let [id, address, flags, _, _, _, config_epoch, _, slots @ ..] = words.as_slice() else { return None };
        let is = |flag: &str| flags.split(',').any(|one| one == flag);
        if !is("master") || is("fail") || is("noaddr") {
            return None;
        }
        let (address, name) = address.split_once(',').unwrap_or((address, ""));
        let (host, port) = address.split('@').next()?.rsplit_once(':')?;
        let host = match (name.split(',').next(), host, asked) {
            (Some(name), ..) if !name.is_empty() => name,
            // A node that nobody has met yet does not know how it is called.
            (_, "", ConnectionAddr::Tcp(asked, _) | ConnectionAddr::TcpTls { host: asked, .. }) => asked,
            (_, host, _) => host,
        };
        let client = self.manner.at(host, port.parse().ok()?).ok()?;
        let by = Found { client, config_epoch: config_epoch.parse().ok()?, node: Some((*id).to_owned()) };
        let owned = slots.iter().filter_map(|range| {
            // What begins with a bracket is on its way to or from another node.
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(Owned { first: first.parse().ok()?, last: last.parse().ok()?, by: by.clone() })
        });
        Some(owned.collect())
    }

    /// Keeps the nodes of which one has heard, with the connections to those that were known before.
    fn learn<'a>(&self, told: impl Iterator<Item = &'a Found>) {
        let mut learnt = self.learnt.lock();
        let mut before: HashMap<String, Arc<Node>> =
            learnt.drain(..).map(|node| (node.to_string(), node)).collect();
        let seeds: Vec<String> = self.seeds.iter().map(ToString::to_string).collect();
        let mut told: Vec<(String, &Found)> = told.map(|found| (found.to_string(), found)).collect();
        told.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        told.dedup_by(|(one, _), (other, _)| one == other);
        told.retain(|(address, _)| !seeds.contains(address));
        let node = |found: &Found| Arc::new(Node::new(found.client.clone()));
        learnt.extend(
            told.into_iter().map(|(address, found)| before.remove(&address).unwrap_or_else(|| node(found))),
        );
    }
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    fn cluster() -> Cluster {
        let info = "redis://me:secret@unknown/".into_connection_info().unwrap();
        Cluster::new(Vec::new(), Manner(info))
    }

    /// Who has a slot by these lines, and since which epoch.
    fn owner(lines: &[&str], slot: Slot) -> Option<(String, u64)> {
        let (cluster, asked) = (cluster(), ConnectionAddr::Tcp("asked".to_owned(), 7_000));
        let owned = lines.iter().filter_map(|line| cluster.owned(line, &asked)).flatten().collect();
        Map(owned).owner(slot).ok().map(|found| (found.to_string(), found.config_epoch))
    }

    #[test]
    fn slots_are_those_that_redis_computes() {
        // CLUSTER KEYSLOT says the same.
        assert_eq!(slot_of("123456789"), 0x31c3);
        assert_eq!(slot_of("{user1000}.following"), slot_of("user1000"));
        assert_eq!(slot_of("{ackwheel:0}:meta"), slot_of("{ackwheel:0}:tick:7"));
    }

    #[test]
    fn a_slot_belongs_to_the_primary_that_says_so_since_the_latest_epoch() {
        let primary = "a 10.0.0.1:7001@17001 myself,master - 0 0 3 connected 0-5460 5462 [5461->-b]";
        assert_eq!(owner(&[primary], 5_460), Some(("10.0.0.1:7001".to_owned(), 3)));
        assert_eq!(owner(&[primary], 5_462), Some(("10.0.0.1:7001".to_owned(), 3)));
        assert_eq!(owner(&[primary], 5_461), None, "it is only on its way");
        let later = "b 10.0.0.2:7002@17002,b.example master - 0 0 4 connected 0-5461";
        for lines in [[primary, later], [later, primary]] {
            assert_eq!(owner(&lines, 7), Some(("b.example:7002".to_owned(), 4)), "by its name, where it has one");
        }
        let unmet = "c :7003@17003 myself,master - 0 0 0 connected 0-16383";
        assert_eq!(owner(&[unmet], 16_383), Some(("asked:7003".to_owned(), 0)));
        let sixth = "d fd00::1:7004@17004 master - 0 0 9 connected 1";
        assert_eq!(owner(&[sixth], 1), Some(("fd00::1:7004".to_owned(), 9)));
        for none in [
            "e 10.0.0.5:7005@17005 slave a 0 0 9 connected",
            "f 10.0.0.6:7006@17006 master,fail - 0 0 9 disconnected 0-16383",
            "g :0@0 master,noaddr - 0 0 9 disconnected 0-16383",
            "vars currentEpoch 6 lastVoteEpoch 0",
            "",
        ] {
            assert_eq!(owner(&[none], 1), None, "{none}");
        }
    }

    #[test]
    fn nodes_that_were_told_of_are_asked_too_and_kept_while_they_are_told_of() {
        let cluster = cluster();
        let found = |port| {
            let client = cluster.manner.at("10.0.0.1", port).unwrap();
            Found { client, config_epoch: 1, node: None }
        };
        let known = || cluster.learnt.lock().iter().map(ToString::to_string).collect::<Vec<String>>();
        cluster.learn([found(1), found(2), found(1)].iter());
        assert_eq!(known(), ["10.0.0.1:1", "10.0.0.1:2"]);
        let kept = Arc::clone(&cluster.learnt.lock()[1]);
        cluster.learn([found(3), found(2)].iter());
        assert_eq!(known(), ["10.0.0.1:2", "10.0.0.1:3"]);
        assert!(Arc::ptr_eq(&kept, &cluster.learnt.lock()[0]), "with its connection");
    }
}
