//! Encodes the Pings of a load, and checks answers without decoding them.
//!
//! A load shares its machine with the server that it measures, so that a frame must cost it some nanoseconds. An answer
//! that is exactly the expected one is recognised by its bytes. Any other frame is decoded by [`Codec`].

use bytes::BytesMut;

use super::requests::{Kind, Sent};
use crate::core::{AddOutcome, DelOutcome};
use crate::protocol::codec::{Codec, DecodeError, Decoded, LENGTH_LENGTH, begin};
use crate::protocol::frame::{
    Body, COUNTED_HEAD_LENGTH, DEFAULT_MAX_FRAME_LENGTH, Frame, FrameType, HEAD_LENGTH, MAX_PING_LENGTH,
};

/// The outcome of a DelMsg that took the message out of flight.
const ACKED: u8 = 1;

/// Bytes of an AddNewMsg's body with that many messages.
pub(super) const fn add_body_length(messages: usize, with_clients: bool) -> usize {
    8 + messages * if with_clients { 16 } else { 8 }
}

/// The payload of a Ping behind its number.
const FILLING: [u8; 8] = [0xa5; 8];

/// Appends a Ping that carries a number and, up to `length`, filling. The length is a multiple of 8, from 8 to 64, as
/// that of every AddNewMsg's body is.
pub(super) fn put_ping(out: &mut BytesMut, correlation: u32, number: u64, length: usize) {
    let mut ping = [FILLING[0]; HEAD_LENGTH + MAX_PING_LENGTH];
    ping[..8].copy_from_slice(&begin(HEAD_LENGTH + length, FrameType::Ping, 0).to_be_bytes());
    ping[8..12].copy_from_slice(&correlation.to_be_bytes());
    ping[12..20].copy_from_slice(&number.to_be_bytes());
    out.extend_from_slice(&ping[..HEAD_LENGTH + length]);
}

