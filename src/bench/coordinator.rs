//! The course of a load: what comes after what, and what came of it.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior, interval, sleep_until};

use super::connection::{Arrival, Phase};
use super::latency::{Recorder, TickTimes};
use super::observers;
use super::report::{Figures, of_server};
use super::report::{Latency, Lateness};
use super::shared::Counters;
use super::shared::Shared;
use super::timeouts::Timeouts;
use super::{BenchError, Op, Progress, Report, ServerFigures, Stage, as_float, lost};
use crate::metrics::cpu_time;
use crate::protocol::frame::Welcome;

/// How often progress is reported.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// How much longer than the ack timeout a message may take to time out before it is missing.
const LENIENCE: Duration = Duration::from_secs(5);

/// Leads a load from its first connection to its report.
pub(super) struct Coordinator<'a> {
    shared: Shared,
    phases: &'a watch::Sender<Phase>,
    arrived: mpsc::UnboundedReceiver<Arrival>,
    recorders: &'a [Arc<Mutex<Recorder>>],
    progress: &'a (dyn Fn(Progress) + Send + Sync),
    timeouts: Arc<Mutex<Timeouts>>,
    tick_times: Arc<Mutex<TickTimes>>,
    /// The counters of each connection that is done with this phase.
    counters_of: Vec<Counters>,
    /// Frames answered at the last report of progress, and its time.
    reported: (u64, u64),
}

/// The CPU time and memory of a measurement.
struct Used {
    client_cpu_seconds: f64,
    server: Result<Option<ServerFigures>, String>,
}

