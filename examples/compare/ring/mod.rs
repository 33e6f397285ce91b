//! In the process: the ring beside a map, a concurrent map and a delay queue.
//!
//! Every run is a process of its own, so that no subject inherits the memory of another. All of them add and
//! delete the same ids in batches of the same size, with as many in flight; ids are made before the time runs, and
//! are acknowledged in random order.

mod dash;
mod delay;
mod hash;
mod subject;
mod wheel;

use std::collections::HashMap;
use std::process::Stdio;

use anyhow::Context;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::child::{Child, end_with_stdin, first_line};
use crate::machine::{handing_over, scattered_line};
use crate::plan::Plan;
use crate::report::PartReport;
use subject::Load;

const NS: &str = "ns a pair";
const TIMES_ONE: &str = "times the pairs/s of one thread";
const TIMES_FEW: &str = "times a pair with a tenth of them";
const BYTES: &str = "bytes a message";
const BYTES_AFTER: &str = "bytes a message, after the run";
const MS: &str = "ms";
const NS_A_LINE: &str = "ns";

/// The memory of a message, about.
const BYTES_A_MESSAGE: u64 = 44;

/// The measurement of one process of this part.
#[derive(Args, Clone, Debug)]
pub struct SubjectArguments {
    #[arg(long)]
    kind: Kind,
    #[arg(long)]
    in_flight: u64,
    #[arg(long)]
    seconds: f64,
    #[arg(long, default_value_t = 1)]
    threads: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Ring,
    /// The ring as it is made for two threads, asked by one.
    RingForTwo,
    /// A ring for each thread.
    RingEach,
    Hashbrown,
    Dashmap,
    DashmapByShard,
    DelayQueue,
    /// The ring on dashmap.
    RingOnDashmap,
    /// The ring again: a tick in which `--threads` times a message is left.
    Decide,
    /// The same on dashmap.
    DecideOnDashmap,
}

/// The results of one process of this part.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Found {
    /// Time of an add and a del, in ns.
    pair_ns: Option<f64>,
    /// Memory of a message, when all have been added.
    bytes: Option<f64>,
    /// The same when many have come and gone.
    bytes_after: Option<f64>,
    /// Time to decide a tick and to hand over its batches, in ms.
    decide_ms: Option<f64>,
}

impl SubjectArguments {
    /// Measures, and prints what it found.
    ///
    /// # Errors
    ///
    /// When the system does not tell how much memory is in use.
    pub fn run(&self) -> anyhow::Result<()> {
        end_with_stdin();
        let load = Load { in_flight: self.in_flight, seconds: self.seconds };
        let found = match self.kind {
            Kind::Hashbrown => load.on(hash::Hashed::default)?,
            Kind::Dashmap => load.on(dash::Plain::default)?,
            Kind::DashmapByShard => load.on(dash::ByShard::default)?,
            Kind::DelayQueue => load.on(delay::Delayed::new)?,
            Kind::Ring if self.threads == 1 => load.on(|| wheel::Wheeled::for_threads(1))?,
            Kind::RingForTwo => load.on(|| wheel::Wheeled::for_threads(2))?,
            Kind::Ring => load.on_threads(wheel::Wheeled::shared(usize::try_from(self.threads)?))?,
            Kind::RingEach => {
                load.on_threads((0..self.threads).map(|_| wheel::Wheeled::for_threads(1)).collect())?
            }
            Kind::RingOnDashmap => load.on(wheel::Wheeled::on_dashmap)?,
            Kind::Decide => wheel::decide(wheel::Wheeled::for_threads(1), self.in_flight, self.threads),
            Kind::DecideOnDashmap => wheel::decide(wheel::Wheeled::on_dashmap(), self.in_flight, self.threads),
        };
        println!("{}", serde_json::to_string(&found)?);
        Ok(())
    }
}

/// Name in the table, kind, times as many messages in flight, threads. Subjects that are compared stand close together, so
/// that they run in the same seconds.
const SUBJECTS: [(&str, Kind, u64, u64); 11] = [
    (DELAY_QUEUE, Kind::DelayQueue, 1, 1),
    (HASHBROWN, Kind::Hashbrown, 1, 1),
    (RING, Kind::Ring, 1, 1),
    (TEN_TIMES, Kind::Ring, 10, 1),
    (HASHBROWN_TEN_TIMES, Kind::Hashbrown, 10, 1),
    (ONE_OF_TWO, Kind::RingForTwo, 1, 1),
    (TWO, Kind::Ring, 1, 2),
    (TWO_RINGS, Kind::RingEach, 1, 2),
    ("a ring on dashmap", Kind::RingOnDashmap, 1, 1),
    ("dashmap alone", Kind::Dashmap, 1, 1),
    ("dashmap alone, a lock a shard and batch", Kind::DashmapByShard, 1, 1),
];

