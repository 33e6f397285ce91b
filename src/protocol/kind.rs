//! The types of frames, by number and by word.

/// The numbers of the types. An answer has the number of its request with the highest bit set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "they are named as the variants of Body that say what they are")]
pub enum FrameType {
    Hello = 0x01,
    Welcome = 0x81,
    Ping = 0x02,
    Pong = 0x82,
    GoAway = 0x03,
    AddNewMsg = 0x10,
    AddNewMsgAnswer = 0x90,
    DelMsg = 0x11,
    DelMsgAnswer = 0x91,
    Subscribe = 0x20,
    Subscribed = 0xa0,
    TimeoutBatch = 0x21,
    BatchAck = 0x22,
    BatchAckAnswer = 0xa2,
    BatchNack = 0x23,
    BatchNackAnswer = 0xa3,
    GroupDelete = 0x24,
    GroupDeleteAnswer = 0xa4,
    Error = 0xff,
}

impl FrameType {
    /// Every type.
    pub const ALL: [FrameType; 19] = [
        FrameType::Hello,
        FrameType::Welcome,
        FrameType::Ping,
        FrameType::Pong,
        FrameType::GoAway,
        FrameType::AddNewMsg,
        FrameType::AddNewMsgAnswer,
        FrameType::DelMsg,
        FrameType::DelMsgAnswer,
        FrameType::Subscribe,
        FrameType::Subscribed,
        FrameType::TimeoutBatch,
        FrameType::BatchAck,
        FrameType::BatchAckAnswer,
        FrameType::BatchNack,
        FrameType::BatchNackAnswer,
        FrameType::GroupDelete,
        FrameType::GroupDeleteAnswer,
        FrameType::Error,
    ];

    /// The type with this number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<FrameType> {
        FrameType::ALL.into_iter().find(|known| *known as u8 == number)
    }

    /// The word of the metrics' label and of docs/PROTOCOL.md.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            FrameType::Hello => "hello",
            FrameType::Welcome => "welcome",
            FrameType::Ping => "ping",
            FrameType::Pong => "pong",
            FrameType::GoAway => "go_away",
            FrameType::AddNewMsg => "add_new_msg",
            FrameType::AddNewMsgAnswer => "add_new_msg_answer",
            FrameType::DelMsg => "del_msg",
            FrameType::DelMsgAnswer => "del_msg_answer",
            FrameType::Subscribe => "subscribe",
            FrameType::Subscribed => "subscribed",
            FrameType::TimeoutBatch => "timeout_batch",
            FrameType::BatchAck => "batch_ack",
            FrameType::BatchAckAnswer => "batch_ack_answer",
            FrameType::BatchNack => "batch_nack",
            FrameType::BatchNackAnswer => "batch_nack_answer",
            FrameType::GroupDelete => "group_delete",
            FrameType::GroupDeleteAnswer => "group_delete_answer",
            FrameType::Error => "error",
        }
    }
}
