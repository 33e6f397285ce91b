//! Parses the AW.* commands.

use std::ops::Range;
use std::time::Duration;

use super::super::frame::MAX_MESSAGES;
use crate::core::{BatchId, GroupName, GroupNameError, Message, Operation, Reason, Refusal};

/// The maximum number of batches of an AW.TAKE.
const MAX_TAKEN: u32 = 16;

/// The maximum number of batches of an AW.ACK or AW.NACK.
const MAX_BATCHES: usize = 4_096;

/// The arguments of a command, with its name.
#[derive(Clone, Copy)]
pub struct Arguments<'a> {
    /// The bytes of the command.
    pub bytes: &'a [u8],
    /// The place of each argument in these bytes.
    pub ranges: &'a [Range<usize>],
}

impl<'a> Arguments<'a> {
    /// Returns the number of arguments, with the name.
    pub fn count(self) -> usize {
        self.ranges.len()
    }

    /// Returns the argument with this index, where 0 is the name.
    pub fn get(self, index: usize) -> Option<&'a [u8]> {
        self.ranges.get(index).map(|range| &self.bytes[range.clone()])
    }

    /// Returns whether the argument is this word, in upper or lower case.
    pub fn is(self, index: usize, word: &str) -> bool {
        self.get(index).is_some_and(|argument| argument.eq_ignore_ascii_case(word.as_bytes()))
    }

    /// Returns the arguments from this index on.
    pub fn from(self, index: usize) -> impl ExactSizeIterator<Item = &'a [u8]> + Clone {
        self.ranges[index.min(self.count())..].iter().map(move |range| &self.bytes[range.clone()])
    }
}

/// A command of ackwheel.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// AW.ADD and AW.DEL. The messages are in the vector that was passed.
    Requests(Operation),
    /// AW.GET. The messages are in the vector that was passed.
    Get,
    /// AW.TAKE, AW.ACK and AW.NACK.
    Delivery(DeliveryCommand),
    /// AW.STATUS.
    Status,
}

/// A command about the batches of a group.
#[derive(Debug, PartialEq, Eq)]
pub enum DeliveryCommand {
    /// AW.TAKE.
    Take(Take),
    /// AW.ACK.
    Ack {
        /// The group that settles the batches.
        group: GroupName,
        /// The batches.
        batches: Vec<BatchId>,
    },
    /// AW.NACK.
    Nack {
        /// The group to which the batches go back.
        group: GroupName,
        /// How long the same connection does not get them again.
        delay: Duration,
        /// The batches.
        batches: Vec<BatchId>,
    },
}

/// The parameters of an AW.TAKE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Take {
    /// The group.
    pub group: GroupName,
    /// The maximum number of batches.
    pub count: u32,
    /// How long to wait for the first batch; `None` to answer at once.
    pub wait: Option<Wait>,
    /// Whether the batches are detached from the connection.
    pub keep: bool,
}

/// How long an AW.TAKE waits for its first batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// So long.
    AtMost(Duration),
    /// Until there is a batch.
    Forever,
}

/// How a command is written.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// The name, in upper case.
    pub name: &'static str,
    /// The arguments, as `redis-cli` shows them.
    pub arguments: &'static str,
    /// One line about the command and its reply.
    pub summary: &'static str,
    /// The least number of arguments with the name.
    pub least: usize,
}

/// The commands of ackwheel.
pub const COMMANDS: [Usage; 7] = [
    Usage {
        name: "AW.ADD",
        arguments: "[TIMEOUT ticks] [ATTEMPT n] message [message ...]",
        summary: "Adds messages that are being pushed. Replies [added, rearmed, deadline tick].",
        least: 2,
    },
    Usage {
        name: "AW.DEL",
        arguments: "[WITHDRAW] message [message ...]",
        summary: "Acknowledges messages. Replies acked, late, unknown, withdrawn or held for each.",
        least: 2,
    },
    Usage {
        name: "AW.GET",
        arguments: "message [message ...]",
        summary: "Reads messages. Replies [in_flight | late | unknown, deadline tick, remaining ms, attempt] for each.",
        least: 2,
    },
    Usage {
        name: "AW.TAKE",
        arguments: "group [COUNT n] [BLOCK ms] [KEEP]",
        summary: "Takes timeout batches: [[batch, delivery, messages, attempts, age ms, added, acked, flags], ...].",
        least: 2,
    },
    Usage {
        name: "AW.ACK",
        arguments: "group batch [batch ...]",
        summary: "Settles batches for the group. Replies how many were not settled before.",
        least: 3,
    },
    Usage {
        name: "AW.NACK",
        arguments: "group delay_ms batch [batch ...]",
        summary: "Returns batches to the group. Replies how many went back.",
        least: 4,
    },
    Usage {
        name: "AW.STATUS",
        arguments: "",
        summary: "Replies the status of the sidecar as JSON, as GET /status does.",
        least: 1,
    },
];

