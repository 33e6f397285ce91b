//! What a load does not hope for: wrong answers, refusals, and what a server says by itself.
//!
//! The codec reads these frames. They are few, or else the load is worth nothing.

use bytes::BytesMut;
use tokio_util::codec::Decoder;

use super::outstanding::{Kind, Sent};
use super::wire::BrokenLength;
use crate::core::message::{AddOutcome, DelOutcome};
use crate::protocol::frame::{Body, Frame};
use crate::protocol::{Codec, DecodeError, Decoded};

/// What is wrong with an answer that is not the one hoped for; an error if it cannot even be read.
#[cold]
pub(super) fn wrong(frame: &[u8], sent: Sent) -> Result<String, String> {
    let what = match sent.kind {
        Kind::Add => "an AddNewMsg",
        Kind::Del => "a DelMsg",
        Kind::Ping => "a Ping",
    };
    let asked = u64::from(sent.count);
    let text = match decode(frame)?.body {
        Body::Error(error) => format!("{what} was refused: {}", error.text),
        Body::AddNewMsgAnswer(answer) if sent.kind == Kind::Add && answer.outcomes.len() as u64 == asked => {
            let rearmed = answer.outcomes.iter().filter(|outcome| **outcome == AddOutcome::Rearmed).count();
            format!("{what} was answered with re-armed for {rearmed} of {asked} messages, not with added")
        }
        Body::DelMsgAnswer(outcomes) if sent.kind == Kind::Del && outcomes.len() as u64 == asked => {
            not_acked(&outcomes)
        }
        body => format!("{what} was answered with another {} than hoped for", body.frame_type().as_str()),
    };
    Ok(text)
}

/// Takes what the server says by itself: its Ping is answered in `out`. What is wrong with it, if anything is; an error
/// if it is the last that the connection is good for.
#[cold]
pub(super) fn unasked(frame: &[u8], out: &mut Vec<u8>) -> Result<Option<String>, String> {
    let Frame { correlation, body } = decode(frame)?;
    match body {
        Body::Ping(payload) => {
            let mut pong = BytesMut::new();
            Codec::default().encode_frame(&Frame::new(correlation, Body::Pong(payload)), &mut pong);
            out.extend_from_slice(&pong);
            Ok(None)
        }
        Body::GoAway(_) => Err("the server says that it will close the connection".to_owned()),
        Body::Error(error) => Err(format!("the server said: {}", error.text)),
        body => Ok(Some(format!("the server sent a {} that nobody asked for", body.frame_type().as_str()))),
    }
}

fn not_acked(outcomes: &[DelOutcome]) -> String {
    let wrong =
        outcomes.iter().find(|outcome| **outcome != DelOutcome::Acked).copied().unwrap_or(DelOutcome::Acked);
    let advice = match wrong {
        DelOutcome::Late => {
            ": the message timed out before its turn came; keep fewer --in-flight, or raise --ack-timeout-ticks"
        }
        _ => "",
    };
    format!("a DelMsg was answered with {wrong}, not with acked{advice}")
}

/// A length after which nothing more can be read.
pub(super) fn broken(length: BrokenLength) -> String {
    format!("the server sent a frame whose length is {}, which no frame can have", length.0)
}

/// Has the codec read a whole frame.
fn decode(frame: &[u8]) -> Result<Frame, String> {
    match Codec::default().decode(&mut BytesMut::from(frame)) {
        Ok(Some(Decoded::Frame(frame))) => Ok(frame),
        Ok(Some(Decoded::Refused { refusal, .. })) | Err(DecodeError::Broken { refusal, .. }) => {
            Err(format!("the server sent a frame that cannot be read: {}", refusal.text))
        }
        Ok(None) => Err("the server sent a frame that does not end".to_owned()),
        Err(DecodeError::Io(error)) => Err(error.to_string()),
    }
}
