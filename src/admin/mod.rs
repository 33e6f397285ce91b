//! Serves metrics, probes, the status, and a page that draws the ring, over HTTP. Runs on the admin thread. Only
//! answers that need the store are made on another thread.
//!
//! No endpoint changes the state of the sidecar.

mod allowed_hosts;
mod health;
mod history;
mod shared_answer;
pub mod status;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

pub use self::allowed_hosts::AllowedHosts;
pub use self::health::Health;
pub(crate) use self::health::OPENING;
pub use self::shared_answer::SharedAnswer;
use self::shared_answer::{ANSWER_TIMEOUT, Answer};
use crate::core::Backlog;
use crate::process::panics::contained;
use crate::server::accept;

/// The maximum number of open connections to the admin port.
pub const MAX_CONNECTIONS: usize = 256;

/// The maximum length of the head of a request, in bytes.
const MAX_HEAD_LENGTH: usize = 16 * 1_024;

/// How long a peer may take to send the head of its request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may last. Each connection serves only one request. This limit also closes a connection whose
/// peer does not read its answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The answer of `/readyz` if the store has no memory. The status is 200: all sidecars share this store, and routing to
/// none of them would also stop the acknowledgements, which free memory.
const FULL: &str = "ready, but the store has no memory and takes no new messages: give it memory\n";

/// Serves the endpoints until the task is aborted. Answers requests for a host among `hosts` only.
pub async fn serve(listener: TcpListener, health: Arc<Health>, hosts: AllowedHosts) {
    let routes = Router::new()
        .route("/", get(page))
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/status", get(status))
        .fallback(async || (StatusCode::NOT_FOUND, "here are / /metrics /livez /readyz /status\n"))
        .with_state(health)
        .layer(from_fn_with_state(Arc::new(hosts), allowed_hosts::check));
    // The open connections in the order of arrival: the task of each, and whether its request was read.
    let mut open: VecDeque<(AbortOnDropHandle<()>, Arc<AtomicBool>)> = VecDeque::new();
    loop {
        let (stream, _) = accept("a connection to the admin port", || listener.accept()).await;
        open.retain(|(task, _)| !task.is_finished());
        if open.len() >= MAX_CONNECTIONS {
            // Close the oldest connection without a request, or the oldest of all if each has sent a request. So a
            // probe gets its answer even during a port scan.
            let silent = open.iter().position(|(_, has_asked)| !has_asked.load(Ordering::Relaxed));
            open.remove(silent.unwrap_or(0));
            debug!("a connection to the admin port was closed: there are too many, and it was the oldest");
        }
        let has_asked = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(contained(serve_one(stream, routes.clone(), Arc::clone(&has_asked))));
        open.push_back((AbortOnDropHandle::new(task), has_asked));
    }
}

/// Serves one request of a connection.
async fn serve_one(stream: TcpStream, routes: Router, has_asked: Arc<AtomicBool>) {
    let routes = TowerToHyperService::new(routes);
    let service = service_fn(|request| {
        has_asked.store(true, Ordering::Relaxed);
        routes.call(request)
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_LENGTH)
        .keep_alive(false);
    match tokio::time::timeout(CONNECTION_TIMEOUT, http.serve_connection(TokioIo::new(stream), service)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "a connection to the admin port ended"),
        Err(_) => debug!("a connection to the admin port took too long"),
    }
}

async fn metrics(State(health): State<Arc<Health>>) -> Answer {
    let text = |health: &Health| {
        Answer(StatusCode::OK, prometheus::TEXT_FORMAT, Bytes::from(health.admission.metrics.render()))
    };
    let of = Arc::clone(&health);
    let fresh = health.metrics_answer.get(&health.admission.clock, async move {
        of.refresh_metrics().await;
        text(&of)
    });
    fresh.await.unwrap_or_else(|| {
        warn!("the store did not report the state of its rings within {ANSWER_TIMEOUT:?}; their gauges are 0: look at the store");
        // The store does not answer. Set its gauges to 0, and do not ask the delivery: this thread must not wait for a
        // lock of the delivery.
        health.set_metrics(&[], &Backlog::default(), &[]);
        text(&health)
    })
}

async fn livez(State(health): State<Arc<Health>>) -> Response {
    let Some(silence) = health.stalled().await else { return "alive\n".into_response() };
    let text = format!("the ticker's loop has not run for {silence:?}: restart this process\n");
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

async fn readyz(State(health): State<Arc<Health>>) -> (StatusCode, &'static str) {
    let unavailable = |text| (StatusCode::SERVICE_UNAVAILABLE, text);
    let Some(shared) = health.admission.shared() else { return unavailable(OPENING) };
    if health.draining.load(Ordering::Relaxed) {
        unavailable("draining\n")
    } else if !shared.store.is_up() {
        unavailable("the store does not answer\n")
    } else if shared.store.is_full() {
        (StatusCode::OK, FULL)
    } else {
        (StatusCode::OK, "ready\n")
    }
}

async fn status(State(health): State<Arc<Health>>) -> Answer {
    health.answer_status().await
}

/// The content security policy of the page. The page may use only its own script and style, show its embedded icon, and
/// send requests to this sidecar. The two hashes are those of the script and the style. If the page has changed, a test
/// in `tests/admin.rs` prints the new hashes.
const POLICY: &str = "default-src 'none'; \
    script-src 'sha256-eaGTG+p8J84+zr+xGzieCj6xz56dcNcEpqGOUJv1avk='; \
    style-src 'sha256-Jw2sqZCH2zjfq7gjQk/TDJ3v/tBDSIgeeFGoS+OhCh4='; \
    img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Serves the page.
async fn page() -> Response {
    let headers = [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, POLICY)];
    (headers, include_str!("page.html")).into_response()
}
