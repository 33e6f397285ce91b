//! `bench`: load over the real protocol, and what came of it.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Failure;
use super::connect::{Connect, DEFAULT_ADMIN, admin};
use super::text::whole;
use crate::bench::{self, BenchError, BenchOptions, Latency, Op, Order, Progress, Report, Stage};

/// Steps of the progress bar.
const STEPS: u64 = 1_000;

/// Files that the process needs beside its connections.
const OTHER_FILES: u64 = 64;

/// Measure a sidecar: load over the real protocol, every answer checked
///
/// The wheel is filled to --in-flight messages; then, for --seconds, every connection adds new messages and deletes its
/// old ones, as fast as possible or at a --rate; then all is deleted. What --acked leaves over times out, and is taken
/// from a group of its own: other groups keep it too, so better measure a sidecar that serves nobody else.
///
/// Exit code 1 says that something went wrong on the way: an answer that was not the right one, a message that is
/// missing.
#[derive(Args, Debug)]
pub(super) struct Bench {
    /// Connections that carry the load
    #[arg(long, default_value_t = 8, value_name = "N")]
    connections: usize,
    /// Frames in flight per connection [default: 256; with --rate what is due in two bursts, if that is more, up to
    /// 65,536]
    #[arg(long, value_name = "FRAMES")]
    pipeline: Option<usize>,
    /// Messages in one frame
    #[arg(long, default_value_t = 1, value_name = "MESSAGES")]
    ids_per_frame: usize,
    /// Messages kept unacknowledged at any time, over all connections
    #[arg(long, default_value_t = 100_000, value_name = "MESSAGES")]
    in_flight: u64,
    /// Share of the messages that is acknowledged; the others time out
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    acked: f64,
    /// Pairs of add and del per second (with --op ping, Pings); latency then counts from when a request was due
    /// [default: as fast as possible]
    #[arg(long, value_name = "PAIRS")]
    rate: Option<u64>,
    /// With --rate: how often each connection has requests due, all together that fall into that time, as a logic node
    /// that collects what it writes
    #[arg(
        long, requires = "rate", default_value = "4ms", value_name = "DURATION",
        value_parser = humantime::parse_duration
    )]
    burst_every: Duration,
    /// For how long to measure
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    seconds: f64,
    /// What to ask: wheel adds and deletes; ping has the frames of an add echoed, which touches no wheel and shows
    /// what server and wire can do
    #[arg(long, default_value = "wheel", value_name = "OP")]
    op: OpName,
    /// What comes next, an add or a del: in-turn, or mixed, which is drawn, as from phones that answer when they like
    #[arg(long, default_value = "in-turn", value_name = "ORDER")]
    order: OrderName,
    /// Ticks that a message may stay in flight [default: one revolution]
    #[arg(long, value_name = "TICKS", value_parser = clap::value_parser!(u16).range(1..))]
    ack_timeout_ticks: Option<u16>,
    /// Give every message a client: frames are longer by 8 bytes a message
    #[arg(long)]
    clients: bool,
    /// Further connections that only say Hello and answer Pings
    #[arg(long, default_value_t = 0, value_name = "N")]
    idle_connections: usize,
    /// Threads that make the load
    #[arg(long, default_value_t = 1, value_name = "N")]
    threads: usize,
    /// Have these threads look for answers again and again rather than sleep: each takes a processor for itself, and a
    /// server beside them spends no time on waking them. Only where there are processors to spare
    #[arg(long)]
    busy_poll: bool,
    /// The sidecar's admin address, for its CPU time and memory [default: 127.0.0.1:7416 where --addr is the default too]
    #[arg(long, env = "ACKWHEEL_ADMIN", value_name = "HOST:PORT", value_parser = admin)]
    admin: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OpName {
    Wheel,
    Ping,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OrderName {
    InTurn,
    Mixed,
}

impl Bench {
    pub(super) fn run(self) -> Result<(), Failure> {
        let options = self.options()?;
        let wanted =
            (options.connections.saturating_add(options.idle_connections) as u64).saturating_add(OTHER_FILES);
        if let Ok(limit) = rlimit::increase_nofile_limit(u64::MAX)
            && limit < wanted
        {
            return Err(Failure::Usage(format!(
                "only {limit} files may be open, and --connections with --idle-connections needs {wanted}: ask for \
                 fewer, or raise ulimit -n"
            )));
        }
        let bar = bar();
        let report = bench::run(&options, |progress| show(&bar, progress));
        bar.finish_and_clear();
        let report = report.map_err(|error| match error {
            BenchError::Options(text) => Failure::Usage(text),
            error => Failure::run(error),
        })?;
        if let Some(problem) = &report.server_problem {
            // Where nobody can be told, the figures are missing all the same.
            let _ = writeln!(stderr(), "ackwheel: no figures of the server: {problem}");
        }
        let text = if self.json { json(&report) } else { table(&report) };
        let mut out = stdout().lock();
        writeln!(out, "{text}")?;
        out.flush()?;
        match report.errors {
            0 => Ok(()),
            count => Err(Failure::Run(format!("{count} errors, as: {}", report.error_texts.join("; ")))),
        }
    }

    fn options(&self) -> Result<BenchOptions, Failure> {
        let client = self.connect.options()?;
        Ok(BenchOptions {
            address: self.connect.address(),
            token: client.token,
            tls: client.tls,
            connect_timeout: client.connect_timeout,
            admin: self.admin.clone().or_else(|| self.connect.is_default().then(|| String::from(DEFAULT_ADMIN))),
            connections: self.connections,
            pipeline: self.pipeline,
            ids_per_frame: self.ids_per_frame,
            in_flight: self.in_flight,
            acked: self.acked,
            rate: self.rate,
            burst_every: self.burst_every,
            seconds: self.seconds,
            op: match self.op {
                OpName::Wheel => Op::Wheel,
                OpName::Ping => Op::Ping,
            },
            order: match self.order {
                OrderName::InTurn => Order::InTurn,
                OrderName::Mixed => Order::Mixed,
            },
            ack_timeout_ticks: self.ack_timeout_ticks.unwrap_or_default(),
            clients: self.clients,
            idle_connections: self.idle_connections,
            threads: self.threads,
            busy_poll: self.busy_poll,
        })
    }
}

/// A bar on stderr, where that is a terminal; else nothing.
fn bar() -> ProgressBar {
    let target = if stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(STEPS), target);
    let template = "{prefix:10} {bar:40} {percent:>3} %  {msg}";
    bar.with_style(ProgressStyle::with_template(template).expect("the template is a constant that is right"))
}

fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_prefix(match progress.stage {
        Stage::Connecting => "connecting",
        Stage::Filling => "filling",
        Stage::Measuring => "measuring",
        Stage::Deleting => "deleting",
        Stage::Waiting => "timing out",
    });
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a thousand steps")]
    bar.set_position((progress.share * 1e3) as u64);
    bar.set_message(format!("{} frames/s", whole(rounded(progress.frames_per_second))));
}

fn json(report: &Report) -> String {
    serde_json::to_string(report).expect("numbers and strings can be written as JSON")
}

fn table(report: &Report) -> String {
    let mut text = String::new();
    let _ = write!(text, "{} connections of {} frames in flight", report.connections, report.pipeline);
    let _ = match report.op {
        Op::Wheel => writeln!(
            text,
            ", {} ids a frame, {} messages in flight",
            report.ids_per_frame,
            whole(report.in_flight)
        ),
        Op::Ping => writeln!(text, ", Pings only"),
    };
    let _ = match report.rate {
        Some(rate) => writeln!(text, "{} s at {} per second", report.seconds, whole(rate)),
        None => writeln!(text, "{} s as fast as possible", report.seconds),
    };
    text.push('\n');
    if let Some(pairs) = report.pairs_per_second {
        let _ = writeln!(text, "{:<22} {:>14}", "pairs per second", whole(rounded(pairs)));
    }
    let _ = writeln!(text, "{:<22} {:>14}", "frames per second", whole(rounded(report.frames_per_second)));
    if report.not_made > 0 {
        let _ = writeln!(text, "{:<22} {:>14}", "due, and never asked", whole(report.not_made));
    }
    let _ = writeln!(text, "\n{:<22} {:>10} {:>10} {:>10} {:>10}", "latency in us", "p50", "p99", "p99.9", "max");
    let latency = &report.latency_us;
    for (name, latency) in [("add", latency.add), ("del", latency.del), ("ping", latency.ping)] {
        if let Some(Latency { p50, p99, p999, max }) = latency {
            let _ = writeln!(text, "{name:<22} {p50:>10.1} {p99:>10.1} {p999:>10.1} {max:>10.1}");
        }
    }
    if let Some(late) = report.timeout_lateness_ms {
        let (p50, p99, max) = (late.p50, late.p99, late.max);
        let _ = writeln!(text, "\n{:<22} {p50:>10.1} {p99:>10.1} {:>10} {max:>10.1}", "timeouts late by, ms", "");
        let _ = writeln!(text, "{:<22} {:>14}", "timed out", whole(report.timed_out));
    }
    if let Some(server) = report.server {
        let (cpu, memory) = (server.cpu_seconds, float(server.rss_bytes) / f64::from(1 << 20));
        let _ = writeln!(text, "\n{:<22} {:>14}", "server", format!("{cpu:.2} s of CPU, {memory:.0} MiB"));
    }
    let _ = write!(text, "{:<22} {:>14}", "errors", whole(report.errors));
    text
}

#[expect(clippy::cast_precision_loss, reason = "it is shown to a person")]
const fn float(number: u64) -> f64 {
    number as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is neither negative nor that high"
)]
fn rounded(number: f64) -> u64 {
    number.round() as u64
}
