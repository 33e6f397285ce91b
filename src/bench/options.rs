//! The options of a bench, which are also flags of `ackwheel bench`, and their checks.

use std::ops::RangeInclusive;
use std::time::Duration;

use clap::{Args, Command, FromArgMatches, ValueEnum};
use serde::Serialize;

use super::as_float;
use super::frames::add_body_length;
use super::schedule::Schedule;
use crate::client::{Address, ClientOptions};
use crate::protocol::frame::{HEAD_LENGTH, MAX_MESSAGES, MAX_PING_LENGTH, Welcome};

/// The requests that a bench makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Adds and deletes messages
    #[default]
    Wheel,
    /// Sends Pings that have the length of an add: measures server and network without the wheel
    Ping,
}

/// The order of the adds and dels of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// An add and a del in turn
    #[default]
    InTurn,
    /// In random order, with up to eight more messages in flight per connection. The same as in-turn, if a frame has
    /// more than four messages
    Mixed,
}

/// The options of a bench. The defaults are those of `ackwheel bench`, and the texts are its help.
#[derive(Args, Clone, Debug, Serialize)]
pub struct BenchOptions {
    /// The address of the sidecar.
    #[arg(skip = Address::Tcp { host: "127.0.0.1".to_owned(), port: 7415 })]
    #[serde(skip)]
    pub address: Address,
    /// The options of the connections. The bench replaces the client name and the request timeout.
    #[arg(skip)]
    #[serde(skip)]
    pub client: ClientOptions,
    /// The admin address of the sidecar, as host:port. With `None`, the report does not contain the server's CPU time
    /// and memory.
    #[arg(skip = Some("127.0.0.1:7416".to_owned()))]
    #[serde(skip)]
    pub admin: Option<String>,
    /// Connections that carry the load
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub connections: usize,
    /// Frames in flight per connection [default: 256; with --rate, as many as two bursts have, from 256 to 65,536]
    #[arg(long, value_name = "FRAMES")]
    pub pipeline: Option<usize>,
    /// Messages in one frame
    #[arg(long, default_value_t = 1, value_name = "MESSAGES")]
    pub ids_per_frame: usize,
    /// Messages kept unacknowledged at any time, over all connections
    #[arg(long, default_value_t = 100_000, value_name = "MESSAGES")]
    pub in_flight: u64,
    /// Share of the messages that is acknowledged; the others time out
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    pub acked: f64,
    /// Pairs of add and del per second, or Pings with --op ping. With --rate, latency counts from the time at which a
    /// request was due [default: as fast as possible]
    #[arg(long, value_name = "PAIRS")]
    pub rate: Option<u64>,
    /// With --rate: the time between two bursts. Each connection sends the requests that are due in that time together
    #[arg(
        long, requires = "rate", default_value = "4ms", value_name = "DURATION",
        value_parser = humantime::parse_duration
    )]
    #[serde(skip)]
    pub burst_every: Duration,
    /// How long to measure
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    pub seconds: f64,
    /// The requests to make
    #[arg(long, default_value = "wheel", value_name = "OP")]
    pub op: Op,
    /// The order of the adds and dels of a connection
    #[arg(long, default_value = "in-turn", value_name = "ORDER")]
    pub order: Order,
    /// Ticks that a message may stay in flight [default: one revolution]
    #[arg(long, value_name = "TICKS", value_parser = clap::value_parser!(u16).range(1..))]
    #[serde(skip)]
    pub ack_timeout_ticks: Option<u16>,
    /// Give every message a client id: frames are longer by 8 bytes a message
    #[arg(long)]
    #[serde(skip)]
    pub clients: bool,
    /// Further connections that only say Hello and answer Pings
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub idle_connections: usize,
    /// Threads that make the load
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub threads: usize,
    /// Poll for answers instead of sleeping: each thread occupies one processor, and the server need not wake it. Use
    /// this only if there are spare processors
    #[arg(long)]
    pub busy_poll: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        let command = BenchOptions::augment_args(Command::new("bench"));
        let matches = command.try_get_matches_from(["bench"]);
        matches
            .and_then(|matches| BenchOptions::from_arg_matches(&matches))
            .expect("every option that is not optional has a default")
    }
}

/// The maximum time to measure, in seconds: one week.
const MAX_SECONDS: f64 = 7.0 * 86_400.0;

/// The maximum number of connections: a machine has no more ports for connections to one server.
const MAX_CONNECTIONS: usize = 65_536;
/// The maximum number of unanswered requests per connection. It limits the memory for these requests.
const MAX_PIPELINE: usize = 65_536;

/// The default number of requests of one connection that may be unanswered.
const PIPELINE: usize = 256;

/// The valid values of `--burst-every`. Timers are not precise enough for less than the minimum. Above the maximum,
/// the load would be a few large bursts instead of a steady rate.
const BURST_EVERY: RangeInclusive<Duration> = Duration::from_micros(100)..=Duration::from_secs(1);

