//! Opens the store that the configuration names.

use std::sync::Arc;

use tracing::{error, info};

use super::error::StartError;
use super::prepared::Prepared;
use crate::config::{Config, RedisConfig, without_password};
use crate::core::store::Store;
use crate::memory::{MemoryOptions, MemoryStore, Recovery, StateError};
use crate::redis::{RedisOptions, RedisStore};

pub(super) async fn open_store(config: &Config, prepared: &Prepared) -> Result<Arc<dyn Store>, StartError> {
    let Some(RedisConfig(options)) = &config.redis else { return Ok(Arc::new(open_memory(config, prepared)?)) };
    let options = RedisOptions { name: prepared.name.clone(), ..options.clone() };
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
    let (store, recovery) = MemoryStore::open(options, prepared.clock.moment())?;
    let path = config.state_file.as_ref().map(|path| path.display().to_string());
    match recovery {
        Recovery::Restored(messages) => {
            info!(messages, path, "messages in flight taken over from the state file");
            if messages > 0 {
                // Reading the file took time that the clients did not have.
                store.wait_for_clients(prepared.clock.now());
            }
        }
        Recovery::Lost => {
            prepared.metrics.memory_lost.set(1);
            error!(
                path,
                "the sidecar before this one ended without a drain, and what it had in flight is lost: nobody is told of it; \
                 look at the sessions that were pushed to within the last ack timeout"
            );
        }
        Recovery::Empty if path.is_some() => {
            info!(path, "there is no state file yet, and the wheel begins empty");
        }
        Recovery::Empty => {}
    }
    Ok(store)
}
