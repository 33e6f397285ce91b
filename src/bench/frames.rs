//! The frames of a load, straight to and from bytes.
//!
//! A load shares its machine with the server that it measures, so that a frame must cost it some nanoseconds. Here are
//! only the requests that it makes and the answers that it hopes for. Whatever is not exactly that goes through
//! [`Codec`], which can say what it is.

use bytes::BytesMut;

use super::requests::{Kind, Sent};
use crate::core::message::{AddOutcome, DelOutcome, Message, MsgId};
use crate::protocol::frame::{Body, COUNTED_HEAD_LENGTH, DEFAULT_MAX_FRAME_LENGTH, Frame, FrameType, HEAD_LENGTH};
use crate::protocol::{Codec, DecodeError, Decoded};

/// Bytes of the length, which it does not count.
const LENGTH_LENGTH: usize = HEAD_LENGTH - COUNTED_HEAD_LENGTH;

/// Bytes of an AddNewMsg's body before its first id, and where its count is.
const ADD_FIELDS: usize = 8;
/// Bytes of a DelMsg's body before its first id.
const DEL_FIELDS: usize = 4;

/// The flag of AddNewMsg and DelMsg that says that clients stand behind the ids.
const CLIENTS: u8 = 0x01;

/// The attempt of every message: a load never pushes again.
const ATTEMPT: u8 = 1;

/// The outcome of a DelMsg that took the message out of flight.
const ACKED: u8 = 1;

/// The first eight bytes of a frame, which also say how long it is.
const fn head(frame_type: FrameType, flags: u8, length: usize) -> u64 {
    ((length - LENGTH_LENGTH) as u64) << 32 | (frame_type as u64) << 24 | (flags as u64) << 16
}

/// Bytes of an AddNewMsg's body with that many messages.
pub(super) const fn add_body_length(messages: usize, with_clients: bool) -> usize {
    ADD_FIELDS + messages * if with_clients { 16 } else { 8 }
}

/// Appends an AddNewMsg.
pub(super) fn put_add(
    out: &mut Vec<u8>,
    correlation: u32,
    ack_timeout_ticks: u16,
    with_clients: bool,
    messages: impl Iterator<Item = Message> + Clone,
) {
    let start = out.len();
    let mut fixed = [0; HEAD_LENGTH + ADD_FIELDS];
    fixed[8..12].copy_from_slice(&correlation.to_be_bytes());
    fixed[12..14].copy_from_slice(&ack_timeout_ticks.to_be_bytes());
    fixed[14] = ATTEMPT;
    out.extend_from_slice(&fixed);
    put_messages(out, start, FrameType::AddNewMsg, with_clients, messages);
}

/// Appends a DelMsg, and returns how many messages it has. Where there is none, nothing is appended.
pub(super) fn put_del(
    out: &mut Vec<u8>,
    correlation: u32,
    with_clients: bool,
    messages: impl Iterator<Item = Message> + Clone,
) -> u32 {
    let start = out.len();
    let mut fixed = [0; HEAD_LENGTH + DEL_FIELDS];
    fixed[8..12].copy_from_slice(&correlation.to_be_bytes());
    out.extend_from_slice(&fixed);
    let count = put_messages(out, start, FrameType::DelMsg, with_clients, messages);
    if count == 0 {
        out.truncate(start);
    }
    count
}

/// Appends an AddNewMsg of one message without a client, in one piece.
pub(super) fn put_single_add(out: &mut Vec<u8>, correlation: u32, ack_timeout_ticks: u16, id: MsgId) {
    const LENGTH: usize = HEAD_LENGTH + ADD_FIELDS + 8;
    let mut frame = [0; LENGTH];
    frame[..8].copy_from_slice(&head(FrameType::AddNewMsg, 0, LENGTH).to_be_bytes());
    frame[8..12].copy_from_slice(&correlation.to_be_bytes());
    frame[12..14].copy_from_slice(&ack_timeout_ticks.to_be_bytes());
    frame[14] = ATTEMPT;
    frame[16..20].copy_from_slice(&1_u32.to_be_bytes());
    frame[20..].copy_from_slice(&id.0.to_be_bytes());
    out.extend_from_slice(&frame);
}

