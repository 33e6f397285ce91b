//! Replays a trace of instant messages through the real protocol, and checks every outcome.
//!
//! Each line of the trace becomes a message: it is added, pushed to a simulated phone, and acknowledged if the
//! trace says that the phone was online: its user sent something within 600 s of the message, before or after.
//! Online phones answer after a round trip of at most half the ack timeout, offline ones never. At the end
//! each message must have been answered `acked` and be in no batch, or be in exactly one batch, neither early
//! nor late. Whatever is otherwise is a mismatch, and with any the exit code is 1.
//!
//! ```text
//! cargo run --release --example im_replay                                        # a trace of its own
//! cargo run --release --example im_replay -- --trace CollegeMsg.txt.gz           # a real one, from SNAP
//! cargo run --release --example im_replay -- --addr 127.0.0.1:7415 --seconds 60  # a sidecar that runs
//! ```
//!
//! CollegeMsg is at <https://snap.stanford.edu/data/CollegeMsg.html>: 59,835 private messages among the
//! students of a university, over 193 days.

mod draw;
mod expectation;
mod generate;
mod ledger;
mod mismatch;
mod plan;
mod replay;
mod report;
mod sidecars;
mod trace;

use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ackwheel::client::Address;
use anyhow::Context;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use ledger::Ledger;
use replay::SharedLedger;
use report::Report;
use sidecars::Sidecars;

/// Replay a trace of instant messages through the real protocol, and check every outcome
///
/// A phone counts as online for a message if its user sent something within 600 s of it, before or after. It
/// then acknowledges the message within half the ack timeout, and the message must be in no timeout batch.
/// The messages to all other phones must be in exactly one, neither early nor late.
#[derive(Debug, Parser)]
#[command(name = "im_replay", after_help = OUTPUT)]
struct Arguments {
    /// The trace: lines `src dst unix_seconds`, after a header or not, plain or gzip [default: a generated one]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// How long the pushes take; the last outcomes come an ack timeout later
    #[arg(
        long, default_value_t = 30, value_name = "SECONDS",
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    seconds: u64,
    /// Connections that push, spread over the sidecars; subscribers have their own
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000))]
    connections: u64,
    /// A sidecar that nobody else uses, HOST:PORT or unix:PATH; several with commas or as several flags.
    /// Batches that wait in its group `default` are acknowledged [default: one inside this program, on free ports]
    #[arg(long, value_delimiter = ',', value_name = "ADDRESS")]
    addr: Vec<Address>,
    /// The tick of the sidecar inside this program; its ring has 15 slots
    #[arg(
        long, default_value = "200ms", value_name = "DURATION",
        value_parser = humantime::parse_duration,
        conflicts_with = "addr"
    )]
    tick: Duration,
    /// Print the result as an object of JSON
    #[arg(long)]
    json: bool,
    /// The seed of random round trips and of a generated trace
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Messages of a generated trace
    #[arg(
        long, default_value_t = 20_000, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with = "trace"
    )]
    messages: u32,
}

const OUTPUT: &str = "\
The last line of the output:
  pushed                  messages that were added
  acked                   messages whose Ack was answered `acked`
  timed_out               messages that were in a timeout batch
  clients_without_ack     clients of whose messages the last one timed out
  mismatches              outcomes that the trace does not allow; stderr describes the first
  ack_latency_ms          from AddNewMsg to `acked`, the phone's round trip included
  timeout_lateness_ms     from the ack timeout after the answer to AddNewMsg to the batch;
                          up to one tick of it is the wheel's rounding, which never goes down

Exit codes: 0; 1 for mismatches, or a replay that could not be; 2 for a wrong command line.";

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("im_replay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// How many mismatches there were.
async fn run(arguments: Arguments) -> anyhow::Result<u64> {
    let trace = if let Some(path) = &arguments.trace {
        trace::read(path)?
    } else {
        eprintln!(
            "no --trace: replaying a generated one, with a daily rhythm and bursts (--seed {})",
            arguments.seed
        );
        generate::generate(usize::try_from(arguments.messages)?, arguments.seed)
    };
    let sidecars = Sidecars::reach(arguments.addr, arguments.tick).await?;
    let duration = Duration::from_secs(arguments.seconds);
    let plan = plan::plan(&trace, duration, sidecars.ack_timeout(), arguments.seed);
    eprintln!(
        "{} messages in {duration:?} on {} connections to {sidecars}; an Ack has {:?}",
        plan.len(),
        arguments.connections,
        sidecars.ack_timeout(),
    );

    let nodes = sidecars.nodes(usize::try_from(arguments.connections)?).await?;
    let subscriptions = sidecars.subscribe().await?;
    let ledger = SharedLedger::new(Ledger::new(&plan, sidecars.ack_timeout(), sidecars.tick()));
    let progress = tokio::spawn(show_progress(ledger.clone(), plan.len()));
    let leftover = replay::replay(&plan, &nodes, subscriptions, &ledger).await;
    progress.abort();
    let leftover = leftover?;
    drop(nodes);
    sidecars.leave().await?;

    if leftover > 0 {
        eprintln!("{leftover} batches that were left in the group before were acknowledged and not judged");
    }
    let ledger = ledger.lock();
    for description in ledger.mismatches().descriptions() {
        eprintln!("mismatch: {description}");
    }
    let report = Report::new(&ledger, &plan);
    let line = if arguments.json { serde_json::to_string(&report)? } else { report.to_string() };
    writeln!(stdout(), "{line}").context("cannot print the result")?;
    Ok(report.mismatches)
}

/// A bar on a terminal, and nothing elsewhere. Runs until it is aborted, and is then wiped away.
async fn show_progress(ledger: SharedLedger, messages: usize) {
    let bar = ProgressBar::new(u64::try_from(messages).unwrap_or(u64::MAX));
    if bar.is_hidden() {
        return;
    }
    let style = ProgressStyle::with_template("{elapsed} {wide_bar} {human_pos} of {human_len} settled  {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let ledger = ledger.lock();
        bar.set_message(format!("acked {}  timed out {}", ledger.acked(), ledger.timed_out()));
        bar.set_position(u64::try_from(ledger.settled()).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn addresses_may_be_separated_by_commas_or_repeated() {
        let line = "im_replay --addr 127.0.0.1:1,127.0.0.1:2 --addr unix:/run/ackwheel.sock";
        assert_eq!(Arguments::parse_from(line.split(' ')).addr.len(), 3);
    }
}
