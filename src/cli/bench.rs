//! The verb `bench`: loads a sidecar with requests and prints a report of the measurement.

use std::io::{self, IsTerminal, Write, stderr, stdout};

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Failure;
use super::connect::{Connect, DEFAULT_ADDRESS, DEFAULT_ADMIN, admin};
use super::text::{escaped, escaped_json, whole};
use crate::bench::{self, BenchError, BenchOptions, Latency, Op, Progress, Report};

/// The number of steps of the progress bar.
const STEPS: u64 = 1_000;

/// The number of open files that the process needs besides one file per connection.
const OTHER_FILES: u64 = 64;

/// Measure a sidecar: load over the real protocol, every answer checked
///
/// Adds --in-flight messages. Then, for --seconds, every connection adds new messages and deletes old ones, as fast as
/// possible or at a --rate. At the end all messages are deleted. With --acked below 1, some messages time out, and a
/// group of the bench receives them, while it asks again and again whether the tick has ended (GetMsg). All other groups
/// get the messages too, so measure a sidecar that has no other clients.
///
/// Exit code 1 says that an answer was wrong, or that a message is missing.
#[derive(Args, Debug)]
pub(super) struct Bench {
    #[command(flatten)]
    options: BenchOptions,
    /// The sidecar's admin address, for its CPU time and memory [default: 127.0.0.1:7416 where --addr is the default
    /// too]
    #[arg(long, env = "ACKWHEEL_ADMIN", value_name = "HOST:PORT", value_parser = admin)]
    admin: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: Connect,
}

impl Bench {
    pub(super) fn run(self) -> Result<(), Failure> {
        let default_admin = self.connect.addr.to_string() == DEFAULT_ADDRESS;
        let options = BenchOptions {
            client: self.connect.options()?,
            admin: self.admin.or_else(|| default_admin.then(|| String::from(DEFAULT_ADMIN))),
            address: self.connect.addr,
            ..self.options
        };
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
        let report = bench::run(&options, &|progress| show(&bar, progress));
        bar.finish_and_clear();
        let report = report.map_err(|error| match error {
            BenchError::Options(text) => Failure::Usage(text),
            error => Failure::Run(escaped(&error.to_string())),
        })?;
        if let Some(problem) = &report.server_problem {
            // If stderr is closed, only this message is lost.
            let _ = writeln!(stderr(), "ackwheel: no figures of the server: {}", escaped(problem));
        }
        let mut out = stdout().lock();
        if self.json {
            let json = serde_json::to_string(&report).map_err(io::Error::from)?;
            write!(out, "{}", escaped_json(&json))?;
        } else {
            draw(&mut out, &report)?;
        }
        writeln!(out)?;
        out.flush()?;
        match report.errors {
            0 => Ok(()),
            count => Err(Failure::Run(format!("{count} errors, as: {}", escaped(&report.error_texts.join("; "))))),
        }
    }
}

/// Returns a progress bar on stderr. The bar is hidden if stderr is not a terminal.
fn bar() -> ProgressBar {
    let target = if stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(STEPS), target);
    let template = "{prefix:10} {bar:40} {percent:>3} %  {msg}";
    bar.with_style(ProgressStyle::with_template(template).expect("the template is a constant that is right"))
}

fn show(bar: &ProgressBar, progress: Progress) {
    bar.set_prefix(progress.stage);
    bar.set_position(rounded(progress.share * 1e3));
    bar.set_message(format!("{} frames/s", whole(rounded(progress.frames_per_second))));
}

fn draw(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let BenchOptions { connections, pipeline, ids_per_frame, in_flight, seconds, .. } = report.options;
    write!(out, "{connections} connections of {} frames in flight, ", pipeline.unwrap_or_default())?;
    match report.options.op {
        Op::Wheel => writeln!(out, "{ids_per_frame} ids a frame, {} messages in flight", whole(in_flight))?,
        Op::Ping => writeln!(out, "Pings only")?,
    }
    match report.options.rate {
        Some(rate) => writeln!(out, "{seconds} s at {} per second\n", whole(rate))?,
        None => writeln!(out, "{seconds} s as fast as possible\n")?,
    }
    if let Some(pairs) = report.pairs_per_second {
        row(out, "adds in all", &whole(report.adds))?;
        row(out, "dels in all", &whole(report.dels))?;
        row(out, "pairs per second", &whole(rounded(pairs)))?;
    }
    row(out, "frames per second", &whole(rounded(report.frames_per_second)))?;
    if report.not_made > 0 {
        row(out, "due, but never sent", &whole(report.not_made))?;
    }
    writeln!(out, "\n{:<22} {:>10} {:>10} {:>10} {:>10}", "latency in us", "p50", "p99", "p99.9", "max")?;
    for (name, latency) in &report.latency_us {
        quantiles(out, name, *latency)?;
    }
    if let Some(lateness) = report.timeout_lateness_ms {
        writeln!(out)?;
        quantiles(out, "timeouts late by, ms", lateness)?;
        row(out, "timed out", &whole(report.timed_out))?;
    }
    if let Some(server) = report.server {
        writeln!(out)?;
        let mebibytes = server.rss_bytes >> 20;
        row(out, "server", &format!("{:.2} s of CPU, {mebibytes} MiB", server.cpu_seconds))?;
    }
    write!(out, "{:<22} {:>14}", "errors", whole(report.errors))
}

fn row(out: &mut impl Write, name: &str, value: &str) -> io::Result<()> {
    writeln!(out, "{name:<22} {value:>14}")
}

fn quantiles(out: &mut impl Write, name: &str, Latency { p50, p99, p999, max }: Latency) -> io::Result<()> {
    let p999 = p999.map(|p999| format!("{p999:.1}")).unwrap_or_default();
    writeln!(out, "{name:<22} {p50:>10.1} {p99:>10.1} {p999:>10} {max:>10.1}")
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "no rate is negative or that high")]
fn rounded(number: f64) -> u64 {
    number.round() as u64
}
