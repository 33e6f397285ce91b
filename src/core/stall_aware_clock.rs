//! The time that this process was alive: a clock that stands still while the process does.
//!
//! Whoever judges a peer by its silence, or a batch by its missing acknowledgement, must not count the
//! time in which nobody here could have heard. A beat tells that the process runs; where beats are missing,
//! the clock stood still.

use std::time::{Duration, Instant};

/// How often the beat is expected.
pub const BEAT: Duration = Duration::from_millis(50);

/// How long a beat may fail to come before the process counts as stalled.
pub const STALL: Duration = Duration::from_millis(150);

/// How long after a stall what was sent meanwhile may still be on its way here.
pub const WAKING: Duration = Duration::from_secs(1);

const _: () = assert!(STALL.as_millis() >= 2 * BEAT.as_millis(), "one beat that is late is no stall");

/// A clock that does not count stalls.
#[derive(Clone, Copy, Debug)]
pub struct StallAwareClock {
    last_beat: Instant,
    stalled: Duration,
    /// When the end of the last stall was noticed.
    woken: Option<Instant>,
}

impl StallAwareClock {
    /// A clock that starts at `now`.
    #[must_use]
    pub fn new(now: Instant) -> StallAwareClock {
        StallAwareClock { last_beat: now, stalled: Duration::ZERO, woken: None }
    }

    /// Notes that the process runs, and returns for how long it did not since the last beat.
    pub fn beat(&mut self, now: Instant) -> Duration {
        let stalled = self.stalled_since_beat(now);
        self.stalled += stalled;
        self.last_beat = now;
        if !stalled.is_zero() {
            self.woken = Some(now);
        }
        stalled
    }

    /// Whether a stall has ended within the last [`WAKING`].
    #[must_use]
    pub fn is_waking(&self, now: Instant) -> bool {
        let since = |woken| now.saturating_duration_since(woken) < WAKING;
        self.woken.is_some_and(since) || !self.stalled_since_beat(now).is_zero()
    }

    /// The time alive at `now`: also right in the moment after a stall, before the next beat.
    #[must_use]
    pub fn at(&self, now: Instant) -> Instant {
        now.checked_sub(self.stalled + self.stalled_since_beat(now)).unwrap_or(now)
    }

    fn stalled_since_beat(&self, now: Instant) -> Duration {
        let gap = now.saturating_duration_since(self.last_beat);
        if gap > STALL { gap.saturating_sub(BEAT) } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_does_not_count_before_and_after_it_is_noticed() {
        let start = Instant::now();
        let mut alive = StallAwareClock::new(start);
        assert_eq!(alive.beat(start + BEAT), Duration::ZERO);
        let woken = start + BEAT + Duration::from_secs(60);
        assert_eq!(alive.at(woken), start + BEAT * 2);
        assert!(!alive.is_waking(start + BEAT * 2) && alive.is_waking(woken), "before it is noticed too");
        assert_eq!(alive.beat(woken), Duration::from_secs(60).saturating_sub(BEAT));
        assert_eq!(alive.at(woken + BEAT), start + BEAT * 3);
        assert!(alive.is_waking(woken + BEAT));
        let beats = (1..).map(|beat| woken + BEAT * beat).take_while(|beat| *beat <= woken + WAKING);
        beats.for_each(|beat| assert_eq!(alive.beat(beat), Duration::ZERO));
        assert!(!alive.is_waking(woken + WAKING));
    }
}
