//! Over TCP: a memory store beside one on dashmap, an echo of the same frames, Redis by hand, and beanstalkd.
//!
//! All of them keep as many messages in flight, add a new one and delete an old one in turn, on as many
//! connections, with as many requests unanswered on each.

use ackwheel::bench::{self, BenchOptions, Op, Order};
use anyhow::Context;

use crate::beanstalk::{Beanstalkd, Jobs};
use crate::by_hand::Load;
use crate::echo::Echo;
use crate::numbers::figure;
use crate::plan::Plan;
use crate::redis::{Commands, Keys};
use crate::report::{PartReport, Target};
use crate::runs::Rows;
use crate::shared;
use crate::sidecar::{Sidecar, larger, run};

/// Pairs of adds and dels.
pub const PAIRS: &str = "pairs/s";
/// CPU time of a process.
pub const CPU: &str = "s of CPU";
/// The memory of a sidecar once a round is over.
const MEGABYTES: &str = "MB resident, after all loads";
/// Of this our ring reaches so many times as much.
const TIMES: &str = "times that: our ring, pairs/s";
/// Requests with their answers.
pub const REQUESTS: &str = "requests/s";
/// The worse one of add and del.
pub const P99: &str = "us, p99 of add and del";

const CONNECTIONS: u64 = 8;
/// Messages of a request where there are many.
const MANY_IDS: u64 = 512;
/// Requests unanswered on a connection where each has many messages.
const FEW_REQUESTS: u64 = 8;

const OURS: &str = "memory, 8 x 256";
const MIXED: &str = "memory, 8 x 256, adds and dels mixed";
const ON_DASHMAP: &str = "memory on dashmap, 8 x 256";
const PING: &str = "ping to memory, 8 x 256";
const ECHO: &str = "ping to an echo, 8 x 256";
const OURS_ON_REDIS: &str = "sidecar on Redis, 8 x 256";
const SORTED_SET: &str = "Redis ZADD, ZREM, 8 x 256";
const SORTED_SET_BY_MS: &str = "Redis ZADD, ZREM by ms, 8 x 256";
const HASH: &str = "Redis HSET + SADD and back, 8 x 256";
const BEANSTALKD: &str = "beanstalkd put, delete, 8 x 256";
const OURS_SHALLOW: &str = "memory, 8 x 16";
const PING_SHALLOW: &str = "ping to memory, 8 x 16";
const OURS_MANY: &str = "memory, 512 ids a frame, 8 x 8";
const ON_DASHMAP_MANY: &str = "memory on dashmap, 512 ids a frame, 8 x 8";
const OURS_ON_REDIS_MANY: &str = "sidecar on Redis, 512 ids a frame, 8 x 8";
const SORTED_SET_MANY: &str = "Redis ZADD, ZREM of 512, 8 x 8";
const SORTED_SET_BY_MS_MANY: &str = "Redis ZADD, ZREM by ms of 512, 8 x 8";
const HASH_MANY: &str = "Redis HSET + SADD of 512 and back, 8 x 8";

/// The program that runs.
struct Servers {
    plan: Plan,
    memory: Sidecar,
    dashmap: Sidecar,
    echo: Echo,
    redis: Option<shared::Servers>,
    beanstalkd: Option<Beanstalkd>,
}

/// Measures this part.
///
/// # Errors
///
/// When a server does not start or answers wrongly.
pub fn measure(plan: &Plan, report: &mut PartReport) -> anyhow::Result<()> {
    let servers = Servers {
        plan: *plan,
        memory: Sidecar::start(&[])?,
        dashmap: Sidecar::on_dashmap()?,
        echo: Echo::start()?,
        redis: shared::Servers::start()?,
        beanstalkd: Beanstalkd::start()?,
    };
    if servers.redis.is_none() {
        report.skipped.push(String::from(shared::NO_REDIS));
    }
    if servers.beanstalkd.is_none() {
        report.skipped.push(String::from("beanstalkd, which is not installed: apt-get install beanstalkd"));
    }
    for round in 1..=plan.rounds {
        eprintln!("  round {round} of {}", plan.rounds);
        servers.run_single(&mut report.rows)?;
        servers.run_shallow(&mut report.rows)?;
        servers.run_many(&mut report.rows)?;
    }
    judge(report);
    Ok(())
}

impl Servers {
    /// Frames of one message, 256 of them in flight on each connection.
    fn run_single(&self, rows: &mut Rows) -> anyhow::Result<()> {
        let memory = self.load(self.memory.load(), 256, 1);
        let ours = run(&memory)?;
        record(rows, OURS, &ours);
        record(rows, MIXED, &run(&BenchOptions { order: Order::Mixed, ..memory.clone() })?);
        compare_with_dashmap(rows, ON_DASHMAP, &ours, &run(&self.load(self.dashmap.load(), 256, 1))?);
        record(rows, PING, &run(&BenchOptions { op: Op::Ping, ..memory.clone() })?);
        let echo = BenchOptions { address: self.echo.address.into(), admin: None, op: Op::Ping, ..memory };
        record(rows, ECHO, &run(&echo)?);
        let by_hand = self.by_hand(256, 1);
        if let Some(shared::Servers { sidecar, redis, .. }) = &self.redis {
            record(rows, OURS_ON_REDIS, &run(&sleeping(self.load(sidecar.load(), 256, 1)))?);
            let by_hands = [
                (SORTED_SET, Keys::SortedSet),
                (SORTED_SET_BY_MS, Keys::SortedSetByMs),
                (HASH, Keys::HashAndSets),
            ];
            for (name, keys) in by_hands {
                let pairs = by_hand.run(redis.address, || Commands::new(keys, 1))?;
                rows.record(name, PAIRS, pairs);
                if keys == Keys::SortedSetByMs {
                    rows.record(name, TIMES, ours.pairs_per_second.context("pairs were made")? / pairs);
                }
            }
        }
        if let Some(beanstalkd) = &self.beanstalkd {
            rows.record(BEANSTALKD, PAIRS, by_hand.run(beanstalkd.address, Jobs::default)?);
        }
        Ok(())
    }

