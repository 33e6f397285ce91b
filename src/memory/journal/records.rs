//! The records of a journal: changes of messages, and the rest in the postcard format.

use serde::{Deserialize, Serialize};

use crate::core::{
    BatchId, GroupName, Message, Outcome, RequestBatch, Stamp, Tick, TickCounts, TimedOut, TimeoutBatch,
};
use crate::memory::batch_by_shard::{Item, Verb};
use crate::memory::entry::{Entry, ShortTick};

/// The first byte of a record.
mod kind {
    /// Changes that requests made to messages of one shard.
    pub(super) const CHANGES: u8 = 1;
    /// Entries of a table, for a checkpoint.
    pub(super) const ENTRIES: u8 = 2;
    /// A [`super::Event`].
    pub(super) const EVENT: u8 = 3;
}

/// The first byte of a change. The client follows the message id only with [`change::CLIENT`].
mod change {
    pub(super) const ACKED: u8 = 0;
    pub(super) const WITHDRAWN: u8 = 1;
    /// An add with the deadline and the attempt of the add before it in the record.
    pub(super) const ADDED_ALIKE: u8 = 2;
    /// An add. Its deadline and its attempt follow this byte.
    pub(super) const ADDED: u8 = 3;
    pub(super) const KIND: u8 = 0x7f;
    pub(super) const CLIENT: u8 = 0x80;
}

/// The length of the kind, the shard and the number of changes.
const CHANGES_HEAD_LENGTH: usize = 1 + 1 + 4;

/// The maximum length of a change: kind, deadline, attempt, message id and client.
const MAX_CHANGE_LENGTH: usize = 1 + 2 + 1 + 8 + 8;

/// The length of an entry in an [`kind::ENTRIES`] record.
const ENTRY_LENGTH: usize = 8 + 8 + 4 + 2 + 1;

/// A change of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Added { deadline: ShortTick, attempt: u8 },
    Acked,
    Withdrawn,
}

/// A record that is not about single messages of the ring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::memory) enum Event {
    /// A checkpoint begins. All messages of ticks before this one are in batches.
    Begin {
        published_below: Tick,
    },
    /// A checkpoint is complete. The head of this block says so too.
    Complete,
    /// The walk through a shard is complete. These are the Acks of its ticks.
    Counts {
        shard: u8,
        acked: Vec<(Tick, u64)>,
    },
    /// A message expired and was added again before it was in a batch of its tick.
    Overtaken {
        tick: Tick,
        timed_out: TimedOut,
    },
    /// A tick expired.
    Expired {
        tick: Tick,
        counts: TickCounts,
    },
    /// A batch was put into the outbox.
    Batch(BatchRecord),
    /// A group took batches, each with its position and its delivery count.
    Taken {
        group: String,
        batches: Vec<(u64, u32)>,
    },
    /// A group settled the batches at these positions.
    Settled {
        group: String,
        positions: Vec<u64>,
    },
    /// A group was created, and has settled all batches before this position.
    Opened {
        group: String,
        next: u64,
    },
    Deleted {
        group: String,
    },
    /// The batches before this position were dropped.
    DroppedBefore {
        position: u64,
    },
    /// The groups of the outbox and its positions, for a checkpoint. The batches precede this record.
    Groups {
        begin: u64,
        end: u64,
        groups: Vec<GroupRecord>,
    },
}

/// A batch in the outbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::memory) struct BatchRecord {
    pub(super) position: u64,
    /// When its tick expired, in the time that the wheel has lived.
    pub(super) expired_lived_ms: u64,
    pub(super) id: BatchId,
    counts: TickCounts,
    pub(super) last: bool,
    pub(super) messages: Vec<TimedOut>,
}

impl BatchRecord {
    pub(in crate::memory) fn new(position: u64, expired_lived_ms: u64, batch: &TimeoutBatch) -> BatchRecord {
        let TimeoutBatch { id, counts, last, messages } = batch.clone();
        BatchRecord { position, expired_lived_ms, id, counts, last, messages }
    }

    pub(super) fn batch(self) -> TimeoutBatch {
        TimeoutBatch { id: self.id, counts: self.counts, last: self.last, messages: self.messages }
    }
}

/// A group of an outbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::memory) struct GroupRecord {
    pub(super) name: String,
    /// The first position that the group has never taken.
    pub(super) next: u64,
    /// The positions before `next` that the group has not settled, with their delivery counts.
    pub(super) held: Vec<(u64, u32)>,
}

/// The records that the writer has taken.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// The head of a block, still empty, and records.
    pub(super) block: Vec<u8>,
    pub(super) cut: Option<usize>,
    pub(super) last: u64,
    pub(super) is_closing: bool,
}

/// A part of a record, as recovery reads it.
#[derive(Debug, PartialEq)]
pub(super) enum Part {
    /// A shard of the process that wrote the journal, a message and its change.
    Change(u8, Message, Change),
    /// The message, deadline and attempt of an entry, and how long before the record it was added.
    Entry {
        message: Message,
        deadline: ShortTick,
        attempt: u8,
        age: u32,
    },
    Event(Event),
}

impl Event {
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        bytes.push(kind::EVENT);
        let length = bytes.len();
        bytes.extend([0; 4]);
        let encoded = postcard::to_extend(self, std::mem::take(bytes));
        *bytes = encoded.expect("every event can be written to memory");
        let written = bytes.len() - length - 4;
        patch(bytes, length, written);
    }
}

