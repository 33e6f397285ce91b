//! What systemd wants to hear of a service with `Type=notify`: that it is ready, that it is alive, that it goes.
//!
//! The protocol is sd_notify(3): a datagram with lines `NAME=value` to the socket that `NOTIFY_SOCKET` names. It is
//! spoken here rather than by a crate because it is a page long, and because the usual one (sd-notify 0.5) knows no
//! abstract sockets. The environment is read and never changed: a process with threads cannot change it safely, and
//! this one has no children that could inherit what was meant for it.
//!
//! Where nobody asks to be told, nothing is said.

use std::convert::Infallible;
use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram as Datagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::net::UnixDatagram;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

/// So many signs of life go out in the time within which one must come: one may be late, and one lost.
const SIGNS: u32 = 3;

/// How long a message may wait for room in the manager's queue: to serve comes first.
const SEND_PATIENCE: Duration = Duration::from_secs(1);

/// The service manager that started this process, if it wants to be told anything.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<SocketAddr>,
    /// The time within which it wants a sign of life.
    watchdog: Option<Duration>,
    /// Whether the last message did not reach it: that is logged when it begins.
    unreached: AtomicBool,
}

impl ServiceManager {
    /// The manager that the variables of an environment name; `own_id` is the id of this process.
    ///
    /// # Errors
    ///
    /// When a variable has a value that is not understood here: which, and what follows from it.
    pub fn of_environment(
        variable: impl Fn(&str) -> Option<OsString>,
        own_id: u32,
    ) -> Result<ServiceManager, String> {
        let Some(name) = variable("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(ServiceManager::default());
        };
        let wrong = |name: &str, value: &OsString, what: &dyn std::fmt::Display| {
            format!("{name}={}: {what}; the service manager is told nothing", value.display())
        };
        let socket = address(&name).map_err(|error| wrong("NOTIFY_SOCKET", &name, &error))?;
        let number = |name| match variable(name) {
            Some(value) => match value.to_str().and_then(|text| text.parse::<u64>().ok()) {
                Some(number) => Ok(Some(number)),
                None => Err(wrong(name, &value, &"this is no number")),
            },
            None => Ok(None),
        };
        // Whoever started this process may have a watchdog of its own and pass the variables on.
        let is_meant = number("WATCHDOG_PID")?.is_none_or(|id| id == u64::from(own_id));
        let watchdog = number("WATCHDOG_USEC")?.filter(|us| is_meant && *us > 0).map(Duration::from_micros);
        Ok(ServiceManager { socket: Some(socket), watchdog, unreached: AtomicBool::default() })
    }

    /// Tells that the process is not ready yet, and what it does.
    pub async fn starting(&self, status: &str) {
        self.tell(&format!("STATUS={status}")).await;
    }

    /// Tells that the process serves.
    pub async fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={status}")).await;
    }

    /// Tells that the process goes. From then on the manager wants no sign of life, and waits for the end as long as
    /// its unit says.
    pub async fn stopping(&self, status: &str) {
        self.tell(&format!("STOPPING=1\nSTATUS={status}")).await;
    }

    /// Sends a sign of life in time for as long as `stalled` finds no stall. Of a stall nothing is told: the manager
    /// ends a process that it does not hear of, and starts it again. Never returns.
    pub async fn watch<S>(&self, stalled: impl Fn() -> S) -> Infallible
    where
        S: Future<Output = Option<Duration>>,
    {
        let Some(watchdog) = self.watchdog else { return pending().await };
        let mut told_of_a_stall = false;
        loop {
            match stalled().await {
                None => {
                    self.tell("WATCHDOG=1").await;
                    if std::mem::take(&mut told_of_a_stall) {
                        info!("the ticker's loop runs again");
                    }
                }
                Some(silence) if !std::mem::replace(&mut told_of_a_stall, true) => {
                    warn!(
                        ?silence,
                        "the ticker's loop does not run: the service manager will restart this process"
                    );
                }
                Some(_) => {}
            }
            sleep(watchdog / SIGNS).await;
        }
    }

    async fn tell(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        let sent = timeout(SEND_PATIENCE, send(socket, message)).await;
        match sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(()) => self.unreached.store(false, Ordering::Relaxed),
            Err(error) if !self.unreached.swap(true, Ordering::Relaxed) => {
                warn!(%error, ?socket, "the service manager does not hear of this process; look at NOTIFY_SOCKET");
            }
            Err(_) => {}
        }
    }
}

