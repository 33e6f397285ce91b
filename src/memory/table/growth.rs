//! Grows, shrinks and scans a table. Each step works on one or two segments, and their size limits its time.

use std::hash::BuildHasher;

use super::super::entry::{Entry, ShortTick};
use super::group::CELLS;
use super::segment::{Found, Segment};
use super::{Hash, Table, fetch, fetch_whole};

/// The number of prefetched entries at which a scan begins to visit them.
const AHEAD: usize = 128;

/// The average number of messages in a segment at which the table gets another segment. With a quarter of this number,
/// an add and its del take a seventh longer at ten million messages in flight. With a larger number each step takes
/// longer. Unit tests use a smaller number, so that they cover many splits.
pub(super) const MEAN_SEGMENT: usize = if cfg!(test) { 1_024 } else { 4_096 };

/// The fill level below which a segment is made smaller when memory is reclaimed, in percent of its cells.
const MIN_LOAD_PERCENT: usize = 45;

impl<S: BuildHasher> Table<S> {
    /// Makes room for an entry of this hash, whose segment is full. First splits a segment, if the table has too few
    /// segments. Then enlarges the segment of the entry, if that segment is still full.
    pub(super) fn make_room(&mut self, hash: Hash) {
        if self.len >= self.segments.len() * MEAN_SEGMENT {
            self.split();
        }
        let segment = self.segment_of(hash);
        if self.free[segment] == 0 {
            let groups = self.segments[segment].groups.len();
            self.rebuild(segment, if groups < 8 { groups * 2 } else { groups + groups / 8 });
        }
    }

    /// Makes room for `len` entries, so that few segments have to grow for them.
    pub(in crate::memory) fn reserve(&mut self, len: usize) {
        // Hashes divide entries about equally between segments if their number is a power of two. So a sixteenth more
        // than the mean is enough for nearly every segment.
        let segments = len.div_ceil(MEAN_SEGMENT).next_power_of_two();
        while self.segments.len() < segments {
            self.split();
        }
        let mean = len / self.segments.len();
        let groups = Segment::groups_for(mean + mean / 16);
        for segment in 0..self.segments.len() {
            if self.segments[segment].groups.len() < groups {
                self.rebuild(segment, groups);
            }
        }
    }

    /// Inserts an entry. The table must have room for the entry, and must have no entry of the same message.
    #[inline]
    pub(super) fn move_in(&mut self, entry: &Entry) {
        let hash = Hash::of(entry.message, &self.hasher);
        let home = self.home(hash);
        let (segment, free) = (&mut self.segments[home.segment as usize], &mut self.free[home.segment as usize]);
        segment.insert(free, hash.tag(), home.group as usize, entry);
    }

    pub(super) fn entries_in(&self, segment: usize) -> usize {
        (self.segments[segment].limit() - self.free[segment]) as usize
    }

    /// Replaces a segment with an empty segment of `groups` groups. Returns the old segment.
    fn replace(&mut self, segment: usize, groups: usize) -> Segment {
        let empty = Segment::with_groups(groups);
        self.free[segment] = empty.limit();
        std::mem::replace(&mut self.segments[segment], empty)
    }

    fn rebuild(&mut self, segment: usize, groups: usize) {
        let old = self.replace(segment, groups);
        self.shape = self.shape.wrapping_add(1);
        old.iter().for_each(|entry| self.move_in(entry));
    }

    /// Updates the mask and the shape. Must be called when the number of segments has changed.
    fn reshape(&mut self) {
        self.mask = self.segments.len().next_power_of_two() - 1;
        self.shape = self.shape.wrapping_add(1);
    }

    /// Returns the partner of a segment. The partner is split when `segment` is appended, and takes the entries back
    /// when `segment` is removed.
    fn partner(segment: usize) -> usize {
        segment & (((segment + 1).next_power_of_two() >> 1) - 1)
    }

