//! Where Redis is: at an address, where its Sentinels say, or on a node of a Cluster.

pub(crate) mod cluster;
pub(crate) mod confirmation;
pub(crate) mod majority;
pub(crate) mod nodes;
pub(crate) mod sentinel;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::{Client, ConnectionInfo, IntoConnectionInfo};

use crate::clock::Clock;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::options::{connection_info, tcp_settings};
use crate::redis::topology::cluster::{Cluster, Slot};
use crate::redis::topology::majority::{Count, View, Views};
use crate::redis::topology::nodes::{Found, Manner, Node, Nodes, answers, together};
use crate::redis::topology::sentinel::Sentinels;

/// A name for the host of which only others know. It is never looked up.
const UNKNOWN_HOST: &str = "unknown.invalid";

/// What several addresses in `--store` are those of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Several {
    /// Sentinels.
    Sentinels,
    /// Nodes of a Cluster.
    Nodes,
}

impl Several {
    /// What a scheme has several of, with that of a single Redis like those.
    fn of_scheme(scheme: &str) -> Option<(Several, &str)> {
        let (plain, several) = scheme.rsplit_once('-')?;
        let several = match several {
            "sentinel" => Several::Sentinels,
            "cluster" => Several::Nodes,
            _ => return None,
        };
        Some((several, plain))
    }

    /// Where one listens unless its address says otherwise.
    const fn port(self) -> u16 {
        match self {
            Several::Sentinels => 26_379,
            Several::Nodes => 6_379,
        }
    }
}

/// What `--store` says of where Redis is, and what was said of it lately.
pub struct Topology {
    kind: Kind,
    views: Mutex<Views>,
    /// Whether ticks expire without a majority, as the operator has it.
    is_without_majority: bool,
}

enum Kind {
    Fixed(Client),
    Watched(Box<Sentinels>),
    Clustered(Cluster),
}

impl Topology {
    /// The Redis that a client leads to.
    pub(super) fn of(client: Client) -> Topology {
        Topology::new(Kind::Fixed(client))
    }

    fn new(kind: Kind) -> Topology {
        Topology { kind, views: Mutex::default(), is_without_majority: false }
    }

    /// The same, where ticks may expire though no majority confirms the primary.
    pub(super) fn without_majority(self, is_without_majority: bool) -> Topology {
        Topology { is_without_majority, ..self }
    }

    /// Reads a URL: `redis://…` for one address,
    /// `redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME` for where Sentinels say that the primary of
    /// this name is, or `redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT`. `sentinel_user` and `sentinel_password` are
    /// for the Sentinels themselves.
    ///
    /// # Errors
    ///
    /// What is wrong with it, without what it may hold of a password.
    pub fn parse(url: &str) -> Result<Topology, String> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let Some((several, scheme)) = Several::of_scheme(scheme) else {
            let client = connection_info(url).and_then(Client::open).map_err(|error| error.to_string())?;
            return Ok(Topology::of(client));
        };
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (user, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
        let (hosts, db) = rest.split_once('/').unwrap_or((rest, ""));
        let at =
            |user: &str, host: &str, path: &str| info(&format!("{scheme}://{}{host}/{path}", before_at(user)));
        let protocol =
            parameter(parameters, "protocol").map_or_else(String::new, |value| format!("?protocol={value}"));
        let manner = Manner(at(user, UNKNOWN_HOST, &format!("{db}{protocol}"))?);
        let nodes = |user: &str, path: &str| -> Result<Vec<Node>, String> {
            let node = |host| {
                let client = Client::open(at(user, &with_port(host, several.port()), path)?);
                client.map(Node::new).map_err(|error| error.to_string())
            };
            hosts.split(',').map(node).collect()
        };
        Ok(Topology::new(match several {
            Several::Sentinels => {
                let master = parameter(parameters, "master").filter(|name| !name.is_empty());
                let master =
                    master.ok_or("it does not name the primary: ?master=NAME, as `sentinel monitor` has it")?;
                let user = sentinel_user(parameters);
                let (nodes, among_them) = (Nodes::new(nodes(&user, "")?), Manner(at(&user, UNKNOWN_HOST, "")?));
                Kind::Watched(Box::new(Sentinels { nodes, among_them, master: master.to_owned(), manner }))
            }
            Several::Nodes if manner.0.redis_settings().db() != 0 => {
                return Err(String::from("a Cluster has no other database than 0"));
            }
            Several::Nodes => {
                let nodes = Nodes::new(nodes(user, &protocol)?);
                Kind::Clustered(Cluster { nodes, manner })
            }
        }))
    }

