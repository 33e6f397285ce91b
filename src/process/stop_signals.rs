//! Waits for the signals that stop a sidecar.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

/// The time in which further signals belong to the same stop request. For example, a process manager may signal the
/// process and then its process group. Or a terminal and the parent process may both send a signal.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// A receiver of SIGTERM, SIGINT and SIGHUP. Once it exists, these signals no longer end the process.
#[derive(Debug)]
pub struct StopSignals {
    signals: Vec<(&'static str, Signal)>,
    /// SIGXFSZ, which is caught and ignored. If a file reaches its size limit (ulimit -f, LimitFSIZE), only the write
    /// fails. Otherwise the signal would end the process, with its messages in flight.
    _file_too_large: Signal,
}

impl StopSignals {
    /// Catches the signals. If the process was started with SIGHUP ignored, as by nohup, SIGHUP stays ignored.
    ///
    /// # Errors
    ///
    /// If the system refuses to register a signal handler.
    pub fn listen() -> io::Result<StopSignals> {
        let mut signals =
            vec![("SIGTERM", signal(SignalKind::terminate())?), ("SIGINT", signal(SignalKind::interrupt())?)];
        if !hangup_is_ignored() {
            signals.push(("SIGHUP", signal(SignalKind::hangup())?));
        }
        let file_too_large = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
        Ok(StopSignals { signals, _file_too_large: signal(file_too_large)? })
    }

    /// Waits for the next signal, and returns its name.
    pub async fn next(&mut self) -> &'static str {
        poll_fn(|context| {
            let received = |(name, signal): &mut (&'static str, Signal)| {
                signal.poll_recv(context).is_ready().then_some(Poll::Ready(*name))
            };
            self.signals.iter_mut().find_map(received).unwrap_or(Poll::Pending)
        })
        .await
    }

    /// Waits for the next stop request, and returns the name of its signal. Signals within a second after this call
    /// belong to the previous request and are ignored.
    pub async fn next_request(&mut self) -> &'static str {
        let same = async {
            loop {
                self.next().await;
            }
        };
        let _: Result<(), _> = timeout(SAME_REQUEST, same).await;
        self.next().await
    }
}

/// Returns whether this process was started with SIGHUP ignored. Returns `false` if the system does not report it.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 << (rustix::process::Signal::HUP.as_raw() - 1) != 0)
}
