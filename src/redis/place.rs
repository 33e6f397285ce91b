//! Where Redis is: at an address, where its Sentinels say, or on a node of a Cluster.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, IntoConnectionInfo, RedisResult};

use super::cluster::{Cluster, Map, Slot};
use super::fault::{Fault, FaultKind};
use super::link::Link;
use super::nodes::{Manner, Node};
use super::options::{connection_info, tcp_settings};
use super::sentinels::Sentinels;

/// A name for the host of which only others know. It is never looked up.
const UNKNOWN_HOST: &str = "unknown.invalid";

/// How often it is looked, while all is well, whether Redis is elsewhere.
const POLL: Duration = Duration::from_secs(1);

/// What several addresses in `--store` are those of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Several {
    /// Sentinels.
    Sentinels,
    /// Nodes of a Cluster.
    Nodes,
}

impl Several {
    /// What the URL of a store has several of, by its scheme; nothing, where it has one address.
    #[must_use]
    pub fn named_by(url: &str) -> Option<Several> {
        Several::of_scheme(url.split_once("://")?.0).map(|(several, _)| several)
    }

    /// With the scheme of a single Redis like those.
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

/// What `--store` says of where Redis is.
pub struct Place(Kind);

enum Kind {
    Fixed(Client),
    Watched(Sentinels),
    Clustered(Cluster),
}

impl Place {
    /// Reads a URL: `redis://…` for one address,
    /// `redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME` for where Sentinels say that the primary of
    /// this name is, or `redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT`. `sentinel_user` and `sentinel_password` are
    /// for the Sentinels themselves.
    ///
    /// # Errors
    ///
    /// What is wrong with it, without what it may hold of a password.
    pub fn parse(url: &str) -> Result<Place, String> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let Some((several, scheme)) = Several::of_scheme(scheme) else {
            let client = connection_info(url).and_then(Client::open).map_err(|error| error.to_string())?;
            return Ok(Place(Kind::Fixed(client)));
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
        Ok(Place(match several {
            Several::Sentinels => {
                let master = parameter(parameters, "master").filter(|name| !name.is_empty());
                let master =
                    master.ok_or("it does not name the primary: ?master=NAME, as `sentinel monitor` has it")?;
                let nodes = nodes(&sentinel_user(parameters), "")?;
                Kind::Watched(Sentinels { nodes, master: master.to_owned(), manner })
            }
            Several::Nodes if manner.0.redis_settings().db() != 0 => {
                return Err(String::from("a Cluster has no other database than 0"));
            }
            Several::Nodes => Kind::Clustered(Cluster::new(nodes(user, &protocol)?, manner)),
        }))
    }

    /// What its addresses are those of, if it has several.
    pub(super) const fn several(&self) -> Option<Several> {
        match self.0 {
            Kind::Fixed(_) => None,
            Kind::Watched(_) => Some(Several::Sentinels),
            Kind::Clustered(_) => Some(Several::Nodes),
        }
    }

    /// Whether what was asked is found elsewhere, or soon: a slot of a Cluster that moves.
    pub(super) fn finds_again(&self, fault: FaultKind) -> bool {
        self.several() == Some(Several::Nodes) && fault == FaultKind::Clustered
    }

    /// Finds the Redis that has a slot now.
    pub(super) async fn find(&self, slot: Slot) -> Result<Found, Fault> {
        self.look().await?.owner(slot)
    }

    async fn look(&self) -> Result<Map, Fault> {
        match &self.0 {
            Kind::Fixed(client) => Ok(Map::of(Found { client: client.clone(), config_epoch: 0, node: None })),
            Kind::Watched(sentinels) => sentinels.primary().await.map(Map::of),
            Kind::Clustered(cluster) => cluster.look().await,
        }
    }

    /// Has links leave a Redis in whose place there is another one, though it still answers: one that was cut off from
    /// those that have replaced it.
    pub(super) async fn watch(self: Arc<Self>, links: Vec<Arc<Link>>) {
        if self.several().is_none() {
            return;
        }
        loop {
            tokio::time::sleep(POLL).await;
            // Where nobody can be asked, Redis is there, or the links have noticed.
            let Ok(map) = self.look().await else { continue };
            for link in &links {
                if let (Ok(session), Ok(now)) = (link.session(), map.owner(link.slot()))
                    && session.found.is_followed_by(&now)
                {
                    let text = format!("another Redis, {now}, is there in place of {}", session.found);
                    link.give_up(&session, &Fault { kind: FaultKind::ReadOnly, text });
                }
            }
        }
    }
}

/// A Redis that was found.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) client: Client,
    /// Grows with each failover, as those count them who say where Redis is.
    pub(super) config_epoch: u64,
    /// What they call it, if it has a name that stays.
    pub(super) node: Option<String>,
}

impl Found {
    pub(super) async fn connect(&self, config: &AsyncConnectionConfig) -> RedisResult<MultiplexedConnection> {
        self.client.get_multiplexed_async_connection_with_config(config).await
    }

    /// Whether another one has taken its place since. Whoever was cut off may still name the one before; and the same node
    /// may have several addresses, by whom one asks.
    fn is_followed_by(&self, other: &Found) -> bool {
        let address = |found: &Found| found.client.get_connection_info().addr().clone();
        let is_same = match (&self.node, &other.node) {
            (Some(one), Some(other)) => one == other,
            _ => address(self) == address(other),
        };
        other.config_epoch >= self.config_epoch && !is_same
    }
}

/// Its address, without user and password.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.client.get_connection_info().addr().fmt(f)
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
        Place::parse(url).unwrap_or_else(|error| panic!("{url}: {error}")).0
    }

    fn watched(url: &str) -> Sentinels {
        let Kind::Watched(sentinels) = parsed(url) else { panic!("{url} names Sentinels") };
        sentinels
    }

    #[test]
    fn a_url_with_sentinels_says_who_they_are_and_how_the_primary_is_spoken_to() {
        let url = "redis-sentinel://me:pass%2Fword@one,two:7000,[::1],[::2]:7001/5?master=im&protocol=resp3";
        let sentinels = watched(url);
        let names: Vec<String> = sentinels.nodes.iter().map(ToString::to_string).collect();
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
            assert_eq!((Several::named_by(url), Place(parsed(url)).several()), (several, several), "{url}");
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
            let error = Place::parse(url).err().unwrap_or_else(|| panic!("{url} was taken"));
            assert!(error.contains(word), "{url}: {error}");
        }
    }

    #[test]
    fn a_redis_is_followed_by_another_address_of_the_same_or_a_later_epoch() {
        let manner = watched("redis-sentinel://one?master=im").manner;
        let node = |name: Option<&str>, port, config_epoch| {
            let client = manner.at("10.0.0.1", port).unwrap();
            Found { client, config_epoch, node: name.map(str::to_owned) }
        };
        let found = |port, config_epoch| node(None, port, config_epoch);
        assert!(!found(1, 3).is_followed_by(&found(1, 4)));
        assert!(found(1, 3).is_followed_by(&found(2, 3)));
        assert!(found(1, 3).is_followed_by(&found(2, 4)));
        assert!(!found(1, 3).is_followed_by(&found(2, 2)), "somebody has not heard of the last failover");
        assert!(!node(Some("a"), 1, 3).is_followed_by(&node(Some("a"), 2, 3)), "it has two addresses");
        assert!(node(Some("a"), 1, 3).is_followed_by(&node(Some("b"), 2, 3)));
    }
}
