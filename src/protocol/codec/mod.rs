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
//! 2. The length is checked before the decoder waits for more bytes. A count is compared with the received bytes before
//!    memory is reserved. So memory is proportional to the bytes received, never to a number that a frame announces.
//! 3. If the length of a frame is valid and anything else in it is wrong, the decoder refuses only this frame. It
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

use super::frame::{COUNTED_HEAD_LENGTH, DEFAULT_MAX_FRAME_LENGTH, Frame, FrameType, HEAD_LENGTH};
use crate::core::{DelOutcome, Reason, Refusal, Request};

/// The number of bytes of the length field. The length does not count them.
pub(crate) const LENGTH_LENGTH: usize = HEAD_LENGTH - COUNTED_HEAD_LENGTH;

// The encoder writes `DelOutcome as u8`, so these values must be those of the protocol.
const _: () = assert!(DelOutcome::Unknown as u8 == 0 && DelOutcome::Acked as u8 == 1);
const _: () = assert!(DelOutcome::Late as u8 == 2 && DelOutcome::Withdrawn as u8 == 3);

/// The flags of each frame type. A bit that the type does not define must be 0.
mod flag {
    use super::FrameType;

    /// Client ids follow the message ids. Without this flag, all client ids are 0.
    pub(super) const CLIENTS: u8 = 0x01;
    /// The push of the messages failed at once.
    pub(super) const WITHDRAW: u8 = 0x02;
    /// The server deletes the group when its last member leaves.
    pub(super) const EPHEMERAL: u8 = 0x01;
    /// A new group starts at the next batch, and not at the oldest batch that the server keeps.
    pub(super) const FROM_END: u8 = 0x02;
    /// The server created the group for this subscription.
    pub(super) const CREATED: u8 = 0x01;
    /// The batch is the last of its tick.
    pub(super) const LAST: u8 = 0x01;
    /// The tick is a storm: so many of its messages timed out that a fault on the server side is likely.
    pub(super) const STORM: u8 = 0x02;
    /// The messages are delivered before their deadline, because the server shuts down.
    pub(super) const DRAINED: u8 = 0x04;
    /// This connection held the batch that the BatchNack returns.
    pub(super) const HELD: u8 = 0x01;
    /// Any part of the request may have been applied.
    pub(super) const OUTCOME_UNKNOWN: u8 = 0x01;
    /// The same request can succeed later or at another server of the same store.
    pub(super) const RETRYABLE: u8 = 0x02;

    /// Returns the flags that frames of this type may have.
    pub(super) const fn defined(frame_type: FrameType) -> u8 {
        match frame_type {
            FrameType::AddNewMsg | FrameType::GetMsg => CLIENTS,
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

/// An encoder and decoder of frames.
#[derive(Clone, Debug)]
pub struct Codec {
    max_frame_length: u32,
}

/// The result of decoding a complete frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// A frame.
    Frame(Frame),
    /// A malformed frame whose length is valid. The receiver answers with an Error. It closes the connection only if
    /// [`Reason::closes`] says so, as after a malformed Hello.
    Refused {
        /// The correlation id of the frame.
        correlation: u32,
        /// The refusal, whose text names the wrong field and its valid values.
        refusal: Refusal,
    },
}

/// A frame with an invalid length. The receiver answers with an Error and closes the connection, because it cannot find
/// the next frame.
#[derive(Debug, thiserror::Error)]
#[error("{refusal}")]
pub struct DecodeError {
    /// The correlation id of the frame; 0 if the id is unknown.
    pub correlation: u32,
    /// The refusal to send to the peer.
    pub refusal: Refusal,
}

/// Returns the correlation id of a request, which the decoder stored as the id of the request.
#[expect(clippy::cast_possible_truncation, reason = "the id was made of a correlation id")]
pub(crate) const fn correlation_id(request: &Request) -> u32 {
    request.id as u32
}

impl Codec {
    /// Creates a codec that accepts frames with a length of at most `max_frame_length`.
    pub const fn new(max_frame_length: u32) -> Codec {
        Codec { max_frame_length }
    }

    /// Returns the number of bytes of the longest frame that the codec accepts.
    #[cfg(feature = "sidecar")]
    pub(crate) const fn longest_frame(&self) -> usize {
        LENGTH_LENGTH + self.max_frame_length as usize
    }

    /// Removes the next frame from the received bytes and decodes it. Returns `None` if the frame is not complete yet.
    ///
    /// This function reserves no memory for the rest of an incomplete frame: the buffer grows only with the received
    /// bytes. Otherwise a thousand clients could make the server reserve a gigabyte (1 MiB a frame) with twelve bytes
    /// each.
    ///
    /// # Errors
    ///
    /// Fails if no frame can begin with these bytes, because the length is invalid.
    pub fn decode(&self, received: &mut BytesMut) -> Result<Option<Decoded>, DecodeError> {
        let Some(frame) = self.first(received)? else { return Ok(None) };
        let (length, decoded) = (frame.length(), decode::frame(&frame));
        received.advance(length);
        Ok(Some(decoded))
    }

    /// Returns the parts of the next frame, or `None` if the frame is not complete yet.
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
        "a frame's length is {length}, but a length counts the rest of the head and the body, so it is at \
         least {COUNTED_HEAD_LENGTH}: send the number of bytes that follow the length"
    );
    DecodeError { correlation: 0, refusal: Refusal::new(Reason::MalformedFrame, text) }
}

/// Returns the first eight bytes of a frame of `whole` bytes, as a big-endian number: the head without the correlation
/// id. The status is 0.
pub(crate) const fn begin(whole: usize, frame_type: FrameType, flags: u8) -> u64 {
    ((whole - LENGTH_LENGTH) as u64) << 32 | (frame_type as u64) << 24 | (flags as u64) << 16
}

/// The parts of a complete frame at the front of the received bytes.
struct RawFrame<'a> {
    number: u8,
    flags: u8,
    status: u16,
    correlation: u32,
    body: &'a [u8],
}

impl RawFrame<'_> {
    /// Returns the number of bytes of the frame.
    const fn length(&self) -> usize {
        HEAD_LENGTH + self.body.len()
    }
}

/// Returns an error text for a peer that speaks HTTP or TLS. The first bytes of such a peer, read as a length, are far
/// above any sensible limit. So a text about the length would not help.
fn foreign_protocol(first_four: [u8; LENGTH_LENGTH]) -> Option<&'static str> {
    match &first_four {
        b"GET " | b"HEAD" | b"POST" | b"PUT " | b"PATC" | b"DELE" | b"OPTI" | b"CONN" | b"TRAC" | b"PRI " => Some(
            "this is an HTTP request, but this port speaks the ackwheel protocol: metrics, health and status \
             are served over HTTP on the admin port (127.0.0.1:7416 by default)",
        ),
        b"HTTP" => Some(
            "the other side answers in HTTP: that may be the admin port, and messages go to another port \
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

/// Creates a codec that accepts frames up to [`DEFAULT_MAX_FRAME_LENGTH`].
impl Default for Codec {
    fn default() -> Codec {
        Codec::new(DEFAULT_MAX_FRAME_LENGTH)
    }
}
