//! The frames of the protocol as Rust values: their types, limits and contents. `codec` defines their bytes.

use std::fmt;
use std::ops::RangeInclusive;

use crate::core::{BatchId, DelOutcome, Message, MessageState, Promise, Reason, TickCounts, TimedOut};

pub use crate::core::AddNewMsgAnswer;

/// The first four bytes of the body of every Hello: `ACKW`.
pub const MAGIC: [u8; 4] = *b"ACKW";

/// The versions of the protocol that this build speaks.
pub const VERSIONS: RangeInclusive<u8> = 1..=1;

/// The number of bytes of a frame before its body.
pub const HEAD_LENGTH: usize = 12;

/// The number of bytes of the head that the length field counts: all but the four bytes of this field.
pub const COUNTED_HEAD_LENGTH: usize = HEAD_LENGTH - 4;

/// The maximum frame length that is accepted by default, in bytes. The length field of a frame must not exceed it.
pub const DEFAULT_MAX_FRAME_LENGTH: u32 = 1024 * 1024;

/// The maximum frame length that a server accepts until it has accepted the client's Hello, in bytes. It bounds the
/// memory that an unknown client can occupy.
pub const MAX_GREETING_LENGTH: u32 = 4_096;

/// The maximum number of messages in one [`Body::AddNewMsg`] or [`Body::DelMsg`].
pub const MAX_MESSAGES: usize = 32_768;

/// The maximum number of batch ids in one [`Body::BatchAck`].
pub const MAX_BATCH_IDS: usize = 4_096;

/// The number of bytes per message in a TimeoutBatch: message id (8), client id (8) and attempt number (1).
pub(crate) const TIMED_OUT_LENGTH: usize = 17;

/// The number of bytes per message in a GetMsg answer: state (1), deadline (8), remaining time (4) and attempt number (1).
pub(crate) const STATE_LENGTH: usize = 14;

/// The maximum length of a Ping's payload, in bytes.
pub const MAX_PING_LENGTH: usize = 64;

/// The maximum length of a token, in bytes.
pub const MAX_TOKEN_LENGTH: usize = 1_024;

// The largest Hello fits the limit before Hello. The largest AddNewMsg and TimeoutBatch fit the default limit.
const _: () = assert!(MAX_TOKEN_LENGTH + 255 + 64 < MAX_GREETING_LENGTH as usize);
const _: () = assert!(MAX_MESSAGES * 16 + 64 < DEFAULT_MAX_FRAME_LENGTH as usize);
const _: () = assert!(crate::core::MAX_BATCH_MESSAGES * TIMED_OUT_LENGTH + 64 < DEFAULT_MAX_FRAME_LENGTH as usize);

macro_rules! frame_types {
    ($($name:ident = $number:literal, $label:literal;)+) => {
        /// The types of frames. The type of an answer is the type of its request with the highest bit set.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[expect(missing_docs, reason = "the variants of Body with the same names are documented")]
        pub enum FrameType {
            $($name = $number,)+
        }

        impl FrameType {
            /// All types.
            pub const ALL: [FrameType; [$($number,)+].len()] = [$(FrameType::$name,)+];

            /// Returns the type with this number, if there is one.
            pub const fn from_number(number: u8) -> Option<FrameType> {
                match number {
                    $($number => Some(FrameType::$name),)+
                    _ => None,
                }
            }

            /// Returns the name of the type in metrics labels and in docs/PROTOCOL.md.
            pub const fn as_str(self) -> &'static str {
                match self { $(FrameType::$name => $label,)+ }
            }
        }

        impl Body {
            /// Returns the type of the frame.
            pub const fn frame_type(&self) -> FrameType {
                match self { $(Body::$name { .. } => FrameType::$name,)+ }
            }
        }
    };
}

