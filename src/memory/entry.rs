//! The entry of a message in the table, in 24 bytes.

use crate::core::{MAX_SLOTS, Message, Stamp, Tick, TimedOut};

/// A tick near the pointer, in two bytes.
///
/// Every tick that an entry names lies at most two revolutions from the pointer, so its lowest sixteen bits
/// tell which one it is, across their wrap too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShortTick(pub(super) u16);

// The pointer, one revolution ahead and one behind, and a drain's jump beyond the last deadline.
const _: () = assert!(3 * (MAX_SLOTS as u32 + 8) < i16::MAX as u32, "sixteen bits must tell all ticks alive");

impl ShortTick {
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    pub(super) const fn of(tick: Tick) -> ShortTick {
        ShortTick(tick.0 as u16)
    }

    /// Whether it comes before `other`.
    pub(super) const fn is_before(self, other: ShortTick) -> bool {
        self.distance_from(other) < 0
    }

    /// How many ticks it comes after `earlier`.
    pub(super) const fn since(self, earlier: ShortTick) -> u16 {
        self.0.wrapping_sub(earlier.0)
    }

    /// The tick itself, seen from one that is near.
    pub(super) const fn seen_from(self, near: Tick) -> Tick {
        Tick(near.0.wrapping_add_signed(self.distance_from(ShortTick::of(near)) as i64))
    }

    /// Its lowest eight bits, by which a table is searched.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    pub(super) const fn lowest(self) -> u8 {
        self.0 as u8
    }

    #[expect(clippy::cast_possible_wrap, reason = "the wrapped difference of near ticks is their distance")]
    const fn distance_from(self, other: ShortTick) -> i16 {
        self.0.wrapping_sub(other.0) as i16
    }
}

/// A message in flight, or one that timed out less than a revolution ago.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) message: Message,
    pub(super) added_at: Stamp,
    pub(super) deadline: ShortTick,
    pub(super) attempt: u8,
    pub(super) marks: Marks,
}

const _: () = assert!(size_of::<Entry>() == 24, "memory per message is a promise");

/// Marks of a message whose tick has expired, or will soon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks(u8);

impl Marks {
    /// It is on the list of its tick's batches.
    pub(super) const LISTED: Marks = Marks(1);
    /// Its latency was recorded by a late del.
    pub(super) const LATE_COUNTED: Marks = Marks(2);

    pub(super) const fn has(self, mark: Marks) -> bool {
        self.0 & mark.0 != 0
    }

    /// Sets a mark; returns whether it was set before.
    pub(super) const fn set(&mut self, mark: Marks) -> bool {
        let was_set = self.has(mark);
        self.0 |= mark.0;
        was_set
    }
}

impl Entry {
    /// Fills an empty cell of the table.
    pub(super) const EMPTY: Entry = Entry::in_flight(Message::new(0, 0), ShortTick(0), Stamp(0), 0);

    pub(super) const fn in_flight(message: Message, deadline: ShortTick, added_at: Stamp, attempt: u8) -> Entry {
        Entry { message, added_at, deadline, attempt, marks: Marks(0) }
    }

    pub(super) const fn timed_out(&self) -> TimedOut {
        TimedOut { message: self.message, attempt: self.attempt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_ticks_tell_near_ticks_apart_across_their_wrap() {
        for near in [Tick(0x1_0000), Tick(0x7_fffe), Tick(1_763_000_000)] {
            for distance in [-7_216_i64, -1, 0, 1, 3_604] {
                let tick = Tick(near.0.wrapping_add_signed(distance));
                assert_eq!(ShortTick::of(tick).seen_from(near), tick);
                assert_eq!(ShortTick::of(tick).is_before(ShortTick::of(near)), distance < 0);
            }
        }
    }
}
