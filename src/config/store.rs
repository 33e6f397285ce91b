//! Which store, and what belongs to a shared one alone.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::url::{shown_parameter, without_password};
use super::{ConfigError, Settings, at_least_one};
use crate::core::rings::MAX_RINGS;
use crate::core::tick::Wheel;
use crate::redis::{MAX_CATCH_UP, MAX_SLOTS, Topology, TopologyKind};

/// What the URL of a Redis store can begin with.
const SCHEMES: &[&str] = &[
    "redis",
    "rediss",
    "valkey",
    "valkeys",
    "redis+unix",
    "valkey+unix",
    "unix",
    "redis-sentinel",
    "rediss-sentinel",
    "valkey-sentinel",
    "valkeys-sentinel",
    "redis-cluster",
    "rediss-cluster",
    "valkey-cluster",
    "valkeys-cluster",
];

/// How the URL of a Redis is written that is not always at the same address.
const SEVERAL: &str = "redis-sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME, or \
                       redis-cluster://USER:PASSWORD@HOST:PORT,HOST:PORT";

/// The longest namespace, in bytes.
const MAX_NAMESPACE_LENGTH: usize = 64;

const RINGS: RangeInclusive<u16> = 1..=MAX_RINGS;
const LEASE: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(60);
const MAX_OUTAGE_GRACE: Duration = Duration::from_secs(60);
const CATCH_UP: RangeInclusive<u16> = 0..=MAX_CATCH_UP;

/// Where the wheel lives.
#[derive(Clone, Debug)]
pub enum StoreKind {
    /// In this process.
    Memory,
    /// In Redis, shared with other sidecars.
    Redis(SharedStore),
}

/// How a store that sidecars share is to be.
#[derive(Clone)]
pub struct SharedStore {
    /// Where it is. It may hold a password: [`without_password`] is what may be shown.
    pub url: String,
    /// What the names of its keys begin with.
    pub namespace: String,
    /// Its rings.
    pub rings: u16,
    /// Whether this sidecar leaves every ring to others.
    pub never_lead: bool,
    /// Whether ticks expire also while no majority confirms which Redis is the primary.
    pub expire_without_majority: bool,
    /// How long a lease lasts.
    pub lease: Duration,
    /// How long the pointer waits after an outage for the Acks that all sidecars hold.
    pub outage_grace: Duration,
    /// The most ticks that a new leader catches up.
    pub catch_up_max_ticks: u16,
    /// The most acknowledged messages held while the store is away.
    pub max_held_acks: u64,
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedStore")
            .field("url", &without_password(&self.url))
            .field("namespace", &self.namespace)
            .field("rings", &self.rings)
            .field("never_lead", &self.never_lead)
            .field("expire_without_majority", &self.expire_without_majority)
            .field("lease", &self.lease)
            .field("outage_grace", &self.outage_grace)
            .field("catch_up_max_ticks", &self.catch_up_max_ticks)
            .field("max_held_acks", &self.max_held_acks)
            .finish()
    }
}

/// What a URL says behind `?` and nobody reads is a mistake: above all the database, which is the path.
fn refuse_unknown_parameters(url: &str, kind: TopologyKind) -> Result<(), ConfigError> {
    let (place, parameters) = url.split_once('?').unwrap_or((url, ""));
    let parameters = parameters.split('#').next().unwrap_or_default();
    let is_socket = place.split(':').next().is_some_and(|scheme| scheme.ends_with("unix"));
    let known: &[&str] = match kind {
        TopologyKind::Sentinel => &["master", "sentinel_user", "sentinel_password", "protocol"],
        TopologyKind::Standalone if is_socket => &["db", "user", "pass", "protocol"],
        TopologyKind::Cluster | TopologyKind::Standalone => &["protocol"],
    };
    let is_known = |parameter: &&str| known.contains(&parameter.split('=').next().unwrap_or_default());
    match parameters.split('&').filter(|parameter| !parameter.is_empty()).find(|parameter| !is_known(parameter)) {
        None => Ok(()),
        Some(parameter) => Err(ConfigError(format!(
            "--store {:?} says {:?} behind the `?`, which nobody reads there: write redis://USER:PASSWORD@HOST:PORT/DB, \
             redis+unix:///PATH/OF/SOCKET?db=DB, {SEVERAL}; a `?` in a password is written %3F",
            without_password(url),
            shown_parameter(parameter)
        ))),
    }
}

