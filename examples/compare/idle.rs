//! The load of eight connections, alone and with thousands of connections beside it that do nothing.

use ackwheel::bench::BenchOptions;

use crate::plan::Plan;
use crate::report::PartReport;
use crate::sidecar::{Sidecar, run};
use crate::wire::{PAIRS, record};

const ALONE: &str = "memory, 8 x 256";
const BESIDE: &str = "memory, 8 x 256, idle connections beside";
const ALONE_SLEEPING: &str = "memory, 8 x 256, the load sleeps";
const BESIDE_SLEEPING: &str = "memory, 8 x 256, the load sleeps, idle connections beside";

/// Of what the same load reaches alone.
const SHARE: &str = "of that alone, pairs/s";

/// Files that this process needs beside the idle connections.
const OTHER_FILES: usize = 200;

/// Measures this part.
///
/// # Errors
///
/// When the sidecar does not start or answers wrongly.
pub fn measure(plan: &Plan, report: &mut PartReport) -> anyhow::Result<()> {
    let files = usize::try_from(rlimit::increase_nofile_limit(u64::MAX)?).unwrap_or(usize::MAX);
    let idle = plan.idle.min(files.saturating_sub(OTHER_FILES));
    if idle < 10_000 {
        let cause =
            if idle < plan.idle { "only so many files may be open, see ulimit -n" } else { "this is a short run" };
        report.skipped.push(format!("10,000 idle connections: there are {idle}, {cause}"));
    }
    let memory = Sidecar::start(&[])?;
    let load = BenchOptions { in_flight: plan.in_flight, seconds: plan.run.as_secs_f64(), ..memory.load() };
    for round in 1..=plan.idle_rounds {
        eprintln!("  round {round} of {}", plan.idle_rounds);
        for (busy_poll, alone, beside) in [(true, ALONE, BESIDE), (false, ALONE_SLEEPING, BESIDE_SLEEPING)] {
            let without = run(&BenchOptions { busy_poll, ..load.clone() })?;
            let with = run(&BenchOptions { busy_poll, idle_connections: idle, ..load.clone() })?;
            record(&mut report.rows, alone, &without);
            record(&mut report.rows, beside, &with);
            if let (Some(without), Some(with)) = (without.pairs_per_second, with.pairs_per_second) {
                report.rows.record(beside, SHARE, with / without);
            }
        }
    }
    let ratio = report.rows.ratio((BESIDE, PAIRS), (ALONE, PAIRS));
    report.at_least("pairs/s with idle connections, times those without", ratio, 0.9, 0.9);
    Ok(())
}
