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

const _: () = assert!(STALL.as_millis() >= 2 * BEAT.as_millis(), "one beat that is late is no stall");

/// A clock that does not count stalls.
#[derive(Clone, Copy, Debug)]
pub struct AliveTime {
    last_beat: Instant,
    stalled: Duration,
}

impl AliveTime {
    /// A clock that starts at `now`.
    #[must_use]
    pub fn new(now: Instant) -> AliveTime {
        AliveTime { last_beat: now, stalled: Duration::ZERO }
    }

    /// Notes that the process runs, and returns for how long it did not since the last beat.
    pub fn beat(&mut self, now: Instant) -> Duration {
        let stalled = self.stalled_since_beat(now);
        self.stalled += stalled;
        self.last_beat = now;
        stalled
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
        let mut alive = AliveTime::new(start);
        assert_eq!(alive.beat(start + BEAT), Duration::ZERO);
        let woken = start + BEAT + Duration::from_secs(60);
        assert_eq!(alive.at(woken), start + BEAT * 2);
        assert_eq!(alive.beat(woken), Duration::from_secs(60).saturating_sub(BEAT));
        assert_eq!(alive.at(woken + BEAT), start + BEAT * 3);
    }
}
