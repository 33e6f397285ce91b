//! A Redis Cluster: which of its nodes has a ring. All keys of a ring lie in one hash slot, so that a ring is on one
//! node, and its link goes there.
//!
//! A node that has lost a slot says so to whoever writes to it (MOVED), and the link looks for the new one.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::ConnectionAddr;

use super::fault::{Fault, FaultKind};
use super::nodes::{Found, Manner, Node, answers, together};

/// A hash slot of a Cluster.
pub(super) type Slot = u16;

const SLOTS: u16 = 16_384;

/// The slot of all keys with this hash tag, the text in braces.
pub(super) fn slot_of(tag: &str) -> Slot {
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

/// What was told of a node.
struct Told {
    node: Found,
    /// What it has; nothing, where it is a replica, or failed.
    slots: Vec<RangeInclusive<Slot>>,
}

/// Who has which slots, as several nodes see it.
pub(super) struct Map(Vec<Told>);

impl Map {
    /// Where there is one Redis, it has all of them.
    pub(super) fn of(node: Found) -> Map {
        Map(vec![Told { node, slots: vec![0..=SLOTS - 1] }])
    }

    /// Who has a slot, by the latest that is known.
    pub(super) fn owner(&self, slot: Slot) -> Result<Found, Fault> {
        let owners = self.0.iter().filter(|told| told.slots.iter().any(|slots| slots.contains(&slot)));
        let latest = owners.max_by_key(|told| told.node.config_epoch);
        latest.map(|told| told.node.clone()).ok_or_else(|| Fault {
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
        let told = answers(self.seeds.iter().chain(&learnt).map(|node| self.ask(node))).await;
        let told = told.map_err(|faults| together(&faults, "no node of the Cluster answers"))?;
        let map = Map(told.into_iter().flatten().collect());
        self.learn(&map);
        Ok(map)
    }

    async fn ask(&self, node: &Node) -> Result<Vec<Told>, Fault> {
        let answered = node.ask::<String>(redis::cmd("CLUSTER").arg("NODES")).await.map_err(|error| {
            let Fault { kind, text } = Fault::from(error);
            Fault { kind, text: format!("{node}: {text}") }
        })?;
        Ok(answered.lines().filter_map(|line| self.told(line, node.address())).collect())
    }

    /// What a line of CLUSTER NODES tells of a node, if that has an address.
    ///
    /// `id host:port@bus[,name] flags primary ping pong config-epoch link slot…`
    fn told(&self, line: &str, asked: &ConnectionAddr) -> Option<Told> {
        let words: Vec<&str> = line.split(' ').collect();
        let [id, address, flags, _, _, _, config_epoch, _, slots @ ..] = words.as_slice() else { return None };
        let is = |flag: &str| flags.split(',').any(|one| one == flag);
        if is("noaddr") {
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
        let node = Found { client, config_epoch: config_epoch.parse().ok()?, node: Some((*id).to_owned()) };
        let slots = slots.iter().filter_map(|range| {
            // What begins with a bracket is on its way to or from another node.
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        });
        Some(Told { node, slots: if is("master") && !is("fail") { slots.collect() } else { Vec::new() } })
    }

    /// Keeps the nodes that it was told of, with the connections to those that were known before.
    fn learn(&self, map: &Map) {
        let mut learnt = self.learnt.lock();
        let known: BTreeMap<String, Arc<Node>> =
            self.seeds.iter().chain(&*learnt).map(|node| (node.to_string(), Arc::clone(node))).collect();
        let told: BTreeMap<String, &Found> =
            map.0.iter().map(|told| (told.node.to_string(), &told.node)).collect();
        let node = |(address, found): (String, &Found)| {
            known.get(&address).cloned().unwrap_or_else(|| Arc::new(Node::new(found.client.clone())))
        };
        let is_no_seed = |node: &Arc<Node>| !self.seeds.iter().any(|seed| Arc::ptr_eq(seed, node));
        *learnt = told.into_iter().map(node).filter(is_no_seed).collect();
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
        let told = lines.iter().filter_map(|line| cluster.told(line, &asked)).collect();
        Map(told).owner(slot).ok().map(|found| (found.to_string(), found.config_epoch))
    }

    #[test]
    fn slots_are_those_that_redis_computes() {
        // CLUSTER KEYSLOT says the same.
        assert_eq!(slot_of("123456789"), 0x31c3);
        assert_eq!(slot_of("ackwheel:0"), 2_112);
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
    fn all_nodes_that_were_told_of_are_asked_too_and_kept_while_they_are() {
        let info = "redis://10.0.0.1:1/".into_connection_info().unwrap();
        let seed = Node::new(redis::Client::open(info.clone()).unwrap());
        let (cluster, asked) =
            (Cluster::new(vec![seed], Manner(info)), ConnectionAddr::Tcp("asked".to_owned(), 1));
        let learn = |lines: &[&str]| {
            let told = |line: &&str| cluster.told(&format!("id 10.0.0.1:{line}"), &asked);
            cluster.learn(&Map(lines.iter().filter_map(told).collect()));
            cluster.learnt.lock().iter().map(ToString::to_string).collect::<Vec<String>>()
        };
        let [replica, failed] = ["2@9 slave a 0 0 1 connected", "3@9 master,fail - 0 0 1 disconnected 1"];
        assert_eq!(
            learn(&[failed, replica, "1@9 master - 0 0 1 connected", replica]),
            ["10.0.0.1:2", "10.0.0.1:3"]
        );
        let kept = Arc::clone(&cluster.learnt.lock()[0]);
        assert_eq!(learn(&["4@9 master - 0 0 1 connected", replica]), ["10.0.0.1:2", "10.0.0.1:4"]);
        assert!(Arc::ptr_eq(&kept, &cluster.learnt.lock()[0]), "with its connection");
    }
}
