//! Signs of life: for the probe, and for the clock, which so finds out that the process stood still.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tracing::warn;

use super::Ticker;
use crate::core::stall_aware_clock::BEAT;

/// The sidecar is alive if the ticker's loop ran within this time.
pub const LIVENESS: Duration = Duration::from_secs(5);

/// When the ticker's loop ran last.
#[derive(Debug)]
pub struct Heartbeat {
    start: Instant,
    last_ms: AtomicU64,
}

impl Heartbeat {
    /// A pulse that beats now.
    #[must_use]
    pub fn new(now: Instant) -> Heartbeat {
        Heartbeat { start: now, last_ms: AtomicU64::new(0) }
    }

    pub(super) fn beat(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.start).as_millis();
        self.last_ms.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How long ago it beat.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        now.saturating_duration_since(self.start).saturating_sub(last)
    }
}

impl Ticker {
    pub(super) fn beat(&self) {
        self.heartbeat.beat(self.clock.now());
        let stalled = self.clock.beat();
        if !stalled.is_zero() {
            self.metrics.stalls.inc();
            warn!(
                ?stalled,
                "this process stood still, and judges nobody's silence meanwhile: was it paused, or starved?"
            );
        }
    }

    /// Awaits something with a beating pulse: to wait is not to stand still.
    pub(super) async fn beating<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep(BEAT) => self.beat(),
            }
        }
    }
}
