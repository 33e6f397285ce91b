//! Collects the state that the admin endpoints and the watchdog report.

use std::pin::Pin;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::http::StatusCode;
use futures_util::future::{join_all, try_join_all};
use parking_lot::Mutex;
use rlimit::Resource;
use tracing::{debug, warn};

use super::history::{Counters, History, KEPT, SAMPLE_EVERY};
use super::shared_answer::{ANSWER_TIMEOUT, Answer, SharedAnswer};
use super::status::{
    AccessReport, GroupReport, LastMinutes, LimitReport, ListenerReport, RatesReport, StatusReport,
};
use crate::core::{
    Backlog, CLOCK_BEAT, GroupBacklog, GroupName, MAX_GROUPS, Reason, Refusal, RingStatus, Tick, TickCounts,
    TickReport, merge_backlogs,
};
use crate::metrics::{Listener, RESP_COMMANDS};
use crate::process::thread::RuntimeThread;
use crate::server::{Admission, Certificate, MAX_UNAUTHENTICATED_MEMORY, Shared};
use crate::ticker::{LIVENESS, TickerHandle};

/// The parts of a sidecar whose state is reported.
pub struct Health {
    /// The name of the sidecar among those that share its store.
    pub name: String,
    /// The parts that check new connections. They contain the parts that depend on the store, once it is open.
    pub admission: Arc<Admission>,
    /// The tickers, in the order of the rings. Not set while the store is being opened.
    tickers: OnceLock<Vec<TickerHandle>>,
    /// Whether the sidecar drains.
    pub draining: AtomicBool,
    /// The counters of the last minutes.
    pub history: Mutex<History>,
    /// The answer to `GET /metrics`.
    pub metrics_answer: SharedAnswer,
    /// The answer to `GET /status`.
    pub status_answer: SharedAnswer,
}

/// The answer of the endpoints that need the store, while it is being opened.
pub(crate) const OPENING: &str =
    "the store is being opened, and clients are refused with starting: wait, or look at the store and the log\n";

impl Health {
    /// Creates the report of a sidecar whose store is not open yet. `answers` is the thread that asks the store.
    pub fn new(name: &str, admission: &Arc<Admission>, answers: RuntimeThread) -> Health {
        let answers = Arc::new(answers);
        Health {
            name: name.to_owned(),
            admission: Arc::clone(admission),
            tickers: OnceLock::new(),
            draining: AtomicBool::new(false),
            history: Mutex::new(History::starting(admission.clock.now())),
            metrics_answer: SharedAnswer::made_on(&answers),
            status_answer: SharedAnswer::made_on(&answers),
        }
    }

    /// Reports the state of these parts from now on, and admits clients.
    pub fn open(self: &Arc<Self>, tickers: Vec<TickerHandle>, shared: &Arc<Shared>) {
        let _ = self.tickers.set(tickers);
        let health = Arc::downgrade(self);
        let status = move || -> Pin<Box<dyn Future<Output = Result<Bytes, Refusal>> + Send>> {
            let health = health.upgrade();
            Box::pin(async move {
                let draining = || Refusal::new(Reason::Draining, "this sidecar ends");
                health.ok_or_else(draining)?.status().await
            })
        };
        self.admission.open(shared, Box::new(status));
    }

