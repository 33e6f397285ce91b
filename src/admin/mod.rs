//! The admin endpoints: metrics, probes, status, and the ring on a page. They change nothing.
//!
//! They run on a thread of their own, whatever the threads do that serve connections.

mod answers;
mod connections;
mod page;
pub mod status;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::future::{join_all, try_join_all};
use tokio::net::TcpListener;
use tracing::{debug, warn};

pub use self::answers::Answers;
use self::answers::{ANSWER_TIMEOUT, Answer};
use self::connections::Connections;
pub use self::connections::MAX_CONNECTIONS;
use self::status::{GroupReport, RingReport, StatusReport};
use crate::clock::Clock;
use crate::core::outbox::{Backlog, GroupBacklog};
use crate::core::outboxes::merge_backlogs;
use crate::core::refusal::Refusal;
use crate::core::ring::RingStatus;
use crate::core::stall_aware_clock::BEAT;
use crate::core::store::Store;
use crate::delivery::Delivery;
use crate::metrics::Metrics;
use crate::server::certificate::Certificate;
use crate::ticker::{LIVENESS, TickerHandle};

/// What the endpoints tell about.
pub struct Health {
    /// What the sidecar is called among those that share its store.
    pub name: String,
    /// The store.
    pub store: Arc<dyn Store>,
    /// The way to subscribers.
    pub delivery: Arc<Delivery>,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// The time.
    pub clock: Arc<Clock>,
    /// The tickers, in the order of the rings.
    pub tickers: Vec<TickerHandle>,
    /// The certificate of the TCP listener, if it has one.
    pub certificate: Option<Arc<Certificate>>,
    /// Whether the sidecar is going.
    pub draining: AtomicBool,
    /// What requests for the same share.
    pub answers: Answers,
}

