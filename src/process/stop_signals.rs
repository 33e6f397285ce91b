//! Waits for the signals that stop a sidecar.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;

/// Signals within this time of the first belong to the same request: a process manager sends one to the process and then
/// to its group, and a terminal sends one beside that of the program that started this one.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// SIGTERM, SIGINT and SIGHUP. From its creation on they no longer end the process.
#[derive(Debug)]
pub struct StopSignals {
    signals: Vec<(&'static str, Signal)>,
    /// Caught and ignored: if a file may not grow any more (ulimit -f, LimitFSIZE), the write fails, and the process goes
    /// on with its messages in flight.
    _file_too_large: Signal,
}

impl StopSignals {
    /// Catches the signals. SIGHUP stays ignored if the process was started so, as nohup does.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn listen() -> io::Result<StopSignals> {
        let mut signals =
            vec![("SIGTERM", signal(SignalKind::terminate())?), ("SIGINT", signal(SignalKind::interrupt())?)];
        if !hangup_is_ignored() {
            signals.push(("SIGHUP", signal(SignalKind::hangup())?));
        }
        let file_too_large = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
        Ok(StopSignals { signals, _file_too_large: signal(file_too_large)? })
    }

    /// The name of the next signal.
    pub async fn next(&mut self) -> &'static str {
        poll_fn(|context| {
            let received = |(name, signal): &mut (&'static str, Signal)| {
                signal.poll_recv(context).is_ready().then_some(Poll::Ready(*name))
            };
            self.signals.iter_mut().find_map(received).unwrap_or(Poll::Pending)
        })
        .await
    }

    /// The name of the next signal that does not belong to the request before.
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

/// Whether this process was started with SIGHUP ignored. If the system does not say, it was not.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 << (rustix::process::Signal::HUP.as_raw() - 1) != 0)
}
