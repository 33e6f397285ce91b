//! Hints from other sidecars: something was published, given back, or the lease became free.
//!
//! A short stream is read with a blocking XREAD, which needs a connection of its own. Hints only save waiting:
//! whoever misses one looks again by himself within a second.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::streams::{StreamReadOptions, StreamReadReply};
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

/// How much longer than that an answer may take before the connection is made anew.
const PATIENCE: Duration = Duration::from_secs(3);

/// After a fault the connection is made anew this much later.
const RETRY: Duration = Duration::from_millis(200);

/// The task that listens for one ring.
pub(crate) fn listen(
    link: Arc<Link>,
    stream: String,
    outbox: Arc<RedisOutbox>,
    lease: Arc<RedisLease>,
) -> AbortOnDropHandle<()> {
    let reader = Reader { link, stream, outbox, lease };
    AbortOnDropHandle::new(tokio::spawn(async move { reader.run().await }))
}

struct Reader {
    link: Arc<Link>,
    stream: String,
    outbox: Arc<RedisOutbox>,
    lease: Arc<RedisLease>,
}

impl Reader {
    async fn run(&self) {
        loop {
            let fault = self.read_on().await;
            debug!(cause = fault.text, "no hints for now");
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Reads until something goes wrong. Whom the link has left is not read from either: hints are given elsewhere.
    async fn read_on(&self) -> Fault {
        let session = match self.link.session() {
            Ok(session) => session,
            Err(fault) => return fault,
        };
        let mut states = self.link.states();
        let is_another = |state: &State| !matches!(state, State::Up(present) if present.number == session.number);
        tokio::select! {
            Err(error) = self.read_from(&session.found) => Fault::from(error),
            _ = states.wait_for(is_another) => Fault::stale(),
        }
    }

    async fn read_from(&self, found: &Found) -> RedisResult<Infallible> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(BLOCK + PATIENCE));
        let mut connection = found.connect(&config, "hints").await?;
        let mut last = self.newest(&mut connection).await?;
        // What was missed between two connections is not known.
        self.outbox.tell();
        self.lease.tell();
        loop {
            if let Some(newest) = self.read(&mut connection, &last).await? {
                last = newest;
            }
        }
    }

    /// The id of the newest hint.
    async fn newest(&self, connection: &mut MultiplexedConnection) -> RedisResult<String> {
        let found: redis::streams::StreamRangeReply =
            connection.xrevrange_count(&self.stream, "+", "-", 1).await?;
        Ok(found.ids.into_iter().next().map_or_else(|| String::from("0"), |entry| entry.id))
    }

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
