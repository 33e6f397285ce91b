//! Finds Redis: at one address, at the address that its Sentinels name, or on a node of a Cluster.

pub(crate) mod cluster;
pub(crate) mod dial;
pub(crate) mod endpoint;
mod lookup;
pub(crate) mod majority;
pub(crate) mod nodes;
pub(crate) mod sentinel;
pub(crate) mod store_url;
pub(crate) mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch::Sender;

use crate::clock::Clock;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::topology::dial::RedisConnection;
use crate::redis::topology::endpoint::Endpoint;
use crate::redis::topology::majority::{Slot, View, Views};
use crate::redis::topology::nodes::{Found, Node, answers};

/// How Redis is deployed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopologyKind {
    /// One Redis at a fixed address.
    Standalone,
    /// A primary that Sentinels name.
    Sentinel,
    /// The nodes of a Cluster.
    Cluster,
}

/// The address of Redis in `--store`, and the latest *view* of each Sentinel or Cluster node. A view is the answer of
/// such a node to the question which Redis is the primary.
pub struct Topology {
    /// How Redis is deployed.
    pub kind: TopologyKind,
    /// The connection settings of Redis, such as user and password. The host is a placeholder unless Redis has a fixed
    /// address.
    template: Endpoint,
    /// The connection settings of a Sentinel whose address another Sentinel has reported. Used only with Sentinels.
    node_template: Endpoint,
    /// The name under which the Sentinels know the primary. Empty without Sentinels.
    master: String,
    /// The Sentinels or Cluster nodes that `--store` names.
    named: Vec<Arc<Node>>,
    /// Further Sentinels or Cluster nodes that other nodes have reported, by address.
    learnt: Mutex<BTreeMap<String, Arc<Node>>>,
    /// The latest view of each node.
    pub(super) views: Mutex<Views>,
    /// Whether ticks expire even while no majority of the nodes confirms the primary: the flag
    /// `--expire-without-majority`.
    pub(super) is_without_majority: bool,
    /// Whether Redis has room for the connections of all sidecars. Otherwise this sidecar does without those for hints,
    /// so that all sidecars get those for requests.
    pub(super) has_room: Sender<bool>,
}

impl Topology {
    /// Returns whether a new search may help after this fault, because another Redis may have the ring now. That
    /// happens after a failover, and after a slot of a Cluster has moved.
    pub(super) fn finds_again(&self, fault: FaultKind) -> bool {
        match self.kind {
            TopologyKind::Standalone => false,
            TopologyKind::Sentinel => fault == FaultKind::ReadOnly,
            TopologyKind::Cluster => {
                matches!(fault, FaultKind::ReadOnly | FaultKind::Clustered | FaultKind::OpenSlot)
            }
        }
    }

    /// Finds, for each of these hash slots, the Redis that has the slot now. Without a Cluster, one Redis has all
    /// slots.
    pub(super) async fn find_all(&self, slots: &[Slot], clock: &Clock) -> Result<Vec<Found>, Fault> {
        if self.kind == TopologyKind::Standalone {
            let endpoint = self.template.clone();
            return Ok(vec![Found { endpoint, config_epoch: 0, node: None }; slots.len()]);
        }
        let (mut views, mut asked) = (Views { named: self.sentinels(), ..Views::default() }, BTreeSet::new());
        // The second round asks the nodes that the nodes of the first round have reported, because without them there
        // may be no majority.
        for _ in 0..2 {
            let nodes: Vec<_> =
                self.nodes().into_iter().filter(|node| asked.insert(node.address().to_string())).collect();
            if nodes.is_empty() {
                break;
            }
            let asked_at = clock.now();
            match answers(nodes.iter().map(|node| self.ask(node, asked_at))).await {
                Ok(answers) => answers.into_iter().for_each(|view| views.put(view)),
                Err(faults) if views.by_node.is_empty() => return Err(self.together(&faults)),
                Err(_) => {}
            }
        }
        slots.iter().map(|slot| views.owner(*slot, self.is_without_majority)).collect()
    }

