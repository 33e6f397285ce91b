//! Messages in flight, and the outcomes of AddNewMsg and DelMsg.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use super::tick::Tick;

/// The id of a message, chosen by the logic node. Any u64 is legal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct MsgId(pub u64);

/// The client that must acknowledge a message, ideally a session id that is never reused. It is 0 if the logic node
/// named no client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Client(pub u64);

/// A message to one client: the pair of a message id and the client to which the message was pushed.
///
/// If one `msg_id` is pushed to 500 members of a chat, that is 500 messages. Three devices of one user are 3
/// messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Message {
    /// The id that the logic node chose for the message.
    pub msg_id: MsgId,
    /// The client to which the message was pushed.
    pub client: Client,
}

impl Message {
    /// Returns the message with the id `msg_id` for `client`.
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

/// Writes `msg_id` or `msg_id:client`, as on the command line.
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
    /// The message was in flight already. It got a new deadline and a new attempt.
    Rearmed,
}

/// The outcome of a DelMsg for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DelOutcome {
    /// The message was never added, is already acknowledged, or timed out more than one revolution ago.
    Unknown,
    /// The message was in flight and is now acknowledged.
    Acked,
    /// The message timed out less than one revolution ago.
    Late,
    /// The message was in flight. It is removed without an acknowledgement, because its push failed at once.
    Withdrawn,
}

impl DelOutcome {
    /// All outcomes, in the order of their numbers in the protocol.
    pub const ALL: [DelOutcome; 4] =
        [DelOutcome::Unknown, DelOutcome::Acked, DelOutcome::Late, DelOutcome::Withdrawn];

    /// Returns the word for the command line and the metrics label.
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

/// The answer to an AddNewMsg.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddNewMsgAnswer {
    /// The deadline of the messages. If messages of several rings differ, this is the latest deadline.
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
