//! Requests that may need several frames, and their answers put together again.

use super::error::ClientError;
use super::link::Link;
use crate::core::message::Message;
use crate::core::refusal::Promise;
use crate::protocol::frame::{Body, MAX_MESSAGES, Welcome};

/// Bytes of a message in a frame, and of everything else in that frame at most.
const MESSAGE_LENGTH: u32 = 16;
const OVERHEAD: u32 = 64;

/// Sends messages in as many frames as the server's limits ask for, one right after the other, and reads
/// the answer to each with the number of its messages.
pub(super) async fn ask_for_messages<T>(
    link: &Link,
    messages: &[Message],
    body: impl Fn(Vec<Message>) -> Body,
    read: impl Fn(Body) -> Result<T, ClientError>,
    count: impl Fn(&T) -> usize,
) -> Result<Vec<T>, ClientError> {
    let chunks = || messages.chunks(messages_per_frame(&link.shared.welcome()));
    let lengths: Vec<usize> = chunks().map(<[Message]>::len).collect();
    let answers = link.ask_all(chunks().map(|chunk| body(chunk.to_vec()))).await;
    let read = answers.into_iter().zip(&lengths).map(|(answer, length)| {
        let answer = read(answer?)?;
        let outcomes = count(&answer);
        if outcomes == *length {
            return Ok(answer);
        }
        let address = &link.shared.address;
        Err(ClientError::Protocol(format!("{address} answered {length} messages with {outcomes} outcomes")))
    });
    merge(read, lengths.iter().copied())
}

/// All answers, or what is to be said if one is missing: nothing was applied only if nothing was applied by
/// any of them.
pub(super) fn merge<T>(
    answers: impl Iterator<Item = Result<T, ClientError>>,
    lengths: impl Iterator<Item = usize> + Clone,
) -> Result<Vec<T>, ClientError> {
    let mut answered = Vec::new();
    let mut applied = 0;
    let mut failure: Option<ClientError> = None;
    for (answer, length) in answers.zip(lengths.clone()) {
        match answer {
            Ok(answer) => {
                applied += length;
                answered.push(answer);
            }
            // The first counts, but an unknown outcome must not hide behind a known one.
            Err(error) => match &failure {
                Some(first) if first.promise() == Promise::OutcomeUnknown => {}
                Some(_) if error.promise() == Promise::NotApplied => {}
                _ => failure = Some(error),
            },
        }
    }
    match failure {
        None => Ok(answered),
        Some(error) if applied == 0 => Err(error),
        Some(error) => Err(ClientError::Partial { applied, messages: lengths.sum(), cause: Box::new(error) }),
    }
}

/// An answer of another type than asked for. The connection has seen to that already.
pub(super) fn unexpected(body: &Body) -> ClientError {
    ClientError::Protocol(format!("the server answered with {}", body.frame_type().as_str()))
}

fn messages_per_frame(welcome: &Welcome) -> usize {
    let by_length = welcome.max_frame_length.saturating_sub(OVERHEAD) / MESSAGE_LENGTH;
    let limit = by_length.min(welcome.max_messages).max(1);
    usize::try_from(limit).unwrap_or(MAX_MESSAGES).min(MAX_MESSAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> Result<u8, ClientError> {
        Err(ClientError::InvalidRequest(text.to_owned()))
    }

    fn unknown(text: &str) -> Result<u8, ClientError> {
        Err(ClientError::Protocol(text.to_owned()))
    }

    #[test]
    fn a_failure_promises_that_nothing_was_applied_only_if_that_is_true() {
        let merge = |answers: Vec<Result<u8, ClientError>>| merge(answers.into_iter(), [10, 10, 5].into_iter());
        assert_eq!(merge(vec![Ok(1), Ok(2), Ok(3)]).unwrap(), [1, 2, 3]);
        let error = merge(vec![refused("a"), refused("b"), refused("c")]).unwrap_err();
        assert_eq!((error.promise(), error.to_string().as_str()), (Promise::NotApplied, "a"));
        let error = merge(vec![refused("a"), unknown("b"), unknown("c")]).unwrap_err();
        assert_eq!(error.promise(), Promise::OutcomeUnknown);
        assert!(error.to_string().starts_with("b;"), "{error}");
        let error = merge(vec![refused("a"), Ok(2), Ok(3)]).unwrap_err();
        assert_eq!(error.promise(), Promise::OutcomeUnknown);
        assert_eq!(error.to_string(), "15 of 25 messages were applied, then: a");
    }
}
