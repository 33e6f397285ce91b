//! Collects the state that the admin endpoints and the watchdog report.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use tracing::{debug, warn};

use super::shared_answer::SharedAnswer;
use super::status::{AccessReport, GroupReport, StatusReport};
use crate::clock::Clock;
use crate::core::{
    Backlog, CLOCK_BEAT, GroupBacklog, GroupName, Refusal, RingStatus, Tick, TickCounts, TickReport,
    merge_backlogs,
};
use crate::process::thread::RuntimeThread;
use crate::server::{Admission, Shared};
use crate::ticker::{LIVENESS, TickerHandle};

/// The parts of a sidecar whose state is reported.
pub struct Health {
    /// The name of the sidecar among those that share its store.
    pub name: String,
    /// The parts that check new connections. They contain the parts that depend on the store, once it is open.
    pub admission: Arc<Admission>,
    /// The clock of the sidecar.
    pub clock: Arc<Clock>,
    /// The tickers, in the order of the rings. Not set while the store is being opened.
    tickers: OnceLock<Vec<TickerHandle>>,
    /// Whether the sidecar drains.
    pub draining: AtomicBool,
    /// The answer to `GET /metrics`.
    pub metrics_answer: SharedAnswer,
    /// The answer to `GET /status`.
    pub status_answer: SharedAnswer,
}

/// The answer of the endpoints that need the store, while it is being opened.
pub(super) const OPENING: &str =
    "the store is being opened, and clients are refused with starting: wait, or look at the store and the log\n";

impl Health {
    /// Creates the report of a sidecar whose store is not open yet. `answers` is the thread that asks the store.
    pub fn new(name: &str, admission: &Arc<Admission>, clock: &Arc<Clock>, answers: RuntimeThread) -> Health {
        let answers = Arc::new(answers);
        Health {
            name: name.to_owned(),
            admission: Arc::clone(admission),
            clock: Arc::clone(clock),
            tickers: OnceLock::new(),
            draining: AtomicBool::new(false),
            metrics_answer: SharedAnswer::made_on(&answers),
            status_answer: SharedAnswer::made_on(&answers),
        }
    }

    /// Reports the state of these parts from now on, and admits clients.
    pub fn open(&self, tickers: Vec<TickerHandle>, shared: &Arc<Shared>) {
        let _ = self.tickers.set(tickers);
        self.admission.open(shared);
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
            let now = self.clock.now();
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
        let (rings, now) = (shared.store.rings(), self.clock.now());
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
        let wheel = rings[0].ring.wheel();
        Ok(StatusReport {
            sidecar: self.name.clone(),
            store: store.kind().to_owned(),
            slots: wheel.slots(),
            tick_ms: wheel.tick_ms(),
            rings: statuses.into_iter().zip(recent).map(ring).collect(),
            groups: backlog.groups.iter().map(group).collect(),
            access: self.admission.access.connections().into_iter().map(access).collect(),
        })
    }
}
