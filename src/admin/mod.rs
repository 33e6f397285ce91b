//! The admin endpoints: metrics, probes, status. They change nothing.

pub mod status;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tracing::{debug, warn};

use self::status::StatusReport;
use crate::clock::Clock;
use crate::core::alive::BEAT;
use crate::core::refusal::Refusal;
use crate::core::store::Store;
use crate::delivery::Delivery;
use crate::metrics::Metrics;
use crate::ticker::{LIVENESS, Pulse};

/// What the endpoints tell about.
pub struct Health {
    /// The store.
    pub store: Arc<dyn Store>,
    /// The way to subscribers.
    pub delivery: Arc<Delivery>,
    /// The counters.
    pub metrics: Arc<Metrics>,
    /// The time.
    pub clock: Arc<Clock>,
    /// Whether the ticker's loop runs.
    pub pulse: Arc<Pulse>,
    /// Whether the sidecar is going.
    pub draining: AtomicBool,
    /// Held while the gauges are made anew and read.
    pub scrapes: tokio::sync::Mutex<()>,
}

/// The most connections at once: Prometheus, probes and people need few, and strangers get no more.
const MAX_CONNECTIONS: usize = 64;

/// How long a connection may take for the head of a request, the next one on a kept connection included.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// After a failed accept the listener rests.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Serves the endpoints until the task is aborted.
pub async fn serve(listener: TcpListener, health: Arc<Health>) {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .fallback(elsewhere)
        .with_state(health);
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // Dropped with this task, so that no connection outlives it.
    let mut connections = JoinSet::new();
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await.expect("nobody closes the semaphore");
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "a connection to the admin port could not be accepted");
                tokio::time::sleep(ACCEPT_REST).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(routes.clone());
        connections.spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
            if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
                debug!(%error, "a connection to the admin port ended");
            }
            drop(permit);
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn metrics(State(health): State<Arc<Health>>) -> Response {
    // One scrape at a time: a second one must not see the groups while the first puts them anew.
    let _scrape = health.scrapes.lock().await;
    if let Err(refusal) = health.refresh_metrics().await {
        health.metrics.store_up.set(0);
        warn!(%refusal, "the store does not answer; its gauges are as they were");
    }
    ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], health.metrics.render()).into_response()
}

/// Whether the ticker's loop ran lately; whether it leads, or could turn the wheel, is not asked here.
async fn livez(State(health): State<Arc<Health>>) -> Response {
    let mut silence = health.pulse.silence(health.clock.now());
    if silence > LIVENESS {
        // Perhaps the whole process stood still, and the ticker is about to run as this did.
        tokio::time::sleep(BEAT * 2).await;
        silence = health.pulse.silence(health.clock.now());
    }
    if silence <= LIVENESS {
        return (StatusCode::OK, "alive\n").into_response();
    }
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
    match health.report().await {
        Ok(report) => json(&report),
        Err(refusal) => (StatusCode::SERVICE_UNAVAILABLE, format!("{refusal}\n")).into_response(),
    }
}

async fn elsewhere() -> Response {
    (StatusCode::NOT_FOUND, "here are /metrics /livez /readyz /status\n").into_response()
}

fn json(report: &StatusReport) -> Response {
    match serde_json::to_string(report) {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json + "\n").into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

impl Health {
    async fn refresh_metrics(&self) -> Result<(), Refusal> {
        self.metrics.store_up.set(i64::from(self.store.is_up()));
        let ring = self.store.ring().status(self.clock.now()).await?;
        self.metrics.show_ring(&ring);
        let backlogs = self.delivery.backlogs().await?;
        self.metrics.show_groups(&backlogs, |backlog| self.delivery.subscribers(&backlog.group));
        Ok(())
    }

    async fn report(&self) -> Result<StatusReport, Refusal> {
        let ring = self.store.ring();
        let status = ring.status(self.clock.now()).await?;
        let backlogs = self.delivery.backlogs().await?;
        let subscribers = |group: &_| self.delivery.subscribers(group);
        Ok(StatusReport::new(self.store.kind(), ring.wheel(), vec![status], backlogs, subscribers))
    }
}
