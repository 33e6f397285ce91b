//! Encodes frames, answers, timeout batches and refusals.

use bytes::{BufMut, BytesMut};

use super::super::frame::{
    AddNewMsgAnswer, Body, COUNTED_HEAD_LENGTH, Frame, FrameType, HEAD_LENGTH, Hello, MAGIC, MAX_BATCH_IDS,
    MAX_MESSAGES, MAX_PING_LENGTH, MAX_TOKEN_LENGTH, Secret, Subscribe, TIMED_OUT_LENGTH, TimeoutBatch, Welcome,
};
use super::{Codec, LENGTH_LENGTH, flag};
use crate::core::{
    AddOutcome, BatchId, Client, Delivery, MAX_BATCH_MESSAGES, Message, MessageState, Operation, Promise, Refusal,
    Tick, TickCounts, TimedOut,
};

/// The offset of the flags in a frame. The flags, and the length in bytes 0 to 3, are known only after the body is
/// written.
const FLAGS_AT: usize = 5;

/// The maximum number of bytes between the head and the message count of a request. An AddNewMsg has this many: its ack
/// timeout (2), attempt number (1) and a reserved byte.
const LONGEST_FIELDS: usize = 4;
/// The number of bytes of a message count.
const COUNT: usize = size_of::<u32>();
/// The number of bytes of a message id or a client id.
const ID: usize = size_of::<u64>();

impl Codec {
    /// Appends the bytes of a frame.
    ///
    /// The caller must keep counts and lengths within the limits that [`frame`](crate::protocol::frame) defines. The
    /// peer refuses a frame that exceeds them.
    ///
    /// # Panics
    ///
    /// Panics in debug builds if a count or a length exceeds its limits.
    pub fn encode_frame(&self, frame: &Frame, out: &mut BytesMut) {
        let Frame { correlation, body: frame } = frame;
        match frame {
            Body::AddNewMsg { messages, ack_timeout_ticks, attempt } => {
                let operation = Operation::Add { ack_timeout_ticks: *ack_timeout_ticks, attempt: *attempt };
                self.encode_request(*correlation, operation, messages, out);
            }
            Body::DelMsg { messages, withdraw } => {
                self.encode_request(*correlation, Operation::Del { withdraw: *withdraw }, messages, out);
            }
            Body::GetMsg(messages) => request(FrameType::GetMsg, 0, *correlation, [], messages, out),
            frame => {
                let status = if let Body::Error(error) = frame { error.code } else { 0 };
                framed(frame.frame_type(), status, *correlation, out, |out| body(frame, out));
            }
        }
    }

    /// Appends the bytes of an AddNewMsg or a DelMsg.
    pub fn encode_request(
        &self,
        correlation: u32,
        operation: Operation,
        messages: &[Message],
        out: &mut BytesMut,
    ) {
        match operation {
            Operation::Add { ack_timeout_ticks, attempt } => {
                let [high, low] = ack_timeout_ticks.to_be_bytes();
                request(FrameType::AddNewMsg, 0, correlation, [high, low, attempt, 0], messages, out);
            }
            Operation::Del { withdraw } => {
                request(FrameType::DelMsg, bit(withdraw, flag::WITHDRAW), correlation, [], messages, out);
            }
        }
    }

    /// Appends the bytes of a TimeoutBatch, under the correlation id of its Subscribe.
    pub fn encode_delivery(&self, correlation: u32, delivery: &Delivery, out: &mut BytesMut) {
        let batch = &*delivery.batch;
        let header = TimeoutBatch {
            id: batch.id,
            delivery_count: delivery.delivery_count,
            age_ms: u64::try_from(delivery.age.as_millis()).unwrap_or(u64::MAX),
            counts: batch.counts,
            last: batch.last,
            messages: Vec::new(),
        };
        framed(FrameType::TimeoutBatch, 0, correlation, out, |out| timeout_batch(&header, &batch.messages, out));
    }

    /// Appends the bytes of an Error with the reason of a refusal.
    pub fn encode_refusal(&self, correlation: u32, refusal: &Refusal, out: &mut BytesMut) {
        let Refusal { reason, text } = refusal;
        framed(FrameType::Error, reason.code(), correlation, out, |out| {
            error(text, reason.promise(), reason.retryable(), out)
        });
    }
}

