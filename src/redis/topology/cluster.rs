//! Asks a node of a Redis Cluster which node has which slots.
//!
//! All keys of a ring are in one hash slot, so a ring is on one node. The link of the ring is the connection to that
//! node. If the slot moves, the old node answers a write with MOVED, and the link searches for the new node.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use redis::{ConnectionAddr, FromRedisValue, RedisError, RedisResult, Value};

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::topology::endpoint::Endpoint;
use crate::redis::topology::majority::{LONGEST, MAX_NODES, NodeEntry, SLOTS, Slot, View};
use crate::redis::topology::nodes::{Found, Node};

/// The name of the Cluster setting that contains the failover timer.
const NODE_TIMEOUT: &str = "cluster-node-timeout";

/// The maximum length of the answer to CLUSTER NODES in bytes. The line of each node has about 150 bytes, and each range
/// of slots at most 12 more.
const MAX_ANSWER: usize = 1024 * 1024;

/// Returns the slot of all keys with this hash tag, the text in braces.
pub(crate) fn slot_of(tag: &str) -> Slot {
    crc16::State::<crc16::XMODEM>::calculate(tag.as_bytes()) % SLOTS
}

/// Asks a node of a Cluster for its view: all nodes that it knows, their slots, and whether they answer. `template` has
/// the settings for connections to these nodes. `asked_at` is the current time.
pub(crate) async fn ask(template: &Endpoint, node: &Node, asked_at: Instant) -> Result<View, Fault> {
    let mut commands = redis::pipe();
    commands.cmd("CLUSTER").arg("NODES").cmd("CONFIG").arg("GET").arg(NODE_TIMEOUT).ignore_errors();
    let of_node = |error: RedisError| Fault::from(error).at(node.address());
    let mut answers = node.ask(&commands).await.map_err(of_node)?.into_iter();
    let mut answer = || answers.next().expect("each command has an answer");
    let lines = answer().and_then(|value| Ok(String::from_redis_value(value)?)).map_err(of_node)?;
    let entries = parse(template, &lines, node.address())
        .map_err(|why| Fault::new(FaultKind::Other, why).at(node.address()))?;
    let itself = entries.iter().find(|entry| entry.is_itself);
    Ok(View {
        address: node.address().to_string(),
        id: itself.and_then(|entry| entry.redis.node.clone()).unwrap_or_else(|| node.id.lock().clone()),
        asked_at,
        votes: itself.is_some_and(|entry| entry.votes),
        voters: entries.iter().filter(|entry| entry.votes).count(),
        good_for: node_timeout(answer()).map_or(LONGEST, |timeout| timeout.min(LONGEST)),
        // Replicas and other nodes without slots have no vote, so they are not asked.
        knows: entries.iter().filter(|entry| entry.votes).map(|entry| entry.redis.endpoint.clone()).collect(),
        entries,
    })
}

/// Parses the answer to CLUSTER NODES. Returns an error if it is too long: the password is sent to each primary that it
/// names.
fn parse(template: &Endpoint, lines: &str, asked: &ConnectionAddr) -> Result<Vec<NodeEntry>, String> {
    if lines.len() > MAX_ANSWER {
        return Err(format!("reports its Cluster in more than {MAX_ANSWER} bytes, so its answer is refused"));
    }
    if lines.lines().nth(MAX_NODES).is_some() {
        return Err(format!("reports more than {MAX_NODES} nodes of its Cluster, so its answer is refused"));
    }
    Ok(lines.lines().filter_map(|line| parse_line(template, line, asked)).collect())
}

