//! The same load on ackwheel and on what one would use instead, side by side.
//!
//! ```text
//! cargo run --release --example compare                       # everything: about fifteen minutes
//! cargo run --release --example compare -- --only ring,wire   # some parts
//! cargo run --release --example compare -- --quick            # do all the parts work? not for figures
//! ```
//!
//! It starts what it needs on free ports of this machine and ends it again: sidecars, an echo server, Redis and
//! beanstalkd. A program that is not installed is skipped, and the report says so. In every round each subject runs once,
//! one after the other, so that a busy minute of the machine hits all of them; a ratio is taken within a round, and
//! the median over the rounds is reported. docs/PERFORMANCE.md tells what is compared with what, and why so.

mod beanstalk;
mod bulk;
mod by_hand;
mod child;
mod dashed;
mod direct;
mod echo;
mod idle;
mod latency;
mod machine;
mod numbers;
mod plan;
mod redis;
mod report;
mod ring;
mod runs;
mod scripts;
mod shared;
mod sidecar;
#[cfg(test)]
#[path = "../../tests/support/single_request.rs"]
mod single_request;
mod wire;

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::Duration;

use ackwheel::app;
use ackwheel::config::Settings;
use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};

use plan::Plan;
use report::{PartReport, Report};

/// Measure ackwheel side by side with what one would use instead
///
/// It starts what it needs on free ports and ends it again; what is not installed is skipped, and said.
#[derive(Debug, Parser)]
#[command(name = "compare", after_help = OUTPUT, args_conflicts_with_subcommands = true)]
struct Arguments {
    /// The parts to measure, with commas [default: all]
    #[arg(long, value_delimiter = ',', value_name = "PARTS")]
    only: Vec<Part>,
    /// How often everything is measured, in turn; medians are reported
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// How long each load runs, as in 2s or 500ms
    #[arg(long, default_value = "2s", value_name = "DURATION", value_parser = humantime::parse_duration)]
    run: Duration,
    /// One round of short runs with few messages: whether it works, and not what it can do
    #[arg(long, conflicts_with_all = ["rounds", "run"])]
    quick: bool,
    /// Print the result as an object of JSON
    #[arg(long)]
    json: bool,
    /// Exit with 1 if a first target is missed
    #[arg(long)]
    strict: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

const OUTPUT: &str = "\
Each target has two figures: the first is what must hold, the aim is what was aimed at. A line ends with PASS
where the first holds, with `PASS, aim` where the aim does too, and with `short of it` otherwise.

The JSON has `cores`, `plan`, and `parts`; of each part `part`, `rows` (`subject`, `figure`, `median`, `rounds`),
`targets` (`what`, `more` whether more is better, `figure`, `first`, `aim`, `verdict`), `skipped` and `failed`.

Exit codes: 0; 1 where a part could not be measured, or with --strict a first target is missed; 2 for a wrong
command line.";

/// A part of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// In the process: the ring beside maps, one on dashmap, and a delay queue
    Ring,
    /// Over TCP: a memory store beside one on dashmap, Redis by hand, beanstalkd and an echo
    Wire,
    /// A Redis store beside its scripts called directly, and beside Redis by hand
    Redis,
    /// How long an add and a del take at half of the highest rate, and how late timeouts are
    Latency,
    /// With ten thousand idle connections beside
    Idle,
    /// With twenty million messages in flight
    Bulk,
}

/// The role of this program when it has started itself.
#[derive(Debug, Subcommand)]
enum Role {
    /// A subject in the process: prints what it measured
    #[command(hide = true)]
    Subject(ring::SubjectArguments),
    /// An echo server: prints its port
    #[command(hide = true)]
    Echo,
    /// A sidecar
    #[command(hide = true)]
    Sidecar(Box<Settings>),
    /// A sidecar whose ring is on dashmap
    #[command(hide = true)]
    Dashed(Box<Settings>),
    /// Another program, which ends when nobody holds the other end of stdin any more
    #[command(hide = true, disable_help_flag = true)]
    Guard {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match &arguments.role {
        None => compare(&arguments),
        Some(Role::Subject(subject)) => subject.run().map(|()| true),
        Some(Role::Echo) => echo::serve().map(|()| true),
        Some(Role::Sidecar(settings)) => sidecar::serve(*settings.clone(), app::Sidecar::start).map(|()| true),
        Some(Role::Dashed(settings)) => sidecar::serve(*settings.clone(), dashed::start).map(|()| true),
        Some(Role::Guard { command }) => child::guard(command).map(|()| true),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("compare: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures, prints, and says whether all is well.
fn compare(arguments: &Arguments) -> anyhow::Result<bool> {
    let plan = if arguments.quick { Plan::quick() } else { Plan::new(arguments.rounds, arguments.run) };
    let mut report = Report::new(&plan);
    for part in Part::value_variants() {
        if arguments.only.is_empty() || arguments.only.contains(part) {
            let name = format!("{part:?}").to_lowercase();
            eprintln!("{name}:");
            let mut measured = PartReport::new(name);
            if let Err(error) = measure(*part, &plan, &mut measured) {
                eprintln!("  {error:#}");
                measured.failed = Some(format!("{error:#}"));
            }
            report.parts.push(measured);
        }
    }
    let text = if arguments.json { serde_json::to_string_pretty(&report)? } else { report.to_string() };
    writeln!(stdout(), "{}", text.trim_end()).context("cannot print the result")?;
    Ok(report.is_complete() && !(arguments.strict && report.misses_a_target()))
}

fn measure(part: Part, plan: &Plan, report: &mut PartReport) -> anyhow::Result<()> {
    match part {
        Part::Ring => ring::measure(plan, report),
        Part::Wire => wire::measure(plan, report),
        Part::Redis => shared::measure(plan, report),
        Part::Latency => latency::measure(plan, report),
        Part::Idle => idle::measure(plan, report),
        Part::Bulk => bulk::measure(plan, report),
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
    fn parts_are_chosen_with_commas() {
        let arguments = Arguments::parse_from("compare --only ring,wire --json".split(' '));
        assert_eq!(arguments.only, [Part::Ring, Part::Wire]);
    }
}
