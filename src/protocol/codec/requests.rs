//! Decodes many AddNewMsg and DelMsg frames into one [`RequestBatch`] and encodes the answers. This is the hot path.
//!
//! This module decodes only valid frames. The module `decode` reads any other frame and reports its fault.

use bytes::BytesMut;

use super::super::frame::{FrameType, MAX_PING_LENGTH};
use super::fields::{numbers, pair};
use super::{Codec, RawFrame, correlation_id, decode, encode, single_message};
use crate::core::{Message, Operation, Outcome, Request, RequestBatch};

/// The result of [`Codec::echo_pings`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EchoedPings {
    /// The number of bytes of the answered Pings and the skipped Pongs.
    pub bytes: usize,
    /// The number of Pings that were answered.
    pub pings: u64,
    /// The number of Pongs that were skipped.
    pub pongs: u64,
}

impl Codec {
    /// Decodes the AddNewMsg and DelMsg frames at the front of the received bytes into a request batch. Stops when the
    /// batch has at least `most` messages, or at a frame that is incomplete, faulty or of another type. `revolution` is
    /// the ack timeout, in ticks, for an AddNewMsg without one. Returns how many bytes the decoded frames have; the
    /// caller must remove these bytes.
    pub fn take_requests(&self, received: &[u8], batch: &mut RequestBatch, most: usize, revolution: u16) -> usize {
        let mut taken = 0;
        while batch.messages().len() < most {
            let singles = single_message::take(&received[taken..], batch, most, revolution);
            if singles > 0 {
                taken += singles;
                continue;
            }
            let Ok(Some(frame)) = self.first(&received[taken..]) else { break };
            let Some((operation, messages)) = decode::request(&frame) else { break };
            let id = u64::from(frame.correlation);
            let operation = operation.with_default_timeout(revolution);
            match messages.clients {
                None => batch.push(id, operation, numbers(messages.ids).map(Message::from)),
                Some(clients) => batch.push(id, operation, pair(messages.ids, clients)),
            }
            taken += frame.length();
        }
        taken
    }

    /// Appends a Pong to `out` for each Ping at the front of the received bytes, and skips Pongs. Stops at a frame that
    /// is incomplete, faulty or of another type. The caller must remove the bytes of the handled frames.
    pub fn echo_pings(&self, received: &[u8], out: &mut BytesMut) -> EchoedPings {
        const PING: u8 = FrameType::Ping as u8;
        const PONG: u8 = FrameType::Pong as u8;
        let mut echoed = EchoedPings::default();
        while let Ok(Some(frame)) = self.first(&received[echoed.bytes..]) {
            match frame {
                RawFrame { flags: 0, status: 0, body, .. } if body.len() > MAX_PING_LENGTH => break,
                RawFrame { number: PING, flags: 0, status: 0, correlation, body } => {
                    encode::framed(FrameType::Pong, 0, correlation, out, |out| {
                        out.extend_from_slice(body);
                        0
                    });
                    echoed.pings += 1;
                }
                RawFrame { number: PONG, flags: 0, status: 0, .. } => echoed.pongs += 1,
                _ => break,
            }
            echoed.bytes += frame.length();
        }
        echoed
    }

    /// Appends the answer to a processed request. `outcomes` has one outcome per message, in order.
    #[inline]
    pub fn encode_answer(&self, request: &Request, outcomes: &[Outcome], out: &mut BytesMut) {
        if let [outcome] = outcomes {
            return single_message::put_answer(request, *outcome, out);
        }
        put_answer(request, outcomes, out);
    }
}

