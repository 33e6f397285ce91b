//! Decodes single frames. A count or a length in a frame is compared with the received bytes before it is used.

use super::super::frame::{
    AddNewMsgAnswer, Body, Error, Frame, FrameType, GoAwayReason, Hello, MAGIC, MAX_BATCH_IDS, MAX_MESSAGES,
    MAX_PING_LENGTH, MAX_TOKEN_LENGTH, STATE_LENGTH, Secret, Subscribe, TIMED_OUT_LENGTH, TimeoutBatch, Welcome,
};
use super::fields::{BATCH_ID_LENGTH, Fields, Messages, pair};
use super::{Decoded, RawFrame, flag};
use crate::core::{
    AddOutcome, DelOutcome, MAX_BATCH_MESSAGES, MessageState, Operation, Promise, Refusal, Tick, TickCounts,
    TimedOut,
};

/// Decodes a complete frame.
pub(super) fn frame(frame: &RawFrame<'_>) -> Decoded {
    match body(frame) {
        Ok(body) => Decoded::Frame(Frame::new(frame.correlation, body)),
        Err(refusal) => Decoded::Refused { correlation: frame.correlation, refusal },
    }
}

fn body(frame: &RawFrame<'_>) -> Result<Body, Refusal> {
    let mut fields = Fields::of(frame)?;
    let body = match fields.frame_type {
        FrameType::Hello => Body::Hello(hello(&mut fields)?),
        FrameType::Welcome => Body::Welcome(welcome(&mut fields)?),
        FrameType::Ping => Body::Ping(echo(&mut fields)?),
        FrameType::Pong => Body::Pong(echo(&mut fields)?),
        FrameType::GoAway => {
            // A later version may send other reasons. Treat them like `Draining`: the connection will end in any case.
            let is_done = fields.u16("reason")? == GoAwayReason::Done as u16;
            let reason = if is_done { GoAwayReason::Done } else { GoAwayReason::Draining };
            fields.reserved::<2>()?;
            Body::GoAway { reason, grace_ms: fields.u32("grace_ms")? }
        }
        FrameType::AddNewMsg | FrameType::DelMsg => match operation(&mut fields)? {
            Operation::Add { ack_timeout_ticks, attempt } => {
                Body::AddNewMsg { messages: fields.messages()?.to_vec(), ack_timeout_ticks, attempt }
            }
            Operation::Del { withdraw } => Body::DelMsg { messages: fields.messages()?.to_vec(), withdraw },
        },
        FrameType::AddNewMsgAnswer => Body::AddNewMsgAnswer(add_new_msg_answer(&mut fields)?),
        FrameType::DelMsgAnswer => Body::DelMsgAnswer(del_msg_answer(&mut fields)?),
        FrameType::GetMsg => Body::GetMsg(fields.messages()?.to_vec()),
        FrameType::GetMsgAnswer => Body::GetMsgAnswer(get_msg_answer(&mut fields)?),
        FrameType::Subscribe => Body::Subscribe(Subscribe {
            credit: fields.u32("credit")?,
            group: fields.short_text("group")?,
            ephemeral: fields.has(flag::EPHEMERAL),
            from_end: fields.has(flag::FROM_END),
        }),
        FrameType::Subscribed => {
            Body::Subscribed { group: fields.short_text("group")?, created: fields.has(flag::CREATED) }
        }
        FrameType::TimeoutBatch => Body::TimeoutBatch(timeout_batch(&mut fields)?),
        FrameType::BatchAck => {
            let count = fields.count_of_list(MAX_BATCH_IDS, BATCH_ID_LENGTH)?;
            Body::BatchAck((0..count).map(|_| fields.batch_id()).collect::<Result<_, _>>()?)
        }
        FrameType::BatchAckAnswer => Body::BatchAckAnswer { settled: fields.u32("settled")? },
        FrameType::BatchNack => Body::BatchNack { batch: fields.batch_id()?, delay_ms: fields.u32("delay_ms")? },
        FrameType::BatchNackAnswer => Body::BatchNackAnswer { held: fields.has(flag::HELD) },
        FrameType::GroupDelete => Body::GroupDelete(fields.short_text("group")?),
        FrameType::GroupDeleteAnswer => Body::GroupDeleteAnswer,
        FrameType::Error => {
            let text = fields.all();
            let unknown = fields.has(flag::OUTCOME_UNKNOWN);
            Body::Error(Error {
                code: frame.status,
                promise: if unknown { Promise::OutcomeUnknown } else { Promise::NotApplied },
                retryable: fields.has(flag::RETRYABLE),
                text: fields.text(text, "text")?,
            })
        }
    };
    fields.end()?;
    Ok(body)
}

