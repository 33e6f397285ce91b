//! Listens for hints from other sidecars: a batch was published or returned, or the lease became free.
//!
//! A blocking XREAD on a connection of its own reads a short stream. Hints only save waiting: a sidecar that misses one
//! looks again within a second.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::streams::{StreamRangeReply, StreamReadOptions, StreamReadReply};
use redis::{AsyncCommands, AsyncConnectionConfig, RedisResult};
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;

use crate::redis::connection::errors::Fault;
use crate::redis::connection::link::{Link, State};
use crate::redis::leader::lease::RedisLease;
use crate::redis::options::CONNECT_TIMEOUT;
use crate::redis::outbox::RedisOutbox;
use crate::redis::topology::nodes::Found;

/// How long Redis blocks when there are no hints.
const BLOCK: Duration = Duration::from_secs(2);

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
    let reader = Reader { link, stream, outbox, lease };
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            let fault = reader.read_session().await;
            debug!(cause = fault.text, "no hints for now");
            tokio::time::sleep(RETRY).await;
        }
    }))
}

struct Reader {
    link: Arc<Link>,
    stream: String,
    outbox: Arc<RedisOutbox>,
    lease: Arc<RedisLease>,
}

impl Reader {
    /// Reads until a fault, or until the link has another session, which may be with another Redis.
    async fn read_session(&self) -> Fault {
        let session = match self.link.session() {
            Ok(session) => session,
            Err(fault) => return fault,
        };
        let mut states = self.link.states();
        let is_another = |state: &State| !matches!(state, State::Up(current) if current.number == session.number);
        tokio::select! {
            Err(error) = self.read_from(&session.found) => Fault::from(error),
            _ = states.wait_for(is_another) => Fault::stale(),
        }
    }

    async fn read_from(&self, found: &Found) -> RedisResult<Infallible> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(BLOCK + GRACE));
        let mut connection = found.connect(&config, "hints").await?;
        // The id of the newest hint.
        let newest: StreamRangeReply = connection.xrevrange_count(&self.stream, "+", "-", 1).await?;
        let mut last = newest.ids.into_iter().next().map_or_else(|| String::from("0"), |entry| entry.id);
        // Hints may have been missed between two connections.
        self.outbox.tell();
        self.lease.tell();
        loop {
            if let Some(newest) = self.read(&mut connection, &last).await? {
                last = newest;
            }
        }
    }

    /// Waits for hints after `last` and passes them on. Returns the id of the newest, if any came.
    async fn read(&self, connection: &mut MultiplexedConnection, last: &str) -> RedisResult<Option<String>> {
        let block = usize::try_from(BLOCK.as_millis()).unwrap_or(usize::MAX);
        let options = StreamReadOptions::default().block(block);
        let found: Option<StreamReadReply> = connection.xread_options(&[&self.stream], &[last], &options).await?;
        let entries = found.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids);
        let (mut newest, mut batches) = (None, false);
        for entry in entries {
            if entry.map.contains_key("vacant") {
                self.lease.tell();
            } else if let Some(successor) = entry.get::<String>("handed") {
                self.lease.is_handed_to(&successor);
            } else {
                batches = true;
            }
            newest = Some(entry.id);
        }
        if batches {
            self.outbox.tell();
        }
        Ok(newest)
    }
}
