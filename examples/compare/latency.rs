//! At half of the highest rate: how long an add and a del take, how late timeouts are, and how much of that is the
//! machine's.

use std::time::Duration;

use ackwheel::bench::{BenchOptions, Op};
use anyhow::{Context, ensure};

use crate::echo::Echo;
use crate::machine::{taken, waking};
use crate::numbers::figure;
use crate::plan::Plan;
use crate::report::PartReport;
use crate::runs::Rows;
use crate::sidecar::{Sidecar, larger, run};
use crate::wire::{CPU, P99, PAIRS};

const P999: &str = "us, p99.9 of add and del";
const SINGLE_P99: &str = "us, p99";
const SINGLE_P999: &str = "us, p99.9";
const SHARE_TAKEN: &str = "thousandths of it taken, 200 us or more at once";
const LONGEST_TAKEN: &str = "us, the longest at once";
const LATE_P50: &str = "ms late, p50 of timeouts";
const LATE_P99: &str = "ms late, p99 of timeouts";

const FULL: &str = "memory, 64 connections, as fast as possible";
const HALF: &str = "memory, 64 connections, half of that rate";
/// With a longer collection of writes, each wake-up and system call of both sides serves more requests.
const SELDOM: &str = "the same, each connection every 16 ms in place of 4";
const SELDOM_EVERY: Duration = Duration::from_millis(16);
/// The part of the tails that server, wire and machine cause: a Ping touches no wheel.
const PINGS: &str = "Pings to it, as many frames a second";
/// The share of the wire and the machine.
const ECHOED: &str = "Pings to a bare echo, as many frames a second";
/// The share of the machine: nothing else runs then.
const WAKING: &str = "a thread that sleeps, woken so late";
/// The same: what is taken from those that do not sleep has to be made up for, in the time that is left.
const TAKEN: &str = "threads that only look at the clock, a processor each";

/// The share that is acknowledged.
const ACKED: f64 = 0.99;
/// Ticks of a second that a message may stay in flight.
const SLOTS: u16 = 15;

/// Measures this part.
///
/// # Errors
///
/// When the sidecar does not start or answers wrongly.
pub fn measure(plan: &Plan, report: &mut PartReport) -> anyhow::Result<()> {
    let memory = Sidecar::start(&["--slots", &SLOTS.to_string(), "--tick", "1s"])?;
    let echo = Echo::start()?;
    let seconds = plan.run.as_secs_f64();
    let full = BenchOptions { connections: 64, in_flight: plan.many, seconds, ..memory.load() };
    for round in 1..=plan.rounds {
        eprintln!("  round {round} of {}", plan.rounds);
        let pairs = run(&full)?.pairs_per_second.context("pairs were measured")?;
        report.rows.record(FULL, PAIRS, pairs);
        let rate = whole(pairs / 2.0);
        let half = BenchOptions {
            acked: ACKED,
            rate: Some(rate),
            seconds: 3.0 * seconds,
            ack_timeout_ticks: Some(ack_timeout_ticks(plan.many, rate)),
            ..full.clone()
        };
        measure_half(HALF, &half, &mut report.rows)?;
        let seldom = BenchOptions { burst_every: SELDOM_EVERY, ..half };
        measure_half(SELDOM, &seldom, &mut report.rows)?;
        let rows = &mut report.rows;
        let pings = BenchOptions { op: Op::Ping, rate: Some(2 * rate), seconds: 3.0 * seconds, ..full.clone() };
        let echoed = BenchOptions { address: echo.address.into(), admin: None, ..pings.clone() };
        for (subject, load) in [(PINGS, pings), (ECHOED, echoed)] {
            let ping = run(&load)?.latency_us["ping"];
            rows.record(subject, SINGLE_P99, ping.p99);
            rows.record(subject, SINGLE_P999, ping.p999.unwrap_or(f64::NAN));
        }
        let (p99, p999) = waking(plan.run);
        rows.record(WAKING, SINGLE_P99, p99);
        rows.record(WAKING, SINGLE_P999, p999);
        let (share, longest) = taken(plan.run);
        rows.record(TAKEN, SHARE_TAKEN, share);
        rows.record(TAKEN, LONGEST_TAKEN, longest);
    }
    let rows = report.rows.clone();
    report.at_most("half rate: us, p99 of add and del", rows.median(HALF, P99), 1_000.0, 1_000.0);
    report.at_most("half rate: us, p99.9 of add and del", rows.median(HALF, P999), 5_000.0, 5_000.0);
    report.at_most("half rate: ms late, p50 of timeouts", rows.median(HALF, LATE_P50), 1.0, 0.2);
    report.at_most("half rate: ms late, p99 of timeouts", rows.median(HALF, LATE_P99), 10.0, 10.0);
    Ok(())
}

fn measure_half(subject: &str, half: &BenchOptions, rows: &mut Rows) -> anyhow::Result<()> {
    let found = run(half)?;
    ensure!(found.timed_out > 0, "nothing timed out, although one in a hundred is not acknowledged");
    rows.record(subject, PAIRS, found.pairs_per_second.context("pairs were measured")?);
    rows.record(subject, P99, larger(&found, |latency| latency.p99)?);
    rows.record(subject, P999, larger(&found, |latency| latency.p999.unwrap_or(f64::NAN))?);
    let late = found.timeout_lateness_ms.context("the lateness of timeouts was measured")?;
    rows.record(subject, LATE_P50, late.p50);
    rows.record(subject, LATE_P99, late.p99);
    rows.record(subject, CPU, found.server.context("its admin endpoint answers")?.cpu_seconds);
    Ok(())
}

/// Twice as long as a message stays in flight until it is acknowledged, so that none times out that should not, and
/// no longer, since the run waits for those that do.
fn ack_timeout_ticks(in_flight: u64, rate: u64) -> u16 {
    let seconds = (2.0 * figure(in_flight) / figure(rate.max(1))).ceil();
    u16::try_from(whole(seconds)).unwrap_or(SLOTS).saturating_add(1).min(SLOTS)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates and seconds are far below 2^53"
)]
fn whole(figure: f64) -> u64 {
    figure as u64
}
