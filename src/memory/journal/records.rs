//! The records of a journal: changes of messages, and the rest in the postcard format.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::core::{GroupName, Message, Outcome, RequestBatch, Stamp, Tick, TickCounts, TimedOut, TimeoutBatch};
use crate::memory::batch_by_shard::{Item, Verb};
use crate::memory::entry::{Entry, ShortTick};

/// The first byte of a record.
mod kind {
    /// Changes that requests made to messages.
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

/// The length of the kind and the number of changes.
const CHANGES_HEAD_LENGTH: usize = 1 + 4;

/// The maximum length of a change: kind, deadline, attempt, message id and client.
const MAX_CHANGE_LENGTH: usize = 1 + 2 + 1 + 8 + 8;

/// The length of an entry in an [`kind::ENTRIES`] record.
const ENTRY_LENGTH: usize = 8 + 8 + 4 + 2 + 1;

/// A record that is not about single messages of the ring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::memory) enum Event {
    /// A checkpoint begins. All messages of ticks before this one are in batches.
    Begin {
        published_below: Tick,
    },
    /// A checkpoint is complete. The head of this block says so too.
    Complete,
    /// The numbers of Acks of the ticks that have not expired, for a checkpoint.
    Acked {
        ticks: Vec<(Tick, u64)>,
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
    /// A batch was put into the outbox at this position.
    Batch {
        position: u64,
        /// When its tick expired, in the time that the wheel has lived.
        expired_lived_ms: u64,
        batch: Arc<TimeoutBatch>,
    },
    /// A group took batches, each with its position and its delivery count.
    Taken {
        group: GroupName,
        batches: Vec<(u64, u32)>,
    },
    /// A group settled the batches at these positions.
    Settled {
        group: GroupName,
        positions: Vec<u64>,
    },
    /// A group was created, and has settled all batches before this position.
    Opened {
        group: GroupName,
        next: u64,
    },
    Deleted {
        group: GroupName,
    },
    /// The batches before this position were dropped.
    DroppedBefore {
        position: u64,
    },
    /// The positions of the outbox and its groups, for a checkpoint. The batches precede this record.
    Groups {
        begin: u64,
        end: u64,
        groups: Vec<GroupRecord>,
    },
}

/// A group of an outbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::memory) struct GroupRecord {
    pub(super) name: GroupName,
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
    /// Whether a checkpoint begins in them.
    pub(super) begins_checkpoint: bool,
    pub(super) last: u64,
    pub(super) is_closing: bool,
}

/// A change of the wheel or of its outbox, as recovery reads it.
#[derive(Debug)]
pub(super) enum Part {
    Put(Entry),
    Remove { message: Message, is_acked: bool },
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

/// Writes the changes that a request batch made to messages. Writes nothing if there are none.
pub(super) fn write_changes(bytes: &mut Vec<u8>, items: &[Item], batch: &RequestBatch) {
    let begin = bytes.len();
    // Room for the longest changes, so that none of them has to check for it.
    bytes.resize(begin + CHANGES_HEAD_LENGTH + items.len() * MAX_CHANGE_LENGTH, 0);
    bytes[begin] = kind::CHANGES;
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
        patch(bytes, begin + 1, written);
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

/// Reads all records of a block, and passes each part to `read`. `stamp` is the time of the block. Returns `None` if the
/// bytes are not whole records.
pub(super) fn read(bytes: &[u8], stamp: Stamp, mut read: impl FnMut(Part)) -> Option<()> {
    let mut rest = bytes;
    while let Some([kind]) = take(&mut rest) {
        match kind {
            kind::CHANGES => {
                let mut last = None;
                for _ in 0..u32::from_le_bytes(take(&mut rest)?) {
                    let [head] = take(&mut rest)?;
                    let kind = head & change::KIND;
                    if kind == change::ADDED {
                        let deadline = ShortTick(u16::from_le_bytes(take(&mut rest)?));
                        let [attempt] = take(&mut rest)?;
                        last = Some((deadline, attempt));
                    }
                    let msg_id = u64::from_le_bytes(take(&mut rest)?);
                    let client = if head & change::CLIENT == 0 { 0 } else { u64::from_le_bytes(take(&mut rest)?) };
                    let message = Message::new(msg_id, client);
                    read(match kind {
                        change::ACKED | change::WITHDRAWN => {
                            Part::Remove { message, is_acked: kind == change::ACKED }
                        }
                        change::ADDED | change::ADDED_ALIKE => {
                            let (deadline, attempt) = last?;
                            Part::Put(Entry::in_flight(message, deadline, stamp, attempt))
                        }
                        _ => return None,
                    });
                }
            }
            kind::ENTRIES => {
                for _ in 0..u32::from_le_bytes(take(&mut rest)?) {
                    let message =
                        Message::new(u64::from_le_bytes(take(&mut rest)?), u64::from_le_bytes(take(&mut rest)?));
                    let added_at = Stamp(stamp.0.wrapping_sub(u32::from_le_bytes(take(&mut rest)?)));
                    let deadline = ShortTick(u16::from_le_bytes(take(&mut rest)?));
                    let [attempt] = take(&mut rest)?;
                    read(Part::Put(Entry::in_flight(message, deadline, added_at, attempt)));
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
