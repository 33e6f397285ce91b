//! The state of a ticker that other threads read: its heartbeat, and the last expired ticks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::core::batch::TickCounts;
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::DrainOutcome;
use crate::core::tick::Tick;

/// The process is live if the loop of each ticker ran within this time.
pub const LIVENESS: Duration = Duration::from_secs(5);

/// Number of expired ticks that are remembered: a minute of the default tick, four default revolutions.
pub const RECENT_TICKS: usize = 60;

/// The sender of the answer to a drain.
pub(super) type DrainReply = oneshot::Sender<Result<DrainOutcome, Refusal>>;

/// Access to a ticker for the rest of the sidecar.
#[derive(Clone, Debug)]
pub struct TickerHandle {
    drains: mpsc::UnboundedSender<DrainReply>,
    /// When the loop ran last.
    heartbeat: Arc<Mutex<Instant>>,
    /// The last ticks that this sidecar expired. A follower learns nothing of them. A tick is missing if the answer
    /// of the store was lost.
    recent_ticks: Arc<Mutex<VecDeque<(Tick, TickCounts)>>>,
}

impl TickerHandle {
    pub(super) fn new(drains: mpsc::UnboundedSender<DrainReply>, now: Instant) -> TickerHandle {
        TickerHandle { drains, heartbeat: Arc::new(Mutex::new(now)), recent_ticks: Arc::default() }
    }

    /// The time since the loop of the ticker ran last.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(*self.heartbeat.lock())
    }

    /// The last expired ticks, oldest first: at most [`RECENT_TICKS`], each once.
    #[must_use]
    pub fn recent(&self) -> Vec<(Tick, TickCounts)> {
        self.recent_ticks.lock().iter().copied().collect()
    }

    /// Makes the ring refuse new messages. If the store does not keep the messages in flight, all of them are in the
    /// outbox when this returns. If it keeps them for other sidecars too, the lease is released, so that another one
    /// leads at once.
    ///
    /// # Errors
    ///
    /// If the store refuses.
    pub async fn drain(&self) -> Result<DrainOutcome, Refusal> {
        let (reply, drained) = oneshot::channel();
        let ended = || Refusal::new(Reason::StoreTimeout, "the ticker has ended");
        self.drains.send(reply).map_err(|_| ended())?;
        drained.await.unwrap_or_else(|_| Err(ended()))
    }

    pub(super) fn record_heartbeat(&self, now: Instant) {
        *self.heartbeat.lock() = now;
    }

    /// Records an expired tick. Messages that a drain publishes early are not an expired tick.
    pub(super) fn record_tick(&self, tick: Tick, counts: TickCounts) {
        if counts.drained {
            return;
        }
        let mut ticks = self.recent_ticks.lock();
        // A ring that was lost and recreated may start at a tick that had already expired.
        while ticks.back().is_some_and(|(last, _)| *last >= tick) {
            ticks.pop_back();
        }
        if ticks.len() == RECENT_TICKS {
            ticks.pop_front();
        }
        ticks.push_back((tick, counts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> TickerHandle {
        TickerHandle::new(mpsc::unbounded_channel().0, Instant::now())
    }

    fn recorded(ticker: &TickerHandle) -> Vec<u64> {
        ticker.recent_ticks.lock().iter().map(|(tick, _)| tick.0).collect()
    }

    #[test]
    fn the_oldest_tick_is_dropped_and_a_drain_is_no_tick() {
        let ticker = handle();
        for tick in 1..=100 {
            ticker.record_tick(Tick(tick), TickCounts { added: tick, ..TickCounts::default() });
        }
        ticker.record_tick(Tick(101), TickCounts { drained: true, ..TickCounts::default() });
        assert_eq!(recorded(&ticker), (41..=100).collect::<Vec<_>>());
        assert!(ticker.recent_ticks.lock().iter().all(|(tick, counts)| tick.0 == counts.added));
    }

    #[test]
    fn a_recreated_ring_leaves_no_tick_twice() {
        let ticker = handle();
        for tick in [7, 8, 9, 8, 12] {
            ticker.record_tick(Tick(tick), TickCounts::default());
        }
        assert_eq!(recorded(&ticker), [7, 8, 12]);
    }
}
