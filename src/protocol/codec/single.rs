//! Requests of one message, which come most, and the answers to them: each is taken, and made, in one piece.

use super::super::frame::{COUNTED_HEAD_LENGTH, FrameType, HEAD_LENGTH};
use super::flag;
use crate::core::burst::Asks;
use crate::core::message::Message;
use crate::core::tick::Tick;

/// Bytes before the message of an AddNewMsg, and of a DelMsg.
const ADD_FIXED: usize = HEAD_LENGTH + 8;
const DEL_FIXED: usize = HEAD_LENGTH + 4;

/// Where the correlation id stands.
const CORRELATION_AT: usize = HEAD_LENGTH - 4;

/// Bytes of an id, and of an id with its client.
const ID: usize = 8;
const PAIR: usize = 16;

/// What a frame begins with: all of the head but the correlation id.
const fn begin(whole: usize, frame_type: FrameType, flags: u8) -> u64 {
    let length = whole - HEAD_LENGTH + COUNTED_HEAD_LENGTH;
    (length as u64) << 32 | (frame_type as u64) << 24 | (flags as u64) << 16
}

const ADD_ID: u64 = begin(ADD_FIXED + ID, FrameType::AddNewMsg, 0);
const ADD_PAIR: u64 = begin(ADD_FIXED + PAIR, FrameType::AddNewMsg, flag::CLIENTS);
const DEL_ID: u64 = begin(DEL_FIXED + ID, FrameType::DelMsg, 0);
const DEL_PAIR: u64 = begin(DEL_FIXED + PAIR, FrameType::DelMsg, flag::CLIENTS);

/// A request of one message.
pub(super) struct Single {
    /// Bytes of its frame.
    pub(super) length: usize,
    pub(super) correlation: u32,
    pub(super) asks: Asks,
    pub(super) message: Message,
}

impl Single {
    /// The one at the front of what was received, if it is whole and without a fault. No limit of frames is so low that
    /// it is too long.
    #[inline]
    pub(super) fn first(received: &[u8]) -> Option<Single> {
        match u64::from_be_bytes(*received.first_chunk()?) {
            ADD_ID => Single::add::<{ ADD_FIXED + ID }>(received),
            ADD_PAIR => Single::add::<{ ADD_FIXED + PAIR }>(received),
            DEL_ID => Single::del::<{ DEL_FIXED + ID }>(received),
            DEL_PAIR => Single::del::<{ DEL_FIXED + PAIR }>(received),
            _ => None,
        }
    }

    #[inline]
    fn add<const LENGTH: usize>(received: &[u8]) -> Option<Single> {
        let frame = received.first_chunk::<LENGTH>()?;
        let [high, low, attempt, 0, 0, 0, 0, 1] = chunk(frame, HEAD_LENGTH) else { return None };
        let asks = Asks::Add { ack_timeout_ticks: u16::from_be_bytes([high, low]), attempt };
        Some(Single::of(frame, asks, ADD_FIXED))
    }

    #[inline]
    fn del<const LENGTH: usize>(received: &[u8]) -> Option<Single> {
        let frame = received.first_chunk::<LENGTH>()?;
        let [0, 0, 0, 1] = chunk(frame, HEAD_LENGTH) else { return None };
        Some(Single::of(frame, Asks::Del { withdraw: false }, DEL_FIXED))
    }

    #[inline]
    fn of<const LENGTH: usize>(frame: &[u8; LENGTH], asks: Asks, message_at: usize) -> Single {
        let client =
            if LENGTH == message_at + PAIR { u64::from_be_bytes(chunk(frame, message_at + ID)) } else { 0 };
        Single {
            length: LENGTH,
            correlation: u32::from_be_bytes(chunk(frame, CORRELATION_AT)),
            asks,
            message: Message::new(u64::from_be_bytes(chunk(frame, message_at)), client),
        }
    }
}

#[inline]
fn chunk<const LENGTH: usize>(bytes: &[u8], at: usize) -> [u8; LENGTH] {
    *bytes[at..].first_chunk().expect("the frame is longer")
}

/// Where the body of an answer begins: deadline, count, how many were armed again and their bits for an AddNewMsg;
/// count and outcome for a DelMsg.
const BODY: usize = HEAD_LENGTH;
const ADD_ANSWER: usize = BODY + 17;
const DEL_ANSWER: usize = BODY + 5;

/// The answer to an AddNewMsg.
#[inline]
pub(super) fn add_answer(correlation: u32, deadline: Tick, rearmed: bool) -> [u8; ADD_ANSWER] {
    let mut frame = answer(FrameType::AddNewMsgAnswer, correlation);
    frame[BODY..BODY + 8].copy_from_slice(&deadline.0.to_be_bytes());
    frame[BODY + 11] = 1;
    frame[BODY + 15] = u8::from(rearmed);
    frame[BODY + 16] = u8::from(rearmed);
    frame
}

/// The answer to a DelMsg.
#[inline]
pub(super) fn del_answer(correlation: u32, outcome: u8) -> [u8; DEL_ANSWER] {
    let mut frame = answer(FrameType::DelMsgAnswer, correlation);
    frame[BODY + 3] = 1;
    frame[BODY + 4] = outcome;
    frame
}

#[inline]
fn answer<const LENGTH: usize>(frame_type: FrameType, correlation: u32) -> [u8; LENGTH] {
    let mut frame = [0; LENGTH];
    frame[..CORRELATION_AT].copy_from_slice(&begin(LENGTH, frame_type, 0).to_be_bytes());
    frame[CORRELATION_AT..HEAD_LENGTH].copy_from_slice(&correlation.to_be_bytes());
    frame
}