/// Appends a DelMsg of one message without a client, in one piece.
pub(super) fn put_single_del(out: &mut Vec<u8>, correlation: u32, id: MsgId) {
    const LENGTH: usize = HEAD_LENGTH + DEL_FIELDS + 8;
    let mut frame = [0; LENGTH];
    frame[..8].copy_from_slice(&head(FrameType::DelMsg, 0, LENGTH).to_be_bytes());
    frame[8..12].copy_from_slice(&correlation.to_be_bytes());
    frame[12..16].copy_from_slice(&1_u32.to_be_bytes());
    frame[16..].copy_from_slice(&id.0.to_be_bytes());
    out.extend_from_slice(&frame);
}

/// Appends ids and clients to a frame whose fixed part is there, and fills in what depends on how many they are.
fn put_messages(
    out: &mut Vec<u8>,
    start: usize,
    frame_type: FrameType,
    with_clients: bool,
    messages: impl Iterator<Item = Message> + Clone,
) -> u32 {
    let ids_at = out.len();
    let mut count = 0_u32;
    for message in messages.clone() {
        out.extend_from_slice(&message.msg_id.0.to_be_bytes());
        count += 1;
    }
    if with_clients {
        for message in messages {
            out.extend_from_slice(&message.client.0.to_be_bytes());
        }
    }
    out[ids_at - size_of::<u32>()..ids_at].copy_from_slice(&count.to_be_bytes());
    let flags = if with_clients { CLIENTS } else { 0 };
    let head = head(frame_type, flags, out.len() - start);
    out[start..start + size_of::<u64>()].copy_from_slice(&head.to_be_bytes());
    count
}

/// The payload of a Ping behind its number.
const FILLING: [u8; 8] = [0xa5; 8];

/// Appends a Ping that carries a number and, up to `length`, bytes that say nothing. The length is a multiple of 8, from 8
/// to 64, as that of every AddNewMsg's body is.
pub(super) fn put_ping(out: &mut Vec<u8>, correlation: u32, number: u64, length: usize) {
    let head = head(FrameType::Ping, 0, HEAD_LENGTH + length);
    let mut fixed = [0; HEAD_LENGTH + 8];
    fixed[..8].copy_from_slice(&head.to_be_bytes());
    fixed[8..12].copy_from_slice(&correlation.to_be_bytes());
    fixed[12..].copy_from_slice(&number.to_be_bytes());
    out.extend_from_slice(&fixed);
    for _ in 1..length / FILLING.len() {
        out.extend_from_slice(&FILLING);
    }
}

/// A length that no frame may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BrokenLength(pub(super) u32);

/// The next whole frame at the beginning of the bytes.
pub(super) fn next_frame(bytes: &[u8]) -> Result<Option<&[u8]>, BrokenLength> {
    let Some(length) = bytes.first_chunk() else { return Ok(None) };
    let length = u32::from_be_bytes(*length);
    if (length as usize) < COUNTED_HEAD_LENGTH || length > DEFAULT_MAX_FRAME_LENGTH {
        return Err(BrokenLength(length));
    }
    Ok(bytes.get(..LENGTH_LENGTH + length as usize))
}

fn u32_at(frame: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*frame.get(at..)?.first_chunk()?))
}

fn u64_at(frame: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*frame.get(at..)?.first_chunk()?))
}

/// The correlation id of a whole frame.
pub(super) fn correlation(frame: &[u8]) -> u32 {
    u32_at(frame, 8).unwrap_or_default()
}

/// The deadline in the answer to an AddNewMsg of `count` messages, if it says that all of them were added.
pub(super) fn added(frame: &[u8], count: u32) -> Option<u64> {
    let length = HEAD_LENGTH + 16 + (count as usize).div_ceil(8);
    let (found, deadline, counts) = (u64_at(frame, 0)?, u64_at(frame, 12)?, u64_at(frame, 20)?);
    // The lower half of `counts` is the number of those that were re-armed.
    let right = found == head(FrameType::AddNewMsgAnswer, 0, length)
        && counts == u64::from(count) << 32
        && frame[HEAD_LENGTH + 16..].iter().all(|bits| *bits == 0);
    right.then_some(deadline)
}

/// Whether the frame answers a DelMsg of `count` messages and says that all of them were acknowledged.
pub(super) fn acked(frame: &[u8], count: u32) -> bool {
    u64_at(frame, 0) == Some(head(FrameType::DelMsgAnswer, 0, HEAD_LENGTH + 4 + count as usize))
        && u32_at(frame, 12) == Some(count)
        && frame[HEAD_LENGTH + 4..].iter().all(|outcome| *outcome == ACKED)
}

