//! The ring of a memory store: the contract of [`Ring`], with a [`MemoryWheel`] behind it.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;

use super::options::RingOptions;
use super::outbox::MemoryOutbox;
use super::state::{StateFile, writer};
use super::wheel::MemoryWheel;
use crate::core::completions::Completions;
use crate::core::refusal::Refusal;
use crate::core::request_batch::RequestBatch;
use crate::core::ring::{Advance, ConnectionId, DrainOutcome, PublishStep, Ring, RingStatus, Submitted};
use crate::core::tick::Wheel;

/// A ring that lives in the process.
pub struct MemoryRing {
    pub(super) wheel: Arc<MemoryWheel>,
    /// Where a drain keeps what is in flight.
    pub(super) state_file: Option<Arc<StateFile>>,
}

impl MemoryRing {
    /// An empty ring whose batches go to `outbox`.
    #[must_use]
    pub fn new(options: RingOptions, outbox: Arc<MemoryOutbox>, now: Instant) -> MemoryRing {
        MemoryRing { wheel: Arc::new(MemoryWheel::new(options, outbox, now)), state_file: None }
    }
}

#[async_trait]
impl Ring for MemoryRing {
    fn wheel(&self) -> Wheel {
        self.wheel.options.wheel
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        _connection: ConnectionId,
        _completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted {
        self.wheel.complete(batch, now);
        Submitted::Completed
    }

    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        Ok(self.wheel.advance(now))
    }

    async fn publish_expired(&self, now: Instant) -> Result<PublishStep, Refusal> {
        Ok(self.wheel.publish_expired(now))
    }

    fn prelist(&self) -> bool {
        self.wheel.prelist()
    }

    async fn drain(&self, now: Instant) -> Result<DrainOutcome, Refusal> {
        if std::mem::replace(&mut self.wheel.state.write().draining, true) {
            return Ok(DrainOutcome::Kept);
        }
        match &self.state_file {
            Some(state_file) => writer::reserve(Arc::clone(&self.wheel), Arc::clone(state_file), now).await,
            None => Ok(self.wheel.expire_all(now)),
        }
    }

    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal> {
        Ok(self.wheel.status(now))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::message::Message;
    use crate::core::outbox::Retention;
    use crate::core::single_request::{AddNewMsg, SingleRequest};
    use crate::core::tick::Tick;

    const TICK: Duration = Duration::from_secs(1);

    #[test]
    fn a_ticker_that_was_held_up_after_it_read_the_time_shifts_all_the_same() {
        let start = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), start));
        let options = RingOptions {
            wheel: Wheel::new(3, TICK).unwrap(),
            storm: StormRule::default(),
            max_in_flight: 10,
            threads: 1,
            epoch: 1,
            pointer: Tick(7),
        };
        let ring = MemoryRing::new(options, outbox, start);
        // The move is due at start + 1. The ticker reads that time and is held up; an add comes at 2.5.
        let woken = start + TICK * 5 / 2;
        let request = AddNewMsg { messages: &[Message::new(1, 0)], ack_timeout_ticks: 1, attempt: 1 };
        let answer = ring.add_new_msg(request, woken).now_or_never().unwrap().unwrap();
        assert_eq!(answer.deadline, Tick(8));
        let advance = |now| ring.advance(now).now_or_never().unwrap().unwrap();
        assert_eq!(advance(start + TICK), Advance::Waiting(woken + TICK));
        // So tick 8 expires two ticks after waking, and not at once.
        assert_eq!(advance(woken), Advance::Waiting(woken + TICK));
        let moved = |expired, shifted, next| Advance::Moved { expired, lateness: Duration::ZERO, shifted, next };
        assert_eq!(advance(woken + TICK), moved(Tick(7), 1, woken + TICK * 2));
        assert_eq!(advance(woken + TICK * 2), moved(Tick(8), 0, woken + TICK * 3));
    }
}
