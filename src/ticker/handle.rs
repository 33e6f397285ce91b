//! How a drain reaches the ticker.

use tokio::sync::{mpsc, oneshot};

use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::Handover;

/// Where the answer to a drain goes.
pub(super) type Answer = oneshot::Sender<Result<Handover, Refusal>>;

/// Asks a ticker to drain its ring.
#[derive(Clone, Debug)]
pub struct TickerHandle {
    pub(super) drains: mpsc::UnboundedSender<Answer>,
}

impl TickerHandle {
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
