//! A concurrent map alone: dashmap with foldhash, as it is usually used and as well as it can be.

use ackwheel::core::Message;
use dashmap::SharedValue;

use super::subject::Subject;
use crate::dashed::grouped::{Grouped, Item, Key, Map, key};

/// Id and client to deadline, a call a message.
#[derive(Default)]
pub struct Plain(Map<u64>);

impl Subject for Plain {
    fn add(&mut self, messages: &[Message]) -> usize {
        messages.iter().filter(|message| self.0.insert(key(**message), 15).is_none()).count()
    }

    fn del(&mut self, messages: &[Message]) -> usize {
        messages.iter().filter(|message| self.0.remove(&key(**message)).is_some()).count()
    }
}

/// The same with each shard locked once a batch, and each id hashed once.
#[derive(Default)]
pub struct ByShard {
    map: Map<u64>,
    batch: Grouped<()>,
}

impl Subject for ByShard {
    fn add(&mut self, messages: &[Message]) -> usize {
        self.batch.group(&self.map, messages.iter().map(|message| (*message, ())));
        let mut added = 0;
        let hash_of = |(key, _): &(Key, SharedValue<u64>)| self.map.hash_usize(key) as u64;
        for (number, items) in self.batch.groups() {
            let mut shard = self.map.shards()[number].write();
            for &Item { hash, key, .. } in items {
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
        self.batch.group(&self.map, messages.iter().map(|message| (*message, ())));
        let mut removed = 0;
        for (number, items) in self.batch.groups() {
            let mut shard = self.map.shards()[number].write();
            for &Item { hash, key, .. } in items {
                removed += usize::from(shard.remove_entry(hash, |(known, _)| *known == key).is_some());
            }
        }
        removed
    }
}