const DELAY_QUEUE: &str = "DelayQueue and its map of keys";
const HASHBROWN: &str = "hashbrown alone";
const HASHBROWN_TEN_TIMES: &str = "hashbrown alone, ten times as many";
const RING: &str = "ring";
const TEN_TIMES: &str = "ring, ten times as many";
const ONE_OF_TWO: &str = "ring made for two threads, asked by one";
const TWO: &str = "ring, two threads";
const TWO_RINGS: &str = "two rings, a thread each";
/// The share of the machine: two threads pass a cache line to each other, to and fro.
const HANDING: &str = "a cache line, from one thread to another";
/// Two reads of memory each for an add and a del, at least.
const LINE_OF_FEW: &str = "a random cache line, of as much memory as a ring has";
const LINE_OF_MANY: &str = "a random cache line, of ten times as much";
const DECIDE: &str = "ring, a tick of which one in a hundred is left";
const DECIDE_ON_DASHMAP: &str = "a ring on dashmap, the same tick";

/// Measures this part.
///
/// # Errors
///
/// When a subject fails.
pub fn measure(plan: &Plan, report: &mut PartReport) -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for round in 1..=plan.rounds {
        let mut ns_of = HashMap::new();
        for (name, kind, times, threads) in SUBJECTS {
            if threads > cores as u64 {
                continue;
            }
            eprintln!("  round {round} of {}: {name}", plan.rounds);
            let found = in_a_process(kind, plan.many * times, plan.run_in_process.as_secs_f64(), threads);
            let found = found.with_context(|| name.to_owned())?;
            for (figure, value) in [(NS, found.pair_ns), (BYTES, found.bytes), (BYTES_AFTER, found.bytes_after)] {
                if let Some(value) = value {
                    report.rows.record(name, figure, value);
                }
            }
            if name == TWO {
                report.rows.record(HANDING, NS_A_LINE, handing_over());
            }
            ns_of.insert(name, found.pair_ns);
        }
        let (few, many) = (plan.many * BYTES_A_MESSAGE, 10 * plan.many * BYTES_A_MESSAGE);
        report.rows.record(LINE_OF_FEW, NS_A_LINE, scattered_line(few));
        report.rows.record(LINE_OF_MANY, NS_A_LINE, scattered_line(many));
        // The influence of the machine: two rings that share nothing, and a map that knows no ticks.
        let of_machine = [
            (TWO_RINGS, TIMES_ONE, RING, TWO_RINGS),
            (HASHBROWN_TEN_TIMES, TIMES_FEW, HASHBROWN_TEN_TIMES, HASHBROWN),
        ];
        for (name, figure, over, under) in of_machine {
            if let (Some(Some(over)), Some(Some(under))) = (ns_of.get(over), ns_of.get(under)) {
                report.rows.record(name, figure, over / under);
            }
        }
        for (name, kind) in [(DECIDE, Kind::Decide), (DECIDE_ON_DASHMAP, Kind::DecideOnDashmap)] {
            let found = in_a_process(kind, plan.many, 0.0, plan.left).context(name)?;
            let ms = found.decide_ms.with_context(|| format!("{name}: no time was measured"))?;
            report.rows.record(name, MS, ms);
        }
    }
    if cores < 2 {
        report.skipped.push(String::from("the ring on two threads: this machine has one core"));
    }
    judge(plan, report);
    Ok(())
}

fn judge(plan: &Plan, report: &mut PartReport) {
    let rows = report.rows.clone();
    let to = |subject| rows.ratio((RING, NS), (subject, NS));
    report.at_most("time of add + del, times that of hashbrown", to(HASHBROWN), 1.2, 0.6);
    report.at_most("the same, times that of DelayQueue", to(DELAY_QUEUE), 0.125, 0.05);
    report.at_most("ms to decide a tick of 1M with 10,000 left", rows.median(DECIDE, MS), 5.0, 1.0);
    report.at_most("bytes a message in flight", rows.median(RING, BYTES), 80.0, 48.0);
    let ten_times = rows.ratio((TEN_TIMES, NS), (RING, NS));
    report.at_most("time at 10M in flight, times that at 1M", ten_times, 1.6, 1.6);
    let two = (TWO, NS);
    let of_one = rows.ratio((ONE_OF_TWO, NS), two);
    report.at_least("pairs/s of two threads, times those of one on the same ring", of_one, 1.8, 1.8);
    report.at_least("the same, times those of one on a ring made for one", rows.ratio((RING, NS), two), 1.8, 1.8);
    if plan.many != 1_000_000 {
        report.skipped.push(format!("1M and 10M in flight: this is a short run, with {}", plan.many));
    }
}

fn in_a_process(kind: Kind, in_flight: u64, seconds: f64, threads: u64) -> anyhow::Result<Found> {
    let kind = kind.to_possible_value().context("every kind has a name")?;
    let (in_flight, seconds, threads) = (in_flight.to_string(), seconds.to_string(), threads.to_string());
    let arguments = ["subject", "--kind", kind.get_name(), "--in-flight", &in_flight, "--seconds", &seconds];
    let mut child = Child::in_role(&[&arguments[..], &["--threads", &threads]].concat(), |command| {
        command.stdout(Stdio::piped());
    })?;
    let line = first_line(child.stdout().context("its output is piped")?)?;
    Ok(serde_json::from_str(&line)?)
}