    /// Opens a connection to `found`. Records if that Redis has no room for it.
    pub(super) async fn connect(
        &self,
        found: &Found,
        purpose: &str,
        response_timeout: Option<Duration>,
    ) -> Result<RedisConnection, Fault> {
        let connected = found.connect(purpose, response_timeout).await.map_err(Fault::from);
        if connected.as_ref().is_err_and(|fault| fault.kind == FaultKind::MaxClients) {
            self.has_room.send_replace(false);
        }
        connected
    }

    /// Returns all known Sentinels or Cluster nodes. Returns none if Redis has a fixed address.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.named.iter().chain(self.learnt.lock().values()).map(Arc::clone).collect()
    }

    /// Replaces the nodes that other nodes have reported by the nodes in `known`, by address. A node that was known
    /// before keeps its connection.
    fn learn(&self, known: BTreeMap<String, Endpoint>) {
        let mut learnt = self.learnt.lock();
        learnt.retain(|address, _| known.contains_key(address));
        for (address, endpoint) in known {
            if self.named.iter().all(|node| node.address().to_string() != address) {
                learnt.entry(address).or_insert_with(|| Node::new(endpoint));
            }
        }
    }

    /// Asks a node which Redis is the primary. Stores the answer as the view of the node, and stores the nodes that it
    /// reports.
    pub(super) async fn ask(&self, node: &Node, asked_at: Instant) -> Result<View, Fault> {
        let view = if self.kind == TopologyKind::Sentinel {
            sentinel::ask(node, &self.master, &self.template, &self.node_template, asked_at).await?
        } else {
            cluster::ask(&self.template, node, asked_at).await?
        };
        node.id.lock().clone_from(&view.id);
        let mut views = self.views.lock();
        if views.named.is_empty() {
            views.named = self.sentinels();
        }
        views.put(view.clone());
        self.learn(views.known());
        Ok(view)
    }

    /// Returns the Redis that has replaced `found` for `slot`, according to a majority of the votes. If ticks expire
    /// without a majority, trusts the view with the highest config epoch instead.
    pub(super) fn replaced_by(&self, found: &Found, slot: Slot) -> Option<Found> {
        let views = self.views.lock();
        let now = if self.is_without_majority { views.latest(slot) } else { views.majority(slot) };
        now.filter(|now| found.is_followed_by(now))
    }

    /// Returns whether a tick may expire only while a majority confirms the primary.
    pub(super) fn needs_majority(&self) -> bool {
        self.kind != TopologyKind::Standalone && !self.is_without_majority
    }

    /// Returns the addresses of the Sentinels that `--store` names. Returns none in a Cluster: only its primaries vote,
    /// and each node reports how many primaries there are.
    fn sentinels(&self) -> BTreeSet<String> {
        let is_needed = self.kind == TopologyKind::Sentinel;
        self.named.iter().filter(|_| is_needed).map(|node| node.address().to_string()).collect()
    }

    /// Combines the faults of all nodes into one fault. Its kind is `Forbidden` only if all nodes deny access:
    /// otherwise a new attempt may succeed.
    fn together(&self, faults: &[Fault]) -> Fault {
        let texts: Vec<&str> = faults.iter().map(|fault| fault.text.as_str()).collect();
        let texts = texts.join("; ");
        let is_forbidden = faults.iter().all(|fault| fault.kind == FaultKind::Forbidden);
        let kind = if is_forbidden { FaultKind::Forbidden } else { FaultKind::Disconnected };
        if self.kind != TopologyKind::Sentinel {
            return Fault::new(kind, format!("no node of the Cluster answers ({texts})"));
        }
        let credentials = "; the credentials for Sentinels are sentinel_user and sentinel_password in --store, or --sentinel-password-file";
        let hint = if is_forbidden { credentials } else { "" };
        Fault::new(kind, format!("no Sentinel names the primary {:?} ({texts}){hint}", self.master))
    }
}

#[cfg(test)]
mod tests {
    use redis::{ConnectionAddr, IntoConnectionInfo};

    use super::*;

