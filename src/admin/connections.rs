//! Limits the connections of the admin port, so that a probe gets its answer even during a port scan.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use crate::process::panics::contained;

/// The maximum number of connections.
pub const MAX_CONNECTIONS: usize = 256;

/// The longest head of a request, in bytes.
const MAX_HEAD_LENGTH: usize = 16 * 1_024;

/// How long the head of a request may take to come.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may last. Each has one request: a peer that does not read must not keep its place.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// The open connections, each a task. Dropping this ends them.
#[derive(Debug, Default)]
pub(super) struct Connections {
    /// In the order of their arrival.
    open: VecDeque<Open>,
}

#[derive(Debug)]
struct Open {
    task: AbortOnDropHandle<()>,
    /// Whether its request was read.
    has_asked: Arc<AtomicBool>,
}

impl Connections {
    /// Serves one request of a connection. If there are too many connections, the oldest that has asked nothing is closed
    /// for it, or the oldest if all have asked.
    pub(super) fn serve(&mut self, stream: TcpStream, routes: &Router) {
        self.open.retain(|open| !open.task.is_finished());
        if self.open.len() >= MAX_CONNECTIONS {
            let silent = self.open.iter().position(|open| !open.has_asked.load(Ordering::Relaxed));
            self.open.remove(silent.unwrap_or(0));
            debug!("a connection to the admin port was closed: there are too many, and it was the oldest");
        }
        let has_asked = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn(contained(serve_one(stream, routes.clone(), Arc::clone(&has_asked))));
        self.open.push_back(Open { task: AbortOnDropHandle::new(task), has_asked });
    }
}

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