frame_types! {
    Hello = 0x01, "hello";
    Welcome = 0x81, "welcome";
    Ping = 0x02, "ping";
    Pong = 0x82, "pong";
    GoAway = 0x03, "go_away";
    AddNewMsg = 0x10, "add_new_msg";
    AddNewMsgAnswer = 0x90, "add_new_msg_answer";
    DelMsg = 0x11, "del_msg";
    DelMsgAnswer = 0x91, "del_msg_answer";
    GetMsg = 0x12, "get_msg";
    GetMsgAnswer = 0x92, "get_msg_answer";
    Subscribe = 0x20, "subscribe";
    Subscribed = 0xa0, "subscribed";
    TimeoutBatch = 0x21, "timeout_batch";
    BatchAck = 0x22, "batch_ack";
    BatchAckAnswer = 0xa2, "batch_ack_answer";
    BatchNack = 0x23, "batch_nack";
    BatchNackAnswer = 0xa3, "batch_nack_answer";
    GroupDelete = 0x24, "group_delete";
    GroupDeleteAnswer = 0xa4, "group_delete_answer";
    Error = 0xff, "error";
}

/// A frame: its correlation id and its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The correlation id: the requester chooses it, and the answer repeats it. It is 0 in a Ping or GoAway from a
    /// server.
    pub correlation: u32,
    /// The content of the frame.
    pub body: Body,
}

impl Frame {
    /// Creates a frame.
    pub const fn new(correlation: u32, body: Body) -> Frame {
        Frame { correlation, body }
    }
}

/// The content of a frame, with one variant per frame type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// The first frame of a connection, which the client sends.
    Hello(Hello),
    /// The answer to Hello.
    Welcome(Welcome),
    /// A check of whether the peer is alive, sent by either side. The peer echoes the payload of at most
    /// [`MAX_PING_LENGTH`] bytes.
    Ping(Vec<u8>),
    /// The answer to Ping, with the same payload.
    Pong(Vec<u8>),
    /// The announcement that the sender will close the connection.
    GoAway {
        /// The reason.
        reason: GoAwayReason,
        /// How long the sender still reads and answers, in ms.
        grace_ms: u32,
    },
    /// A request that starts the ack timeout of messages.
    AddNewMsg {
        /// The messages, 1 to [`MAX_MESSAGES`].
        messages: Vec<Message>,
        /// The ack timeout in ticks (one second by default). 0 means the maximum: one revolution of the server's ring
        /// of ticks.
        ack_timeout_ticks: u16,
        /// The number of this attempt to push the messages. If they time out, the timeout batch repeats this number.
        attempt: u8,
    },
    /// The answer to AddNewMsg.
    AddNewMsgAnswer(AddNewMsgAnswer),
    /// A request that removes messages whose Ack arrived or whose push failed.
    DelMsg {
        /// The messages, 1 to [`MAX_MESSAGES`].
        messages: Vec<Message>,
        /// Whether the push of the messages failed at once. Otherwise their Ack arrived.
        withdraw: bool,
    },
    /// The answer to DelMsg: one outcome per message, in order.
    DelMsgAnswer(Vec<DelOutcome>),
    /// A request for the state of messages, 1 to [`MAX_MESSAGES`]. It changes nothing.
    GetMsg(Vec<Message>),
    /// The answer to GetMsg: one state per message, in order.
    GetMsgAnswer(Vec<MessageState>),
    /// A request to join a group of subscribers and to receive its timeout batches.
    Subscribe(Subscribe),
    /// The answer to Subscribe. TimeoutBatches follow under the same correlation id.
    Subscribed {
        /// The group that the subscriber joined.
        group: String,
        /// Whether the server created the group for this subscription.
        created: bool,
    },
    /// A timeout batch, under the correlation id of its Subscribe. The subscriber does not answer this frame, but
    /// acknowledges the batch with BatchAck.
    TimeoutBatch(TimeoutBatch),
    /// A request that settles 1 to [`MAX_BATCH_IDS`] batches: the server does not deliver them to the subscriber's
    /// group again.
    BatchAck(Vec<BatchId>),
    /// The answer to BatchAck.
    BatchAckAnswer {
        /// How many of the batches were not settled before this request.
        settled: u32,
    },
    /// A request that returns a batch to the server.
    BatchNack {
        /// The id of the batch.
        batch: BatchId,
        /// The delay before the server may redeliver the batch to the same subscriber, in ms. The server doubles the
        /// delay with every return of the batch, up to the redelivery timeout.
        delay_ms: u32,
    },
    /// The answer to BatchNack.
    BatchNackAnswer {
        /// Whether this connection held the batch. If not, the request changed nothing.
        held: bool,
    },
    /// A request that deletes the group with this name.
    GroupDelete(String),
    /// The answer to GroupDelete.
    GroupDeleteAnswer,
    /// The reason why a request is refused or the connection is closed.
    Error(Error),
}

