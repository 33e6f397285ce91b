//! Expiry that cannot keep up with the ticks is counted and reported.

use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tracing::warn;

use super::Ticker;
use crate::core::ring::PublishStep;

/// Reported is expiry that has been behind with every tick for so long: a single large tick is not.
const REPORTED_AFTER: Duration = Duration::from_secs(1);

/// For how long expiry has been behind.
#[derive(Debug, Default)]
pub(super) struct Behind {
    /// When the first tick of those in a row expired while earlier ones were not done.
    since: Option<Instant>,
}

impl Behind {
    /// A tick has expired while so many were not done; returns whether that has lasted.
    fn note(&mut self, ticks: usize, now: Instant) -> bool {
        if ticks == 0 {
            self.since = None;
            return false;
        }
        now.saturating_duration_since(*self.since.get_or_insert(now)) >= REPORTED_AFTER
    }
}

impl Ticker {
    pub(super) fn note_behind(&mut self, expired: &PublishStep) {
        if expired.counted.is_none() {
            return;
        }
        if expired.behind > 0 {
            self.metrics.expiry_behind_ticks.inc();
        }
        let now = self.clock.now();
        if !self.behind.note(expired.behind, now) {
            return;
        }
        // Again after another second at the earliest.
        self.behind = Behind::default();
        let status = self.seat.ring.status(now).now_or_never().and_then(Result::ok);
        warn!(
            tick = ?self.seat.ring.wheel().tick_length(),
            in_flight = status.map(|ring| ring.in_flight),
            ticks_behind = expired.behind,
            "expiry cannot keep up with the ticks: timeouts come late, and stalls shift every deadline; raise --tick, lower \
             --max-in-flight, or give the process more CPU"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_behind_with_every_tick_for_a_while_is_reported() {
        let (mut behind, begin) = (Behind::default(), Instant::now());
        let at = |ms| begin + Duration::from_millis(ms);
        let noted = [(0, 0), (3, 10), (2, 500), (1, 1_009), (0, 1_010), (1, 1_020), (1, 2_019), (5, 2_020)];
        let reported = noted.map(|(ticks, ms)| behind.note(ticks, at(ms)));
        assert_eq!(reported, [false, false, false, false, false, false, false, true]);
    }
}
