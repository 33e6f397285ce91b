//! Combines settings from flags, environment variables and a file, checks them, and turns them into a configuration.
//!
//! A flag overrides its environment variable, the variable overrides the file, and the file overrides the default.

mod listen_address;
mod memory_limits;
mod settings;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::Semaphore;

use self::listen_address::address;
use self::settings::Values;
pub use self::settings::{ConfigError, MAX_DURATION, Settings};
use crate::admin::AllowedHosts;
use crate::core::{self, GroupName, Retention, StormRule, Wheel};
use crate::logging::{self, LogFormat};
use crate::memory::{self, JournalOptions, SyncPolicy};
use crate::process::files;
use crate::redis::{CredentialFiles, MAX_SLOTS, RedisOptions, Topology};
use crate::server::{Access, Certificate, ServerOptions};

/// The checked settings of a sidecar.
#[derive(Debug)]
pub struct Config {
    /// The TCP address for logic nodes.
    pub listen: SocketAddr,
    /// The Unix socket for logic nodes.
    pub socket: Option<PathBuf>,
    /// The TCP address of the RESP protocol.
    pub resp: Option<SocketAddr>,
    /// The HTTP address of metrics, probes and the status.
    pub admin: SocketAddr,
    /// The host names under which the admin address may be asked.
    pub admin_hosts: AllowedHosts,
    /// The options of the Redis store, or `None` for the memory store. If [`Config::name`] is `None`, the name in these
    /// options is empty.
    pub redis: Option<RedisConfig>,
    /// The name of this sidecar. With `None`, the sidecar makes a name from its host and port.
    pub name: Option<String>,
    /// The number of slots of each ring, and the length of a tick.
    pub wheel: Wheel,
    /// The limits at which a tick counts as a storm. A storm is a tick in which suspiciously many messages time out.
    pub storm: StormRule,
    /// How long the outbox keeps a batch, and how many messages it keeps.
    pub retention: Retention,
    /// The time after which an unacknowledged batch is delivered again.
    pub redeliver_after: Duration,
    /// The maximum number of messages in flight.
    pub max_in_flight: u64,
    /// The journal that keeps the memory store across restarts and crashes.
    pub journal: Option<JournalOptions>,
    /// The tokens that clients may present.
    pub access: Access,
    /// The certificate of the TCP listener.
    pub certificate: Option<Certificate>,
    /// The limits and timeouts of connections.
    pub server: ServerOptions,
    /// The filter of the log.
    pub log: String,
    /// The format of the log.
    pub log_format: LogFormat,
    /// The maximum time of a drain.
    pub drain_timeout: Duration,
    /// The number of threads that serve connections.
    pub threads: usize,
    /// Notes about defaults that follow the memory that this process may use.
    pub notes: Vec<String>,
    /// Warnings about settings that are possible but unwise.
    pub warnings: Vec<String>,
}

/// The options of a store in Redis.
#[derive(Debug)]
pub struct RedisConfig(pub RedisOptions);

/// The maximum length of the name of a sidecar, in bytes.
const MAX_NAME_LENGTH: usize = 128;

