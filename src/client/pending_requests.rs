//! The requests that the background task of a connection holds: requests that wait to be encoded, and requests in
//! flight (encoded, but not answered yet).

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, sleep_until};

use super::error::ClientError;
use super::handshake::{Dialer, FIRST_REQUEST};
use crate::protocol::frame::{Body, Frame, FrameType};

/// The highest bit of a frame type: set in an answer, clear in its request.
const ANSWER_BIT: u8 = 0x80;

/// The minimum number of permits of the window that a request holds. The window is a semaphore with one permit per
/// message, which bounds the memory of pending requests. A request in flight keeps this minimum, because its caller
/// still occupies memory.
pub(super) const LEAST_WEIGHT: usize = 8;

/// The answer to a request.
pub(super) type Answer = Result<Body, ClientError>;

/// The caller that waits for the answer to a request.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) asked: FrameType,
    /// When the request times out.
    pub(super) deadline: Instant,
    pub(super) answer: oneshot::Sender<Answer>,
    /// The permits of the window that the request holds.
    pub(super) room: OwnedSemaphorePermit,
}

impl Caller {
    /// Sends the answer to the caller. Does nothing if the caller has stopped waiting.
    fn give(self, answer: Answer) {
        let _ = self.answer.send(answer);
    }
}

/// A request that waits to be encoded.
pub(super) type Request = (Body, Caller);

/// The pending requests of a connection. All requests have the same timeout and are queued in the order of their calls.
/// So they are also in the order of their deadlines.
#[derive(Debug)]
pub(super) struct PendingRequests {
    dialer: Arc<Dialer>,
    queue: UnboundedReceiver<Request>,
    waiting: VecDeque<Request>,
    /// Requests in flight by sequence number. The lower 32 bits of a sequence number are the correlation id of the
    /// request.
    in_flight: BTreeMap<u64, Caller>,
    next: u64,
}

impl PendingRequests {
    pub(super) fn new(dialer: Arc<Dialer>, queue: UnboundedReceiver<Request>) -> PendingRequests {
        let next = FIRST_REQUEST.into();
        PendingRequests { dialer, queue, waiting: VecDeque::new(), in_flight: BTreeMap::new(), next }
    }

    /// Waits for a request, then takes all queued requests. Cancel-safe.
    pub(super) async fn take(&mut self) {
        self.waiting.extend(self.queue.recv().await);
        self.take_queued();
    }

    fn take_queued(&mut self) {
        self.waiting.extend(std::iter::from_fn(|| self.queue.try_recv().ok()));
    }

    /// Returns whether no more requests can come, because the queue is closed and empty.
    pub(super) fn is_closed(&self) -> bool {
        self.queue.is_closed() && self.queue.is_empty()
    }

    /// Returns whether no caller waits for an answer, and no more requests can come.
    pub(super) fn is_done(&self) -> bool {
        let mut in_flight = self.in_flight.values();
        self.is_closed() && self.waiting.is_empty() && in_flight.all(|caller| caller.answer.is_closed())
    }

    /// Returns the next correlation id. After the last id, the ids start again at [`FIRST_REQUEST`]. The ids of the
    /// handshake are never used again, because batches arrive under the id of Subscribe.
    pub(super) fn next_correlation(&mut self) -> u32 {
        self.next += u64::from(FIRST_REQUEST.saturating_sub(correlation_of(self.next)));
        self.next += 1;
        correlation_of(self.next - 1)
    }

    /// Removes waiting requests up to the first one whose caller still waits for the answer. Records this request as in
    /// flight and returns its frame.
    pub(super) fn next_frame(&mut self) -> Option<Frame> {
        let mut requests = std::iter::from_fn(|| self.waiting.pop_front());
        let (body, mut caller) = requests.find(|(_, caller)| !caller.answer.is_closed())?;
        // After it is encoded, the request no longer holds its messages. So it keeps only the minimum of permits.
        caller.room = caller.room.split(LEAST_WEIGHT).unwrap_or(caller.room);
        let correlation = self.next_correlation();
        self.in_flight.insert(self.next - 1, caller);
        Some(Frame::new(correlation, body))
    }

