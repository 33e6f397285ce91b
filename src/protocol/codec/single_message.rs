//! Decodes requests with one message, which are the most frequent requests, and encodes their answers.
//!
//! The processor cannot predict whether the next request is an AddNewMsg or a DelMsg. So the code computes the values
//! for both and selects one without a branch.

use std::hint::select_unpredictable;

use bytes::BytesMut;

use super::super::frame::{FrameType, HEAD_LENGTH};
use super::{LENGTH_LENGTH, begin, correlation_id, flag};
use crate::core::{Message, Operation, Outcome, Request, RequestBatch};

/// The number of bytes before the message in a DelMsg: the head and the message count.
const DEL_FIXED: usize = HEAD_LENGTH + 4;
/// The number of bytes that an AddNewMsg has between its head and its message count: ack timeout, attempt number and a
/// reserved byte.
const MORE_OF_ADD: usize = 4;

/// The offset of the correlation id in a frame.
const CORRELATION_AT: usize = HEAD_LENGTH - 4;

/// The number of bytes of a message id or a client id.
const NUMBER: usize = 8;

/// The length of the longest request with one message. It is also the size of a [`Window`].
const LONGEST: usize = DEL_FIXED + MORE_OF_ADD + 2 * NUMBER;

/// The first eight bytes of each kind of request with one message. The first index is 1 if the message has a client id.
/// The second index is 1 if the request is an AddNewMsg.
const BEGINS: [[u64; 2]; 2] = [
    [begin(DEL_FIXED + NUMBER, FrameType::DelMsg, 0), begin(LONGEST - NUMBER, FrameType::AddNewMsg, 0)],
    [
        begin(DEL_FIXED + 2 * NUMBER, FrameType::DelMsg, flag::CLIENTS),
        begin(LONGEST, FrameType::AddNewMsg, flag::CLIENTS),
    ],
];

/// Decodes requests with one message at the front of the received bytes into a request batch. Stops when the batch has
/// `most` messages, or at a frame that is incomplete, faulty or of another kind. `revolution` is the ack timeout, in
/// ticks, for an AddNewMsg without one. Returns how many bytes the decoded requests have. The maximum frame length
/// needs no check, because it is always above the length of these requests.
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

/// Decodes the request in `rest`, which must be shorter than a window. Returns the bytes that are not decoded.
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

/// The next bytes to decode. They may hold a request with one message, and further bytes after this request.
type Window = [u8; LONGEST];

/// Returns whether the request is an AddNewMsg (otherwise a DelMsg), and whether its message has a client id. The
/// caller must check that the window holds a request.
#[inline]
const fn kind(window: &Window) -> (bool, bool) {
    let [_, _, _, _, frame_type, flags, ..] = *window;
    (frame_type == FrameType::AddNewMsg as u8, flags & flag::CLIENTS != 0)
}

/// Returns the number of bytes of the frame, if it is a valid request with one message.
#[inline]
fn length(window: &Window) -> Option<usize> {
    let (is_add, has_client) = kind(window);
    let begins = u64_at(window, 0) == BEGINS[usize::from(has_client)][usize::from(is_add)];
    let fields = u64_at(window, HEAD_LENGTH);
    // The message count, which must be 1. For an AddNewMsg, this includes the reserved byte before the count, which
    // must be 0.
    let count = select_unpredictable(is_add, fields & 0xff_ffff_ffff, fields >> 32);
    // All these requests are shorter than 256 bytes, so the last byte of the length field is enough. The processor can
    // read this byte before it knows the kind of the request.
    let length = LENGTH_LENGTH + usize::from(window[3]);
    (begins && count == 1).then_some(length)
}

/// Appends the request to a request batch.
#[expect(clippy::inline_always, reason = "left to the compiler it is a call, and a frame takes 6 % longer")]
#[inline(always)]
fn push(window: &Window, batch: &mut RequestBatch, revolution: u16) {
    let (is_add, has_client) = kind(window);
    let [high, low, attempt, _] = chunk(window, HEAD_LENGTH);
    let add = Operation::Add { ack_timeout_ticks: u16::from_be_bytes([high, low]), attempt };
    let add = add.with_default_timeout(revolution);
    let at = DEL_FIXED + MORE_OF_ADD * usize::from(is_add);
    // A logic node sends client ids always or never, so the processor predicts this branch.
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

/// The length of an AddNewMsgAnswer for one message: head, deadline, message count, number of re-armed messages, and
/// one byte. The lowest bit of this byte is set if the message was re-armed: it was in flight and got a new deadline.
const ADD_ANSWER: usize = HEAD_LENGTH + 17;
/// The length of a DelMsgAnswer for one message: head, message count and outcome.
const DEL_ANSWER: usize = HEAD_LENGTH + 5;

/// The message count 1 in the upper 32 bits of a `u64`.
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
    // A DelMsgAnswer is shorter: `truncate` cuts these bytes off its end.
    bytes[HEAD_LENGTH + 8..HEAD_LENGTH + 16].copy_from_slice(&(ONE | u64::from(rearmed)).to_be_bytes());
    bytes[HEAD_LENGTH + 16] = rearmed;
    // Copy `ADD_ANSWER` bytes for both kinds: to copy a constant number of bytes takes fewer instructions.
    let end = out.len() + select_unpredictable(is_add, ADD_ANSWER, DEL_ANSWER);
    out.extend_from_slice(&bytes);
    out.truncate(end);
}
