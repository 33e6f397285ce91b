//! The URL of a store in `--store`. It may contain passwords, so only parts that are known to be public are printed.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use parking_lot::Mutex;
use redis::{ConnectionAddr, ConnectionInfo};
use serde::Deserialize;
use tokio::sync::watch::Sender;

use crate::redis::topology::endpoint::{CredentialFiles, Endpoint};
use crate::redis::topology::nodes::Node;
use crate::redis::topology::{Topology, TopologyKind};

/// The replacement for text that may be a secret.
const HIDDEN: &str = "***";

/// The possible forms of `--store`, for error messages.
const FORMS: &str = "write `memory`, redis://HOST:PORT/DB or redis://USER:PASSWORD@HOST:PORT/DB (rediss:// with TLS) with \
                     %-escapes in user and password (%3F for a `?`), redis+unix:///PATH/OF/SOCKET?db=DB, \
                     redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME, or \
                     redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT";

/// A placeholder for the host in connection settings. The address of a node replaces it before a connection is opened,
/// so this name is never resolved.
const TEMPLATE_HOST: &str = "unknown.invalid";

const SENTINEL: &[&str] = &["master", "sentinel_user", "sentinel_password", "protocol"];
const SOCKET: &[&str] = &["db", "user", "pass", "protocol"];
const OTHERS: &[&str] = &["protocol"];

/// The value of `--store`. `Debug` and `Display` hide secrets: they print only the scheme, hosts, ports, database, socket
/// path and the name of the primary. They print only the scheme of a URL with a mistake, because a password may stand in
/// the wrong place.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub struct StoreUrl(String);

impl StoreUrl {
    /// Returns whether the store is the memory of the process.
    pub fn is_memory(&self) -> bool {
        self.0 == "memory"
    }

    /// Returns whether the URL may contain a password.
    pub(crate) fn may_have_password(&self) -> bool {
        self.0.contains('@') || self.0.contains("pass")
    }

    /// Refuses a URL with a wrong form or an unknown parameter. Makes no connection.
    ///
    /// # Errors
    ///
    /// Returns a description of the mistake, without secrets.
    pub fn check(&self) -> Result<(), String> {
        let parsed = Topology::parse(&self.0).map(drop);
        parsed.map_err(|error| format!("--store {:?} is not a store ({error}): {FORMS}", self.to_string()))
    }

