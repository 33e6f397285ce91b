//! Where Redis is: at an address, or where its Sentinels say.

use std::fmt;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, IntoConnectionInfo, RedisResult};

use super::fault::Fault;
use super::options::{connection_info, tcp_settings};
use super::sentinels::Sentinels;

/// What the URL of a store with Sentinels begins with, and what one of a Redis like it would.
const WITH_SENTINELS: [(&str, &str); 4] = [
    ("redis-sentinel", "redis"),
    ("rediss-sentinel", "rediss"),
    ("valkey-sentinel", "valkey"),
    ("valkeys-sentinel", "valkeys"),
];

/// Where a Sentinel listens unless its address says otherwise.
const SENTINEL_PORT: u16 = 26_379;

/// A name for the host of which only the Sentinels know. It is never looked up.
const UNKNOWN_HOST: &str = "primary.invalid";

/// What `--store` says of where Redis is.
pub struct Place(pub(super) Kind);

pub(super) enum Kind {
    Fixed(Client),
    Watched(Sentinels),
}

/// Whether a URL names Sentinels: its scheme tells.
#[must_use]
pub fn names_sentinels(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| plain_scheme(scheme).is_some())
}

fn plain_scheme(scheme: &str) -> Option<&'static str> {
    WITH_SENTINELS.iter().find(|(known, _)| *known == scheme).map(|(_, plain)| *plain)
}

impl Place {
    /// Reads a URL: `redis://…` for one address, or
    /// `redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME` for where Sentinels say that the primary of
    /// this name is. `sentinel_user` and `sentinel_password` are for the Sentinels themselves.
    ///
    /// # Errors
    ///
    /// What is wrong with it, without what it may hold of a password.
    pub fn parse(url: &str) -> Result<Place, String> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let Some(scheme) = plain_scheme(scheme) else {
            let client = connection_info(url).and_then(Client::open).map_err(|error| error.to_string())?;
            return Ok(Place(Kind::Fixed(client)));
        };
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (user, rest) = rest.rsplit_once('@').map_or(("", rest), |(user, rest)| (user, rest));
        let (hosts, db) = rest.split_once('/').unwrap_or((rest, ""));
        let (master, sentinel_user) = (parameter(parameters, "master"), sentinel_user(parameters));
        let master = master.filter(|name| !name.is_empty());
        let master = master.ok_or("it does not name the primary: ?master=NAME, as `sentinel monitor` has it")?;
        let at =
            |user: &str, host: &str, path: &str| info(&format!("{scheme}://{}{host}/{path}", before_at(user)));
        let protocol =
            parameter(parameters, "protocol").map_or_else(String::new, |value| format!("?protocol={value}"));
        let manner = at(user, UNKNOWN_HOST, &format!("{db}{protocol}"))?;
        let sentinels = hosts.split(',').map(|host| at(&sentinel_user, &with_port(host), ""));
        let sentinels = sentinels.collect::<Result<Vec<ConnectionInfo>, String>>()?;
        let sentinels = Sentinels::new(sentinels, master.to_owned(), manner).map_err(|error| error.to_string())?;
        Ok(Place(Kind::Watched(sentinels)))
    }

    pub(super) const fn has_sentinels(&self) -> bool {
        matches!(self.0, Kind::Watched(_))
    }

    /// Finds Redis as it is now.
    pub(super) async fn find(&self) -> Result<Found, Fault> {
        match &self.0 {
            Kind::Fixed(client) => Ok(Found { client: client.clone(), config_epoch: 0 }),
            Kind::Watched(sentinels) => sentinels.primary().await,
        }
    }
}

/// A Redis that was found.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) client: Client,
    /// Grows with each failover, as Sentinels count them.
    pub(super) config_epoch: u64,
}

impl Found {
    pub(super) async fn connect(&self, config: &AsyncConnectionConfig) -> RedisResult<MultiplexedConnection> {
        self.client.get_multiplexed_async_connection_with_config(config).await
    }

    /// Whether another one has taken its place since. A Sentinel that was cut off may still name the one before.
    pub(super) fn is_followed_by(&self, other: &Found) -> bool {
        let address = |found: &Found| found.client.get_connection_info().addr().clone();
        other.config_epoch >= self.config_epoch && address(other) != address(self)
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
    let settings: TcpSettings = tcp_settings();
    Ok(info.set_tcp_settings(settings))
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

fn with_port(host: &str) -> String {
    let behind_address = host.rsplit_once(']').map_or(host, |(_, behind)| behind);
    if behind_address.contains(':') { host.to_owned() } else { format!("{host}:{SENTINEL_PORT}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(url: &str) -> Sentinels {
        match Place::parse(url).unwrap_or_else(|error| panic!("{url}: {error}")).0 {
            Kind::Watched(sentinels) => sentinels,
            Kind::Fixed(_) => panic!("{url} names Sentinels"),
        }
    }

    #[test]
    fn a_url_with_sentinels_says_who_they_are_and_how_the_primary_is_spoken_to() {
        let url = "redis-sentinel://me:pass%2Fword@one,two:7000,[::1],[::2]:7001/5?master=im&protocol=resp3";
        let sentinels = watched(url);
        assert_eq!(sentinels.names(), "one:26379, two:7000, ::1:26379, ::2:7001");
        let primary = sentinels.named("10.0.0.1", 6_380).unwrap();
        let settings = primary.get_connection_info().redis_settings();
        assert_eq!(primary.get_connection_info().addr().to_string(), "10.0.0.1:6380");
        assert_eq!((settings.username(), settings.password()), (Some("me"), Some("pass/word")));
        assert_eq!((settings.db(), settings.protocol()), (5, redis::ProtocolVersion::RESP3));
        let tls = watched("rediss-sentinel://one?master=im&sentinel_password=secret").named("host", 1).unwrap();
        assert!(matches!(tls.get_connection_info().addr(), redis::ConnectionAddr::TcpTls { insecure: false, .. }));
        assert_eq!(tls.get_connection_info().redis_settings().password(), None, "that is for the Sentinels");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for (url, word) in [
            ("redis-sentinel://one,two/0", "?master=NAME"),
            ("redis-sentinel://one/0?master=", "?master=NAME"),
            ("redis-sentinel://one,,two?master=im", "ostname"),
            ("redis-sentinel://one:port?master=im", ""),
            ("redis-sentinel://one/five?master=im", "database"),
            ("redis://", ""),
        ] {
            let error = Place::parse(url).err().unwrap_or_else(|| panic!("{url} was taken"));
            assert!(error.contains(word), "{url}: {error}");
        }
    }

    #[test]
    fn a_primary_is_followed_by_another_address_of_the_same_or_a_later_epoch() {
        let sentinels = watched("redis-sentinel://one?master=im");
        let found =
            |port, config_epoch| Found { client: sentinels.named("10.0.0.1", port).unwrap(), config_epoch };
        assert!(!found(1, 3).is_followed_by(&found(1, 4)));
        assert!(found(1, 3).is_followed_by(&found(2, 3)));
        assert!(found(1, 3).is_followed_by(&found(2, 4)));
        assert!(!found(1, 3).is_followed_by(&found(2, 2)), "somebody has not heard of the last failover");
    }
}
