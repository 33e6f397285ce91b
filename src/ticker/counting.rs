//! What a step of expiry did becomes counters, the last ticks of the status, and a word about a storm.

use tracing::error;

use super::Ticker;
use crate::core::latency_histogram::LatencyHistogram;
use crate::core::ring::PublishStep;

impl Ticker {
    pub(super) fn count(&self, expired: &PublishStep) {
        if let Some((tick, counts)) = expired.counted {
            self.recent.note(tick, counts);
            let timed_out =
                if counts.drained { &self.metrics.messages_drained } else { &self.metrics.messages_timed_out };
            timed_out.inc_by(counts.timed_out());
            if counts.storm {
                self.metrics.storm_ticks.inc();
                error!(
                    %tick,
                    added = counts.added,
                    acked = counts.acked,
                    timed_out = counts.timed_out(),
                    "storm: more messages of one tick timed out than dead clients explain; its batches are \
                     flagged, look for a fault between the clients and the logic nodes before marking them offline"
                );
            }
        }
        if let Some(published) = expired.published {
            self.metrics.batches_published.inc();
            if let Some(lateness) = published.lateness {
                let mut histogram = LatencyHistogram::default();
                histogram.record(lateness, published.messages);
                self.metrics.timeout_lateness.add(&histogram);
            }
        }
    }
}