    /// Returns the answer to `GET /status`.
    pub(super) async fn answer_status(self: Arc<Self>) -> Answer {
        let failed =
            |text| Answer(StatusCode::SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", Bytes::from(text));
        let of = Arc::clone(&self);
        let answer = self.status_answer.get(&self.admission.clock, async move {
            let Some(shared) = of.admission.shared() else { return failed(String::from(OPENING)) };
            match of.report(shared).await {
                Ok(report) => {
                    let json = serde_json::to_string(&report).expect("a report can be written");
                    Answer(StatusCode::OK, "application/json", Bytes::from(json + "\n"))
                }
                Err(refusal) => failed(format!("{refusal}\n")),
            }
        });
        let silent = || failed(format!("the store did not answer within {ANSWER_TIMEOUT:?}: look at the store\n"));
        answer.await.unwrap_or_else(silent)
    }

    /// Returns the status as JSON.
    async fn status(self: Arc<Self>) -> Result<Bytes, Refusal> {
        let Answer(status, _, text) = self.answer_status().await;
        if status == StatusCode::OK {
            return Ok(text.slice(..text.trim_ascii_end().len()));
        }
        let text = String::from_utf8_lossy(text.trim_ascii_end()).into_owned();
        Err(Refusal::new(Reason::StoreUnreachable, text))
    }

    /// Returns the tickers; none while the store is being opened.
    pub fn tickers(&self) -> &[TickerHandle] {
        self.tickers.get().map_or(&[], Vec::as_slice)
    }

    /// Returns how long the loop of a ticker has not run, if this is longer than [`LIVENESS`]. This process must then
    /// be restarted. Otherwise returns `None`. A working loop runs even while the sidecar does not lead the ring or is
    /// not allowed to move its pointer.
    pub async fn stalled(&self) -> Option<Duration> {
        let silence = || {
            let now = self.admission.clock.now();
            self.tickers().iter().map(|ticker| ticker.silence(now)).max().filter(|silence| *silence > LIVENESS)
        };
        silence()?;
        // After a stall of the whole process, the loops run again soon. So look a second time.
        tokio::time::sleep(CLOCK_BEAT * 2).await;
        silence()
    }

    /// Sets the gauges. The gauges about rings include only the rings that this sidecar leads. A ring that does not
    /// answer counts as led by another sidecar.
    pub(super) async fn refresh_metrics(&self) {
        let Some(shared) = self.admission.shared() else { return self.set_metrics(&[], &Backlog::default(), &[]) };
        let (rings, now) = (shared.store.rings(), self.admission.clock.now());
        let statuses = join_all(rings.iter().map(|parts| parts.ring.status(now))).await;
        let leads = |status: &Result<RingStatus, Refusal>| status.as_ref().is_ok_and(|status| status.leads);
        let led = rings.iter().zip(&statuses).filter(|(_, status)| leads(status));
        let backlogs = join_all(led.map(|(parts, _)| parts.outbox.backlog(now))).await;
        let refusals = statuses.iter().filter_map(|status| status.as_ref().err());
        match refusals.chain(backlogs.iter().filter_map(|backlog| backlog.as_ref().err())).next() {
            Some(refusal) if shared.store.is_up() => {
                warn!(%refusal, "the store does not report the state of its rings; their gauges are 0: look at the store");
            }
            Some(refusal) => debug!(%refusal, "the store is unreachable; gauges of its rings are 0"),
            None => {}
        }
        let led: Vec<RingStatus> = statuses.into_iter().flatten().filter(|status| status.leads).collect();
        let backlog = merge_backlogs(backlogs.into_iter().flatten().collect());
        self.set_metrics(&led, &backlog, &shared.delivery.attended());
    }

    pub(super) fn set_metrics(&self, led: &[RingStatus], backlog: &Backlog, subscribers: &[(GroupName, u64)]) {
        self.admission.set_gauges();
        let metrics = &self.admission.metrics;
        metrics.store_up.set(i64::from(self.admission.shared().is_some_and(|shared| shared.store.is_up())));
        if let Some(journal) = self.admission.shared().and_then(|shared| shared.store.journal()) {
            metrics.set_journal(&journal);
        }
        metrics.set_rings(led);
        metrics.set_outbox(backlog, subscribers);
    }

    pub(super) async fn report(&self, shared: &Shared) -> Result<StatusReport, Refusal> {
        let Shared { store, delivery, clock, .. } = shared;
        let (rings, now) = (store.rings(), clock.now());
        // Read the expired ticks before the pointers. In the other order, a tick could expire between the two reads.
        // The report would then show the tick as expired, and the pointer still at or before it.
        let tick = |(tick, counts): (Tick, TickCounts)| {
            let TickCounts { added, acked, storm, .. } = counts;
            TickReport { tick: tick.0, added, acked, timed_out: counts.timed_out(), storm }
        };
        let recent = |ticker: &TickerHandle| ticker.recent().into_iter().map(tick).collect();
        let recent: Vec<Vec<TickReport>> = self.tickers().iter().map(recent).collect();
        let statuses = try_join_all(rings.iter().map(|parts| parts.ring.status(now))).await?;
        let backlog = delivery.backlog().await?;
        let ring = |(status, recent)| RingStatus { recent, ..status };
        let group = |backlog: &GroupBacklog| GroupReport {
            group: backlog.group.to_string(),
            subscribers: delivery.subscribers(&backlog.group),
            outbox_batches: backlog.batches,
            unacked_batches: backlog.unacked,
            oldest_seconds: backlog.oldest.as_secs_f64(),
        };
        let access = |(name, connections): (Arc<str>, u64)| AccessReport { name: name.to_string(), connections };
        let metrics = &self.admission.metrics;
        let listener = |listener: Listener| ListenerReport {
            listener: listener.as_str().to_owned(),
            connections: self.admission.admitted_at(listener),
            received_bytes: metrics.received_bytes.of(listener).get(),
            sent_bytes: metrics.sent_bytes.of(listener).get(),
        };
        let command = |command: &'static str| (command.to_owned(), metrics.resp_commands.of(command).get());
        let wheel = rings[0].ring.wheel();
        let (uptime, rates, last_minutes) = self.recent(now);
        let in_flight = statuses.iter().map(|status| status.in_flight).sum();
        Ok(StatusReport {
            sidecar: self.name.clone(),
            store: store.kind().to_owned(),
            slots: wheel.slots(),
            tick_ms: wheel.tick_ms(),
            rings: statuses.into_iter().zip(recent).map(ring).collect(),
            groups: backlog.groups.iter().map(group).collect(),
            access: self.admission.access.connections().into_iter().map(access).collect(),
            listeners: Listener::ALL.into_iter().map(listener).collect(),
            resp_commands: RESP_COMMANDS.into_iter().map(command).collect(),
            version: String::from(env!("CARGO_PKG_VERSION")),
            uptime_seconds: uptime.as_secs_f64(),
            rates,
            last_minutes,
            limits: self.limits(in_flight, &backlog),
            certificate_expiry: self.admission.certificate.as_ref().and_then(Certificate::expiry),
            journal: store.journal(),
            shared_store: store.report(),
        })
    }

    /// Samples the counters every 10 seconds. Never ends.
    pub async fn sample(self: Arc<Health>) {
        loop {
            tokio::time::sleep(SAMPLE_EVERY).await;
            self.history.lock().record(self.admission.clock.now(), Counters::read(&self.admission.metrics));
        }
    }

    /// Returns the time since the start, the rates, and the events of the last minutes.
    #[expect(clippy::cast_precision_loss, reason = "a counter stays far below 2^53")]
    fn recent(&self, now: Instant) -> (Duration, RatesReport, LastMinutes) {
        let (history, counters) = (self.history.lock(), Counters::read(&self.admission.metrics));
        let (window, before) = history.before(now, SAMPLE_EVERY);
        let grown = counters.since(before);
        let rate = |count: u64| count as f64 / window.as_secs_f64().max(1.0);
        let rates = RatesReport {
            seconds: window.as_secs_f64(),
            adds: rate(grown.adds),
            dels: rate(grown.dels),
            timeouts: rate(grown.timeouts),
        };
        let (window, before) = history.before(now, KEPT);
        let grown = counters.since(before);
        let refusals = Reason::ALL.iter().zip(grown.refusals).filter(|(_, count)| *count > 0);
        let last_minutes = LastMinutes {
            seconds: window.as_secs_f64(),
            storms: grown.storms,
            out_of_memory: grown.out_of_memory,
            refusals: refusals.map(|(reason, count)| (reason.as_str().to_owned(), count)).collect(),
        };
        (now.saturating_duration_since(history.started), rates, last_minutes)
    }

    /// Returns the limits of this sidecar. A limit of 0 does not apply, and is left out.
    fn limits(&self, in_flight: u64, backlog: &Backlog) -> Vec<LimitReport> {
        let Admission { options, metrics, memory, unauthenticated_memory, .. } = &*self.admission;
        let gauge = |value: i64| u64::try_from(value).unwrap_or_default();
        let connections = self.admission.busiest_listener();
        let open_files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let most_files = Resource::NOFILE.get_soft().unwrap_or_default();
        let limits = [
            ("--max-in-flight", in_flight, gauge(metrics.max_in_flight.get())),
            ("--max-held-acks", gauge(metrics.held_acks.get()), gauge(metrics.max_held_acks.get())),
            ("--outbox-max-ids", backlog.ids, gauge(metrics.outbox_max_ids.get())),
            ("--max-connections", connections as u64, options.max_connections as u64),
            ("--max-connection-memory", memory.charged() as u64, options.max_connection_memory as u64),
            ("memory before Hello", unauthenticated_memory.charged() as u64, MAX_UNAUTHENTICATED_MEMORY as u64),
            ("groups", backlog.groups.len() as u64, MAX_GROUPS as u64),
            ("open files", open_files as u64, most_files),
        ];
        let named = |(name, used, limit): (&str, u64, u64)| LimitReport { name: name.to_owned(), used, limit };
        limits.into_iter().filter(|(_, _, limit)| *limit > 0).map(named).collect()
    }
}
