//! The settings: one table for the flags, the environment variables and the keys of the file.

use std::any::Any;
use std::fmt::Debug;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueHint, value_parser};
use humantime::parse_duration;
use serde::Deserialize;

use crate::core::MAX_RINGS;
use crate::logging::LogFormat;
use crate::memory::SyncPolicy;
use crate::process::files::read_text;
use crate::protocol::frame::DEFAULT_MAX_FRAME_LENGTH;
use crate::redis::{MAX_CATCH_UP, StoreUrl};

/// A setting, or a combination of settings, that is not possible.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub(super) String);

/// The longest time that a setting may be.
pub const MAX_DURATION: Duration = seconds(366 * 24 * 60 * 60);

/// With more, threads cost more than they serve, and the system may have no room for them.
const MAX_THREADS: u16 = 1_024;

/// The least memory for the buffers of all connections, in bytes.
pub(super) const MIN_CONNECTION_MEMORY: usize = 16 * 1_024 * 1_024;

/// Above 0, and at most a year.
const POSITIVE: RangeInclusive<Duration> = Duration::from_nanos(1)..=MAX_DURATION;
const UP_TO_A_YEAR: &str = "a duration above 0s, at most a year";

// The sections of `ackwheel serve --help`, and of examples/ackwheel.toml.
const ADDRESSES: &str = "Addresses";
const ACCESS: &str = "Access";
const RING: &str = "The ring";
const STORE: &str = "Where the wheel lives";
const BATCHES: &str = "Timeout batches and storms";
const CONNECTIONS: &str = "Limits of connections";
const PROCESS: &str = "The process";

