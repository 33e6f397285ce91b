//! The hot path of the codec: the requests that come most, many at a time, straight into a [`Burst`] and back.
//!
//! Only frames without a fault are taken here. Whoever finds another one leaves it where it is, for the decoder of
//! single frames, which says what is wrong with it.

use bytes::{BufMut, BytesMut};

use super::super::frame::{COUNTED_HEAD_LENGTH, FrameType, HEAD_LENGTH, MAX_MESSAGES, MAX_PING_LENGTH};
use super::{Codec, flag};
use crate::core::burst::{Asks, Burst, Outcome, Request};
use crate::core::message::Message;
use crate::core::tick::Tick;

/// A whole frame that lies at the front of what was received.
struct Raw<'a> {
    number: u8,
    flags: u8,
    correlation: [u8; 4],
    body: &'a [u8],
}

impl Codec {
    /// Moves AddNewMsg and DelMsg frames from the front of what was received into a burst, until another frame comes
    /// or the burst has `most` messages. Returns how many bytes they had.
    #[must_use]
    pub fn take_requests(&self, received: &[u8], burst: &mut Burst, most: usize) -> usize {
        let mut taken = 0;
        while burst.messages().len() < most {
            let Some(frame) = self.first(&received[taken..]) else { break };
            let correlation = u32::from_be_bytes(frame.correlation);
            let Some((asks, messages)) = frame.request() else { break };
            match messages {
                Messages::Ids(ids) => {
                    burst.push(correlation, asks, ids.iter().map(|id| Message::from(number(*id))))
                }
                Messages::Pairs(ids, clients) => {
                    let pairs = ids.iter().zip(clients).map(|(id, client)| (number(*id), number(*client)));
                    burst.push(correlation, asks, pairs.map(Message::from));
                }
            }
            taken += HEAD_LENGTH + frame.body.len();
        }
        taken
    }

    /// Answers the Pings at the front of what was received. Returns how many bytes they had, and how many there were.
    #[must_use]
    pub fn echo_pings(&self, received: &[u8], out: &mut BytesMut) -> (usize, u64) {
        let (mut taken, mut count) = (0, 0);
        while let Some(frame) = self.first(&received[taken..]) {
            if frame.number != FrameType::Ping as u8 || frame.flags != 0 || frame.body.len() > MAX_PING_LENGTH {
                break;
            }
            put_head(out, frame.body.len(), FrameType::Pong, 0, frame.correlation);
            out.extend_from_slice(frame.body);
            taken += HEAD_LENGTH + frame.body.len();
            count += 1;
        }
        (taken, count)
    }

    /// Appends the answer to a request of a burst that was done.
    pub fn encode_answer(&self, request: &Request, outcomes: &[Outcome], out: &mut BytesMut) {
        match request.asks {
            Asks::Add { .. } => put_add_answer(request.correlation, request.deadline, outcomes, out),
            Asks::Del { .. } => {
                put_head(out, 4 + outcomes.len(), FrameType::DelMsgAnswer, 0, request.correlation.to_be_bytes());
                out.put_u32(count(outcomes));
                out.extend(outcomes.iter().map(|outcome| super::encode::del_outcome(outcome.of_del())));
            }
        }
    }

    /// The frame at the front, if it is whole, not too long and no Error.
    #[inline]
    fn first<'a>(&self, received: &'a [u8]) -> Option<Raw<'a>> {
        let (head, rest) = received.split_first_chunk::<HEAD_LENGTH>()?;
        let [l0, l1, l2, l3, number, flags, 0, 0, correlation @ ..] = *head else { return None };
        let length = u32::from_be_bytes([l0, l1, l2, l3]);
        if length > self.max_frame_length {
            return None;
        }
        let body = rest.get(..(length as usize).checked_sub(COUNTED_HEAD_LENGTH)?)?;
        Some(Raw { number, flags, correlation, body })
    }
}

/// The messages of a request, as they lie in the frame.
enum Messages<'a> {
    Ids(&'a [[u8; 8]]),
    Pairs(&'a [[u8; 8]], &'a [[u8; 8]]),
}

impl<'a> Raw<'a> {
    /// What it asks for, if it is an AddNewMsg or a DelMsg without a fault.
    #[inline]
    fn request(&self) -> Option<(Asks, Messages<'a>)> {
        if self.number == FrameType::AddNewMsg as u8 {
            let (&[high, low, attempt, 0], list) = self.body.split_first_chunk::<4>()? else { return None };
            let ack_timeout_ticks = u16::from_be_bytes([high, low]);
            Some((Asks::Add { ack_timeout_ticks, attempt }, self.messages(list, flag::CLIENTS)?))
        } else if self.number == FrameType::DelMsg as u8 {
            let asks = Asks::Del { withdraw: self.flags & flag::WITHDRAW != 0 };
            Some((asks, self.messages(self.body, flag::CLIENTS | flag::WITHDRAW)?))
        } else {
            None
        }
    }

    #[inline]
    fn messages(&self, list: &'a [u8], defined: u8) -> Option<Messages<'a>> {
        let (count, list) = list.split_first_chunk::<4>()?;
        let count = u32::from_be_bytes(*count) as usize;
        let (numbers, []) = list.as_chunks::<8>() else { return None };
        if self.flags & !defined != 0 || !(1..=MAX_MESSAGES).contains(&count) {
            return None;
        }
        if self.flags & flag::CLIENTS == 0 {
            return (numbers.len() == count).then_some(Messages::Ids(numbers));
        }
        let (ids, clients) = numbers.split_at_checked(count)?;
        (clients.len() == count).then_some(Messages::Pairs(ids, clients))
    }
}

fn number(bytes: [u8; 8]) -> u64 {
    u64::from_be_bytes(bytes)
}

fn count(outcomes: &[Outcome]) -> u32 {
    u32::try_from(outcomes.len()).expect("a request has at most 32,768 messages")
}

#[inline]
fn put_head(out: &mut BytesMut, body_length: usize, frame_type: FrameType, flags: u8, correlation: [u8; 4]) {
    let length =
        u32::try_from(COUNTED_HEAD_LENGTH + body_length).expect("an answer is shorter than a frame may be");
    let mut head = [0; HEAD_LENGTH];
    head[..4].copy_from_slice(&length.to_be_bytes());
    head[4] = frame_type as u8;
    head[5] = flags;
    head[8..].copy_from_slice(&correlation);
    out.extend_from_slice(&head);
}

fn put_add_answer(correlation: u32, deadline: Tick, outcomes: &[Outcome], out: &mut BytesMut) {
    let is_rearmed = |outcome: &Outcome| u8::from(*outcome == Outcome::Rearmed);
    let rearmed = outcomes.iter().filter(|outcome| **outcome == Outcome::Rearmed).count();
    let body_length = 16 + outcomes.len().div_ceil(8);
    put_head(out, body_length, FrameType::AddNewMsgAnswer, 0, correlation.to_be_bytes());
    let mut fixed = [0; 16];
    fixed[..8].copy_from_slice(&deadline.0.to_be_bytes());
    fixed[8..12].copy_from_slice(&count(outcomes).to_be_bytes());
    fixed[12..].copy_from_slice(&u32::try_from(rearmed).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(&fixed);
    let bits = |eight: &[Outcome]| eight.iter().rev().fold(0, |byte, outcome| byte << 1 | is_rearmed(outcome));
    out.extend(outcomes.chunks(8).map(bits));
}