/// The address that a value of `NOTIFY_SOCKET` means.
fn address(name: &OsString) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        #[cfg(target_os = "linux")]
        [b'@', name @ ..] => <SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(name),
        _ => Err(io::Error::new(io::ErrorKind::Unsupported, "this is neither a path nor an abstract socket")),
    }
}

/// Connects anew for each message, as libsystemd does: a manager that was replaced is found again.
async fn send(socket: &SocketAddr, message: &str) -> io::Result<()> {
    let datagram = Datagram::unbound()?;
    datagram.connect_addr(socket)?;
    datagram.set_nonblocking(true)?;
    // A datagram goes whole or not at all.
    UnixDatagram::from_std(datagram)?.send(message.as_bytes()).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_ID: u32 = 77;

    fn manager(variables: &[(&str, &str)]) -> Result<ServiceManager, String> {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        ServiceManager::of_environment(find, OWN_ID)
    }

    #[test]
    fn who_did_not_ask_is_told_nothing() {
        for variables in [&[][..], &[("NOTIFY_SOCKET", "")], &[("WATCHDOG_USEC", "1000000")]] {
            let manager = manager(variables).unwrap();
            assert!(manager.socket.is_none() && manager.watchdog.is_none(), "{variables:?}");
        }
    }

    #[test]
    fn sockets_are_paths_or_abstract() {
        let path = manager(&[("NOTIFY_SOCKET", "/run/systemd/notify")]).unwrap();
        assert_eq!(path.socket.unwrap().as_pathname().unwrap().to_str(), Some("/run/systemd/notify"));
        #[cfg(target_os = "linux")]
        {
            use std::os::linux::net::SocketAddrExt;
            let hidden = manager(&[("NOTIFY_SOCKET", "@a/b")]).unwrap();
            assert_eq!(hidden.socket.unwrap().as_abstract_name(), Some(&b"a/b"[..]));
        }
        for wrong in ["here", "vsock:2:9000", &format!("/{}", "long".repeat(50))] {
            let error = manager(&[("NOTIFY_SOCKET", wrong)]).unwrap_err();
            assert!(error.contains(wrong) && error.contains("told nothing"), "{error}");
        }
    }

    #[test]
    fn the_watchdog_is_that_of_this_process() {
        let watchdog = |variables: &[(&str, &str)]| {
            manager(&[&[("NOTIFY_SOCKET", "/run/notify")], variables].concat()).map(|manager| manager.watchdog)
        };
        let second = Some(Duration::from_secs(1));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "1000000")]), Ok(second));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "1000000"), ("WATCHDOG_PID", "77")]), Ok(second));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "1000000"), ("WATCHDOG_PID", "78")]), Ok(None));
        assert_eq!(watchdog(&[("WATCHDOG_USEC", "0")]), Ok(None));
        assert_eq!(watchdog(&[]), Ok(None));
        let error = watchdog(&[("WATCHDOG_USEC", "soon")]).unwrap_err();
        assert!(error.contains("WATCHDOG_USEC=soon"), "{error}");
    }

    #[tokio::test]
    async fn a_manager_that_is_gone_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = manager(&[("NOTIFY_SOCKET", path.to_str().unwrap())]).unwrap();
        manager.ready("nobody hears it").await;
        assert!(manager.unreached.load(Ordering::Relaxed));
        let listener = Datagram::bind(&path).unwrap();
        manager.stopping("heard").await;
        assert!(!manager.unreached.load(Ordering::Relaxed));
        let mut message = [0; 64];
        let length = listener.recv(&mut message).unwrap();
        assert_eq!(&message[..length], b"STOPPING=1\nSTATUS=heard");
    }
}
