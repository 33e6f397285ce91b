//! The messages of a request batch, sorted by shard. A *shard* is a part of the ring under a lock of its own.

use std::hint::select_unpredictable;
use std::ops::Range;

use super::entry::ShortTick;
use super::table::{Hash, MAX_SHARD_BITS};
use crate::core::{Message, Operation, Request, RequestBatch};

/// A message of a request batch, with its operation. An item takes 16 bytes, a quarter of a cache line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) hash: Hash,
    /// The index of the message in the batch.
    pub(super) index: u32,
    pub(super) verb: PackedVerb,
}

/// An add or a del of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Add { deadline: ShortTick, attempt: u8 },
    Del { withdraw: bool },
}

/// A [`Verb`] in four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedVerb(u32);

impl PackedVerb {
    const DEL: u32 = 1 << 31;
    const WITHDRAW: u32 = 1;

    /// Packs the operation of a request. Computes the form of an add and that of a del, and selects one of them
    /// without a branch. A processor would often predict a branch wrongly, because adds and dels arrive in no
    /// predictable order.
    fn of(request: &Request) -> PackedVerb {
        let (is_add, attempt, withdraw) = match request.operation {
            Operation::Add { attempt, .. } => (true, attempt, false),
            Operation::Del { withdraw } => (false, 0, withdraw),
        };
        let add = u32::from(attempt) << 16 | u32::from(ShortTick::of(request.deadline).0);
        PackedVerb(select_unpredictable(is_add, add, PackedVerb::DEL | u32::from(withdraw)))
    }

    pub(super) const fn is_add(self) -> bool {
        self.0 & PackedVerb::DEL == 0
    }

    #[expect(clippy::cast_possible_truncation, reason = "what was put together is taken apart")]
    pub(super) const fn unpack(self) -> Verb {
        if !self.is_add() {
            return Verb::Del { withdraw: self.0 & PackedVerb::WITHDRAW != 0 };
        }
        Verb::Add { deadline: ShortTick(self.0 as u16), attempt: (self.0 >> 16) as u8 }
    }
}

/// The messages of a batch, sorted by shard. Within a shard the order of the batch remains.
#[derive(Debug)]
pub(super) struct BatchByShard {
    /// The messages in the order of the batch. If the ring has only one shard, only this list is used.
    arrived: Vec<Item>,
    /// The messages sorted by shard, if there are several shards.
    by_shard: Vec<Item>,
    shard_bits: u32,
    /// The index in `by_shard` at which the messages of each shard end.
    ends: [u32; MOST_SHARDS],
}

const MOST_SHARDS: usize = 1 << MAX_SHARD_BITS;

/// The number of messages for which memory is kept for the next batch. Larger buffers are freed.
const KEPT: usize = 64 * 1_024;

impl Default for BatchByShard {
    fn default() -> BatchByShard {
        BatchByShard { arrived: Vec::new(), by_shard: Vec::new(), shard_bits: 0, ends: [0; MOST_SHARDS] }
    }
}

impl BatchByShard {
    /// Sorts the messages of `requests` into `1 << shard_bits` shards. Leaves out refused requests. The caller must
    /// set the deadlines of the requests first.
    #[expect(clippy::cast_possible_truncation, reason = "a request batch ends far below 4 billion messages")]
    pub(super) fn sort(
        &mut self,
        batch: &RequestBatch,
        requests: Range<usize>,
        shard_bits: u32,
        hash: impl Fn(Message) -> Hash,
    ) {
        if self.arrived.capacity() > KEPT {
            *self = BatchByShard::default();
        }
        self.arrived.clear();
        for request in batch.requests[requests].iter().filter(|request| request.refusal.is_none()) {
            let verb = PackedVerb::of(request);
            for index in request.range() {
                let hash = hash(batch.messages()[index]);
                self.arrived.push(Item { hash, index: index as u32, verb });
            }
        }
        self.shard_bits = shard_bits;
        if shard_bits == 0 {
            self.ends[0] = self.arrived.len() as u32;
        } else {
            self.scatter();
        }
    }

    /// Sorts the messages of `arrived` into `by_shard`, by counting sort.
    fn scatter(&mut self) {
        self.ends = [0; MOST_SHARDS];
        for item in &self.arrived {
            self.ends[item.hash.shard(self.shard_bits)] += 1;
        }
        // Each element of `ends` is first the index at which its shard begins. While the messages are copied, it grows
        // to the index at which the shard ends.
        let mut begin = 0;
        for end in &mut self.ends[..1 << self.shard_bits] {
            begin += std::mem::replace(end, begin);
        }
        let Some(any) = self.arrived.first() else { return };
        self.by_shard.resize(self.arrived.len(), *any);
        for item in &self.arrived {
            let end = &mut self.ends[item.hash.shard(self.shard_bits)];
            self.by_shard[*end as usize] = *item;
            *end += 1;
        }
    }

    /// Returns the shards that have messages, each with its number and its messages.
    pub(super) fn groups(&self) -> impl Iterator<Item = (usize, &[Item])> {
        let items = if self.shard_bits == 0 { &self.arrived } else { &self.by_shard };
        let ends = &self.ends[..1 << self.shard_bits];
        let begins = std::iter::once(0).chain(ends.iter().copied());
        let groups = begins.zip(ends).map(|(begin, end)| &items[begin as usize..*end as usize]);
        groups.enumerate().filter(|(_, items)| !items.is_empty())
    }
}
