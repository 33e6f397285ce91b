//! Where Redis is: at an address, where its Sentinels say, or on a node of a Cluster.

use redis::{Client, ConnectionInfo, IntoConnectionInfo};

use super::cluster::{Cluster, Map, Slot};
use super::fault::{Fault, FaultKind};
use super::nodes::{Found, Manner, Node};
use super::options::{connection_info, tcp_settings};
use super::sentinels::Sentinels;

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

/// What `--store` says of where Redis is.
pub struct Place(Kind);

enum Kind {
    Fixed(Client),
    Watched(Sentinels),
    Clustered(Cluster),
}

impl Place {
    /// The Redis that a client leads to.
    pub(super) const fn of(client: Client) -> Place {
        Place(Kind::Fixed(client))
    }

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
            return Ok(Place::of(client));
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
    #[must_use]
    pub const fn several(&self) -> Option<Several> {
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

    /// Looks where Redis is now.
    pub(super) async fn look(&self) -> Result<Map, Fault> {
        match &self.0 {
            Kind::Fixed(client) => Ok(Map::of(Found { client: client.clone(), config_epoch: 0, node: None })),
            Kind::Watched(sentinels) => sentinels.primary().await.map(Map::of),
            Kind::Clustered(cluster) => cluster.look().await,
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
            assert_eq!(Place(parsed(url)).several(), several, "{url}");
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
}
