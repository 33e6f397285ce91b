//! Notifies systemd that a service with `Type=notify` is ready, alive, or stopping.
//!
//! The protocol is sd_notify(3): a datagram with lines `NAME=value` to the socket that `NOTIFY_SOCKET` names. Without
//! `NOTIFY_SOCKET` nothing is sent. No crate is used: the protocol is short, and the usual crate (sd-notify 0.5) does
//! not support abstract sockets. The variables of systemd stay in the environment: a process with threads cannot remove
//! them safely, and this process starts no child that could inherit them.

use std::convert::Infallible;
use std::ffi::OsString;
use std::future::pending;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram as Datagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, io, process};

use tokio::net::UnixDatagram;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::core::CLOCK_BEAT;

/// How many keep-alive messages are sent per watchdog interval. systemd expects only one message per interval. So it
/// does not restart the process even if several messages are lost, or if the process stalls for nearly the whole
/// interval.
const KEEP_ALIVES: u32 = 10;

/// How long a message may wait for room in the socket of the service manager.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// The service manager that started this process, if it asks for notifications.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<SocketAddr>,
    /// The watchdog interval: the time within which the manager expects a keep-alive message.
    watchdog: Option<Duration>,
    /// Whether the last message failed. Only the first failure in a row is logged.
    has_failed: AtomicBool,
}

impl ServiceManager {
    /// Reads the manager from the environment of this process. Logs a variable with a wrong value.
    pub fn of_process() -> ServiceManager {
        let (manager, wrong) = ServiceManager::of_environment(|name| env::var_os(name), process::id());
        if let Some(wrong) = wrong {
            warn!("{wrong}");
        }
        manager
    }

    /// Reads the manager from environment variables. `variable` returns the value of a variable, and `own_id` is the id
    /// of this process. Also returns a warning if a variable has a wrong value.
    fn of_environment(
        variable: impl Fn(&str) -> Option<OsString>,
        own_id: u32,
    ) -> (ServiceManager, Option<String>) {
        let mut manager = ServiceManager::default();
        let Some(name) = variable("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else { return (manager, None) };
        match address(&name) {
            Ok(socket) => manager.socket = Some(socket),
            Err(error) => {
                let wrong = format!("NOTIFY_SOCKET={}: {error}", name.display());
                return (manager, Some(wrong + "; the service manager is told nothing"));
            }
        }
        // Keep the socket even if the watchdog variables are wrong. Otherwise a manager that waits for `READY=1` would
        // get no message, and would end the process.
        match watchdog(variable, own_id) {
            Ok(watchdog) => manager.watchdog = watchdog,
            Err(wrong) => return (manager, Some(wrong + "; the service manager is given no signs of life")),
        }
        (manager, None)
    }

    /// Notifies that the process starts. `status` is a text for `systemctl status`.
    pub async fn starting(&self, status: &str) {
        self.notify(&format!("STATUS={status}")).await;
    }

    /// Notifies that the process is ready to serve.
    pub async fn ready(&self, status: &str) {
        self.notify(&format!("READY=1\nSTATUS={status}")).await;
    }

    /// Notifies that the process stops. The manager then expects no more keep-alive messages. It waits for the end of
    /// the process, up to the stop timeout of the unit.
    pub async fn stopping(&self, status: &str) {
        self.notify(&format!("STOPPING=1\nSTATUS={status}")).await;
    }

    /// Sends keep-alive messages while `stalled` returns `None`. While it returns the length of a stall, sends none, so
    /// that the manager restarts this process. Never returns.
    pub async fn watch(&self, stalled: impl AsyncFn() -> Option<Duration>) -> Infallible {
        let Some(pause) = self.watchdog.map(pause) else { return pending().await };
        let mut has_logged_stall = false;
        loop {
            match stalled().await {
                None => {
                    self.notify("WATCHDOG=1").await;
                    if std::mem::take(&mut has_logged_stall) {
                        info!("the ticker's loop runs again");
                    }
                }
                Some(silence) if !std::mem::replace(&mut has_logged_stall, true) => {
                    warn!(
                        ?silence,
                        "the ticker's loop does not run: the service manager will restart this process"
                    );
                }
                Some(_) => {}
            }
            sleep(pause).await;
        }
    }

    async fn notify(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        let sent = timeout(SEND_TIMEOUT, send(socket, message)).await;
        match sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(()) => self.has_failed.store(false, Ordering::Relaxed),
            Err(error) if !self.has_failed.swap(true, Ordering::Relaxed) => {
                warn!(%error, ?socket, "the service manager does not hear of this process; look at NOTIFY_SOCKET");
            }
            Err(_) => {}
        }
    }
}

/// Returns the time between keep-alive messages, at least [`CLOCK_BEAT`]. The loop of a ticker shows only once per
/// clock beat that it runs, so a shorter time has no use.
fn pause(watchdog: Duration) -> Duration {
    (watchdog / KEEP_ALIVES).max(CLOCK_BEAT)
}

