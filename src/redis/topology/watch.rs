//! Asks the Sentinels or the nodes of a Cluster periodically which Redis is the primary. Ends the sessions with a Redis
//! that was replaced, and updates until when a majority confirms the Redis of each link. A link is the connection of a
//! ring to its Redis.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::metrics::Metrics;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::link::{Link, Session};
use crate::redis::topology::nodes::Node;
use crate::redis::topology::{Topology, TopologyKind};

/// How often a node is asked. If its failover timer is shorter than four times this value, the node is asked four times
/// within the timer.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// The maximum pause between two checks of the confirmations of all links.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// How long a confirmation may be missing before the sidecar logs an error.
const REPORT_AFTER: Duration = Duration::from_secs(1);

impl Link {
    /// Returns an error if a majority must confirm that the Redis of this session is the primary, and no majority does.
    /// After an error, no tick is allowed to expire. Otherwise returns the end of the last outage or of the last time
    /// without a majority. Returns `None` if there was neither.
    pub(crate) fn confirmed(&self, session: &Session) -> Result<Option<Instant>, Fault> {
        if self.unconfirmed_for(session).is_none() {
            return Ok(session.confirmation.lock().recovered_at);
        }
        let voters = if self.topology.kind == TopologyKind::Sentinel { "Sentinels" } else { "Cluster" };
        let text = format!("no majority of the {voters} confirms that {} is the primary", session.found);
        Err(Fault::new(FaultKind::Unreachable, text))
    }

    /// Returns for how long no majority has confirmed the Redis of this session. Returns `None` if a majority confirms
    /// it now, or if no confirmation is needed.
    pub(crate) fn unconfirmed_for(&self, session: &Session) -> Option<Duration> {
        let missing = session.confirmation.lock().missing_for(self.clock.now());
        missing.filter(|_| self.topology.needs_majority())
    }
}

/// Warns if ticks expire without a majority, or if a short failover timer lets confirmations end early.
pub(crate) fn warn_of_settings(topology: &Topology) {
    if topology.kind == TopologyKind::Standalone {
        return;
    }
    if !topology.needs_majority() {
        warn!(
            "--expire-without-majority is on: in a network partition, a sidecar may report messages that were \
             acknowledged at another sidecar; remove the flag when a majority of the Sentinels, or of the Cluster's \
             primaries, can be reached"
        );
    } else if let Some(timer) = topology.views.lock().short_timer() {
        warn!(
            "the failover timer is {timer:?} (down-after-milliseconds of the Sentinels, cluster-node-timeout of a \
             Cluster): if no majority answers for so long, no tick expires; set the timer to 2000 or more"
        );
    }
}

/// Asks all nodes periodically, and applies their answers to the links. Returns at once if Redis has a fixed address,
/// and otherwise never ends.
pub(crate) async fn watch(
    topology: Arc<Topology>,
    links: Arc<[Arc<Link>]>,
    clock: Arc<Clock>,
    metrics: Arc<Metrics>,
) {
    if topology.kind == TopologyKind::Standalone {
        return;
    }
    let (mut asked, mut being_asked) = (FuturesUnordered::new(), HashSet::new());
    let mut is_reported = false;
    loop {
        for node in topology.nodes() {
            if being_asked.insert(node.address().to_string()) {
                asked.push(ask_after(Duration::ZERO, &topology, node, &clock));
            }
        }
        tokio::select! {
            Some((node, pause)) = asked.next() => {
                // A node is asked again only while `--store` or another node names it.
                if topology.nodes().iter().any(|known| Arc::ptr_eq(known, &node)) {
                    asked.push(ask_after(pause, &topology, node, &clock));
                } else {
                    being_asked.remove(&node.address().to_string());
                }
            }
            () = tokio::time::sleep(CHECK_EVERY) => {}
        }
        let mut unconfirmed = Vec::new();
        for link in &*links {
            let Ok(session) = link.session() else { continue };
            if let Some(now) = topology.replaced_by(&session.found, link.keys.slot) {
                // The replaced Redis may still answer, because only its connection to the majority is broken. So this
                // task must end the session.
                let text = format!("{now} has replaced {} as the primary", session.found);
                link.give_up(&session, &Fault::new(FaultKind::ReadOnly, text));
            }
            if topology.needs_majority() {
                let until = topology.views.lock().confirmed_until(&session.found, link.keys.slot);
                session.confirmation.lock().update(until, clock.now());
            }
            if link.confirmed(&session).is_err() {
                unconfirmed.push((link, session));
            }
        }
        metrics.rings_unconfirmed.set(i64::try_from(unconfirmed.len()).unwrap_or(i64::MAX));
        report(&topology, &unconfirmed, &mut is_reported, clock.now());
    }
}

/// Asks a node after a pause. Returns the node, and the pause before the node is asked again.
async fn ask_after(pause: Duration, topology: &Topology, node: Arc<Node>, clock: &Clock) -> (Arc<Node>, Duration) {
    tokio::time::sleep(pause).await;
    let asked_at = clock.now();
    let every = match topology.ask(&node, asked_at).await {
        Ok(view) => ASK_EVERY.min(view.good_for / 4).max(CHECK_EVERY / 2),
        Err(_) => ASK_EVERY,
    };
    (node, every.saturating_sub(clock.now().saturating_duration_since(asked_at)))
}

/// Logs an error if a confirmation has been missing for [`REPORT_AFTER`]. Logs an info when all confirmations are valid
/// again. `is_reported` is whether the error was logged and the info was not yet logged.
fn report(topology: &Topology, unconfirmed: &[(&Arc<Link>, Arc<Session>)], is_reported: &mut bool, now: Instant) {
    if unconfirmed.is_empty() && std::mem::take(is_reported) {
        info!("a majority confirms the primary again: ticks expire");
    }
    let is_missing =
        |(link, session): &&(&Arc<Link>, Arc<Session>)| link.unconfirmed_for(session) >= Some(REPORT_AFTER);
    let Some((link, session)) = unconfirmed.iter().find(is_missing).filter(|_| !*is_reported) else { return };
    *is_reported = true;
    let (until, of) = topology.views.lock().confirmations(&session.found, link.keys.slot);
    let confirmed_by = until.into_iter().filter(|until| *until > now).count();
    error!(
        redis = %session.found,
        rings = unconfirmed.len(),
        confirmed_by,
        of,
        "no majority confirms that this Redis is the primary, so no tick expires: another may have taken its place \
         where this sidecar does not see it. Check the Sentinels, or the nodes of the Cluster, and the network to \
         them; if they will not come back, start with --expire-without-majority"
    );
}