fn hello(fields: &mut Fields<'_>) -> Result<Hello, Refusal> {
    let magic = fields.take::<4>("magic")?;
    if magic != MAGIC {
        return Err(fields.wrong(format_args!("begins with {magic:02x?}, but must begin with ACKW: {MAGIC:02x?}")));
    }
    let [lowest_version, highest_version] = fields.take("versions")?;
    if lowest_version > highest_version {
        let text = format_args!(
            "names {lowest_version} as its lowest version and {highest_version} as its highest: send the lower first"
        );
        return Err(fields.wrong(text));
    }
    let token_length = usize::from(fields.u16("token length")?);
    if token_length > MAX_TOKEN_LENGTH {
        let text = format_args!("has a token of {token_length} bytes, but the longest is {MAX_TOKEN_LENGTH}");
        return Err(fields.wrong(text));
    }
    let token = Secret(fields.bytes(token_length, "token")?.to_vec());
    let client_name = fields.short_text("client name")?;
    // A later version may append fields to Hello. Ignore these fields, so that the server can answer that it does not
    // speak the version.
    fields.rest = &[];
    Ok(Hello { lowest_version, highest_version, token, client_name })
}

fn welcome(fields: &mut Fields<'_>) -> Result<Welcome, Refusal> {
    let version = fields.u8("version")?;
    fields.reserved::<1>()?;
    Ok(Welcome {
        version,
        slots: fields.u16("slots")?,
        tick_ms: fields.u32("tick_ms")?,
        max_frame_length: fields.u32("max_frame_length")?,
        max_messages: fields.u32("max_messages")?,
        max_credit: fields.u32("max_credit")?,
        ping_interval_ms: fields.u32("ping_interval_ms")?,
        store: fields.short_text("store")?,
        server_name: fields.short_text("server name")?,
    })
}

fn echo(fields: &mut Fields<'_>) -> Result<Vec<u8>, Refusal> {
    let payload = fields.all();
    if payload.len() > MAX_PING_LENGTH {
        let text = format_args!("carries {} bytes, but at most {MAX_PING_LENGTH} are allowed", payload.len());
        return Err(fields.wrong(text));
    }
    Ok(payload.to_vec())
}

/// Reads an AddNewMsg or a DelMsg. Returns `None` if the frame is faulty or of another type.
pub(super) fn request<'a>(frame: &RawFrame<'a>) -> Option<(Operation, Messages<'a>)> {
    if frame.number != FrameType::AddNewMsg as u8 && frame.number != FrameType::DelMsg as u8 {
        return None;
    }
    let mut fields = Fields::of(frame).ok()?;
    Some((operation(&mut fields).ok()?, fields.messages().ok()?))
}

/// Reads the fields before the messages of an AddNewMsg or a DelMsg.
fn operation(fields: &mut Fields<'_>) -> Result<Operation, Refusal> {
    if fields.frame_type == FrameType::DelMsg {
        return Ok(Operation::Del { withdraw: fields.has(flag::WITHDRAW) });
    }
    let ack_timeout_ticks = fields.u16("ack_timeout_ticks")?;
    let attempt = fields.u8("attempt")?;
    fields.reserved::<1>()?;
    Ok(Operation::Add { ack_timeout_ticks, attempt })
}

