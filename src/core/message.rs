//! Messages in flight, and the outcomes of AddNewMsg and DelMsg.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use super::tick::Tick;

/// The id that a logic node gave to a message. Any u64 is legal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct MsgId(pub u64);

/// The client that must acknowledge a message, ideally a session id that is never reused. 0 if none was given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Client(pub u64);

/// A message in flight: the pair of a message id and the client that it was pushed to.
///
/// One `msg_id` pushed to 500 members of a chat, or to three devices of one user, is 500 or 3 messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Message {
    /// The id that the logic node gave it.
    pub msg_id: MsgId,
    /// The client that it was pushed to.
    pub client: Client,
}

impl Message {
    /// The message `msg_id` pushed to `client`.
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

/// `msg_id` or `msg_id:client`, as on the command line.
impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.client == Client(0) {
            write!(f, "{}", self.msg_id.0)
        } else {
            write!(f, "{}:{}", self.msg_id.0, self.client.0)
        }
    }
}

/// The text is not `ID` or `ID:CLIENT`.
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
    /// It was not in flight, and now it is.
    Added,
    /// It was in flight already, and got a new deadline and a new attempt.
    Rearmed,
}

/// The outcome of a DelMsg for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DelOutcome {
    /// Never added, already acknowledged, or timed out more than one revolution ago.
    Unknown,
    /// It was in flight, and is now acknowledged.
    Acked,
    /// It timed out less than one revolution ago.
    Late,
    /// It was in flight, and is removed because its push failed at once.
    Withdrawn,
}

impl DelOutcome {
    /// All outcomes, in the order of their numbers in the protocol.
    pub const ALL: [DelOutcome; 4] =
        [DelOutcome::Unknown, DelOutcome::Acked, DelOutcome::Late, DelOutcome::Withdrawn];

    /// The word on the command line and in the metrics label.
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
    /// The deadline of its messages; the latest one if they differ.
    pub deadline: Tick,
    /// For each message, in order.
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
