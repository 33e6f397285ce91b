//! Growing, shrinking and scanning: each step is bounded by the size of a segment or two.

use super::super::entry::{Entry, ShortTick};
use super::group_mask::PLACES;
use super::segment::Segment;
use super::{Hash, HashMessage, Table, fetch, fetch_whole};

/// Entries that a scan asks for before it visits the first of them.
const AHEAD: usize = 128;

/// Messages a segment has on average when another is made. With a quarter of it a pair takes a seventh longer at ten
/// million in flight (docs/PERFORMANCE.md); the more, the longer a step takes. Unit tests are to see many splits.
pub(super) const MEAN_SEGMENT: usize = if cfg!(test) { 1_024 } else { 4_096 };

/// A segment emptier than this is made smaller when memory is given back.
const MIN_LOAD_PERCENT: usize = 45;

/// Where an entry is.
#[derive(Clone, Copy, Debug)]
struct Spot {
    segment: usize,
    group: usize,
    place: usize,
}

impl<S: HashMessage> Table<S> {
    /// Makes room where an entry of this hash goes, and that is full: by splitting a segment, if the table has too few of
    /// them, and by growing its own if that has not helped.
    pub(super) fn make_room(&mut self, hash: Hash) {
        if self.len >= self.segments.len() * MEAN_SEGMENT {
            self.split();
        }
        let segment = self.segment_of(hash);
        if self.segments.room(segment).is_none() {
            let groups = self.segments[segment].groups.len();
            self.rebuild(segment, if groups < 8 { groups * 2 } else { groups + groups / 8 });
        }
    }

    /// Puts in an entry that is not there, and for which there is room.
    #[inline]
    pub(super) fn move_in(&mut self, entry: &Entry) {
        let hash = self.hasher.hash_of(entry.message);
        let home = self.home(hash);
        let (segment, room) = self.segments.at(home.segment as usize);
        segment.insert(room, hash.tag(), home.group as usize, entry);
    }

    fn rebuild(&mut self, segment: usize, groups: usize) {
        let old = self.segments.replace(segment, Segment::with_groups(groups));
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
        let fresh = self.segments.len();
        let partner = Self::partner(fresh);
        // A little more than half, for half of a random choice is seldom exactly that.
        let room = self.segments.entries_in(partner) * 9 / 16 + 8;
        let old = self.segments.replace(partner, Segment::with_room(room));
        self.segments.push(Segment::with_room(room));
        self.reshape();
        for entry in old.iter() {
            let segment = self.segment_of(self.hasher.hash_of(entry.message));
            if self.segments.room(segment).is_none() {
                self.rebuild(segment, self.segments[segment].groups.len() + 1);
            }
            self.move_in(entry);
        }
    }

    /// Gives memory back: of the last segment, if there are too many, else of this one; whether there was any to give.
    pub(in crate::memory) fn shrink(&mut self, segment: usize) -> bool {
        if self.len * 2 < (self.segments.len() - 1) * MEAN_SEGMENT {
            let last = self.segments.len() - 1;
            let partner = Self::partner(last);
            let both = Segment::with_room(self.segments.entries_in(last) + self.segments.entries_in(partner) + 8);
            let first = self.segments.replace(partner, both);
            let last = self.segments.pop().expect("there is more than one");
            self.reshape();
            first.iter().chain(last.iter()).for_each(|entry| self.move_in(entry));
            return true;
        }
        let (len, groups) = (self.segments.entries_in(segment), self.segments[segment].groups.len());
        let wanted = Segment::groups_for(len * 9 / 8);
        let is_sparse = len * 100 < groups * PLACES * MIN_LOAD_PERCENT && wanted < groups;
        if is_sparse {
            self.rebuild(segment, wanted);
        }
        is_sparse
    }

    /// How many segments there are.
    pub(in crate::memory) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Visits the entries whose deadline may be `tick` (its lowest bits are), in whole segments from number
    /// `position` on, which moves, until about `budget` places were looked at; removes those for which `visit` says
    /// so. Entries that are added meanwhile may be missed; others are not, unless [`Table::shrink`] is called
    /// between two parts of a scan.
    pub(in crate::memory) fn scan(
        &mut self,
        position: &mut usize,
        budget: usize,
        tick: ShortTick,
        mut visit: impl FnMut(&mut Entry) -> Kept,
    ) {
        let (mut looked_at, mut found) = (0, Vec::with_capacity(2 * AHEAD));
        while *position < self.segments.len() && looked_at < budget {
            // The next segment's groups lie elsewhere, where no processor looks by itself.
            if let Some(next) = self.segments.get(*position + 1) {
                next.groups.iter().for_each(fetch);
            }
            let segment = &self.segments[*position];
            looked_at += segment.entries.len() * PLACES;
            // First all places of some segments, so that their entries are on the way when the first is visited.
            for (group, ticks) in segment.groups.iter().enumerate() {
                for place in ticks.ticking(tick.lowest()) {
                    fetch_whole(&segment.entries[group][place]);
                    found.push(Spot { segment: *position, group, place });
                }
            }
            *position += 1;
            if found.len() >= AHEAD {
                found.drain(..).for_each(|spot| self.visit_spot(spot, &mut visit));
            }
        }
        found.drain(..).for_each(|spot| self.visit_spot(spot, &mut visit));
    }

    /// Visits all entries, in whole segments from number `position` on, which moves, until about `budget` places were
    /// looked at.
    pub(in crate::memory) fn visit(
        &mut self,
        position: &mut usize,
        budget: usize,
        mut visit: impl FnMut(&mut Entry),
    ) {
        let mut looked_at = 0;
        while *position < self.segments.len() && looked_at < budget {
            let (segment, _) = self.segments.at(*position);
            looked_at += segment.entries.len() * PLACES;
            segment.visit(&mut visit);
            *position += 1;
        }
    }

    fn visit_spot(
        &mut self,
        Spot { segment: number, group, place }: Spot,
        visit: &mut impl FnMut(&mut Entry) -> Kept,
    ) {
        let (segment, room) = self.segments.at(number);
        let entry = &mut segment.entries[group][place];
        if visit(entry) == Kept::No {
            let home = self.hasher.hash_of(entry.message).group(segment.groups.len());
            segment.remove(room, home, group, place);
            self.len -= 1;
        }
    }

    /// Whether a scan that stands at `position` is over.
    pub(in crate::memory) fn is_scanned(&self, position: usize) -> bool {
        position >= self.segments.len()
    }
}

/// Whether an entry stays where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::memory) enum Kept {
    Yes,
    No,
}
