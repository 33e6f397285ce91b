//! Serves metrics, probes, the status, and a page that draws the ring, over HTTP on a thread of its own.
//!
//! The endpoints change nothing.

mod answers;
mod connections;
mod health;
mod page;
pub mod status;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tracing::warn;

pub use self::answers::SharedAnswer;
use self::answers::{ANSWER_TIMEOUT, Answer};
use self::connections::Connections;
pub use self::connections::MAX_CONNECTIONS;
pub use self::health::Health;
use crate::server::accept;

/// Serves the endpoints until the task is aborted.
pub async fn serve(listener: TcpListener, health: Arc<Health>) {
    let routes = Router::new()
        .route("/", get(page::page))
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .fallback(async || (StatusCode::NOT_FOUND, "here are / /metrics /livez /readyz /status\n"))
        .with_state(health);
    let mut connections = Connections::default();
    loop {
        let (stream, _) = accept("a connection to the admin port", || listener.accept()).await;
        connections.serve(stream, &routes);
    }
}

async fn metrics(State(health): State<Arc<Health>>) -> Response {
    let shown = |health: &Health| {
        Answer(StatusCode::OK, prometheus::TEXT_FORMAT, Bytes::from(health.shared.metrics.render()))
    };
    let of = Arc::clone(&health);
    let answer = health.metrics_answer.get(&health.shared.clock, async move {
        of.refresh_metrics().await;
        shown(&of)
    });
    let answer = answer.await.unwrap_or_else(|| {
        warn!("the store did not say within {ANSWER_TIMEOUT:?} how its rings are; their gauges are 0: look at the store");
        health.clear_metrics();
        shown(&health)
    });
    answer.into_response()
}

async fn livez(State(health): State<Arc<Health>>) -> Response {
    let Some(silence) = health.stalled().await else { return "alive\n".into_response() };
    let text = format!("the ticker's loop has not run for {silence:?}: restart this process\n");
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

async fn readyz(State(health): State<Arc<Health>>) -> (StatusCode, &'static str) {
    if health.draining.load(Ordering::Relaxed) {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n")
    } else if !health.shared.store.is_up() {
        (StatusCode::SERVICE_UNAVAILABLE, "the store does not answer\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}

async fn status(State(health): State<Arc<Health>>) -> Response {
    let failed = |text| Answer(StatusCode::SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", Bytes::from(text));
    let of = Arc::clone(&health);
    let answer = health.status_answer.get(&health.shared.clock, async move {
        match of.report().await {
            Ok(report) => {
                let json = serde_json::to_string(&report).expect("a report can be written");
                Answer(StatusCode::OK, "application/json", Bytes::from(json + "\n"))
            }
            Err(refusal) => failed(format!("{refusal}\n")),
        }
    });
    let silent = || failed(format!("the store did not answer within {ANSWER_TIMEOUT:?}: look at the store\n"));
    answer.await.unwrap_or_else(silent).into_response()
}
