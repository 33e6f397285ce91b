//! The memory store as a whole.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::error;

use super::lease::AlwaysLeads;
use super::options::{MemoryOptions, RingOptions};
use super::outbox::MemoryOutbox;
use super::ring::MemoryRing;
use super::state::{self, StateError};
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::Reply;
use crate::core::store::{Moment, Seat, Store};
use crate::core::tick::Tick;

/// A wheel that lives in the process.
pub struct MemoryStore {
    ring: Arc<MemoryRing>,
    outbox: Arc<MemoryOutbox>,
    seat: Seat,
    state_file: Option<PathBuf>,
}

impl MemoryStore {
    /// Opens the store: what a state file holds, or an empty one. Returns also how many messages in flight
    /// it took over, if there was a state file.
    ///
    /// # Errors
    ///
    /// When there is a state file that cannot be read, is damaged, or was written by a ring of other
    /// dimensions. The file is left as it is.
    pub fn open(options: MemoryOptions, moment: Moment) -> Result<(MemoryStore, Option<u64>), StateError> {
        let saved =
            options.state_file.as_deref().map(|path| state::load(path, options.wheel)).transpose()?.flatten();
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
            keeps_on_drain: options.state_file.is_some(),
        };
        let ring = Arc::new(MemoryRing::new(ring_options, Arc::clone(&outbox), now));
        let taken_over = saved.map(|saved| saved.restore(&ring, &outbox, moment));
        if let Some(path) = options.state_file.as_deref() {
            state::consume(path)?;
        }
        let lease = Arc::new(AlwaysLeads { epoch });
        let seat = Seat { ring: Arc::clone(&ring) as _, outbox: Arc::clone(&outbox) as _, lease };
        Ok((MemoryStore { ring, outbox, seat, state_file: options.state_file }, taken_over))
    }
}

impl Store for MemoryStore {
    fn kind(&self) -> &'static str {
        "memory"
    }

    fn seats(&self) -> &[Seat] {
        std::slice::from_ref(&self.seat)
    }

    fn is_up(&self) -> bool {
        true
    }

    fn close(&self, moment: Moment) -> Reply<String> {
        let Some(path) = &self.state_file else {
            return Reply::ok(String::from("the wheel of a memory store without --state ends with the process"));
        };
        match state::save(path, &self.ring, &self.outbox, moment) {
            Ok(messages) => Reply::ok(format!("{messages} messages in flight are kept in {}", path.display())),
            Err(error) => {
                let in_flight = self.ring.in_flight.load(Ordering::Relaxed);
                error!(
                    %error,
                    in_flight,
                    "the wheel could not be kept, and ends with this process, with what the outbox holds: nobody is told of \
                     these messages; make room where --state is, and have the logic nodes add again what they wait for"
                );
                Reply::refused(Refusal::new(Reason::StoreSilent, error.to_string()))
            }
        }
    }
}
