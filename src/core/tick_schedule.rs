//! When the pointer moves: the rule of time and stalls.
//!
//! The pointer moves once a tick, on time and without drift. When it could not, there are two cases:
//!
//! - It is late by less than a tick: it moves at once, and the next move keeps its own time.
//! - It is late by a tick or more: the process, or the machine, stood still. Acknowledgements that came
//!   meanwhile wait unread in the sockets, so nobody may be declared silent for that time: the whole ticks
//!   missed shift every deadline, and the next move comes one tick after waking.

use std::time::{Duration, Instant};

use super::tick::Tick;

/// Where the wheel stands and when it moves next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickSchedule {
    tick_length: Duration,
    pointer: Tick,
    next_advance: Instant,
    /// The ticks by which every deadline was shifted since the last move.
    shifted: u64,
}

/// What the clock asks of the pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing, until then.
    Wait(Instant),
    /// Move by one tick; it is late by this much, less than a tick.
    Advance {
        /// How long after its time the move comes.
        lateness: Duration,
    },
    /// Nothing was done for so long that every deadline shifts.
    Shift {
        /// The whole ticks that were missed, at least 1.
        missed: u64,
    },
}

impl TickSchedule {
    /// A wheel that stands at `pointer` from `now` on.
    #[must_use]
    pub fn new(tick_length: Duration, pointer: Tick, now: Instant) -> TickSchedule {
        TickSchedule { tick_length, pointer, next_advance: now + tick_length, shifted: 0 }
    }

    /// Waits for those who have not been heard since the wheel stood last: the next move comes a tick after `until`.
    #[inline]
    pub fn hold(&mut self, until: Instant) {
        self.next_advance = until + self.tick_length;
    }

    /// The tick at which the wheel stands.
    #[must_use]
    pub const fn pointer(&self) -> Tick {
        self.pointer
    }

    /// When the pointer is to move next.
    #[must_use]
    pub const fn next_advance(&self) -> Instant {
        self.next_advance
    }

    /// The tick at which the wheel should stand by the clock: it can be one ahead of a lagging pointer.
    ///
    /// After a stall that is not yet shifted it is the pointer: the ticks missed will not be made up.
    #[must_use]
    pub fn tick_due(&self, now: Instant) -> Tick {
        match self.turn(now) {
            Turn::Wait(_) | Turn::Shift { .. } => self.pointer,
            Turn::Advance { .. } => self.pointer.plus(1),
        }
    }

    /// What the clock asks of the pointer at `now`.
    #[must_use]
    pub fn turn(&self, now: Instant) -> Turn {
        let Some(lateness) = now.checked_duration_since(self.next_advance) else {
            return Turn::Wait(self.next_advance);
        };
        if lateness < self.tick_length {
            return Turn::Advance { lateness };
        }
        let missed = lateness.as_nanos() / self.tick_length.as_nanos();
        Turn::Shift { missed: u64::try_from(missed).unwrap_or(u64::MAX) }
    }

    /// Moves the pointer by one tick; the next move is due one tick after this one was. Returns the ticks by which every
    /// deadline was shifted since the move before.
    pub fn advanced(&mut self) -> u64 {
        self.pointer = self.pointer.plus(1);
        self.next_advance += self.tick_length;
        std::mem::take(&mut self.shifted)
    }

    /// Shifts every deadline by the ticks that were missed: the next move is due one tick from `now`, which is returned.
    pub fn shift(&mut self, missed: u64, now: Instant) -> Instant {
        self.shifted += missed;
        self.next_advance = now + self.tick_length;
        self.next_advance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_secs(1);

    #[test]
    fn a_late_move_does_not_drift() {
        let start = Instant::now();
        let mut pace = TickSchedule::new(TICK, Tick(7), start);
        assert_eq!(pace.turn(start + TICK / 2), Turn::Wait(start + TICK));
        assert_eq!(pace.tick_due(start + TICK / 2), Tick(7));

        let late = start + TICK + TICK * 9 / 10;
        assert_eq!(pace.turn(late), Turn::Advance { lateness: TICK * 9 / 10 });
        assert_eq!(pace.tick_due(late), Tick(8), "the clock is ahead of the pointer");
        assert_eq!(pace.advanced(), 0, "nothing was shifted");
        assert_eq!(pace.next_advance(), start + TICK * 2);
    }

    #[test]
    fn a_stall_shifts_and_the_next_move_comes_a_tick_after_waking() {
        let start = Instant::now();
        let mut pace = TickSchedule::new(TICK, Tick(7), start);
        let woken = start + TICK * 4 + TICK / 4;
        assert_eq!(pace.turn(woken), Turn::Shift { missed: 3 });
        assert_eq!(pace.tick_due(woken), Tick(7), "missed ticks are not made up");
        assert_eq!(pace.shift(3, woken), woken + TICK);
        assert_eq!(pace.turn(woken), Turn::Wait(woken + TICK));
        assert_eq!(pace.pointer(), Tick(7));
        assert_eq!([pace.advanced(), pace.advanced()], [3, 0], "told with the next move, and once");
    }
}
