//! Rebuilds the queue of an outbox from the records of a journal.

use std::time::Instant;

use super::records::{Event, GroupRecord};
use crate::core::{GroupName, GroupOptions};
use crate::memory::queue::{Group, Queue};

impl Queue {
    /// Applies an event of a group or of the whole outbox. Other events change nothing here. No subscriber holds a batch
    /// after a restart, so taken batches count as released.
    pub(super) fn replay(&mut self, event: Event, now: Instant) {
        match event {
            Event::Taken { group, batches } => {
                let Some(group) = self.groups.get_mut(&group) else { return };
                for (position, count) in batches {
                    group.next = group.next.max(position + 1);
                    group.released.insert(position, count);
                }
            }
            Event::Settled { group, positions } => {
                for position in positions {
                    let group = self.groups.get_mut(&group);
                    if group.is_some_and(|group| group.released.remove(&position).is_some()) {
                        self.settle_by_one(position);
                    }
                }
            }
            Event::Opened { group, next } => {
                self.batches.range_mut(next..).for_each(|(_, stored)| stored.unsettled += 1);
                self.groups.insert(group, Group::restored(next, now));
            }
            Event::Deleted { group } => drop(self.delete_group(&group)),
            Event::DroppedBefore { position } => self.drop_before(position),
            Event::Groups { begin, end, groups } => {
                let restored = |GroupRecord { name, next, held }| {
                    let released = held.into_iter().collect();
                    (name, Group { released, ..Group::restored(next, now) })
                };
                self.groups = groups.into_iter().map(restored).collect();
                self.drop_before(begin);
                self.end = self.end.max(end);
                self.recount();
            }
            _ => {}
        }
    }

    /// Counts the batches that each group has not settled, and removes those that all groups have settled.
    fn recount(&mut self) {
        self.groups.values_mut().for_each(|group| group.unsettled = 0);
        for (position, stored) in &mut self.batches {
            stored.unsettled = 0;
            for group in self.groups.values_mut() {
                if *position >= group.next || group.released.contains_key(position) {
                    group.unsettled += 1;
                    stored.unsettled += 1;
                }
            }
        }
        let settled = self.batches.iter().filter(|(_, stored)| stored.unsettled == 0);
        let settled: Vec<u64> = settled.map(|(position, _)| *position).collect();
        for position in settled {
            self.remove(position);
        }
    }

    /// Completes a queue that was read from a journal. Retention begins again, because no subscriber could take batches
    /// meanwhile.
    pub(super) fn complete(&mut self, now: Instant) {
        self.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        self.recount();
        self.batches.values_mut().for_each(|stored| stored.kept_since = now);
        // Batches that a group took may be in no record, and no other batch takes their positions.
        let ends = self.groups.values().map(|group| group.next);
        self.end = ends.fold(self.end, u64::max);
        self.restored_at = Some(now);
    }
}
