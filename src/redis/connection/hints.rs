//! Listens for hints from other sidecars: a batch was published or returned, or the lease became free.
//!
//! A hint is an entry of a short stream in Redis. A blocking XREAD reads it on a separate connection, so that it delays
//! no requests. A sidecar also polls, so a missed hint only means a longer wait, of about a second.
//!
//! So the connections for requests come first. This one is opened when the sidecar has all of those, and closed when
//! Redis has no room for those of all sidecars.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redis::AsyncCommands;
use redis::streams::{StreamRangeReply, StreamReadOptions, StreamReadReply};
use tracing::debug;

use crate::redis::connection::errors::Fault;
use crate::redis::connection::link::Link;
use crate::redis::leader::lease::RedisLease;
use crate::redis::outbox::RedisOutbox;
use crate::redis::topology::nodes::Found;

/// How long Redis blocks an XREAD if there is no hint.
const BLOCK_MS: u16 = 2_000;

/// How much longer than [`BLOCK_MS`] an answer may take. If it takes longer, a new connection replaces this one.
const GRACE: Duration = Duration::from_secs(3);

/// The pause between a fault and the next attempt to connect.
const RETRY: Duration = Duration::from_millis(200);

/// The field of a hint that Redis has no room for the connections of all sidecars.
pub(crate) const MAX_CLIENTS: &str = "maxclients";

/// Listens for hints of one ring. `links` are the links of all rings. Never ends.
pub(crate) async fn listen(
    link: Arc<Link>,
    links: Arc<[Arc<Link>]>,
    outbox: Arc<RedisOutbox>,
    lease: Arc<RedisLease>,
) {
    let (mut states, mut room) = (link.state.subscribe(), link.topology.has_room.subscribe());
    loop {
        let state = states.borrow_and_update().clone();
        let has_room = *room.borrow_and_update() && links.iter().all(|link| link.is_up());
        match state {
            Ok(session) if has_room => tokio::select! {
                Err(error) = read(&session.found, &link, &outbox, &lease) => {
                    debug!(cause = %error, "no hints for now");
                }
                // The next session of the link may be with another Redis.
                _ = states.changed() => {}
                _ = room.wait_for(|has_room| !has_room) => {}
            },
            Ok(_) => {}
            Err(fault) => debug!(cause = fault.text, "no hints for now"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Reads hints, and notifies the outbox or the lease. Ends only with an error.
async fn read(found: &Found, link: &Link, outbox: &RedisOutbox, lease: &RedisLease) -> Result<Infallible, Fault> {
    let stream = &link.keys.news;
    let longest = Duration::from_millis(BLOCK_MS.into()) + GRACE;
    let mut connection = link.topology.connect(found, "hints", Some(longest)).await?;
    let newest: StreamRangeReply = connection.xrevrange_count(stream, "+", "-", 1).await?;
    let mut last = newest.ids.into_iter().next().map_or_else(|| String::from("0"), |entry| entry.id);
    // Hints between the previous connection and this one were missed. So both the outbox and the lease are notified
    // now.
    outbox.notify();
    lease.notify();
    let options = StreamReadOptions::default().block(BLOCK_MS.into());
    loop {
        let reply: Option<StreamReadReply> = connection.xread_options(&[stream], &[&last], &options).await?;
        let mut has_batches = false;
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            if entry.map.contains_key("vacant") {
                lease.notify();
            } else if entry.map.contains_key(MAX_CLIENTS) {
                link.topology.has_room.send_replace(false);
            } else if let Some(successor) = entry.get::<String>("handed") {
                // The leader handed the ring over to one candidate. Only that candidate polls the lease at once. The
                // others poll at their usual times.
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
