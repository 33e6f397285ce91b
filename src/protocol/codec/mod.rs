//! The bytes of the protocol: values to bytes and back, as docs/PROTOCOL.md lays them out.
//!
//! ```text
//!   0        4      5       6        8                12
//!   | length | type | flags | status | correlation id | body ...
//!            |<-------------- length bytes ----------------->|
//! ```
//!
//! # Invariants
//!
//! 1. No input makes the decoder panic.
//! 2. The length is judged before a byte is waited for, and a count is judged against the bytes that are
//!    there before room is made for it: memory is proportional to what was received, never to what was
//!    announced.
//! 3. A frame whose length is right never breaks the connection: whatever is wrong within it, the decoder
//!    goes on with the next.

mod decode;
mod encode;
mod fields;
mod requests;
mod single_message;
#[cfg(test)]
mod tests;

use std::io;

use bytes::{Buf, BytesMut};
pub use requests::Echoed;
use tokio_util::codec::{Decoder, Encoder};

use super::frame::{COUNTED_HEAD_LENGTH, DEFAULT_MAX_FRAME_LENGTH, Frame, FrameType, HEAD_LENGTH};
use crate::core::batch::Delivery;
use crate::core::message::Message;
use crate::core::refusal::{Reason, Refusal};
use crate::core::request_batch::Operation;

/// Bytes of the length itself, which it does not count.
const LENGTH_LENGTH: usize = HEAD_LENGTH - COUNTED_HEAD_LENGTH;

/// The flags of each type; a bit that its type does not define is 0.
mod flag {
    use super::FrameType;

    /// Clients stand behind the message ids; without it they are all 0.
    pub(super) const CLIENTS: u8 = 0x01;
    /// The push failed at once.
    pub(super) const WITHDRAW: u8 = 0x02;
    /// The group goes with its last member.
    pub(super) const EPHEMERAL: u8 = 0x01;
    /// The group, if it is new, begins with the next batch.
    pub(super) const FROM_END: u8 = 0x02;
    /// The group is new.
    pub(super) const CREATED: u8 = 0x01;
    /// The batch is the last of its tick.
    pub(super) const LAST: u8 = 0x01;
    /// The tick is a storm.
    pub(super) const STORM: u8 = 0x02;
    /// The batch is handed out before its time.
    pub(super) const DRAINED: u8 = 0x04;
    /// The connection held the batch that it gave back.
    pub(super) const HELD: u8 = 0x01;
    /// Any part of the request may have been applied.
    pub(super) const OUTCOME_UNKNOWN: u8 = 0x01;
    /// The same request can succeed later or elsewhere.
    pub(super) const RETRYABLE: u8 = 0x02;

    /// The bits that may be set in frames of this type.
    pub(super) const fn defined(frame_type: FrameType) -> u8 {
        match frame_type {
            FrameType::AddNewMsg => CLIENTS,
            FrameType::DelMsg => CLIENTS | WITHDRAW,
            FrameType::Subscribe => EPHEMERAL | FROM_END,
            FrameType::Subscribed => CREATED,
            FrameType::TimeoutBatch => LAST | STORM | DRAINED,
            FrameType::BatchNackAnswer => HELD,
            FrameType::Error => OUTCOME_UNKNOWN | RETRYABLE,
            _ => 0,
        }
    }
}

/// Turns frames into bytes and back.
#[derive(Clone, Debug)]
pub struct Codec {
    max_frame_length: u32,
}

/// The result of decoding a whole frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// A frame.
    Frame(Frame),
    /// A malformed request in a well-formed frame: answer it with an Error, the connection goes on (after
    /// a Hello, it does not: [`Reason::closes`]).
    Refused {
        /// The correlation id of the request.
        correlation: u32,
        /// Which field of which frame was wrong, and what it must be.
        refusal: Refusal,
    },
}

/// Why no more frames can be read.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A broken frame: answer with an Error and close.
    #[error("{refusal}")]
    Broken {
        /// The correlation id of the frame; 0 if that was not received yet, or there is none.
        correlation: u32,
        /// The fault.
        refusal: Refusal,
    },
}

impl Codec {
    /// A codec that accepts frames whose length says at most `max_frame_length`.
    #[must_use]
    pub const fn new(max_frame_length: u32) -> Codec {
        Codec { max_frame_length }
    }

    /// Appends the bytes of a frame.
    ///
    /// The builder of the frame keeps its counts and lengths within the limits that [`super::frame`] names. A
    /// frame beyond them is refused by the peer that reads it.
    ///
    /// # Panics
    ///
    /// In debug builds, when a count or a length is outside its limits.
    pub fn encode_frame(&self, frame: &Frame, out: &mut BytesMut) {
        encode::frame(frame, out);
    }

