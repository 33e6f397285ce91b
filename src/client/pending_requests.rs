//! The requests of a connection on the side of its background task: those that wait to be written, and those in flight.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, sleep_until};

use super::error::ClientError;
use super::handshake::{Dialer, FIRST_REQUEST};
use crate::protocol::frame::{Body, Frame, FrameType};

/// An answer has the number of its request with the highest bit set.
const ANSWER_BIT: u8 = 0x80;

/// The least weight of a request, in messages. A written request has this weight: the memory of its waiting caller.
pub(super) const LEAST_WEIGHT: usize = 8;

/// The answer to a request.
pub(super) type Answer = Result<Body, ClientError>;

/// The caller of a request that is not answered.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) asked: FrameType,
    /// When it gives up.
    pub(super) deadline: Instant,
    pub(super) answer: oneshot::Sender<Answer>,
    /// The room of its request in the window of the connection.
    pub(super) room: OwnedSemaphorePermit,
}

impl Caller {
    /// Gives the answer to the caller. One that is gone needs none.
    fn give(self, answer: Answer) {
        let _ = self.answer.send(answer);
    }
}

/// A request that waits to be written.
pub(super) type Request = (Body, Caller);

/// The requests of a connection. All its callers have the same timeout, so requests are in the order of their deadlines.
#[derive(Debug)]
pub(super) struct PendingRequests {
    dialer: Arc<Dialer>,
    queue: UnboundedReceiver<Request>,
    waiting: VecDeque<Request>,
    /// By sequence number, whose lower half is the correlation id.
    in_flight: BTreeMap<u64, Caller>,
    next: u64,
}

impl PendingRequests {
    pub(super) fn new(dialer: Arc<Dialer>, queue: UnboundedReceiver<Request>) -> PendingRequests {
        let next = FIRST_REQUEST.into();
        PendingRequests { dialer, queue, waiting: VecDeque::new(), in_flight: BTreeMap::new(), next }
    }

    /// Waits for requests and takes all there are. Cancel-safe.
    pub(super) async fn take(&mut self) {
        self.waiting.extend(self.queue.recv().await);
        self.take_queued();
    }

    fn take_queued(&mut self) {
        self.waiting.extend(std::iter::from_fn(|| self.queue.try_recv().ok()));
    }

    /// Whether no more requests will come, because no caller is left.
    pub(super) fn is_closed(&self) -> bool {
        self.queue.is_closed() && self.queue.is_empty()
    }

    /// Whether no caller waits for an answer, nor will.
    pub(super) fn is_done(&self) -> bool {
        let mut in_flight = self.in_flight.values();
        self.is_closed() && self.waiting.is_empty() && in_flight.all(|caller| caller.answer.is_closed())
    }

    /// A correlation id that no request in flight has, nor the handshake: that of the Subscribe stays in use.
    pub(super) fn next_correlation(&mut self) -> u32 {
        self.next += u64::from(FIRST_REQUEST.saturating_sub(correlation_of(self.next)));
        self.next += 1;
        correlation_of(self.next - 1)
    }

    /// Takes the next request whose caller still waits, and makes its frame.
    pub(super) fn next_frame(&mut self) -> Option<Frame> {
        let mut requests = std::iter::from_fn(|| self.waiting.pop_front());
        let (body, mut caller) = requests.find(|(_, caller)| !caller.answer.is_closed())?;
        // The messages are about to be bytes; a request in flight needs less room.
        caller.room = caller.room.split(LEAST_WEIGHT).unwrap_or(caller.room);
        let correlation = self.next_correlation();
        self.in_flight.insert(self.next - 1, caller);
        Some(Frame::new(correlation, body))
    }

    /// Gives an answer to its caller. An answer of the wrong type fails the request. Returns whether the server was right
    /// to send it: it has the right type, and its request was sent, though it may have timed out since.
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

    /// When the first request times out.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let in_flight = self.in_flight.first_key_value().map(|(_, caller)| caller.deadline);
        in_flight.into_iter().chain(self.first_waiting_deadline()).min()
    }

    fn first_waiting_deadline(&self) -> Option<Instant> {
        self.waiting.front().map(|(_, caller)| caller.deadline)
    }

    /// Fails requests that waited too long to be written. If there is no connection, `cause` says why.
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

    /// Fails requests in flight that were not answered in time.
    pub(super) fn expire_in_flight(&mut self, now: Instant) {
        while let Some(first) = self.in_flight.first_entry().filter(|first| first.get().deadline <= now) {
            let (address, waited) = (self.dialer.address.clone(), self.dialer.options.request_timeout);
            first.remove().give(Err(ClientError::Timeout { address, waited, written: true }));
        }
    }

    /// Fails all requests that wait.
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

    /// Accepts nothing more and fails all requests that wait.
    pub(super) fn end(&mut self, error: &ClientError) {
        self.queue.close();
        self.take_queued();
        self.fail_waiting(error);
    }

    /// Runs `work` while there is no connection, for this cause. Requests wait meanwhile, each until its deadline. None
    /// when no caller is left.
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

    /// The latest sequence number with this correlation id, if it was used on this connection.
    fn sequence(&self, correlation: u32) -> Option<u64> {
        const ROUND: u64 = 1 << 32;
        let this_round = self.next & !(ROUND - 1) | u64::from(correlation);
        let sequence = if this_round < self.next { this_round } else { this_round.checked_sub(ROUND)? };
        (correlation >= FIRST_REQUEST).then_some(sequence)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
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

    /// No requests yet. Correlation ids begin with `first`.
    fn pending(first: u32) -> PendingRequests {
        let (address, options) = ("127.0.0.1:7415".parse().unwrap(), ClientOptions::default());
        let dialer = Dialer { address, options, subscribe: None };
        let mut requests = PendingRequests::new(Arc::new(dialer), unbounded_channel().1);
        requests.next = first.into();
        requests
    }

    /// Writes a request. Returns its correlation id and the receiver of its answer.
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
        assert!(requests.answer(3, Ok(Body::GroupDeleteAnswer)), "too late");
        for never in [0, 1, 2] {
            assert!(!requests.answer(never, Ok(Body::GroupDeleteAnswer)), "{never}");
        }
        assert!(!requests.answer(first, Ok(Body::GroupDeleteAnswer)), "the wrong type");
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
        assert!(second_answered.try_recv().is_err(), "still waiting");
        assert_eq!(requests.next_deadline(), Some(now + Duration::from_secs(1)));
    }
}