impl Settings {
    pub(super) fn store(&self, wheel: Wheel) -> Result<StoreKind, ConfigError> {
        match self.store.as_deref().unwrap_or("memory") {
            "memory" => {
                self.refuse_what_is_shared()?;
                Ok(StoreKind::Memory)
            }
            url => {
                let known =
                    url.split_once("://").filter(|(scheme, place)| SCHEMES.contains(scheme) && !place.is_empty());
                if known.is_none() {
                    let shown = without_password(url);
                    return Err(ConfigError(format!(
                        "--store {shown:?} is not a store: use `memory`, or redis://HOST:PORT/DB (rediss:// with TLS, \
                         redis+unix:// over a socket), {SEVERAL}"
                    )));
                }
                // A URL that cannot be read is to be known before a connection is tried.
                let place = Topology::parse(url).map_err(|error| {
                    ConfigError(format!(
                        "--store {:?} cannot be read ({error}): write redis://USER:PASSWORD@HOST:PORT/DB (rediss:// with \
                         TLS), with %-escapes in user and password, redis+unix:///PATH/OF/SOCKET?db=DB, {SEVERAL}",
                        without_password(url)
                    ))
                })?;
                refuse_unknown_parameters(url, place.kind())?;
                self.shared(url, wheel).map(StoreKind::Redis)
            }
        }
    }