    /// Appends a segment, and divides the entries of its partner between the two.
    fn split(&mut self) {
        let partner = Self::partner(self.segments.len());
        // Each of the two segments gets room for a little more than half of the entries, because hashes seldom divide
        // them into equal halves.
        let groups = Segment::groups_for(self.entries_in(partner) * 9 / 16 + 8);
        let old = self.replace(partner, groups);
        let appended = Segment::with_groups(groups);
        self.free.push(appended.limit());
        self.segments.push(appended);
        self.reshape();
        for entry in old.iter() {
            let segment = self.segment_of(Hash::of(entry.message, &self.hasher));
            if self.free[segment] == 0 {
                self.rebuild(segment, self.segments[segment].groups.len() + 1);
            }
            self.move_in(entry);
        }
    }

    /// Reclaims memory of one segment, at `position` or after it, and moves `position`. Returns whether the end of the
    /// table is reached.
    pub(in crate::memory) fn reclaim(&mut self, position: &mut usize) -> bool {
        while *position < self.segments.len() {
            if self.shrink(*position) {
                return false;
            }
            *position += 1;
        }
        true
    }

    /// Merges the last segment with its partner, if the table has too many segments. Otherwise makes `segment`
    /// smaller, if it is sparse. Returns whether it changed a segment.
    fn shrink(&mut self, segment: usize) -> bool {
        let last = self.segments.len() - 1;
        if self.len * 2 < last * MEAN_SEGMENT {
            let partner = Self::partner(last);
            let groups = Segment::groups_for(self.entries_in(last) + self.entries_in(partner) + 8);
            let first = self.replace(partner, groups);
            let last = self.segments.pop().expect("there is more than one");
            self.free.pop();
            self.reshape();
            first.iter().chain(last.iter()).for_each(|entry| self.move_in(entry));
            return true;
        }
        let (len, groups) = (self.entries_in(segment), self.segments[segment].groups.len());
        let wanted = Segment::groups_for(len * 9 / 8);
        let is_sparse = len * 100 < groups * CELLS * MIN_LOAD_PERCENT && wanted < groups;
        if is_sparse {
            self.rebuild(segment, wanted);
        }
        is_sparse
    }

    /// Visits the entries whose deadline has the same lowest eight bits as `tick`, or all entries if `tick` is `None`.
    /// Starts at segment `position`, and moves `position`. Visits whole segments until about `budget` cells are
    /// scanned. Removes the entries for which `keep` returns false. Returns whether the scan is complete.
    ///
    /// The scan may miss entries that are added between two of its steps. It misses no other entries, unless
    /// [`Table::reclaim`] is called between the steps.
    pub(in crate::memory) fn scan(
        &mut self,
        position: &mut usize,
        budget: usize,
        tick: Option<ShortTick>,
        mut keep: impl FnMut(&mut Entry) -> bool,
    ) -> bool {
        let (mut scanned, mut found) = (0, Vec::with_capacity(2 * AHEAD));
        while *position < self.segments.len() && scanned < budget {
            // The groups of the next segment are elsewhere in memory, so a processor does not prefetch them by
            // itself.
            if let Some(next) = self.segments.get(*position + 1) {
                next.groups.iter().for_each(fetch);
            }
            let segment = &self.segments[*position];
            scanned += segment.entries.len() * CELLS;
            // Entries of several segments are requested before the first is visited, so that the processor loads them
            // in the meantime.
            for (group, head) in segment.groups.iter().enumerate() {
                for cell in tick.map_or_else(|| head.occupied(), |tick| head.ticking(tick.lowest())) {
                    fetch_whole(&segment.entries[group][cell]);
                    found.push((*position, group, cell));
                }
            }
            *position += 1;
            if found.len() >= AHEAD {
                found.drain(..).for_each(|found| self.visit(found, &mut keep));
            }
        }
        found.drain(..).for_each(|found| self.visit(found, &mut keep));
        *position >= self.segments.len()
    }

    fn visit(&mut self, (segment, at, cell): (usize, usize, usize), keep: &mut impl FnMut(&mut Entry) -> bool) {
        let Segment { groups, entries } = &mut self.segments[segment];
        let entry = &mut entries[at][cell];
        if !keep(entry) {
            let home = Hash::of(entry.message, &self.hasher).group(groups.len());
            Found { entry, groups, home, at, cell, free: &mut self.free[segment], len: &mut self.len }.remove();
        }
    }
}