    fn parsed(url: &str) -> Topology {
        Topology::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    fn primary_of(topology: &Topology, host: &str, port: u16) -> Endpoint {
        topology.template.at(host, port)
    }

    #[test]
    fn a_url_with_sentinels_has_their_addresses_and_the_settings_of_the_primary() {
        let url = "redis-sentinel://me:pass%2Fword@one,two:7000,[::1],[::2]:7001/5?master=im&protocol=resp3";
        let topology = parsed(url);
        let names: Vec<String> = topology.nodes().iter().map(|node| node.address().to_string()).collect();
        assert_eq!(names, ["one:26379", "two:7000", "::1:26379", "::2:7001"]);
        let primary = primary_of(&topology, "10.0.0.1", 6_380);
        let (address, settings) = (primary.address(), primary.info.redis_settings());
        assert_eq!(address, &ConnectionAddr::Tcp("10.0.0.1".to_owned(), 6_380));
        assert_eq!((settings.username(), settings.password()), (Some("me"), Some("pass/word")));
        assert_eq!((settings.db(), settings.protocol()), (5, redis::ProtocolVersion::RESP3));
        let topology = parsed("rediss-sentinel://one?master=im&sentinel_password=secret");
        let primary = primary_of(&topology, "host", 1);
        assert!(
            matches!(primary.address(), ConnectionAddr::TcpTls { host, insecure: false, .. } if host == "host")
        );
        assert_eq!(primary.info.redis_settings().password(), None, "the password is only for the Sentinels");
    }

    #[test]
    fn the_scheme_has_the_kind_of_topology() {
        for (url, kind) in [
            ("redis://one", TopologyKind::Standalone),
            ("redis+unix:///run/redis-sentinel", TopologyKind::Standalone),
            ("valkeys-sentinel://one?master=im", TopologyKind::Sentinel),
            ("redis-cluster://me:secret@one,two:7000", TopologyKind::Cluster),
            ("rediss-cluster://one/0?protocol=resp3", TopologyKind::Cluster),
        ] {
            assert_eq!(parsed(url).kind, kind, "{url}");
        }
    }

    #[test]
    fn a_wrong_address_is_refused() {
        for (url, word) in [
            ("redis-sentinel://one,two/0", "?master=NAME"),
            ("redis-sentinel://one/0?master=", "?master=NAME"),
            ("redis-sentinel://one,,two?master=im", "did not parse"),
            ("redis-sentinel://one:port?master=im", ""),
            ("redis-sentinel://one/five?master=im", "database"),
            ("redis-cluster://one/1", "no other database"),
            ("redis-something://one", ""),
            ("redis://", ""),
        ] {
            let error = Topology::parse(url).err().unwrap_or_else(|| panic!("{url} was accepted"));
            assert!(error.contains(word), "{url}: {error}");
        }
    }

    #[test]
    fn a_password_is_wrong_if_all_nodes_say_so() {
        let fault = |kind, text: &str| Fault { kind, text: text.to_owned() };
        let (wrong, away) = (fault(FaultKind::Forbidden, "a: wrong"), fault(FaultKind::Disconnected, "b: away"));
        let topology = parsed("redis-cluster://one");
        let all = topology.together(&[wrong.clone(), wrong.clone()]);
        let text = "no node of the Cluster answers (a: wrong; a: wrong)";
        assert_eq!((all.kind, all.text.as_str()), (FaultKind::Forbidden, text));
        assert_eq!(topology.together(&[wrong, away]).kind, FaultKind::Disconnected);
    }

    #[test]
    fn nodes_that_others_know_are_asked_too_and_kept_while_they_are_known() {
        let template = Endpoint::new("redis://somewhere/".into_connection_info().unwrap());
        let at = |port| template.at("10.0.0.1", port);
        let nodes = parsed("redis-sentinel://10.0.0.1:1,10.0.0.1:2?master=im");
        let learn = |ports: &[u16]| {
            let known = ports.iter().map(|port| (format!("10.0.0.1:{port}"), at(*port)));
            nodes.learn(known.collect());
            nodes.nodes().iter().map(|node| node.address().to_string()).collect::<Vec<String>>().join(" ")
        };
        assert_eq!(learn(&[3, 1]), "10.0.0.1:1 10.0.0.1:2 10.0.0.1:3");
        let kept = nodes.nodes().pop().unwrap();
        assert_eq!(learn(&[3, 4]), "10.0.0.1:1 10.0.0.1:2 10.0.0.1:3 10.0.0.1:4");
        assert!(Arc::ptr_eq(&kept, &nodes.nodes()[2]), "the node keeps its connection");
        assert_eq!(learn(&[]), "10.0.0.1:1 10.0.0.1:2");
    }
}
