//! Messages, and the outcomes of the requests AddNewMsg and DelMsg. A message is *in flight* from its AddNewMsg until
//! it is acknowledged or withdrawn by a DelMsg, or times out.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use super::tick::Tick;

/// The id of a message. The logic node, which is the server that pushes messages to clients, chooses it. Any u64 is
/// legal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct MsgId(pub u64);

/// The id of the client that must acknowledge a message, ideally a session id that is never reused. It is 0 if the
/// logic node stated no client id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Client(pub u64);

/// A message to one client: the pair of a message id and the id of the client to which the message was pushed.
///
/// If one `msg_id` is pushed to 500 members of a chat, that is 500 messages. If it is pushed to three devices of one
/// user, that is 3 messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Message {
    /// The id that the logic node chose for the message.
    pub msg_id: MsgId,
    /// The id of the client to which the message was pushed.
    pub client: Client,
}

impl Message {
    /// Returns the message with the id `msg_id` for the client with the id `client`.
    pub const fn new(msg_id: u64, client: u64) -> Message {
        Message { msg_id: MsgId(msg_id), client: Client(client) }
    }
}

impl From<u64> for Message {
    fn from(msg_id: u64) -> Message {
        Message::new(msg_id, 0)
    }
}

impl From<(u64, u64)> for Message {
    fn from((msg_id, client): (u64, u64)) -> Message {
        Message::new(msg_id, client)
    }
}

/// Writes `msg_id:client`, or only `msg_id` if the client id is 0. The command line uses the same form.
impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.client == Client(0) {
            write!(f, "{}", self.msg_id.0)
        } else {
            write!(f, "{}:{}", self.msg_id.0, self.client.0)
        }
    }
}

/// The error for a text that is not `ID` or `ID:CLIENT`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a message: write ID or ID:CLIENT, both whole numbers from 0 to {max}", max = u64::MAX)]
pub struct ParseMessageError(String);

impl FromStr for Message {
    type Err = ParseMessageError;

    fn from_str(text: &str) -> Result<Message, ParseMessageError> {
        let parse = || -> Result<Message, ParseIntError> {
            let (msg_id, client) = text.split_once(':').unwrap_or((text, "0"));
            Ok(Message::new(msg_id.parse()?, client.parse()?))
        };
        parse().map_err(|_| ParseMessageError(text.to_owned()))
    }
}

/// The outcome of an AddNewMsg for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AddOutcome {
    /// The message was not in flight before.
    Added,
    /// The message was in flight already. It got a new deadline and a new attempt number.
    Rearmed,
}

/// The outcome of a DelMsg for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DelOutcome {
    /// The store does not know the message: it was never added, is already acknowledged or withdrawn, or timed out
    /// more than one revolution of the ring ago.
    Unknown,
    /// The message was in flight and is now acknowledged.
    Acked,
    /// The message timed out at most one revolution of the ring ago. The memory store may forget such messages
    /// earlier, and then answers `Unknown`.
    Late,
    /// The message was in flight and is now removed without an acknowledgement, because its push failed at once.
    Withdrawn,
}

impl DelOutcome {
    /// All outcomes, in the order of their numbers in the protocol.
    pub const ALL: [DelOutcome; 4] =
        [DelOutcome::Unknown, DelOutcome::Acked, DelOutcome::Late, DelOutcome::Withdrawn];

    /// Returns the word that the command line prints and the metrics use as a label.
    pub const fn as_str(self) -> &'static str {
        match self {
            DelOutcome::Unknown => "unknown",
            DelOutcome::Acked => "acked",
            DelOutcome::Late => "late",
            DelOutcome::Withdrawn => "withdrawn",
        }
    }
}

impl fmt::Display for DelOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The state of a message, which GetMsg returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MessageState {
    /// The message can be acknowledged.
    InFlight {
        /// The tick at whose end the message times out.
        deadline: Tick,
        /// The time until then in ms. It is 0 if that time has passed and the pointer is late. Stalls shift it.
        remaining_ms: u32,
        /// The attempt number of the last AddNewMsg.
        attempt: u8,
    },
    /// As [`DelOutcome::Late`].
    Late,
    /// As [`DelOutcome::Unknown`].
    Unknown,
}

impl MessageState {
    /// Returns the word that the command line prints.
    pub const fn as_str(self) -> &'static str {
        match self {
            MessageState::InFlight { .. } => "in_flight",
            MessageState::Late => "late",
            MessageState::Unknown => "unknown",
        }
    }
}

/// The answer to an AddNewMsg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddNewMsgAnswer {
    /// The deadline of the messages. If they belong to several rings, their deadlines can differ, and this is the
    /// latest.
    pub deadline: Tick,
    /// The outcome of each message, in the order of the request.
    pub outcomes: Vec<AddOutcome>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_as_they_print() {
        for text in ["0", "101", "101:7", "18446744073709551615:18446744073709551615"] {
            assert_eq!(text.parse::<Message>().unwrap().to_string(), text);
        }
        assert_eq!("101:0".parse::<Message>().unwrap(), Message::new(101, 0));
        for text in ["", ":", "1:", ":1", "1:2:3", "-1", "18446744073709551616", "a"] {
            assert!(text.parse::<Message>().is_err(), "{text:?}");
        }
    }
}
