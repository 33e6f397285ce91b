//! The frames of the protocol as values: types, limits and contents, without their bytes.

use std::fmt;
use std::ops::RangeInclusive;

use crate::core::{BatchId, DelOutcome, Message, Promise, Reason, TickCounts, TimedOut};

pub use crate::core::AddNewMsgAnswer;

/// The first four bytes of every Hello's body: `ACKW`.
pub const MAGIC: [u8; 4] = *b"ACKW";

/// The versions of the protocol that this build speaks.
pub const VERSIONS: RangeInclusive<u8> = 1..=1;

/// Bytes of every frame before its body.
pub const HEAD_LENGTH: usize = 12;

/// Bytes of the head that the length counts: all but the length itself.
pub const COUNTED_HEAD_LENGTH: usize = HEAD_LENGTH - 4;

/// The largest length of a frame that is accepted by default, in bytes.
pub const DEFAULT_MAX_FRAME_LENGTH: u32 = 1024 * 1024;

/// The longest frame that a server accepts before Hello: an unknown client cannot make it hold more.
pub const MAX_GREETING_LENGTH: u32 = 4_096;

/// The most messages in one AddNewMsg or DelMsg.
pub const MAX_MESSAGES: usize = 32_768;

/// The most batch ids in one BatchAck.
pub const MAX_BATCH_IDS: usize = 4_096;

/// Bytes of a message in a TimeoutBatch: its id, its client, its attempt.
pub(crate) const TIMED_OUT_LENGTH: usize = 17;

/// The longest payload of a Ping.
pub const MAX_PING_LENGTH: usize = 64;

/// The longest token, in bytes.
pub const MAX_TOKEN_LENGTH: usize = 1_024;

// An AddNewMsg of full size, with clients, fits the default limit.
const _: () = assert!(MAX_TOKEN_LENGTH + 255 + 64 < MAX_GREETING_LENGTH as usize);
const _: () = assert!(MAX_MESSAGES * 16 + 64 < DEFAULT_MAX_FRAME_LENGTH as usize);
const _: () = assert!(crate::core::MAX_BATCH_MESSAGES * TIMED_OUT_LENGTH + 64 < DEFAULT_MAX_FRAME_LENGTH as usize);

macro_rules! frame_types {
    ($($name:ident = $number:literal, $label:literal;)+) => {
        /// The types of frames. An answer has the number of its request with the highest bit set.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[expect(missing_docs, reason = "the variants of Body with the same names are documented")]
        pub enum FrameType {
            $($name = $number,)+
        }

        impl FrameType {
            /// All types.
            pub const ALL: [FrameType; [$($number,)+].len()] = [$(FrameType::$name,)+];

            /// The type with this number.
            pub const fn from_number(number: u8) -> Option<FrameType> {
                match number {
                    $($number => Some(FrameType::$name),)+
                    _ => None,
                }
            }

            /// The word in the metrics label and in docs/PROTOCOL.md.
            pub const fn as_str(self) -> &'static str {
                match self { $(FrameType::$name => $label,)+ }
            }
        }

        impl Body {
            /// The type of the frame.
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
    /// Chosen by the requester and repeated in the answer; 0 in a Ping or GoAway from a server.
    pub correlation: u32,
    /// Its content.
    pub body: Body,
}

impl Frame {
    /// A frame.
    pub const fn new(correlation: u32, body: Body) -> Frame {
        Frame { correlation, body }
    }
}

/// The content of a frame: one variant a type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// The first frame of a connection.
    Hello(Hello),
    /// Its answer.
    Welcome(Welcome),
    /// Checks whether the peer is alive, from either side; at most [`MAX_PING_LENGTH`] bytes, echoed.
    Ping(Vec<u8>),
    /// Its answer, with the same bytes.
    Pong(Vec<u8>),
    /// The sender will close the connection.
    GoAway {
        /// The reason.
        reason: GoAwayReason,
        /// How long the sender still reads and answers, in ms.
        grace_ms: u32,
    },
    /// Messages that were pushed.
    AddNewMsg {
        /// The messages, 1 to [`MAX_MESSAGES`].
        messages: Vec<Message>,
        /// Ticks that they may stay in flight; 0 for the default, one revolution.
        ack_timeout_ticks: u16,
        /// The timeout batch repeats it.
        attempt: u8,
    },
    /// Its answer.
    AddNewMsgAnswer(AddNewMsgAnswer),
    /// Messages whose Ack arrived, or whose push failed.
    DelMsg {
        /// The messages, 1 to [`MAX_MESSAGES`].
        messages: Vec<Message>,
        /// Whether their push failed at once.
        withdraw: bool,
    },
    /// Its answer: an outcome per message, in order.
    DelMsgAnswer(Vec<DelOutcome>),
    /// Asks for timeout batches.
    Subscribe(Subscribe),
    /// Its answer; batches follow under the same correlation id.
    Subscribed {
        /// The group joined.
        group: String,
        /// Whether it is new.
        created: bool,
    },
    /// A timeout batch, under the correlation id of its Subscribe. Not answered, but acknowledged.
    TimeoutBatch(TimeoutBatch),
    /// Settles batches for the subscription's group; at most [`MAX_BATCH_IDS`].
    BatchAck(Vec<BatchId>),
    /// Its answer: how many of them were not settled before.
    BatchAckAnswer {
        /// Batches settled by this request.
        settled: u32,
    },
    /// Returns a batch to the server.
    BatchNack {
        /// Its id.
        batch: BatchId,
        /// How long the same subscriber does not get it again, in ms.
        delay_ms: u32,
    },
    /// Its answer.
    BatchNackAnswer {
        /// Whether this connection held the batch.
        held: bool,
    },
    /// Deletes a group, by name.
    GroupDelete(String),
    /// Its answer.
    GroupDeleteAnswer,
    /// Why a request was refused, or the connection is closed.
    Error(Error),
}

