//! Writes the chunk that one script applies, and reads the script's answer.
//!
//! A chunk has one byte per message, which names the class of the message, and one argument per distinct message. A
//! class is an operation that many messages share. If a message occurs twice, its name is an argument once, and a list
//! of positions refers to the names. So the script need not look for repeats.

use std::collections::HashMap;
use std::fmt::Write as _;

use redis::Cmd;

use crate::core::{Client, Message, Operation, Tick};
use crate::redis::batching::incoming_requests::Frame;
use crate::redis::connection::errors::Fault;
use crate::redis::scripts::Answer;

/// Maximum number of messages in a chunk. Redis needs about a millisecond for them.
pub(crate) const MAX_CHUNK: usize = 1_000;

/// Maximum number of classes in a chunk.
const MAX_CLASSES: usize = 100;

/// This bit marks the first message of a frame.
const BEGINS: u8 = 128;

const _: () = assert!(MAX_CLASSES < BEGINS as usize, "a class is a number below the mark");
const _: () = assert!(MAX_CHUNK <= u16::MAX as usize, "a position is two bytes long");

/// Messages `from..to` of a frame.
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

/// The slices of frames that one script applies.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) number: u64,
    pub(crate) slices: Vec<Slice>,
    /// Whether the chunk had an add when it was sent. The frame of that add may have ended since.
    pub(crate) has_adds: bool,
}

impl Chunk {
    /// Returns the number of messages.
    pub(crate) fn messages(&self) -> usize {
        self.slices.iter().map(Slice::len).sum()
    }
}

/// Writes chunks in the format of the script. Reuses its memory for the next chunk.
#[derive(Default)]
pub(crate) struct ChunkWriter {
    classes: Vec<Operation>,
    /// For each message: the number of its class, from 1, plus the mark if the message is the first of its frame.
    kinds: Vec<u8>,
    /// The position of each message in `names`, from 1.
    named: HashMap<Message, u16, foldhash::fast::RandomState>,
    /// For each message: the position of its name, in two bytes.
    positions: Vec<u8>,
    names: Vec<Message>,
    /// Messages in add frames: all messages of frames that begin in this chunk, and the part in this chunk of a frame
    /// that began earlier.
    to_add: usize,
    /// The add frame that an earlier chunk began and this chunk continues.
    goes_on: Option<u64>,
    /// The add frame that a later chunk continues, and its total number of messages.
    cut: Option<(u64, usize)>,
}

impl ChunkWriter {
    /// Begins a chunk.
    pub(crate) fn clear(&mut self) {
        self.classes.clear();
        self.kinds.clear();
        self.named.clear();
        self.positions.clear();
        self.names.clear();
        (self.to_add, self.goes_on, self.cut) = (0, None, None);
    }

    /// Appends a slice of a frame. Returns false if the chunk would have too many classes.
    pub(crate) fn push(&mut self, slice: Slice, frame: &Frame) -> bool {
        let class = self.classes.iter().rposition(|class| *class == frame.operation).unwrap_or_else(|| {
            self.classes.push(frame.operation);
            self.classes.len() - 1
        });
        if class == MAX_CLASSES {
            self.classes.pop();
            return false;
        }
        let kind = u8::try_from(class + 1).expect("a class is a number below the mark");
        let begins = if slice.from == 0 { BEGINS } else { 0 };
        self.kinds.push(kind | begins);
        self.kinds.resize(self.kinds.len() + slice.len() - 1, kind);
        for message in &frame.messages[slice.from..slice.to] {
            let next = u16::try_from(self.names.len() + 1).expect("a chunk has fewer messages");
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
        // The slices of a frame are adjacent, so only the last frame can be cut.
        self.cut = self.cut.filter(|(frame, messages)| *frame == slice.frame && slice.to < *messages);
        true
    }

    /// Writes the arguments from `ARGV[5]` on.
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
    pub(crate) tick_due: Tick,
    /// One letter per message.
    pub(crate) letters: String,
    /// Comma-separated times in ms: Redis' time, then the time of the add of each acknowledged or withdrawn message.
    pub(crate) times: String,
    /// Messages in flight after this chunk. `None` in an answer that Redis kept.
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

    /// Parses an answer that the script kept: `generation|number|tick due|outcomes|times`. Returns `None` if it is the
    /// answer to another chunk.
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

    /// Returns the times in order.
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
