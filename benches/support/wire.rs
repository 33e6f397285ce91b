//! Requests of clients as bytes, and completed request batches to encode.

use ackwheel::core::{Message, Operation, Outcome, RequestBatch};
use ackwheel::protocol::{Body, Codec, Frame};
use bytes::BytesMut;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::messages::random_messages;

/// Number of frames whose kind is random: more than a branch predictor remembers.
pub const MIXED: usize = 4_096;

fn random_bools() -> impl FnMut() -> bool {
    let mut random = SmallRng::seed_from_u64(7);
    move || random.next_u64() >> 63 == 1
}

/// The bytes of AddNewMsg frames with `per_frame` messages each.
pub fn add_frames(messages: &[Message], per_frame: usize) -> BytesMut {
    let body = |messages| Body::AddNewMsg { messages, ack_timeout_ticks: 0, attempt: 1 };
    frames(messages, per_frame, body)
}

/// The bytes of DelMsg frames with `per_frame` messages each.
pub fn del_frames(messages: &[Message], per_frame: usize) -> BytesMut {
    frames(messages, per_frame, |messages| Body::DelMsg { messages, withdraw: false })
}

fn frames(messages: &[Message], per_frame: usize, body: impl Fn(Vec<Message>) -> Body) -> BytesMut {
    let mut bytes = BytesMut::new();
    for (correlation, messages) in (1..).zip(messages.chunks(per_frame)) {
        Codec::default().encode_frame(&Frame::new(correlation, body(messages.to_vec())), &mut bytes);
    }
    bytes
}

/// The bytes of frames with one message each, at random AddNewMsg or DelMsg, so that no branch predictor guesses them.
pub fn mixed_frames(messages: &[Message]) -> BytesMut {
    let mut random_bool = random_bools();
    let mut bytes = BytesMut::new();
    for message in messages.chunks(1) {
        bytes.unsplit(if random_bool() { add_frames(message, 1) } else { del_frames(message, 1) });
    }
    bytes
}

/// A completed batch of requests with `per_request` messages each, at random AddNewMsg or DelMsg.
pub fn answered(requests: usize, per_request: usize) -> RequestBatch {
    let mut random_bool = random_bools();
    let mut batch = RequestBatch::default();
    for (correlation, messages) in (1..).zip(random_messages(requests * per_request, 1).chunks(per_request)) {
        let operation = if random_bool() {
            Operation::Add { ack_timeout_ticks: 15, attempt: 1 }
        } else {
            Operation::Del { withdraw: false }
        };
        batch.push(correlation, operation, messages.iter().copied());
    }
    batch.open();
    for request in batch.requests.clone() {
        let outcome = if request.adds() { Outcome::Added } else { Outcome::Acked };
        request.range().for_each(|message| batch.set(message, outcome));
    }
    batch
}

/// Appends the answers to all requests of a batch.
pub fn encode_answers(batch: &RequestBatch, out: &mut BytesMut) {
    let codec = Codec::default();
    for request in &batch.requests {
        codec.encode_answer(request, &batch.outcomes()[request.range()], out);
    }
}
