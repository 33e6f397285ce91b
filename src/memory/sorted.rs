//! The messages of a burst, shard by shard.

use std::ops::Range;

use super::table::Hash;
use crate::core::burst::{Asks, Burst};
use crate::core::message::Message;

/// A message of a burst and what is asked of it: two to a quarter of a cache line, in the order of their use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) hash: Hash,
    index: u32,
    verb: Verb,
}

impl Item {
    /// Which of the burst's messages it is.
    pub(super) const fn index(&self) -> usize {
        self.index as usize
    }

    pub(super) const fn verb(&self) -> Asks {
        self.verb.asks()
    }
}

/// [`Asks`] in four bytes.
#[derive(Clone, Copy, Debug)]
struct Verb(u32);

impl Verb {
    const DEL: u32 = 1 << 31;
    const WITHDRAW: u32 = 1;

    const fn of(asks: Asks) -> Verb {
        match asks {
            Asks::Add { ack_timeout_ticks, attempt } => Verb((attempt as u32) << 16 | ack_timeout_ticks as u32),
            Asks::Del { withdraw } => Verb(Verb::DEL | if withdraw { Verb::WITHDRAW } else { 0 }),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "what was put together is taken apart")]
    const fn asks(self) -> Asks {
        if self.0 & Verb::DEL != 0 {
            return Asks::Del { withdraw: self.0 & Verb::WITHDRAW != 0 };
        }
        Asks::Add { ack_timeout_ticks: self.0 as u16, attempt: (self.0 >> 16) as u8 }
    }
}

/// Messages by shard; within a shard they keep their order.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    unsorted: Vec<(u8, Item)>,
    items: Vec<Item>,
    /// Behind the last message of each shard.
    ends: Vec<u32>,
}

/// More room than this is not kept from one burst to the next.
const KEPT: usize = 64 * 1_024;

impl Sorted {
    /// Sorts the messages of some requests, those refused left out; `hash` tells hash and shard of each.
    #[expect(clippy::cast_possible_truncation, reason = "shards have seven bits; a burst ends below 4 billion")]
    pub(super) fn sort(&mut self, burst: &Burst, requests: Range<usize>, hash: impl Fn(Message) -> (Hash, usize)) {
        self.clear();
        for request in burst.requests[requests].iter().filter(|request| request.refusal.is_none()) {
            let verb = Verb::of(request.asks);
            for index in request.range() {
                let (hash, shard) = hash(burst.messages()[index]);
                if self.ends.len() <= shard {
                    self.ends.resize(shard + 1, 0);
                }
                self.ends[shard] += 1;
                self.unsorted.push((shard as u8, Item { hash, index: index as u32, verb }));
            }
        }
        let Some((_, any)) = self.unsorted.first() else { return };
        self.items.resize(self.unsorted.len(), *any);
        // First the begin of each shard, which moves to its end as its messages are put in.
        let mut begin = 0;
        for end in &mut self.ends {
            begin += std::mem::replace(end, begin);
        }
        for (shard, item) in &self.unsorted {
            let place = &mut self.ends[usize::from(*shard)];
            self.items[*place as usize] = *item;
            *place += 1;
        }
    }

    fn clear(&mut self) {
        if self.unsorted.capacity() > KEPT {
            *self = Sorted::default();
        }
        self.unsorted.clear();
        self.items.clear();
        self.ends.clear();
    }

    /// Each shard that has messages, with them.
    pub(super) fn groups(&self) -> impl Iterator<Item = (usize, &[Item])> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        let groups = begins.zip(&self.ends).map(|(begin, end)| &self.items[begin as usize..*end as usize]);
        groups.enumerate().filter(|(_, items)| !items.is_empty())
    }
}
