//! Messages by shard of a dashmap, so that each shard is locked once for many of them, and each id hashed once.

use std::hint::black_box;

use ackwheel::core::Message;
use dashmap::DashMap;
use foldhash::fast::RandomState;

/// Id and client.
pub type Key = (u64, u64);

/// A dashmap with a fast hasher, keyed per map.
pub type Map<V> = DashMap<Key, V, RandomState>;

/// The key of a message.
pub const fn key(message: Message) -> Key {
    (message.msg_id.0, message.client.0)
}

/// A message, and what is to be done with it.
#[derive(Clone, Copy, Debug)]
pub struct Item<T> {
    /// Of the key.
    pub hash: u64,
    /// Of the message.
    pub key: Key,
    /// The operation.
    pub what: T,
}

/// Messages by shard; within a shard they keep their order.
#[derive(Debug)]
pub struct Grouped<T>(Vec<Vec<Item<T>>>);

impl<T> Default for Grouped<T> {
    fn default() -> Grouped<T> {
        Grouped(Vec::new())
    }
}

impl<T> Grouped<T> {
    /// Takes up messages in place of those that were there before.
    pub fn group<V>(&mut self, map: &Map<V>, messages: impl Iterator<Item = (Message, T)>) {
        self.0.iter_mut().for_each(Vec::clear);
        self.0.resize_with(map.shards().len(), Vec::new);
        for (message, what) in messages {
            let key = key(message);
            let hash = map.hash_usize(&key);
            self.0[map.determine_shard(hash)].push(Item { hash: hash as u64, key, what });
        }
    }

    /// Each shard that has messages, with them.
    pub fn groups(&self) -> impl Iterator<Item = (usize, &[Item<T>])> {
        self.0.iter().map(Vec::as_slice).enumerate().filter(|(_, items)| !items.is_empty())
    }
}

/// Has the processor read what it needs of several messages at the same time: none of these looks waits for the
/// one before. Asking for memory without waiting for it, as our own table does, dashmap offers to nobody.
#[inline]
pub fn read_ahead<T>(items: &[Item<T>], is_there: impl Fn(u64, &Key) -> bool) {
    black_box(items.iter().filter(|item| is_there(item.hash, &item.key)).count());
}
