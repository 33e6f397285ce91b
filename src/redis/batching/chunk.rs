//! Writes a chunk as arguments of the script `apply`, and reads the answer of the script.
//!
//! A *frame* is one request: an add or a del of one or more messages. A *chunk* is the part of all waiting frames that
//! one script applies. A *slice* is the part of a frame in a chunk. A *class* is an operation, for example an add with
//! a certain ack timeout, that many messages share. For each message, a chunk has one byte: the number of the message's
//! class. A chunk also has the names of its messages, each name once. If a message occurs twice, the chunk refers to
//! the names by position, so that the script need not search for repeated messages.

use std::collections::HashMap;
use std::fmt::Write as _;

use redis::Cmd;

use crate::core::{Client, Message, Operation, RandomHasher, Tick};
use crate::redis::batching::incoming_requests::Frame;
use crate::redis::connection::errors::Fault;
use crate::redis::scripts::Answer;

/// Maximum number of messages in a chunk. Redis needs about a millisecond for this number.
pub(crate) const MAX_CHUNK: usize = 1_000;

/// Maximum number of classes in a chunk, so that the number of a class fits below [`BEGINS`].
const MAX_CLASSES: usize = 100;

/// The bit that marks the first message of a frame, in the byte with the number of its class.
const BEGINS: u8 = 128;

const _: () = assert!(MAX_CLASSES < BEGINS as usize, "the number of a class is below BEGINS");
const _: () = assert!(MAX_CHUNK <= u16::MAX as usize, "a position fits in two bytes");

/// Messages `from..to` of the frame with the number `frame`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    pub(crate) frame: u64,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Slice {
    pub(crate) fn len(&self) -> usize {
        self.to - self.from
    }
}

/// The slices that one script applies together. Redis applies chunks in the order of their numbers.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) number: u64,
    pub(crate) slices: Vec<Slice>,
    /// Decides how an out-of-memory error is handled. With an add, the adds are refused, and the dels are sent again.
    /// Without an add, the whole chunk is refused. True if the chunk had an add when it was sent, even if that add is
    /// answered now.
    pub(crate) has_adds: bool,
}

impl Chunk {
    /// Returns the number of messages in all slices.
    pub(crate) fn messages(&self) -> usize {
        self.slices.iter().map(Slice::len).sum()
    }
}

/// A writer for the arguments of a chunk. Reuses its memory for the next chunk.
#[derive(Default)]
pub(crate) struct ChunkWriter {
    classes: Vec<Operation>,
    /// For each message: the number of its class, from 1, plus [`BEGINS`] if the message is the first of its frame.
    kinds: Vec<u8>,
    /// The position of each message in `names`, from 1.
    named: HashMap<Message, u16, RandomHasher>,
    /// For each message: the position of its name, in two bytes.
    positions: Vec<u8>,
    names: Vec<Message>,
    /// Number of messages to add. If so many fit into the limit of messages in flight, the script skips the check of
    /// each frame. A frame that begins here counts with all its messages, another only with those in this chunk.
    to_add: usize,
    /// The number of the add frame that began in an earlier chunk and continues in this one. If the script refused the
    /// earlier part, it also refuses this part.
    goes_on: Option<u64>,
    /// The add frame that begins in this chunk and continues in the next one: its number, and its total number of
    /// messages.
    cut: Option<(u64, usize)>,
}

impl ChunkWriter {
    /// Removes the previous chunk, and begins an empty one.
    pub(crate) fn clear(&mut self) {
        self.classes.clear();
        self.kinds.clear();
        self.named.clear();
        self.positions.clear();
        self.names.clear();
        (self.to_add, self.goes_on, self.cut) = (0, None, None);
    }

    /// Appends a slice of `frame`. If the chunk would have too many classes, appends nothing and returns false.
    pub(crate) fn push(&mut self, slice: Slice, frame: &Frame) -> bool {
        let class = self.classes.iter().rposition(|class| *class == frame.operation).unwrap_or_else(|| {
            self.classes.push(frame.operation);
            self.classes.len() - 1
        });
        if class == MAX_CLASSES {
            self.classes.pop();
            return false;
        }
        let kind = u8::try_from(class + 1).expect("the number of a class is below BEGINS");
        let begins = if slice.from == 0 { BEGINS } else { 0 };
        self.kinds.push(kind | begins);
        self.kinds.resize(self.kinds.len() + slice.len() - 1, kind);
        for message in &frame.messages[slice.from..slice.to] {
            let next = u16::try_from(self.names.len() + 1).expect("a position fits in two bytes");
            let position = *self.named.entry(*message).or_insert(next);
            if position == next {
                self.names.push(*message);
            }
            self.positions.extend_from_slice(&position.to_be_bytes());
        }
        if frame.is_add() && slice.from == 0 {
            self.to_add += frame.messages.len();
            self.cut = Some((slice.frame, frame.messages.len()));
        } else if frame.is_add() {
            if self.to_add == 0 {
                self.goes_on = Some(slice.frame);
            }
            self.to_add += slice.len();
        }
        // The slices of a frame follow each other in the queue, so only the last frame of a chunk can continue in the
        // next one.
        self.cut = self.cut.filter(|(frame, messages)| *frame == slice.frame && slice.to < *messages);
        true
    }

