//! Rebuilds an outbox from the records of a journal.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::records::{BatchRecord, Event, GroupRecord};
use crate::core::{GroupName, GroupOptions};
use crate::memory::outbox::MemoryOutbox;
use crate::memory::queue::{Group, Queue};

#[derive(Default)]
pub(super) struct OutboxReplay {
    queue: Queue,
    /// When the tick of each batch in the queue expired.
    expired_lived_ms: HashMap<u64, u64>,
    groups: HashMap<String, GroupRecord>,
}

impl OutboxReplay {
    /// Inserts a batch. `origin` stands for the time of its expiry, which is set at the end.
    pub(super) fn insert(&mut self, record: BatchRecord, origin: Instant) {
        let position = record.position;
        self.expired_lived_ms.insert(position, record.expired_lived_ms);
        self.queue.insert(position, record.batch(), origin);
    }

    /// Applies an event of a group or of the whole outbox. Other events change nothing here.
    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Taken { group, batches } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    for (position, count) in batches {
                        group.next = group.next.max(position + 1);
                        group.held.retain(|(held, _)| *held != position);
                        group.held.push((position, count));
                    }
                }
            }
            Event::Settled { group, positions } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    group.held.retain(|(held, _)| !positions.contains(held));
                }
            }
            Event::Opened { group, next } => {
                self.groups.insert(group.clone(), GroupRecord { name: group, next, held: Vec::new() });
            }
            Event::Deleted { group } => drop(self.groups.remove(&group)),
            Event::DroppedBefore { position } => self.drop_before(position),
            Event::Groups { begin, end, groups } => {
                self.groups = groups.into_iter().map(|group| (group.name.clone(), group)).collect();
                self.drop_before(begin);
                self.queue.end = self.queue.end.max(end);
            }
            _ => {}
        }
    }

    fn drop_before(&mut self, position: u64) {
        self.queue.drop_before(position);
        for group in self.groups.values_mut() {
            group.held.retain(|(held, _)| *held >= position);
        }
    }

    /// Completes the outbox. No subscriber holds a batch after a restart, so all batches are released. Retention begins
    /// again, because no subscriber could take batches meanwhile.
    pub(super) fn finish(self, outbox: &MemoryOutbox, lived_ms: u64, away: Duration, now: Instant) {
        let mut queue = self.queue;
        for group in self.groups.into_values() {
            let Some(name) = group.group() else { continue };
            // Batches that it took may be in no record, and no other batch takes their positions.
            queue.end = queue.end.max(group.next);
            queue.groups.insert(name, Group::restored(group.next, group.held, now));
        }
        queue.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        let age = |position: u64| {
            let expired = self.expired_lived_ms.get(&position).copied().unwrap_or(lived_ms);
            Duration::from_millis(lived_ms.saturating_sub(expired)) + away
        };
        queue.complete(|position| now.checked_sub(age(position)).unwrap_or(now), now);
        *outbox.queue.lock() = queue;
    }
}