/// Appends the answer to a request of several messages.
#[inline(never)]
fn put_answer(request: &Request, outcomes: &[Outcome], out: &mut BytesMut) {
    let correlation = correlation_id(request);
    match request.operation {
        Operation::Add { .. } => encode::framed(FrameType::AddNewMsgAnswer, 0, correlation, out, |out| {
            encode::add_new_msg_answer(request.deadline, outcomes, |outcome| *outcome == Outcome::Rearmed, out)
        }),
        Operation::Del { .. } => encode::framed(FrameType::DelMsgAnswer, 0, correlation, out, |out| {
            encode::del_msg_answer(outcomes, |outcome| outcome.of_del() as u8, out)
        }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::super::frame::{AddNewMsgAnswer, Body, Frame};
    use super::super::Decoded;
    use super::*;
    use crate::core::Tick;

    const REVOLUTION: u16 = 15;

    /// Returns the request at the front of these bytes, as [`Codec::decode`] reads it.
    fn single(bytes: &[u8]) -> Option<(u32, Operation, Vec<Message>)> {
        let Ok(Some(Decoded::Frame(frame))) = Codec::default().decode(&mut BytesMut::from(bytes)) else {
            return None;
        };
        let (operation, messages) = match frame.body {
            Body::AddNewMsg { messages, ack_timeout_ticks, attempt } => {
                let ack_timeout_ticks = if ack_timeout_ticks == 0 { REVOLUTION } else { ack_timeout_ticks };
                (Operation::Add { ack_timeout_ticks, attempt }, messages)
            }
            Body::DelMsg { messages, withdraw } => (Operation::Del { withdraw }, messages),
            _ => return None,
        };
        Some((frame.correlation, operation, messages))
    }

    fn requests() -> impl Strategy<Value = Vec<Frame>> {
        let messages = || {
            prop_oneof![
                vec(any::<u64>().prop_map(Message::from), 1),
                vec(any::<u64>().prop_map(Message::from), 1..20),
                vec(any::<(u64, u64)>().prop_map(Message::from), 1),
                vec(any::<(u64, u64)>().prop_map(Message::from), 1..20)
            ]
        };
        let ack_timeouts = prop_oneof![Just(0), any::<u16>()];
        let add = (messages(), ack_timeouts, any::<u8>()).prop_map(|(messages, ack_timeout_ticks, attempt)| {
            Body::AddNewMsg { messages, ack_timeout_ticks, attempt }
        });
        let del = (messages(), any::<bool>()).prop_map(|(messages, withdraw)| Body::DelMsg { messages, withdraw });
        let ping = vec(any::<u8>(), 0..64).prop_map(Body::Ping);
        let body = prop_oneof![5 => add, 5 => del, 1 => ping];
        vec((any::<u32>(), body).prop_map(|(correlation, body)| Frame::new(correlation, body)), 1..12)
    }

    proptest! {
        #[test]
        fn what_is_taken_is_what_the_decoder_reads_and_the_rest_is_left(
            frames in requests(),
            damage in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
            cut in any::<prop::sample::Index>(),
        ) {
            let codec = Codec::default();
            let mut bytes = BytesMut::new();
            for frame in &frames {
                codec.encode_frame(frame, &mut bytes);
            }
            if let Some((at, byte)) = damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(bytes.len() - cut.index(bytes.len()) / 4);
            let mut batch = RequestBatch::default();
            let taken = codec.take_requests(&bytes, &mut batch, usize::MAX, REVOLUTION);
            let mut rest = BytesMut::from(&bytes[..taken]);
            for request in &batch.requests {
                let messages = batch.messages()[request.range()].to_vec();
                prop_assert_eq!(single(&rest), Some((correlation_id(request), request.operation, messages)));
                codec.decode(&mut rest).unwrap();
            }
            prop_assert!(rest.is_empty());
            prop_assert_eq!(single(&bytes[taken..]), None, "no request is left that could be decoded");
        }

        #[test]
        fn pings_are_answered_as_the_encoder_does(
            sent in vec((any::<bool>(), vec(any::<u8>(), 0..=MAX_PING_LENGTH)), 0..9),
        ) {
            let (codec, mut received, mut pongs) = (Codec::default(), BytesMut::new(), BytesMut::new());
            let mut expected = EchoedPings::default();
            for (correlation, (ping, payload)) in (3..).zip(&sent) {
                let pong = Frame::new(correlation, Body::Pong(payload.clone()));
                if *ping {
                    codec.encode_frame(&Frame::new(correlation, Body::Ping(payload.clone())), &mut received);
                    codec.encode_frame(&pong, &mut pongs);
                    expected.pings += 1;
                } else {
                    codec.encode_frame(&pong, &mut received);
                    expected.pongs += 1;
                }
            }
            expected.bytes = received.len();
            codec.encode_frame(&Frame::new(1, Body::GroupDeleteAnswer), &mut received);
            let mut out = BytesMut::new();
            prop_assert_eq!(codec.echo_pings(&received, &mut out), expected);
            prop_assert_eq!(out, pongs);
        }

        #[test]
        fn answers_are_as_the_encoder_writes_them(
            numbers in prop_oneof![vec(0..4_u8, 1), vec(0..4_u8, 1..40)],
            deadline in any::<u64>(),
        ) {
            let (codec, mut batch) = (Codec::default(), RequestBatch::default());
            let messages = || (0..numbers.len() as u64).map(Message::from);
            batch.push(8, Operation::Add { ack_timeout_ticks: 1, attempt: 1 }, messages());
            batch.push(9, Operation::Del { withdraw: false }, messages());
            batch.requests[0].deadline = Tick(deadline);
            let added = |number: &u8| if *number == 0 { Outcome::Rearmed } else { Outcome::Added };
            let deleted = [Outcome::Unknown, Outcome::Acked, Outcome::Late, Outcome::Withdrawn];
            let adds: Vec<Outcome> = numbers.iter().map(added).collect();
            let dels: Vec<Outcome> = numbers.iter().map(|number| deleted[usize::from(*number)]).collect();
            let (mut found, mut expected) = (BytesMut::new(), BytesMut::new());
            codec.encode_answer(&batch.requests[0], &adds, &mut found);
            codec.encode_answer(&batch.requests[1], &dels, &mut found);
            let outcomes = adds.iter().map(|outcome| outcome.of_add()).collect();
            let answer = AddNewMsgAnswer { deadline: Tick(deadline), outcomes };
            codec.encode_frame(&Frame::new(8, Body::AddNewMsgAnswer(answer)), &mut expected);
            let outcomes = dels.iter().map(|outcome| outcome.of_del()).collect();
            codec.encode_frame(&Frame::new(9, Body::DelMsgAnswer(outcomes)), &mut expected);
            prop_assert_eq!(found, expected);
        }
    }
}
