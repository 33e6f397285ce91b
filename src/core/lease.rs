//! Who leads: the contract of a lease on a ring.

use std::time::{Duration, Instant};

use super::ring::Reply;

/// Whether this sidecar may turn the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// It leads under this epoch; tend the lease again before the time given, if one is.
    Leads {
        /// The fencing token.
        epoch: u64,
        /// When the lease wants to be renewed; never where nobody else could lead.
        renew_at: Option<Instant>,
    },
    /// Another leads; ask again after this long.
    Follows {
        /// When to stand for election again.
        retry_after: Duration,
    },
}

/// Time-bounded leadership over one ring.
pub trait Lease: Send + Sync {
    /// Acquires or renews, whichever is in order at `now`.
    fn tend(&self, now: Instant) -> Reply<Leadership>;

    /// Gives the lease up, so that another can lead at once. Giving up what one does not have is no error.
    fn release(&self, now: Instant) -> Reply<()>;

    /// Registers who is to be told that the lease may be free, so that it is asked for before its time.
    fn on_vacancy(&self, tell: Box<dyn Fn() + Send + Sync>);
}
