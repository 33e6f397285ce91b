//! A Redis store: a sidecar beside its own scripts called directly, and beside Redis by hand.

use ackwheel::bench::BenchOptions;

use crate::by_hand::Load;
use crate::plan::Plan;
use crate::redis::{Commands, Keys, Redis};
use crate::report::PartReport;
use crate::runs::Rows;
use crate::scripts;
use crate::sidecar::{Sidecar, run};
use crate::wire::{CPU, PAIRS, record};

/// The text if there is no Redis.
pub const NO_REDIS: &str = "Redis, which is not installed: apt-get install redis-server";

const P50: &str = "us, p50 of add and del";

const CONNECTIONS: u64 = 64;
const PIPELINE: usize = 16;
/// Messages of a call, where the scripts are called directly.
const CALL: u64 = 1_000;
/// Messages in flight where one request is sent at a time.
const FEW: u64 = 1_000;

const OURS: &str = "sidecar on Redis, 64 x 16";
const ITS_REDIS: &str = "its Redis";
const SCRIPTS: [&str; 2] = [
    "our script called directly, 1,000 ids, one in flight",
    "our script called directly, 1,000 ids, two in flight",
];
const BY_HAND: &str = "HSET + SADD and back together, 64 x 1";
const BY_HAND_APART: &str = "HSET, SADD and back one by one, 64 x 1";
const ONE: &str = "sidecar on Redis, 1 x 1";
const ONE_SCRIPT: &str = "our script called directly, 1 id, one in flight";

/// A sidecar on Redis, and another Redis for loads by hand: a sidecar whose Redis is kept busy by others for longer
/// than it waits for an answer rightly takes it for away, and that is not what is measured.
pub struct Servers {
    /// It ends before its Redis.
    pub sidecar: Sidecar,
    its_redis: Redis,
    /// The Redis that nobody else uses.
    pub redis: Redis,
}

impl Servers {
    /// Starts all of them; `None` where Redis is not installed.
    ///
    /// # Errors
    ///
    /// When one does not start.
    pub fn start() -> anyhow::Result<Option<Servers>> {
        let (Some(its_redis), Some(redis)) = (Redis::start()?, Redis::start()?) else { return Ok(None) };
        let sidecar = Sidecar::start(&["--store", &its_redis.url()])?;
        Ok(Some(Servers { sidecar, its_redis, redis }))
    }
}

/// Measures this part.
///
/// # Errors
///
/// When a server does not start or answers wrongly.
pub fn measure(plan: &Plan, report: &mut PartReport) -> anyhow::Result<()> {
    let Some(servers) = Servers::start()? else {
        report.skipped.push(String::from(NO_REDIS));
        return Ok(());
    };
    for round in 1..=plan.rounds {
        eprintln!("  round {round} of {}", plan.rounds);
        run_round(plan, &servers, &mut report.rows)?;
    }
    judge(report);
    Ok(())
}

fn run_round(plan: &Plan, servers: &Servers, rows: &mut Rows) -> anyhow::Result<()> {
    let Servers { sidecar, its_redis, redis } = servers;
    let (in_flight, seconds) = (plan.in_flight, plan.run.as_secs_f64());
    let many = BenchOptions {
        connections: usize::try_from(CONNECTIONS)?,
        pipeline: Some(PIPELINE),
        in_flight,
        seconds,
        ..sidecar.load()
    };
    let before = (sidecar.cpu_seconds()?, its_redis.cpu_seconds()?);
    record(rows, OURS, &run(&many)?);
    rows.record(OURS, CPU, sidecar.cpu_seconds()? - before.0);
    rows.record(ITS_REDIS, CPU, its_redis.cpu_seconds()? - before.1);
    for (depth, name) in (1..).zip(SCRIPTS) {
        rows.record(name, PAIRS, scripts::pairs_per_second(&its_redis.url(), CALL, depth, in_flight, plan.run)?);
    }
    let by_hand = Load { connections: CONNECTIONS, depth: 1, ids: 1, in_flight, run: plan.run, busy_poll: false };
    for (name, keys) in [(BY_HAND, Keys::HashAndSets), (BY_HAND_APART, Keys::HashThenSets)] {
        rows.record(name, PAIRS, by_hand.run(redis.address, || Commands::new(keys, 1))?);
    }
    let one = BenchOptions { connections: 1, pipeline: Some(1), in_flight: FEW, seconds, ..sidecar.load() };
    let latency = run(&one)?.latency_us;
    rows.record(ONE, P50, f64::midpoint(latency["add"].p50, latency["del"].p50));
    rows.record(ONE_SCRIPT, P50, scripts::median_us(&its_redis.url(), FEW, plan.run)?);
    Ok(())
}

fn judge(report: &mut PartReport) {
    let rows = report.rows.clone();
    let scripts = rows.ratio_to_best((OURS, PAIRS), &SCRIPTS, PAIRS);
    report.at_least("64 x 16: pairs/s, times the script called directly", scripts, 0.8, 0.95);
    // One command in flight a connection, as in a program that does it by hand. With both commands of a step in one
    // write it is the row above.
    let by_hand = rows.ratio((OURS, PAIRS), (BY_HAND_APART, PAIRS));
    report.at_least("64 x 16: pairs/s, times HSET + SADD one at a time, 64 x 1", by_hand, 5.0, 8.0);
    let used = rows.ratio((OURS, CPU), (ITS_REDIS, CPU));
    report.at_most("64 x 16: CPU of the sidecar, times that of its Redis", used, 0.5, 0.5);
    let one = rows.ratio((ONE, P50), (ONE_SCRIPT, P50));
    report.at_most("1 x 1: p50, times that of a script", one, 2.2, 1.8);
}
