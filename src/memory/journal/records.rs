//! The records of a journal: changes of messages, and the rest in the postcard format.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::core::{GroupName, Message, Outcome, RequestBatch, Stamp, Tick, TickCounts, TimedOut, TimeoutBatch};
use crate::memory::batch_by_shard::{Item, PackedVerb, Verb};
use crate::memory::entry::{Entry, ShortTick};

/// The first byte of a record.
mod kind {
    /// Changes of messages: their number, the deadline and the attempt of all adds, then for each the [`super::Outcome`]
    /// and the message id.
    pub(super) const CHANGES: u8 = 1;
    /// The same, with a client behind each message id.
    pub(super) const CHANGES_WITH_CLIENTS: u8 = 2;
    /// Entries of a table, for a checkpoint.
    pub(super) const ENTRIES: u8 = 3;
    /// A [`super::Event`].
    pub(super) const EVENT: u8 = 4;
}

/// The length of the kind, the number of changes, the deadline and the attempt.
const CHANGES_HEAD_LENGTH: usize = 1 + 4 + 2 + 1;

/// The maximum number of changes in a record. Room for so many is prepared also if a record ends earlier, because the
/// deadlines of adds differ.
const MOST_CHANGES: usize = 128;

const CHANGE_LENGTH: usize = 1 + 8;

const CHANGE_WITH_CLIENT_LENGTH: usize = CHANGE_LENGTH + 8;

const ADDED: u8 = Outcome::Added as u8;
const REARMED: u8 = Outcome::Rearmed as u8;
const ACKED: u8 = Outcome::Acked as u8;
const WITHDRAWN: u8 = Outcome::Withdrawn as u8;

/// The length of an entry in an [`kind::ENTRIES`] record.
const ENTRY_LENGTH: usize = 8 + 8 + 4 + 2 + 1;

/// A record that is not about single messages of the ring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::memory) enum Event {
    /// A checkpoint begins. All messages of ticks before this one are in batches.
    Begin {
        published_below: Tick,
        /// About how many messages the wheel holds.
        held: u64,
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

/// The first and the last record of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    Begin,
    Complete,
}

/// The records that the writer has taken.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// The head of a block, still empty, and records.
    pub(super) block: Vec<u8>,
    /// Whether a checkpoint begins or is complete with one of them.
    pub(super) boundary: Option<Boundary>,
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
pub(super) fn write_changes(bytes: &mut Vec<u8>, mut items: &[Item], batch: &RequestBatch) {
    let has_client = |item: &Item| batch.messages()[item.index as usize].client.0 != 0;
    let has_clients = items.iter().any(has_client);
    while !items.is_empty() {
        let next = &items[..items.len().min(MOST_CHANGES)];
        let done = if has_clients {
            write_record::<CHANGE_WITH_CLIENT_LENGTH>(bytes, next, batch)
        } else {
            write_record::<CHANGE_LENGTH>(bytes, next, batch)
        };
        items = &items[done..];
    }
}

/// Writes changes as one record, up to the first add whose deadline or attempt is another. Returns the number of items up
/// to there. A change takes `LENGTH` bytes.
fn write_record<const LENGTH: usize>(bytes: &mut Vec<u8>, items: &[Item], batch: &RequestBatch) -> usize {
    let (messages, outcomes) = (batch.messages(), batch.outcomes());
    let begin = bytes.len();
    bytes.resize(begin + CHANGES_HEAD_LENGTH + items.len() * LENGTH, 0);
    let (head, places) = bytes[begin..].split_at_mut(CHANGES_HEAD_LENGTH);
    let (mut places, mut written, mut done) = (places.as_chunks_mut::<LENGTH>().0.iter_mut(), 0, items.len());
    let mut add = None;
    for (number, item) in items.iter().enumerate() {
        let outcome = outcomes[item.index as usize];
        if matches!(outcome, Outcome::Unknown | Outcome::Late) {
            continue;
        }
        if item.verb.is_add() && add != Some(item.verb) {
            if add.is_some() {
                done = number;
                break;
            }
            add = Some(item.verb);
        }
        let place = places.next().expect("there is a place for each item");
        let message = messages[item.index as usize];
        place[0] = outcome as u8;
        place[1..CHANGE_LENGTH].copy_from_slice(&message.msg_id.0.to_le_bytes());
        if LENGTH == CHANGE_WITH_CLIENT_LENGTH {
            place[CHANGE_LENGTH..].copy_from_slice(&message.client.0.to_le_bytes());
        }
        written += 1;
    }
    if written == 0 {
        bytes.truncate(begin);
        return done;
    }
    head[0] = if LENGTH == CHANGE_LENGTH { kind::CHANGES } else { kind::CHANGES_WITH_CLIENTS };
    head[1..5].copy_from_slice(&encode_count(written));
    if let Some(Verb::Add { deadline, attempt }) = add.map(PackedVerb::unpack) {
        head[5..7].copy_from_slice(&deadline.0.to_le_bytes());
        head[7] = attempt;
    }
    bytes.truncate(begin + CHANGES_HEAD_LENGTH + written * LENGTH);
    done
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
    bytes[at..at + 4].copy_from_slice(&encode_count(number));
}

fn encode_count(number: usize) -> [u8; 4] {
    u32::try_from(number).expect("a record is far shorter than 4 GiB").to_le_bytes()
}

/// Reads all records of a block, and passes each part to `read`. `stamp` is the time of the block. Returns `None` if the
/// bytes are not whole records.
pub(super) fn read(bytes: &[u8], stamp: Stamp, mut read: impl FnMut(Part)) -> Option<()> {
    let mut rest = bytes;
    while let Some([kind]) = take(&mut rest) {
        match kind {
            kind::CHANGES => read_changes::<CHANGE_LENGTH>(&mut rest, stamp, &mut read)?,
            kind::CHANGES_WITH_CLIENTS => {
                read_changes::<CHANGE_WITH_CLIENT_LENGTH>(&mut rest, stamp, &mut read)?;
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

fn read_changes<const LENGTH: usize>(rest: &mut &[u8], stamp: Stamp, read: &mut impl FnMut(Part)) -> Option<()> {
    let number = u32::from_le_bytes(take(rest)?) as usize;
    let deadline = ShortTick(u16::from_le_bytes(take(rest)?));
    let [attempt] = take(rest)?;
    let (changes, behind) = rest.split_at_checked(number * LENGTH)?;
    *rest = behind;
    for mut change in changes.chunks_exact(LENGTH) {
        let [outcome] = take(&mut change)?;
        let msg_id = u64::from_le_bytes(take(&mut change)?);
        let message = Message::new(msg_id, take(&mut change).map_or(0, u64::from_le_bytes));
        read(match outcome {
            ACKED => Part::Remove { message, is_acked: true },
            WITHDRAWN => Part::Remove { message, is_acked: false },
            ADDED | REARMED => Part::Put(Entry::in_flight(message, deadline, stamp, attempt)),
            _ => return None,
        });
    }
    Some(())
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(*first)
}
