//! Requests that are written and not yet answered, by their correlation ids.

use std::collections::BTreeMap;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::address::Address;
use super::error::ClientError;
use super::handshake::FIRST_REQUEST;
use super::link::{Answer, LEAST_WEIGHT, Request};
use crate::protocol::frame::{Body, Frame, FrameType};

/// An answer has the number of its request with the highest bit set.
const ANSWER_BIT: u8 = 0x80;

#[derive(Debug)]
struct Written {
    asked: FrameType,
    deadline: Instant,
    answer: oneshot::Sender<Answer>,
    _room: OwnedSemaphorePermit,
}

/// The result of matching an answer to its request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// Its caller has it, unless the caller has gone.
    Delivered,
    /// Nobody waits for it any more: the request timed out.
    TooLate,
    /// Nobody ever asked for it.
    Unasked,
    /// It is of another type than was asked for; the request has failed.
    Wrong,
}

/// Requests in flight.
///
/// Each has a sequence number, whose lower half is its correlation id. Deadlines are in the order of the
/// sequence, so the first in the map is the first to time out.
#[derive(Debug)]
pub(super) struct InFlight {
    address: Address,
    written: BTreeMap<u64, Written>,
    first: u64,
    next: u64,
}

impl InFlight {
    /// Nothing in flight; correlation ids begin with `first`.
    pub(super) fn new(address: Address, first: u32) -> InFlight {
        InFlight { address, written: BTreeMap::new(), first: first.into(), next: first.into() }
    }

    /// A correlation id that nothing in flight has, nor the handshake: that of the Subscribe stays in use.
    pub(super) fn next_correlation(&mut self) -> u32 {
        self.next += u64::from(FIRST_REQUEST.saturating_sub(low(self.next)));
        self.next += 1;
        low(self.next - 1)
    }

    /// A request is written: remembers who waits for its answer and makes its frame.
    pub(super) fn write(&mut self, request: Request) -> Frame {
        let Request { body, deadline, answer, mut room } = request;
        // The messages are about to be bytes; what is left to wait needs less room.
        let room = room.split(LEAST_WEIGHT).unwrap_or(room);
        let correlation = self.next_correlation();
        let written = Written { asked: body.frame_type(), deadline, answer, _room: room };
        self.written.insert(self.next - 1, written);
        Frame::new(correlation, body)
    }

    /// An answer arrived. One of the wrong type fails its request.
    pub(super) fn answer(&mut self, correlation: u32, body: Body) -> Answered {
        let Some(sequence) = self.sequence(correlation) else { return Answered::Unasked };
        let Some(written) = self.written.remove(&sequence) else { return Answered::TooLate };
        let (asked, got) = (written.asked, body.frame_type());
        let right = got as u8 == asked as u8 | ANSWER_BIT;
        // A caller who is gone needs no answer, here and below.
        let _ = written.answer.send(match body {
            Body::Error(error) => Err(ClientError::Refused(error)),
            body if right => Ok(body),
            _ => Err(ClientError::Protocol(format!(
                "{} answered {} with {}",
                self.address,
                asked.as_str(),
                got.as_str()
            ))),
        });
        if right || got == FrameType::Error { Answered::Delivered } else { Answered::Wrong }
    }

    /// Fails one request, if it is still waited for.
    pub(super) fn fail(&mut self, correlation: u32, error: ClientError) {
        let written = self.sequence(correlation).and_then(|sequence| self.written.remove(&sequence));
        if let Some(written) = written {
            let _ = written.answer.send(Err(error));
        }
    }

    /// When the first times out.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.written.first_key_value().map(|(_, written)| written.deadline)
    }

    /// Fails what was not answered in time.
    pub(super) fn fail_expired(&mut self, now: Instant, error: impl Fn() -> ClientError) {
        while let Some(first) = self.written.first_entry().filter(|first| first.get().deadline <= now) {
            let _ = first.remove().answer.send(Err(error()));
        }
    }

    /// Fails everything.
    pub(super) fn fail_all(&mut self, error: &ClientError) {
        while let Some((_, written)) = self.written.pop_first() {
            let _ = written.answer.send(Err(error.clone()));
        }
    }

    /// Whether nobody waits for an answer.
    pub(super) fn is_idle(&self) -> bool {
        self.written.values().all(|written| written.answer.is_closed())
    }

    /// The latest sequence number with this correlation id, if it was given out.
    fn sequence(&self, correlation: u32) -> Option<u64> {
        const ROUND: u64 = 1 << 32;
        let this_round = self.next & !(ROUND - 1) | u64::from(correlation);
        let sequence = if this_round < self.next { this_round } else { this_round.checked_sub(ROUND)? };
        (correlation >= FIRST_REQUEST && sequence >= self.first).then_some(sequence)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half")]
const fn low(sequence: u64) -> u32 {
    sequence as u32
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::Semaphore;

    use super::*;

    fn address() -> Address {
        "127.0.0.1:7415".parse().unwrap()
    }

    fn request(deadline: Instant) -> (Request, oneshot::Receiver<Answer>) {
        let (answer, answered) = oneshot::channel();
        let room = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        (Request { body: Body::Ping(vec![]), deadline, answer, room }, answered)
    }

    #[test]
    fn correlation_ids_wrap_around_without_those_of_the_handshake_and_without_confusion() {
        let now = Instant::now();
        let mut in_flight = InFlight::new(address(), u32::MAX - 1);
        let ask = |in_flight: &mut InFlight| {
            let (request, answered) = request(now);
            (in_flight.write(request).correlation, answered)
        };
        let (first, _answered) = ask(&mut in_flight);
        let (second, _answered) = ask(&mut in_flight);
        let (third, mut answered) = ask(&mut in_flight);
        assert_eq!((first, second, third), (u32::MAX - 1, u32::MAX, 3));
        assert_eq!(in_flight.answer(3, Body::Pong(vec![7])), Answered::Delivered);
        assert_eq!(answered.try_recv().unwrap().unwrap(), Body::Pong(vec![7]));
        assert_eq!(in_flight.answer(3, Body::Pong(vec![])), Answered::TooLate);
        for never in [0, 1, 2, 4, u32::MAX - 2] {
            assert_eq!(in_flight.answer(never, Body::Pong(vec![])), Answered::Unasked, "{never}");
        }
        assert_eq!(in_flight.answer(first, Body::GroupDeleteAnswer), Answered::Wrong, "the wrong type");
        assert_eq!(in_flight.answer(second, Body::Pong(vec![])), Answered::Delivered);
    }

    #[test]
    fn what_is_not_answered_in_time_fails_alone() {
        let now = Instant::now();
        let mut in_flight = InFlight::new(address(), 1);
        let (first, mut first_answered) = request(now);
        let (second, mut second_answered) = request(now + Duration::from_secs(1));
        in_flight.write(first);
        in_flight.write(second);
        in_flight.fail_expired(now, || ClientError::Protocol("late".to_owned()));
        assert!(first_answered.try_recv().unwrap().is_err());
        assert!(second_answered.try_recv().is_err(), "still waiting");
        assert_eq!(in_flight.next_deadline(), Some(now + Duration::from_secs(1)));
    }
}
