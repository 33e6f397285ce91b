//! Flags, environment and file become checked values; a wrong one cannot be built.
//!
//! A flag comes before its environment variable, which comes before the file, which comes before the
//! default.

mod settings;
mod store;
mod url;

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

pub use settings::{LogFormat, Settings};
pub use store::{SharedStore, StoreKind};
pub use url::without_password;

use crate::core::batch::StormRule;
use crate::core::outbox::Retention;
use crate::core::tick::Wheel;
use crate::memory;
use crate::protocol::frame::DEFAULT_MAX_FRAME_LENGTH;
use crate::server::certificate::Certificate;
use crate::server::{ServerOptions, TokenSource};

/// A setting, or a combination of settings, that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// A sidecar's settings, checked.
#[derive(Debug)]
pub struct Config {
    /// Where logic nodes connect.
    pub listen: SocketAddr,
    /// Where they connect too.
    pub socket: Option<PathBuf>,
    /// Where metrics, probes and status are.
    pub admin: SocketAddr,
    /// Where the wheel lives.
    pub store: StoreKind,
    /// What the status calls this sidecar; if nothing was said, its host and its port.
    pub name: Option<String>,
    /// Dimensions of the ring.
    pub wheel: Wheel,
    /// When a tick is a storm.
    pub storm: StormRule,
    /// Bounds of the outbox.
    pub retention: Retention,
    /// Time after which an unacknowledged batch is handed out again.
    pub redeliver_after: Duration,
    /// Most messages in flight.
    pub max_in_flight: u64,
    /// Where the memory store is kept across a planned restart.
    pub state_file: Option<PathBuf>,
    /// Who may come in.
    pub token: TokenSource,
    /// The certificate of the TCP listener.
    pub certificate: Option<Certificate>,
    /// Limits of connections.
    pub server: ServerOptions,
    /// Time that a drain may take.
    pub drain_timeout: Duration,
    /// Threads that serve connections.
    pub threads: usize,
    /// What to say at the start of settings that are possible but unwise.
    pub warnings: Vec<String>,
}

/// A drain must leave time to end within the 10 s that orchestrators are told.
const MAX_DRAIN_TIMEOUT: Duration = Duration::from_secs(8);

/// The longest time that a setting may be.
pub const MAX_DURATION: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// With more, threads cost more than they serve, and the system may have no room for them.
const MAX_THREADS: u16 = 1_024;

/// The longest name of a sidecar, in bytes.
const MAX_NAME_LENGTH: usize = 128;

impl Settings {
    /// Checks every setting.
    ///
    /// # Errors
    ///
    /// The first setting that cannot be, with its value and the remedy.
    pub fn check(self) -> Result<Config, ConfigError> {
        let listen = address("--listen", self.listen.as_deref().unwrap_or("127.0.0.1:7415"))?;
        let admin = address("--admin", self.admin.as_deref().unwrap_or("127.0.0.1:7416"))?;
        let wheel = Wheel::new(
            self.slots.unwrap_or(Wheel::default().slots()),
            self.tick.unwrap_or(Wheel::default().tick_length()),
        )
        .map_err(|error| ConfigError(format!("--slots and --tick: {error}")))?;
        let (token, certificate) = (self.token()?, self.certificate()?);
        let mut warnings: Vec<String> = certificate.iter().filter_map(Certificate::untimely).collect();
        if !listen.ip().is_loopback() && !token.is_required() && certificate.is_none() {
            if self.insecure != Some(true) {
                return Err(ConfigError(format!(
                    "--listen {listen} lets anyone on the network add and acknowledge messages: give --token-file \
                     or --tls-cert, or listen on 127.0.0.1, or say --insecure if the network is yours alone"
                )));
            }
            warnings.push(format!(
                "--insecure: anyone who reaches {listen} can add and acknowledge messages; give --token-file or \
                 --tls-cert if that is not meant"
            ));
        }
        if !admin.ip().is_loopback() {
            warnings.push(format!(
                "--admin {admin} shows metrics and status to anyone who reaches it, and changes nothing; see that only \
                 those reach it who may"
            ));
        }
        let drain_timeout = self.drain_timeout.unwrap_or(Duration::from_secs(8));
        if drain_timeout > MAX_DRAIN_TIMEOUT {
            return Err(ConfigError(format!(
                "--drain-timeout {drain_timeout:?} is too long: choose at most {MAX_DRAIN_TIMEOUT:?}, so that the \
                 process ends within 10s of SIGTERM"
            )));
        }
        let store = self.store(wheel)?;
        let max_in_flight = at_least_one("--max-in-flight", self.max_in_flight, 4_000_000)?;
        if matches!(store, StoreKind::Memory) {
            warnings.extend(short_tick(wheel, max_in_flight));
        }
        Ok(Config {
            listen,
            admin,
            store,
            name: self.checked_name()?,
            wheel,
            storm: self.storm()?,
            retention: self.retention()?,
            redeliver_after: positive("--redeliver-after", self.redeliver_after, 30)?,
            max_in_flight,
            token,
            certificate,
            server: self.server(wheel)?,
            drain_timeout,
            threads: self.threads()?,
            warnings,
            socket: a_path("--socket", self.socket)?,
            state_file: a_path("--state", self.state)?,
        })
    }

