//! The options of a bench, and their checks.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::frames::add_body_length;
use super::schedule::Schedule;
use super::{BenchError, as_float};
use crate::client::{Address, ClientOptions, Tls};
use crate::protocol::frame::{HEAD_LENGTH, MAX_MESSAGES, MAX_PING_LENGTH, Welcome};

/// The requests that a load is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// AddNewMsg and DelMsg.
    #[default]
    Wheel,
    /// Pings of the size of the AddNewMsg frames: what server and wire can do without a wheel.
    Ping,
}

/// In which order the adds and dels of a connection come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// In turn, which a processor learns.
    #[default]
    InTurn,
    /// As drawn for each: phones answer when they like. Each connection has up to eight messages more in flight; with
    /// more than eight in a frame they come in turn all the same.
    Mixed,
}

/// A load. The defaults are those of `ackwheel bench`.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The sidecar.
    pub address: Address,
    /// The secret that it asks for, if it asks for one.
    pub token: Option<Vec<u8>>,
    /// Whom to trust, if it speaks TLS.
    pub tls: Option<Tls>,
    /// How long to wait for a connection.
    pub connect_timeout: Duration,
    /// Its admin endpoints, as host:port, for the figures of the server; none to do without.
    pub admin: Option<String>,
    /// Connections that carry the load.
    pub connections: usize,
    /// Requests of one connection that may be unanswered; none for 256, and at a rate for as many as are due within two
    /// bursts, where those are more.
    pub pipeline: Option<usize>,
    /// Messages in one AddNewMsg.
    pub ids_per_frame: usize,
    /// Messages to be acknowledged that are kept in flight, over all connections.
    pub in_flight: u64,
    /// The share of all messages that is acknowledged, from 0 to 1. The others time out.
    pub acked: f64,
    /// Pairs per second over all connections (with [`Op::Ping`] Pings per second); none for as fast as possible.
    pub rate: Option<u64>,
    /// At a rate: how often each connection has requests due, as many together as fall into that time. Where they are
    /// further apart than that, each is due by itself.
    pub burst_every: Duration,
    /// For how long to measure, in seconds.
    pub seconds: f64,
    /// The requests.
    pub op: Op,
    /// In which order adds and dels come.
    pub order: Order,
    /// Ticks that a message may stay in flight; 0 for one revolution.
    pub ack_timeout_ticks: u16,
    /// Whether every message has a client, which makes frames longer by 8 bytes a message.
    pub clients: bool,
    /// Further connections that only answer Pings.
    pub idle_connections: usize,
    /// Threads that make the load; connections are spread over them.
    pub threads: usize,
    /// Whether these threads look for answers again and again rather than sleep until they come. Each takes a processor
    /// for itself then, and a server on the same machine spends none of its time on waking them.
    pub busy_poll: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        BenchOptions {
            address: Address::Tcp { host: "127.0.0.1".to_owned(), port: 7415 },
            token: None,
            tls: None,
            connect_timeout: Duration::from_secs(5),
            admin: Some("127.0.0.1:7416".to_owned()),
            connections: 8,
            pipeline: None,
            ids_per_frame: 1,
            in_flight: 100_000,
            acked: 1.0,
            rate: None,
            burst_every: Duration::from_millis(4),
            seconds: 10.0,
            op: Op::Wheel,
            order: Order::InTurn,
            ack_timeout_ticks: 0,
            clients: false,
            idle_connections: 0,
            threads: 1,
            busy_poll: false,
        }
    }
}

/// The longest time to measure: a week.
const MAX_SECONDS: f64 = 7.0 * 86_400.0;

/// Beyond these no machine has the ports, or the memory for what is unanswered.
const MAX_CONNECTIONS: usize = 65_536;
const MAX_PIPELINE: usize = 65_536;

/// Requests of one connection that may be unanswered, if nothing else is said.
const PIPELINE: usize = 256;

/// More often than this no machine looks at its timers, and more seldom it is no rate.
const BURST_EVERY: RangeInclusive<Duration> = Duration::from_micros(100)..=Duration::from_secs(1);

fn impossible(text: impl Into<String>) -> BenchError {
    BenchError::Options(text.into())
}

impl Op {
    /// The requests of a pair, or of a Ping.
    const fn requests(self) -> u64 {
        match self {
            Op::Wheel => 2,
            Op::Ping => 1,
        }
    }
}

