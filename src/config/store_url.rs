//! Checks the URL of a Redis store, and hides its secrets in logs and errors.

use std::borrow::Cow;

use super::settings::ConfigError;
use crate::redis::{Topology, TopologyKind};

/// The replacement for text that may be a secret.
const HIDDEN: &str = "***";

/// The possible forms of `--store`, for error messages.
const FORMS: &str = "write `memory`, redis://HOST:PORT/DB or redis://USER:PASSWORD@HOST:PORT/DB (rediss:// with TLS) with \
                     %-escapes in user and password (%3F for a `?`), redis+unix:///PATH/OF/SOCKET?db=DB, \
                     redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME, or \
                     redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT";

/// Refuses a URL with a wrong form or an unknown parameter. Makes no connection.
pub(super) fn check_store_url(url: &str) -> Result<(), ConfigError> {
    let wrong = |why: String| ConfigError(format!("--store {:?} {why}: {FORMS}", without_password(url)));
    let topology = match url.split_once("://") {
        Some((_, place)) if !place.is_empty() => Topology::parse(url),
        _ => Err(String::from("it has no host or socket path")),
    };
    let topology = topology.map_err(|error| wrong(format!("is not a store ({error})")))?;
    // Refuse unknown parameters. The most likely mistake is `?db=1` where the path names the database, as in `/1`.
    let (place, parameters) = url.split_once('?').unwrap_or((url, ""));
    let is_socket = place.split(':').next().is_some_and(|scheme| scheme.ends_with("unix"));
    let known: &[&str] = match topology.kind {
        TopologyKind::Sentinel => &["master", "sentinel_user", "sentinel_password", "protocol"],
        TopologyKind::Standalone if is_socket => &["db", "user", "pass", "protocol"],
        TopologyKind::Cluster | TopologyKind::Standalone => &["protocol"],
    };
    let is_unknown = |parameter: &&str| !known.contains(&parameter.split('=').next().unwrap_or_default());
    let parameters = parameters.split('#').next().unwrap_or_default();
    match parameters.split('&').filter(|text| !text.is_empty()).find(is_unknown) {
        None => Ok(()),
        Some(unknown) => {
            let unknown = shown_parameter(unknown, parameters);
            Err(wrong(format!("has {unknown:?} behind the `?`, which is not a known parameter")))
        }
    }
}

/// Returns a URL with `***` in place of each part that may be a secret. A password may stand in the wrong place. So a
/// user name without a password is also hidden, and a port or database that is not a number.
pub fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://").filter(|(scheme, _)| is_word(scheme, "+-")) else {
        return HIDDEN.to_owned();
    };
    let (user, rest) = rest.rsplit_once('@').map_or((None, rest), |(user, rest)| (Some(user), rest));
    let (place, parameters) = rest.split_once('?').unwrap_or((rest, ""));
    let user = user.map(|user| shown_user(user) + "@").unwrap_or_default();
    let place = match place {
        path if !scheme.ends_with("unix") => shown_hosts(path),
        path if path.starts_with('/') && is_word(path, "/._-") => path.to_owned(),
        _ => HIDDEN.to_owned(),
    };
    let shown: Vec<String> = parameters
        .split('&')
        .filter(|parameter| !parameter.is_empty())
        .map(|parameter| shown_parameter(parameter, parameters))
        .collect();
    let mark = if shown.is_empty() { "" } else { "?" };
    format!("{scheme}://{user}{place}{mark}{}", shown.join("&"))
}

/// Returns `parameter`, which is one of the parameters in `all`, with `***` in place of each part that may be a secret.
/// The value of an unknown parameter may be a password or a part of one.
fn shown_parameter(parameter: &str, all: &str) -> String {
    let Some((name, value)) = parameter.split_once('=') else { return HIDDEN.to_owned() };
    let is_public = match name {
        "db" | "protocol" | "master" => true,
        "user" => has_value(all, "pass"),
        "sentinel_user" => has_value(all, "sentinel_password"),
        _ => false,
    };
    match value {
        _ if is_public && is_word(value, "._-") => parameter.to_owned(),
        "" => HIDDEN.to_owned(),
        _ if is_name(name) => format!("{name}={HIDDEN}"),
        _ => HIDDEN.to_owned(),
    }
}

fn has_value(parameters: &str, name: &str) -> bool {
    let mut values = parameters.split('&').filter_map(|parameter| parameter.strip_prefix(name)?.strip_prefix('='));
    values.any(|value| !value.is_empty())
}

/// Returns the user and password of a URL, which stand before the `@`, with `***` in place of each part that may be a
/// secret.
fn shown_user(user: &str) -> String {
    match user.split_once(':') {
        Some((user, password)) if !password.is_empty() && is_word(user, "._-") => format!("{user}:{HIDDEN}"),
        Some(_) => format!(":{HIDDEN}"),
        None => HIDDEN.to_owned(),
    }
}