    fn threads(&self) -> Result<usize, ConfigError> {
        match self.threads {
            Some(0) => Err(ConfigError(String::from("--threads 0 serves nobody: give at least 1"))),
            Some(threads) if threads > MAX_THREADS => Err(ConfigError(format!(
                "--threads {threads} is too many: choose at most {MAX_THREADS} (default: half of the processors)"
            ))),
            Some(threads) => Ok(threads.into()),
            None => Ok((std::thread::available_parallelism().map_or(1, usize::from) / 2).max(1)),
        }
    }

    fn checked_name(&self) -> Result<Option<String>, ConfigError> {
        let Some(name) = &self.name else { return Ok(None) };
        if (1..=MAX_NAME_LENGTH).contains(&name.len()) && !name.contains(char::is_control) {
            return Ok(Some(name.clone()));
        }
        Err(ConfigError(format!(
            "--name {name:?} is not a name: use 1 to {MAX_NAME_LENGTH} bytes without control characters"
        )))
    }

    fn token(&self) -> Result<TokenSource, ConfigError> {
        let Some(path) = &self.token_file else { return Ok(TokenSource::None) };
        TokenSource::file(path.clone()).map_err(|error| ConfigError(format!("--token-file: {error}")))
    }

    fn certificate(&self) -> Result<Option<Certificate>, ConfigError> {
        match (&self.tls_cert, &self.tls_key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => Certificate::files(certificate.clone(), key.clone())
                .map(Some)
                .map_err(|error| ConfigError(format!("--tls-cert and --tls-key: {error}"))),
            _ => Err(ConfigError(String::from("--tls-cert and --tls-key belong together: give both, or neither"))),
        }
    }

    fn storm(&self) -> Result<StormRule, ConfigError> {
        let default = StormRule::default();
        let rule = StormRule {
            min: self.storm_min.unwrap_or(default.min),
            share: self.storm_share.unwrap_or(default.share),
        };
        if !(0.0..=1.0).contains(&rule.share) {
            let share = rule.share;
            return Err(ConfigError(format!(
                "--storm-share {share} is not a share: choose 0 to 1 (0.5 is usual)"
            )));
        }
        Ok(rule)
    }

    fn retention(&self) -> Result<Retention, ConfigError> {
        let default = Retention::default();
        Ok(Retention {
            time: positive("--outbox-retention", self.outbox_retention, default.time.as_secs())?,
            max_ids: at_least_one("--outbox-max-ids", self.outbox_max_ids, default.max_ids)?,
        })
    }

    fn server(&self, wheel: Wheel) -> Result<ServerOptions, ConfigError> {
        let max_frame_length = self.max_frame_length.unwrap_or(DEFAULT_MAX_FRAME_LENGTH);
        if max_frame_length < DEFAULT_MAX_FRAME_LENGTH {
            return Err(ConfigError(format!(
                "--max-frame-length {max_frame_length} is too short for a full AddNewMsg: choose at least \
                 {DEFAULT_MAX_FRAME_LENGTH}"
            )));
        }
        let third = wheel.ticks(u64::from(wheel.slots())) / 3;
        Ok(ServerOptions {
            max_frame_length,
            max_connections: at_least_one("--max-connections", self.max_connections, 16_384)?,
            hello_timeout: positive("--hello-timeout", self.hello_timeout, 5)?,
            ping_interval: third.clamp(Duration::from_secs(1), Duration::from_secs(10)),
            max_queued_bytes: at_least_one("--max-queued-bytes", self.max_queued_bytes, 4 * 1024 * 1024)?,
            max_credit: 1_048_576,
        })
    }
}

