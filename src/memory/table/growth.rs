//! Grows, shrinks and scans a table: each step is bounded by the size of a segment or two.

use std::hash::BuildHasher;

use super::super::entry::{Entry, ShortTick};
use super::group::CELLS;
use super::segment::{Found, Segment};
use super::{Hash, Table, fetch, fetch_whole};

/// Entries that a scan requests before it visits the first of them.
const AHEAD: usize = 128;

/// Messages a segment has on average when another is made. With a quarter of it a pair takes a seventh longer at ten
/// million in flight (docs/PERFORMANCE.md); the more, the longer a step takes. Unit tests are to see many splits.
pub(super) const MEAN_SEGMENT: usize = if cfg!(test) { 1_024 } else { 4_096 };

/// A segment emptier than this is made smaller when memory is reclaimed.
const MIN_LOAD_PERCENT: usize = 45;

impl<S: BuildHasher> Table<S> {
    /// Makes room for an entry of this hash, whose segment is full: splits a segment if the table has too few, and enlarges
    /// that of the entry if this did not help.
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

    /// Inserts an entry whose message is not there, and that fits.
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

    /// Replaces a segment with an empty one, and returns it.
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

    /// To be called when the number of segments has changed.
    fn reshape(&mut self) {
        self.mask = self.segments.len().next_power_of_two() - 1;
        self.shape = self.shape.wrapping_add(1);
    }

    /// The segment that is split when one is appended, and that takes the entries back when the last one is removed.
    fn partner(segment: usize) -> usize {
        segment & (((segment + 1).next_power_of_two() >> 1) - 1)
    }

    /// Splits the segment whose turn it is.
    fn split(&mut self) {
        let partner = Self::partner(self.segments.len());
        // A little more than half, for half of a random choice is seldom exactly that.
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

    /// Reclaims memory once, from segment number `position` on, which moves. Returns whether the scan is complete.
    pub(in crate::memory) fn reclaim(&mut self, position: &mut usize) -> bool {
        while *position < self.segments.len() {
            if self.shrink(*position) {
                return false;
            }
            *position += 1;
        }
        true
    }

    /// Merges the last segment with its partner if there are too many, else makes this one smaller if it is sparse. Returns
    /// whether it did.
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

    /// Visits the entries whose deadline has the lowest bits of `tick`, or all entries without one. Visits whole segments from
    /// number `position` on, which moves, until about `budget` cells were scanned. Removes the entries for which `keep`
    /// returns false. Returns whether the scan is complete.
    ///
    /// Entries that are added between two parts of a scan may be missed. Others are not, unless [`Table::reclaim`] was called.
    pub(in crate::memory) fn scan(
        &mut self,
        position: &mut usize,
        budget: usize,
        tick: Option<ShortTick>,
        mut keep: impl FnMut(&mut Entry) -> bool,
    ) -> bool {
        let (mut scanned, mut found) = (0, Vec::with_capacity(2 * AHEAD));
        while *position < self.segments.len() && scanned < budget {
            // The groups of the next segment lie elsewhere, and no processor prefetches them.
            if let Some(next) = self.segments.get(*position + 1) {
                next.groups.iter().for_each(fetch);
            }
            let segment = &self.segments[*position];
            scanned += segment.entries.len() * CELLS;
            // First all cells of some segments, so that their entries are on the way when the first is visited.
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
