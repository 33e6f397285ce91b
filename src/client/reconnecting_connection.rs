//! A connection that reconnects when it is lost: the handle for callers, and the background task.
//!
//! The handle queues requests in order and within bounds, and waits for their answers. The background task serves one
//! connection after another until no caller is left.
//!
//! ```text
//!   caller ── order ── window ── queue ──▶ waiting ──▶ in flight
//!          (one after   (room for            (of PendingRequests)
//!           another)     messages)
//! ```
//!
//! The window is a semaphore that bounds the memory of all pending requests, with one permit per message. A request
//! acquires permits before it is queued. It returns most of them when it is encoded, and the others when it is answered
//! or fails. So memory stays bounded while the server is unreachable or does not answer.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::unconstrained;
use tokio::time::{Instant, sleep, timeout_at};

use super::connection::serve;
use super::error::ClientError;
use super::handshake::{Dialer, OpenConnection};
use super::options::ClientOptions;
use super::pending_requests::{Answer, Caller, LEAST_WEIGHT, PendingRequests, Request};
use super::received_batches::ReceivedBatches;
use crate::core::{Promise, Reason};
use crate::protocol::frame::{Body, MAX_MESSAGES, Welcome};

/// The number of permits of the window: about one million messages of 16 bytes, which take 16 MiB.
const WINDOW_MESSAGES: usize = 32 * MAX_MESSAGES;

/// The timeout that is used if adding the configured timeout to the current time would overflow.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3_600);

// A request of any size fits into the window, and its size fits into a `u32`.
const _: () = assert!(WINDOW_MESSAGES >= MAX_MESSAGES && MAX_MESSAGES <= u32::MAX as usize);

/// The handle for callers. When it is closed or dropped, the background task finishes the queued requests and ends.
#[derive(Debug)]
pub(super) struct ReconnectingConnection {
    pub(super) dialer: Arc<Dialer>,
    pub(super) status: watch::Receiver<Status>,
    /// A fair lock that a call holds while it queues its requests. So calls queue their requests in the order in which
    /// they were first polled.
    order: tokio::sync::Mutex<()>,
    window: Arc<Semaphore>,
    /// `None` after [`close`](ReconnectingConnection::close).
    queue: Mutex<Option<UnboundedSender<Request>>>,
}

impl ReconnectingConnection {
    /// Starts the background task, which serves `open` first.
    pub(super) fn start(dialer: Dialer, open: OpenConnection, received: Option<Arc<ReceivedBatches>>) -> Self {
        let dialer = Arc::new(dialer);
        let (queue, queued) = unbounded_channel();
        let (published, status) = watch::channel(Status { welcome: open.welcome.clone(), outage: None });
        let requests = PendingRequests::new(Arc::clone(&dialer), queued);
        let task = Task { dialer: Arc::clone(&dialer), requests, received, status: published, attempts: 0 };
        tokio::spawn(task.run(open));
        ReconnectingConnection {
            dialer,
            status,
            order: tokio::sync::Mutex::new(()),
            window: Arc::new(Semaphore::new(WINDOW_MESSAGES)),
            queue: Mutex::new(Some(queue)),
        }
    }

    /// Sends one request and waits for its answer.
    pub(super) async fn ask(&self, body: Body) -> Answer {
        self.ask_all(std::iter::once(body)).await.pop().expect("one body has one answer")
    }

    /// Sends items in requests of at most `most` items, which `body` builds. Calls `read` with each answer and the
    /// number of items in its request. Returns the results of `read` in order.
    pub(super) async fn ask_in_frames<I: Clone, T>(
        &self,
        items: &[I],
        most: usize,
        body: impl Fn(Vec<I>) -> Body,
        read: impl Fn(Body, usize) -> Result<T, ClientError>,
    ) -> Result<Vec<T>, ClientError> {
        let answers = self.ask_all(items.chunks(most).map(|chunk| body(chunk.to_vec()))).await;
        let lengths = items.chunks(most).map(<[I]>::len);
        let read = answers
            .into_iter()
            .zip(lengths)
            .map(|(answer, length)| (answer.and_then(|answer| read(answer, length)), length));
        merge(read, items.len())
    }

