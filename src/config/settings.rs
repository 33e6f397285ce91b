//! Settings as they are given: flags, environment, file.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum, ValueHint};
use humantime::parse_duration;
use serde::Deserialize;

use super::ConfigError;

// The sections of `ackwheel serve --help`, and of examples/ackwheel.toml.
const ADDRESSES: &str = "Addresses";
const ACCESS: &str = "Who may come in";
const RING: &str = "The ring";
const STORE: &str = "Where the wheel lives";
const BATCHES: &str = "Timeout batches and storms";
const CONNECTIONS: &str = "Limits of connections";
const PROCESS: &str = "The process";

/// Settings as they were given, each perhaps not.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Where logic nodes connect. Port 0 takes a free one, which the log names; beyond loopback --token-file or
    /// --tls-cert is needed [default: 127.0.0.1:7415]
    #[arg(long, help_heading = ADDRESSES, env = "ACKWHEEL_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Unix socket where logic nodes connect too, beside --listen. One that a killed sidecar left behind is
    /// replaced [default: none]
    #[arg(long, help_heading = ADDRESSES, env = "ACKWHEEL_SOCKET", value_name = "PATH",
        value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    /// Where metrics, probes, status and the page of the ring are. It changes nothing, so it may be opened to
    /// Prometheus [default: 127.0.0.1:7416]
    #[arg(long, help_heading = ADDRESSES, env = "ACKWHEEL_ADMIN", value_name = "HOST:PORT")]
    pub admin: Option<String>,
    /// What the status calls this sidecar; 1 to 128 bytes [default: the host's name and the port of --listen]
    #[arg(long, help_heading = ADDRESSES, env = "ACKWHEEL_NAME", value_name = "NAME")]
    pub name: Option<String>,
    /// File with the token that clients must present in their Hello, 1 to 1024 bytes; white space around it is not part
    /// of it. It is read again when it changes [default: none]
    #[arg(long, help_heading = ACCESS, env = "ACKWHEEL_TOKEN_FILE", value_name = "FILE",
        value_hint = ValueHint::FilePath)]
    pub token_file: Option<PathBuf>,
    /// Certificate chain in PEM: with it --listen speaks TLS. It is read again when it changes [default: none]
    #[arg(long, help_heading = ACCESS, env = "ACKWHEEL_TLS_CERT", value_name = "FILE",
        value_hint = ValueHint::FilePath)]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert in PEM [default: none]
    #[arg(long, help_heading = ACCESS, env = "ACKWHEEL_TLS_KEY", value_name = "FILE",
        value_hint = ValueHint::FilePath)]
    pub tls_key: Option<PathBuf>,
    /// Allow --listen beyond loopback without a token or TLS: whoever reaches it can add and acknowledge messages
    /// [default: false]
    #[arg(long, help_heading = ACCESS, env = "ACKWHEEL_INSECURE", num_args = 0..=1,
        default_missing_value = "true", value_name = "BOOL", value_parser = BoolishValueParser::new())]
    pub insecure: Option<bool>,
    /// Slots of the ring, 1 to 3600 (to 240 in Redis). It is the default ack timeout and the longest one, in ticks
    /// [default: 15]
    #[arg(long, help_heading = RING, env = "ACKWHEEL_SLOTS", value_name = "N")]
    pub slots: Option<u16>,
    /// Length of a tick, 10ms to 30s. With the default --slots and 1s, a message has 15 s [default: 1s]
    #[arg(long, help_heading = RING, env = "ACKWHEEL_TICK", value_name = "DURATION",
        value_parser = parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub tick: Option<Duration>,
    /// Most messages in flight; more are refused. In memory one takes about 43 bytes [default: 4000000]
    #[arg(long, help_heading = RING, env = "ACKWHEEL_MAX_IN_FLIGHT", value_name = "MESSAGES",
        value_parser = whole::<u64>)]
    pub max_in_flight: Option<u64>,
    /// Where the wheel lives: `memory`, in this process, or redis://HOST:PORT/DB (rediss:// with TLS, redis+unix://
    /// over a socket), redis-sentinel://HOST:PORT,HOST:PORT/DB?master=NAME, redis-cluster://HOST:PORT,HOST:PORT, shared
    /// by all sidecars that name the same [default: memory]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_STORE", value_name = "STORE", hide_env_values = true)]
    pub store: Option<String>,
    /// Memory: file that keeps the wheel across a planned restart. Without it a drain hands out what is in flight,
    /// flagged `drained` [default: none]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_STATE", value_name = "FILE",
        value_hint = ValueHint::FilePath)]
    pub state: Option<PathBuf>,
    /// Redis: what the names of its keys begin with. Sidecars of one namespace share their rings
    /// [default: ackwheel]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
    /// Redis: rings that the messages are spread over, 1 to 64. All sidecars of a namespace say the same
    /// [default: 1]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_RINGS", value_name = "N")]
    pub rings: Option<u16>,
    /// Redis: serve without standing for election; some other sidecar must turn the wheel [default: false]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_NEVER_LEAD", num_args = 0..=1,
        default_missing_value = "true", value_name = "BOOL", value_parser = BoolishValueParser::new())]
    pub never_lead: Option<bool>,
    /// Redis with Sentinels or a Cluster: let messages time out also while no majority of the Sentinels, or of the
    /// Cluster's primaries, confirms the primary. Only if they are gone for good: in a partition, messages that are
    /// acknowledged on its other side are reported [default: false]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_EXPIRE_WITHOUT_MAJORITY", num_args = 0..=1,
        default_missing_value = "true", value_name = "BOOL", value_parser = BoolishValueParser::new())]
    pub expire_without_majority: Option<bool>,
    /// Redis: time after which a leader that is not heard of is replaced, 500ms to 60s [default: 3s]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_LEASE", value_name = "DURATION",
        value_parser = parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub lease: Option<Duration>,
    /// Redis: time that the pointer waits after an outage for the acknowledgements that all sidecars hold, 0s to
    /// 60s [default: 2s]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_OUTAGE_GRACE", value_name = "DURATION",
        value_parser = parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub outage_grace: Option<Duration>,
    /// Redis: most ticks that a new leader catches up, 0 to 16. What is missed beyond them shifts every deadline
    /// [default: 5]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_CATCH_UP_MAX_TICKS", value_name = "N")]
    pub catch_up_max_ticks: Option<u16>,
    /// Redis: most acknowledged messages that are held while it is away; more are refused [default: 1000000]
    #[arg(long, help_heading = STORE, env = "ACKWHEEL_MAX_HELD_ACKS", value_name = "MESSAGES",
        value_parser = whole::<u64>)]
    pub max_held_acks: Option<u64>,
    /// Time after which an unacknowledged batch is handed out again [default: 30s]
    #[arg(long, help_heading = BATCHES, env = "ACKWHEEL_REDELIVER_AFTER", value_name = "DURATION",
        value_parser = parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub redeliver_after: Option<Duration>,
    /// Time that an unacknowledged batch, or a group without a subscriber, is kept. What is older is dropped,
    /// counted, and logged [default: 24h]
    #[arg(long, help_heading = BATCHES, env = "ACKWHEEL_OUTBOX_RETENTION", value_name = "DURATION",
        value_parser = parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub outbox_retention: Option<Duration>,
    /// Most messages in unacknowledged batches. Beyond them the oldest batches are dropped, counted, and logged
    /// [default: 10000000]
    #[arg(long, help_heading = BATCHES, env = "ACKWHEEL_OUTBOX_MAX_IDS", value_name = "MESSAGES",
        value_parser = whole::<u64>)]
    pub outbox_max_ids: Option<u64>,
    /// Fewest timed-out messages that make a tick a storm: its batches are flagged, and it is logged
    /// [default: 1000]
    #[arg(long, help_heading = BATCHES, env = "ACKWHEEL_STORM_MIN", value_name = "MESSAGES",
        value_parser = whole::<u64>)]
    pub storm_min: Option<u64>,
    /// Least share of a tick's messages, 0 to 1, that makes it a storm, together with --storm-min [default: 0.5]
    #[arg(long, help_heading = BATCHES, env = "ACKWHEEL_STORM_SHARE", value_name = "SHARE")]
    pub storm_share: Option<f64>,
    /// Most connections of logic nodes at once; more are refused [default: 16384]
    #[arg(long, help_heading = CONNECTIONS, env = "ACKWHEEL_MAX_CONNECTIONS", value_name = "N",
        value_parser = whole::<usize>)]
    pub max_connections: Option<usize>,
    /// Longest frame accepted, in bytes; at least 1048576 [default: 1048576]
    #[arg(long, help_heading = CONNECTIONS, env = "ACKWHEEL_MAX_FRAME_LENGTH", value_name = "BYTES")]
    pub max_frame_length: Option<u32>,
    /// Bytes that may wait for a connection to take them. Beyond them it is not read from, and if it takes nothing
    /// more it is closed [default: 4194304]
    #[arg(long, help_heading = CONNECTIONS, env = "ACKWHEEL_MAX_QUEUED_BYTES", value_name = "BYTES",
        value_parser = whole::<usize>)]
    pub max_queued_bytes: Option<usize>,
    /// Time that a new connection may take to say Hello before it is closed [default: 5s]
    #[arg(long, help_heading = CONNECTIONS, env = "ACKWHEEL_HELLO_TIMEOUT", value_name = "DURATION",
        value_parser = parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub hello_timeout: Option<Duration>,
    /// Time that a drain may take before the process ends anyway, at most 8s [default: 8s]
    #[arg(long, help_heading = PROCESS, env = "ACKWHEEL_DRAIN_TIMEOUT", value_name = "DURATION",
        value_parser = parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub drain_timeout: Option<Duration>,
    /// Threads that serve connections; the wheel has one of its own
    /// [default: half of the processors, at least 1: the logic node beside it wants the others]
    #[arg(long, help_heading = PROCESS, env = "ACKWHEEL_THREADS", value_name = "N")]
    pub threads: Option<u16>,
    /// What is logged: error, warn, info, debug, trace, off, or a filter as in `info,ackwheel::server=debug`.
    /// RUST_LOG is not read: it belongs to the logic node beside this sidecar [default: info]
    #[arg(long, help_heading = PROCESS, env = "ACKWHEEL_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// How it is logged, on stderr [default: text]
    #[arg(long, help_heading = PROCESS, env = "ACKWHEEL_LOG_FORMAT", value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// An object a line.
    Json,
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

    /// These settings, and where they are silent those of `fallback`.
    #[must_use]
    pub fn or(self, fallback: Settings) -> Settings {
        macro_rules! each {
            ($($field:ident)+) => { Settings { $($field: self.$field.or(fallback.$field),)+ } };
        }
        each! {
            listen socket admin name token_file tls_cert tls_key insecure slots tick max_in_flight store state
            namespace rings never_lead expire_without_majority lease outage_grace catch_up_max_ticks max_held_acks redeliver_after
            outbox_retention outbox_max_ids storm_min storm_share max_connections max_frame_length
            max_queued_bytes hello_timeout drain_timeout threads log log_format
        }
    }
}

/// What is wrong with a line of a file. The line itself is not shown: a store's URL has its password in it.
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
        "{}, line {}{named}: {message}{hint}: mend or remove it; ackwheel serve --help lists the keys (without the dashes)",
        path.display(),
        number + 1,
    ))
}

/// A number from the command line or the environment.
fn whole<N: FromStr>(text: &str) -> Result<N, &'static str> {
    text.parse().map_err(|_| "a whole number is wanted, such as 1000000")
}