/// Returns the watchdog interval, or `None` if the manager expects no keep-alive messages of this process. An error
/// names the wrong variable.
fn watchdog(variable: impl Fn(&str) -> Option<OsString>, own_id: u32) -> Result<Option<Duration>, String> {
    let number = |name| {
        let Some(value) = variable(name) else { return Ok(None) };
        let number = value.to_str().and_then(|text| text.parse::<u64>().ok());
        number.map(Some).ok_or_else(|| format!("{name}={}: this is no number", value.display()))
    };
    // A parent process may have a watchdog of its own, and this process may inherit its variables. Then `WATCHDOG_PID`
    // contains the id of the parent.
    let is_meant = number("WATCHDOG_PID")?.is_none_or(|id| id == u64::from(own_id));
    Ok(number("WATCHDOG_USEC")?.filter(|us| is_meant && *us > 0).map(Duration::from_micros))
}

/// Returns the address in a value of `NOTIFY_SOCKET`.
fn address(name: &OsString) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        #[cfg(target_os = "linux")]
        [b'@', name @ ..] => <SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(name),
        _ => Err(io::Error::new(io::ErrorKind::Unsupported, "this is neither a path nor an abstract socket")),
    }
}

/// Sends a message over a new socket each time, as libsystemd does. So messages also reach a manager that was
/// restarted.
async fn send(socket: &SocketAddr, message: &str) -> io::Result<()> {
    let datagram = Datagram::unbound()?;
    datagram.set_nonblocking(true)?;
    datagram.connect_addr(socket)?;
    // A datagram is sent as a whole or not at all.
    UnixDatagram::from_std(datagram)?.send(message.as_bytes()).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_ID: u32 = 77;

    fn manager(variables: &[(&str, &str)]) -> (ServiceManager, Option<String>) {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        ServiceManager::of_environment(find, OWN_ID)
    }

    #[test]
    fn who_did_not_ask_is_told_nothing() {
        for variables in [&[][..], &[("NOTIFY_SOCKET", "")], &[("WATCHDOG_USEC", "1000000")]] {
            let (manager, wrong) = manager(variables);
            assert_eq!(wrong, None);
            assert!(manager.socket.is_none() && manager.watchdog.is_none(), "{variables:?}");
        }
    }

    #[test]
    fn sockets_are_paths_or_abstract() {
        let (path, _) = manager(&[("NOTIFY_SOCKET", "/run/systemd/notify")]);
        assert_eq!(path.socket.unwrap().as_pathname().unwrap().to_str(), Some("/run/systemd/notify"));
        #[cfg(target_os = "linux")]
        {
            use std::os::linux::net::SocketAddrExt;
            let (hidden, _) = manager(&[("NOTIFY_SOCKET", "@a/b")]);
            assert_eq!(hidden.socket.unwrap().as_abstract_name(), Some(&b"a/b"[..]));
        }
        for wrong in ["here", "vsock:2:9000", &format!("/{}", "long".repeat(50))] {
            let (manager, error) = manager(&[("NOTIFY_SOCKET", wrong), ("WATCHDOG_USEC", "1000000")]);
            let error = error.unwrap();
            assert!(error.contains(wrong) && error.contains("told nothing"), "{error}");
            assert!(manager.socket.is_none() && manager.watchdog.is_none());
        }
    }

    #[test]
    fn the_watchdog_is_that_of_this_process() {
        let watchdog = |variables: &[(&str, &str)]| {
            let (manager, wrong) = manager(&[&[("NOTIFY_SOCKET", "/run/notify")], variables].concat());
            assert!(manager.socket.is_some(), "a wrong watchdog variable does not change the socket");
            wrong.map_or(Ok(manager.watchdog), Err)
        };
        let second = Some(Duration::from_secs(1));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "1000000")]), Ok(second));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "1000000"), ("WATCHDOG_PID", "77")]), Ok(second));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "1000000"), ("WATCHDOG_PID", "78")]), Ok(None));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "0")]), Ok(None));
        assert_eq!(watchdog(&[]), Ok(None));
        for variables in
            [&[("WATCHDOG_USEC", "soon")][..], &[("WATCHDOG_PID", "this"), ("WATCHDOG_USEC", "1000000")]]
        {
            let ((name, value), error) = (variables[0], watchdog(variables).unwrap_err());
            assert!(error.contains(&format!("{name}={value}: ")) && error.contains("no signs of life"), "{error}");
        }
    }

    #[test]
    fn signs_of_life_are_many_and_no_oftener_than_beats() {
        assert_eq!(pause(Duration::from_secs(60)), Duration::from_secs(6));
        assert_eq!(pause(Duration::from_millis(100)), CLOCK_BEAT);
        assert_eq!(pause(Duration::from_micros(1)), CLOCK_BEAT);
    }

    #[tokio::test]
    async fn a_manager_that_is_gone_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let (manager, _) = manager(&[("NOTIFY_SOCKET", path.to_str().unwrap())]);
        manager.ready("nobody hears it").await;
        assert!(manager.has_failed.load(Ordering::Relaxed));
        let listener = Datagram::bind(&path).unwrap();
        manager.stopping("heard").await;
        assert!(!manager.has_failed.load(Ordering::Relaxed));
        let mut message = [0; 64];
        let length = listener.recv(&mut message).unwrap();
        assert_eq!(&message[..length], b"STOPPING=1\nSTATUS=heard");
    }
}
