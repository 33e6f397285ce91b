//! The design that dashmap suggests, as a store: what our own table is compared with, alone and through the wire.
//!
//! All around it is the sidecar's: server, ticker, delivery, admin endpoints, outbox.

pub mod grouped;

mod expire;
mod ring;
mod slots;

use std::sync::Arc;

use ackwheel::app::{Sidecar, StartError};
use ackwheel::clock::Clock;
use ackwheel::config::Config;
use ackwheel::core::{Moment, Refusal, RingParts, Store, Tick};
use ackwheel::memory::{AlwaysLeads, MemoryOptions, MemoryOutbox};
use async_trait::async_trait;

pub use ring::DashRing;

/// A store whose ring is on dashmap.
struct DashStore(RingParts);

impl DashStore {
    fn open(config: &Config, moment: Moment) -> DashStore {
        let epoch = moment.unix_ms();
        let options = MemoryOptions {
            wheel: config.wheel,
            storm: config.storm,
            retention: config.retention,
            max_in_flight: config.max_in_flight,
            threads: config.threads,
        };
        let outbox = Arc::new(MemoryOutbox::new(config.retention, moment.now));
        let ring = Arc::new(DashRing::new(
            options,
            (epoch, Tick(epoch / u64::from(config.wheel.tick_ms()))),
            Arc::clone(&outbox),
            moment.now,
        ));
        DashStore(RingParts { ring, outbox, lease: Arc::new(AlwaysLeads { epoch }) })
    }
}

#[async_trait]
impl Store for DashStore {
    fn kind(&self) -> &'static str {
        "dashmap"
    }

    fn rings(&self) -> &[RingParts] {
        std::slice::from_ref(&self.0)
    }

    fn is_up(&self) -> bool {
        true
    }

    async fn close(&self) -> Result<String, Refusal> {
        Ok(String::from("a store on dashmap ends with the process"))
    }
}

/// Starts a sidecar on dashmap.
///
/// # Errors
///
/// When it cannot start.
pub async fn start(config: Config) -> Result<Sidecar, StartError> {
    let store = DashStore::open(&config, Clock::start().moment());
    Sidecar::start_on(config, Arc::new(store)).await
}