/// The next whole frame at the beginning of the bytes. An error if no frame can have its length.
pub(super) fn next_frame(bytes: &[u8]) -> Result<Option<&[u8]>, String> {
    let Some(length) = u32_at(bytes, 0) else { return Ok(None) };
    if (length as usize) < COUNTED_HEAD_LENGTH || length > DEFAULT_MAX_FRAME_LENGTH {
        return Err(format!("the server sent a frame whose length is {length}, which no frame can have"));
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

/// The deadline in the answer to an AddNewMsg of `count` messages, if all of them were added.
pub(super) fn added(frame: &[u8], count: u32) -> Option<u64> {
    let length = HEAD_LENGTH + 16 + (count as usize).div_ceil(8);
    let (found, deadline, counts) = (u64_at(frame, 0)?, u64_at(frame, 12)?, u64_at(frame, 20)?);
    // The lower half of `counts` is the number of those that were re-armed.
    let right = found == begin(length, FrameType::AddNewMsgAnswer, 0)
        && counts == u64::from(count) << 32
        && frame[HEAD_LENGTH + 16..].iter().all(|bits| *bits == 0);
    right.then_some(deadline)
}

/// Whether the frame answers a DelMsg of `count` messages and all of them were acknowledged.
pub(super) fn acked(frame: &[u8], count: u32) -> bool {
    u64_at(frame, 0) == Some(begin(HEAD_LENGTH + 4 + count as usize, FrameType::DelMsgAnswer, 0))
        && u32_at(frame, 12) == Some(count)
        && frame[HEAD_LENGTH + 4..].iter().all(|outcome| *outcome == ACKED)
}

/// Whether the frame answers the Ping that carried this.
pub(super) fn echoed(frame: &[u8], number: u64, length: usize) -> bool {
    u64_at(frame, 0) == Some(begin(HEAD_LENGTH + length, FrameType::Pong, 0))
        && u64_at(frame, HEAD_LENGTH) == Some(number)
        && frame[HEAD_LENGTH + 8..].chunks(FILLING.len()).all(|eight| eight == FILLING)
}

/// Describes a wrong answer. An error if it cannot be decoded.
#[cold]
pub(super) fn wrong(frame: &[u8], sent: Sent) -> Result<String, String> {
    let request = match sent.kind {
        Kind::Add => "an AddNewMsg",
        Kind::Del => "a DelMsg",
        Kind::Ping => "a Ping",
    };
    let asked = u64::from(sent.count);
    Ok(match decode(frame)?.body {
        Body::Error(error) => format!("{request} was refused: {}", error.text),
        Body::AddNewMsgAnswer(answer) if sent.kind == Kind::Add && answer.outcomes.len() as u64 == asked => {
            let rearmed = answer.outcomes.iter().filter(|outcome| **outcome == AddOutcome::Rearmed).count();
            format!("{request} was answered with re-armed for {rearmed} of {asked} messages, not with added")
        }
        Body::DelMsgAnswer(outcomes) if sent.kind == Kind::Del && outcomes.len() as u64 == asked => {
            let wrong = outcomes.iter().find(|outcome| **outcome != DelOutcome::Acked);
            let advice = if wrong == Some(&DelOutcome::Late) {
                ": the message timed out before its turn came; keep fewer --in-flight, or raise --ack-timeout-ticks"
            } else {
                ""
            };
            let wrong = wrong.unwrap_or(&DelOutcome::Acked);
            format!("{request} was answered with {wrong}, not with acked{advice}")
        }
        body => format!("{request} was answered with another {} than hoped for", body.frame_type().as_str()),
    })
}

/// Takes a frame that answers no request. A Ping is answered in `out`. Returns a fault, if there is one; an error
/// if it is the last that the connection is good for.
#[cold]
pub(super) fn unsolicited(frame: &[u8], out: &mut BytesMut) -> Result<Option<String>, String> {
    let Frame { correlation, body } = decode(frame)?;
    match body {
        Body::Ping(payload) => {
            Codec::default().encode_frame(&Frame::new(correlation, Body::Pong(payload)), out);
            Ok(None)
        }
        Body::GoAway { .. } => Err("the server says that it will close the connection".to_owned()),
        Body::Error(error) => Err(format!("the server said: {}", error.text)),
        body => Ok(Some(format!("the server sent a {} that nobody asked for", body.frame_type().as_str()))),
    }
}

/// Decodes a whole frame.
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
    use crate::core::{Message, Tick};
    use crate::protocol::frame::{AddNewMsg, AddNewMsgAnswer};

    const COUNTS: [u32; 5] = [1, 2, 8, 9, 512];

    fn encoded(correlation: u32, body: Body) -> Vec<u8> {
        let mut bytes = BytesMut::new();
        Codec::default().encode_frame(&Frame::new(correlation, body), &mut bytes);
        bytes.to_vec()
    }

    fn payload(number: u64, length: usize) -> Vec<u8> {
        let mut payload = number.to_be_bytes().to_vec();
        payload.resize(length, 0xa5);
        payload
    }

    #[test]
    fn pings_are_those_of_the_codec_and_as_long_as_adds() {
        for (count, with_clients) in COUNTS.into_iter().flat_map(|count| [(count, false), (count, true)]) {
            let messages = (0..u64::from(count)).map(|n| Message::new(!n, if with_clients { n + 1 } else { 0 }));
            let body = AddNewMsg { messages: messages.collect(), ack_timeout_ticks: 3, attempt: 1 };
            let length = encoded(7, Body::AddNewMsg(body)).len() - HEAD_LENGTH;
            assert_eq!(length, add_body_length(count as usize, with_clients));
        }
        for length in [8, 16, 64] {
            let mut out = BytesMut::new();
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
        for (bytes, length) in [(&[0, 0, 0, 7], "length is 7,"), (b"HTTP", "length is 1213486160,")] {
            assert!(next_frame(bytes).is_err_and(|text| text.contains(length)));
        }
    }
}
