//! A thread with a runtime of its own, for tasks that must not wait for busy connections.

use std::io;
use std::sync::mpsc;
use std::thread;

use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::oneshot;

/// The remedy if the system starts no thread.
pub(crate) const MORE_THREADS: &str =
    "raise the limit of processes (ulimit -u, TasksMax of systemd, pids.max of a container)";

/// A thread that runs tasks. Dropping this value ends the thread and all its tasks.
#[derive(Debug)]
pub struct RuntimeThread {
    /// The handle that spawns tasks on the thread.
    pub handle: Handle,
    /// The sender that ends the thread when it is dropped.
    _stop: oneshot::Sender<()>,
}

impl RuntimeThread {
    /// Starts a thread with the name `name`.
    ///
    /// # Errors
    ///
    /// If the system has no thread or no file descriptor left.
    pub fn start(name: &str) -> io::Result<RuntimeThread> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let (give, taken) = mpsc::channel::<Runtime>();
        let run = move || taken.recv().map(|runtime| runtime.block_on(stopped));
        if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(run) {
            // Dropped here, a runtime would panic, because this code may run within another runtime.
            runtime.shutdown_background();
            return Err(error);
        }
        let _ = give.send(runtime);
        Ok(RuntimeThread { handle, _stop: stop })
    }

    /// Moves a listener to the runtime of this thread. Otherwise the runtime that opened the listener would still watch
    /// it.
    ///
    /// # Errors
    ///
    /// If the system refuses to watch the listener.
    pub fn adopt(&self, listener: TcpListener) -> io::Result<TcpListener> {
        let listener = listener.into_std()?;
        let _entered = self.handle.enter();
        TcpListener::from_std(listener)
    }

    /// Like [`RuntimeThread::adopt`], for a Unix socket.
    ///
    /// # Errors
    ///
    /// If the system refuses to watch the listener.
    pub fn adopt_unix(&self, listener: UnixListener) -> io::Result<UnixListener> {
        let listener = listener.into_std()?;
        let _entered = self.handle.enter();
        UnixListener::from_std(listener)
    }
}