impl Settings {
    /// Checks every setting. Also reads the files of the token and the certificate.
    ///
    /// # Errors
    ///
    /// If a setting is not possible, or one of these files cannot be used. The error names the first wrong setting and
    /// the remedy.
    pub fn check(self) -> Result<Config, ConfigError> {
        let mut values = self.values()?;
        let (notes, too_much) = values.fit_into_cgroup(&self);
        if values.journal.is_none() && values.journal_sync != SyncPolicy::None {
            return Err(ConfigError(String::from(
                "--journal-sync says when a journal is synced: name its folder with --journal, or leave it out",
            )));
        }
        logging::filter(&values.log).map_err(ConfigError)?;
        let wheel = Wheel::new(values.slots, values.tick)
            .map_err(|error| ConfigError(format!("--slots and --tick: {error}")))?;
        let third_of_ring = wheel.ticks(u64::from(wheel.slots())) / 3;
        let mut config = Config {
            listen: address("--listen", &values.listen)?,
            socket: checked_path("--socket", values.socket.as_ref())?,
            resp: values.resp.as_deref().map(|resp| address("--resp", resp)).transpose()?,
            admin: address("--admin", &values.admin)?,
            admin_hosts: values.admin_hosts()?,
            redis: None,
            name: values.name()?,
            wheel,
            storm: StormRule { min: values.storm_min, share: values.storm_share },
            retention: Retention { time: values.outbox_retention, max_ids: values.outbox_max_ids },
            redeliver_after: values.redeliver_after,
            max_in_flight: values.max_in_flight,
            journal: checked_path("--journal", values.journal.as_ref())?
                .map(|folder| JournalOptions { folder, sync: values.journal_sync }),
            access: values.access()?,
            certificate: values.certificate()?,
            server: ServerOptions {
                max_frame_length: values.max_frame_length,
                max_connections: values.max_connections.min(Semaphore::MAX_PERMITS),
                hello_timeout: values.hello_timeout,
                ping_interval: third_of_ring.clamp(Duration::from_secs(1), Duration::from_secs(10)),
                max_queued_bytes: values.max_queued_bytes,
                max_connection_memory: values.max_connection_memory,
            },
            log: values.log.clone(),
            log_format: values.log_format,
            drain_timeout: values.drain_timeout,
            threads: values.threads.into(),
            notes,
            warnings: too_much.into_iter().collect(),
        };
        let insecure = values.insecure;
        config.warnings.extend(values.exposed_secrets());
        config.redis = config.redis(&self, values)?;
        config.check_exposure(insecure)?;
        Ok(config)
    }
}

impl Values {
    fn name(&self) -> Result<Option<String>, ConfigError> {
        let is_legal =
            |name: &str| (1..=MAX_NAME_LENGTH).contains(&name.len()) && !name.contains(char::is_control);
        match &self.name {
            Some(name) if !is_legal(name) => Err(ConfigError(format!(
                "--name {name:?} is not a name: use 1 to {MAX_NAME_LENGTH} bytes without control characters"
            ))),
            name => Ok(name.clone()),
        }
    }

    fn admin_hosts(&self) -> Result<AllowedHosts, ConfigError> {
        AllowedHosts::parse(self.admin_host.as_deref().unwrap_or_default()).map_err(|name| {
            ConfigError(format!(
                "--admin-host {name:?} is not a host name: write names without a port, as in \
                 ackwheel.example.com,metrics.example.com"
            ))
        })
    }

    fn access(&self) -> Result<Access, ConfigError> {
        if self.tls_client_names.is_some() && self.tls_client_ca.is_none() {
            return Err(ConfigError("--tls-client-names needs --tls-client-ca: give both, or neither".into()));
        }
        Access::new(self.token_file.clone(), self.tls_client_names.clone()).map_err(ConfigError)
    }

    /// Returns a warning for each file with a secret that other users can read.
    fn exposed_secrets(&self) -> Vec<String> {
        let secrets = [
            ("--token-file", &self.token_file),
            ("--tls-key", &self.tls_key),
            ("--redis-password-file", &self.redis_password_file),
            ("--sentinel-password-file", &self.sentinel_password_file),
            ("--redis-key", &self.redis_key),
        ];
        secrets.into_iter().filter_map(|(flag, path)| files::exposure(flag, path.as_ref()?)).collect()
    }

    fn certificate(&self) -> Result<Option<Certificate>, ConfigError> {
        match (&self.tls_cert, &self.tls_key) {
            (None, None) if self.tls_client_ca.is_some() => Err(ConfigError(String::from(
                "--tls-client-ca needs TLS: give --tls-cert and --tls-key too, or leave it out",
            ))),
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => {
                let flags = match self.tls_client_ca {
                    None => "--tls-cert and --tls-key",
                    Some(_) => "--tls-cert, --tls-key and --tls-client-ca",
                };
                Certificate::files(certificate.clone(), key.clone(), self.tls_client_ca.clone())
                    .map(Some)
                    .map_err(|error| ConfigError(format!("{flags}: {error}")))
            }
            _ => Err(ConfigError(String::from("--tls-cert and --tls-key belong together: give both, or neither"))),
        }
    }
}

impl Values {
    fn redis_files(&self) -> Result<CredentialFiles, ConfigError> {
        let certificate = match (&self.redis_cert, &self.redis_key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
            _ => {
                let text = "--redis-cert and --redis-key belong together: give both, or neither";
                return Err(ConfigError(text.to_owned()));
            }
        };
        Ok(CredentialFiles {
            password: self.redis_password_file.clone(),
            sentinel_password: self.sentinel_password_file.clone(),
            authority: self.redis_ca.clone(),
            certificate,
        })
    }
}

