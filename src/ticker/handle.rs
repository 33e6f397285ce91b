//! How others reach a ticker: to see how it goes, and to have it drain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::{Heartbeat, Recent};
use crate::core::batch::TickCounts;
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::Handover;
use crate::core::tick::Tick;

/// Where the answer to a drain goes.
pub(super) type Answer = oneshot::Sender<Result<Handover, Refusal>>;

/// A ticker, as the rest of the sidecar knows it.
#[derive(Clone, Debug)]
pub struct TickerHandle {
    pub(super) drains: mpsc::UnboundedSender<Answer>,
    pub(super) heartbeat: Arc<Heartbeat>,
    pub(super) recent: Arc<Recent>,
}

impl TickerHandle {
    /// For how long the ticker's loop has not run.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Duration {
        self.heartbeat.silence(now)
    }

    /// The ticks that it decided last, the oldest first.
    #[must_use]
    pub fn recent(&self) -> Vec<(Tick, TickCounts)> {
        self.recent.ticks()
    }

    /// Has the ring refuse new messages. Where it does not keep those in flight, they are all in the outbox
    /// when this returns; where it keeps them for other sidecars too, the lease is given up, so that another
    /// leads at once.
    ///
    /// # Errors
    ///
    /// When the store refuses.
    pub async fn drain(&self) -> Result<Handover, Refusal> {
        let (answer, drained) = oneshot::channel();
        let gone = || Refusal::new(Reason::StoreSilent, "the ticker has ended");
        self.drains.send(answer).map_err(|_| gone())?;
        drained.await.unwrap_or_else(|_| Err(gone()))
    }
}