impl Usage {
    /// Finds a command of ackwheel by its name, in upper or lower case.
    pub fn find(name: &[u8]) -> Option<&'static Usage> {
        COMMANDS.iter().find(|usage| name.eq_ignore_ascii_case(usage.name.as_bytes()))
    }

    fn malformed(&self, text: &str) -> Refusal {
        let Usage { name, arguments, .. } = self;
        Refusal::new(Reason::MalformedRequest, format!("{text}: write {name} {arguments}"))
    }

    /// Parses the arguments. Puts the messages of AW.ADD, AW.DEL and AW.GET into `messages`, which must be empty.
    ///
    /// # Errors
    ///
    /// If an argument is missing or wrong. The text says what to write.
    pub fn parse(&self, arguments: Arguments<'_>, messages: &mut Vec<Message>) -> Result<Command, Refusal> {
        match self.name {
            "AW.ADD" => self.add(arguments, messages),
            "AW.DEL" => {
                let withdraw = arguments.is(1, "WITHDRAW");
                self.messages(arguments, 1 + usize::from(withdraw), messages)?;
                Ok(Command::Requests(Operation::Del { withdraw }))
            }
            "AW.GET" => self.messages(arguments, 1, messages).map(|()| Command::Get),
            _ if arguments.count() < self.least => Err(self.malformed("arguments are missing")),
            "AW.TAKE" => self.take(arguments),
            "AW.ACK" => {
                let (group, batches) = (group(arguments)?, self.batches(arguments, 2)?);
                Ok(Command::Delivery(DeliveryCommand::Ack { group, batches }))
            }
            "AW.NACK" => {
                let delay =
                    number::<u32>(arguments.get(2)).ok_or_else(|| self.malformed("delay_ms is a number"))?;
                let delay = Duration::from_millis(delay.into());
                let (group, batches) = (group(arguments)?, self.batches(arguments, 3)?);
                Ok(Command::Delivery(DeliveryCommand::Nack { group, delay, batches }))
            }
            _ if arguments.count() > 1 => Err(self.malformed("it has no arguments")),
            _ => Ok(Command::Status),
        }
    }

    fn add(&self, arguments: Arguments<'_>, messages: &mut Vec<Message>) -> Result<Command, Refusal> {
        let (mut ack_timeout_ticks, mut attempt, mut next) = (0, 1, 1);
        while let Some(option) = arguments.get(next).filter(|option| !begins_with_digit(option)) {
            let value = arguments.get(next + 1);
            if arguments.is(next, "TIMEOUT") {
                let ticks = number::<u64>(value).ok_or_else(|| self.malformed("TIMEOUT is a number of ticks"))?;
                if ticks == 0 {
                    let text = "an ack timeout of 0 ticks is not possible: ask for 1 or more, or none";
                    return Err(Refusal::new(Reason::BadAckTimeout, text));
                }
                // The ring refuses more ticks than it has slots.
                ack_timeout_ticks = u16::try_from(ticks).unwrap_or(u16::MAX);
            } else if arguments.is(next, "ATTEMPT") {
                let legal = number::<u8>(value).filter(|attempt| *attempt > 0);
                attempt = legal.ok_or_else(|| self.malformed("ATTEMPT is a number from 1 to 255"))?;
            } else {
                return Err(self.malformed(&format!("{} is no option and no message", quoted(option))));
            }
            next += 2;
        }
        self.messages(arguments, next, messages)?;
        Ok(Command::Requests(Operation::Add { ack_timeout_ticks, attempt }))
    }

    /// Parses all arguments from `first` on as messages.
    fn messages(
        &self,
        arguments: Arguments<'_>,
        first: usize,
        messages: &mut Vec<Message>,
    ) -> Result<(), Refusal> {
        let count = arguments.count().saturating_sub(first);
        if !(1..=MAX_MESSAGES).contains(&count) {
            let Usage { name, arguments, .. } = self;
            let text =
                format!("{count} messages are not possible, 1 to {MAX_MESSAGES} are: write {name} {arguments}");
            return Err(Refusal::new(Reason::BadCount, text));
        }
        for argument in arguments.from(first) {
            let Some(message) = message(argument) else {
                return Err(self.malformed(&format!(
                    "{} is no message, which is id or id:client, as in 101 or 101:7",
                    quoted(argument)
                )));
            };
            messages.push(message);
        }
        Ok(())
    }

    fn take(&self, arguments: Arguments<'_>) -> Result<Command, Refusal> {
        let (mut count, mut wait, mut keep, mut next) = (1, None, false, 2);
        while let Some(option) = arguments.get(next) {
            if arguments.is(next, "KEEP") {
                keep = true;
                next += 1;
                continue;
            }
            let value = arguments.get(next + 1);
            if arguments.is(next, "COUNT") {
                let legal = number(value).filter(|count| (1..=MAX_TAKEN).contains(count));
                count =
                    legal.ok_or_else(|| self.malformed(&format!("COUNT is a number from 1 to {MAX_TAKEN}")))?;
            } else if arguments.is(next, "BLOCK") {
                let ms =
                    number::<u32>(value).ok_or_else(|| self.malformed("BLOCK is a number of milliseconds"))?;
                wait = Some(match ms {
                    0 => Wait::Forever,
                    ms => Wait::AtMost(Duration::from_millis(ms.into())),
                });
            } else {
                return Err(self.malformed(&format!("{} is no option", quoted(option))));
            }
            next += 2;
        }
        Ok(Command::Delivery(DeliveryCommand::Take(Take { group: group(arguments)?, count, wait, keep })))
    }

    fn batches(&self, arguments: Arguments<'_>, first: usize) -> Result<Vec<BatchId>, Refusal> {
        let count = arguments.count() - first;
        if count > MAX_BATCHES {
            let text = format!("{count} batches are too many: send at most {MAX_BATCHES} in one {}", self.name);
            return Err(Refusal::new(Reason::BadCount, text));
        }
        let batch = |argument: &[u8]| {
            let batch = std::str::from_utf8(argument).ok().and_then(|text| text.parse().ok());
            batch.ok_or_else(|| {
                self.malformed(&format!("{} is no batch id, which AW.TAKE returned", quoted(argument)))
            })
        };
        let mut batches = arguments.from(first).map(batch).collect::<Result<Vec<_>, _>>()?;
        batches.shrink_to_fit();
        Ok(batches)
    }
}