    /// What its addresses are those of, if it has several.
    #[must_use]
    pub const fn several(&self) -> Option<Several> {
        match self.kind {
            Kind::Fixed(_) => None,
            Kind::Watched(_) => Some(Several::Sentinels),
            Kind::Clustered(_) => Some(Several::Nodes),
        }
    }

    /// Whether Redis is found elsewhere soon: after a failover, or once the slot of a Cluster has moved.
    pub(super) fn finds_again(&self, fault: FaultKind) -> bool {
        match self.several() {
            None => false,
            Some(Several::Sentinels) => fault == FaultKind::ReadOnly,
            Some(Several::Nodes) => {
                matches!(fault, FaultKind::ReadOnly | FaultKind::Clustered | FaultKind::OpenSlot)
            }
        }
    }

    /// Finds the Redis that has a slot now.
    pub(super) async fn find(&self, slot: Slot, clock: &Clock) -> Result<Found, Fault> {
        let views = self.look(clock).await?;
        self.owner(&views, slot)
    }

    /// Who has a slot, by what was said.
    pub(super) fn owner(&self, views: &Views, slot: Slot) -> Result<Found, Fault> {
        views.owner(slot, self.named())
    }

    /// Asks all nodes where Redis is now.
    pub(super) async fn look(&self, clock: &Clock) -> Result<Views, Fault> {
        if let Kind::Fixed(client) = &self.kind {
            let found = Found { client: client.clone(), config_epoch: 0, node: None };
            return Ok(Views::of_one(found, clock.now()));
        }
        let (mut views, mut asked) = (Views::default(), BTreeSet::new());
        // Those that the first know are asked too: a majority may need them.
        for _ in 0..2 {
            let nodes: Vec<_> = self.nodes().into_iter().filter(|node| asked.insert(node.to_string())).collect();
            if nodes.is_empty() {
                break;
            }
            let asked_at = clock.now();
            match answers(nodes.iter().map(|node| self.ask(node, asked_at))).await {
                Ok(told) => told.into_iter().for_each(|(id, view)| views.put(id, view)),
                Err(faults) if views.is_empty() => return Err(self.together(&faults)),
                Err(_) => {}
            }
        }
        Ok(views)
    }

    /// The nodes that know where Redis is.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        match &self.kind {
            Kind::Fixed(_) => Vec::new(),
            Kind::Watched(sentinels) => sentinels.nodes.all(),
            Kind::Clustered(cluster) => cluster.nodes.all(),
        }
    }

    /// Asks a node where Redis is, and remembers what it says.
    pub(super) async fn ask(&self, node: &Node, asked_at: Instant) -> Result<(String, View), Fault> {
        let (nodes, (id, view)) = match &self.kind {
            Kind::Fixed(_) => return Err(Fault::new(FaultKind::Unreachable, "a single Redis is asked nothing")),
            Kind::Watched(sentinels) => (&sentinels.nodes, sentinels.ask(node, asked_at).await?),
            Kind::Clustered(cluster) => (&cluster.nodes, cluster.ask(node, asked_at).await?),
        };
        node.is_called(&id);
        let mut views = self.views.lock();
        views.put(id.clone(), view.clone());
        nodes.learn(views.known());
        Ok((id, view))
    }

    /// What another Redis has taken the place of one that was found, by a majority of those that know.
    pub(super) fn replaced_by(&self, found: &Found, slot: Slot) -> Option<Found> {
        let views = self.views.lock();
        let now = if self.is_without_majority { views.latest(slot) } else { views.majority(slot, self.named()) };
        now.filter(|now| found.is_followed_by(now))
    }

    /// Whether a tick may expire only while a majority confirms the primary.
    pub(super) const fn needs_majority(&self) -> bool {
        self.several().is_some() && !self.is_without_majority
    }

    /// Until when a majority confirms that a Redis that was found has a slot.
    pub(super) fn confirmed_until(&self, found: &Found, slot: Slot) -> Option<Instant> {
        self.views.lock().confirmed_until(found, slot, self.named())
    }

    /// The shortest failover timer, if it is shorter than a confirmation can be good.
    pub(super) fn short_timer(&self) -> Option<Duration> {
        self.views.lock().short_timer()
    }

    /// How many confirm that at a time `now`.
    pub(super) fn confirmations(&self, found: &Found, slot: Slot, now: Instant) -> Count {
        self.views.lock().count(found, slot, self.named(), now)
    }

    /// How many votes there are at least, since they are named.
    fn named(&self) -> usize {
        match &self.kind {
            Kind::Watched(sentinels) => sentinels.nodes.named(),
            // Not all nodes of a Cluster have a vote, and each knows those that do.
            Kind::Fixed(_) | Kind::Clustered(_) => 1,
        }
    }

    fn together(&self, faults: &[Fault]) -> Fault {
        let Kind::Watched(sentinels) = &self.kind else {
            return together(faults, "no node of the Cluster answers");
        };
        let fault = together(faults, &format!("no Sentinel names the primary {:?}", sentinels.master));
        let whose = "theirs are sentinel_user and sentinel_password in --store";
        match fault.kind {
            FaultKind::Forbidden => Fault { text: format!("{}; {whose}", fault.text), ..fault },
            _ => fault,
        }
    }
}

