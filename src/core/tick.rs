//! Ticks, slots, and the arithmetic of deadlines.
//!
//! The wheel is scheme 4 of Varghese and Lauck, "Hashed and Hierarchical Timing Wheels" (SOSP 1987): a ring of slots
//! with one slot per tick. A *pointer* moves to the next slot once per tick. Adding, acknowledging and expiring a
//! message each cost O(1). A [`Tick`] is an absolute count and is never reused. The position of a tick on the ring is
//! its [slot](Wheel::slot).
//!
//! # Never early
//!
//! Tick `t` is *due* from the time at which the clock reaches it until the clock reaches `t + 1`. A message that is
//! accepted in this time with an ack timeout of `k` ticks gets the deadline `t + k`:
//!
//! ```text
//!  clock    t          t+1                   t+k         t+k+1
//!           |-----x-----|---- ...  ----|------|-----------|------>
//!                 add                         closing     expired
//!                 |<--------- more than k ticks --------->|
//! ```
//!
//! When the pointer reaches `t + k`, that tick is *closing*: its messages can still be acknowledged. Messages of the
//! next revolution may already use the same slot. When the pointer moves on, the tick *expires*, and its messages
//! that are still in flight time out. The add happens somewhere inside tick `t`. So the message times out more than
//! `k` and at most `k + 1` tick lengths after the add.
//!
//! Most timing wheels expire a tick as soon as the pointer reaches it. In such a wheel a message can time out after
//! little more than `k - 1` tick lengths.
//!
//! Deadlines count from the tick that is due by the clock, not from the pointer. The pointer can lag behind the
//! clock. A deadline that counts from a lagging pointer would come too early once the pointer has caught up.

use std::fmt;
use std::time::Duration;

/// A step of the wheel, as an absolute count that is never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Tick(pub u64);

impl Tick {
    /// Returns the tick that comes `ticks` ticks later, or the last possible tick.
    #[must_use]
    pub const fn plus(self, ticks: u64) -> Tick {
        Tick(self.0.saturating_add(ticks))
    }

    /// Returns the number of ticks from `earlier` to this tick, or 0 if `earlier` comes after this tick.
    pub const fn since(self, earlier: Tick) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The smallest possible number of slots.
pub(crate) const MIN_SLOTS: u16 = 1;
/// The largest possible number of slots: one hour at one tick per second.
pub const MAX_SLOTS: u16 = 3_600;
/// The shortest possible tick. Timers of the operating system can be late by 1 ms, which is a tenth of this time.
pub(crate) const MIN_TICK: Duration = Duration::from_millis(10);
/// The longest possible tick.
pub(crate) const MAX_TICK: Duration = Duration::from_secs(30);

/// The dimensions of a ring: the number of slots and the length of a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct Wheel {
    slots: u16,
    tick_length: Duration,
}

/// The error for dimensions that are outside the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WheelError {
    /// The number of slots is too small or too large.
    #[error("a ring of {0} slots is not possible: choose {MIN_SLOTS} to {MAX_SLOTS} slots (15 is usual)")]
    Slots(u64),
    /// The tick is too short, too long, or not a whole number of milliseconds.
    #[error(
        "a tick of {0:?} is not possible: choose whole milliseconds from {MIN_TICK:?} to {MAX_TICK:?} \
         (1s is usual)"
    )]
    TickLength(Duration),
}

impl Wheel {
    /// Returns the dimensions of a ring of `slots` slots whose pointer moves once per `tick_length`.
    ///
    /// # Errors
    ///
    /// Fails if `slots` is not from 1 to [`MAX_SLOTS`], or if `tick_length` is not a whole number of milliseconds
    /// from 10 ms to 30 s.
    pub fn new(slots: u16, tick_length: Duration) -> Result<Wheel, WheelError> {
        if !(MIN_SLOTS..=MAX_SLOTS).contains(&slots) {
            return Err(WheelError::Slots(u64::from(slots)));
        }
        let whole_ms = tick_length.subsec_nanos().is_multiple_of(1_000_000);
        if !whole_ms || !(MIN_TICK..=MAX_TICK).contains(&tick_length) {
            return Err(WheelError::TickLength(tick_length));
        }
        Ok(Wheel { slots, tick_length })
    }

    /// Returns the number of slots. A revolution takes this number of ticks. The default ack timeout has the same
    /// length.
    pub const fn slots(self) -> u16 {
        self.slots
    }

    /// Returns the length of a tick.
    pub const fn tick_length(self) -> Duration {
        self.tick_length
    }

    /// Returns the length of a tick in ms.
    pub fn tick_ms(self) -> u32 {
        u32::try_from(self.tick_length.as_millis()).unwrap_or(u32::MAX)
    }

    /// Returns the duration of `ticks` ticks.
    pub fn ticks(self, ticks: u64) -> Duration {
        self.tick_length.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
    }

    /// Returns the slot of a tick: its position on the ring.
    #[expect(clippy::cast_possible_truncation, reason = "a remainder of a u16 fits a usize")]
    pub const fn slot(self, tick: Tick) -> usize {
        (tick.0 % self.slots as u64) as usize
    }

    /// Returns the deadline of a message that is accepted while tick `due` is due. The drawing in the module
    /// documentation explains it.
    pub fn deadline(self, due: Tick, ack_timeout_ticks: u16) -> Tick {
        debug_assert!(ack_timeout_ticks <= self.slots, "the store checks each request");
        due.plus(u64::from(ack_timeout_ticks))
    }

    /// Returns whether a DelMsg is still answered `late` for a message that timed out at this deadline. `pointer` is
    /// the tick at which the pointer stands. The answer is `late` for one revolution after the deadline has expired.
    pub fn is_late_known(self, deadline: Tick, pointer: Tick) -> bool {
        pointer.since(deadline.plus(1)) < u64::from(self.slots)
    }
}

impl Default for Wheel {
    fn default() -> Self {
        Wheel { slots: 15, tick_length: Duration::from_secs(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_the_tick_due_plus_the_ack_timeout() {
        let wheel = Wheel::default();
        assert_eq!(wheel.deadline(Tick(100), 15), Tick(115));
        assert_eq!(wheel.slot(Tick(115)), wheel.slot(Tick(100)));
        assert_eq!(wheel.slot(Tick(101)), 11);
    }

    #[test]
    fn late_lasts_one_revolution_from_the_expiry() {
        let wheel = Wheel::default();
        assert!(wheel.is_late_known(Tick(20), Tick(21)));
        assert!(wheel.is_late_known(Tick(20), Tick(35)));
        assert!(!wheel.is_late_known(Tick(20), Tick(36)));
    }

    #[test]
    fn impossible_dimensions_are_refused_with_the_remedy() {
        assert_eq!(Wheel::new(0, Duration::from_secs(1)), Err(WheelError::Slots(0)));
        let error = Wheel::new(15, Duration::from_micros(10_500)).unwrap_err().to_string();
        assert!(error.contains("10.5ms") && error.contains("whole milliseconds"), "{error}");
    }
}
