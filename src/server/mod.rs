//! Serves logic nodes, which are the IM servers that use this sidecar. Each connection has a session, over TCP, TLS or
//! a Unix socket.

mod acceptor;
mod access;
mod admission;
mod buffer;
mod buffered_stream;
mod control_requests;
mod credentials;
mod keep_alive;
mod limit_notices;
mod memory_budget;
mod native;
mod pending_requests;
mod reading;
mod requests;
pub mod resp;
mod session;
mod shared;
mod socket;
mod socket_file;
mod throttle;
mod tokens;
mod unauthenticated;
mod watched_files;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use tracing::warn;

pub(crate) use self::acceptor::accept;
pub use self::access::Access;
pub use self::admission::{Admission, MAX_UNAUTHENTICATED_MEMORY, StatusSource, UNAUTHENTICATED_FILES};
pub use self::credentials::Certificate;
pub use self::limit_notices::report_reached_limits;
pub use self::memory_budget::MemoryBudget;
pub use self::shared::{DRAIN_GRACE, ServerOptions, Shared};
pub use self::socket_file::SocketFile;

use self::acceptor::Acceptor;
use self::shared::Phase;
use crate::clock::stall_aware_timeout;
use crate::process::thread::RuntimeThread;

/// The listeners for logic nodes.
pub struct Listeners {
    /// The native protocol.
    pub tcp: TcpListener,
    /// The native protocol over a Unix socket, with its file.
    pub unix: Option<(SocketFile, UnixListener)>,
    /// The RESP protocol.
    pub resp: Option<TcpListener>,
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    phase: watch::Sender<Phase>,
    sessions: TaskTracker,
    unanswered: TaskTracker,
    /// The file of the Unix socket. It is removed before its listener closes. Until then, no other sidecar replaces the
    /// file, and no other file can get its inode.
    socket_file: Arc<Mutex<Option<SocketFile>>>,
    _acceptor: RuntimeThread,
}

impl Server {
    /// Starts to accept connections on all listeners, on a thread of its own. Sessions run on the current runtime.
    ///
    /// # Errors
    ///
    /// If the system has no thread or no file descriptor left.
    pub fn start(listeners: Listeners, admission: &Arc<Admission>) -> io::Result<Server> {
        let thread = RuntimeThread::start("acceptor")?;
        let (phase, (socket_file, unix)) = (admission.phase.clone(), listeners.unix.unzip());
        let socket_file = Arc::new(Mutex::new(socket_file));
        let acceptor = Acceptor {
            admission: Arc::clone(admission),
            phase: phase.subscribe(),
            serving: Handle::current(),
            sessions: TaskTracker::new(),
            unanswered: TaskTracker::new(),
            socket_file: Arc::clone(&socket_file),
        };
        let (sessions, unanswered) = (acceptor.sessions.clone(), acceptor.unanswered.clone());
        let tcp = thread.adopt(listeners.tcp)?;
        let unix = unix.map(|listener| thread.adopt_unix(listener)).transpose()?;
        let resp = listeners.resp.map(|listener| thread.adopt(listener)).transpose()?;
        thread.handle.spawn(acceptor.run(tcp, unix, resp));
        Ok(Server { phase, sessions, unanswered, socket_file, _acceptor: thread })
    }

    /// Stops accepting connections, and sends GoAway on every open connection. Open connections are still served.
    pub fn drain(&self) {
        self.set_phase(Phase::Draining);
    }

    /// Closes all connections after their last answers are written. Waits until the connections have ended, but for at
    /// most `timeout`. Then warns if some connections have not taken their answers.
    pub async fn close(&self, timeout: Duration) {
        self.set_phase(Phase::Closed);
        self.sessions.close();
        if stall_aware_timeout(timeout, self.sessions.wait()).await.is_none() && !self.unanswered.is_empty() {
            warn!(
                connections = self.unanswered.len(),
                "some connections did not take their last answers in time and are closed: their clients repeat \
                 requests without an answer after the restart or, with Redis, at another sidecar"
            );
        }
    }

    fn set_phase(&self, phase: Phase) {
        drop(self.socket_file.lock().take());
        self.phase.send_replace(phase);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.set_phase(Phase::Closed);
    }
}