/// Appends a request. `fields` are the bytes between the head and the message count. One append writes all bytes up to
/// and including the first message id, because an append costs as much as preparing all these bytes. Most requests have
/// one message without a client id, so they need no other append.
fn request<const FIELDS: usize>(
    frame_type: FrameType,
    flags: u8,
    correlation: u32,
    fields: [u8; FIELDS],
    messages: &[Message],
    out: &mut BytesMut,
) {
    debug_assert!((1..=MAX_MESSAGES).contains(&messages.len()), "checked where the request is built");
    let with_clients = messages.iter().any(|message| message.client != Client(0));
    let counted = COUNTED_HEAD_LENGTH + FIELDS + COUNT + messages.len() * if with_clients { 2 * ID } else { ID };
    let mut bytes = [0; HEAD_LENGTH + LONGEST_FIELDS + COUNT + ID];
    bytes[..LENGTH_LENGTH].copy_from_slice(&u32_of(counted).to_be_bytes());
    bytes[LENGTH_LENGTH] = frame_type as u8;
    bytes[FLAGS_AT] = flags | bit(with_clients, flag::CLIENTS);
    bytes[HEAD_LENGTH - size_of::<u32>()..HEAD_LENGTH].copy_from_slice(&correlation.to_be_bytes());
    bytes[HEAD_LENGTH..HEAD_LENGTH + FIELDS].copy_from_slice(&fields);
    let (count_at, ids_at) = (HEAD_LENGTH + FIELDS, HEAD_LENGTH + FIELDS + COUNT);
    bytes[count_at..ids_at].copy_from_slice(&u32_of(messages.len()).to_be_bytes());
    let [first, others @ ..] = messages else { return out.extend_from_slice(&bytes[..ids_at]) };
    bytes[ids_at..ids_at + ID].copy_from_slice(&first.msg_id.0.to_be_bytes());
    out.extend_from_slice(&bytes[..ids_at + ID]);
    if !others.is_empty() {
        put_u64s(others.iter().map(|message| message.msg_id.0), out);
    }
    if with_clients {
        put_u64s(messages.iter().map(|message| message.client.0), out);
    }
}

/// Appends the head of a frame and the body that `body` writes. `body` returns the flags for the head.
pub(super) fn framed(
    frame_type: FrameType,
    status: u16,
    correlation: u32,
    out: &mut BytesMut,
    body: impl FnOnce(&mut BytesMut) -> u8,
) {
    let start = out.len();
    out.put_u32(0);
    out.put_u8(frame_type as u8);
    out.put_u8(0);
    out.put_u16(status);
    out.put_u32(correlation);
    out[start + FLAGS_AT] = body(out);
    let length = u32_of(out.len() - start - LENGTH_LENGTH);
    out[start..start + LENGTH_LENGTH].copy_from_slice(&length.to_be_bytes());
}

/// Appends the body of a frame and returns the frame's flags.
fn body(body: &Body, out: &mut BytesMut) -> u8 {
    match body {
        Body::Hello(body) => hello(body, out),
        Body::Welcome(body) => welcome(body, out),
        Body::Ping(payload) | Body::Pong(payload) => {
            debug_assert!(payload.len() <= MAX_PING_LENGTH, "checked where the Ping is built");
            out.put_slice(payload);
            0
        }
        Body::GoAway { reason, grace_ms } => {
            out.put_u16(*reason as u16);
            out.put_u16(0);
            out.put_u32(*grace_ms);
            0
        }
        Body::AddNewMsg { .. } | Body::DelMsg { .. } | Body::GetMsg(_) => {
            unreachable!("`encode_frame` encodes them as requests")
        }
        Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline, outcomes }) => {
            add_new_msg_answer(*deadline, outcomes, |outcome| *outcome == AddOutcome::Rearmed, out)
        }
        Body::DelMsgAnswer(outcomes) => del_msg_answer(outcomes, |outcome| *outcome as u8, out),
        Body::GetMsgAnswer(states) => get_msg_answer(states, out),
        Body::Subscribe(Subscribe { group, credit, ephemeral, from_end }) => {
            out.put_u32(*credit);
            put_short_text(group, out);
            bit(*ephemeral, flag::EPHEMERAL) | bit(*from_end, flag::FROM_END)
        }
        Body::Subscribed { group, created } => {
            put_short_text(group, out);
            bit(*created, flag::CREATED)
        }
        Body::TimeoutBatch(batch) => timeout_batch(batch, &batch.messages, out),
        Body::BatchAck(batches) => {
            debug_assert!((1..=MAX_BATCH_IDS).contains(&batches.len()), "checked where the BatchAck is built");
            out.put_u32(u32_of(batches.len()));
            for batch in batches {
                put_batch_id(*batch, out);
            }
            0
        }
        Body::BatchAckAnswer { settled } => {
            out.put_u32(*settled);
            0
        }
        Body::BatchNack { batch, delay_ms } => {
            put_batch_id(*batch, out);
            out.put_u32(*delay_ms);
            0
        }
        Body::BatchNackAnswer { held } => bit(*held, flag::HELD),
        Body::GroupDelete(group) => {
            put_short_text(group, out);
            0
        }
        Body::GroupDeleteAnswer => 0,
        Body::Error(body) => {
            debug_assert!(body.code != 0, "0 is the status of all other frames");
            error(&body.text, body.promise, body.retryable, out)
        }
    }
}

