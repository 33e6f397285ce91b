//! Encodes frames as bytes and decodes bytes as frames, in the layout of docs/PROTOCOL.md.
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
//! 2. The length is checked before more bytes are awaited, and a count is compared with the bytes received before memory
//!    is reserved for it: memory is proportional to what was received, never to what was announced.
//! 3. A frame with a valid length never breaks the connection: if anything else in it is wrong, the decoder
//!    continues with the next frame.

mod decode;
mod encode;
mod fields;
mod requests;
mod single_message;
#[cfg(test)]
mod tests;

use bytes::{Buf, BytesMut};
pub use requests::EchoedPings;
pub use single_message::correlation_id;

use super::frame::{COUNTED_HEAD_LENGTH, DEFAULT_MAX_FRAME_LENGTH, Frame, FrameType, HEAD_LENGTH};
use crate::core::{DelOutcome, Reason, Refusal};

/// Bytes of the length itself, which it does not count.
pub(crate) const LENGTH_LENGTH: usize = HEAD_LENGTH - COUNTED_HEAD_LENGTH;

// The numbers of outcomes in the protocol are those of the enum.
const _: () = assert!(DelOutcome::Unknown as u8 == 0 && DelOutcome::Acked as u8 == 1);
const _: () = assert!(DelOutcome::Late as u8 == 2 && DelOutcome::Withdrawn as u8 == 3);

/// The flags of each type; a bit that its type does not define is 0.
mod flag {
    use super::FrameType;

    /// Clients follow the message ids; without it they are all 0.
    pub(super) const CLIENTS: u8 = 0x01;
    /// The push failed at once.
    pub(super) const WITHDRAW: u8 = 0x02;
    /// The group is deleted with its last member.
    pub(super) const EPHEMERAL: u8 = 0x01;
    /// The group, if it is new, begins with the next batch.
    pub(super) const FROM_END: u8 = 0x02;
    /// The group is new.
    pub(super) const CREATED: u8 = 0x01;
    /// The batch is the last of its tick.
    pub(super) const LAST: u8 = 0x01;
    /// The tick is a storm.
    pub(super) const STORM: u8 = 0x02;
    /// The batch is delivered before its deadline.
    pub(super) const DRAINED: u8 = 0x04;
    /// The connection held the batch that it returned.
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

/// A broken frame: answer with an Error and close, since no more frames can be read.
#[derive(Debug, thiserror::Error)]
#[error("{refusal}")]
pub struct DecodeError {
    /// The correlation id of the frame; 0 if that was not received yet, or there is none.
    pub correlation: u32,
    /// The fault.
    pub refusal: Refusal,
}

impl Codec {
    /// A codec that accepts frames whose length says at most `max_frame_length`.
    pub const fn new(max_frame_length: u32) -> Codec {
        Codec { max_frame_length }
    }

    /// Takes the next frame from what was received; none if it is not whole yet.
    ///
    /// Memory for the rest of a frame is not reserved here, but grows with what arrives: otherwise twelve bytes from
    /// each of a thousand unknown clients would cost a gigabyte.
    ///
    /// # Errors
    ///
    /// When no frame can begin with these bytes.
    pub fn decode(&self, received: &mut BytesMut) -> Result<Option<Decoded>, DecodeError> {
        let Some(frame) = self.first(received)? else { return Ok(None) };
        let (length, decoded) = (frame.length(), decode::frame(&frame));
        received.advance(length);
        Ok(Some(decoded))
    }

    /// The parts of the next frame; none if it is not whole yet.
    #[inline]
    fn first<'a>(&self, received: &'a [u8]) -> Result<Option<RawFrame<'a>>, DecodeError> {
        let Some((first_four, rest)) = received.split_first_chunk::<LENGTH_LENGTH>() else { return Ok(None) };
        let length = u32::from_be_bytes(*first_four);
        if length > self.max_frame_length {
            return Err(self.too_large(*first_four, received));
        }
        let length = length as usize;
        if length < COUNTED_HEAD_LENGTH {
            return Err(too_short(length));
        }
        let Some((head, body)) = rest.get(..length).and_then(<[u8]>::split_first_chunk::<COUNTED_HEAD_LENGTH>)
        else {
            return Ok(None);
        };
        let [number, flags, status_high, status_low, correlation @ ..] = *head;
        let status = u16::from_be_bytes([status_high, status_low]);
        Ok(Some(RawFrame { number, flags, status, correlation: u32::from_be_bytes(correlation), body }))
    }

    #[cold]
    fn too_large(&self, first_four: [u8; LENGTH_LENGTH], received: &[u8]) -> DecodeError {
        if let Some(text) = foreign_protocol(first_four) {
            return DecodeError { correlation: 0, refusal: Refusal::new(Reason::FrameTooLarge, text) };
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
        DecodeError { correlation, refusal: Refusal::new(Reason::FrameTooLarge, text) }
    }
}

#[cold]
fn too_short(length: usize) -> DecodeError {
    let text = format!(
        "a frame's length is {length}, but it counts the rest of the head and the body, which is at \
         least {COUNTED_HEAD_LENGTH}: send the number of bytes that follow the length"
    );
    DecodeError { correlation: 0, refusal: Refusal::new(Reason::MalformedFrame, text) }
}

/// The first bytes of a frame: the head without the correlation id.
pub(crate) const fn begin(whole: usize, frame_type: FrameType, flags: u8) -> u64 {
    ((whole - LENGTH_LENGTH) as u64) << 32 | (frame_type as u64) << 24 | (flags as u64) << 16
}

/// The parts of a whole frame at the front of what was received.
struct RawFrame<'a> {
    number: u8,
    flags: u8,
    status: u16,
    correlation: u32,
    body: &'a [u8],
}

impl RawFrame<'_> {
    /// Its bytes.
    const fn length(&self) -> usize {
        HEAD_LENGTH + self.body.len()
    }
}

/// The error text for a peer whose first bytes are those of another protocol. Read as a length they are far
/// above any sensible limit, so a sentence about the length would not help.
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