/// Writes the changes that a request batch made to the messages of a shard. Writes nothing if there are none.
pub(super) fn write_changes(bytes: &mut Vec<u8>, shard: usize, items: &[Item], batch: &RequestBatch) {
    let begin = bytes.len();
    // Room for the longest changes, so that none of them has to check for it.
    bytes.resize(begin + CHANGES_HEAD_LENGTH + items.len() * MAX_CHANGE_LENGTH, 0);
    bytes[begin] = kind::CHANGES;
    bytes[begin + 1] = u8::try_from(shard).unwrap_or(u8::MAX);
    let (mut at, mut written, mut last) = (begin + CHANGES_HEAD_LENGTH, 0, None);
    for item in items {
        let index = item.index as usize;
        let first = match batch.outcomes()[index] {
            Outcome::Acked => change::ACKED,
            Outcome::Withdrawn => change::WITHDRAWN,
            Outcome::Added | Outcome::Rearmed => change::ADDED,
            Outcome::Unknown | Outcome::Late => continue,
        };
        let message = batch.messages()[index];
        let client = if message.client.0 == 0 { 0 } else { change::CLIENT };
        let out = &mut bytes[at..at + MAX_CHANGE_LENGTH];
        let mut length = 1;
        match item.verb.unpack() {
            Verb::Add { deadline, attempt } if last == Some((deadline, attempt)) => {
                out[0] = change::ADDED_ALIKE | client;
            }
            Verb::Add { deadline, attempt } => {
                last = Some((deadline, attempt));
                let [low, high] = deadline.0.to_le_bytes();
                out[..4].copy_from_slice(&[change::ADDED | client, low, high, attempt]);
                length = 4;
            }
            Verb::Del { .. } => out[0] = first | client,
        }
        out[length..length + 8].copy_from_slice(&message.msg_id.0.to_le_bytes());
        length += 8;
        if client != 0 {
            out[length..length + 8].copy_from_slice(&message.client.0.to_le_bytes());
            length += 8;
        }
        (at, written) = (at + length, written + 1);
    }
    bytes.truncate(if written == 0 { begin } else { at });
    if written > 0 {
        patch(bytes, begin + 2, written);
    }
}

/// The beginning of a record of entries, whose number is not known yet.
pub(super) fn begin_entries(bytes: &mut Vec<u8>) -> usize {
    bytes.extend([kind::ENTRIES, 0, 0, 0, 0]);
    bytes.len()
}

pub(super) fn write_entry(bytes: &mut Vec<u8>, entry: &Entry, now: Stamp) {
    bytes.extend(entry.message.msg_id.0.to_le_bytes());
    bytes.extend(entry.message.client.0.to_le_bytes());
    bytes.extend(now.0.wrapping_sub(entry.added_at.0).to_le_bytes());
    bytes.extend(entry.deadline.0.to_le_bytes());
    bytes.push(entry.attempt);
}

/// Writes the number of entries since [`begin_entries`], which returned `begin`.
pub(super) fn end_entries(bytes: &mut [u8], begin: usize) {
    let count = (bytes.len() - begin) / ENTRY_LENGTH;
    patch(bytes, begin - 4, count);
}

fn patch(bytes: &mut [u8], at: usize, number: usize) {
    let number = u32::try_from(number).expect("a record is far shorter than 4 GiB");
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
}

/// Reads all records of a block, and passes each part to `read`. Returns `None` if the bytes are not whole records.
pub(super) fn read(bytes: &[u8], mut read: impl FnMut(Part)) -> Option<()> {
    let mut rest = bytes;
    while let Some(first) = take::<1>(&mut rest) {
        match first[0] {
            kind::CHANGES => {
                let [shard] = take::<1>(&mut rest)?;
                let mut last = None;
                for _ in 0..u32::from_le_bytes(take(&mut rest)?) {
                    let [head] = take::<1>(&mut rest)?;
                    let changed = match head & change::KIND {
                        change::ACKED => Change::Acked,
                        change::WITHDRAWN => Change::Withdrawn,
                        change::ADDED_ALIKE => last?,
                        change::ADDED => {
                            let deadline = ShortTick(u16::from_le_bytes(take(&mut rest)?));
                            let [attempt] = take::<1>(&mut rest)?;
                            Change::Added { deadline, attempt }
                        }
                        _ => return None,
                    };
                    if matches!(changed, Change::Added { .. }) {
                        last = Some(changed);
                    }
                    let msg_id = u64::from_le_bytes(take(&mut rest)?);
                    let client = if head & change::CLIENT == 0 { 0 } else { u64::from_le_bytes(take(&mut rest)?) };
                    read(Part::Change(shard, Message::new(msg_id, client), changed));
                }
            }
            kind::ENTRIES => {
                for _ in 0..u32::from_le_bytes(take(&mut rest)?) {
                    let message =
                        Message::new(u64::from_le_bytes(take(&mut rest)?), u64::from_le_bytes(take(&mut rest)?));
                    let age = u32::from_le_bytes(take(&mut rest)?);
                    let deadline = ShortTick(u16::from_le_bytes(take(&mut rest)?));
                    let [attempt] = take::<1>(&mut rest)?;
                    read(Part::Entry { message, deadline, attempt, age });
                }
            }
            kind::EVENT => {
                let length = u32::from_le_bytes(take(&mut rest)?) as usize;
                let (event, behind) = rest.split_at_checked(length)?;
                rest = behind;
                read(Part::Event(postcard::from_bytes(event).ok()?));
            }
            _ => return None,
        }
    }
    Some(())
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(*first)
}

impl GroupRecord {
    pub(super) fn group(&self) -> Option<GroupName> {
        self.name.parse().ok()
    }
}
