//! Twenty million messages in flight: what they take, and whether anyone notices.
//!
//! While they are added, exchanged and deleted, another client adds and deletes single messages at a low rate. What
//! it waits for includes every map that grows.

use std::sync::atomic::{AtomicBool, Ordering};

use ackwheel::bench::BenchOptions;
use anyhow::{Context, anyhow};

use crate::numbers::figure;
use crate::plan::Plan;
use crate::report::PartReport;
use crate::runs::Rows;
use crate::sidecar::{Sidecar, larger, run};
use crate::wire::PAIRS;

const BULK: &str = "memory, 512 ids a frame, 8 x 4";
const PROBE: &str = "single messages beside, from the first to the last";
const ALL: &str = "both";
const BYTES: &str = "bytes a message";
const LONGEST: &str = "ms, the longest add or del";

/// Room for the messages of the probe.
const SPARE: u64 = 10_000;

/// Measures this part.
///
/// # Errors
///
/// When the sidecar does not start or answers wrongly.
pub fn measure(plan: &Plan, report: &mut PartReport) -> anyhow::Result<()> {
    for round in 1..=plan.rounds {
        eprintln!("  round {round} of {}", plan.rounds);
        run_round(plan, &mut report.rows)?;
    }
    let rows = report.rows.clone();
    report.at_most("20M in flight: bytes a message", rows.median(BULK, BYTES), 80.0, 48.0);
    report.at_most("20M in flight: ms, the longest add or del", rows.median(ALL, LONGEST), 20.0, 20.0);
    if plan.bulk != 20_000_000 {
        report.skipped.push(format!("20M in flight: this is a short run, with {}", plan.bulk));
    }
    Ok(())
}

fn run_round(plan: &Plan, rows: &mut Rows) -> anyhow::Result<()> {
    // No message times out, however long it takes to add all of them.
    let arguments = ["--max-in-flight", &(plan.bulk + SPARE).to_string(), "--slots", "600", "--tick", "1s"];
    let memory = Sidecar::start(&arguments)?;
    let before = memory.resident_bytes()?;
    let load = BenchOptions {
        pipeline: Some(4),
        ids_per_frame: 512,
        in_flight: plan.bulk,
        seconds: plan.run.as_secs_f64(),
        ..memory.load()
    };
    let done = AtomicBool::new(false);
    let (found, probed) = std::thread::scope(|scope| {
        let probe = scope.spawn(|| probe(&memory, &done));
        let found = run(&load);
        done.store(true, Ordering::Relaxed);
        (found, probe.join())
    });
    let (found, probed) = (found?, probed.map_err(|_| anyhow!("the probe panicked"))??);
    rows.record(BULK, PAIRS, found.pairs_per_second.context("pairs were measured")?);
    let longest = larger(&found, |latency| latency.max)? / 1e3;
    rows.record(BULK, LONGEST, longest);
    rows.record(PROBE, LONGEST, probed);
    rows.record(ALL, LONGEST, longest.max(probed));
    let server = found.server.context("a sidecar tells its memory")?;
    let bytes = figure(server.rss_bytes.saturating_sub(before)) / figure(plan.bulk);
    rows.record(BULK, BYTES, bytes);
    Ok(())
}

/// The longest add or del of single messages, in ms, until the bulk is done.
fn probe(memory: &Sidecar, done: &AtomicBool) -> anyhow::Result<f64> {
    let load = BenchOptions {
        connections: 1,
        pipeline: Some(16),
        in_flight: 16,
        rate: Some(500),
        seconds: 0.5,
        ..memory.load()
    };
    let mut longest = 0.0_f64;
    while !done.load(Ordering::Relaxed) {
        longest = longest.max(larger(&run(&load)?, |latency| latency.max)? / 1e3);
    }
    Ok(longest)
}
