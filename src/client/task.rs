//! The background task of a link: serves one connection after the other until no caller needs one.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::connection::serve;
use super::error::ClientError;
use super::handshake::{Dialer, OpenConnection};
use super::inbox::Inbox;
use super::options::ClientOptions;
use super::pending_requests::PendingRequests;
use crate::protocol::frame::Welcome;

/// A time without a connection.
#[derive(Clone, Debug)]
pub struct Outage {
    /// When the connection was lost.
    pub since: std::time::Instant,
    /// How the last connection ended, or why the last attempt to connect failed.
    pub cause: Arc<str>,
}

/// The state that the task publishes to callers.
#[derive(Debug)]
pub(super) struct Status {
    /// Of the current connection, or of the last one.
    pub(super) welcome: Welcome,
    pub(super) outage: Option<Outage>,
}

/// The background task.
pub(super) struct Task {
    pub(super) dialer: Arc<Dialer>,
    pub(super) requests: PendingRequests,
    pub(super) inbox: Option<Arc<Inbox>>,
    pub(super) status: watch::Sender<Status>,
    /// Attempts to connect since a connection was last stable.
    pub(super) attempts: u32,
}

impl Task {
    pub(super) async fn run(mut self, mut open: OpenConnection) {
        loop {
            let since = Instant::now();
            let served = serve(open, &self.dialer, &mut self.requests, self.inbox.as_deref());
            let Err(cause) = served.await else { return };
            // A server that accepts and then fails at once must not be tried again without a pause.
            if since.elapsed() >= self.dialer.options.max_backoff {
                self.attempts = 0;
            }
            match self.reconnect(cause).await {
                Some(next) => open = next,
                None => return,
            }
        }
    }

    /// Dials until there is a connection. None if no caller needs one any more, or trying again cannot help.
    async fn reconnect(&mut self, mut cause: Arc<str>) -> Option<OpenConnection> {
        let mut pause = self.next_pause();
        loop {
            self.status.send_modify(|status| {
                let since = status.outage.as_ref().map_or_else(std::time::Instant::now, |outage| outage.since);
                status.outage = Some(Outage { since, cause: Arc::clone(&cause) });
            });
            self.requests.wait_for(sleep(pause), &cause).await?;
            let error = match self.requests.wait_for(self.dialer.dial(), &cause).await? {
                Ok(open) => {
                    self.status.send_replace(Status { welcome: open.welcome.clone(), outage: None });
                    self.inbox.iter().for_each(|inbox| inbox.renewed(open.group.clone()));
                    return Some(open);
                }
                Err(error) => error,
            };
            if let ClientError::Refused(_) = error {
                self.requests.fail_waiting(&error);
                if let Some(inbox) = self.inbox.as_ref().filter(|_| !error.is_retryable()) {
                    inbox.end(Some(error.clone()));
                    self.requests.end(&error);
                    return None;
                }
                pause = backoff(&self.dialer.options, u32::MAX);
            } else {
                pause = self.next_pause();
            }
            cause = error.to_string().into();
        }
    }

    fn next_pause(&mut self) -> Duration {
        let pause = backoff(&self.dialer.options, self.attempts);
        self.attempts = self.attempts.saturating_add(1);
        pause
    }
}

/// However the task ends, no caller waits forever.
impl Drop for Task {
    fn drop(&mut self) {
        self.requests.end(&ClientError::Closed { address: self.dialer.address.clone() });
        self.inbox.iter().for_each(|inbox| inbox.end(None));
    }
}

/// The pause after so many attempts. It doubles with every attempt, and has a random share, so that many clients do not
/// reconnect at once.
fn backoff(options: &ClientOptions, attempts: u32) -> Duration {
    // Without any pause an unreachable server would keep a core busy.
    let first = options.first_backoff.max(Duration::from_millis(1));
    let pause = first.saturating_mul(1 << attempts.min(20)).min(options.max_backoff.max(first));
    // From half of the pause to all of it, at random by the seeds of the standard library's hashes.
    let random = RandomState::new().build_hasher().finish() % 1_000;
    pause / 2 + (pause / 2_000) * u32::try_from(random).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_never_fall_below_half() {
        let options = ClientOptions::default().backoff(Duration::from_millis(50), Duration::from_secs(2));
        for (attempts, pause_ms) in (0..).zip([50, 100, 200, 400, 800, 1_600, 2_000, 2_000]) {
            let pause = Duration::from_millis(pause_ms);
            assert!((pause / 2..=pause).contains(&backoff(&options, attempts)), "{pause:?}");
        }
        assert!(backoff(&options, u32::MAX) <= Duration::from_secs(2));
    }
}