    /// Appends the arguments `ARGV[5]` and later ones to the call. The header of `apply.lua` describes them.
    pub(crate) fn write(&self, call: &mut Cmd) {
        let mut text = String::new();
        for class in &self.classes {
            // Writing to a string does not fail.
            let _ = match class {
                Operation::Add { ack_timeout_ticks, attempt } => write!(text, "a {ack_timeout_ticks} {attempt} "),
                Operation::Del { withdraw: false } => write!(text, "d 0 0 "),
                Operation::Del { withdraw: true } => write!(text, "w 0 0 "),
            };
        }
        let has_repeats = self.names.len() < self.kinds.len();
        let (cut, cut_messages) = self.cut.unzip();
        let name = |frame: Option<u64>| frame.map_or(String::new(), |name| name.to_string());
        call.arg(self.to_add).arg(text).arg(&self.kinds[..]);
        call.arg(if has_repeats { &self.positions[..] } else { &[] });
        call.arg(name(self.goes_on)).arg(name(cut)).arg(cut_messages.unwrap_or_default());
        for message in &self.names {
            if message.client == Client(0) {
                call.arg(message.msg_id.0);
            } else {
                call.arg(message.to_string());
            }
        }
    }
}

/// The answer of the script to a chunk.
#[derive(Debug)]
pub(crate) struct Applied {
    /// The tick to which the script added the ack timeouts.
    pub(crate) tick_due: Tick,
    /// The outcomes: one letter for each message of the chunk. The header of `apply.lua` lists the letters.
    pub(crate) letters: String,
    /// Comma-separated times in ms: Redis' time, then for each message with the letter `k`, `w` or `l` the time of its
    /// add.
    pub(crate) times: String,
    /// Number of messages in flight after this chunk, for the text of a refusal. `None` if the answer was read from the
    /// Redis key `link`, because the answer that is stored there does not contain this number.
    pub(crate) in_flight: Option<u64>,
}

impl Applied {
    pub(crate) fn read(answer: &mut Answer) -> Result<Applied, Fault> {
        let word = answer.text()?;
        if word != "ok" {
            return Err(answer.strange(&word));
        }
        let (tick_due, letters, times) = (Tick(answer.count()?), answer.text()?, answer.text()?);
        Ok(Applied { tick_due, letters, times, in_flight: Some(answer.count()?) })
    }

    /// Parses an answer that the script stored in the Redis key `link`: `generation|number|tick due|outcomes|times`.
    /// Returns `None` if the answer belongs to another chunk. The generation of the connection and the number of the
    /// chunk identify a chunk.
    pub(crate) fn parse(text: &str, generation: i64, number: u64) -> Option<Applied> {
        let mut parts = text.split('|');
        let is_of_chunk = parts.next()?.parse() == Ok(generation) && parts.next()?.parse() == Ok(number);
        is_of_chunk.then_some(())?;
        Some(Applied {
            tick_due: Tick(parts.next()?.parse().ok()?),
            letters: parts.next()?.to_owned(),
            times: parts.next()?.to_owned(),
            in_flight: None,
        })
    }

    /// Returns an iterator over `times`. A time that is not a number becomes 0.
    pub(crate) fn times(&self) -> impl Iterator<Item = u64> {
        self.times.split(',').map(|ms| ms.parse().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_to_a_chunk_of_another_generation_is_not_taken() {
        for (answer, is_taken) in [("9|5|7|k|6,5", true), ("8|5|7|k|6,5", false), ("9|3|7|k|6,5", false)] {
            let parsed = Applied::parse(answer, 9, 5);
            assert_eq!(parsed.is_some(), is_taken, "{answer}");
            let expected = (Tick(7), "k", vec![6, 5]);
            assert!(
                parsed.is_none_or(|it| (it.tick_due, &*it.letters, it.times().collect::<Vec<_>>()) == expected)
            );
        }
    }
}