    fn refuse_what_is_shared(&self) -> Result<(), ConfigError> {
        let given = [
            ("--rings", self.rings.is_some_and(|rings| rings != 1)),
            ("--never-lead", self.never_lead == Some(true)),
            ("--expire-without-majority", self.expire_without_majority == Some(true)),
            ("--namespace", self.namespace.is_some()),
            ("--lease", self.lease.is_some()),
            ("--outage-grace", self.outage_grace.is_some()),
            ("--catch-up-max-ticks", self.catch_up_max_ticks.is_some()),
            ("--max-held-acks", self.max_held_acks.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((flag, _)) => Err(ConfigError(format!(
                "{flag} belongs to a Redis store, and --store is memory: leave it out, or say --store \
                 redis://HOST:PORT/DB"
            ))),
        }
    }

    fn shared(&self, url: &str, wheel: Wheel) -> Result<SharedStore, ConfigError> {
        if let Some(state) = &self.state {
            return Err(ConfigError(format!(
                "--state {} belongs to the memory store: Redis keeps the wheel across restarts; leave it out",
                state.display()
            )));
        }
        let slots = wheel.slots();
        if slots > MAX_SLOTS {
            return Err(ConfigError(format!(
                "--slots {slots} is too many for a ring in Redis: choose at most {MAX_SLOTS}, with a longer \
                 --tick if messages must wait longer"
            )));
        }
        Ok(SharedStore {
            url: url.to_owned(),
            namespace: self.checked_namespace()?,
            rings: within("--rings", self.rings.unwrap_or(1), &RINGS)?,
            never_lead: self.never_lead == Some(true),
            expire_without_majority: self.expire_without_majority == Some(true),
            lease: within_time("--lease", self.lease.unwrap_or(Duration::from_secs(3)), &LEASE)?,
            outage_grace: within_time(
                "--outage-grace",
                self.outage_grace.unwrap_or(Duration::from_secs(2)),
                &(Duration::ZERO..=MAX_OUTAGE_GRACE),
            )?,
            catch_up_max_ticks: within("--catch-up-max-ticks", self.catch_up_max_ticks.unwrap_or(5), &CATCH_UP)?,
            max_held_acks: at_least_one("--max-held-acks", self.max_held_acks, 1_000_000)?,
        })
    }

    fn checked_namespace(&self) -> Result<String, ConfigError> {
        let namespace = self.namespace.as_deref().unwrap_or("ackwheel");
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
        if (1..=MAX_NAMESPACE_LENGTH).contains(&namespace.len()) && namespace.bytes().all(legal) {
            return Ok(namespace.to_owned());
        }
        Err(ConfigError(format!(
            "--namespace {namespace:?} is not a namespace: use 1 to {MAX_NAMESPACE_LENGTH} of the characters A-Z a-z \
             0-9 _ . -"
        )))
    }
}

fn within<T: PartialOrd + fmt::Display>(
    flag: &str,
    given: T,
    range: &RangeInclusive<T>,
) -> Result<T, ConfigError> {
    if range.contains(&given) {
        return Ok(given);
    }
    let (least, most) = (range.start(), range.end());
    Err(ConfigError(format!("{flag} {given} is not possible: choose {least} to {most}")))
}

fn within_time(flag: &str, given: Duration, range: &RangeInclusive<Duration>) -> Result<Duration, ConfigError> {
    if range.contains(&given) {
        return Ok(given);
    }
    let (least, most) = (range.start(), range.end());
    Err(ConfigError(format!("{flag} {given:?} is not possible: choose {least:?} to {most:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(settings: Settings) -> Result<SharedStore, String> {
        match settings.check().map_err(|error| error.to_string())?.store {
            StoreKind::Redis(shared) => Ok(shared),
            StoreKind::Memory => panic!("a Redis store was asked for"),
        }
    }

    fn redis() -> Settings {
        Settings { store: Some("redis://127.0.0.1:6379/0".into()), ..Settings::default() }
    }

    #[test]
    fn silence_gives_the_defaults_of_a_shared_store() {
        let shared = checked(redis()).unwrap();
        assert_eq!((shared.namespace.as_str(), shared.rings, shared.never_lead), ("ackwheel", 1, false));
        assert_eq!((shared.lease, shared.outage_grace), (Duration::from_secs(3), Duration::from_secs(2)));
        assert_eq!((shared.catch_up_max_ticks, shared.max_held_acks), (5, 1_000_000));
        for scheme in SCHEMES {
            let place = match scheme.rsplit_once(['+', '-']) {
                Some((_, "sentinel")) => "x,y:1/2?master=im",
                Some((_, "cluster")) => "x,y:1",
                _ if scheme.ends_with("unix") => "/run/redis.sock",
                _ => "x:1/2",
            };
            let url = format!("{scheme}://{place}");
            assert_eq!(checked(Settings { store: Some(url.clone()), ..redis() }).unwrap().url, url);
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_limits() {
        let long = "n".repeat(65);
        for (settings, words) in [
            (Settings { rings: Some(65), ..redis() }, "--rings 65 is not possible: choose 1 to 64"),
            (Settings { rings: Some(0), ..redis() }, "--rings 0"),
            (Settings { lease: Some(Duration::from_millis(499)), ..redis() }, "choose 500ms to 60s"),
            (Settings { outage_grace: Some(Duration::from_secs(61)), ..redis() }, "--outage-grace 61s"),
            (Settings { catch_up_max_ticks: Some(17), ..redis() }, "choose 0 to 16"),
            (Settings { max_held_acks: Some(0), ..redis() }, "--max-held-acks 0"),
            (Settings { namespace: Some("a b".into()), ..redis() }, "\"a b\""),
            (Settings { namespace: Some(String::new()), ..redis() }, "1 to 64"),
            (Settings { namespace: Some(long), ..redis() }, "1 to 64"),
            (Settings { slots: Some(241), ..redis() }, "at most 240"),
            (Settings { state: Some("file".into()), ..redis() }, "--state file"),
            (Settings { store: Some("redis://".into()), ..redis() }, "redis://HOST:PORT/DB"),
            (Settings { store: Some("redis://h:notaport".into()), ..redis() }, "redis://h:***"),
            (Settings { store: Some("redis://h:notaport".into()), ..redis() }, "HOST:PORT/DB"),
            (Settings { store: Some("redis://h/five".into()), ..redis() }, "database number"),
            (Settings { store: Some("redis+unix://socket".into()), ..redis() }, "redis+unix:///PATH"),
            (Settings { store: Some("redis-sentinel://x/0".into()), ..redis() }, "?master=NAME"),
            (
                Settings { store: Some("redis-sentinel://x/0?master=im&name=im".into()), ..redis() },
                "\"name=***\" behind",
            ),
            (Settings { store: Some("redis-cluster://x/1".into()), ..redis() }, "no other database than 0"),
            (Settings { store: Some("redis-cluster://x?master=im".into()), ..redis() }, "\"master=im\" behind"),
            (Settings { store: Some("redis-sentinel://x,/0?master=im".into()), ..redis() }, "HOST:PORT,HOST:PORT"),
            (Settings { lease: Some(Duration::from_secs(3)), ..Settings::default() }, "--lease belongs"),
            (Settings { outage_grace: Some(Duration::ZERO), ..Settings::default() }, "--outage-grace belongs"),
            (Settings { catch_up_max_ticks: Some(5), ..Settings::default() }, "--catch-up-max-ticks belongs"),
            (Settings { max_held_acks: Some(9), ..Settings::default() }, "--max-held-acks belongs"),
            (Settings { rings: Some(2), ..Settings::default() }, "--rings belongs to a Redis store"),
            (Settings { never_lead: Some(true), ..Settings::default() }, "--never-lead belongs"),
            (
                Settings { expire_without_majority: Some(true), ..Settings::default() },
                "--expire-without-majority belongs",
            ),
            (Settings { namespace: Some("x".into()), ..Settings::default() }, "--namespace belongs"),
        ] {
            let error = checked(settings).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