    /// Appends the bytes of an AddNewMsg or a DelMsg. The counts are those of [`Codec::encode_frame`].
    pub fn encode_request(
        &self,
        correlation: u32,
        operation: Operation,
        messages: &[Message],
        out: &mut BytesMut,
    ) {
        encode::request(correlation, operation, messages, out);
    }

    /// Appends the bytes of a TimeoutBatch, under the correlation id of its Subscribe.
    pub fn encode_delivery(&self, correlation: u32, delivery: &Delivery, out: &mut BytesMut) {
        encode::delivery(correlation, delivery, out);
    }

    /// Appends the bytes of an Error that says why a request was refused.
    pub fn encode_refusal(&self, correlation: u32, refusal: &Refusal, out: &mut BytesMut) {
        encode::refusal(correlation, refusal, out);
    }

    /// The length that the next frame announces, once it is there; an error if no frame can have it.
    fn announced_length(&self, received: &[u8]) -> Result<Option<usize>, DecodeError> {
        let Some(first_four) = received.first_chunk::<LENGTH_LENGTH>() else { return Ok(None) };
        let length = u32::from_be_bytes(*first_four);
        if length > self.max_frame_length {
            return Err(self.too_large(*first_four, received));
        }
        let length = length as usize;
        if length < COUNTED_HEAD_LENGTH {
            let text = format!(
                "a frame's length is {length}, but it counts the rest of the head and the body, which is at \
                 least {COUNTED_HEAD_LENGTH}: send the number of bytes that follow the length"
            );
            let refusal = Refusal::new(Reason::MalformedFrame, text);
            return Err(DecodeError::Broken { correlation: 0, refusal });
        }
        Ok(Some(length))
    }

    #[cold]
    fn too_large(&self, first_four: [u8; LENGTH_LENGTH], received: &[u8]) -> DecodeError {
        if let Some(text) = foreign_protocol(first_four) {
            return DecodeError::Broken { correlation: 0, refusal: Refusal::new(Reason::FrameTooLarge, text) };
        }
        let correlation = received
            .get(HEAD_LENGTH - size_of::<u32>()..)
            .and_then(<[u8]>::first_chunk)
            .map_or(0, |bytes| u32::from_be_bytes(*bytes));
        let text = format!(
            "a frame's length is {}, but the limit is {}: split the request into several frames",
            u32::from_be_bytes(first_four),
            self.max_frame_length
        );
        DecodeError::Broken { correlation, refusal: Refusal::new(Reason::FrameTooLarge, text) }
    }
}

/// The error text for a peer whose first bytes are those of another protocol. Read as a length they are far
/// above any sensible limit, so that a sentence about the length would only puzzle.
fn foreign_protocol(first_four: [u8; LENGTH_LENGTH]) -> Option<&'static str> {
    match &first_four {
        b"GET " | b"HEAD" | b"POST" | b"PUT " | b"PATC" | b"DELE" | b"OPTI" | b"CONN" | b"TRAC" | b"PRI " => Some(
            "this is an HTTP request, but this port speaks the ackwheel protocol: metrics, health and status \
             are served over HTTP on the admin port (127.0.0.1:7416 by default)",
        ),
        b"HTTP" => Some(
            "the other side answers in HTTP: that may be the admin port, and messages go to another one \
             (127.0.0.1:7415 by default)",
        ),
        [0x16, 0x03, ..] => Some(
            "this is a TLS handshake, but this port speaks no TLS: connect without it, or give the server a \
             certificate (--tls-cert, --tls-key)",
        ),
        [0x15, 0x03, ..] => Some(
            "the other side answers in TLS: connect with TLS and trust its certificate (--tls-ca, or \
             ClientOptions::tls)",
        ),
        _ => None,
    }
}

/// Accepts frames up to [`DEFAULT_MAX_FRAME_LENGTH`].
impl Default for Codec {
    fn default() -> Codec {
        Codec::new(DEFAULT_MAX_FRAME_LENGTH)
    }
}

impl Decoder for Codec {
    type Item = Decoded;
    type Error = DecodeError;

    /// Room for the rest of a frame is not reserved here, but grows with what arrives: else twelve bytes
    /// from each of a thousand strangers would cost a gigabyte.
    fn decode(&mut self, received: &mut BytesMut) -> Result<Option<Decoded>, DecodeError> {
        let Some(length) = self.announced_length(received)? else { return Ok(None) };
        let Some((counted, _)) = received[LENGTH_LENGTH..].split_at_checked(length) else { return Ok(None) };
        let decoded = decode::frame(counted);
        received.advance(LENGTH_LENGTH + length);
        Ok(Some(decoded))
    }
}

impl Encoder<&Frame> for Codec {
    type Error = io::Error;

    fn encode(&mut self, frame: &Frame, out: &mut BytesMut) -> Result<(), io::Error> {
        self.encode_frame(frame, out);
        Ok(())
    }
}
