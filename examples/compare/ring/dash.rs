//! A concurrent map alone: dashmap with foldhash, as it is usually used and as well as it can be.

use ackwheel::core::message::Message;
use dashmap::{DashMap, SharedValue};
use foldhash::fast::RandomState;

use super::subject::Subject;

type Map = DashMap<(u64, u64), u64, RandomState>;

/// Id and client to deadline, a call a message.
#[derive(Default)]
pub struct Plain(Map);

impl Subject for Plain {
    fn add(&mut self, messages: &[Message]) -> usize {
        messages.iter().filter(|message| self.0.insert((message.msg_id.0, message.client.0), 15).is_none()).count()
    }

    fn del(&mut self, messages: &[Message]) -> usize {
        messages.iter().filter(|message| self.0.remove(&(message.msg_id.0, message.client.0)).is_some()).count()
    }
}

/// The same with each shard locked once a batch, and each id hashed once.
#[derive(Default)]
pub struct ByShard {
    map: Map,
    /// Hash and key of the batch at hand, by shard.
    batch: Vec<Vec<(u64, (u64, u64))>>,
}

impl ByShard {
    fn group(&mut self, messages: &[Message]) {
        self.batch.resize_with(self.map.shards().len(), Vec::new);
        for message in messages {
            let key = (message.msg_id.0, message.client.0);
            let hash = self.map.hash_usize(&key);
            self.batch[self.map.determine_shard(hash)].push((hash as u64, key));
        }
    }
}

impl Subject for ByShard {
    fn add(&mut self, messages: &[Message]) -> usize {
        self.group(messages);
        let mut added = 0;
        let hash_of = |(key, _): &((u64, u64), SharedValue<u64>)| self.map.hash_usize(key) as u64;
        for (shard, keys) in self.map.shards().iter().zip(&mut self.batch).filter(|(_, keys)| !keys.is_empty()) {
            let mut shard = shard.write();
            for (hash, key) in keys.drain(..) {
                if let Some((_, deadline)) = shard.get_mut(hash, |(known, _)| *known == key) {
                    *deadline.get_mut() = 15;
                } else {
                    shard.insert(hash, (key, SharedValue::new(15)), hash_of);
                    added += 1;
                }
            }
        }
        added
    }

    fn del(&mut self, messages: &[Message]) -> usize {
        self.group(messages);
        let mut removed = 0;
        for (shard, keys) in self.map.shards().iter().zip(&mut self.batch).filter(|(_, keys)| !keys.is_empty()) {
            let mut shard = shard.write();
            for (hash, key) in keys.drain(..) {
                removed += usize::from(shard.remove_entry(hash, |(known, _)| *known == key).is_some());
            }
        }
        removed
    }
}