fn hello(hello: &Hello, out: &mut BytesMut) -> u8 {
    let Secret(token) = &hello.token;
    debug_assert!(token.len() <= MAX_TOKEN_LENGTH, "checked where the token is read");
    let token = &token[..token.len().min(usize::from(u16::MAX))];
    out.put_slice(&MAGIC);
    out.put_u8(hello.lowest_version);
    out.put_u8(hello.highest_version);
    out.put_u16(u16::try_from(token.len()).expect("it is cut to fit"));
    out.put_slice(token);
    put_short_text(&hello.client_name, out);
    0
}

fn welcome(welcome: &Welcome, out: &mut BytesMut) -> u8 {
    out.put_u8(welcome.version);
    out.put_u8(0);
    out.put_u16(welcome.slots);
    out.put_u32(welcome.tick_ms);
    out.put_u32(welcome.max_frame_length);
    out.put_u32(welcome.max_messages);
    out.put_u32(welcome.max_credit);
    out.put_u32(welcome.ping_interval_ms);
    put_short_text(&welcome.store, out);
    put_short_text(&welcome.server_name, out);
    0
}

/// Appends the body of an AddNewMsgAnswer, and returns its flags.
pub(super) fn add_new_msg_answer<T>(
    deadline: Tick,
    outcomes: &[T],
    is_rearmed: impl Fn(&T) -> bool,
    out: &mut BytesMut,
) -> u8 {
    debug_assert!((1..=MAX_MESSAGES).contains(&outcomes.len()), "one per message of the request");
    out.put_u64(deadline.0);
    out.put_u32(u32_of(outcomes.len()));
    out.put_u32(u32_of(outcomes.iter().filter(|outcome| is_rearmed(outcome)).count()));
    let bits = |eight: &[T]| eight.iter().rev().fold(0, |byte, outcome| byte << 1 | u8::from(is_rearmed(outcome)));
    let bytes = extended(out, outcomes.len().div_ceil(8));
    bytes.iter_mut().zip(outcomes.chunks(8)).for_each(|(byte, eight)| *byte = bits(eight));
    0
}

/// Appends the body of a DelMsgAnswer, and returns its flags.
pub(super) fn del_msg_answer<T>(outcomes: &[T], number: impl Fn(&T) -> u8, out: &mut BytesMut) -> u8 {
    debug_assert!((1..=MAX_MESSAGES).contains(&outcomes.len()), "one per message of the request");
    out.put_u32(u32_of(outcomes.len()));
    let bytes = extended(out, outcomes.len());
    bytes.iter_mut().zip(outcomes).for_each(|(byte, outcome)| *byte = number(outcome));
    0
}

/// Appends `count` zero bytes and returns them, so that the caller overwrites them. The capacity of the buffer is then
/// checked only once for all bytes.
fn extended(out: &mut BytesMut, count: usize) -> &mut [u8] {
    let before = out.len();
    out.resize(before + count, 0);
    &mut out[before..]
}

fn get_msg_answer(states: &[MessageState], out: &mut BytesMut) -> u8 {
    debug_assert!((1..=MAX_MESSAGES).contains(&states.len()), "as many as in the request");
    out.put_u32(u32_of(states.len()));
    for state in states {
        let (number, deadline, remaining_ms, attempt) = match *state {
            MessageState::Unknown => (0, Tick(0), 0, 0),
            MessageState::InFlight { deadline, remaining_ms, attempt } => (1, deadline, remaining_ms, attempt),
            MessageState::Late => (2, Tick(0), 0, 0),
        };
        out.put_u8(number);
        out.put_u64(deadline.0);
        out.put_u32(remaining_ms);
        out.put_u8(attempt);
    }
    0
}