/// The first frame of a connection, which the client sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The lowest version of the protocol that the client speaks.
    pub lowest_version: u8,
    /// The highest version of the protocol that the client speaks.
    pub highest_version: u8,
    /// The secret that the server requires; empty if it requires none.
    pub token: Secret,
    /// The name of the client in logs, at most 255 bytes.
    pub client_name: String,
}

/// Secret bytes, which `Debug` does not print.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(pub Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The answer to Hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version that both sides speak from now on.
    pub version: u8,
    /// The number of slots of the server's ring, one per tick. It is also the default and the maximum ack timeout, in
    /// ticks.
    pub slots: u16,
    /// The length of a tick, in ms.
    pub tick_ms: u32,
    /// The maximum frame length that the server accepts, in bytes.
    pub max_frame_length: u32,
    /// The maximum number of messages in one AddNewMsg or DelMsg.
    pub max_messages: u32,
    /// The maximum credit of a subscription, in messages. See [`Subscribe::credit`].
    pub max_credit: u32,
    /// The ping interval, in ms. A peer that is silent for two intervals counts as disconnected.
    pub ping_interval_ms: u32,
    /// The name of the kind of store, at most 255 bytes.
    pub store: String,
    /// The server's name and version, at most 255 bytes.
    pub server_name: String,
}

/// The reason why the sender will close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum GoAwayReason {
    /// The sender is shutting down.
    Draining = 1,
    /// The sender no longer needs the connection.
    Done = 2,
}

/// A request to join a group of subscribers and to receive its timeout batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscribe {
    /// The group to join. If the name is empty, the server creates and names a new group, and deletes it when its last
    /// member leaves.
    pub group: String,
    /// The credit, in messages, at least 1. The server delivers another batch only while fewer messages than this are
    /// unacknowledged.
    pub credit: u32,
    /// Whether the server deletes the group when its last member leaves. A group that is created with this option is
    /// ephemeral, and always starts at the next batch.
    pub ephemeral: bool,
    /// Whether a group that this request creates starts at the next batch. Otherwise the new group starts at the oldest
    /// batch that the server keeps.
    pub from_end: bool,
}

/// A batch of messages that were not acknowledged in time. They all have the same tick as their deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeoutBatch {
    /// The id of the batch, for acknowledging it and for detecting duplicates.
    pub id: BatchId,
    /// How many times the server has delivered the batch to this group, including this delivery.
    pub delivery_count: u32,
    /// The time since the tick expired, in ms.
    pub age_ms: u64,
    /// How many messages of the tick were added and acknowledged, and two flags. `storm` says that a fault on the
    /// server side is likely to have caused the many timeouts of the tick. `drained` says that the messages are
    /// delivered before their deadline, because the server shuts down.
    pub counts: TickCounts,
    /// Whether this is the last batch of the tick.
    pub last: bool,
    /// The messages that timed out.
    pub messages: Vec<TimedOut>,
}

/// The reason why a request is refused or the connection is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The code of a [`Reason`], or a code that this build does not know.
    pub code: u16,
    /// Whether the server promises that it applied nothing.
    pub promise: Promise,
    /// Whether the same request can succeed later or at another server of the same store.
    pub retryable: bool,
    /// The error text for humans.
    pub text: String,
}

impl Error {
    /// Returns the reason, if this build knows the code.
    pub fn reason(&self) -> Option<Reason> {
        Reason::from_code(self.code)
    }
}