/// Whether the frame answers the Ping that carried this.
pub(super) fn echoed(frame: &[u8], number: u64, length: usize) -> bool {
    u64_at(frame, 0) == Some(head(FrameType::Pong, 0, HEAD_LENGTH + length))
        && u64_at(frame, HEAD_LENGTH) == Some(number)
        && frame[HEAD_LENGTH + 8..].chunks(FILLING.len()).all(|eight| eight == FILLING)
}

/// Describes a wrong answer. An error if it cannot be decoded.
#[cold]
pub(super) fn wrong(frame: &[u8], sent: Sent) -> Result<String, String> {
    let what = match sent.kind {
        Kind::Add => "an AddNewMsg",
        Kind::Del => "a DelMsg",
        Kind::Ping => "a Ping",
    };
    let asked = u64::from(sent.count);
    let text = match decode(frame)?.body {
        Body::Error(error) => format!("{what} was refused: {}", error.text),
        Body::AddNewMsgAnswer(answer) if sent.kind == Kind::Add && answer.outcomes.len() as u64 == asked => {
            let rearmed = answer.outcomes.iter().filter(|outcome| **outcome == AddOutcome::Rearmed).count();
            format!("{what} was answered with re-armed for {rearmed} of {asked} messages, not with added")
        }
        Body::DelMsgAnswer(outcomes) if sent.kind == Kind::Del && outcomes.len() as u64 == asked => {
            not_acked(&outcomes)
        }
        body => format!("{what} was answered with another {} than hoped for", body.frame_type().as_str()),
    };
    Ok(text)
}

/// Takes a frame that answers no request. A Ping is answered in `out`. Returns a fault, if there is one; an error
/// if it is the last that the connection is good for.
#[cold]
pub(super) fn unsolicited(frame: &[u8], out: &mut Vec<u8>) -> Result<Option<String>, String> {
    let Frame { correlation, body } = decode(frame)?;
    match body {
        Body::Ping(payload) => {
            let mut pong = BytesMut::new();
            Codec::default().encode_frame(&Frame::new(correlation, Body::Pong(payload)), &mut pong);
            out.extend_from_slice(&pong);
            Ok(None)
        }
        Body::GoAway(_) => Err("the server says that it will close the connection".to_owned()),
        Body::Error(error) => Err(format!("the server said: {}", error.text)),
        body => Ok(Some(format!("the server sent a {} that nobody asked for", body.frame_type().as_str()))),
    }
}

fn not_acked(outcomes: &[DelOutcome]) -> String {
    let wrong =
        outcomes.iter().find(|outcome| **outcome != DelOutcome::Acked).copied().unwrap_or(DelOutcome::Acked);
    let advice = match wrong {
        DelOutcome::Late => {
            ": the message timed out before its turn came; keep fewer --in-flight, or raise --ack-timeout-ticks"
        }
        _ => "",
    };
    format!("a DelMsg was answered with {wrong}, not with acked{advice}")
}

/// A length after which nothing more can be read.
pub(super) fn broken(length: BrokenLength) -> String {
    format!("the server sent a frame whose length is {}, which no frame can have", length.0)
}