/// Returns the hosts with their ports, and the database, with `***` in place of each part that may be a secret.
fn shown_hosts(place: &str) -> String {
    let (hosts, database) = place.split_once('/').map_or((place, None), |(hosts, db)| (hosts, Some(db)));
    let hosts: Vec<Cow<'_, str>> = hosts.split(',').map(shown_host).collect();
    let database = database.map(|database| if is_number(database) { database } else { HIDDEN });
    database.map_or_else(|| hosts.join(","), |database| hosts.join(",") + "/" + database)
}

fn shown_host(text: &str) -> Cow<'_, str> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = address.map_or(is_word(host, "._-"), |address| is_word(address, ":.%"));
    match port {
        _ if !is_host => Cow::Borrowed(HIDDEN),
        Some(port) if !is_number(port) => Cow::Owned(format!("{host}:{HIDDEN}")),
        _ => Cow::Borrowed(text),
    }
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'_')
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether a text consists only of ASCII letters, ASCII digits and the characters in `others`.
fn is_word(text: &str, others: &str) -> bool {
    text.chars().all(|character| character.is_ascii_alphanumeric() || others.contains(character))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    #[test]
    fn every_scheme_of_redis_and_valkey_is_known() {
        for (schemes, place) in [
            (&["redis", "rediss", "valkey", "valkeys"][..], "x:1/2"),
            (&["redis+unix", "valkey+unix", "unix"], "/run/redis.sock"),
            (&["redis-sentinel", "rediss-sentinel", "valkey-sentinel", "valkeys-sentinel"], "x,y:1/2?master=im"),
            (&["redis-cluster", "rediss-cluster", "valkey-cluster", "valkeys-cluster"], "x,y:1"),
        ] {
            for scheme in schemes {
                check_store_url(&format!("{scheme}://{place}")).unwrap();
            }
        }
    }

    #[test]
    fn a_secret_is_never_shown_wherever_in_a_url_it_stands() {
        for (url, shown) in [
            ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
            ("redis://here", "redis://here"),
            ("redis://[::1]:7000/", "redis://[::1]:7000/"),
            ("redis://secret@here", "redis://***@here"),
            ("redis://secret:@here", "redis://:***@here"),
            ("redis://:secret", "redis://:***"),
            ("redis://me:secret", "redis://me:***"),
            ("redis://here/secret", "redis://here/***"),
            ("redis://here#secret", "redis://***"),
            ("rediss://user:secret@here:6379", "rediss://user:***@here:6379"),
            ("redis://:se:c@ret@here/1?protocol=resp3", "redis://:***@here/1?protocol=resp3"),
            ("redis://:sec/ret@here", "redis://:***@here"),
            ("redis+unix:///run/redis?db=1&pass=secret&user=x", "redis+unix:///run/redis?db=1&pass=***&user=x"),
            ("redis+unix:///run/redis?user=secret", "redis+unix:///run/redis?user=***"),
            ("redis+unix://secret", "redis+unix://***"),
            (
                "redis-sentinel://u:secret@one,two:1/0?master=im&sentinel_user=v&sentinel_password=secret",
                "redis-sentinel://u:***@one,two:1/0?master=im&sentinel_user=v&sentinel_password=***",
            ),
            (
                "redis-sentinel://one,[::2]:1?master=im&sentinel_user=secret",
                "redis-sentinel://one,[::2]:1?master=im&sentinel_user=***",
            ),
            ("redis://here:6379?auth=secret", "redis://here:6379?auth=***"),
            ("redis://here:6379?secret", "redis://here:6379?***"),
            ("redis://here:6379?secret=", "redis://here:6379?***"),
            ("redis://here:6379?db=1#secret", "redis://here:6379?db=***"),
            ("me:secret@here", "***"),
            ("secret", "***"),
        ] {
            assert_eq!(without_password(url), shown);
        }
        let settings = Settings { store: Some("redis://:secret@here".into()), ..Settings::default() };
        let config = format!("{:?}", settings.check().unwrap());
        assert!(config.contains("***@here") && !config.contains("secret"), "{config}");
        for (wrong, shown) in [
            ("postgres://me:secret@here", "postgres://me:***@here"),
            ("redis://me:secret@here:port", "redis://me:***@here:***"),
            ("secret", "--store \"***\""),
        ] {
            let settings = Settings { store: Some(wrong.into()), ..Settings::default() };
            let error = settings.check().unwrap_err().to_string();
            assert!(error.contains(shown) && !error.contains("secret"), "{error}");
        }
    }
}