/// Parses a line of CLUSTER NODES, which describes one node. `asked` is the address of the node that sent the line.
/// Returns `None` if the line has another format, or if the described node has no address. The format is:
///
/// `id host:port@bus[,name] flags primary ping pong config-epoch link slot…`
fn parse_line(template: &Endpoint, line: &str, asked: &ConnectionAddr) -> Option<NodeEntry> {
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
        // A node that has met no other node does not know its own address. Then the address at which the node was asked
        // is used.
        (_, "", ConnectionAddr::Tcp(asked, _) | ConnectionAddr::TcpTls { host: asked, .. }) => asked,
        (_, host, _) => host,
    };
    let endpoint = template.at(host, port.parse().ok()?);
    let redis = Found { endpoint, config_epoch: config_epoch.parse().ok()?, node: Some((*id).to_owned()) };
    let slots = slots.iter().filter_map(|range| {
        // A slot in brackets is moving to or from another node. Its number does not parse, so it is left out.
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    let slots: Vec<_> = slots.collect();
    Some(NodeEntry {
        redis,
        votes: is("master") && !slots.is_empty(),
        is_itself: is("myself"),
        is_doubted: is("fail?"),
        slots: if is("master") && !is("fail") { slots } else { Vec::new() },
    })
}

/// Reads the failover timer from the answer to CONFIG GET. The Cluster may replace a primary that has not answered for
/// this time. Returns `None` if the node refuses CONFIG GET, as hosted services do.
fn node_timeout(answer: RedisResult<Value>) -> Option<Duration> {
    let settings: HashMap<String, String> = FromRedisValue::from_redis_value(answer.ok()?).ok()?;
    settings.get(NODE_TIMEOUT)?.parse().ok().map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;
    use crate::redis::topology::majority;

    fn parsed(lines: &[&str]) -> Vec<NodeEntry> {
        let template = Endpoint::new("redis://me:secret@unknown/".into_connection_info().unwrap());
        let asked = ConnectionAddr::Tcp("asked".to_owned(), 7_000);
        parse(&template, &lines.join("\n"), &asked).unwrap()
    }

    #[test]
    fn an_answer_with_too_many_nodes_or_bytes_is_refused() {
        let template = Endpoint::new("redis://me:secret@unknown/".into_connection_info().unwrap());
        let asked = ConnectionAddr::Tcp("asked".to_owned(), 7_000);
        let line = |port| format!("n{port} 10.0.0.1:{port}@1 master - 0 0 3 connected {port}\n");
        let lines: String = (1..=1_000).map(line).collect();
        assert_eq!(parse(&template, &lines, &asked).unwrap().len(), 1_000);
        let error = parse(&template, &(lines + &line(1_001)), &asked).err().unwrap();
        assert!(error.contains("more than 1000 nodes"), "{error}");
        let long = line(1).replace(" 1\n", &" 1".repeat(MAX_ANSWER / 2));
        assert!(parse(&template, &long, &asked).err().unwrap().contains("more than 1048576 bytes"));
    }

    /// Returns the address of the node that has a slot according to `lines`, and the config epoch of that node.
    fn owner(lines: &[&str], slot: Slot) -> Option<(String, u64)> {
        majority::owner(&parsed(lines), slot).map(|entry| (entry.redis.to_string(), entry.redis.config_epoch))
    }

    #[test]
    fn slots_are_those_that_redis_computes() {
        // The command CLUSTER KEYSLOT returns the same numbers.
        assert_eq!(slot_of("123456789"), 0x31c3);
        assert_eq!(slot_of("ackwheel:0"), 2_112);
    }

    #[test]
    fn a_slot_belongs_to_the_primary_that_says_so_since_the_latest_epoch() {
        let primary = "a 10.0.0.1:7001@17001 myself,master - 0 0 3 connected 0-5460 5462 [5461->-b]";
        assert_eq!(owner(&[primary], 5_460), Some(("10.0.0.1:7001".to_owned(), 3)));
        assert_eq!(owner(&[primary], 5_462), Some(("10.0.0.1:7001".to_owned(), 3)));
        assert_eq!(owner(&[primary], 5_461), None, "the slot is still moving");
        let later = "b 10.0.0.2:7002@17002,b.example master - 0 0 4 connected 0-5461";
        for lines in [[primary, later], [later, primary]] {
            assert_eq!(owner(&lines, 7), Some(("b.example:7002".to_owned(), 4)), "by the host name of the node");
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
        let entries = parsed(&lines);
        let votes: Vec<bool> = entries.iter().map(|entry| entry.votes).collect();
        assert_eq!(votes, [true, true, true, false, false]);
        let confirms = |slot| majority::owner(&entries, slot).is_some_and(|entry| entry.confirms(&entry.redis));
        assert_eq!([50, 150, 250].map(confirms), [true, false, false]);
        let since = |config_epoch| Found { config_epoch, ..entries[0].redis.clone() };
        let entry = majority::owner(&entries, 50).unwrap();
        assert!(
            entry.confirms(&since(2)) && !entry.confirms(&since(4)),
            "the node does not know the last failover"
        );
    }
}
