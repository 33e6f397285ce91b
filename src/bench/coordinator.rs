//! Coordinates a load (one run of the bench): starts each phase, waits for its end, and makes the report.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior, interval, sleep_until};

use super::connection::Arrival;
use super::lateness_clients;
use super::load_state::{LoadState, Phase};
use super::records::{Counters, Recorder};
use super::report::{Latency, of_server};
use super::{BenchError, Op, Progress, Report, ServerFigures, as_float, lost};
use crate::metrics::cpu_time;
use crate::protocol::frame::Welcome;

/// How often progress is reported.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// How long the coordinator waits for timeout batches after the time at which all messages must have timed out. A
/// message that has not arrived by then counts as missing.
const LENIENCE: Duration = Duration::from_secs(5);

/// The coordinator of a load.
pub(super) struct Coordinator<'a> {
    pub(super) shared: Arc<LoadState>,
    pub(super) phases: &'a watch::Sender<Phase>,
    pub(super) arrived: mpsc::UnboundedReceiver<Arrival>,
    pub(super) progress: &'a (dyn Fn(Progress) + Sync),
    /// The counters of the connections that have finished the current phase.
    pub(super) counters_of: Vec<Counters>,
    /// The number of answered frames at the last report of progress, and the time of this report.
    pub(super) reported: (u64, u64),
}

/// The results of a measurement, except the times, which are in the recorders of [`LoadState`].
struct Measured {
    counters_of: Vec<Counters>,
    client_cpu_seconds: f64,
    server: Result<Option<ServerFigures>, String>,
}

