//! The counter of each reason for which requests are refused.

use prometheus::IntCounter;

use super::Metrics;
use crate::core::refusal::Reason;

impl Metrics {
    /// Counts a refusal.
    pub fn count_refusal(&self, reason: Reason) {
        self.refusals_of(reason).inc();
    }

    /// How many requests were refused and connections closed for this reason.
    #[must_use]
    pub fn refusals(&self, reason: Reason) -> u64 {
        self.refusals_of(reason).get()
    }

    fn refusals_of(&self, reason: Reason) -> &IntCounter {
        let index = Reason::ALL.iter().position(|known| *known == reason);
        &self.refusals[index.expect("ALL holds every reason")]
    }
}