    /// Queues requests in order, then waits for all their answers. If a request cannot be queued, its error is the last
    /// answer, and later requests are not sent.
    async fn ask_all(&self, bodies: impl Iterator<Item = Body>) -> Vec<Answer> {
        let now = Instant::now();
        let timeout = self.dialer.options.request_timeout;
        let deadline = now.checked_add(timeout).unwrap_or_else(|| now + LONGEST_WAIT);
        let mut waiting = Vec::with_capacity(bodies.size_hint().0);
        // Unconstrained: even if the Tokio task has used up its cooperative budget, its first poll must join the queue
        // for `order`.
        let queued = timeout_at(deadline, unconstrained(self.queue_all(bodies, deadline, &mut waiting))).await;
        // The background task answers every request before it ends, unless its runtime is shut down first.
        let task_is_gone = |_| {
            let cause = Arc::from("the runtime of this client was shut down");
            Err(ClientError::ConnectionLost { address: self.dialer.address.clone(), cause })
        };
        let mut answers = Vec::with_capacity(waiting.len() + 1);
        for answer in waiting {
            answers.push(answer.await.unwrap_or_else(task_is_gone));
        }
        let no_room = |_| {
            let address = self.dialer.address.clone();
            Err(ClientError::Timeout { address, waited: timeout, written: false })
        };
        answers.extend(queued.unwrap_or_else(no_room).err().map(Err));
        answers
    }

    async fn queue_all(
        &self,
        bodies: impl Iterator<Item = Body>,
        deadline: Instant,
        waiting: &mut Vec<oneshot::Receiver<Answer>>,
    ) -> Result<(), ClientError> {
        let _turn = self.order.lock().await;
        for body in bodies {
            let window = Arc::clone(&self.window);
            let room = window.acquire_many_owned(weight(&body)).await.expect("the window is never closed");
            let (answer, answered) = oneshot::channel();
            let closed = || ClientError::Closed { address: self.dialer.address.clone() };
            let caller = Caller { asked: body.frame_type(), deadline, answer, room };
            self.queue().as_ref().ok_or_else(closed)?.send((body, caller)).map_err(|_| closed())?;
            waiting.push(answered);
        }
        Ok(())
    }

    /// Closes the queue. The background task finishes the queued requests, then sends GoAway and ends.
    pub(super) fn close(&self) {
        *self.queue() = None;
    }

    fn queue(&self) -> MutexGuard<'_, Option<UnboundedSender<Request>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns how many permits of the window a request needs: one per message or batch id, and at least [`LEAST_WEIGHT`].
fn weight(body: &Body) -> u32 {
    let messages = match body {
        Body::AddNewMsg { messages, .. } | Body::DelMsg { messages, .. } => messages.len(),
        Body::BatchAck(batches) => batches.len(),
        _ => 0,
    };
    u32::try_from(messages.clamp(LEAST_WEIGHT, MAX_MESSAGES)).expect("asserted above")
}

/// Returns all answers, or one error if any request failed. `answers` yields the answer to each request, with the
/// number of messages in this request. The error promises that nothing was applied only if this is certain for all
/// requests.
fn merge<T>(
    answers: impl Iterator<Item = (Result<T, ClientError>, usize)>,
    messages: usize,
) -> Result<Vec<T>, ClientError> {
    let (mut answered, mut failures, mut applied) = (Vec::new(), Vec::new(), 0);
    for (answer, length) in answers {
        match answer {
            Ok(answer) => {
                applied += length;
                answered.push(answer);
            }
            Err(error) => failures.push(error),
        }
    }
    // Report the first failure whose outcome is unknown. If there is none, report the first failure.
    match failures.into_iter().min_by_key(|error| error.promise() == Promise::NotApplied) {
        None => Ok(answered),
        Some(error) if applied == 0 => Err(error),
        Some(error) => Err(ClientError::Partial { applied, messages, cause: Box::new(error) }),
    }
}

/// Returns the error for an answer of the wrong type. This is a safeguard: the background task already turns such an
/// answer into an error.
pub(super) fn unexpected(body: &Body) -> ClientError {
    ClientError::Protocol(format!("the server answered with {}", body.frame_type().as_str()))
}

/// A period without a connection.
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
    /// The Welcome of the current connection or, during an outage, of the last connection.
    pub(super) welcome: Welcome,
    pub(super) outage: Option<Outage>,
}