impl<'a> Coordinator<'a> {
    pub(super) fn new(
        shared: Shared,
        phases: &'a watch::Sender<Phase>,
        arrived: mpsc::UnboundedReceiver<Arrival>,
        recorders: &'a [Arc<Mutex<Recorder>>],
        progress: &'a (dyn Fn(Progress) + Send + Sync),
    ) -> Coordinator<'a> {
        let timeouts = Arc::new(Mutex::new(Timeouts::new(shared.plan.ids)));
        let (tick_times, counters_of) = (Arc::default(), Vec::new());
        Coordinator {
            shared,
            phases,
            arrived,
            recorders,
            progress,
            timeouts,
            tick_times,
            counters_of,
            reported: (0, 0),
        }
    }

    pub(super) async fn run(mut self) -> Result<Report, BenchError> {
        let is_wheel = self.shared.options.op == Op::Wheel;
        self.all_arrive(Stage::Connecting, None).await?;
        let welcome = self.shared.welcome.get().cloned().ok_or_else(|| lost("no server said Welcome"))?;
        self.shared.options.check_with(&welcome)?;
        let mut clock = None;
        if is_wheel {
            observers::collect_timeouts(&self.shared, &self.timeouts).await?;
            if !self.shared.plan.ids.all_are_acked() {
                clock = Some(observers::ask_for_ticks(&self.shared, &self.tick_times).await?);
            }
            self.publish(Phase::Fill);
            self.all_arrive(Stage::Filling, None).await?;
        }
        let used = self.measure().await?;
        let measured = std::mem::take(&mut self.counters_of);
        if is_wheel {
            self.publish(Phase::Clean);
            self.all_arrive(Stage::Deleting, None).await?;
            self.wait_for_timeouts(&welcome).await;
        }
        if let Some(clock) = clock {
            clock.stop().await;
        }
        Ok(self.report(&welcome, &measured, used))
    }

    fn publish(&mut self, phase: Phase) {
        self.counters_of.clear();
        self.phases.send_replace(phase);
    }

    /// Waits until all connections have done what the phase asks for, or until a time, in ns since the load began.
    async fn all_arrive(&mut self, stage: Stage, until: Option<u64>) -> Result<(), BenchError> {
        let begun = (self.shared.stopwatch.now(), self.shared.plan.live.messages());
        let mut report = every(REPORT_EVERY);
        let end = self.shared.stopwatch.moment(until.unwrap_or_default());
        while self.counters_of.len() < self.shared.options.connections {
            tokio::select! {
                arrival = self.arrived.recv() => match arrival {
                    Some(Ok(counters)) => self.counters_of.push(counters),
                    Some(Err(error)) => return Err(lost(error)),
                    None => return Err(lost("all connections have ended")),
                },
                _ = report.tick() => self.report_progress(stage, self.share(stage, begun, until)),
                () = sleep_until(end.into()), if until.is_some() => break,
            }
        }
        Ok(())
    }

    /// How much of a stage is done that began at a time, with so many messages answered until then.
    fn share(&self, stage: Stage, (begun_at, begun_with): (u64, u64), until: Option<u64>) -> f64 {
        let in_flight = self.shared.options.in_flight;
        match (stage, until) {
            (Stage::Filling | Stage::Deleting, _) => {
                ratio(self.shared.plan.live.messages() - begun_with, in_flight)
            }
            (_, Some(until)) => ratio(self.shared.stopwatch.now() - begun_at, until - begun_at),
            _ => ratio(self.counters_of.len() as u64, self.shared.options.connections as u64),
        }
    }

    fn report_progress(&mut self, stage: Stage, share: f64) {
        let (frames, now) = (self.shared.plan.live.frames(), self.shared.stopwatch.now());
        let (frames_before, before) = std::mem::replace(&mut self.reported, (frames, now));
        let frames_per_second = ratio_of(frames - frames_before, now - before) * 1e9;
        (self.progress)(Progress { stage, share, frames_per_second });
    }

    async fn measure(&mut self) -> Result<Used, BenchError> {
        let before = self.server_figures().await;
        let cpu_before = cpu_time();
        let from = self.shared.stopwatch.now();
        let length = Duration::from_secs_f64(self.shared.options.seconds);
        let until = from + u64::try_from(length.as_nanos()).unwrap_or(u64::MAX / 2);
        self.publish(Phase::Measure { from, until });
        self.all_arrive(Stage::Measuring, Some(until)).await?;
        let client_cpu_seconds = cpu_time().saturating_sub(cpu_before).as_secs_f64();
        let after = if before.is_err() { Ok(None) } else { self.server_figures().await };
        self.all_arrive(Stage::Measuring, None).await?;
        let server = before.and_then(|before| Ok(difference(before, after?)));
        Ok(Used { client_cpu_seconds, server })
    }

    async fn server_figures(&self) -> Result<Option<Figures>, String> {
        let Some(admin) = self.shared.options.admin.clone() else { return Ok(None) };
        let asked = tokio::task::spawn_blocking(move || of_server(&admin)).await;
        asked.map_err(|error| error.to_string())?.map(Some)
    }

    /// Waits until all that is left has timed out, or is missing.
    async fn wait_for_timeouts(&mut self, welcome: &Welcome) {
        let expected: u64 = self.counters_of.iter().map(|counters| counters.left_to_time_out).sum();
        // The last message has its ack timeout, and up to a tick more.
        let tick = Duration::from_millis(u64::from(welcome.tick_ms));
        let patience = self.shared.options.ack_timeout(welcome) + tick + LENIENCE;
        let end = self.shared.stopwatch.moment(self.shared.stopwatch.now()) + patience;
        let mut report = every(REPORT_EVERY);
        loop {
            let count = self.timeouts.lock().count;
            if count >= expected {
                return;
            }
            self.report_progress(Stage::Waiting, ratio(count, expected));
            tokio::select! {
                _ = report.tick() => {}
                () = sleep_until(end.into()) => return,
            }
        }
    }

    fn report(self, welcome: &Welcome, measured: &[Counters], used: Used) -> Report {
        let options = &self.shared.options;
        let errors = &self.shared.plan.errors;
        let mut report = Report::new(options);
        let sum = |of: fn(&Counters) -> u64| measured.iter().map(of).sum::<u64>();
        let per_second = |count| as_float(count) / options.seconds;
        report.frames_per_second = per_second(sum(|counters| counters.frames));
        report.not_made = sum(|counters| counters.not_made);
        let mut latencies = Recorder::default();
        for recorder in self.recorders {
            latencies.merge(&recorder.lock());
        }
        let (adds, dels) = (Latency::of(&latencies.adds), Latency::of(&latencies.dels));
        if options.op == Op::Ping {
            report.latency_us.ping = adds;
        } else {
            (report.latency_us.add, report.latency_us.del) = (adds, dels);
            let added = sum(|counters| counters.added);
            let all_are_acked = self.shared.plan.ids.all_are_acked();
            let pairs = if all_are_acked { added.min(sum(|counters| counters.acked)) } else { added };
            report.pairs_per_second = Some(per_second(pairs));
            let mut tick_times = self.tick_times.lock().clone();
            for counters in &self.counters_of {
                tick_times.merge(&counters.tick_times);
            }
            let mut timeouts = self.timeouts.lock();
            timeouts.check(errors);
            timeouts.compare(&self.counters_of, errors);
            let lateness = timeouts.lateness(&tick_times, options.ticks(welcome), errors);
            report.timeout_lateness_ms = lateness.as_ref().map(Lateness::of);
            report.timed_out = timeouts.count;
            report.timed_out_of_others = timeouts.of_others;
            report.redelivered_batches = timeouts.redelivered;
        }
        report.client_cpu_seconds = used.client_cpu_seconds;
        match used.server {
            Ok(server) => report.server = server,
            Err(problem) => report.server_problem = Some(problem),
        }
        (report.errors, report.error_texts) = errors.first();
        report
    }
}

fn difference(before: Option<Figures>, after: Option<Figures>) -> Option<ServerFigures> {
    let (before, after) = (before?, after?);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "memory is a whole number of bytes"
    )]
    let rss_bytes = after.rss_bytes as u64;
    Some(ServerFigures { cpu_seconds: after.cpu_seconds - before.cpu_seconds, rss_bytes })
}

fn every(period: Duration) -> Interval {
    let mut interval = interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

fn ratio_of(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { as_float(part) / as_float(whole) }
}

/// A share, from 0 to 1.
fn ratio(part: u64, whole: u64) -> f64 {
    ratio_of(part, whole).min(1.0)
}
