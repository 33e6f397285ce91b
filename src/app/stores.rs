//! From the configuration to the store.

use std::sync::Arc;

use tracing::{error, info};

use super::error::StartError;
use super::prepared::Prepared;
use crate::config::{Config, StoreKind, without_password};
use crate::core::store::Store;
use crate::memory::{Beginning, MemoryOptions, MemoryStore, StateError};
use crate::redis::{RedisOptions, RedisStore};

/// Opens the store that the configuration asks for.
pub(super) async fn open_store(config: &Config, prepared: &Prepared) -> Result<Arc<dyn Store>, StartError> {
    let shared = match &config.store {
        StoreKind::Memory => return Ok(Arc::new(open_memory(config, prepared)?)),
        StoreKind::Redis(shared) => shared.clone(),
    };
    let options = RedisOptions {
        url: shared.url,
        namespace: shared.namespace,
        rings: shared.rings,
        wheel: config.wheel,
        storm: config.storm,
        retention: config.retention,
        max_in_flight: config.max_in_flight,
        max_held_acks: shared.max_held_acks,
        name: prepared.name.clone(),
        never_lead: shared.never_lead,
        expire_without_majority: shared.expire_without_majority,
        lease: shared.lease,
        outage_grace: shared.outage_grace,
        catch_up_max_ticks: shared.catch_up_max_ticks,
    };
    match RedisStore::open(&options, &prepared.clock, &prepared.metrics).await {
        Ok(store) => Ok(Arc::new(store)),
        Err(cause) => Err(StartError::Redis { url: without_password(&options.url), cause }),
    }
}

fn open_memory(config: &Config, prepared: &Prepared) -> Result<MemoryStore, StateError> {
    let options = MemoryOptions {
        wheel: config.wheel,
        storm: config.storm,
        retention: config.retention,
        max_in_flight: config.max_in_flight,
        threads: config.threads,
        state_file: config.state_file.clone(),
    };
    let (store, beginning) = MemoryStore::open(options, prepared.clock.moment())?;
    match beginning {
        Beginning::TakenOver(messages) => {
            info!(messages, path = path(config), "messages in flight taken over from the state file");
            if messages > 0 {
                // To read the file took its time.
                store.wait_for_clients(prepared.clock.now());
            }
        }
        Beginning::Lost => {
            prepared.metrics.memory_lost.set(1);
            error!(
                path = path(config),
                "the sidecar before this one ended without a drain, and what it had in flight is lost: nobody is told of it; \
                 look at the sessions that were pushed to within the last ack timeout"
            );
        }
        Beginning::Empty => {
            if config.state_file.is_some() {
                info!(path = path(config), "there is no state file yet, and the wheel begins empty");
            }
        }
    }
    Ok(store)
}

fn path(config: &Config) -> Option<String> {
    config.state_file.as_ref().map(|path| path.display().to_string())
}