/// The background task.
struct Task {
    dialer: Arc<Dialer>,
    requests: PendingRequests,
    received: Option<Arc<ReceivedBatches>>,
    status: watch::Sender<Status>,
    /// How many times the task has tried to connect since the last stable connection, one that lasted at least
    /// `max_backoff`.
    attempts: u32,
}

impl Task {
    async fn run(mut self, mut open: OpenConnection) {
        loop {
            let since = Instant::now();
            let served = serve(open, &self.dialer, &mut self.requests, self.received.as_deref());
            let Err(cause) = served.await else { return };
            // Only a stable connection resets the backoff: a server may accept connections and fail at once, again and
            // again.
            if since.elapsed() >= self.dialer.options.max_backoff {
                self.attempts = 0;
            }
            match self.reconnect(cause).await {
                Some(next) => open = next,
                None => return,
            }
        }
    }

    /// Tries to connect until a connection is open. Returns `None` if no caller is left, or if the server refuses the
    /// subscription with an error that is not retryable.
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
                    self.received.iter().for_each(|received| received.renewed(open.group.clone()));
                    return Some(open);
                }
                Err(error) => error,
            };
            if let ClientError::Refused(_) = error {
                self.requests.fail_waiting(&error);
                if let Some(received) = self.received.as_ref().filter(|_| self.is_final(&error)) {
                    received.end(Some(error.clone()));
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

    /// Returns whether later attempts to connect would be refused too. A wrong token of a file is not final: the file is
    /// read again, and may be replaced before the server has read its own.
    fn is_final(&self, error: &ClientError) -> bool {
        let may_change = self.dialer.options.token_file.is_some() && error.reason() == Some(Reason::Unauthorized);
        !error.is_retryable() && !may_change
    }

    fn next_pause(&mut self) -> Duration {
        let pause = backoff(&self.dialer.options, self.attempts);
        self.attempts = self.attempts.saturating_add(1);
        pause
    }
}

/// Fails all waiting requests and ends the subscription, however the task ends. So no caller waits forever.
impl Drop for Task {
    fn drop(&mut self) {
        self.requests.end(&ClientError::Closed { address: self.dialer.address.clone() });
        self.received.iter().for_each(|received| received.end(None));
    }
}

/// Returns the pause after `attempts` attempts. The pause doubles with every attempt. Part of the pause is random,
/// so that many clients do not reconnect at the same moment.
fn backoff(options: &ClientOptions, attempts: u32) -> Duration {
    // Without a pause, dialing an unreachable server would keep a CPU core busy.
    let first = options.first_backoff.max(Duration::from_millis(1));
    let pause = first.saturating_mul(1 << attempts.min(20)).min(options.max_backoff.max(first));
    // A random time from half of the pause to the whole pause. The standard library seeds `RandomState` at random.
    let random = RandomState::new().build_hasher().finish() % 1_000;
    pause / 2 + (pause / 2_000) * u32::try_from(random).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> Result<u8, ClientError> {
        Err(ClientError::InvalidRequest(text.to_owned()))
    }

    fn unknown(text: &str) -> Result<u8, ClientError> {
        Err(ClientError::Protocol(text.to_owned()))
    }

    #[test]
    fn a_failure_promises_that_nothing_was_applied_only_if_that_is_true() {
        let merge = |answers: Vec<Result<u8, ClientError>>| merge(answers.into_iter().zip([10, 10, 5]), 25);
        assert_eq!(merge(vec![Ok(1), Ok(2), Ok(3)]).unwrap(), [1, 2, 3]);
        let error = merge(vec![refused("a"), refused("b"), refused("c")]).unwrap_err();
        assert_eq!((error.promise(), error.to_string().as_str()), (Promise::NotApplied, "a"));
        let error = merge(vec![refused("a"), unknown("b"), unknown("c")]).unwrap_err();
        assert_eq!(error.promise(), Promise::OutcomeUnknown);
        assert!(error.to_string().starts_with("b;"), "{error}");
        let error = merge(vec![refused("a"), Ok(2), Ok(3)]).unwrap_err();
        assert_eq!(error.promise(), Promise::OutcomeUnknown);
        assert_eq!(error.to_string(), "15 of 25 messages were applied, then: a");
    }

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
