//! The background task of a link: serves one connection after the other until nobody needs one.

use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::connection::{Connection, End};
use super::error::ClientError;
use super::handshake::{Dialer, Established};
use super::inbox::Inbox;
use super::link::{Lane, Link, Shared, link};

/// Starts the task on a connection that is ready, and returns the callers' end.
pub(super) fn start(dialer: Dialer, established: Established, inbox: Option<Arc<Inbox>>) -> Link {
    let shared = Arc::new(Shared::new(dialer.address.clone(), established.welcome.clone()));
    let (link, lane) = link(Arc::clone(&shared), dialer.options.request_timeout);
    let backoff = Backoff::new(dialer.options.first_backoff, dialer.options.max_backoff);
    let task = Task { dialer, shared, lane, inbox, backoff };
    tokio::spawn(task.run(established));
    link
}

struct Task {
    dialer: Dialer,
    shared: Arc<Shared>,
    lane: Lane,
    inbox: Option<Arc<Inbox>>,
    backoff: Backoff,
}

impl Task {
    async fn run(mut self, mut established: Established) {
        loop {
            let since = Instant::now();
            let address = self.dialer.address.clone();
            let request_timeout = self.dialer.options.request_timeout;
            let connection = Connection::new(established, address, request_timeout, self.inbox.clone());
            let cause = match connection.serve(&mut self.lane).await {
                End::Closed => return,
                End::Lost(cause) => cause,
            };
            // A server that accepts and then fails at once is not to be hammered.
            if since.elapsed() >= self.dialer.options.max_backoff {
                self.backoff.reset();
            }
            match self.reconnect(cause).await {
                Some(next) => established = next,
                None => return,
            }
        }
    }

    /// Dials until there is a connection, or nobody needs one any more.
    async fn reconnect(&mut self, mut cause: Arc<str>) -> Option<Established> {
        let mut pause = self.backoff.next();
        loop {
            self.shared.lost(&cause);
            while_away(&mut self.lane, &self.dialer, &cause, sleep(pause)).await?;
            match while_away(&mut self.lane, &self.dialer, &cause, self.dialer.dial()).await? {
                Ok(mut established) => {
                    self.shared.welcomed(established.welcome.clone());
                    if let (Some(inbox), Some(subscribed)) = (&self.inbox, established.subscribed.take()) {
                        inbox.renewed(subscribed);
                    }
                    return Some(established);
                }
                Err(refused @ ClientError::Refused(_)) => {
                    self.lane.fail_all(&refused);
                    if let Some(inbox) = self.inbox.as_ref().filter(|_| !refused.is_retryable()) {
                        inbox.end(Some(refused.clone()));
                        self.lane.end(&refused);
                        return None;
                    }
                    cause = refused.to_string().into();
                    pause = self.backoff.longest();
                }
                Err(error) => {
                    cause = error.to_string().into();
                    pause = self.backoff.next();
                }
            }
        }
    }
}

/// However the task ends, nobody waits for it for ever.
impl Drop for Task {
    fn drop(&mut self) {
        self.lane.end(&ClientError::Closed { address: self.dialer.address.clone() });
        if let Some(inbox) = &self.inbox {
            inbox.end(None);
        }
    }
}

/// Does something while there is no connection: requests wait, each as long as it may. None when nobody
/// is left to make any.
async fn while_away<T>(
    lane: &mut Lane,
    dialer: &Dialer,
    cause: &Arc<str>,
    something: impl Future<Output = T>,
) -> Option<T> {
    tokio::pin!(something);
    loop {
        if lane.is_closed() {
            return None;
        }
        let deadline = lane.next_deadline();
        tokio::select! {
            done = &mut something => return Some(done),
            () = lane.take() => {}
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                lane.fail_expired(Instant::now(), || ClientError::NotConnected {
                    address: dialer.address.clone(),
                    waited: dialer.options.request_timeout,
                    cause: Arc::clone(cause),
                });
            }
        }
    }
}

/// Pauses that double, each with a share of chance, so that many clients do not come back at once.
#[derive(Debug)]
struct Backoff {
    first: Duration,
    max: Duration,
    attempts: u32,
}

impl Backoff {
    fn new(first: Duration, max: Duration) -> Backoff {
        // Without any pause a server that is away would keep a core busy.
        let first = first.max(Duration::from_millis(1));
        Backoff { first, max: max.max(first), attempts: 0 }
    }

    fn next(&mut self) -> Duration {
        let pause = self.first.saturating_mul(1 << self.attempts.min(20)).min(self.max);
        self.attempts = self.attempts.saturating_add(1);
        jitter(pause)
    }

    fn longest(&self) -> Duration {
        jitter(self.max)
    }

    fn reset(&mut self) {
        self.attempts = 0;
    }
}

/// From half of the pause to the whole of it. The chance is that of the standard library's hash seeds.
fn jitter(pause: Duration) -> Duration {
    let chance = RandomState::new().build_hasher().finish() % 1_000;
    pause / 2 + (pause / 2_000) * u32::try_from(chance).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_never_fall_below_half() {
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        for pause_ms in [50, 100, 200, 400, 800, 1_600, 2_000, 2_000] {
            let pause = Duration::from_millis(pause_ms);
            assert!((pause / 2..=pause).contains(&backoff.next()), "{pause:?}");
        }
        backoff.attempts = u32::MAX;
        assert!(backoff.next() <= Duration::from_secs(2));
        backoff.reset();
        assert!(backoff.next() <= Duration::from_millis(50));
    }
}