impl Coordinator<'_> {
    /// Runs all phases of the load and returns the report.
    pub(super) async fn run(mut self) -> Result<Report, BenchError> {
        let is_wheel = self.shared.options.op == Op::Wheel;
        self.all_arrive("connecting", None).await?;
        let welcome = self.shared.welcome.get().cloned().ok_or_else(|| lost("no server said Welcome"))?;
        self.shared.options.check_with(&welcome).map_err(BenchError::Options)?;
        let mut clock = None;
        if is_wheel {
            lateness_clients::collect_timeouts(&self.shared).await?;
            if !self.shared.ids.all_are_acked {
                clock = Some(lateness_clients::ask_for_ticks(&self.shared, self.phases.subscribe()).await?);
            }
            self.publish(Phase::Fill);
            self.all_arrive("filling", None).await?;
        }
        let measured = self.measure().await?;
        if is_wheel {
            self.publish(Phase::Clean);
            self.all_arrive("deleting", None).await?;
            self.wait_for_timeouts(&welcome).await;
        }
        self.phases.send_replace(Phase::Done);
        if let Some(clock) = clock {
            // This task does not panic, and it records its own errors.
            let _ = clock.await;
        }
        Ok(self.report(&welcome, measured))
    }

    fn publish(&mut self, phase: Phase) {
        self.counters_of.clear();
        self.phases.send_replace(phase);
    }

    /// Waits until all connections have finished the phase, or until the time `until`, in ns since the load began.
    /// Reports the progress of `stage` while it waits.
    async fn all_arrive(&mut self, stage: &'static str, until: Option<u64>) -> Result<(), BenchError> {
        let begun = (self.shared.now(), self.shared.messages.load(Ordering::Relaxed));
        let mut report = every(REPORT_EVERY);
        let end = self.shared.moment(until.unwrap_or_default());
        while self.counters_of.len() < self.shared.options.connections {
            tokio::select! {
                arrival = self.arrived.recv() => match arrival {
                    Some(Ok(counters)) => self.counters_of.push(counters),
                    Some(Err(error)) => return Err(lost(error)),
                    None => return Err(lost("all connections have ended")),
                },
                _ = report.tick() => self.report_progress(stage, self.share(begun)),
                () = sleep_until(end.into()), if until.is_some() => break,
            }
        }
        Ok(())
    }

    /// Returns the share of the phase that is done. `begun_at` is the time at which the phase began, in ns since the
    /// load began. `begun_with` is the number of messages that were answered by then.
    fn share(&self, (begun_at, begun_with): (u64, u64)) -> f64 {
        let options = &self.shared.options;
        match *self.phases.borrow() {
            Phase::Fill | Phase::Clean => {
                ratio(self.shared.messages.load(Ordering::Relaxed) - begun_with, options.in_flight)
            }
            Phase::Measure { from, until } => ratio(self.shared.now() - begun_at, until - from),
            Phase::Rest | Phase::Done => ratio(self.counters_of.len() as u64, options.connections as u64),
        }
    }

    fn report_progress(&mut self, stage: &'static str, share: f64) {
        let (frames, now) = (self.shared.frames.load(Ordering::Relaxed), self.shared.now());
        let (frames_before, before) = std::mem::replace(&mut self.reported, (frames, now));
        let frames_per_second = ratio(frames - frames_before, now - before) * 1e9;
        (self.progress)(Progress { stage, share: share.min(1.0), frames_per_second });
    }

    async fn measure(&mut self) -> Result<Measured, BenchError> {
        let before = self.server_figures().await;
        let cpu_before = cpu_time();
        let from = self.shared.now();
        let length = Duration::from_secs_f64(self.shared.options.seconds);
        let until = from + u64::try_from(length.as_nanos()).unwrap_or(u64::MAX / 2);
        self.publish(Phase::Measure { from, until });
        self.all_arrive("measuring", Some(until)).await?;
        let client_cpu_seconds = cpu_time().saturating_sub(cpu_before).as_secs_f64();
        let after = if before.is_err() { Ok(None) } else { self.server_figures().await };
        self.all_arrive("measuring", None).await?;
        let used = |(before, after): (ServerFigures, ServerFigures)| ServerFigures {
            cpu_seconds: after.cpu_seconds - before.cpu_seconds,
            ..after
        };
        let server = before.and_then(|before| Ok(before.zip(after?).map(used)));
        Ok(Measured { counters_of: std::mem::take(&mut self.counters_of), client_cpu_seconds, server })
    }

    async fn server_figures(&self) -> Result<Option<ServerFigures>, String> {
        let Some(admin) = self.shared.options.admin.clone() else { return Ok(None) };
        let asked = tokio::task::spawn_blocking(move || of_server(&admin)).await;
        asked.map_err(|error| error.to_string())?.map(Some)
    }

    /// Waits until all remaining messages have timed out or count as missing.
    async fn wait_for_timeouts(&mut self, welcome: &Welcome) {
        let expected: u64 = self.counters_of.iter().map(|counters| counters.left_to_time_out).sum();
        // A message times out at most one tick after its ack timeout.
        let tick = Duration::from_millis(u64::from(welcome.tick_ms));
        let patience = self.shared.options.ack_timeout(welcome) + tick + LENIENCE;
        let end = self.shared.moment(self.shared.now()) + patience;
        let mut report = every(REPORT_EVERY);
        while self.shared.moment(self.shared.now()) < end {
            let count = self.shared.timeouts.lock().count;
            if count >= expected {
                return;
            }
            self.report_progress("timing out", ratio(count, expected));
            report.tick().await;
        }
    }

    fn report(self, welcome: &Welcome, measured: Measured) -> Report {
        let LoadState { options, ids, errors, .. } = &*self.shared;
        let sum = |of: fn(&Counters) -> u64| measured.counters_of.iter().map(of).sum::<u64>();
        let per_second = |count| as_float(count) / options.seconds;
        let mut times = Recorder::default();
        for recorder in &self.shared.recorders {
            times.merge(&recorder.lock());
        }
        let mut timeouts = self.shared.timeouts.lock();
        timeouts.check(errors);
        timeouts.compare(&self.counters_of, errors);
        let lateness = timeouts.lateness(&times.tick_times, options.ticks(welcome), errors);
        let lateness = Latency::of(&lateness, 1e6).map(|lateness| Latency { p999: None, ..lateness });
        let added = sum(|counters| counters.added);
        let pairs = if ids.all_are_acked { added.min(sum(|counters| counters.acked)) } else { added };
        let is_wheel = options.op == Op::Wheel;
        let latencies = [(if is_wheel { "add" } else { "ping" }, times.adds), ("del", times.dels)];
        let latencies = latencies.into_iter().filter_map(|(name, times)| Some((name, Latency::of(&times, 1e3)?)));
        let (error_count, error_texts) = errors.first();
        Report {
            options: options.clone(),
            adds: self.counters_of.iter().map(|counters| counters.all_added).sum(),
            dels: self.counters_of.iter().map(|counters| counters.all_acked).sum(),
            burst_every_ms: options.rate.map(|_| options.burst_every.as_secs_f64() * 1e3),
            pairs_per_second: is_wheel.then_some(per_second(pairs)),
            frames_per_second: per_second(sum(|counters| counters.frames)),
            not_made: sum(|counters| counters.not_made),
            latency_us: latencies.collect(),
            timeout_lateness_ms: lateness,
            timed_out: timeouts.count,
            timed_out_of_others: timeouts.of_others,
            redelivered_batches: timeouts.redelivered,
            errors: error_count,
            error_texts,
            client_cpu_seconds: measured.client_cpu_seconds,
            server_problem: measured.server.as_ref().err().cloned(),
            server: measured.server.ok().flatten(),
        }
    }
}

fn every(period: Duration) -> Interval {
    let mut interval = interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { as_float(part) / as_float(whole) }
}
