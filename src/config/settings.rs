//! Settings as they are given: flags, environment, file.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Deserialize;

use super::ConfigError;

/// Settings as they were given, each perhaps not.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Address for logic nodes; port 0 takes a free one [default: 127.0.0.1:7415]
    #[arg(long, env = "ACKWHEEL_LISTEN", value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Unix socket for logic nodes, beside --listen [default: none]
    #[arg(long, env = "ACKWHEEL_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Address for metrics, probes and status; it changes nothing, so it may be opened to Prometheus
    /// [default: 127.0.0.1:7416]
    #[arg(long, env = "ACKWHEEL_ADMIN", value_name = "HOST:PORT")]
    pub admin: Option<String>,
    /// Where the wheel lives: `memory`, in this process, or redis://HOST:PORT/DB (rediss:// with TLS,
    /// redis+unix:// over a socket), shared by all sidecars that name the same [default: memory]
    #[arg(long, env = "ACKWHEEL_STORE", value_name = "STORE", hide_env_values = true)]
    pub store: Option<String>,
    /// Redis: what the names of its keys begin with; sidecars of one namespace share their rings
    /// [default: ackwheel]
    #[arg(long, env = "ACKWHEEL_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
    /// Redis: rings that the messages are spread over [default: 1]
    #[arg(long, env = "ACKWHEEL_RINGS", value_name = "N")]
    pub rings: Option<u16>,
    /// Redis: serve without standing for election
    #[arg(long, env = "ACKWHEEL_NEVER_LEAD", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL",
        value_parser = clap::builder::BoolishValueParser::new())]
    pub never_lead: Option<bool>,
    /// What the status calls this sidecar [default: the host's name and the port of --listen]
    #[arg(long, env = "ACKWHEEL_NAME", value_name = "NAME")]
    pub name: Option<String>,
    /// Redis: time after which a leader that is not heard of is replaced, 500ms to 60s [default: 3s]
    #[arg(long, env = "ACKWHEEL_LEASE", value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub lease: Option<Duration>,
    /// Redis: time that the pointer waits after an outage, for the Acks that all sidecars hold [default: 2s]
    #[arg(long, env = "ACKWHEEL_OUTAGE_GRACE", value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub outage_grace: Option<Duration>,
    /// Redis: most ticks that a new leader catches up, 0 to 16; what is missed beyond them shifts every deadline
    /// [default: 5]
    #[arg(long, env = "ACKWHEEL_CATCH_UP_MAX_TICKS", value_name = "N")]
    pub catch_up_max_ticks: Option<u16>,
    /// Redis: most acknowledged messages held while it is away [default: 1000000]
    #[arg(long, env = "ACKWHEEL_MAX_HELD_ACKS", value_name = "N")]
    pub max_held_acks: Option<u64>,
    /// Slots of the ring: the default and longest ack timeout, in ticks [default: 15]
    #[arg(long, env = "ACKWHEEL_SLOTS", value_name = "N")]
    pub slots: Option<u16>,
    /// Length of a tick, as in 1s or 200ms [default: 1s]
    #[arg(long, env = "ACKWHEEL_TICK", value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub tick: Option<Duration>,
    /// File that keeps the memory store across a planned restart; without it a drain hands out what is in
    /// flight [default: none]
    #[arg(long, env = "ACKWHEEL_STATE", value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// File with the token that clients must present; read again when it changes [default: none]
    #[arg(long, env = "ACKWHEEL_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate chain in PEM: --listen then speaks TLS; read again when it changes [default: none]
    #[arg(long, env = "ACKWHEEL_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Key of --tls-cert in PEM [default: none]
    #[arg(long, env = "ACKWHEEL_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Allow --listen beyond loopback without a token or TLS
    #[arg(long, env = "ACKWHEEL_INSECURE", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL",
        value_parser = clap::builder::BoolishValueParser::new())]
    pub insecure: Option<bool>,
    /// Most messages in flight [default: 4000000]
    #[arg(long, env = "ACKWHEEL_MAX_IN_FLIGHT", value_name = "N")]
    pub max_in_flight: Option<u64>,
    /// Most connections at once [default: 16384]
    #[arg(long, env = "ACKWHEEL_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<usize>,
    /// Longest frame accepted, in bytes, at least 1048576 [default: 1048576]
    #[arg(long, env = "ACKWHEEL_MAX_FRAME_LENGTH", value_name = "BYTES")]
    pub max_frame_length: Option<u32>,
    /// Bytes queued to a connection beyond which it is not read from [default: 4194304]
    #[arg(long, env = "ACKWHEEL_MAX_QUEUED_BYTES", value_name = "BYTES")]
    pub max_queued_bytes: Option<usize>,
    /// Time that a connection may take to say Hello [default: 5s]
    #[arg(long, env = "ACKWHEEL_HELLO_TIMEOUT", value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub hello_timeout: Option<Duration>,
    /// Time after which an unacknowledged batch is handed out again [default: 30s]
    #[arg(long, env = "ACKWHEEL_REDELIVER_AFTER", value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub redeliver_after: Option<Duration>,
    /// Time that an unacknowledged batch, or a group without a subscriber, is kept [default: 24h]
    #[arg(long, env = "ACKWHEEL_OUTBOX_RETENTION", value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub outbox_retention: Option<Duration>,
    /// Most messages in unacknowledged batches [default: 10000000]
    #[arg(long, env = "ACKWHEEL_OUTBOX_MAX_IDS", value_name = "N")]
    pub outbox_max_ids: Option<u64>,
    /// Fewest timed-out messages that make a tick a storm [default: 1000]
    #[arg(long, env = "ACKWHEEL_STORM_MIN", value_name = "N")]
    pub storm_min: Option<u64>,
    /// Least share of a tick's messages, 0 to 1, that makes it a storm [default: 0.5]
    #[arg(long, env = "ACKWHEEL_STORM_SHARE", value_name = "SHARE")]
    pub storm_share: Option<f64>,
    /// Time that a drain may take before the process ends anyway, at most 8s [default: 8s]
    #[arg(long, env = "ACKWHEEL_DRAIN_TIMEOUT", value_name = "DURATION", value_parser = humantime::parse_duration)]
    #[serde(with = "humantime_serde", default)]
    pub drain_timeout: Option<Duration>,
    /// Threads that serve connections; the wheel has one of its own [default: half of the processors, at least 1: the
    /// logic node beside it wants the others]
    #[arg(long, env = "ACKWHEEL_THREADS", value_name = "N")]
    pub threads: Option<u16>,
    /// What is logged: error, warn, info, debug, or a filter as in `info,ackwheel::server=debug`
    /// [default: info]
    #[arg(long, env = "ACKWHEEL_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// How it is logged [default: text]
    #[arg(long, env = "ACKWHEEL_LOG_FORMAT", value_name = "FORMAT")]
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
        toml::from_str(&text).map_err(|error| {
            ConfigError(format!(
                "{}: {error}mend or remove that line; `ackwheel serve --help` lists the keys (without the dashes)",
                path.display()
            ))
        })
    }

    /// These settings, and where they are silent those of `fallback`.
    #[must_use]
    pub fn or(self, fallback: Settings) -> Settings {
        macro_rules! each {
            ($($field:ident)+) => { Settings { $($field: self.$field.or(fallback.$field),)+ } };
        }
        each! {
            listen socket admin store namespace rings never_lead name lease outage_grace
            catch_up_max_ticks max_held_acks slots tick state token_file tls_cert tls_key insecure max_in_flight max_connections
            max_frame_length max_queued_bytes hello_timeout redeliver_after outbox_retention outbox_max_ids
            storm_min storm_share drain_timeout threads log log_format
        }
    }
}