/// Makes [`Settings`] and [`Values`] of a table. A line has the section in the help, the name, the type, the environment
/// variable, and the name of the value. If there is a default it follows, and after it the possible range, and words for
/// that. The flag and the key of the file are the name with dashes.
macro_rules! settings {
    ($(
        $(#[$attribute:meta])*
        $section:ident, $name:ident: $type:ident, $variable:literal, $value:literal
        $(, $default:expr $(, $range:expr $(, $choice:expr)?)?)?;
    )+) => {
        /// Settings as they were given; those that were not given are `None`.
        #[derive(Args, Clone, Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
        pub struct Settings {
            $(
                $(#[$attribute])*
                #[arg(long, help_heading = $section, env = $variable, value_name = $value)]
                #[arg(value_parser = settings!(@parser $type), value_hint = settings!(@hint $type))]
                #[arg(num_args = settings!(@values $type), default_missing_value = "true")]
                pub $name: Option<$type>,
            )+
        }

        /// Settings with their defaults, within their ranges. Those without a default are optional.
        pub(super) struct Values {
            $(pub(super) $name: settings!(@type $type $(, $default)?),)+
        }

        impl Settings {
            /// These settings, and those of `fallback` in place of those that were not given.
            #[must_use]
            pub fn or(self, fallback: Settings) -> Settings {
                Settings { $($name: self.$name.or(fallback.$name),)+ }
            }

            /// Fills in the defaults and checks the ranges.
            pub(super) fn values(&self) -> Result<Values, ConfigError> {
                $(refuse_url(stringify!($name), self.$name.as_ref())?;)+
                Ok(Values {
                    $($name: settings!(
                        @value $name, self.$name.clone() $(, $default $(, $range $(, $choice)?)?)?
                    ),)+
                })
            }
        }
    };
    (@parser Duration) => { parse_duration };
    (@parser bool) => { BoolishValueParser::new() };
    (@parser u64) => { whole::<u64> };
    (@parser usize) => { whole::<usize> };
    (@parser $type:ident) => { value_parser!($type) };
    (@hint PathBuf) => { ValueHint::FilePath };
    (@hint $type:ident) => { ValueHint::Unknown };
    (@values bool) => { 0..=1 };
    (@values $type:ident) => { 1 };
    (@type $type:ident) => { Option<$type> };
    (@type $type:ident, $default:expr) => { $type };
    (@value $name:ident, $given:expr) => { $given };
    (@value $name:ident, $given:expr, $default:expr) => { $given.unwrap_or($default) };
    (@value $name:ident, $given:expr, $default:expr, $range:expr) => {
        within(stringify!($name), $given, $default, $range, None)?
    };
    (@value $name:ident, $given:expr, $default:expr, $range:expr, $choice:expr) => {
        within(stringify!($name), $given, $default, $range, Some($choice))?
    };
}

settings! {
    /// TCP address for logic nodes. Port 0 takes a free one, which the log names; beyond loopback --token-file or
    /// --tls-client-ca is needed [default: 127.0.0.1:7415]
    ADDRESSES, listen: String, "ACKWHEEL_LISTEN", "HOST:PORT", String::from("127.0.0.1:7415");
    /// Unix socket for logic nodes, beside --listen. One that a killed sidecar left behind is
    /// replaced [default: none]
    ADDRESSES, socket: PathBuf, "ACKWHEEL_SOCKET", "PATH";
    /// TCP address of the RESP protocol: client libraries for Redis connect here. TLS, tokens and --max-connections
    /// are those of --listen [default: none]
    ADDRESSES, resp: String, "ACKWHEEL_RESP", "HOST:PORT";
    /// TCP address of metrics, probes, status and the page of the ring. It changes nothing, so it may be opened to
    /// Prometheus [default: 127.0.0.1:7416]
    ADDRESSES, admin: String, "ACKWHEEL_ADMIN", "HOST:PORT", String::from("127.0.0.1:7416");
    /// Names under which --admin may be asked, separated by commas, beside IP addresses, names without a dot, and the
    /// name of this host. Other names are refused: a web page can have the address of this sidecar [default: none]
    ADDRESSES, admin_host: String, "ACKWHEEL_ADMIN_HOST", "NAMES";
    /// Name of this sidecar in the status, 1 to 128 bytes [default: the host's name and the port of --listen]
    ADDRESSES, name: String, "ACKWHEEL_NAME", "NAME";
    /// File with the tokens that clients may present, one a line: NAME:TOKEN RIGHT,RIGHT. The name is optional. A token
    /// has 1 to 1024 bytes; a right is produce, consume or admin, and without one a token has all. It is read again when
    /// it changes [default: none]
    ACCESS, token_file: PathBuf, "ACKWHEEL_TOKEN_FILE", "FILE";
    /// Certificate chain in PEM: with it --listen speaks TLS. It is read again when it changes [default: none]
    ACCESS, tls_cert: PathBuf, "ACKWHEEL_TLS_CERT", "FILE";
    /// Private key of --tls-cert in PEM [default: none]
    ACCESS, tls_key: PathBuf, "ACKWHEEL_TLS_KEY", "FILE";
    /// Certificates in PEM of the authorities that sign client certificates: with it, --listen accepts only clients with
    /// one. It needs --tls-cert, and is read again when it changes [default: none]
    ACCESS, tls_client_ca: PathBuf, "ACKWHEEL_TLS_CLIENT_CA", "FILE";
    /// File with the names of client certificates that are accepted, one a line: the common name or, without one, the
    /// first alternative name. It needs --tls-client-ca, and is read again when it changes [default: all names]
    ACCESS, tls_client_names: PathBuf, "ACKWHEEL_TLS_CLIENT_NAMES", "FILE";
    /// Allow --listen beyond loopback without a token or client certificates: anyone who reaches it can add and
    /// acknowledge messages [default: false]
    ACCESS, insecure: bool, "ACKWHEEL_INSECURE", "BOOL", false;
    /// Slots of the ring, 1 to 3600 (to 240 in Redis). It is the default ack timeout and the longest one, in ticks
    /// [default: 15]
    RING, slots: u16, "ACKWHEEL_SLOTS", "N", 15;
    /// Length of a tick, 10ms to 30s. With the default --slots and 1s, a message has 15 s [default: 1s]
    #[serde(with = "humantime_serde")]
    RING, tick: Duration, "ACKWHEEL_TICK", "DURATION", seconds(1);
    /// Most messages in flight; more are refused. In memory one takes about 46 bytes. A container with less than 1 GiB of
    /// memory lowers this default, and those of --outbox-max-ids, --max-held-acks and --max-connection-memory
    /// [default: 4000000]
    RING, max_in_flight: u64, "ACKWHEEL_MAX_IN_FLIGHT", "MESSAGES", 4_000_000, 1..;
    /// Where the wheel lives: `memory`, in this process, or redis://HOST:PORT/DB (rediss:// with TLS, redis+unix://
    /// over a socket), redis-sentinel://HOST:PORT,HOST:PORT/DB?master=NAME, redis-cluster://HOST:PORT,HOST:PORT, shared
    /// by all sidecars that name the same [default: memory]
    #[arg(hide_env_values = true)]
    STORE, store: StoreUrl, "ACKWHEEL_STORE", "STORE", StoreUrl::from("memory");
    /// Redis: file with the password of the user in --store; white space around it is not part of it. The next new
    /// connection reads it again [default: none]
    STORE, redis_password_file: PathBuf, "ACKWHEEL_REDIS_PASSWORD_FILE", "FILE";
    /// Sentinels: file with the password of the sentinel_user in --store. The next new connection reads it again
    /// [default: none]
    STORE, sentinel_password_file: PathBuf, "ACKWHEEL_SENTINEL_PASSWORD_FILE", "FILE";
    /// Redis with TLS: certificates in PEM of the authorities that sign those of Redis, Sentinels and Cluster nodes.
    /// The next new connection reads it again [default: those of the system]
    STORE, redis_ca: PathBuf, "ACKWHEEL_REDIS_CA", "FILE";
    /// Redis with TLS: certificate chain in PEM that this sidecar presents. The next new connection reads it again
    /// [default: none]
    STORE, redis_cert: PathBuf, "ACKWHEEL_REDIS_CERT", "FILE";
    /// Private key of --redis-cert in PEM [default: none]
    STORE, redis_key: PathBuf, "ACKWHEEL_REDIS_KEY", "FILE";
    /// Memory: folder of a journal that keeps the wheel across a restart and a crash. Without it a drain delivers all
    /// messages in flight, flagged `drained`, and a crash loses them [default: none]
    STORE, journal: PathBuf, "ACKWHEEL_JOURNAL", "FOLDER";
    /// Memory: when the journal is synced, so that a power failure loses nothing older: `none` leaves it to the system,
    /// a DURATION syncs in the background, `always` before each answer [default: none]
    STORE, journal_sync: SyncPolicy, "ACKWHEEL_JOURNAL_SYNC", "WHEN", SyncPolicy::None;
    /// Redis: beginning of the names of all keys. Sidecars of one namespace share their rings
    /// [default: ackwheel]
    STORE, namespace: String, "ACKWHEEL_NAMESPACE", "NAME", String::from("ackwheel");
    /// Redis: rings that the messages are spread over, 1 to 64. All sidecars of a namespace say the same
    /// [default: 1]
    STORE, rings: u16, "ACKWHEEL_RINGS", "N", 1, 1..=MAX_RINGS;
    /// Redis: serve without standing for election; some other sidecar must turn the wheel [default: false]
    STORE, never_lead: bool, "ACKWHEEL_NEVER_LEAD", "BOOL", false;
    /// Redis with Sentinels or a Cluster: let messages time out also while no majority of the Sentinels, or of the
    /// Cluster's primaries, confirms the primary. Only if they are gone for good: in a partition, messages that are
    /// acknowledged on its other side are reported [default: false]
    STORE, expire_without_majority: bool, "ACKWHEEL_EXPIRE_WITHOUT_MAJORITY", "BOOL", false;
    /// Redis: time after which a leader that is not heard of is replaced, 500ms to 60s [default: 3s]
    #[serde(with = "humantime_serde")]
    STORE, lease: Duration, "ACKWHEEL_LEASE", "DURATION", seconds(3), Duration::from_millis(500)..=seconds(60);
    /// Redis: time that the pointer waits after an outage for the acknowledgements that all sidecars hold, 0s to
    /// 60s [default: 2s]
    #[serde(with = "humantime_serde")]
    STORE, outage_grace: Duration, "ACKWHEEL_OUTAGE_GRACE", "DURATION", seconds(2), ..=seconds(60), "0s to 60s";
    /// Redis: most ticks that a new leader catches up, 0 to 16. Further missed ticks shift every deadline
    /// [default: 5]
    STORE, catch_up_max_ticks: u16, "ACKWHEEL_CATCH_UP_MAX_TICKS", "N", 5, 0..=MAX_CATCH_UP;
    /// Redis: most acknowledged messages that are held while it is unreachable; more are refused [default: 1000000]
    STORE, max_held_acks: u64, "ACKWHEEL_MAX_HELD_ACKS", "MESSAGES", 1_000_000, 1..;
    /// Time after which an unacknowledged batch is delivered again [default: 30s]
    #[serde(with = "humantime_serde")]
    BATCHES, redeliver_after: Duration, "ACKWHEEL_REDELIVER_AFTER", "DURATION", seconds(30), POSITIVE, UP_TO_A_YEAR;
    /// Time that an unacknowledged batch, or a group without a subscriber, is kept. Older ones are dropped,
    /// counted, and logged [default: 24h]
    #[serde(with = "humantime_serde")]
    BATCHES, outbox_retention: Duration, "ACKWHEEL_OUTBOX_RETENTION", "DURATION", seconds(24 * 3_600), POSITIVE, UP_TO_A_YEAR;
    /// Most messages in unacknowledged batches. Beyond them the oldest batches are dropped, counted, and logged
    /// [default: 10000000]
    BATCHES, outbox_max_ids: u64, "ACKWHEEL_OUTBOX_MAX_IDS", "MESSAGES", 10_000_000, 1..;
    /// Fewest timed-out messages that make a tick a storm: its batches are flagged, and it is logged
    /// [default: 1000]
    BATCHES, storm_min: u64, "ACKWHEEL_STORM_MIN", "MESSAGES", 1_000;
    /// Least share of a tick's messages, 0 to 1, that makes it a storm, together with --storm-min [default: 0.5]
    BATCHES, storm_share: f64, "ACKWHEEL_STORM_SHARE", "SHARE", 0.5, 0.0..=1.0;
    /// Most connections of logic nodes at once, for each listener; more are refused [default: 16384]
    CONNECTIONS, max_connections: usize, "ACKWHEEL_MAX_CONNECTIONS", "N", 16_384, 1..;
    /// Longest frame accepted, in bytes; at least 1048576 [default: 1048576]
    CONNECTIONS, max_frame_length: u32, "ACKWHEEL_MAX_FRAME_LENGTH", "BYTES", DEFAULT_MAX_FRAME_LENGTH, DEFAULT_MAX_FRAME_LENGTH..,
        "at least 1048576, so that a full AddNewMsg fits";
    /// Bytes that may wait for a connection to take them. Beyond them it is not read from, and if it takes nothing
    /// more it is closed [default: 4194304]
    CONNECTIONS, max_queued_bytes: usize, "ACKWHEEL_MAX_QUEUED_BYTES", "BYTES", 4 * 1_024 * 1_024, 1..;
    /// Bytes that the buffers of all connections may have together, at least 16777216. Beyond them, the connection with
    /// the largest buffers is closed [default: 268435456]
    CONNECTIONS, max_connection_memory: usize, "ACKWHEEL_MAX_CONNECTION_MEMORY", "BYTES", 256 * 1_024 * 1_024,
        MIN_CONNECTION_MEMORY.., "at least 16777216";
    /// Time that a new connection may take to say Hello before it is closed [default: 5s]
    #[serde(with = "humantime_serde")]
    CONNECTIONS, hello_timeout: Duration, "ACKWHEEL_HELLO_TIMEOUT", "DURATION", seconds(5), POSITIVE, UP_TO_A_YEAR;
    /// Time that a drain may take before the process ends anyway, at most 8s [default: 8s]
    #[serde(with = "humantime_serde")]
    PROCESS, drain_timeout: Duration, "ACKWHEEL_DRAIN_TIMEOUT", "DURATION", seconds(8), ..=seconds(8),
        "at most 8s, so that the process ends within 10s of SIGTERM";
    /// Threads that serve connections; the wheel has one of its own
    /// [default: half of the processors, at least 1: the logic node beside it wants the others]
    PROCESS, threads: u16, "ACKWHEEL_THREADS", "N", half_of_the_processors(), 1..=MAX_THREADS,
        "at least 1 and at most 1024";
    /// Lines that are logged: error, warn, info, debug, trace, off, or a filter as in `info,ackwheel::server=debug`.
    /// RUST_LOG is not read: it belongs to the logic node beside this sidecar [default: info]
    PROCESS, log: String, "ACKWHEEL_LOG", "FILTER", String::from("info");
    /// Format of the log, on stderr [default: text]
    PROCESS, log_format: LogFormat, "ACKWHEEL_LOG_FORMAT", "FORMAT", LogFormat::Text;
}

impl Settings {
    /// The settings of a file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, is not TOML, or has a key or value that is not a setting.
    pub fn from_file(path: &Path) -> Result<Settings, ConfigError> {
        let text = read_text(path).map_err(|error| {
            ConfigError(format!("cannot read the configuration file {}: {error}", path.display()))
        })?;
        toml::from_str(&text).map_err(|error| wrong_line(path, &text, &error))
    }
}

/// The error of a line of a file. The line itself is not shown: a store's URL has its password in it.
fn wrong_line(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let number = before.matches('\n').count();
    let key = text.lines().nth(number).and_then(|line| line.split_once('=')).map_or("", |(key, _)| key.trim());
    let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
    let named = if is_key { format!(" ({key})") } else { String::new() };
    let message = without_url(error.message().trim_end());
    let with_dashes = key.replace('_', "-");
    let hint = if message.ends_with("expected a duration") {
        String::from(", in quotes and with its unit, such as \"15s\" or \"500ms\"")
    } else if with_dashes != key && message.contains(&format!("`{with_dashes}`")) {
        format!("; {with_dashes} is meant")
    } else {
        String::new()
    };
    ConfigError(format!(
        "{}, line {}{named}: {message}{hint}: correct or remove it; ackwheel serve --help lists the keys (without the dashes)",
        path.display(),
        number + 1,
    ))
}

/// Refuses a URL as the value of a setting that is no URL, and does not show it: a URL may contain a password. A name may
/// contain one.
fn refuse_url(name: &str, value: Option<&impl Debug>) -> Result<(), ConfigError> {
    let is_url = value.is_some_and(|value| format!("{value:?}").contains("://"));
    if !is_url || ["store", "name"].contains(&name) {
        return Ok(());
    }
    let flag = name.replace('_', "-");
    Err(ConfigError(format!(
        "--{flag} has a URL as its value (not shown): only --store takes one; correct --{flag}"
    )))
}

/// Returns a text that may quote a wrong value. If the value contains a URL, returns another text, because a URL may
/// contain a password.
fn without_url(text: &str) -> &str {
    if text.contains("://") { "a value is wrong (not shown, because it contains a URL)" } else { text }
}

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The default of `--threads`: the logic node needs processors too.
fn half_of_the_processors() -> u16 {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(processors / 2).unwrap_or(MAX_THREADS).max(1)
}

/// The given value or the default. A value outside of the range is refused; `choice` describes the range.
fn within<T: PartialOrd + Debug + 'static>(
    name: &str,
    given: Option<T>,
    default: T,
    range: impl RangeBounds<T>,
    choice: Option<&str>,
) -> Result<T, ConfigError> {
    let Some(value) = given else { return Ok(default) };
    if range.contains(&value) {
        return Ok(value);
    }
    let shown = match (&value as &dyn Any).downcast_ref::<Duration>() {
        Some(duration) => humantime::format_duration(*duration).to_string(),
        None => format!("{value:?}"),
    };
    let choice = match (choice, range.start_bound(), range.end_bound()) {
        (None, Bound::Included(least), Bound::Included(most)) => format!("{least:?} to {most:?}"),
        (None, Bound::Included(least), _) => format!("at least {least:?}"),
        (choice, ..) => choice.unwrap_or_default().to_owned(),
    };
    let flag = name.replace('_', "-");
    Err(ConfigError(format!("--{flag} {shown} is not possible: choose {choice} (default {default:?})")))
}

/// A number from the command line or the environment.
fn whole<N: FromStr>(text: &str) -> Result<N, &'static str> {
    text.parse().map_err(|_| "a whole number is wanted, such as 1000000")
}
