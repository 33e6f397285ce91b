//! A monotonic clock that stops during a *stall*, which is a time in which this process does not run.
//!
//! A peer counts as gone after some time of silence, and a batch as overdue after some time without an
//! acknowledgement. Time in which this process could not read must not count. Therefore the process calls
//! [`StallAwareClock::beat`] regularly, and the clock leaves out times without a beat.

use std::time::{Duration, Instant};

/// The interval between two beats.
pub const CLOCK_BEAT: Duration = Duration::from_millis(50);

/// The maximum time between two beats. A longer gap is a stall.
pub const SHORTEST_STALL: Duration = Duration::from_millis(150);

/// For this long after a stall, bytes that peers sent during the stall may still arrive.
pub const WAKING_TIME: Duration = Duration::from_secs(1);

const _: () = assert!(SHORTEST_STALL.as_millis() >= 2 * CLOCK_BEAT.as_millis(), "a single late beat is no stall");

/// A monotonic clock that leaves out stalls.
#[derive(Clone, Copy, Debug)]
pub struct StallAwareClock {
    last_beat: Instant,
    stalled: Duration,
    /// When the end of the last stall was detected.
    woken: Option<Instant>,
}

impl StallAwareClock {
    /// Creates a clock that starts at `now`.
    pub fn new(now: Instant) -> StallAwareClock {
        StallAwareClock { last_beat: now, stalled: Duration::ZERO, woken: None }
    }

    /// Records a beat, which shows that the process runs. Returns the length of the stall since the last beat, or zero
    /// if there was none.
    pub fn beat(&mut self, now: Instant) -> Duration {
        let stalled = self.stalled_since_beat(now);
        self.stalled += stalled;
        self.last_beat = now;
        if !stalled.is_zero() {
            self.woken = Some(now);
        }
        stalled
    }

    /// Returns whether a stall ended within the last [`WAKING_TIME`]. This includes a stall that no beat has detected
    /// yet.
    pub fn is_waking(&self, now: Instant) -> bool {
        let since = |woken| now.saturating_duration_since(woken) < WAKING_TIME;
        self.woken.is_some_and(since) || !self.stalled_since_beat(now).is_zero()
    }

    /// Returns the stall-aware time at `now`. It is also correct between the end of a stall and the next beat.
    pub fn at(&self, now: Instant) -> Instant {
        now.checked_sub(self.stalled + self.stalled_since_beat(now)).unwrap_or(now)
    }

    fn stalled_since_beat(&self, now: Instant) -> Duration {
        let gap = now.saturating_duration_since(self.last_beat);
        if gap > SHORTEST_STALL { gap.saturating_sub(CLOCK_BEAT) } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_does_not_count_before_and_after_it_is_detected() {
        let start = Instant::now();
        let mut clock = StallAwareClock::new(start);
        assert_eq!(clock.beat(start + CLOCK_BEAT), Duration::ZERO);
        let woken = start + CLOCK_BEAT + Duration::from_secs(60);
        assert_eq!(clock.at(woken), start + CLOCK_BEAT * 2);
        assert!(!clock.is_waking(start + CLOCK_BEAT * 2) && clock.is_waking(woken), "before a beat detects it");
        assert_eq!(clock.beat(woken), Duration::from_secs(60).saturating_sub(CLOCK_BEAT));
        assert_eq!(clock.at(woken + CLOCK_BEAT), start + CLOCK_BEAT * 3);
        assert!(clock.is_waking(woken + CLOCK_BEAT));
        let beats = (1..).map(|beat| woken + CLOCK_BEAT * beat).take_while(|beat| *beat <= woken + WAKING_TIME);
        beats.for_each(|beat| assert_eq!(clock.beat(beat), Duration::ZERO));
        assert!(!clock.is_waking(woken + WAKING_TIME));
    }
}