fn info(url: &str) -> Result<ConnectionInfo, String> {
    let info = url.into_connection_info().map_err(|error| error.to_string())?;
    Ok(info.set_tcp_settings(tcp_settings()))
}

fn parameter<'a>(parameters: &'a str, name: &str) -> Option<&'a str> {
    parameters.split('&').find_map(|parameter| parameter.strip_prefix(name)?.strip_prefix('='))
}

fn sentinel_user(parameters: &str) -> String {
    let [user, password] =
        ["sentinel_user", "sentinel_password"].map(|name| parameter(parameters, name).unwrap_or_default());
    if password.is_empty() { user.to_owned() } else { format!("{user}:{password}") }
}

fn before_at(user: &str) -> String {
    if user.is_empty() { String::new() } else { format!("{user}@") }
}

fn with_port(host: &str, port: u16) -> String {
    let behind_address = host.rsplit_once(']').map_or(host, |(_, behind)| behind);
    if behind_address.contains(':') { host.to_owned() } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use redis::ConnectionAddr;

    use super::*;

    fn parsed(url: &str) -> Kind {
        Topology::parse(url).unwrap_or_else(|error| panic!("{url}: {error}")).kind
    }

    fn watched(url: &str) -> Box<Sentinels> {
        let Kind::Watched(sentinels) = parsed(url) else { panic!("{url} names Sentinels") };
        sentinels
    }

    #[test]
    fn a_url_with_sentinels_says_who_they_are_and_how_the_primary_is_spoken_to() {
        let url = "redis-sentinel://me:pass%2Fword@one,two:7000,[::1],[::2]:7001/5?master=im&protocol=resp3";
        let sentinels = watched(url);
        let names: Vec<String> = sentinels.nodes.all().iter().map(ToString::to_string).collect();
        assert_eq!(names, ["one:26379", "two:7000", "::1:26379", "::2:7001"]);
        let primary = sentinels.manner.at("10.0.0.1", 6_380).unwrap();
        let (address, settings) =
            (primary.get_connection_info().addr(), primary.get_connection_info().redis_settings());
        assert_eq!(address, &ConnectionAddr::Tcp("10.0.0.1".to_owned(), 6_380));
        assert_eq!((settings.username(), settings.password()), (Some("me"), Some("pass/word")));
        assert_eq!((settings.db(), settings.protocol()), (5, redis::ProtocolVersion::RESP3));
        let sentinels = watched("rediss-sentinel://one?master=im&sentinel_password=secret");
        let primary = sentinels.manner.at("host", 1).unwrap();
        let primary = primary.get_connection_info();
        assert!(matches!(primary.addr(), ConnectionAddr::TcpTls { host, insecure: false, .. } if host == "host"));
        assert_eq!(primary.redis_settings().password(), None, "that is for the Sentinels");
    }

    #[test]
    fn what_has_several_addresses_is_told_by_its_scheme() {
        for (url, several) in [
            ("redis://one", None),
            ("redis+unix:///run/redis-sentinel", None),
            ("valkeys-sentinel://one?master=im", Some(Several::Sentinels)),
            ("redis-cluster://me:secret@one,two:7000", Some(Several::Nodes)),
            ("rediss-cluster://one/0?protocol=resp3", Some(Several::Nodes)),
        ] {
            assert_eq!(Topology::new(parsed(url)).several(), several, "{url}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
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
            let error = Topology::parse(url).err().unwrap_or_else(|| panic!("{url} was taken"));
            assert!(error.contains(word), "{url}: {error}");
        }
    }
}
