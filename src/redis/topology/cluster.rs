//! A Redis Cluster: which of its nodes has a ring. All keys of a ring lie in one hash slot, so that a ring is on one
//! node, and its link goes there.
//!
//! A node that has lost a slot says so to whoever writes to it (MOVED), and the link looks for the new one.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use redis::{ConnectionAddr, FromRedisValue, RedisResult, Value};

use crate::redis::connection::errors::Fault;
use crate::redis::topology::majority::{LONGEST, View};
use crate::redis::topology::nodes::{Found, Manner, Node, Nodes};

/// A hash slot of a Cluster.
pub(crate) type Slot = u16;

const SLOTS: u16 = 16_384;

const NODE_TIMEOUT: &str = "cluster-node-timeout";

/// The slot of all keys with this hash tag, the text in braces.
pub(crate) fn slot_of(tag: &str) -> Slot {
    crc16::State::<crc16::XMODEM>::calculate(tag.as_bytes()) % SLOTS
}

/// The nodes, and what they are asked.
pub(crate) struct Cluster {
    pub(crate) nodes: Nodes,
    pub(crate) manner: Manner,
}

/// What was told of a node.
#[derive(Clone)]
pub(crate) struct Told {
    pub(crate) node: Found,
    /// What it has; nothing, where it is a replica, or failed.
    slots: Vec<RangeInclusive<Slot>>,
    /// Whether it has a vote.
    votes: bool,
    /// Whether it tells this of itself.
    is_itself: bool,
    /// Whether it is not heard, and so may be replaced soon.
    is_doubted: bool,
}

impl Told {
    /// Whether this says that a Redis has not been replaced, by a node that has heard of all that was known when it was
    /// found.
    pub(crate) fn confirms(&self, found: &Found) -> bool {
        !self.is_doubted && self.node.is(found) && self.node.config_epoch >= found.config_epoch
    }
}

/// Who has which slots, as one node sees it.
#[derive(Clone)]
pub(crate) struct Map(Vec<Told>);

impl Map {
    /// Where there is one Redis, it has all of them.
    pub(crate) fn of(node: Found, is_doubted: bool) -> Map {
        Map(vec![Told { node, slots: vec![0..=SLOTS - 1], votes: true, is_itself: true, is_doubted }])
    }

    /// Who has a slot.
    pub(crate) fn owner(&self, slot: Slot) -> Option<&Told> {
        let owners = self.0.iter().filter(|told| told.slots.iter().any(|slots| slots.contains(&slot)));
        owners.max_by_key(|told| told.node.config_epoch)
    }
}

impl Cluster {
    /// What a node says, and what that calls itself.
    pub(crate) async fn ask(&self, node: &Node, asked_at: Instant) -> Result<(String, View), Fault> {
        let mut commands = redis::pipe();
        commands.cmd("CLUSTER").arg("NODES").cmd("CONFIG").arg("GET").arg(NODE_TIMEOUT).ignore_errors();
        let named = |error| {
            let Fault { kind, text } = Fault::from(error);
            Fault { kind, text: format!("{node}: {text}") }
        };
        let mut answers = node.ask(&commands).await.map_err(named)?.into_iter();
        let mut answer = || answers.next().expect("each command has an answer");
        let lines = answer().and_then(|value| Ok(String::from_redis_value(value)?)).map_err(named)?;
        let told: Vec<Told> = lines.lines().filter_map(|line| self.told(line, node.address())).collect();
        let itself = told.iter().find(|told| told.is_itself);
        let id = itself.and_then(|told| told.node.node.clone()).unwrap_or_else(|| node.name());
        let view = View {
            asked_at,
            votes: itself.is_some_and(|told| told.votes),
            voters: told.iter().filter(|told| told.votes).count(),
            good_for: node_timeout(answer()).map_or(LONGEST, |timeout| timeout.min(LONGEST)),
            knows: told.iter().map(|told| (told.node.to_string(), told.node.client.clone())).collect(),
            map: Map(told),
        };
        Ok((id, view))
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
        let slots: Vec<RangeInclusive<Slot>> = slots.collect();
        Some(Told {
            node,
            votes: is("master") && !slots.is_empty(),
            is_itself: is("myself"),
            is_doubted: is("fail?"),
            slots: if is("master") && !is("fail") { slots } else { Vec::new() },
        })
    }
}

/// The failover timer of a node; none where it is not told, as hosted services do.
fn node_timeout(answer: RedisResult<Value>) -> Option<Duration> {
    let settings: HashMap<String, String> = FromRedisValue::from_redis_value(answer.ok()?).ok()?;
    settings.get(NODE_TIMEOUT)?.parse().ok().map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    fn cluster() -> Cluster {
        let info = "redis://me:secret@unknown/".into_connection_info().unwrap();
        Cluster { nodes: Nodes::new(Vec::new()), manner: Manner(info) }
    }

    /// What these lines say.
    fn map(lines: &[&str]) -> Map {
        let (cluster, asked) = (cluster(), ConnectionAddr::Tcp("asked".to_owned(), 7_000));
        Map(lines.iter().filter_map(|line| cluster.told(line, &asked)).collect())
    }

    /// Who has a slot by these lines, and since which epoch.
    fn owner(lines: &[&str], slot: Slot) -> Option<(String, u64)> {
        map(lines).owner(slot).map(|told| (told.node.to_string(), told.node.config_epoch))
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
    fn primaries_with_slots_have_a_vote_and_one_that_is_not_heard_is_not_confirmed() {
        let lines = [
            "a 10.0.0.1:1@2 myself,master - 0 0 3 connected 0-99",
            "b 10.0.0.2:1@2 master,fail? - 0 0 4 connected 100-199",
            "c 10.0.0.3:1@2 master,fail - 0 0 5 connected 200-299",
            "d 10.0.0.4:1@2 master - 0 0 6 connected",
            "e 10.0.0.5:1@2 slave a 0 0 3 connected",
        ];
        let map = map(&lines);
        let votes: Vec<bool> = map.0.iter().map(|told| told.votes).collect();
        assert_eq!(votes, [true, true, true, false, false]);
        let confirms = |slot| map.owner(slot).is_some_and(|told| told.confirms(&told.node));
        assert_eq!([50, 150, 250].map(confirms), [true, false, false]);
        let since = |config_epoch| Found { config_epoch, ..map.0[0].node.clone() };
        let told = map.owner(50).unwrap();
        assert!(told.confirms(&since(2)) && !told.confirms(&since(4)), "it has not heard of the last failover");
    }
}