fn add_new_msg_answer(fields: &mut Fields<'_>) -> Result<AddNewMsgAnswer, Refusal> {
    let deadline = Tick(fields.u64("deadline")?);
    let count = fields.count(MAX_MESSAGES)?;
    let rearmed = fields.u32("rearmed")?;
    fields.must_remain(count.div_ceil(8), count)?;
    let bits = fields.all();
    let found: u32 = bits.iter().map(|byte| byte.count_ones()).sum();
    let unused_are_zero = count.is_multiple_of(8) || bits.last().is_some_and(|last| last >> (count % 8) == 0);
    if found != rearmed || !unused_are_zero {
        let text = format_args!(
            "says that {rearmed} of {count} messages were re-armed, but its bits say {found}: set one bit for \
             each re-armed message and leave the unused bits 0"
        );
        return Err(fields.wrong(text));
    }
    let is_set = |i: usize| bits[i / 8] >> (i % 8) & 1 == 1;
    let outcome = |i| if is_set(i) { AddOutcome::Rearmed } else { AddOutcome::Added };
    Ok(AddNewMsgAnswer { deadline, outcomes: (0..count).map(outcome).collect() })
}

fn del_msg_answer(fields: &mut Fields<'_>) -> Result<Vec<DelOutcome>, Refusal> {
    fields.count_of_list(MAX_MESSAGES, 1)?;
    let numbers = fields.all();
    let outcome = |number: &u8| {
        let wrong = || fields.wrong(format_args!("has an outcome of {number}, but only 0 to 3 are defined"));
        DelOutcome::ALL.get(usize::from(*number)).copied().ok_or_else(wrong)
    };
    numbers.iter().map(outcome).collect()
}

fn get_msg_answer(fields: &mut Fields<'_>) -> Result<Vec<MessageState>, Refusal> {
    let count = fields.count_of_list(MAX_MESSAGES, STATE_LENGTH)?;
    let state = |_| {
        let (state, deadline) = (fields.u8("state")?, Tick(fields.u64("deadline")?));
        let (remaining_ms, attempt) = (fields.u32("remaining_ms")?, fields.u8("attempt")?);
        match state {
            0 if (deadline, remaining_ms, attempt) == (Tick(0), 0, 0) => Ok(MessageState::Unknown),
            1 => Ok(MessageState::InFlight { deadline, remaining_ms, attempt }),
            2 if (deadline, remaining_ms, attempt) == (Tick(0), 0, 0) => Ok(MessageState::Late),
            0 | 2 => Err(fields.wrong(format_args!("has fields other than 0 behind a state of {state}"))),
            _ => Err(fields.wrong(format_args!("has a state of {state}, but only 0 to 2 are defined"))),
        }
    };
    (0..count).map(state).collect()
}

fn timeout_batch(fields: &mut Fields<'_>) -> Result<TimeoutBatch, Refusal> {
    let id = fields.batch_id()?;
    let delivery_count = fields.u32("delivery_count")?;
    let age_ms = fields.u64("age_ms")?;
    let (added, acked) = (fields.u64("added")?, fields.u64("acked")?);
    if added < acked {
        let text =
            format_args!("says that {added} were added and {acked} acknowledged: acked must not exceed added");
        return Err(fields.wrong(text));
    }
    let count = fields.count_of_list(MAX_BATCH_MESSAGES, TIMED_OUT_LENGTH)?;
    let (ids, rest) = fields.all().split_at(count * 8);
    let (clients, attempts) = rest.split_at(count * 8);
    let messages = pair(ids, clients).zip(attempts);
    let (storm, drained) = (fields.has(flag::STORM), fields.has(flag::DRAINED));
    Ok(TimeoutBatch {
        id,
        delivery_count,
        age_ms,
        counts: TickCounts { added, acked, storm, drained },
        last: fields.has(flag::LAST),
        messages: messages.map(|(message, attempt)| TimedOut { message, attempt: *attempt }).collect(),
    })
}
