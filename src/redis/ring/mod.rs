//! The ring in Redis.
//!
//! Every outcome is decided in a script, by comparing a message's deadline with the pointer in `meta`; so the
//! winner rule of the memory ring is kept by Redis running one script at a time.
//!
//! # Time
//!
//! `due_ms` in `meta` is the time, by Redis' clock, at which the pointer was due to be where it is. An add takes
//! the tick due from it; the script that advances never moves before `due_ms` plus a tick, and sets the next
//! `due_ms` no earlier. Both compare with the same clock, so no delay of the network makes a message early:
//!
//! ```text
//!   tick due at x = pointer + (time(x) - due) / tick      the pointer moves only at time >= due + tick
//!   next due     >= due + tick                            hence: decided at time > time(x) + k ticks
//! ```
//!
//! The leader waits by its own monotonic clock for as long as the answer of the last script says. A clock that was set
//! shows as a difference beyond [`CLOCK_SLACK`](crate::redis::leader::term::CLOCK_SLACK), and then the monotonic clock
//! decides.

mod advance;
mod publish;
mod repair;
mod status;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::task::AbortOnDropHandle;

use self::repair::Repair;
use crate::core::completions::Completions;
use crate::core::request_batch::RequestBatch;
use crate::core::ring::{Advance, ConnectionId, DrainOutcome, PublishStep, Reply, Ring, RingStatus, Submitted};
use crate::core::tick::Wheel;
use crate::redis::batching::driver::BatchDriver;
use crate::redis::context::{RingContext, later};
use crate::redis::leader::term::WATCH;

/// How often the watch calls Redis: it sees all of a stall but at most so much.
const WATCH_EVERY: Duration = Duration::from_millis(25);

/// A ring that lives in Redis.
pub(super) struct RedisRing(Arc<Inner>);

struct Inner {
    context: Arc<RingContext>,
    driver: Arc<BatchDriver>,
    repair: Repair,
    _watch: AbortOnDropHandle<()>,
}

impl RedisRing {
    pub(super) fn new(context: Arc<RingContext>, driver: Arc<BatchDriver>) -> RedisRing {
        let watch = AbortOnDropHandle::new(tokio::spawn(watch(Arc::clone(&context))));
        let repair = Repair::new(Arc::clone(&context));
        RedisRing(Arc::new(Inner { context, driver, repair, _watch: watch }))
    }
}

impl Ring for RedisRing {
    fn wheel(&self) -> Wheel {
        self.0.context.options.wheel
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        _now: Instant,
    ) -> Submitted {
        self.0.driver.submit(batch, connection, completions);
        Submitted::Pending
    }

    fn advance(&self, now: Instant) -> Reply<Advance> {
        later(&self.0, |inner| async move { inner.advance(now).await })
    }

    fn publish_expired(&self, _now: Instant) -> Reply<PublishStep> {
        later(&self.0, |inner| async move { inner.publish_expired().await })
    }

    fn drain(&self, _now: Instant) -> Reply<DrainOutcome> {
        self.0.driver.drain();
        Reply::ok(DrainOutcome::Kept)
    }

    fn status(&self, now: Instant) -> Reply<RingStatus> {
        later(&self.0, |inner| async move { inner.status(now).await })
    }
}

/// Calls Redis before each move of a leader, to see whether it stalls; never ends.
///
/// A leader without requests of clients would not know that Redis stalled just before a decision, while Acks wait at the
/// other sidecars.
async fn watch(context: Arc<RingContext>) {
    let RingContext { link, term, .. } = &*context;
    loop {
        let now = link.clock().now();
        let early = term.get().map_or(WATCH, |term| term.next.at.saturating_duration_since(now + WATCH));
        if early.is_zero() {
            if let Ok(session) = link.session() {
                link.probe(&session).await;
            }
            tokio::time::sleep(WATCH_EVERY).await;
        } else {
            // Meanwhile the leader may change, and the time of the move.
            tokio::time::sleep(early.min(WATCH)).await;
        }
    }
}
