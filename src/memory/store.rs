//! The memory store as a whole.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tracing::error;

use super::lease::AlwaysLeads;
use super::options::{MemoryOptions, RingOptions};
use super::outbox::MemoryOutbox;
use super::ring::MemoryRing;
use super::state::{StateError, StateFile, writer};
use crate::core::refusal::Refusal;
use crate::core::store::{Moment, RingParts, Store};
use crate::core::tick::Tick;

/// A wheel that lives in the process.
pub struct MemoryStore {
    ring: Arc<MemoryRing>,
    parts: RingParts,
}

/// The state of a memory store after it was opened.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Beginning {
    /// A sidecar had drained into the state file: with so many messages in flight.
    TakenOver(u64),
    /// Nothing, and what the sidecar before had is lost: it used the state file, and did not drain.
    Lost,
    /// Nothing, and as far as is known there was nothing to lose.
    Empty,
}

/// How long the pointer waits after a restart for clients to connect again, with the acknowledgements that came meanwhile.
const RESTART_GRACE: Duration = Duration::from_secs(2);

impl MemoryStore {
    /// Opens the store, and says what it begins with.
    ///
    /// # Errors
    ///
    /// When there is a state file that cannot be read, is damaged, or was written by a ring of other
    /// dimensions, and when another process keeps its wheel there. The file is left as it is.
    pub fn open(options: MemoryOptions, moment: Moment) -> Result<(MemoryStore, Beginning), StateError> {
        let state_file = options.state_file.map(StateFile::open).transpose()?.map(Arc::new);
        let saved = state_file.as_ref().map(|file| file.load(options.wheel)).transpose()?.flatten();
        let (now, start_ms) = (moment.now, moment.unix_ms());
        let (last_epoch, pointer) = saved.as_ref().map_or_else(
            || (0, Tick(start_ms / u64::from(options.wheel.tick_ms()))),
            |saved| (saved.epoch, Tick(saved.pointer)),
        );
        let epoch = start_ms.max(last_epoch + 1);
        let outbox = Arc::new(MemoryOutbox::new(options.retention, now));
        let ring_options = RingOptions {
            wheel: options.wheel,
            storm: options.storm,
            max_in_flight: options.max_in_flight,
            threads: options.threads,
            epoch,
            pointer,
        };
        let ring = MemoryRing { state_file, ..MemoryRing::new(ring_options, Arc::clone(&outbox), now) };
        let ring = Arc::new(ring);
        let beginning = match saved {
            Some(saved) => Beginning::TakenOver(saved.restore(&ring.wheel, &outbox, moment)),
            None if ring.state_file.as_ref().is_some_and(|file| file.is_in_use()) => Beginning::Lost,
            None => Beginning::Empty,
        };
        if let Some(state_file) = &ring.state_file {
            state_file.mark_in_use(true);
            state_file.consume()?;
        }
        let lease = Arc::new(AlwaysLeads { epoch });
        let parts = RingParts { ring: Arc::clone(&ring) as _, outbox, lease };
        Ok((MemoryStore { ring, parts }, beginning))
    }

    /// To be called when clients can connect to a wheel that was taken over. No Ack could arrive before, so the pointer moves
    /// 2 s and a tick later.
    pub fn wait_for_clients(&self, now: Instant) {
        self.ring.wheel.hold(now + RESTART_GRACE);
    }
}

#[async_trait]
impl Store for MemoryStore {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn rings(&self) -> &[RingParts] {
        std::slice::from_ref(&self.parts)
    }

    fn is_up(&self) -> bool {
        true
    }

    async fn close(&self, moment: Moment) -> Result<String, Refusal> {
        let wheel = &self.ring.wheel;
        let Some(state_file) = &self.ring.state_file else {
            let messages = wheel.in_flight.count() + wheel.expiry.lock().unpublished();
            if messages > 0 {
                error!(
                    messages,
                    "the drain ended before all that was in flight was delivered, and no subscriber gets these messages: \
                     keep the wheel with --state, or leave --drain-timeout as long as it can be, and have the logic nodes \
                     add again what they wait for"
                );
            }
            return Ok(String::from("the wheel of a memory store without --state ends with the process"));
        };
        writer::save(Arc::clone(wheel), Arc::clone(state_file), moment).await
    }
}
