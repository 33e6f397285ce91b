//! Serves metrics, probes, the status, and a page that draws the ring, over HTTP on a thread of its own.
//!
//! The endpoints change nothing.

mod answers;
mod connections;
mod health;
pub mod status;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
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
        .route("/", get(page))
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

async fn metrics(State(health): State<Arc<Health>>) -> Answer {
    let text = |health: &Health| {
        Answer(StatusCode::OK, prometheus::TEXT_FORMAT, Bytes::from(health.shared.metrics.render()))
    };
    let of = Arc::clone(&health);
    let fresh = health.metrics_answer.get(&health.shared.clock, async move {
        of.refresh_metrics().await;
        text(&of)
    });
    fresh.await.unwrap_or_else(|| {
        warn!("the store did not say within {ANSWER_TIMEOUT:?} how its rings are; their gauges are 0: look at the store");
        health.clear_metrics();
        text(&health)
    })
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

async fn status(State(health): State<Arc<Health>>) -> Answer {
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
    answer.await.unwrap_or_else(silent)
}

/// The page may run its own script, use its own style, show the icon that it carries, and ask this sidecar. The hashes are
/// those of the two blocks; if the page has changed, `tests/admin.rs` prints the new ones.
const POLICY: &str = "default-src 'none'; \
    script-src 'sha256-oAPQbWS7aN92D0WTR6pgPunOXijlNjuKoegY6YUljfo='; \
    style-src 'sha256-JrmH8Ct4DkT07JJ+cyVKwUC6tSa/70HOwKG343cLrTc='; \
    img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves the page. No cache may keep it: it belongs to the version that serves it.
async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, include_str!("page.html")).into_response()
}
