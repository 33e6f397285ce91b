//! Opens the store that the configuration names.

use std::sync::Arc;

use tracing::{error, info};

use super::start_error::StartError;
use crate::clock::Clock;
use crate::config::{Config, RedisConfig, without_password};
use crate::core::Store;
use crate::memory::{MemoryOptions, MemoryStore, Recovery, StateError};
use crate::metrics::Metrics;
use crate::redis::{RedisOptions, RedisStore};

/// Opens the store; `name` is that of the sidecar.
pub(super) async fn open_store(
    config: &Config,
    name: &str,
    clock: &Arc<Clock>,
    metrics: &Arc<Metrics>,
) -> Result<Arc<dyn Store>, StartError> {
    let Some(RedisConfig(options)) = &config.redis else {
        return Ok(Arc::new(open_memory(config, clock, metrics)?));
    };
    let options = RedisOptions { name: name.to_owned(), ..options.clone() };
    match RedisStore::open(&options, clock, metrics).await {
        Ok(store) => Ok(Arc::new(store)),
        Err(cause) => Err(StartError::Redis { url: without_password(&options.url), cause }),
    }
}

fn open_memory(config: &Config, clock: &Clock, metrics: &Metrics) -> Result<MemoryStore, StateError> {
    let options = MemoryOptions {
        wheel: config.wheel,
        storm: config.storm,
        retention: config.retention,
        max_in_flight: config.max_in_flight,
        threads: config.threads,
        state_file: config.state_file.clone(),
    };
    let (store, recovery) = MemoryStore::open(options, clock.moment())?;
    let path = config.state_file.as_ref().map(|path| path.display().to_string());
    match recovery {
        Recovery::Restored(messages) => {
            info!(messages, path, "messages in flight taken over from the state file");
            if messages > 0 {
                // Reading the file took time that the clients did not have.
                store.wait_for_clients(clock.now());
            }
        }
        Recovery::Lost => {
            metrics.memory_lost.set(1);
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
