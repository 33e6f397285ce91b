//! Checks the settings of a store in Redis.

use std::fmt;

use super::settings::Values;
use super::store_url::{check_store_url, without_password};
use super::{Config, ConfigError, Settings};
use crate::redis::{MAX_SLOTS, RedisOptions};

/// The longest namespace, in bytes.
const MAX_NAMESPACE_LENGTH: usize = 64;

/// The options of a store in Redis. Its debug output hides secrets in the URL.
pub struct RedisConfig(pub RedisOptions);

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        RedisOptions { url: without_password(&self.0.url), ..self.0.clone() }.fmt(f)
    }
}

impl Config {
    /// The options of the store in Redis, if the settings name one. They were `given`, and `values` has their defaults.
    pub(super) fn redis(&self, given: &Settings, values: Values) -> Result<Option<RedisConfig>, ConfigError> {
        if values.store == "memory" {
            return refuse_redis_settings(given).map(|()| None);
        }
        check_store_url(&values.store)?;
        check_namespace(&values.namespace)?;
        if let Some(state) = &self.state_file {
            return Err(ConfigError(format!(
                "--state {} belongs to the memory store: Redis keeps the wheel across restarts; leave it out",
                state.display()
            )));
        }
        if values.slots > MAX_SLOTS {
            return Err(ConfigError(format!(
                "--slots {} is too many for a ring in Redis: choose at most {MAX_SLOTS}, with a longer --tick if messages \
                 must wait longer",
                values.slots
            )));
        }
        Ok(Some(RedisConfig(RedisOptions {
            url: values.store,
            namespace: values.namespace,
            rings: values.rings,
            wheel: self.wheel,
            storm: self.storm,
            retention: self.retention,
            max_in_flight: self.max_in_flight,
            max_held_acks: values.max_held_acks,
            name: self.name.clone().unwrap_or_default(),
            never_lead: values.never_lead,
            expire_without_majority: values.expire_without_majority,
            lease: values.lease,
            outage_grace: values.outage_grace,
            catch_up_max_ticks: values.catch_up_max_ticks,
        })))
    }
}

fn refuse_redis_settings(given: &Settings) -> Result<(), ConfigError> {
    let given = [
        ("--rings", given.rings.is_some_and(|rings| rings != 1)),
        ("--never-lead", given.never_lead == Some(true)),
        ("--expire-without-majority", given.expire_without_majority == Some(true)),
        ("--namespace", given.namespace.is_some()),
        ("--lease", given.lease.is_some()),
        ("--outage-grace", given.outage_grace.is_some()),
        ("--catch-up-max-ticks", given.catch_up_max_ticks.is_some()),
        ("--max-held-acks", given.max_held_acks.is_some()),
    ];
    let Some((flag, _)) = given.iter().find(|(_, is_given)| *is_given) else { return Ok(()) };
    Err(ConfigError(format!(
        "{flag} belongs to a Redis store, and --store is memory: leave it out, or say --store redis://HOST:PORT/DB"
    )))
}

fn check_namespace(namespace: &str) -> Result<(), ConfigError> {
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    if (1..=MAX_NAMESPACE_LENGTH).contains(&namespace.len()) && namespace.bytes().all(is_legal) {
        return Ok(());
    }
    Err(ConfigError(format!(
        "--namespace {namespace:?} is not a namespace: use 1 to {MAX_NAMESPACE_LENGTH} of the characters A-Z a-z 0-9 _ . -"
    )))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn checked(settings: Settings) -> Result<RedisOptions, String> {
        let config = settings.check().map_err(|error| error.to_string())?;
        Ok(config.redis.expect("a Redis store was asked for").0)
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
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_limits() {
        let long = "n".repeat(65);
        for (settings, words) in [
            (Settings { rings: Some(65), ..redis() }, "--rings 65 is not possible: choose 1 to 64"),
            (Settings { rings: Some(0), ..redis() }, "--rings 0"),
            (Settings { lease: Some(Duration::from_millis(499)), ..redis() }, "choose 500ms to 60s"),
            (Settings { outage_grace: Some(Duration::from_secs(61)), ..redis() }, "--outage-grace 1m 1s"),
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