impl BenchOptions {
    /// Checks the options as far as possible without the limits of the server.
    pub(super) fn check(&self) -> Result<(), String> {
        for (flag, value, most) in [
            ("--connections", self.connections, MAX_CONNECTIONS),
            ("--pipeline", self.pipeline.unwrap_or(1), MAX_PIPELINE),
            ("--ids-per-frame", self.ids_per_frame, MAX_MESSAGES),
            ("--threads", self.threads, self.connections),
            // 0 idle connections are also possible.
            ("--idle-connections", self.idle_connections.max(1), MAX_CONNECTIONS),
        ] {
            if !(1..=most).contains(&value) {
                return Err(format!("{flag} {value} is not possible: write 1 to {most}"));
            }
        }
        let BenchOptions { seconds, burst_every, acked, connections, ids_per_frame, in_flight, .. } = self;
        if !(0.01..=MAX_SECONDS).contains(seconds) {
            return Err(format!("--seconds {seconds} is not possible: write 0.01 to {MAX_SECONDS}"));
        }
        if self.rate == Some(0) {
            return Err(
                "--rate 0 is no load: write at least 1, or leave it out for as fast as possible".to_owned()
            );
        }
        if !BURST_EVERY.contains(burst_every) {
            return Err(format!("--burst-every {burst_every:?} is not possible: write 100us to 1s"));
        }
        if self.op == Op::Ping {
            return Ok(());
        }
        if !(0.0..=1.0).contains(acked) {
            return Err(format!("--acked {acked} is no share: write 0 to 1, as 0.9"));
        }
        let least = (connections * ids_per_frame) as u64;
        if *in_flight < least {
            return Err(format!(
                "--in-flight {in_flight} is less than one frame for each connection: write at least {least} \
                 ({connections} connections with {ids_per_frame} messages a frame), or lower --connections or --ids-per-frame"
            ));
        }
        Ok(())
    }

    /// Checks that the options fit the limits in the Welcome of the server.
    pub(super) fn check_with(&self, welcome: &Welcome) -> Result<(), String> {
        if self.op == Op::Ping {
            return Ok(());
        }
        let (slots, ticks) = (welcome.slots, self.ticks(welcome));
        if ticks > slots {
            return Err(format!(
                "--ack-timeout-ticks {ticks} is more than the server's ring has slots: write 1 to {slots}"
            ));
        }
        let longest = welcome.max_frame_length as usize + size_of::<u32>();
        let fixed = HEAD_LENGTH + add_body_length(0, self.clients);
        let fit = longest.saturating_sub(fixed) / if self.clients { 16 } else { 8 };
        let (ids, most) = (self.ids_per_frame, fit.min(welcome.max_messages as usize));
        if ids > most {
            return Err(format!("--ids-per-frame {ids} is more than the server takes: write 1 to {most}"));
        }
        let (timeout, in_flight) = (self.ack_timeout(welcome), self.in_flight);
        if let Some(rate) = self.rate.filter(|_| self.acked > 0.0) {
            let most = u128::from(rate) * timeout.as_millis() / 1_000;
            if u128::from(in_flight) > most {
                return Err(format!(
                    "--in-flight {in_flight} at --rate {rate} leaves each message in flight for longer than the ack \
                     timeout of {timeout:?}: write --in-flight {most} or less, or a higher --rate"
                ));
            }
        }
        Ok(())
    }

    /// Returns how many requests of one connection may be unanswered.
    pub(super) fn pipeline(&self) -> usize {
        self.pipeline.unwrap_or_else(|| {
            // At a fixed rate, waiting for answers must not limit the load. So the default is the number of requests in
            // two bursts.
            let pairs = self.schedule(0, 0).map_or(0, |schedule| schedule.burst);
            let requests = pairs.saturating_mul(if self.op == Op::Ping { 2 } else { 4 });
            usize::try_from(requests).unwrap_or(MAX_PIPELINE).clamp(PIPELINE, MAX_PIPELINE)
        })
    }

    /// Returns the schedule of a connection that begins at `from`, in ns since the load began. Returns `None` without a
    /// fixed rate.
    pub(super) fn schedule(&self, connection: usize, from: u64) -> Option<Schedule> {
        let messages = if self.op == Op::Ping { 1 } else { self.ids_per_frame };
        let per_second = as_float(self.rate?) / as_float(messages as u64);
        Some(Schedule::new(from, per_second, self.burst_every, connection, self.connections))
    }

    /// Returns the ack timeout at this server, in ticks.
    pub(super) fn ticks(&self, welcome: &Welcome) -> u16 {
        self.ack_timeout_ticks.unwrap_or(welcome.slots)
    }

    /// Returns the ack timeout at this server.
    pub(super) fn ack_timeout(&self, welcome: &Welcome) -> Duration {
        Duration::from_millis(u64::from(self.ticks(welcome)) * u64::from(welcome.tick_ms))
    }

    /// Returns the length of a Ping's payload: that of an AddNewMsg's body, but at most [`MAX_PING_LENGTH`].
    pub(super) fn ping_length(&self) -> usize {
        add_body_length(self.ids_per_frame, self.clients).min(MAX_PING_LENGTH)
    }

    /// Returns how many of the `in_flight` messages one connection keeps in flight.
    pub(super) fn share_of(&self, connection: usize) -> u64 {
        let (connections, connection) = (self.connections as u64, connection as u64);
        self.in_flight / connections + u64::from(connection < self.in_flight % connections)
    }
}