/// Appends the body of a TimeoutBatch and returns its flags. Writes `messages` and ignores the messages in `header`.
fn timeout_batch(header: &TimeoutBatch, messages: &[TimedOut], out: &mut BytesMut) -> u8 {
    let TickCounts { added, acked, storm, drained } = header.counts;
    debug_assert!((1..=MAX_BATCH_MESSAGES).contains(&messages.len()), "large ticks are split");
    debug_assert!(added >= acked, "acknowledged messages were added");
    put_batch_id(header.id, out);
    out.put_u32(header.delivery_count);
    out.put_u64(header.age_ms);
    out.put_u64(added);
    out.put_u64(acked);
    out.put_u32(u32_of(messages.len()));
    out.reserve(messages.len() * TIMED_OUT_LENGTH);
    put_u64s(messages.iter().map(|timed_out| timed_out.message.msg_id.0), out);
    put_u64s(messages.iter().map(|timed_out| timed_out.message.client.0), out);
    let attempts = extended(out, messages.len());
    attempts.iter_mut().zip(messages).for_each(|(byte, timed_out)| *byte = timed_out.attempt);
    bit(header.last, flag::LAST) | bit(storm, flag::STORM) | bit(drained, flag::DRAINED)
}

fn error(text: &str, promise: Promise, retryable: bool, out: &mut BytesMut) -> u8 {
    out.put_slice(text.as_bytes());
    bit(promise == Promise::OutcomeUnknown, flag::OUTCOME_UNKNOWN) | bit(retryable, flag::RETRYABLE)
}

fn put_batch_id(id: BatchId, out: &mut BytesMut) {
    out.put_u16(id.ring);
    out.put_u16(0);
    out.put_u32(id.seq);
    out.put_u64(id.epoch);
    out.put_u64(id.tick.0);
}

/// Appends numbers. One resize for all numbers takes a tenth of the time of one resize per number.
fn put_u64s(column: impl ExactSizeIterator<Item = u64>, out: &mut BytesMut) {
    let (places, _) = extended(out, column.len() * size_of::<u64>()).as_chunks_mut();
    for (place, number) in places.iter_mut().zip(column) {
        *place = number.to_be_bytes();
    }
}

/// Appends the length of a text as one byte, then the text. A text of more than 255 bytes is cut. A group name that was
/// cut is still longer than any valid name, so the server refuses it.
fn put_short_text(text: &str, out: &mut BytesMut) {
    debug_assert!(u8::try_from(text.len()).is_ok(), "checked where the text comes from: {text:?}");
    let mut end = text.len().min(usize::from(u8::MAX));
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.put_u8(u8::try_from(end).expect("it is cut to fit"));
    out.put_slice(&text.as_bytes()[..end]);
}

/// Returns `flag` if `is_set`, otherwise 0.
fn bit(is_set: bool, flag: u8) -> u8 {
    if is_set { flag } else { 0 }
}

fn u32_of(number: usize) -> u32 {
    u32::try_from(number).expect("callers keep every count within limits far below 4 billion")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::core::Tick;

    #[test]
    fn a_delivery_has_the_bytes_of_the_frame_that_says_the_same() {
        let timed_out = |id| TimedOut { message: Message::new(id, !id), attempt: 3 };
        let messages: Vec<TimedOut> = (1..=300).map(timed_out).collect();
        let id = BatchId { tick: Tick(17), epoch: 1 << 40, ring: 5, seq: 2 };
        let counts = TickCounts { added: 900, acked: 600, storm: true, drained: false };
        for last in [false, true] {
            let batch = crate::core::TimeoutBatch { id, counts, last, messages: messages.clone() };
            let sent = Delivery { batch: Arc::new(batch), delivery_count: 4, age: Duration::from_micros(7_900) };
            let body = TimeoutBatch { id, delivery_count: 4, age_ms: 7, counts, last, messages: messages.clone() };
            let (mut found, mut expected) = (BytesMut::new(), BytesMut::new());
            Codec::default().encode_delivery(9, &sent, &mut found);
            Codec::default().encode_frame(&Frame::new(9, Body::TimeoutBatch(body)), &mut expected);
            assert_eq!(found, expected);
        }
    }
}