/// Parses the first argument as the name of a group.
fn group(arguments: Arguments<'_>) -> Result<GroupName, Refusal> {
    let name = String::from_utf8_lossy(arguments.get(1).unwrap_or_default());
    name.parse().map_err(|error: GroupNameError| Refusal::new(Reason::BadGroupName, error.to_string()))
}

/// Returns an argument for the text of an error: shortened, and without control characters.
pub fn quoted(argument: &[u8]) -> String {
    const LONGEST: usize = 64;
    let shown = &argument[..argument.len().min(LONGEST)];
    let dots = if shown.len() < argument.len() { "…" } else { "" };
    format!("'{}{dots}'", String::from_utf8_lossy(shown).replace(char::is_control, "?"))
}

fn begins_with_digit(argument: &[u8]) -> bool {
    argument.first().is_some_and(u8::is_ascii_digit)
}

fn number<N: TryFrom<u64>>(argument: Option<&[u8]>) -> Option<N> {
    let (number, rest) = leading_number(argument?)?;
    if rest.is_empty() { N::try_from(number).ok() } else { None }
}

/// Parses `id` or `id:client`.
fn message(argument: &[u8]) -> Option<Message> {
    let (id, rest) = leading_number(argument)?;
    let Some(client) = rest.strip_prefix(b":") else {
        return rest.is_empty().then(|| Message::from(id));
    };
    match leading_number(client)? {
        (client, []) => Some(Message::new(id, client)),
        _ => None,
    }
}

