//! What one script carries, and how the script reads it.
//!
//! A message is a byte of what is done with it and an argument with its name; everything that many messages share
//! is said once. A message that occurs twice in a chunk is named once, and a list of positions says where it
//! belongs, so that the script need not look for repeats.

use std::collections::HashMap;
use std::fmt::Write as _;

use redis::Cmd;

use crate::core::message::{Client, Message};
use crate::core::request_batch::Operation;
use crate::redis::batching::frames::{Frame, Frames};

/// The most messages that one script carries: about a millisecond of Redis' time.
pub(crate) const MAX_CHUNK: usize = 1_000;

/// The most different things that one script does with its messages.
const MAX_CLASSES: usize = 100;

/// Marks the first message of a frame.
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

/// What one script carries.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) number: u64,
    pub(crate) slices: Vec<Slice>,
    /// Whether it was made with an add, as the script is told; its frame may have ended since.
    pub(crate) has_adds: bool,
}

impl Chunk {
    /// How many it carries.
    pub(crate) fn messages(&self) -> usize {
        self.slices.iter().map(|slice| slice.to - slice.from).sum()
    }
}

/// Writes chunks as the script reads them. What it needs for that is kept from one to the next.
#[derive(Default)]
pub(crate) struct Writer {
    classes: Vec<Operation>,
    /// For each message: the number of its class, from 1, and whether its frame begins with it.
    kinds: Vec<u8>,
    /// Where each message is named.
    named: HashMap<Message, u16, foldhash::fast::RandomState>,
    /// For each message: where it is named, from 1, in two bytes.
    positions: Vec<u8>,
    names: Vec<Message>,
    text: String,
}

/// Of the frames of adds in a chunk.
#[derive(Default)]
struct Bounds {
    /// Messages of those that begin in it, whole, and of one that goes on, as far as they are in it.
    to_add: usize,
    /// The frame that goes on at the beginning.
    goes_on: Option<u64>,
    /// The frame that does not end in it, and its messages.
    cut: Option<(u64, usize)>,
}

impl Writer {
    /// Begins a chunk.
    pub(crate) fn begin(&mut self) {
        self.classes.clear();
        self.kinds.clear();
        self.named.clear();
        self.positions.clear();
        self.names.clear();
    }

    /// Whether there is a class for one more frame, which is then entered.
    pub(crate) fn admit(&mut self, operation: Operation) -> Option<u8> {
        let is_known = self.classes.iter().rposition(|class| *class == operation);
        let index = is_known.unwrap_or(self.classes.len());
        if index == MAX_CLASSES {
            return None;
        }
        if is_known.is_none() {
            self.classes.push(operation);
        }
        u8::try_from(index + 1).ok()
    }

    /// Notes what is done with the messages of a slice.
    pub(crate) fn push<'a>(&mut self, class: u8, begins: bool, messages: impl Iterator<Item = &'a Message>) {
        let first = self.kinds.len();
        for message in messages {
            self.kinds.push(class);
            let next = u16::try_from(self.names.len() + 1).expect("a chunk has fewer messages");
            let position = *self.named.entry(*message).or_insert(next);
            if position == next {
                self.names.push(*message);
            }
            self.positions.extend_from_slice(&position.to_be_bytes());
        }
        if begins && let Some(kind) = self.kinds.get_mut(first) {
            *kind |= BEGINS;
        }
    }

    /// Room that the arguments of a chunk need: their number, and their bytes.
    pub(crate) fn room(&self) -> (usize, usize) {
        (16 + self.names.len(), 128 + 23 * self.names.len() + 3 * self.kinds.len())
    }

    /// Writes the arguments from the fifth on.
    pub(crate) fn write(&mut self, chunk: &Chunk, frames: &Frames, call: &mut Cmd) {
        let Bounds { to_add, goes_on, cut } = bounds(chunk, frames);
        call.arg(to_add);
        self.text.clear();
        for class in &self.classes {
            // Writing to a string does not fail.
            let _ = match class {
                Operation::Add { ack_timeout_ticks, attempt } => {
                    write!(self.text, "a {ack_timeout_ticks} {attempt} ")
                }
                Operation::Del { withdraw: false } => write!(self.text, "d 0 0 "),
                Operation::Del { withdraw: true } => write!(self.text, "w 0 0 "),
            };
        }
        call.arg(&self.text).arg(&self.kinds[..]);
        let has_repeats = self.names.len() < self.kinds.len();
        call.arg(if has_repeats { &self.positions[..] } else { &[] });
        call.arg(goes_on.map_or(String::new(), |name| name.to_string()));
        let (name, messages) = cut.map_or((String::new(), 0), |(name, messages)| (name.to_string(), messages));
        call.arg(name).arg(messages);
        for message in &self.names {
            if message.client == Client(0) {
                call.arg(message.msg_id.0);
            } else {
                self.text.clear();
                let _ = write!(self.text, "{message}");
                call.arg(&self.text);
            }
        }
    }
}

fn bounds(chunk: &Chunk, frames: &Frames) -> Bounds {
    let mut bounds = Bounds::default();
    for slice in &chunk.slices {
        let Some(Frame { count, .. }) = frames.frame(slice.frame).filter(|frame| frame.is_add()) else { continue };
        if slice.from == 0 {
            bounds.to_add += count;
            bounds.cut = Some((slice.frame, *count));
            continue;
        }
        if bounds.to_add == 0 {
            bounds.goes_on = Some(slice.frame);
        }
        bounds.to_add += slice.to - slice.from;
    }
    // Slices of a frame lie one behind the other, so only the last can be cut.
    let last = chunk.slices.last();
    bounds.cut =
        bounds.cut.filter(|(name, count)| last.is_some_and(|last| last.frame == *name && last.to < *count));
    bounds
}
