//! The segments of a table, and apart from them how much room each has.

use std::ops::Index;

use super::segment::{Room, Segment};

/// Segments by their number.
///
/// Where the groups and entries of a segment lie changes seldom, and its room with each entry. Standing apart, the former
/// stays in the caches of all processors that work on a shard, and of these two only the rooms, sixteen to a cache line,
/// go from one to another.
#[derive(Debug)]
pub(super) struct Segments {
    segments: Vec<Segment>,
    rooms: Vec<Room>,
}

impl Segments {
    pub(super) fn one(empty: Segment) -> Segments {
        Segments { rooms: vec![empty.empty_room()], segments: vec![empty] }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.segments.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter()
    }

    #[inline]
    pub(super) fn get(&self, number: usize) -> Option<&Segment> {
        self.segments.get(number)
    }

    #[inline]
    pub(super) fn room(&self, number: usize) -> &Room {
        &self.rooms[number]
    }

    /// A segment and its room.
    #[inline]
    pub(super) fn at(&mut self, number: usize) -> (&mut Segment, &mut Room) {
        (&mut self.segments[number], &mut self.rooms[number])
    }

    /// How many entries a segment has.
    pub(super) fn entries_in(&self, number: usize) -> usize {
        self.segments[number].len(self.rooms[number])
    }

    pub(super) fn push(&mut self, empty: Segment) {
        self.rooms.push(empty.empty_room());
        self.segments.push(empty);
    }

    pub(super) fn pop(&mut self) -> Option<Segment> {
        self.rooms.pop();
        self.segments.pop()
    }

    /// Puts an empty segment in the place of one; returns that.
    pub(super) fn replace(&mut self, number: usize, empty: Segment) -> Segment {
        self.rooms[number] = empty.empty_room();
        std::mem::replace(&mut self.segments[number], empty)
    }
}

impl Index<usize> for Segments {
    type Output = Segment;

    #[inline]
    fn index(&self, number: usize) -> &Segment {
        &self.segments[number]
    }
}
