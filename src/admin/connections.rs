//! The connections of the admin port: few are needed, and a probe must find a place whoever else has come.

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
use tokio::task::{AbortHandle, JoinSet};
use tracing::debug;

use crate::process::panics::contained;

/// The most connections at once.
pub const MAX_CONNECTIONS: usize = 256;

/// The most bytes of a request's head that are kept; a longer one is refused.
const MAX_HEAD_LENGTH: usize = 16 * 1_024;

/// How long the head of a request may take to come, and all else from the connection to the end of the answer. Each has
/// one request: who does not read may not keep a place.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Those that are open, each a task; dropped with this, so that none outlives it.
#[derive(Debug, Default)]
pub(super) struct Connections {
    tasks: JoinSet<()>,
    /// In the order in which they came.
    open: VecDeque<Open>,
}

#[derive(Debug)]
struct Open {
    task: AbortHandle,
    /// Whether its request was read.
    asked: Arc<AtomicBool>,
}

impl Connections {
    /// Serves one request of a connection. Where there are too many, one that has asked nothing yet is closed for it, the
    /// oldest; if all have asked, the oldest of them.
    pub(super) fn serve(&mut self, stream: TcpStream, routes: &Router) {
        while self.tasks.try_join_next().is_some() {}
        self.open.retain(|open| !open.task.is_finished());
        if self.open.len() >= MAX_CONNECTIONS {
            let silent = self.open.iter().position(|open| !open.asked.load(Ordering::Relaxed));
            if let Some(open) = self.open.remove(silent.unwrap_or(0)) {
                open.task.abort();
                debug!("a connection to the admin port was closed: there are too many, and it was the oldest");
            }
        }
        let asked = Arc::new(AtomicBool::new(false));
        let task = self.tasks.spawn(contained(serve_one(stream, routes.clone(), Arc::clone(&asked))));
        self.open.push_back(Open { task, asked });
    }
}

async fn serve_one(stream: TcpStream, routes: Router, asked: Arc<AtomicBool>) {
    let routes = TowerToHyperService::new(routes);
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
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
