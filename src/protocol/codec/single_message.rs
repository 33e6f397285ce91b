//! Decodes requests of one message, the most frequent ones, and encodes their answers.
//!
//! AddNewMsgs and DelMsgs arrive in no order that a processor could predict. Where they differ, both values are computed
//! and one is chosen without a branch.

use std::hint::select_unpredictable;

use bytes::BytesMut;

use super::super::frame::{FrameType, HEAD_LENGTH};
use super::{LENGTH_LENGTH, begin, flag};
use crate::core::{Message, Operation, Outcome, Request, RequestBatch};

/// Bytes before the message of a DelMsg; an AddNewMsg has four more, which come first.
const DEL_FIXED: usize = HEAD_LENGTH + 4;
const MORE_OF_ADD: usize = 4;

/// Where the correlation id stands.
const CORRELATION_AT: usize = HEAD_LENGTH - 4;

/// Bytes of an id, and of a client.
const NUMBER: usize = 8;

/// The longest request of one message: what is looked at of what was received.
const LONGEST: usize = DEL_FIXED + MORE_OF_ADD + 2 * NUMBER;

/// The first bytes of a request of one message: without its client and with it, each a DelMsg and an AddNewMsg.
const BEGINS: [[u64; 2]; 2] = [
    [begin(DEL_FIXED + NUMBER, FrameType::DelMsg, 0), begin(LONGEST - NUMBER, FrameType::AddNewMsg, 0)],
    [
        begin(DEL_FIXED + 2 * NUMBER, FrameType::DelMsg, flag::CLIENTS),
        begin(LONGEST, FrameType::AddNewMsg, flag::CLIENTS),
    ],
];

/// Moves requests of one message from the front of what was received into a request batch, for as long as they are whole and
/// without a fault and the batch has less than `most` messages. Returns how many bytes they had. No limit of frames is so
/// low that they are too long.
pub(super) fn take(received: &[u8], batch: &mut RequestBatch, most: usize, revolution: u16) -> usize {
    let mut rest = received;
    while batch.messages().len() < most {
        let Some(window) = rest.first_chunk() else {
            return received.len() - take_last(rest, batch, revolution).len();
        };
        let Some(length) = length(window) else { break };
        rest = &rest[length..];
        push(window, batch, revolution);
    }
    received.len() - rest.len()
}

/// The same with what is left when that is shorter than a window; returns what is left then.
#[inline(never)]
fn take_last<'a>(mut rest: &'a [u8], batch: &mut RequestBatch, revolution: u16) -> &'a [u8] {
    let mut window = [0; LONGEST];
    window[..rest.len()].copy_from_slice(rest);
    if let Some(behind) = length(&window).and_then(|length| rest.get(length..)) {
        push(&window, batch, revolution);
        rest = behind;
    }
    rest
}

/// The bytes under inspection: a request of one message, if it is one, and perhaps bytes behind it.
type Window = [u8; LONGEST];

/// Whether it is an AddNewMsg, else a DelMsg, and whether it has a client: if it is a request.
#[inline]
const fn kind(window: &Window) -> (bool, bool) {
    let [_, _, _, _, frame_type, flags, ..] = *window;
    (frame_type == FrameType::AddNewMsg as u8, flags & flag::CLIENTS != 0)
}

/// The bytes of the frame, if it is a request without a fault.
#[inline]
fn length(window: &Window) -> Option<usize> {
    let (is_add, has_client) = kind(window);
    let begins = u64_at(window, 0) == BEGINS[usize::from(has_client)][usize::from(is_add)];
    let fields = u64_at(window, HEAD_LENGTH);
    // The count, and of an AddNewMsg the byte before it, which must be 0.
    let count = select_unpredictable(is_add, fields & 0xff_ffff_ffff, fields >> 32);
    // All of these are shorter than 256 bytes. Where the next begins is known sooner so than by what kind this is.
    let length = LENGTH_LENGTH + usize::from(window[3]);
    (begins && count == 1).then_some(length)
}

/// Puts the request into a request batch.
#[expect(clippy::inline_always, reason = "left to the compiler it is a call, and a frame takes 6 % longer")]
#[inline(always)]
fn push(window: &Window, batch: &mut RequestBatch, revolution: u16) {
    let (is_add, has_client) = kind(window);
    let [high, low, attempt, _] = chunk(window, HEAD_LENGTH);
    let add = Operation::Add { ack_timeout_ticks: u16::from_be_bytes([high, low]), attempt };
    let add = add.with_default_timeout(revolution);
    let at = DEL_FIXED + MORE_OF_ADD * usize::from(is_add);
    // A node that sends clients always sends them.
    let client = if has_client { u64_at(window, at + NUMBER) } else { 0 };
    batch.push_single(
        u64::from(u32::from_be_bytes(chunk(window, CORRELATION_AT))),
        select_unpredictable(is_add, add, Operation::Del { withdraw: false }),
        Message::new(u64_at(window, at), client),
    );
}

#[inline]
fn u64_at(window: &Window, at: usize) -> u64 {
    u64::from_be_bytes(chunk(window, at))
}

#[inline]
fn chunk<const LENGTH: usize>(window: &Window, at: usize) -> [u8; LENGTH] {
    *window[at..].first_chunk().expect("no request is longer than the window")
}

/// Bytes of an answer. That to an AddNewMsg has the deadline, the count, how many were armed again and their bits; that to
/// a DelMsg the count and the outcome.
const ADD_ANSWER: usize = HEAD_LENGTH + 17;
const DEL_ANSWER: usize = HEAD_LENGTH + 5;

/// A count of one message, in the upper half of eight bytes.
const ONE: u64 = 1 << 32;

/// Appends the answer to a request of one message.
#[inline]
pub(super) fn put_answer(request: &Request, outcome: Outcome, out: &mut BytesMut) {
    let is_add = request.operation.is_add();
    let rearmed = u8::from(outcome == Outcome::Rearmed);
    let begins = select_unpredictable(
        is_add,
        begin(ADD_ANSWER, FrameType::AddNewMsgAnswer, 0),
        begin(DEL_ANSWER, FrameType::DelMsgAnswer, 0),
    );
    let acked = ONE | u64::from(outcome.of_del() as u8) << 24;
    let body = select_unpredictable(is_add, request.deadline.0, acked);
    let mut bytes = [0; ADD_ANSWER];
    bytes[..CORRELATION_AT].copy_from_slice(&begins.to_be_bytes());
    bytes[CORRELATION_AT..HEAD_LENGTH].copy_from_slice(&correlation_id(request).to_be_bytes());
    bytes[HEAD_LENGTH..HEAD_LENGTH + 8].copy_from_slice(&body.to_be_bytes());
    // Behind the end of an answer to a DelMsg, so it is cut off there.
    bytes[HEAD_LENGTH + 8..HEAD_LENGTH + 16].copy_from_slice(&(ONE | u64::from(rearmed)).to_be_bytes());
    bytes[HEAD_LENGTH + 16] = rearmed;
    // Both copy as many bytes: to copy a constant number takes fewer instructions.
    let end = out.len() + select_unpredictable(is_add, ADD_ANSWER, DEL_ANSWER);
    out.extend_from_slice(&bytes);
    out.truncate(end);
}

/// The correlation id of a request, which is its id here.
#[expect(clippy::cast_possible_truncation, reason = "the id was made of a correlation id")]
pub const fn correlation_id(request: &Request) -> u32 {
    request.id as u32
}