/// Has the codec read a whole frame.
fn decode(frame: &[u8]) -> Result<Frame, String> {
    match Codec::default().decode(&mut BytesMut::from(frame)) {
        Ok(Some(Decoded::Frame(frame))) => Ok(frame),
        Ok(Some(Decoded::Refused { refusal, .. })) | Err(DecodeError { refusal, .. }) => {
            Err(format!("the server sent a frame that cannot be read: {}", refusal.text))
        }
        Ok(None) => Err("the server sent a frame that does not end".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tick::Tick;
    use crate::protocol::frame::{AddNewMsg, AddNewMsgAnswer, DelMsg};

    const COUNTS: [u32; 5] = [1, 2, 8, 9, 512];

    fn encoded(correlation: u32, body: Body) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        Codec::default().encode_frame(&Frame::new(correlation, body), &mut bytes);
        bytes.to_vec()
    }

    fn messages(count: u32, with_clients: bool) -> Vec<Message> {
        (0..u64::from(count)).map(|n| Message::new(!n, if with_clients { n + 1 } else { 0 })).collect()
    }

    fn payload(number: u64, length: usize) -> Vec<u8> {
        let mut payload = number.to_be_bytes().to_vec();
        payload.resize(length, 0xa5);
        payload
    }

    #[test]
    fn requests_are_those_of_the_codec() {
        for (count, with_clients) in COUNTS.into_iter().flat_map(|count| [(count, false), (count, true)]) {
            let messages = messages(count, with_clients);
            let mut out = b"before".to_vec();
            put_add(&mut out, 7, 3, with_clients, messages.iter().copied());
            let body = AddNewMsg { messages: messages.clone(), ack_timeout_ticks: 3, attempt: 1 };
            assert_eq!(out[6..], encoded(7, Body::AddNewMsg(body)));
            assert_eq!(out.len() - 6 - HEAD_LENGTH, add_body_length(count as usize, with_clients));

            out.truncate(6);
            assert_eq!(put_del(&mut out, 9, with_clients, messages.iter().copied()), count);
            assert_eq!(out[6..], encoded(9, Body::DelMsg(DelMsg { messages, withdraw: false })));
        }
        let message = Message::new(0x0102_0304_0506_0708, 0);
        let (mut single, mut one_of_many) = (Vec::new(), Vec::new());
        put_single_add(&mut single, 7, 3, message.msg_id);
        put_single_del(&mut single, 9, message.msg_id);
        put_add(&mut one_of_many, 7, 3, false, std::iter::once(message));
        put_del(&mut one_of_many, 9, false, std::iter::once(message));
        assert_eq!(single, one_of_many);
        let mut out = Vec::new();
        assert_eq!((put_del(&mut out, 9, false, std::iter::empty()), out.len()), (0, 0));
        for length in [8, 16, 64] {
            let mut out = Vec::new();
            put_ping(&mut out, 11, 5, length);
            assert_eq!(out, encoded(11, Body::Ping(payload(5, length))));
        }
    }

    #[test]
    fn right_answers_are_known_as_the_codec_writes_them() {
        for count in COUNTS {
            let outcomes = vec![AddOutcome::Added; count as usize];
            let answer = encoded(7, Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline: Tick(115), outcomes }));
            assert_eq!((added(&answer, count), correlation(&answer)), (Some(115), 7));
            assert_eq!(added(&answer, count + 1), None);
            assert!(!acked(&answer, count));

            let answer = encoded(9, Body::DelMsgAnswer(vec![DelOutcome::Acked; count as usize]));
            assert!(acked(&answer, count) && !acked(&answer, count + 1));
            assert_eq!(added(&answer, count), None);
        }
        for length in [8, 16, 64] {
            let pong = encoded(1, Body::Pong(payload(5, length)));
            assert!(echoed(&pong, 5, length) && !echoed(&pong, 6, length) && !echoed(&pong, 5, length + 8));
            for changed in HEAD_LENGTH..pong.len() {
                let mut pong = pong.clone();
                pong[changed] ^= 1;
                assert!(!echoed(&pong, 5, length));
            }
        }
    }

    #[test]
    fn one_wrong_outcome_among_many_is_seen() {
        for wrong in [0, 1, 7, 8, 511] {
            let mut outcomes = vec![AddOutcome::Added; 512];
            outcomes[wrong] = AddOutcome::Rearmed;
            let mut answer = encoded(7, Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline: Tick(1), outcomes }));
            assert_eq!(added(&answer, 512), None);
            // Nor does it help to say that none was re-armed.
            answer[24..28].fill(0);
            assert_eq!(added(&answer, 512), None);
            for outcome in [DelOutcome::Unknown, DelOutcome::Late, DelOutcome::Withdrawn] {
                let mut outcomes = vec![DelOutcome::Acked; 512];
                outcomes[wrong] = outcome;
                assert!(!acked(&encoded(9, Body::DelMsgAnswer(outcomes)), 512));
            }
        }
    }

    #[test]
    fn frames_are_cut_where_they_end_and_broken_lengths_are_named() {
        let mut bytes = encoded(1, Body::Pong(vec![1, 2]));
        bytes.extend(encoded(2, Body::Pong(vec![3])));
        let first = next_frame(&bytes).unwrap().unwrap();
        assert_eq!((first.len(), correlation(first)), (14, 1));
        let second = next_frame(&bytes[14..]).unwrap().unwrap();
        assert_eq!((second.len(), correlation(second)), (13, 2));
        for cut in 0..13 {
            assert_eq!(next_frame(&second[..cut]), Ok(None));
        }
        assert_eq!(next_frame(&[0, 0, 0, 7]), Err(BrokenLength(7)));
        assert_eq!(next_frame(b"HTTP"), Err(BrokenLength(0x4854_5450)));
    }
}
