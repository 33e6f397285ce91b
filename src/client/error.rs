//! The errors of the client. Each error says whether the server may have applied the request.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::address::Address;
use crate::core::{Promise, Reason};
use crate::protocol::frame;

/// The remedy for a request whose outcome is unknown. A repeated add takes a message into flight again whose
/// acknowledgement came in between.
const REPEAT: &str =
    "it may have been applied; repeat it, but no add of messages that were acknowledged meanwhile";

/// The error of a failed call. [`promise`](ClientError::promise) says whether the request may have been applied.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server refused the request or the connection.
    #[error("the server refused: {} ({})", .0.text, word(.0))]
    Refused(frame::Error),

    /// No connection could be opened.
    #[error("cannot connect to {address}: {cause}{}", question(cause))]
    Connect {
        /// The address of the server.
        address: Address,
        /// The cause.
        cause: Arc<io::Error>,
    },

    /// The file with the token cannot be read, so no connection was opened.
    #[error("the token file cannot be used: {0}")]
    TokenFile(Arc<io::Error>),

    /// The connection was lost, and the request may have been written before.
    #[error("the connection to {address} was lost before the answer came ({cause}): {REPEAT}")]
    ConnectionLost {
        /// The address of the server.
        address: Address,
        /// The cause.
        cause: Arc<str>,
    },

    /// There was no connection until the request timed out, so the request was not sent.
    #[error("not connected to {address} for {waited:?} ({cause}): nothing was sent, try again later")]
    NotConnected {
        /// The address of the server.
        address: Address,
        /// How long the request waited.
        waited: Duration,
        /// Why there was no connection.
        cause: Arc<str>,
    },

    /// No answer came in time.
    #[error("no answer from {address} within {waited:?}: {}", sent(*.written))]
    Timeout {
        /// The address of the server.
        address: Address,
        /// How long the request waited.
        waited: Duration,
        /// Whether the request may have been written.
        written: bool,
    },

    /// The peer violated the protocol.
    #[error("{0}; is the server an ackwheel of a version that this client knows?")]
    Protocol(String),

    /// The request is invalid and was not sent.
    #[error("{0}")]
    InvalidRequest(String),

    /// A call was sent in several frames, and the server applied only some of them.
    #[error("{applied} of {messages} messages were applied, then: {cause}")]
    Partial {
        /// The number of messages in the frames that were applied.
        applied: usize,
        /// The number of messages in all frames of the call.
        messages: usize,
        /// The first failure whose outcome is unknown or, if there is none, the first failure.
        cause: Box<ClientError>,
    },

    /// The client or the subscription was closed before the request was sent.
    #[error(
        "the connection to {address} was closed on this side: keep client and subscription while they are used"
    )]
    Closed {
        /// The address of the server.
        address: Address,
    },
}

impl ClientError {
    /// Returns [`Promise::NotApplied`] if it is certain that the server applied nothing. Otherwise returns
    /// [`Promise::OutcomeUnknown`].
    pub fn promise(&self) -> Promise {
        match self {
            ClientError::Refused(error) => error.promise,
            ClientError::Timeout { written: false, .. }
            | ClientError::Connect { .. }
            | ClientError::TokenFile(_)
            | ClientError::NotConnected { .. }
            | ClientError::InvalidRequest(_)
            | ClientError::Closed { .. } => Promise::NotApplied,
            _ => Promise::OutcomeUnknown,
        }
    }

    /// Returns whether the same request can succeed later, or at another sidecar of the same store.
    pub fn is_retryable(&self) -> bool {
        match self {
            ClientError::Refused(error) => error.retryable,
            ClientError::Connect { .. }
            | ClientError::TokenFile(_)
            | ClientError::ConnectionLost { .. }
            | ClientError::NotConnected { .. }
            | ClientError::Timeout { .. } => true,
            ClientError::Protocol(_) | ClientError::InvalidRequest(_) | ClientError::Closed { .. } => false,
            ClientError::Partial { cause, .. } => cause.is_retryable(),
        }
    }

    /// Returns the reason of a refusal. Returns `None` for other errors, and for reasons that this build does not know.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            ClientError::Refused(error) => error.reason(),
            ClientError::Partial { cause, .. } => cause.reason(),
            _ => None,
        }
    }
}

/// Returns a question for the error text, which helps to find the cause. Returns no text if a server answered, but is
/// not trusted, speaks no TLS, or sends invalid frames.
fn question(cause: &io::Error) -> &'static str {
    if cause.kind() == io::ErrorKind::InvalidData { "" } else { "; is ackwheel serving there?" }
}

fn word(error: &frame::Error) -> String {
    error.reason().map_or_else(|| format!("code {}", error.code), |reason| reason.to_string())
}

fn sent(written: bool) -> &'static str {
    if written { REPEAT } else { "it was not sent, try again later" }
}
