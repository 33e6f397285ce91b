//! Serves logic nodes over the native protocol: a session for each connection, over TCP, TLS or a Unix socket.

mod accept;
mod buffered_stream;
pub mod certificate;
mod control_requests;
mod keep_alive;
mod limit_notices;
mod pending_requests;
mod requests;
mod session;
mod shared;
mod socket_file;
mod token;
mod watched_files;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::warn;

pub(crate) use accept::accept;
pub use limit_notices::report_reached_limits;
pub use shared::{DRAIN_GRACE, Listener, ServerOptions, Shared};
pub use socket_file::SocketFile;
pub use token::{TokenSource, token_in};

use self::accept::Acceptor;
use self::shared::Phase;
use crate::ticker::stall_aware_timeout;

/// A running server.
pub struct Server {
    phase: watch::Sender<Phase>,
    tasks: TaskTracker,
    /// Has a token for each connection whose peer has not got its last answers.
    unanswered: TaskTracker,
}

impl Server {
    /// Accepts connections from all listeners.
    #[must_use]
    pub fn start(listeners: Vec<Listener>, shared: &Arc<Shared>) -> Server {
        let (phase, receiver) = watch::channel(Phase::Serving);
        let (tasks, unanswered) = (TaskTracker::new(), TaskTracker::new());
        let acceptor = Acceptor {
            shared: Arc::clone(shared),
            phase: receiver,
            tasks: tasks.clone(),
            unanswered: unanswered.clone(),
            open: Arc::default(),
        };
        for listener in listeners {
            tasks.spawn(acceptor.clone().run(listener));
        }
        Server { phase, tasks, unanswered }
    }

    /// Accepts no more connections and sends GoAway to those that are open. They are still served.
    pub fn drain(&self) {
        self.phase.send_replace(Phase::Draining);
    }

    /// Sends all that is queued, closes all connections, and waits for their end.
    pub async fn close(&self, timeout: Duration) {
        self.phase.send_replace(Phase::Closed);
        self.tasks.close();
        if stall_aware_timeout(timeout, self.tasks.wait()).await.is_none() && !self.unanswered.is_empty() {
            warn!(
                connections = self.unanswered.len(),
                "some connections did not take their last answers in time and are closed: their clients repeat all \
                 requests without an answer, at another sidecar or after the restart"
            );
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.phase.send_replace(Phase::Closed);
    }
}