impl Config {
    /// Returns the options of the Redis store, or `None` for the memory store. `given` contains only the settings that
    /// the user has given. `values` also contains the defaults.
    fn redis(&self, given: &Settings, values: Values) -> Result<Option<RedisConfig>, ConfigError> {
        if values.store.is_memory() {
            return refuse_redis_settings(given).map(|()| None);
        }
        values.store.check().map_err(ConfigError)?;
        let files = values.redis_files()?;
        Topology::with_files(&values.store, &files).map_err(ConfigError)?;
        // A namespace must follow the rule for group names, because both are parts of Redis keys.
        let namespace = &values.namespace;
        if namespace.parse::<GroupName>().is_err() {
            return Err(ConfigError(format!(
                "--namespace {namespace:?} is not a namespace: use 1 to {} of the characters A-Z a-z 0-9 _ . -",
                core::MAX_NAME_LENGTH
            )));
        }
        if let Some(journal) = &self.journal {
            return Err(ConfigError(format!(
                "--journal {} belongs to the memory store: Redis keeps the wheel across restarts; leave it out",
                journal.folder.display()
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
            files,
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

    /// Refuses a TCP listener that other hosts can reach, if clients need neither a token nor a certificate of their own.
    /// With `insecure`, only warns. Also collects the other warnings about settings.
    fn check_exposure(&mut self, insecure: bool) -> Result<(), ConfigError> {
        let Config { listen, resp, admin, .. } = *self;
        self.warnings.extend(self.certificate.as_ref().and_then(Certificate::untimely));
        self.warnings.extend(self.access.weak_tokens());
        let has_client_ca = self.certificate.as_ref().is_some_and(Certificate::requires_client_certificate);
        let reachable = [("--listen", Some(listen)), ("--resp", resp)];
        let reachable = reachable.into_iter().filter_map(|(flag, address)| Some((flag, address?)));
        for (flag, address) in reachable.filter(|(_, address)| !address.ip().is_loopback()) {
            if self.access.requires_token() || has_client_ca {
                let text = "has no TLS: its tokens can be read on the path; give --tls-cert, or use 127.0.0.1";
                self.warnings.extend(self.certificate.is_none().then(|| format!("{flag} {address} {text}")));
                continue;
            }
            if !insecure {
                return Err(ConfigError(format!(
                    "{flag} {address} lets anyone on the network add and acknowledge messages: give --token-file or \
                     --tls-client-ca (--tls-cert alone lets every client in), or listen on 127.0.0.1, or give --insecure \
                     if you trust everyone on the network"
                )));
            }
            self.warnings.push(format!(
                "--insecure: anyone who reaches {address} can add and acknowledge messages; give --token-file or \
                 --tls-client-ca if that is not meant"
            ));
        }
        if !admin.ip().is_loopback() {
            self.warnings.push(format!(
                "--admin {admin} shows metrics and status to anyone who can reach it, and changes nothing; make sure \
                 that only trusted hosts can reach it"
            ));
        }
        let (tick, max_in_flight) = (self.wheel.tick_length(), self.max_in_flight);
        let needed = memory::expiry_time(max_in_flight);
        if self.redis.is_none() && needed > tick {
            self.warnings.push(format!(
                "--tick {tick:?} is too short for --max-in-flight {max_in_flight}: with so many messages in flight, \
                 expiring a tick can take {needed:?}, timeouts come late, and every deadline is shifted again and again; \
                 choose --tick {}ms or longer, or --max-in-flight {} or less",
                needed.as_nanos().div_ceil(1_000_000),
                memory::most_kept(tick)
            ));
        }
        Ok(())
    }
}

fn refuse_redis_settings(given: &Settings) -> Result<(), ConfigError> {
    let given = [
        ("--rings", given.rings.is_some_and(|rings| rings != 1)),
        ("--never-lead", given.never_lead == Some(true)),
        ("--expire-without-majority", given.expire_without_majority == Some(true)),
        ("--namespace", given.namespace.is_some()),
        ("--redis-password-file", given.redis_password_file.is_some()),
        ("--sentinel-password-file", given.sentinel_password_file.is_some()),
        ("--redis-ca", given.redis_ca.is_some()),
        ("--redis-cert", given.redis_cert.is_some()),
        ("--redis-key", given.redis_key.is_some()),
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

/// Returns the path, if it is set. Refuses an empty path. An empty path can only come from the configuration file: in
/// flags and environment variables, it is refused earlier.
fn checked_path(flag: &str, path: Option<&PathBuf>) -> Result<Option<PathBuf>, ConfigError> {
    if path.is_some_and(|path| path.as_os_str().is_empty()) {
        return Err(ConfigError(format!("{flag} is empty: write the path of a file, or leave it out")));
    }
    Ok(path.cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(settings: Settings) -> String {
        settings.check().expect_err("a wrong setting").to_string()
    }

    #[test]
    fn silence_gives_the_defaults() {
        let config = Settings::default().check().unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:7415");
        assert_eq!((config.wheel.slots(), config.wheel.tick_ms()), (15, 1_000));
        assert_eq!(config.server.ping_interval, Duration::from_secs(5));
        assert!(config.warnings.is_empty());
    }

    #[test]
    fn a_tick_that_is_too_short_for_all_messages_in_flight_is_warned_of_with_both_remedies() {
        let warnings = |tick_ms, max_in_flight| {
            let tick = Some(Duration::from_millis(tick_ms));
            Settings { tick, max_in_flight: Some(max_in_flight), ..Settings::default() }.check().unwrap().warnings
        };
        let warned = warnings(10, 20_000_000);
        assert_eq!(warned.len(), 1, "{warned:?}");
        for words in ["--tick 10ms", "--max-in-flight 20000000", "--tick 80ms", "--max-in-flight 2500000"] {
            assert!(warned[0].contains(words), "{words}: {warned:?}");
        }
        assert!(warnings(80, 20_000_000).is_empty() && warnings(10, 2_500_000).is_empty());
        let redis = Settings {
            store: Some("redis://127.0.0.1".into()),
            tick: Some(Duration::from_millis(10)),
            max_in_flight: Some(u64::MAX),
            ..Settings::default()
        };
        assert!(redis.check().unwrap().warnings.is_empty(), "Redis has a set for each tick");
    }

    #[test]
    fn a_flag_comes_before_the_file() {
        let file: Settings = toml::from_str("slots = 5\ntick = \"200ms\"").unwrap();
        let flags = Settings { slots: Some(7), ..Settings::default() };
        let config = flags.or(file).check().unwrap();
        assert_eq!((config.wheel.slots(), config.wheel.tick_ms()), (7, 200));
    }

    #[test]
    fn errors_name_the_value_and_the_remedy() {
        let listen = Settings { listen: Some("0.0.0.0:0".into()), ..Settings::default() };
        let error = error_of(listen);
        assert!(error.contains("0.0.0.0:0") && error.contains("--token-file"), "{error}");
        let error = error_of(Settings { slots: Some(0), ..Settings::default() });
        assert!(error.contains("0 slots") && error.contains("15 is usual"), "{error}");
        let error = error_of(Settings { storm_share: Some(1.5), ..Settings::default() });
        assert!(error.contains("1.5") && error.contains("0 to 1"), "{error}");
        let error = toml::from_str::<Settings>("tik = \"1s\"").unwrap_err().to_string();
        assert!(error.contains("tik") && error.contains("tick"), "{error}");
    }

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
        for (settings, words) in vec![
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
            (Settings { journal: Some("folder".into()), ..redis() }, "--journal folder"),
            (Settings { store: Some("redis://".into()), ..redis() }, "redis://HOST:PORT/DB"),
            (Settings { store: Some("redis://h:notaport".into()), ..redis() }, "redis://***"),
            (Settings { store: Some("redis://h:notaport".into()), ..redis() }, "HOST:PORT/DB"),
            (Settings { store: Some("redis://h/five".into()), ..redis() }, "database number"),
            (Settings { store: Some("redis+unix://socket".into()), ..redis() }, "redis+unix:///PATH"),
            (Settings { store: Some("redis-sentinel://x/0".into()), ..redis() }, "?master=NAME"),
            (
                Settings { store: Some("redis-sentinel://x/0?master=im&name=im".into()), ..redis() },
                "a word behind",
            ),
            (Settings { store: Some("redis-cluster://x/1".into()), ..redis() }, "no other database than 0"),
            (Settings { store: Some("redis-cluster://x?master=im".into()), ..redis() }, "\"master\" behind"),
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
