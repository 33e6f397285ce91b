//! The settings: one table for the flags, the environment variables and the keys of the file.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueHint};
use humantime::parse_duration;
use serde::Deserialize;

use super::ConfigError;
use crate::logging::LogFormat;

// The sections of `ackwheel serve --help`, and of examples/ackwheel.toml.
const ADDRESSES: &str = "Addresses";
const ACCESS: &str = "Access";
const RING: &str = "The ring";
const STORE: &str = "Where the wheel lives";
const BATCHES: &str = "Timeout batches and storms";
const CONNECTIONS: &str = "Limits of connections";
const PROCESS: &str = "The process";

/// Makes [`Settings`] of a table. A line has the section in the help, the name, the type, the environment variable, and
/// the name of the value. The flag and the key of the file are the name with dashes.
macro_rules! settings {
    ($($(#[$attribute:meta])* $section:ident, $name:ident: $type:ty, $variable:literal, $value:literal;)+) => {
        /// Settings as they were given; those that were not given are `None`.
        #[derive(Args, Clone, Debug, Default, Deserialize)]
        #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
        pub struct Settings {
            $(
                $(#[$attribute])*
                #[arg(long, help_heading = $section, env = $variable, value_name = $value)]
                pub $name: Option<$type>,
            )+
        }

        impl Settings {
            /// These settings, and those of `fallback` in place of those that were not given.
            #[must_use]
            pub fn or(self, fallback: Settings) -> Settings {
                Settings { $($name: self.$name.or(fallback.$name),)+ }
            }
        }
    };
}

settings! {
    /// TCP address for logic nodes. Port 0 takes a free one, which the log names; beyond loopback --token-file or
    /// --tls-cert is needed [default: 127.0.0.1:7415]
    ADDRESSES, listen: String, "ACKWHEEL_LISTEN", "HOST:PORT";
    /// Unix socket for logic nodes, beside --listen. One that a killed sidecar left behind is
    /// replaced [default: none]
    #[arg(value_hint = ValueHint::FilePath)]
    ADDRESSES, socket: PathBuf, "ACKWHEEL_SOCKET", "PATH";
    /// TCP address of metrics, probes, status and the page of the ring. It changes nothing, so it may be opened to
    /// Prometheus [default: 127.0.0.1:7416]
    ADDRESSES, admin: String, "ACKWHEEL_ADMIN", "HOST:PORT";
    /// Name of this sidecar in the status, 1 to 128 bytes [default: the host's name and the port of --listen]
    ADDRESSES, name: String, "ACKWHEEL_NAME", "NAME";
    /// File with the token that clients must present in their Hello, 1 to 1024 bytes; white space around it is not part
    /// of it. It is read again when it changes [default: none]
    #[arg(value_hint = ValueHint::FilePath)]
    ACCESS, token_file: PathBuf, "ACKWHEEL_TOKEN_FILE", "FILE";
    /// Certificate chain in PEM: with it --listen speaks TLS. It is read again when it changes [default: none]
    #[arg(value_hint = ValueHint::FilePath)]
    ACCESS, tls_cert: PathBuf, "ACKWHEEL_TLS_CERT", "FILE";
    /// Private key of --tls-cert in PEM [default: none]
    #[arg(value_hint = ValueHint::FilePath)]
    ACCESS, tls_key: PathBuf, "ACKWHEEL_TLS_KEY", "FILE";
    /// Allow --listen beyond loopback without a token or TLS: anyone who reaches it can add and acknowledge messages
    /// [default: false]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    ACCESS, insecure: bool, "ACKWHEEL_INSECURE", "BOOL";
    /// Slots of the ring, 1 to 3600 (to 240 in Redis). It is the default ack timeout and the longest one, in ticks
    /// [default: 15]
    RING, slots: u16, "ACKWHEEL_SLOTS", "N";
    /// Length of a tick, 10ms to 30s. With the default --slots and 1s, a message has 15 s [default: 1s]
    #[arg(value_parser = parse_duration)]
    #[serde(with = "humantime_serde")]
    RING, tick: Duration, "ACKWHEEL_TICK", "DURATION";
    /// Most messages in flight; more are refused. In memory one takes about 43 bytes [default: 4000000]
    #[arg(value_parser = whole::<u64>)]
    RING, max_in_flight: u64, "ACKWHEEL_MAX_IN_FLIGHT", "MESSAGES";
    /// Where the wheel lives: `memory`, in this process, or redis://HOST:PORT/DB (rediss:// with TLS, redis+unix://
    /// over a socket), redis-sentinel://HOST:PORT,HOST:PORT/DB?master=NAME, redis-cluster://HOST:PORT,HOST:PORT, shared
    /// by all sidecars that name the same [default: memory]
    #[arg(hide_env_values = true)]
    STORE, store: String, "ACKWHEEL_STORE", "STORE";
    /// Memory: file that keeps the wheel across a planned restart. Without it a drain delivers all messages in
    /// flight, flagged `drained` [default: none]
    #[arg(value_hint = ValueHint::FilePath)]
    STORE, state: PathBuf, "ACKWHEEL_STATE", "FILE";
    /// Redis: beginning of the names of all keys. Sidecars of one namespace share their rings
    /// [default: ackwheel]
    STORE, namespace: String, "ACKWHEEL_NAMESPACE", "NAME";
    /// Redis: rings that the messages are spread over, 1 to 64. All sidecars of a namespace say the same
    /// [default: 1]
    STORE, rings: u16, "ACKWHEEL_RINGS", "N";
    /// Redis: serve without standing for election; some other sidecar must turn the wheel [default: false]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    STORE, never_lead: bool, "ACKWHEEL_NEVER_LEAD", "BOOL";
    /// Redis with Sentinels or a Cluster: let messages time out also while no majority of the Sentinels, or of the
    /// Cluster's primaries, confirms the primary. Only if they are gone for good: in a partition, messages that are
    /// acknowledged on its other side are reported [default: false]
    #[arg(num_args = 0..=1, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    STORE, expire_without_majority: bool, "ACKWHEEL_EXPIRE_WITHOUT_MAJORITY", "BOOL";
    /// Redis: time after which a leader that is not heard of is replaced, 500ms to 60s [default: 3s]
    #[arg(value_parser = parse_duration)]
    #[serde(with = "humantime_serde")]
    STORE, lease: Duration, "ACKWHEEL_LEASE", "DURATION";
    /// Redis: time that the pointer waits after an outage for the acknowledgements that all sidecars hold, 0s to
    /// 60s [default: 2s]
    #[arg(value_parser = parse_duration)]
    #[serde(with = "humantime_serde")]
    STORE, outage_grace: Duration, "ACKWHEEL_OUTAGE_GRACE", "DURATION";
    /// Redis: most ticks that a new leader catches up, 0 to 16. Further missed ticks shift every deadline
    /// [default: 5]
    STORE, catch_up_max_ticks: u16, "ACKWHEEL_CATCH_UP_MAX_TICKS", "N";
    /// Redis: most acknowledged messages that are held while it is unreachable; more are refused [default: 1000000]
    #[arg(value_parser = whole::<u64>)]
    STORE, max_held_acks: u64, "ACKWHEEL_MAX_HELD_ACKS", "MESSAGES";
    /// Time after which an unacknowledged batch is delivered again [default: 30s]
    #[arg(value_parser = parse_duration)]
    #[serde(with = "humantime_serde")]
    BATCHES, redeliver_after: Duration, "ACKWHEEL_REDELIVER_AFTER", "DURATION";
    /// Time that an unacknowledged batch, or a group without a subscriber, is kept. Older ones are dropped,
    /// counted, and logged [default: 24h]
    #[arg(value_parser = parse_duration)]
    #[serde(with = "humantime_serde")]
    BATCHES, outbox_retention: Duration, "ACKWHEEL_OUTBOX_RETENTION", "DURATION";
    /// Most messages in unacknowledged batches. Beyond them the oldest batches are dropped, counted, and logged
    /// [default: 10000000]
    #[arg(value_parser = whole::<u64>)]
    BATCHES, outbox_max_ids: u64, "ACKWHEEL_OUTBOX_MAX_IDS", "MESSAGES";
    /// Fewest timed-out messages that make a tick a storm: its batches are flagged, and it is logged
    /// [default: 1000]
    #[arg(value_parser = whole::<u64>)]
    BATCHES, storm_min: u64, "ACKWHEEL_STORM_MIN", "MESSAGES";
    /// Least share of a tick's messages, 0 to 1, that makes it a storm, together with --storm-min [default: 0.5]
    BATCHES, storm_share: f64, "ACKWHEEL_STORM_SHARE", "SHARE";
    /// Most connections of logic nodes at once; more are refused [default: 16384]
    #[arg(value_parser = whole::<usize>)]
    CONNECTIONS, max_connections: usize, "ACKWHEEL_MAX_CONNECTIONS", "N";
    /// Longest frame accepted, in bytes; at least 1048576 [default: 1048576]
    CONNECTIONS, max_frame_length: u32, "ACKWHEEL_MAX_FRAME_LENGTH", "BYTES";
    /// Bytes that may wait for a connection to take them. Beyond them it is not read from, and if it takes nothing
    /// more it is closed [default: 4194304]
    #[arg(value_parser = whole::<usize>)]
    CONNECTIONS, max_queued_bytes: usize, "ACKWHEEL_MAX_QUEUED_BYTES", "BYTES";
    /// Time that a new connection may take to say Hello before it is closed [default: 5s]
    #[arg(value_parser = parse_duration)]
    #[serde(with = "humantime_serde")]
    CONNECTIONS, hello_timeout: Duration, "ACKWHEEL_HELLO_TIMEOUT", "DURATION";
    /// Time that a drain may take before the process ends anyway, at most 8s [default: 8s]
    #[arg(value_parser = parse_duration)]
    #[serde(with = "humantime_serde")]
    PROCESS, drain_timeout: Duration, "ACKWHEEL_DRAIN_TIMEOUT", "DURATION";
    /// Threads that serve connections; the wheel has one of its own
    /// [default: half of the processors, at least 1: the logic node beside it wants the others]
    PROCESS, threads: u16, "ACKWHEEL_THREADS", "N";
    /// Lines that are logged: error, warn, info, debug, trace, off, or a filter as in `info,ackwheel::server=debug`.
    /// RUST_LOG is not read: it belongs to the logic node beside this sidecar [default: info]
    PROCESS, log: String, "ACKWHEEL_LOG", "FILTER";
    /// Format of the log, on stderr [default: text]
    PROCESS, log_format: LogFormat, "ACKWHEEL_LOG_FORMAT", "FORMAT";
}

impl Settings {
    /// The settings of a file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, is not TOML, or has a key or value that is not a setting.
    pub fn from_file(path: &Path) -> Result<Settings, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| {
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
    let message = error.message().trim_end();
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

/// A number from the command line or the environment.
fn whole<N: FromStr>(text: &str) -> Result<N, &'static str> {
    text.parse().map_err(|_| "a whole number is wanted, such as 1000000")
}