    /// Sends an answer to its caller. An answer of the wrong type fails the request. Returns whether the server was
    /// allowed to send this answer: the answer must have the right type and the correlation id of a request. A late
    /// answer to a request that has timed out is allowed. A Pong is also allowed under an unused id.
    pub(super) fn answer(&mut self, correlation: u32, answer: Answer) -> bool {
        let Some(sequence) = self.sequence(correlation) else { return matches!(answer, Ok(Body::Pong(_))) };
        let Some(caller) = self.in_flight.remove(&sequence) else { return true };
        let asked = caller.asked;
        let answer = answer.and_then(|body| {
            let got = body.frame_type();
            if got as u8 == asked as u8 | ANSWER_BIT {
                return Ok(body);
            }
            let (address, asked, got) = (&self.dialer.address, asked.as_str(), got.as_str());
            Err(ClientError::Protocol(format!("{address} answered {asked} with {got}")))
        });
        let is_right = !matches!(answer, Err(ClientError::Protocol(_)));
        caller.give(answer);
        is_right
    }

    /// Returns when the next request times out.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let in_flight = self.in_flight.first_key_value().map(|(_, caller)| caller.deadline);
        in_flight.into_iter().chain(self.first_waiting_deadline()).min()
    }

    fn first_waiting_deadline(&self) -> Option<Instant> {
        self.waiting.front().map(|(_, caller)| caller.deadline)
    }

    /// Fails waiting requests whose deadline has passed. `cause` is the reason why there is no connection, or `None` if
    /// there is a connection.
    pub(super) fn expire_waiting(&mut self, now: Instant, cause: Option<&Arc<str>>) {
        let expired = self.waiting.partition_point(|(_, caller)| caller.deadline <= now);
        for (_, caller) in self.waiting.drain(..expired) {
            let (address, waited) = (self.dialer.address.clone(), self.dialer.options.request_timeout);
            caller.give(Err(match cause.cloned() {
                None => ClientError::Timeout { address, waited, written: false },
                Some(cause) => ClientError::NotConnected { address, waited, cause },
            }));
        }
    }

    /// Fails requests in flight whose deadline has passed.
    pub(super) fn expire_in_flight(&mut self, now: Instant) {
        while let Some(first) = self.in_flight.first_entry().filter(|first| first.get().deadline <= now) {
            let (address, waited) = (self.dialer.address.clone(), self.dialer.options.request_timeout);
            first.remove().give(Err(ClientError::Timeout { address, waited, written: true }));
        }
    }

    /// Fails all requests that wait to be encoded.
    pub(super) fn fail_waiting(&mut self, error: &ClientError) {
        for (_, caller) in self.waiting.drain(..) {
            caller.give(Err(error.clone()));
        }
    }

    /// Fails all requests in flight, because their connection was lost.
    pub(super) fn fail_in_flight(&mut self, error: &ClientError) {
        for caller in std::mem::take(&mut self.in_flight).into_values() {
            caller.give(Err(error.clone()));
        }
        self.next = FIRST_REQUEST.into();
    }

    /// Closes the queue and fails all requests that wait to be encoded.
    pub(super) fn end(&mut self, error: &ClientError) {
        self.queue.close();
        self.take_queued();
        self.fail_waiting(error);
    }

    /// Runs `work` while there is no connection. Until `work` ends, takes requests from the queue, and fails waiting
    /// requests whose deadline passes. `cause` is the reason why there is no connection. Returns `None` as soon as no
    /// more requests can come.
    pub(super) async fn wait_for<T>(&mut self, work: impl Future<Output = T>, cause: &Arc<str>) -> Option<T> {
        tokio::pin!(work);
        while !self.is_closed() {
            let deadline = self.first_waiting_deadline();
            tokio::select! {
                done = &mut work => return Some(done),
                () = self.take() => {}
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.expire_waiting(Instant::now(), Some(cause));
                }
            }
        }
        None
    }

    /// Returns the latest sequence number whose lower 32 bits are this correlation id. Returns `None` if this
    /// connection has not used the id for a request.
    fn sequence(&self, correlation: u32) -> Option<u64> {
        const ROUND: u64 = 1 << 32;
        let this_round = self.next & !(ROUND - 1) | u64::from(correlation);
        let sequence = if this_round < self.next { this_round } else { this_round.checked_sub(ROUND)? };
        (correlation >= FIRST_REQUEST).then_some(sequence)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower 32 bits are the id")]
const fn correlation_of(sequence: u64) -> u32 {
    sequence as u32
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::Semaphore;
    use tokio::sync::mpsc::unbounded_channel;

    use super::super::options::ClientOptions;
    use super::*;

    /// Returns an empty set of requests whose correlation ids begin with `first`.
    fn pending(first: u32) -> PendingRequests {
        let (address, options) = ("127.0.0.1:7415".parse().unwrap(), ClientOptions::default());
        let dialer = Dialer { address, options, subscribe: None };
        let mut requests = PendingRequests::new(Arc::new(dialer), unbounded_channel().1);
        requests.next = first.into();
        requests
    }

    /// Moves a new request into flight. Returns its correlation id and the receiver of its answer.
    fn ask(requests: &mut PendingRequests, deadline: Instant) -> (u32, oneshot::Receiver<Answer>) {
        let (answer, answered) = oneshot::channel();
        let room = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let caller = Caller { asked: FrameType::Ping, deadline, answer, room };
        requests.waiting.push_back((Body::Ping(vec![]), caller));
        (requests.next_frame().unwrap().correlation, answered)
    }

    #[test]
    fn correlation_ids_wrap_around_without_those_of_the_handshake_and_without_confusion() {
        let now = Instant::now();
        let mut requests = pending(u32::MAX - 1);
        let (first, _answered) = ask(&mut requests, now);
        let (second, _answered) = ask(&mut requests, now);
        let (third, mut answered) = ask(&mut requests, now);
        assert_eq!((first, second, third), (u32::MAX - 1, u32::MAX, 3));
        assert!(requests.answer(3, Ok(Body::Pong(vec![7]))));
        assert_eq!(answered.try_recv().unwrap().unwrap(), Body::Pong(vec![7]));
        assert!(requests.answer(3, Ok(Body::GroupDeleteAnswer)), "request 3 is no longer in flight");
        for never in [0, 1, 2] {
            assert!(!requests.answer(never, Ok(Body::GroupDeleteAnswer)), "{never}");
        }
        assert!(!requests.answer(first, Ok(Body::GroupDeleteAnswer)), "the answer has the wrong type");
        assert!(requests.answer(second, Ok(Body::Pong(vec![]))));
    }

    #[test]
    fn an_answer_without_a_request_is_wrong_unless_it_is_a_pong() {
        let mut requests = pending(FIRST_REQUEST);
        let (first, _answered) = ask(&mut requests, Instant::now());
        for never in [0, 1, 2, first + 1, u32::MAX] {
            assert!(!requests.answer(never, Ok(Body::GroupDeleteAnswer)), "{never}");
            assert!(requests.answer(never, Ok(Body::Pong(vec![]))), "{never}");
        }
    }

    #[test]
    fn what_is_not_answered_in_time_fails_alone() {
        let now = Instant::now();
        let mut requests = pending(FIRST_REQUEST);
        let (_, mut first_answered) = ask(&mut requests, now);
        let (_, mut second_answered) = ask(&mut requests, now + Duration::from_secs(1));
        requests.expire_in_flight(now);
        assert!(first_answered.try_recv().unwrap().is_err());
        assert!(second_answered.try_recv().is_err(), "the second request still waits");
        assert_eq!(requests.next_deadline(), Some(now + Duration::from_secs(1)));
    }
}