/// The first frame of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The lowest version of the protocol that the client speaks.
    pub lowest_version: u8,
    /// The highest.
    pub highest_version: u8,
    /// The secret that the server requires; empty if it requires none.
    pub token: Secret,
    /// A name for logs, at most 255 bytes.
    pub client_name: String,
}

/// Bytes that stay out of logs.
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
    /// Slots of the ring: the default and the longest ack timeout.
    pub slots: u16,
    /// Length of a tick in ms.
    pub tick_ms: u32,
    /// The largest length of a frame.
    pub max_frame_length: u32,
    /// The most messages in one AddNewMsg or DelMsg.
    pub max_messages: u32,
    /// The most credit of a subscription.
    pub max_credit: u32,
    /// A peer that is silent for two intervals counts as disconnected.
    pub ping_interval_ms: u32,
    /// The kind of store, at most 255 bytes.
    pub store: String,
    /// The server's name and version, at most 255 bytes.
    pub server_name: String,
}

/// Why a connection will be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum GoAwayReason {
    /// The sender is shutting down.
    Draining = 1,
    /// The sender no longer needs the connection.
    Done = 2,
}

/// Asks for timeout batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscribe {
    /// The group to join; empty for a new ephemeral group.
    pub group: String,
    /// The most messages that the subscriber holds unacknowledged, at least 1.
    pub credit: u32,
    /// Whether the group is deleted with its last member. It begins with the next batch.
    pub ephemeral: bool,
    /// Whether the group, if it is new, begins with the next batch and not with the oldest kept.
    pub from_end: bool,
}

/// Messages of one expired tick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeoutBatch {
    /// Its id, which acknowledges it and identifies duplicates.
    pub id: BatchId,
    /// How often it was delivered to this group, this time included.
    pub delivery_count: u32,
    /// How long ago its tick expired, in ms.
    pub age_ms: u64,
    /// The counts and flags of its tick.
    pub counts: TickCounts,
    /// Whether it is the last of its tick.
    pub last: bool,
    /// The messages that timed out.
    pub messages: Vec<TimedOut>,
}

/// Why a request was refused, or the connection is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The code: a [`Reason`], or one that this build does not know.
    pub code: u16,
    /// The promise about the request.
    pub promise: Promise,
    /// Whether the same request can succeed later or elsewhere.
    pub retryable: bool,
    /// A sentence for humans.
    pub text: String,
}

impl Error {
    /// The reason, if this build knows it.
    pub fn reason(&self) -> Option<Reason> {
        Reason::from_code(self.code)
    }
}
