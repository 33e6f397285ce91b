//! Rebuilds the queue of an outbox from the records of a journal.

use std::time::Instant;

use super::records::Event;
use crate::core::{GroupName, GroupOptions};
use crate::memory::queue::{Group, Queue};

impl Queue {
    /// Applies an event of a group or of the whole outbox. Other events change nothing here.
    pub(super) fn replay(&mut self, event: Event, now: Instant) {
        match event {
            Event::Taken { group, batches } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    for (position, count) in batches {
                        group.next = group.next.max(position + 1);
                        group.released.insert(position, count);
                    }
                }
            }
            Event::Settled { group, positions } => {
                if let Some(group) = self.groups.get_mut(&group) {
                    for position in positions {
                        group.released.remove(&position);
                    }
                }
            }
            Event::Opened { group, next } => drop(self.groups.insert(group, Group::restored(next, now))),
            Event::Deleted { group } => drop(self.groups.remove(&group)),
            Event::DroppedBefore { position } => self.drop_before(position),
            Event::Positions { begin, end } => {
                self.groups.clear();
                self.drop_before(begin);
                self.end = self.end.max(end);
            }
            _ => {}
        }
    }

    /// Completes a queue that was read from a journal: counts the batches that each group has not settled, and removes
    /// the batches that all groups have settled. No subscriber holds a batch after a restart, so all taken batches are
    /// released. Retention begins again, because no subscriber could take batches meanwhile.
    pub(super) fn complete(&mut self, now: Instant) {
        self.open_group(&GroupName::default_group(), GroupOptions::default(), now);
        for (position, stored) in &mut self.batches {
            (stored.kept_since, stored.unsettled) = (now, 0);
            for group in self.groups.values_mut() {
                if *position >= group.next || group.released.contains_key(position) {
                    group.unsettled += 1;
                    stored.unsettled += 1;
                }
            }
        }
        let settled = self.batches.iter().filter(|(_, stored)| stored.unsettled == 0);
        for position in Vec::from_iter(settled.map(|(position, _)| *position)) {
            self.remove(position);
        }
        // Batches that a group took may be in no record, and no other batch takes their positions.
        let ends = self.groups.values().map(|group| group.next);
        self.end = ends.fold(self.end, u64::max);
        self.restored_at = Some(now);
    }
}
