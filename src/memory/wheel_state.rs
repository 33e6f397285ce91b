//! The position of the wheel: which tick the pointer stands at, and which ticks are expired.

use std::time::Instant;

use super::entry::{Entry, ShortTick};
use crate::core::latency_histogram::Stamp;
use crate::core::tick::{Tick, Wheel};
use crate::core::tick_schedule::TickSchedule;

/// The position of the pointer, the time of its next move, and the phase of a drain. Each request batch reads it; expiry
/// writes it.
#[derive(Debug)]
pub(super) struct WheelState {
    pub(super) schedule: TickSchedule,
    /// Ticks below this one are expired. It is the pointer, and after a drain beyond every deadline.
    pub(super) expired_below: Tick,
    /// Whether new messages are refused.
    pub(super) draining: bool,
    /// Whether a drain has expired everything: nothing is left.
    pub(super) handed_out: bool,
    /// Whether all of it was written down for the next start: what changes from now on would be forgotten.
    pub(super) saved: bool,
}

impl WheelState {
    pub(super) fn new(wheel: Wheel, pointer: Tick, now: Instant) -> WheelState {
        WheelState {
            schedule: TickSchedule::new(wheel.tick_length(), pointer, now),
            expired_below: pointer,
            draining: false,
            handed_out: false,
            saved: false,
        }
    }

    /// The position for a request batch that is done at `now`, whose stamp is `stamp`.
    pub(super) fn position(&self, wheel: Wheel, now: Instant, stamp: Stamp) -> Position {
        Position {
            wheel,
            pointer: self.schedule.pointer(),
            pointer_index: index(self.schedule.pointer(), wheel),
            expired_below: self.expired_below,
            due: self.schedule.tick_due(now),
            now: stamp,
        }
    }
}

/// The position of the wheel while a request batch is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    pub(super) wheel: Wheel,
    pub(super) pointer: Tick,
    /// The pointer's remainder among the counts of a shard.
    pub(super) pointer_index: usize,
    /// Ticks below this one are expired. It is the pointer, and after a drain beyond every deadline.
    pub(super) expired_below: Tick,
    /// The tick due, or the first open one.
    pub(super) due: Tick,
    /// The time.
    pub(super) now: Stamp,
}

impl Position {
    /// The deadline of a message that is added now.
    pub(super) fn deadline(&self, ack_timeout_ticks: u16) -> Tick {
        self.wheel.deadline(self.due.max(self.expired_below), ack_timeout_ticks)
    }

    pub(super) fn is_expired(&self, entry: &Entry) -> bool {
        entry.deadline.is_before(ShortTick::of(self.expired_below))
    }

    pub(super) fn is_remembered(&self, entry: &Entry) -> bool {
        self.wheel.is_late_known(entry.deadline.seen_from(self.pointer), self.pointer)
    }
}

/// How many ticks can have messages in flight at a time: a deadline is at most one revolution after the tick due,
/// which is at most one tick ahead of the pointer, whose own tick is alive too.
pub(super) fn horizon(wheel: Wheel) -> u64 {
    u64::from(wheel.slots()) + 4
}

/// The index of the counts of a tick.
#[expect(clippy::cast_possible_truncation, reason = "a remainder of a few thousand fits a length")]
pub(super) fn index(tick: Tick, wheel: Wheel) -> usize {
    (tick.0 % horizon(wheel)) as usize
}
