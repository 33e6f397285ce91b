//! The entry of a message in the table of messages. It takes 24 bytes.

use crate::core::{MAX_SLOTS, Message, Stamp, Tick, TimedOut};

/// The lowest sixteen bits of a tick near the pointer.
///
/// The deadline of an entry is at most two revolutions away from the pointer. So sixteen bits identify its tick, even
/// when they wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShortTick(pub(super) u16);

// Sixteen bits must cover a revolution before the pointer and a revolution after it. They must also cover the tick up
// to which a drain expires all ticks, which is later than every deadline.
const _: () = assert!(3 * (MAX_SLOTS as u32 + 8) < i16::MAX as u32, "sixteen bits must suffice for all ticks");

impl ShortTick {
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    pub(super) const fn of(tick: Tick) -> ShortTick {
        ShortTick(tick.0 as u16)
    }

    /// Returns whether this tick comes before `other`.
    pub(super) const fn is_before(self, other: ShortTick) -> bool {
        self.distance_from(other) < 0
    }

    /// Returns by how many ticks this tick comes after `earlier`.
    pub(super) const fn since(self, earlier: ShortTick) -> u16 {
        self.0.wrapping_sub(earlier.0)
    }

    /// Returns the whole tick. `near` is any tick less than 32,768 ticks away.
    pub(super) const fn seen_from(self, near: Tick) -> Tick {
        Tick(near.0.wrapping_add_signed(self.distance_from(ShortTick::of(near)) as i64))
    }

    /// Returns the lowest eight bits. The table stores these bits apart from the entries, so that a scan finds the
    /// entries of a tick quickly.
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what it keeps")]
    pub(super) const fn lowest(self) -> u8 {
        self.0 as u8
    }

    #[expect(clippy::cast_possible_wrap, reason = "the wrapped difference of near ticks is their distance")]
    const fn distance_from(self, other: ShortTick) -> i16 {
        self.0.wrapping_sub(other.0) as i16
    }
}

/// A message that is in flight, or that timed out less than one revolution ago.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) message: Message,
    pub(super) added_at: Stamp,
    pub(super) deadline: ShortTick,
    pub(super) attempt: u8,
    pub(super) marks: Marks,
}

const _: () = assert!(size_of::<Entry>() == 24, "memory per message is a promise");

/// Marks of a message whose tick has expired or expires next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks(u8);

impl Marks {
    /// The message is *listed*: it is on the list from which the batches of its tick are made.
    pub(super) const LISTED: Marks = Marks(1);
    /// An Ack has arrived after the timeout, and its latency was recorded.
    pub(super) const LATE_COUNTED: Marks = Marks(2);

    pub(super) const fn has(self, mark: Marks) -> bool {
        self.0 & mark.0 != 0
    }

    /// Sets a mark. Returns whether the mark was set before.
    pub(super) const fn set(&mut self, mark: Marks) -> bool {
        let was_set = self.has(mark);
        self.0 |= mark.0;
        was_set
    }
}

impl Entry {
    /// The content of an empty cell of the table.
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