/// What to say of a tick that is too short to expire while as many messages are in flight as may be.
fn short_tick(wheel: Wheel, max_in_flight: u64) -> Option<String> {
    let (tick, needed) = (wheel.tick_length(), memory::expiry_time(max_in_flight));
    (needed > tick).then(|| {
        format!(
            "--tick {tick:?} is too short for --max-in-flight {max_in_flight}: with so many messages in flight, expiring \
             a tick can take {needed:?}, timeouts come late, and every deadline is shifted again and again; choose --tick \
             {}ms or longer, or --max-in-flight {} or less",
            needed.as_nanos().div_ceil(1_000_000),
            memory::most_kept(tick)
        )
    })
}

fn address(flag: &str, text: &str) -> Result<SocketAddr, ConfigError> {
    const FORM: &str = "write HOST:PORT, as in 127.0.0.1:7415 (port 0 takes a free one)";
    match text.to_socket_addrs().map(Iterator::collect::<BTreeSet<_>>) {
        Ok(addresses) if !addresses.is_empty() => only_address(flag, text, &addresses),
        Err(error) if error.kind() != io::ErrorKind::InvalidInput => {
            Err(ConfigError(format!("{flag} {text:?} cannot be resolved ({error}): {FORM}")))
        }
        _ => Err(ConfigError(format!("{flag} {text:?} is not an address: {FORM}"))),
    }
}

/// The address of a name. A listener has one: which of several is meant, only its user knows.
fn only_address(flag: &str, text: &str, addresses: &BTreeSet<SocketAddr>) -> Result<SocketAddr, ConfigError> {
    let mut each = addresses.iter();
    if let (Some(address), None) = (each.next(), each.next()) {
        return Ok(*address);
    }
    let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    Err(ConfigError(format!(
        "{flag} {text:?} is the name of several addresses, and only one can be listened on: write {flag} {}",
        names.join(&format!(" or {flag} "))
    )))
}

/// A path that is not empty, as flags and the environment refuse one, too.
fn a_path(flag: &str, given: Option<PathBuf>) -> Result<Option<PathBuf>, ConfigError> {
    match given {
        Some(path) if path.as_os_str().is_empty() => {
            Err(ConfigError(format!("{flag} is empty: write the path of a file, or leave it out")))
        }
        given => Ok(given),
    }
}

/// Above 0, and no longer than clocks can tell.
fn positive(flag: &str, given: Option<Duration>, default_secs: u64) -> Result<Duration, ConfigError> {
    match given {
        Some(longer) if longer > MAX_DURATION => Err(ConfigError(format!(
            "{flag} {} is too long: choose at most a year (default {default_secs}s)",
            humantime::format_duration(longer)
        ))),
        Some(Duration::ZERO) => Err(ConfigError(format!(
            "{flag} 0s leaves no time at all: choose a duration above 0 (default {default_secs}s)"
        ))),
        given => Ok(given.unwrap_or(Duration::from_secs(default_secs))),
    }
}

fn at_least_one<T: Copy + Default + PartialEq + std::fmt::Display>(
    flag: &str,
    given: Option<T>,
    default: T,
) -> Result<T, ConfigError> {
    match given {
        Some(value) if value == T::default() => {
            Err(ConfigError(format!("{flag} 0 would refuse everything: choose at least 1 (default {default})")))
        }
        given => Ok(given.unwrap_or(default)),
    }
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
        assert!(redis.check().unwrap().warnings.is_empty(), "Redis keeps a list for each tick");
    }

    #[test]
    fn a_flag_comes_before_the_file() {
        let file: Settings = toml::from_str("slots = 5\ntick = \"200ms\"").unwrap();
        let flags = Settings { slots: Some(7), ..Settings::default() };
        let config = flags.or(file).check().unwrap();
        assert_eq!((config.wheel.slots(), config.wheel.tick_ms()), (7, 200));
    }

    #[test]
    fn a_name_of_several_addresses_is_refused_and_one_address_is_not() {
        let [v4, v6] = ["127.0.0.1:7415", "[::1]:7415"];
        let only = |texts: &[&str]| {
            let addresses = texts.iter().map(|text| text.parse().unwrap()).collect();
            only_address("--listen", "localhost:7415", &addresses)
        };
        assert_eq!(only(&[v4, v4]).unwrap().to_string(), v4);
        let error = only(&[v4, v6]).unwrap_err().to_string();
        assert!(error.contains("\"localhost:7415\"") && error.contains("several addresses"), "{error}");
        assert!(error.ends_with(&format!("write --listen {v4} or --listen {v6}")), "{error}");
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
}