/// After a failed accept the listener rests.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Serves the endpoints until the task is aborted.
pub async fn serve(listener: TcpListener, health: Arc<Health>) {
    let routes = Router::new()
        .route("/", get(page::page))
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .fallback(elsewhere)
        .with_state(health);
    let mut connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connections.serve(stream, &routes),
            Err(error) => {
                warn!(
                    %error,
                    "a connection to the admin port could not be accepted; trying again: if files run out, raise the \
                     limit (ulimit -n, LimitNOFILE of systemd)"
                );
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
}

async fn metrics(State(health): State<Arc<Health>>) -> Response {
    let of = Arc::clone(&health);
    let answer = health.answers.metrics.get(Arc::clone(&health.clock), move || async move {
        of.refresh_metrics().await;
        (StatusCode::OK, Bytes::from(of.metrics.render()))
    });
    let (status, text) = answer.await.unwrap_or_else(|| {
        warn!("the store did not say within {ANSWER_TIMEOUT:?} how its rings are; their gauges are 0: look at the store");
        health.show_nothing();
        (StatusCode::OK, Bytes::from(health.metrics.render()))
    });
    (status, [(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response()
}

async fn livez(State(health): State<Arc<Health>>) -> Response {
    let Some(silence) = health.stalled().await else { return (StatusCode::OK, "alive\n").into_response() };
    let text = format!("the ticker's loop has not run for {silence:?}: restart this process\n");
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

async fn readyz(State(health): State<Arc<Health>>) -> Response {
    if health.draining.load(Ordering::Relaxed) {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response();
    }
    if !health.store.is_up() {
        return (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer\n").into_response();
    }
    (StatusCode::OK, "ready\n").into_response()
}

async fn status(State(health): State<Arc<Health>>) -> Response {
    let of = Arc::clone(&health);
    let answer = health.answers.status.get(Arc::clone(&health.clock), move || async move {
        match of.report().await {
            Ok(report) => json(&report),
            Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, Bytes::from(format!("{refusal}\n"))),
        }
    });
    let (status, text) = answer.await.unwrap_or_else(|| {
        let text = format!("the store did not answer within {ANSWER_TIMEOUT:?}: look at the store\n");
        (StatusCode::SERVICE_UNAVAILABLE, Bytes::from(text))
    });
    if status != StatusCode::OK {
        return (status, text).into_response();
    }
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    (headers, text).into_response()
}

async fn elsewhere() -> Response {
    (StatusCode::NOT_FOUND, "here are / /metrics /livez /readyz /status\n").into_response()
}

fn json(report: &StatusReport) -> Answer {
    match serde_json::to_string(report) {
        Ok(json) => (StatusCode::OK, Bytes::from(json + "\n")),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, Bytes::from(format!("{error}\n"))),
    }
}

impl Health {
    /// For how long a ticker's loop has not run, if that is so long that this process is to be restarted. Whether the
    /// ticker leads, or could turn the wheel, is not asked.
    pub async fn stalled(&self) -> Option<Duration> {
        let mut silence = self.silence();
        if silence > LIVENESS {
            // Perhaps the whole process stood still, and the ticker is about to run as this did.
            tokio::time::sleep(BEAT * 2).await;
            silence = self.silence();
        }
        (silence > LIVENESS).then_some(silence)
    }

    /// For how long the ticker that is worst off has not run.
    fn silence(&self) -> Duration {
        let now = self.clock.now();
        self.tickers.iter().map(|ticker| ticker.silence(now)).max().unwrap_or_default()
    }

    /// Makes the gauges anew. What the store does not tell is not shown: a ring that does not answer counts as
    /// led by another.
    async fn refresh_metrics(&self) {
        let (seats, now) = (self.store.rings(), self.clock.now());
        let statuses = join_all(seats.iter().map(|seat| seat.ring.status(now))).await;
        let leads = |status: &Result<RingStatus, Refusal>| status.as_ref().is_ok_and(|status| status.leads);
        let led = seats.iter().zip(&statuses).filter(|(_, status)| leads(status));
        let backlogs = join_all(led.map(|(seat, _)| seat.outbox.backlog(now))).await;
        let refusals = statuses.iter().filter_map(|status| status.as_ref().err());
        let refusal = refusals.chain(backlogs.iter().filter_map(|backlogs| backlogs.as_ref().err())).next();
        let is_up = self.store.is_up();
        match refusal {
            Some(refusal) if is_up => {
                warn!(%refusal, "the store does not say how its rings are; their gauges are 0: look at the store");
            }
            Some(refusal) => debug!(%refusal, "the store is away; gauges of its rings are 0"),
            None => {}
        }
        self.metrics.store_up.set(i64::from(is_up));
        let expiry = self.certificate.as_ref().and_then(|certificate| certificate.expiry());
        self.metrics.certificate_expiry.set(expiry.unwrap_or_default());
        let led: Vec<RingStatus> = statuses.into_iter().flatten().filter(|status| status.leads).collect();
        self.metrics.set_rings(&led);
        let backlog = merge_backlogs(backlogs.into_iter().flatten().collect());
        self.metrics.set_outbox(&backlog, &self.delivery.attended());
    }

    /// The gauges of the rings if the store does not answer at all.
    fn show_nothing(&self) {
        self.metrics.store_up.set(i64::from(self.store.is_up()));
        self.metrics.set_rings(&[]);
        self.metrics.set_outbox(&Backlog::default(), &[]);
    }

    async fn report(&self) -> Result<StatusReport, Refusal> {
        let (seats, now) = (self.store.rings(), self.clock.now());
        // Before the pointers, so that no tick is told as decided that a pointer has not left.
        let recent: Vec<_> = self.tickers.iter().map(TickerHandle::recent).collect();
        let statuses = try_join_all(seats.iter().map(|seat| seat.ring.status(now))).await?;
        let backlog = self.delivery.backlog().await?;
        let rings = statuses.into_iter().zip(&recent).map(|(status, recent)| RingReport::new(status, recent));
        let group = |backlog: &GroupBacklog| GroupReport::new(backlog, self.delivery.subscribers(&backlog.group));
        let wheel = seats[0].ring.wheel();
        Ok(StatusReport {
            sidecar: self.name.clone(),
            store: self.store.kind().to_owned(),
            slots: wheel.slots(),
            tick_ms: wheel.tick_ms(),
            rings: rings.collect(),
            groups: backlog.groups.iter().map(group).collect(),
        })
    }
}