impl BenchOptions {
    /// Whether this can be done by any server.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        for (flag, value, most) in [
            ("--connections", self.connections, MAX_CONNECTIONS),
            ("--pipeline", self.pipeline.unwrap_or(1), MAX_PIPELINE),
            ("--ids-per-frame", self.ids_per_frame, MAX_MESSAGES),
            ("--threads", self.threads, self.connections),
            // None is as good.
            ("--idle-connections", self.idle_connections.max(1), MAX_CONNECTIONS),
        ] {
            if !(1..=most).contains(&value) {
                return Err(impossible(format!("{flag} {value} is not possible: write 1 to {most}")));
            }
        }
        let seconds = self.seconds;
        if !(0.01..=MAX_SECONDS).contains(&seconds) {
            return Err(impossible(format!("--seconds {seconds} is not possible: write 0.01 to {MAX_SECONDS}")));
        }
        if self.rate == Some(0) {
            return Err(impossible(
                "--rate 0 is no load: write at least 1, or leave it out for as fast as possible",
            ));
        }
        if !BURST_EVERY.contains(&self.burst_every) {
            let every = self.burst_every;
            return Err(impossible(format!("--burst-every {every:?} is not possible: write 100us to 1s")));
        }
        if self.op == Op::Ping {
            return Ok(());
        }
        if !(0.0..=1.0).contains(&self.acked) {
            let acked = self.acked;
            return Err(impossible(format!("--acked {acked} is no share: write 0 to 1, as 0.9")));
        }
        let least = (self.connections * self.ids_per_frame) as u64;
        if self.in_flight < least {
            return Err(impossible(format!(
                "--in-flight {} is less than one frame for each connection: write at least {least} \
                 (--connections {} times --ids-per-frame {}), or fewer of these",
                self.in_flight, self.connections, self.ids_per_frame
            )));
        }
        Ok(())
    }

    /// Whether this can be done by the server that said this of itself.
    pub(super) fn check_with(&self, welcome: &Welcome) -> Result<(), BenchError> {
        if self.op == Op::Ping {
            return Ok(());
        }
        let (slots, max_messages) = (welcome.slots, welcome.max_messages as usize);
        if self.ack_timeout_ticks > slots {
            let ticks = self.ack_timeout_ticks;
            return Err(impossible(format!(
                "--ack-timeout-ticks {ticks} is more than the server's ring has slots: write 1 to {slots}"
            )));
        }
        let longest = welcome.max_frame_length as usize + size_of::<u32>();
        let fit = longest.saturating_sub(self.frame_length(0)) / if self.clients { 16 } else { 8 };
        let most = max_messages.min(fit);
        if self.ids_per_frame > most {
            let ids = self.ids_per_frame;
            return Err(impossible(format!(
                "--ids-per-frame {ids} is more than the server takes: write 1 to {most}"
            )));
        }
        let timeout = self.ack_timeout(welcome);
        if let Some(rate) = self.rate.filter(|_| self.acked > 0.0) {
            let most = u128::from(rate) * timeout.as_millis() / 1_000;
            if u128::from(self.in_flight) > most {
                return Err(impossible(format!(
                    "--in-flight {} at --rate {rate} leaves each message in flight for longer than the ack timeout of \
                     {timeout:?}: write --in-flight {most} or less, or a higher --rate",
                    self.in_flight
                )));
            }
        }
        Ok(())
    }

    /// Requests of one connection that may be unanswered.
    pub(super) fn pipeline(&self) -> usize {
        self.pipeline.unwrap_or_else(|| {
            // A connection that has to wait for answers before it may go on would be another load: one with a limit.
            let burst =
                self.schedule(0, 0).map_or(0, |schedule| schedule.burst()).saturating_mul(self.op.requests());
            usize::try_from(burst.saturating_mul(2)).unwrap_or(MAX_PIPELINE).clamp(PIPELINE, MAX_PIPELINE)
        })
    }

    /// The schedule of a connection that begins at a time, in ns since the load began; none without a rate.
    pub(super) fn schedule(&self, connection: usize, from: u64) -> Option<Schedule> {
        let messages = if self.op == Op::Ping { 1 } else { self.ids_per_frame };
        let per_second = as_float(self.rate?) / as_float(messages as u64);
        Some(Schedule::new(from, per_second, self.burst_every, connection, self.connections))
    }

    /// How many ticks the messages may stay in flight on that server.
    pub(super) fn ticks(&self, welcome: &Welcome) -> u16 {
        if self.ack_timeout_ticks == 0 { welcome.slots } else { self.ack_timeout_ticks }
    }

    /// How long the messages may stay in flight on that server.
    pub(super) fn ack_timeout(&self, welcome: &Welcome) -> Duration {
        Duration::from_millis(u64::from(self.ticks(welcome)) * u64::from(welcome.tick_ms))
    }

    const fn frame_length(&self, messages: usize) -> usize {
        HEAD_LENGTH + add_body_length(messages, self.clients)
    }

    /// Bytes that a Ping carries in place of an AddNewMsg's body.
    pub(super) fn ping_length(&self) -> usize {
        add_body_length(self.ids_per_frame, self.clients).min(MAX_PING_LENGTH)
    }

    /// The share of --in-flight of one connection.
    pub(super) fn share_of(&self, connection: usize) -> u64 {
        let (connections, connection) = (self.connections as u64, connection as u64);
        self.in_flight / connections + u64::from(connection < self.in_flight % connections)
    }

    pub(super) fn client_options(&self) -> ClientOptions {
        ClientOptions {
            token: self.token.clone(),
            tls: self.tls.clone(),
            client_name: concat!("ackwheel-bench/", env!("CARGO_PKG_VERSION")).to_owned(),
            connect_timeout: self.connect_timeout,
            request_timeout: super::connection::PATIENCE,
            ..ClientOptions::default()
        }
    }
}
