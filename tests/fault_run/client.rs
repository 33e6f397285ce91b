//! The client of a load generator, which speaks one of the two protocols.

use std::time::Duration;

use super::peer::Peer;
use super::resp_peer::RespPeer;
use crate::support::frames::{self, ACKED, Frame, LATE, OUTCOME_UNKNOWN, RETRYABLE, UNKNOWN, WITHDRAWN};
use crate::support::resp::{Reply, command};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Native,
    Resp,
}

/// A request for some messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Add { ack_timeout_ticks: u16, attempt: u8 },
    Del { withdraws: bool },
}

/// The outcome of a DelMsg for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    Done,
    Late,
    Unknown,
    /// The Ack is held: whether it was in time is not known.
    Held,
}

#[derive(Debug)]
pub enum Answered {
    /// The deadline, and for each message whether it was in flight before.
    Added {
        deadline: u64,
        rearmed: Vec<bool>,
    },
    Deleted(Vec<Deleted>),
    Refused,
    /// No answer, or one that does not say what was applied.
    Unclear,
}

/// The answer to a request, and for how many messages it was made.
pub type Part = (usize, Answered);

/// The errors of the RESP listener by which nothing was applied, and the same command can succeed later.
const RETRYABLE_CODES: [&str; 8] = [
    "CONNECTION_MEMORY",
    "DRAINING",
    "MAX_HELD_ACKS",
    "MAX_IN_FLIGHT",
    "SLOW_READER",
    "STARTING",
    "STORE_AWAY",
    "STORE_SILENT",
];

pub enum Client {
    Native(Peer),
    Resp(RespPeer),
}

impl Client {
    /// Asks for messages, in one request or, in RESP, in one for each; what comes back is in the order of the messages.
    pub fn ask(
        &mut self,
        question: Question,
        ids: &[u64],
        is_pipelined: bool,
        patience: Duration,
        is_reached: impl Fn() -> bool,
    ) -> Vec<Part> {
        match self {
            Client::Native(peer) => {
                let request = match question {
                    Question::Add { ack_timeout_ticks, attempt } => frames::add(ids, ack_timeout_ticks, attempt),
                    Question::Del { withdraws: true } => frames::withdraw(ids),
                    Question::Del { withdraws: false } => frames::del(ids),
                };
                vec![(ids.len(), of_frame(question, peer.ask_while(&request, patience, is_reached)))]
            }
            Client::Resp(peer) => {
                let size = if is_pipelined { 1 } else { ids.len() };
                let commands: Vec<Vec<u8>> = ids.chunks(size).map(|ids| command_of(question, ids)).collect();
                let replies = peer.ask(&commands, patience, is_reached).into_iter().map(Some);
                let replies = replies.chain(std::iter::repeat(None));
                ids.chunks(size).zip(replies).map(|(ids, reply)| (ids.len(), of_reply(question, reply))).collect()
            }
        }
    }

    /// Whether the connection can be asked again.
    pub fn goes_on(&self) -> bool {
        match self {
            Client::Native(peer) => !peer.is_over,
            Client::Resp(peer) => !peer.is_over,
        }
    }
}

/// An Error must be a retryable one.
fn of_frame(question: Question, frame: Option<Frame>) -> Answered {
    let Some(frame) = frame else { return Answered::Unclear };
    if frame.kind == frames::ERROR {
        assert_eq!(frame.flags & RETRYABLE, RETRYABLE, "{frame:?}");
        return if frame.flags & OUTCOME_UNKNOWN == 0 { Answered::Refused } else { Answered::Unclear };
    }
    let Question::Del { withdraws } = question else {
        let (deadline, rearmed) = frame.added();
        return Answered::Added { deadline, rearmed };
    };
    let outcome = |outcome: u8| match outcome {
        ACKED if !withdraws => Deleted::Done,
        WITHDRAWN if withdraws => Deleted::Done,
        LATE => Deleted::Late,
        UNKNOWN => Deleted::Unknown,
        other => panic!("an outcome that was not asked for: {other}"),
    };
    Answered::Deleted(frame.outcomes().iter().copied().map(outcome).collect())
}

fn command_of(question: Question, ids: &[u64]) -> Vec<u8> {
    let mut arguments: Vec<String> = match question {
        Question::Add { ack_timeout_ticks, attempt } => {
            ["AW.ADD", "TIMEOUT", &ack_timeout_ticks.to_string(), "ATTEMPT", &attempt.to_string()]
                .map(String::from)
                .into()
        }
        Question::Del { withdraws: true } => ["AW.DEL", "WITHDRAW"].map(String::from).into(),
        Question::Del { withdraws: false } => vec![String::from("AW.DEL")],
    };
    arguments.extend(ids.iter().map(u64::to_string));
    command(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

fn of_reply(question: Question, reply: Option<Reply>) -> Answered {
    let reply = match reply {
        None => return Answered::Unclear,
        Some(Reply::Error(text)) => {
            let code = text.split(' ').next().unwrap_or_default();
            assert!(RETRYABLE_CODES.contains(&code), "{text}");
            return match &text[code.len()..] {
                rest if rest.starts_with(" not applied: ") => Answered::Refused,
                rest if rest.starts_with(" outcome unknown: ") => Answered::Unclear,
                _ => panic!("what was applied is not said: {text}"),
            };
        }
        Some(reply) => reply,
    };
    let Question::Del { withdraws } = question else {
        let numbers: Vec<u64> =
            reply.array().iter().map(|number| number.integer().try_into().expect("not negative")).collect();
        let [added, rearmed, deadline] = numbers[..] else { panic!("no answer to AW.ADD: {numbers:?}") };
        let all = usize::try_from(added + rearmed).expect("few messages");
        // Of more messages than one it is not known which of them were in flight before.
        return match (added, rearmed) {
            (_, 0) => Answered::Added { deadline, rearmed: vec![false; all] },
            (0, _) => Answered::Added { deadline, rearmed: vec![true; all] },
            _ => Answered::Unclear,
        };
    };
    let outcome = |outcome: &str| match outcome {
        "acked" if !withdraws => Deleted::Done,
        "withdrawn" if withdraws => Deleted::Done,
        "late" => Deleted::Late,
        "unknown" => Deleted::Unknown,
        "held" => Deleted::Held,
        other => panic!("an outcome that was not asked for: {other}"),
    };
    Answered::Deleted(reply.texts().into_iter().map(outcome).collect())
}
