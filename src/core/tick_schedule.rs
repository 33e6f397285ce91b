//! The schedule of the pointer, which is the position of a ring: when the pointer moves to the next tick, and by how
//! much a stall shifts all deadlines.
//!
//! The pointer moves once per tick, without drift. A late move is treated in one of two ways:
//!
//! - If the move is late by less than a tick, the pointer moves at once. The next move keeps its own due time.
//! - If the move is late by a tick or more, the process or the machine was stalled. Acknowledgements that arrived
//!   during the stall wait unread in the sockets. Therefore the pointer does not make up the missed ticks. This shifts
//!   all deadlines by the number of whole missed ticks. The next move is due one tick after the end of the stall.

use std::time::{Duration, Instant};

use super::tick::Tick;

/// The position of the pointer and the time of its next move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickSchedule {
    tick_length: Duration,
    pointer: Tick,
    next_advance: Instant,
    /// Ticks by which all deadlines were shifted since the last move.
    shifted: u64,
}

/// The action that is due for the pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DueAction {
    /// Nothing is due before this time.
    Wait(Instant),
    /// The pointer moves by one tick.
    Advance {
        /// The time by which the move is late: less than a tick.
        lateness: Duration,
    },
    /// All deadlines are shifted after a stall.
    Shift {
        /// The number of whole missed ticks, at least 1.
        missed: u64,
    },
}

impl TickSchedule {
    /// Creates a schedule for a pointer that stands at `pointer` since `now`.
    pub fn new(tick_length: Duration, pointer: Tick, now: Instant) -> TickSchedule {
        TickSchedule { tick_length, pointer, next_advance: now + tick_length, shifted: 0 }
    }

    /// Delays the next move to one tick after `until`, so that clients of the sidecar can reconnect after a restart.
    #[inline]
    pub fn delay_until(&mut self, until: Instant) {
        self.next_advance = until + self.tick_length;
    }

    /// Returns the tick at which the pointer stands.
    pub const fn pointer(&self) -> Tick {
        self.pointer
    }

    /// Returns when the next move is due.
    pub const fn next_advance(&self) -> Instant {
        self.next_advance
    }

    /// Returns the tick that is due by the clock. If the pointer lags by less than a tick, this is the tick after the
    /// pointer.
    ///
    /// After a stall this is the tick of the pointer, because missed ticks are not made up.
    pub fn tick_due(&self, now: Instant) -> Tick {
        match self.due_action(now) {
            DueAction::Wait(_) | DueAction::Shift { .. } => self.pointer,
            DueAction::Advance { .. } => self.pointer.plus(1),
        }
    }

    /// Returns the action that is due at `now`.
    pub fn due_action(&self, now: Instant) -> DueAction {
        let Some(lateness) = now.checked_duration_since(self.next_advance) else {
            return DueAction::Wait(self.next_advance);
        };
        if lateness < self.tick_length {
            return DueAction::Advance { lateness };
        }
        let missed = lateness.as_nanos() / self.tick_length.as_nanos();
        DueAction::Shift { missed: u64::try_from(missed).unwrap_or(u64::MAX) }
    }

    /// Moves the pointer by one tick. The next move is due one tick after the due time of this move. Returns the
    /// number of ticks by which all deadlines were shifted since the last move.
    pub fn record_move(&mut self) -> u64 {
        self.pointer = self.pointer.plus(1);
        self.next_advance += self.tick_length;
        std::mem::take(&mut self.shifted)
    }

    /// Shifts all deadlines by `missed` ticks, without moving the pointer. Returns the due time of the next move: one
    /// tick after `now`.
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
        let mut schedule = TickSchedule::new(TICK, Tick(7), start);
        assert_eq!(schedule.due_action(start + TICK / 2), DueAction::Wait(start + TICK));
        assert_eq!(schedule.tick_due(start + TICK / 2), Tick(7));

        let late = start + TICK + TICK * 9 / 10;
        assert_eq!(schedule.due_action(late), DueAction::Advance { lateness: TICK * 9 / 10 });
        assert_eq!(schedule.tick_due(late), Tick(8), "the clock is ahead of the pointer");
        assert_eq!(schedule.record_move(), 0, "nothing was shifted");
        assert_eq!(schedule.next_advance(), start + TICK * 2);
    }

    #[test]
    fn a_stall_shifts_and_the_next_move_comes_a_tick_after_waking() {
        let start = Instant::now();
        let mut schedule = TickSchedule::new(TICK, Tick(7), start);
        let woken = start + TICK * 4 + TICK / 4;
        assert_eq!(schedule.due_action(woken), DueAction::Shift { missed: 3 });
        assert_eq!(schedule.tick_due(woken), Tick(7), "missed ticks are not made up");
        assert_eq!(schedule.shift(3, woken), woken + TICK);
        assert_eq!(schedule.due_action(woken), DueAction::Wait(woken + TICK));
        assert_eq!(schedule.pointer(), Tick(7));
        assert_eq!(
            [schedule.record_move(), schedule.record_move()],
            [3, 0],
            "only the next move returns the shift"
        );
    }
}