    /// Returns the URL with its secrets.
    fn with_secrets(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for StoreUrl {
    fn from(url: T) -> StoreUrl {
        StoreUrl(url.into())
    }
}

impl FromStr for StoreUrl {
    type Err = Infallible;

    fn from_str(url: &str) -> Result<StoreUrl, Infallible> {
        Ok(StoreUrl(url.to_owned()))
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_string().fmt(f)
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_memory() {
            return f.write_str(&self.0);
        }
        let scheme = self.0.split_once("://").map_or("", |(scheme, _)| scheme);
        match Topology::parse(&self.0) {
            Ok(topology) => topology.write_public(scheme, f),
            Err(_) if is_scheme(scheme) => write!(f, "{scheme}://{HIDDEN}"),
            Err(_) => f.write_str(HIDDEN),
        }
    }
}

impl Topology {
    /// Parses a URL in one of these forms:
    ///
    /// - `redis://…`: one Redis at a fixed address.
    /// - `redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME`: the primary NAME of these Sentinels.
    ///   The parameters `sentinel_user` and `sentinel_password` are the credentials for the Sentinels themselves.
    /// - `redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT`: the Cluster of these nodes.
    ///
    /// # Errors
    ///
    /// Returns a description of the mistake if the URL is wrong. The description does not contain the password.
    pub fn parse(url: &str) -> Result<Topology, String> {
        let new = |kind, template: Endpoint| Topology {
            kind,
            node_template: template.clone(),
            template,
            master: String::new(),
            named: Vec::new(),
            learnt: Mutex::default(),
            views: Mutex::default(),
            is_without_majority: false,
            has_room: Sender::new(false),
        };
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let (scheme, kind, port) = match scheme.rsplit_once('-') {
            Some((scheme, "sentinel")) => (scheme, TopologyKind::Sentinel, 26_379),
            Some((scheme, "cluster")) => (scheme, TopologyKind::Cluster, 6_379),
            _ => {
                check_parameters(url, TopologyKind::Standalone)?;
                return Ok(new(TopologyKind::Standalone, Endpoint::new(parse_one(url)?)));
            }
        };
        check_parameters(url, kind)?;
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let parameter = |name: &str| {
            parameters.split('&').find_map(|parameter| parameter.strip_prefix(name)?.strip_prefix('='))
        };
        let (user, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
        let (hosts, db) = rest.split_once('/').unwrap_or((rest, ""));
        let at = |user: &str, host: &str, path: &str| {
            let separator = if user.is_empty() { "" } else { "@" };
            let user = escaped_user(user);
            parse_one(&format!("{scheme}://{user}{separator}{host}/{path}")).map(Endpoint::new)
        };
        let protocol = parameter("protocol").map_or_else(String::new, |value| format!("?protocol={value}"));
        let mut topology = new(kind, at(user, TEMPLATE_HOST, &format!("{db}{protocol}"))?);
        let (mut node_user, mut node_path) = (user.to_owned(), protocol);
        if kind == TopologyKind::Sentinel {
            let master = parameter("master").filter(|name| !name.is_empty());
            let master = master
                .ok_or("it does not name the primary: add ?master=NAME, with the name in `sentinel monitor`")?;
            master.clone_into(&mut topology.master);
            node_user = match (parameter("sentinel_user").unwrap_or_default(), parameter("sentinel_password")) {
                (user, None | Some("")) => user.to_owned(),
                (user, Some(password)) => format!("{user}:{password}"),
            };
            node_path.clear();
            topology.node_template = at(&node_user, TEMPLATE_HOST, "")?;
        } else if topology.template.info.redis_settings().db() != 0 {
            return Err(String::from("a Cluster has no other database than 0"));
        }
        for host in hosts.split(',') {
            topology.named.push(Node::new(at(&node_user, &with_port(host, port), &node_path)?));
        }
        Ok(topology)
    }

    /// Returns the topology of a store, whose credentials are also in files. Reads the files once.
    ///
    /// # Errors
    ///
    /// Returns a description of the mistake, without secrets, if the URL is wrong, if a file cannot be used, or if the URL
    /// does not need it.
    pub fn with_files(url: &StoreUrl, files: &CredentialFiles) -> Result<Topology, String> {
        let mut topology = Topology::parse(url.with_secrets())?;
        let has_sentinels = topology.kind == TopologyKind::Sentinel;
        let is_tls = topology.template.is_tls();
        let refusal = match files {
            _ if files.password.is_some() && topology.template.has_password() => {
                "--redis-password-file: --store contains a password too; remove it from there"
            }
            _ if files.sentinel_password.is_some() && !has_sentinels => {
                "--sentinel-password-file: --store names no Sentinels; leave it out"
            }
            _ if files.sentinel_password.is_some() && topology.node_template.has_password() => {
                "--sentinel-password-file: --store contains sentinel_password too; remove it from there"
            }
            _ if (files.authority.is_some() || files.certificate.is_some()) && !is_tls => {
                "--redis-ca, --redis-cert and --redis-key: --store does not use TLS; begin it with rediss"
            }
            _ => "",
        };
        if !refusal.is_empty() {
            return Err(refusal.to_owned());
        }
        let files = Arc::new(files.clone());
        let of_nodes = if has_sentinels { &files.sentinel_password } else { &files.password };
        topology.template = topology.template.with(files.password.as_ref(), &files);
        topology.node_template = topology.node_template.with(of_nodes.as_ref(), &files);
        for node in &mut topology.named {
            *node = Node::new(node.endpoint.with(of_nodes.as_ref(), &files));
        }
        for endpoint in [&topology.template, &topology.node_template] {
            endpoint.read().map_err(|error| error.to_string())?;
        }
        Ok(topology)
    }

    /// Writes the public parts of the URL.
    fn write_public(&self, scheme: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self.template.info.redis_settings();
        let has_user = settings.username().is_some() || settings.password().is_some();
        write!(f, "{scheme}://{}", if has_user { "***@" } else { "" })?;
        let db = settings.db();
        if let ConnectionAddr::Unix(path) = self.template.info.addr() {
            return write!(f, "{}?db={db}", path.display());
        }
        let named: Vec<String> = self.named.iter().map(|node| host_and_port(node.address())).collect();
        let hosts = if named.is_empty() { host_and_port(self.template.info.addr()) } else { named.join(",") };
        write!(f, "{hosts}/{db}")?;
        if self.kind == TopologyKind::Sentinel { write!(f, "?master={}", self.master) } else { Ok(()) }
    }
}

fn with_port(host: &str, port: u16) -> String {
    let behind_address = host.rsplit_once(']').map_or(host, |(_, behind)| behind);
    if behind_address.contains(':') { host.to_owned() } else { format!("{host}:{port}") }
}

fn host_and_port(address: &ConnectionAddr) -> String {
    match address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } if host.contains(':') => {
            format!("[{host}]:{port}")
        }
        address => address.to_string(),
    }
}

fn is_scheme(text: &str) -> bool {
    let (base, kind) = text.split_once('-').unwrap_or((text, ""));
    match kind {
        "" => ["redis", "rediss", "valkey", "valkeys", "redis+unix", "valkey+unix", "unix"].contains(&base),
        "sentinel" | "cluster" => ["redis", "rediss", "valkey", "valkeys"].contains(&base),
        _ => false,
    }
}

/// Refuses a fragment and unknown parameters. The most likely mistake is `?db=1` where the path names the database, as in
/// `/1`. An error names only parameters that some store has: another word may be a part of a password.
fn check_parameters(url: &str, kind: TopologyKind) -> Result<(), String> {
    if url.ends_with("#insecure") {
        return Err(String::from(
            "#insecure turns off the check of Redis' certificate, so anyone on the network could read the password: \
             leave it out, and name the authority of the certificate by --redis-ca",
        ));
    }
    if url.contains('#') {
        return Err(String::from("it has a `#`: write %23"));
    }
    let (place, parameters) = url.split_once('?').unwrap_or((url, ""));
    let is_socket = place.split(':').next().is_some_and(|scheme| scheme.ends_with("unix"));
    let known = match kind {
        TopologyKind::Sentinel => SENTINEL,
        TopologyKind::Standalone if is_socket => SOCKET,
        TopologyKind::Cluster | TopologyKind::Standalone => OTHERS,
    };
    for parameter in parameters.split('&').filter(|text| !text.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        if !known.contains(&name) {
            let is_of_others = [SENTINEL, SOCKET].iter().any(|names| names.contains(&name));
            let name = if is_of_others { format!("{name:?}") } else { String::from("a word") };
            return Err(format!(
                "it has {name} behind the `?`, which is not a known parameter here; known are {}",
                known.join(", ")
            ));
        }
        let is_public = ["db", "protocol", "master"].contains(&name);
        if is_public && !value.chars().all(|one| one.is_ascii_alphanumeric() || "._-".contains(one)) {
            return Err(format!("the value of {name:?} has other characters than A-Z a-z 0-9 . _ -"));
        }
    }
    Ok(())
}

/// Returns user and password with %-escapes for the characters that would end this part of a URL.
fn escaped_user(user: &str) -> String {
    let escape = |one: char| match one {
        '/' | '?' | '#' | '@' | '[' | ']' | '\\' => format!("%{:02X}", u32::from(one)),
        one => one.to_string(),
    };
    user.chars().map(escape).collect()
}

/// Parses the URL of one Redis. Its errors contain no part of the URL.
fn parse_one(url: &str) -> Result<ConnectionInfo, String> {
    let place = url.split_once("://").map_or("", |(_, place)| place);
    if place.is_empty() {
        return Err(String::from("it has no host or socket path"));
    }
    redis::IntoConnectionInfo::into_connection_info(url).map_err(|error| match error.detail() {
        // The detail quotes a part of the URL.
        Some(_) => String::from("it has a wrong parameter"),
        None => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(url: &str) -> String {
        StoreUrl::from(url).to_string()
    }

    #[test]
    fn every_scheme_of_redis_and_valkey_is_known() {
        for (schemes, place) in [
            (&["redis", "rediss", "valkey", "valkeys"][..], "x:1/2"),
            (&["redis+unix", "valkey+unix", "unix"], "/run/redis.sock"),
            (&["redis-sentinel", "rediss-sentinel", "valkey-sentinel", "valkeys-sentinel"], "x,y:1/2?master=im"),
            (&["redis-cluster", "rediss-cluster", "valkey-cluster", "valkeys-cluster"], "x,y:1"),
        ] {
            for scheme in schemes {
                StoreUrl::from(format!("{scheme}://{place}")).check().unwrap();
                assert_eq!(shown(&format!("{scheme}://{place}?wrong")), format!("{scheme}://***"));
            }
        }
    }

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        for (url, expected) in [
            ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
            ("redis://here", "redis://here:6379/0"),
            ("redis://[::1]:7000/", "redis://[::1]:7000/0"),
            ("rediss://user:secret@here:6379", "rediss://***@here:6379/0"),
            ("redis+unix:///run/redis?db=1&pass=sec@re/t?&user=x", "redis+unix://***@/run/redis?db=1"),
            (
                "redis-sentinel://u:secret@one,[::2]:1/0?master=im&sentinel_user=v&sentinel_password=s@e/c?r:et",
                "redis-sentinel://***@one:26379,[::2]:1/0?master=im",
            ),
            ("redis-cluster://u:sec%3Fret@one,two:1", "redis-cluster://***@one:6379,two:1/0"),
            ("memory", "memory"),
        ] {
            assert_eq!(shown(url), expected);
            assert_eq!(format!("{:?}", StoreUrl::from(url)), format!("{expected:?}"));
        }
    }

    #[test]
    fn a_secret_is_never_shown_wherever_in_a_url_it_stands() {
        for secret in
            ["secret", "s@secret", "s/secret", "s?secret", "s#secret", "s:secret", "1/secret", "1?secret"]
        {
            for url in [
                "redis://:S",
                "redis://me:S",
                "redis://S@here",
                "redis://S:@here",
                "redis://me:S@here",
                "redis://me:S@here:port",
                "redis://here/S",
                "redis://here#S",
                "redis://here?S",
                "redis://here?S=",
                "redis://here?auth=S",
                "redis://here?protocol=S",
                "redis+unix://S",
                "redis+unix:///x?pass=S",
                "redis+unix:///x?user=S",
                "redis+unix:///x?db=S",
                "redis+unix:///x?master=S",
                "redis-sentinel://me:S@one?master=im",
                "redis-sentinel://me:S@one,two",
                "redis-sentinel://one?master=im&sentinel_password=S",
                "redis-sentinel://one?master=im&sentinel_user=S",
                "redis-sentinel://one?sentinel_password=S&master=im&sentinel_user=me",
                "redis-cluster://me:S@one,two",
                "redis-cluster://one?pass=S",
                "redis://here,me:S@there",
                "postgres://me:S@here",
                "S://here",
                "S",
                "me:S@here",
            ] {
                // In these, `s@secret` is a password and a host.
                if secret == "s@secret" && ["redis://:S", "redis://me:S"].contains(&url) {
                    continue;
                }
                let url = StoreUrl::from(url.replace('S', secret));
                let error = url.check().err().unwrap_or_default();
                let texts = format!("{url} {url:?} {error}");
                assert!(!texts.contains("secret"), "{}: {texts}", url.0);
            }
        }
    }

    #[test]
    fn a_certificate_is_always_checked() {
        for url in
            ["rediss://here#insecure", "rediss-sentinel://here?master=im#insecure", "rediss-cluster://x#insecure"]
        {
            let error = StoreUrl::from(url).check().unwrap_err();
            assert!(error.contains("#insecure turns off") && error.contains("--redis-ca"), "{error}");
        }
    }

    #[test]
    fn reserved_characters_in_the_password_of_sentinels_belong_to_it() {
        let topology =
            Topology::parse("redis-sentinel://one?master=im&sentinel_user=v&sentinel_password=s@e/c?r%3Aet");
        let settings = topology.unwrap().node_template.info.redis_settings().clone();
        assert_eq!((settings.username(), settings.password()), (Some("v"), Some("s@e/c?r:et")));
    }
}
