//! What a sidecar needs whatever its store is.

use std::sync::Arc;

use super::error::StartError;
use super::listening::Listening;
use crate::admin::Answers;
use crate::clock::Clock;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::process::thread::RuntimeThread;

/// Where a host says its name.
const HOST_NAME_FILES: [&str; 2] = ["/proc/sys/kernel/hostname", "/etc/hostname"];

/// What a sidecar has before it has a store.
pub(super) struct Prepared {
    pub(super) name: String,
    pub(super) listening: Listening,
    pub(super) clock: Arc<Clock>,
    pub(super) metrics: Arc<Metrics>,
    /// The thread of the tickers.
    pub(super) ticker_thread: RuntimeThread,
    /// The thread of the admin endpoints, to which their listener belongs.
    pub(super) admin_thread: RuntimeThread,
    /// Their answers that need the store.
    pub(super) answers: Answers,
}

impl Prepared {
    /// Listens, and begins to measure time. Whatever can fail is done here: once a store is open, a state file is used up.
    pub(super) async fn new(config: &Config) -> Result<Prepared, StartError> {
        let mut listening = Listening::open(config).await?;
        let name = config.name.clone().unwrap_or_else(|| format!("{}:{}", host_name(), listening.address.port()));
        let start = |name| RuntimeThread::start(name).map_err(StartError::Thread);
        let (ticker_thread, admin_thread) = (start("ticker")?, start("admin")?);
        let answers = Answers::made_on(start("answers")?);
        listening.admin_listener = admin_thread.adopt(listening.admin_listener).map_err(StartError::Thread)?;
        let (clock, metrics) = (Arc::new(Clock::start()), Arc::new(Metrics::new()));
        Ok(Prepared { name, listening, clock, metrics, ticker_thread, admin_thread, answers })
    }
}

/// The name of this host, as far as it says one.
fn host_name() -> String {
    let names = HOST_NAME_FILES.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    names
        .map(|name| name.trim().to_owned())
        .find(|name| !name.is_empty())
        .unwrap_or_else(|| String::from("sidecar"))
}
