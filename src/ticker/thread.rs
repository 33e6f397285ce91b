//! A thread for the tickers alone: however busy the connections are, time goes on.

use std::io;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A thread with a runtime of its own. Dropping it ends both, with all tasks that were spawned on it.
#[derive(Debug)]
pub struct TickerThread {
    runtime: Handle,
    /// Nothing is sent: that it is gone is the signal.
    _stop: oneshot::Sender<()>,
}

impl TickerThread {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// When the system has no thread, or no file descriptor, to give.
    pub fn start() -> io::Result<TickerThread> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        thread::Builder::new().name(String::from("ticker")).spawn(move || {
            let _ = runtime.block_on(stopped);
        })?;
        Ok(TickerThread { runtime: handle, _stop: stop })
    }

    /// Runs a task on it.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime.spawn(task)
    }
}
