//! The metrics and log lines of a ticker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tracing::{error, warn};

use crate::core::{LatencyHistogram, PublishStep, Refusal, Ring, Tick, TickCounts};
use crate::metrics::Metrics;

/// How long expiry must be behind at every tick before a warning is logged. Expiry is behind if the work for
/// earlier ticks is not complete when a tick expires. A single large tick causes no warning.
const BEHIND_FOR: Duration = Duration::from_secs(1);

/// How long a store must not refuse before it counts as recovered, or two ticks if that is longer.
const CALM: Duration = Duration::from_secs(2);

/// Counts and logs the events of a ticker.
pub(super) struct Reports {
    pub(super) metrics: Arc<Metrics>,
    /// Since when expiry has been behind at every tick.
    pub(super) behind_since: Option<Instant>,
    /// When the store refused last. `None` if no refusal was logged, or if the recovery was already reported.
    pub(super) refused_at: Option<Instant>,
}

impl Reports {
    /// Records a stall of this length; zero means that there was none.
    pub(super) fn stall(&self, stalled: Duration) {
        if !stalled.is_zero() {
            self.metrics.stalls.inc();
            warn!(
                ?stalled,
                "this process was stalled, and that time does not count as silence of a peer: was it paused, or short \
                 of CPU?"
            );
        }
    }

    pub(super) fn shift(&self, ticks: u64) {
        if ticks > 0 {
            self.metrics.shifted_ticks.inc_by(ticks);
            warn!(
                ticks,
                "the pointer did not move for this number of ticks: every deadline is shifted by them, so that no \
                 client counts as offline because of a stall of the sidecar; look for a paused or starved process, an \
                 outage of Redis, or a time without a leader"
            );
        }
    }

    /// Records a step of expiry.
    pub(super) fn expiry_step(&mut self, step: &PublishStep, ring: &dyn Ring, now: Instant) {
        if let Some((tick, counts)) = step.counted {
            self.expired_tick(tick, counts);
            self.metrics.expiry_behind_ticks.inc_by(u64::from(step.behind > 0));
            if is_behind_for_long(&mut self.behind_since, step.behind, now) {
                // This limits the log to one line per second.
                self.behind_since = None;
                let status = ring.status(now).now_or_never().and_then(Result::ok);
                warn!(
                    tick = ?ring.wheel().tick_length(),
                    in_flight = status.map(|status| status.in_flight),
                    ticks_behind = step.behind,
                    "expiry cannot keep up with the ticks: timeouts are late, and stalls shift every deadline; raise \
                     --tick, lower --max-in-flight, or give the process more CPU"
                );
            }
        }
        if let Some(published) = step.published {
            self.metrics.batches_published.inc();
            if let Some(lateness) = published.lateness {
                let mut histogram = LatencyHistogram::default();
                histogram.record(lateness, published.messages);
                self.metrics.timeout_lateness.add(&histogram);
            }
        }
    }

    fn expired_tick(&self, tick: Tick, counts: TickCounts) {
        let (metrics, timed_out) = (&self.metrics, counts.timed_out());
        let total = if counts.drained { &metrics.messages_drained } else { &metrics.messages_timed_out };
        total.inc_by(timed_out);
        if counts.storm {
            metrics.storm_ticks.inc();
            error!(
                %tick,
                added = counts.added,
                acked = counts.acked,
                timed_out,
                "storm: more messages of one tick timed out than dead clients explain; the batches of this tick are \
                 flagged: look for a fault between the clients and the logic nodes before marking clients offline"
            );
        }
    }

    /// Records that the store refused a step.
    pub(super) fn refusal(&mut self, refusal: &Refusal, retry: Duration, now: Instant) {
        if self.refused_at.replace(now).is_none() {
            warn!(
                %refusal,
                "the store refused to move the pointer: until it accepts, messages time out only if another sidecar \
                 moves it; trying again every {retry:?}: look at the store and the network to it"
            );
        }
    }

    /// Records that a step succeeded. Returns whether the store has now recovered from logged refusals.
    pub(super) fn is_recovery(&mut self, tick_length: Duration, now: Instant) -> bool {
        let calm = CALM.max(tick_length * 2);
        self.refused_at.take_if(|refused_at| now >= *refused_at + calm).is_some()
    }
}

/// Returns whether expiry has been behind at every tick for at least [`BEHIND_FOR`]. `ticks` is the number of ticks by
/// which expiry is behind now. Updates `since`, the time at which expiry fell behind.
fn is_behind_for_long(since: &mut Option<Instant>, ticks: usize, now: Instant) -> bool {
    if ticks == 0 {
        *since = None;
    }
    ticks > 0 && now.saturating_duration_since(*since.get_or_insert(now)) >= BEHIND_FOR
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_expiry_that_is_behind_at_every_tick_for_a_while_is_reported() {
        let (mut since, begin) = (None, Instant::now());
        let at = |ms| begin + Duration::from_millis(ms);
        let behind = [(0, 0), (3, 10), (2, 500), (1, 1_009), (0, 1_010), (1, 1_020), (1, 2_019), (5, 2_020)];
        let reported = behind.map(|(ticks, ms)| is_behind_for_long(&mut since, ticks, at(ms)));
        assert_eq!(reported, [false, false, false, false, false, false, false, true]);
    }
}