/// Parses the digits at the front of `text`, of which there must be one or more. Also returns the rest.
fn leading_number(text: &[u8]) -> Option<(u64, &[u8])> {
    let (mut number, mut length) = (0_u64, 0);
    for byte in text {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        number = number.checked_mul(10)?.checked_add(digit.into())?;
        length += 1;
    }
    if length == 0 { None } else { Some((number, &text[length..])) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Tick;

    fn parse(line: &str) -> Result<(Command, Vec<Message>), String> {
        let mut ranges = Vec::new();
        for word in line.split(' ') {
            let begin = word.as_ptr() as usize - line.as_ptr() as usize;
            ranges.push(begin..begin + word.len());
        }
        let arguments = Arguments { bytes: line.as_bytes(), ranges: &ranges };
        let usage = Usage::find(arguments.get(0).unwrap()).expect("a command of ackwheel");
        let mut messages = Vec::new();
        let command = usage.parse(arguments, &mut messages);
        command.map(|command| (command, messages)).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn commands_are_parsed_in_upper_and_lower_case() {
        let add = |ack_timeout_ticks, attempt| Command::Requests(Operation::Add { ack_timeout_ticks, attempt });
        let del = |withdraw| Command::Requests(Operation::Del { withdraw });
        let group = GroupName::default_group;
        let batch = BatchId { ring: 3, epoch: 1_700_000_000_000, tick: Tick(42), seq: 7 };
        let take = |count, wait, keep| {
            Command::Delivery(DeliveryCommand::Take(Take { group: group(), count, wait, keep }))
        };
        for (line, command, messages) in [
            ("AW.ADD 101:7 102", add(0, 1), vec![Message::new(101, 7), Message::from(102)]),
            ("aw.add attempt 3 TIMEOUT 5 000000000101:00", add(5, 3), vec![Message::from(101)]),
            ("AW.ADD TIMEOUT 70000 1", add(u16::MAX, 1), vec![Message::from(1)]),
            ("AW.DEL 18446744073709551615", del(false), vec![Message::from(u64::MAX)]),
            ("AW.DEL withdraw 1:2", del(true), vec![Message::new(1, 2)]),
            ("aw.get 1:2 3", Command::Get, vec![Message::new(1, 2), Message::from(3)]),
            ("AW.TAKE default", take(1, None, false), vec![]),
            ("AW.TAKE default KEEP BLOCK 0 COUNT 16", take(16, Some(Wait::Forever), true), vec![]),
            ("AW.TAKE default block 2000", take(1, Some(Wait::AtMost(Duration::from_secs(2))), false), vec![]),
            (
                "AW.ACK default 3-1700000000000-42-7",
                Command::Delivery(DeliveryCommand::Ack { group: group(), batches: vec![batch] }),
                vec![],
            ),
            (
                "AW.NACK default 500 3-1700000000000-42-7",
                Command::Delivery(DeliveryCommand::Nack {
                    group: group(),
                    delay: Duration::from_millis(500),
                    batches: vec![batch],
                }),
                vec![],
            ),
            ("aw.status", Command::Status, vec![]),
        ] {
            assert_eq!(parse(line), Ok((command, messages)), "{line}");
        }
    }

    #[test]
    fn each_error_says_what_to_write() {
        for (line, expected) in [
            ("AW.ADD", "0 messages are not possible, 1 to 32768 are: write AW.ADD [TIMEOUT ticks]"),
            ("AW.ADD TIMEOUT 5", "0 messages are not possible"),
            ("AW.ADD TIMEOUT x 1", "TIMEOUT is a number of ticks: write AW.ADD"),
            ("AW.ADD TIMEOUT 0 1", "an ack timeout of 0 ticks is not possible: ask for 1 or more, or none"),
            ("AW.ADD ATTEMPT 0 1", "ATTEMPT is a number from 1 to 255: write AW.ADD"),
            ("AW.ADD ATTEMPT 256 1", "ATTEMPT is a number from 1 to 255"),
            ("AW.ADD NX 1", "'NX' is no option and no message: write AW.ADD"),
            ("AW.ADD 1 TIMEOUT 5", "'TIMEOUT' is no message"),
            ("AW.DEL -1", "'-1' is no message, which is id or id:client, as in 101 or 101:7: write AW.DEL"),
            ("AW.DEL 1:", "'1:' is no message"),
            ("AW.DEL 1:2:3", "'1:2:3' is no message"),
            ("AW.DEL 18446744073709551616", "'18446744073709551616' is no message"),
            ("AW.GET", "0 messages are not possible, 1 to 32768 are: write AW.GET message"),
            ("AW.GET WITHDRAW 1", "'WITHDRAW' is no message"),
            ("AW.TAKE", "arguments are missing: write AW.TAKE group [COUNT n] [BLOCK ms] [KEEP]"),
            ("AW.TAKE a/b", "\"a/b\" is not a group name"),
            ("AW.TAKE default COUNT 17", "COUNT is a number from 1 to 16"),
            ("AW.TAKE default COUNT", "COUNT is a number from 1 to 16"),
            ("AW.TAKE default BLOCK 2s", "BLOCK is a number of milliseconds"),
            ("AW.TAKE default 5", "'5' is no option"),
            ("AW.ACK default", "arguments are missing: write AW.ACK group batch [batch ...]"),
            ("AW.ACK default 1-2-3", "'1-2-3' is no batch id"),
            ("AW.NACK default 1-2-3-4", "arguments are missing"),
            ("AW.NACK default soon 1-2-3-4", "delay_ms is a number"),
            ("AW.STATUS now", "it has no arguments"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