    /// Frames of one message, 16 of them in flight on each connection.
    fn run_shallow(&self, rows: &mut Rows) -> anyhow::Result<()> {
        let memory = self.load(self.memory.load(), 16, 1);
        record(rows, OURS_SHALLOW, &run(&memory)?);
        record(rows, PING_SHALLOW, &run(&BenchOptions { op: Op::Ping, ..memory })?);
        Ok(())
    }

    /// Frames of 512 messages.
    fn run_many(&self, rows: &mut Rows) -> anyhow::Result<()> {
        let ours = run(&self.load(self.memory.load(), FEW_REQUESTS, MANY_IDS))?;
        record(rows, OURS_MANY, &ours);
        let on_dashmap = run(&self.load(self.dashmap.load(), FEW_REQUESTS, MANY_IDS))?;
        compare_with_dashmap(rows, ON_DASHMAP_MANY, &ours, &on_dashmap);
        for (name, sidecar) in [(OURS_MANY, &self.memory), (ON_DASHMAP_MANY, &self.dashmap)] {
            rows.record(name, MEGABYTES, figure(sidecar.resident_bytes()?) / 1e6);
        }
        let Some(shared::Servers { sidecar, redis, .. }) = &self.redis else { return Ok(()) };
        record(rows, OURS_ON_REDIS_MANY, &run(&sleeping(self.load(sidecar.load(), FEW_REQUESTS, MANY_IDS)))?);
        let by_hand = self.by_hand(FEW_REQUESTS, MANY_IDS);
        let by_hands = [
            (SORTED_SET_MANY, Keys::SortedSet),
            (SORTED_SET_BY_MS_MANY, Keys::SortedSetByMs),
            (HASH_MANY, Keys::HashAndSets),
        ];
        for (name, keys) in by_hands {
            rows.record(name, PAIRS, by_hand.run(redis.address, || Commands::new(keys, MANY_IDS))?);
        }
        Ok(())
    }

    fn load(&self, server: BenchOptions, depth: u64, ids: u64) -> BenchOptions {
        let small = |count: u64| usize::try_from(count).expect("these are small numbers");
        BenchOptions {
            connections: small(CONNECTIONS),
            pipeline: Some(small(depth)),
            ids_per_frame: small(ids),
            in_flight: self.plan.in_flight,
            seconds: self.plan.run.as_secs_f64(),
            busy_poll: true,
            ..server
        }
    }

    fn by_hand(&self, depth: u64, ids: u64) -> Load {
        let Plan { in_flight, run, .. } = self.plan;
        Load { connections: CONNECTIONS, depth, ids, in_flight, run, busy_poll: true }
    }
}

/// The same load, for a server that is two processes: they and the load share two processors.
fn sleeping(load: BenchOptions) -> BenchOptions {
    BenchOptions { busy_poll: false, ..load }
}

/// Notes what came of a load on dashmap, and how many times as much the same load reached on our ring before it.
fn compare_with_dashmap(rows: &mut Rows, name: &str, ours: &bench::Report, on_dashmap: &bench::Report) {
    record(rows, name, on_dashmap);
    if let (Some(ours), Some(theirs)) = (ours.pairs_per_second, on_dashmap.pairs_per_second) {
        rows.record(name, TIMES, ours / theirs);
    }
}

/// Notes what came of a load of ours.
pub fn record(rows: &mut Rows, name: &str, report: &bench::Report) {
    if let Some(pairs) = report.pairs_per_second {
        rows.record(name, PAIRS, pairs);
    }
    rows.record(name, REQUESTS, report.frames_per_second);
    if let Ok(p99) = larger(report, |latency| latency.p99) {
        rows.record(name, P99, p99);
    }
}

fn judge(report: &mut PartReport) {
    let rows = report.rows.clone();
    let pairs = |to| rows.ratio((OURS, PAIRS), (to, PAIRS));
    let requests = |of, to| rows.ratio((of, REQUESTS), (to, REQUESTS));
    let of_ping = rows.ratio((OURS, PAIRS), (PING, REQUESTS));
    report.at_least("8 x 256: pairs/s, times the Pings/s", of_ping, 0.15, 0.25);
    report.at_least("8 x 256: Pings/s, times those of an echo", requests(PING, ECHO), 0.5, 0.9);
    report.at_least("8 x 256: pairs/s, times Redis ZADD, ZREM", pairs(SORTED_SET), 20.0, 40.0);
    report.at_least("8 x 256: pairs/s, times beanstalkd", pairs(BEANSTALKD), 45.0, 90.0);
    let shallow = requests(OURS_SHALLOW, PING_SHALLOW);
    report.at_least("8 x 16: requests/s, times the Pings/s", shallow, 0.6, 0.8);
    report.at_most("8 x 16: us, p99 of add and del", rows.median(OURS_SHALLOW, P99), 400.0, 200.0);
    let many = rows.median(OURS_MANY, PAIRS).map(|pairs| pairs / 1e6);
    let of_redis =
        rows.ratio_to_best((OURS_MANY, PAIRS), &[SORTED_SET_MANY, SORTED_SET_BY_MS_MANY, HASH_MANY], PAIRS);
    report.either(
        Target::at_least("512 ids a frame: million pairs/s", many, 8.0, 15.0),
        Target::at_least("512 ids a frame: pairs/s, times Redis", of_redis, 20.0, 30.0),
    );
}
