//! Bytes that anybody may send, to either side of a connection: what the decoder makes of them, and the two readers of
//! the hot path beside it, which must see the same.
//!
//! The first byte of an input says how the rest comes: as a stream of any bytes, or as bodies whose lengths are put
//! before them, since a search finds those less easily than what stands in a frame; and in pieces of which size.

#![no_main]

use ackwheel::core::{Operation, Reason, RequestBatch};
use ackwheel::protocol::frame::{Error, MAX_PING_LENGTH};
use ackwheel::protocol::{Body, Codec, DecodeError, Decoded, Frame};
use bytes::BytesMut;
use libfuzzer_sys::fuzz_target;

/// Small, so that inputs reach it.
const MAX_FRAME_LENGTH: u32 = 1_024;

fuzz_target!(|input: &[u8]| {
    let Some((how, bytes)) = input.split_first() else { return };
    let (is_framed, piece) = (how & 0x80 != 0, usize::from(how & 0x7f).max(1));
    let bytes = if is_framed { framed(bytes) } else { bytes.to_vec() };
    let whole = Read::all(&bytes, bytes.len().max(1));
    assert_eq!(Read::all(&bytes, piece), whole, "it does not matter how bytes arrive");
    whole.decoded.iter().for_each(survives);
    takes_the_same_requests(&bytes, usize::from(*how));
    answers_the_same_pings(&bytes, &whole);
});

/// Puts the length before each of the frames: a byte says how much of the rest is one.
fn framed(mut bytes: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    while let Some((length, rest)) = bytes.split_first() {
        let (frame, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        stream.extend_from_slice(&u32::try_from(frame.len()).expect("it is below 256").to_be_bytes());
        stream.extend_from_slice(frame);
        bytes = rest;
    }
    stream
}

/// What a connection reads until nothing more comes, or it is broken.
#[derive(Debug, PartialEq)]
struct Read {
    decoded: Vec<Decoded>,
    broken: Option<Reason>,
}

impl Read {
    fn all(bytes: &[u8], piece: usize) -> Read {
        let (codec, mut received) = (Codec::new(MAX_FRAME_LENGTH), BytesMut::new());
        let mut decoded = Vec::new();
        for piece in bytes.chunks(piece) {
            received.extend_from_slice(piece);
            loop {
                match codec.decode(&mut received) {
                    Ok(Some(found)) => decoded.push(found),
                    Ok(None) => break,
                    Err(DecodeError { refusal, .. }) => {
                        assert!(!refusal.text.is_empty(), "a closed connection is told why");
                        return Read { decoded, broken: Some(refusal.reason) };
                    }
                }
            }
        }
        Read { decoded, broken: None }
    }
}

/// What was decoded is the same after its own bytes, and so is the Error that answers what was refused.
fn survives(decoded: &Decoded) {
    let frame = match decoded {
        Decoded::Frame(frame) => frame.clone(),
        Decoded::Refused { correlation, refusal } => {
            assert!(!refusal.text.is_empty(), "a refused request is told why");
            let (code, promise) = (refusal.reason.code(), refusal.reason.promise());
            let (retryable, text) = (refusal.reason.retryable(), refusal.text.to_string());
            Frame::new(*correlation, Body::Error(Error { code, promise, retryable, text }))
        }
    };
    let mut bytes = BytesMut::new();
    Codec::default().encode_frame(&frame, &mut bytes);
    let again = Codec::default().decode(&mut bytes);
    assert!(matches!(&again, Ok(Some(Decoded::Frame(again))) if *again == frame), "{frame:?} became {again:?}");
    assert!(bytes.is_empty(), "{frame:?} left bytes behind");
}

/// The reader of bursts takes requests that the decoder reads too, and leaves none that it could take.
fn takes_the_same_requests(bytes: &[u8], most: usize) {
    let mut batch = RequestBatch::default();
    // With a revolution of 0 an ack timeout that is not named stays what it is.
    let taken = Codec::new(MAX_FRAME_LENGTH).take_requests(bytes, &mut batch, most, 0);
    let (taken, left) = bytes.split_at(taken);
    let decoded = Read::all(taken, taken.len().max(1)).decoded;
    let requests = batch.requests.iter().map(|request| {
        let messages = batch.messages()[request.range()].to_vec();
        let body = match request.operation {
            Operation::Add { ack_timeout_ticks, attempt } => {
                Body::AddNewMsg { messages, ack_timeout_ticks, attempt }
            }
            Operation::Del { withdraw } => Body::DelMsg { messages, withdraw },
        };
        Decoded::Frame(Frame::new(u32::try_from(request.id).expect("it was a correlation id"), body))
    });
    assert_eq!(requests.collect::<Vec<_>>(), decoded, "it takes what the decoder reads, and passes over nothing");
    if batch.messages().len() < most {
        let next = Codec::new(MAX_FRAME_LENGTH).decode(&mut BytesMut::from(left));
        let is_request = |body: &Body| matches!(body, Body::AddNewMsg { .. } | Body::DelMsg { .. });
        assert!(!matches!(&next, Ok(Some(Decoded::Frame(frame))) if is_request(&frame.body)), "{next:?} was left");
    }
}

/// The reader of Pings answers those that come first, as the encoder would.
fn answers_the_same_pings(bytes: &[u8], whole: &Read) {
    let mut answers = BytesMut::new();
    let echoed = Codec::new(MAX_FRAME_LENGTH).echo_pings(bytes, &mut answers);
    let (mut pings, mut pongs, mut expected) = (0, 0, BytesMut::new());
    for decoded in &whole.decoded {
        match decoded {
            Decoded::Frame(Frame { correlation, body: Body::Ping(payload) }) => {
                assert!(payload.len() <= MAX_PING_LENGTH);
                Codec::default()
                    .encode_frame(&Frame::new(*correlation, Body::Pong(payload.clone())), &mut expected);
                pings += 1;
            }
            Decoded::Frame(Frame { body: Body::Pong(_), .. }) => pongs += 1,
            _ => break,
        }
    }
    assert_eq!((echoed.pings, echoed.pongs), (pings, pongs));
    assert_eq!(answers, expected);
}
