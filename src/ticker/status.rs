//! The state of a ticker that other threads read: its heartbeat, and the last expired ticks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
    pub(super) drains: mpsc::UnboundedSender<DrainReply>,
    pub(super) status: Arc<TickerStatus>,
}

impl TickerHandle {
    /// The time since the loop of the ticker ran last.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        self.status.silence(now)
    }

    /// The last expired ticks, oldest first: at most [`RECENT_TICKS`], each once.
    #[must_use]
    pub fn recent(&self) -> Vec<(Tick, TickCounts)> {
        self.status.recent_ticks.lock().iter().copied().collect()
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
}

#[derive(Debug)]
pub(super) struct TickerStatus {
    start: Instant,
    /// When the loop ran last, in ms since the start.
    heartbeat_ms: AtomicU64,
    /// The last ticks that this sidecar expired. A follower learns nothing of them. A tick is missing if the answer
    /// of the store was lost.
    recent_ticks: Mutex<VecDeque<(Tick, TickCounts)>>,
}

impl TickerStatus {
    pub(super) fn new(now: Instant) -> TickerStatus {
        TickerStatus { start: now, heartbeat_ms: AtomicU64::new(0), recent_ticks: Mutex::default() }
    }

    pub(super) fn record_heartbeat(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.start).as_millis();
        self.heartbeat_ms.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn silence(&self, now: Instant) -> Duration {
        let last = Duration::from_millis(self.heartbeat_ms.load(Ordering::Relaxed));
        now.saturating_duration_since(self.start).saturating_sub(last)
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

    fn recorded(status: &TickerStatus) -> Vec<u64> {
        status.recent_ticks.lock().iter().map(|(tick, _)| tick.0).collect()
    }

    #[test]
    fn the_oldest_tick_is_dropped_and_a_drain_is_no_tick() {
        let status = TickerStatus::new(Instant::now());
        for tick in 1..=100 {
            status.record_tick(Tick(tick), TickCounts { added: tick, ..TickCounts::default() });
        }
        status.record_tick(Tick(101), TickCounts { drained: true, ..TickCounts::default() });
        assert_eq!(recorded(&status), (41..=100).collect::<Vec<_>>());
        assert!(status.recent_ticks.lock().iter().all(|(tick, counts)| tick.0 == counts.added));
    }

    #[test]
    fn a_recreated_ring_leaves_no_tick_twice() {
        let status = TickerStatus::new(Instant::now());
        for tick in [7, 8, 9, 8, 12] {
            status.record_tick(Tick(tick), TickCounts::default());
        }
        assert_eq!(recorded(&status), [7, 8, 12]);
    }
}
