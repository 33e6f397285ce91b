//! Listens for hints from other sidecars: a batch was published or returned, or the lease became free.
//!
//! A blocking XREAD on a connection of its own reads a short stream. Hints only save waiting: a sidecar that misses one
//! looks again within a second.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redis::streams::{StreamRangeReply, StreamReadOptions, StreamReadReply};
use redis::{AsyncCommands, AsyncConnectionConfig, RedisResult};
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use crate::redis::connection::errors::Fault;
use crate::redis::connection::link::Link;
use crate::redis::leader::lease::RedisLease;
use crate::redis::options::CONNECT_TIMEOUT;
use crate::redis::outbox::RedisOutbox;
use crate::redis::topology::nodes::Found;

/// How long Redis blocks when there are no hints.
const BLOCK_MS: u16 = 2_000;

/// An answer may take this much longer before the connection is replaced.
const GRACE: Duration = Duration::from_secs(3);

/// The pause between a fault and the next connection.
const RETRY: Duration = Duration::from_millis(200);

/// Starts the task that listens for one ring.
pub(crate) fn listen(
    link: Arc<Link>,
    stream: String,
    outbox: Arc<RedisOutbox>,
    lease: Arc<RedisLease>,
) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            let fault = match link.session() {
                Ok(session) => tokio::select! {
                    Err(error) = read(&session.found, &stream, &outbox, &lease) => Fault::from(error),
                    // The next session may be with another Redis.
                    fault = link.session_end(&session) => fault,
                },
                Err(fault) => fault,
            };
            debug!(cause = fault.text, "no hints for now");
            tokio::time::sleep(RETRY).await;
        }
    }))
}

/// Reads hints and passes them on, until an error.
async fn read(found: &Found, stream: &str, outbox: &RedisOutbox, lease: &RedisLease) -> RedisResult<Infallible> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        .set_response_timeout(Some(Duration::from_millis(BLOCK_MS.into()) + GRACE));
    let mut connection = found.connect(&config, "hints").await?;
    let newest: StreamRangeReply = connection.xrevrange_count(stream, "+", "-", 1).await?;
    let mut last = newest.ids.into_iter().next().map_or_else(|| String::from("0"), |entry| entry.id);
    // Hints may have been missed between two connections.
    outbox.notify();
    lease.notify();
    let options = StreamReadOptions::default().block(BLOCK_MS.into());
    loop {
        let reply: Option<StreamReadReply> = connection.xread_options(&[stream], &[&last], &options).await?;
        let mut has_batches = false;
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            if entry.map.contains_key("vacant") {
                lease.notify();
            } else if let Some(successor) = entry.get::<String>("handed") {
                lease.is_handed_to(&successor);
            } else {
                has_batches = true;
            }
            last = entry.id;
        }
        if has_batches {
            outbox.notify();
        }
    }
}
