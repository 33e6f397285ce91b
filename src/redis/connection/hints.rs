//! Listens for hints from other sidecars: a batch was published or returned, or the lease became free.
//!
//! A blocking XREAD on a separate connection reads a short stream. Hints only shorten waits: a sidecar that misses a
//! hint polls within a second.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redis::streams::{StreamRangeReply, StreamReadOptions, StreamReadReply};
use redis::{AsyncCommands, RedisResult};
use tracing::debug;

use crate::redis::connection::link::Link;
use crate::redis::leader::lease::RedisLease;
use crate::redis::outbox::RedisOutbox;
use crate::redis::topology::nodes::Found;

/// How long Redis blocks an XREAD if there are no hints.
const BLOCK_MS: u16 = 2_000;

/// How much longer than [`BLOCK_MS`] an answer may take. After that, the connection is replaced.
const GRACE: Duration = Duration::from_secs(3);

/// The pause between a fault and the next attempt to connect.
const RETRY: Duration = Duration::from_millis(200);

/// Listens for hints of one ring. Never ends.
pub(crate) async fn listen(link: Arc<Link>, outbox: Arc<RedisOutbox>, lease: Arc<RedisLease>) {
    let mut states = link.state.subscribe();
    loop {
        let state = states.borrow_and_update().clone();
        match state {
            Ok(session) => tokio::select! {
                Err(error) = read(&session.found, &link, &outbox, &lease) => {
                    debug!(cause = %error, "no hints for now");
                }
                // The next session may be with another Redis.
                _ = states.changed() => {}
            },
            Err(fault) => debug!(cause = fault.text, "no hints for now"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Reads hints and notifies the outbox or the lease, until an error.
async fn read(found: &Found, link: &Link, outbox: &RedisOutbox, lease: &RedisLease) -> RedisResult<Infallible> {
    let stream = &link.keys.news;
    let mut connection = found.connect("hints", Some(Duration::from_millis(BLOCK_MS.into()) + GRACE)).await?;
    let newest: StreamRangeReply = connection.xrevrange_count(stream, "+", "-", 1).await?;
    let mut last = newest.ids.into_iter().next().map_or_else(|| String::from("0"), |entry| entry.id);
    // Hints that were sent between two connections are lost, so both listeners are notified now.
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
                // The other candidates poll at their usual times.
                if successor == link.identity.token {
                    lease.notify();
                }
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
