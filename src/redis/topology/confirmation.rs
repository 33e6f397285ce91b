//! Keeps asking where Redis is: links leave a Redis that was replaced, and know whether a majority confirms theirs.
//!
//! A sidecar that was cut off with the primary before a failover would go on expiring ticks there, while the Acks go to
//! another. So a tick expires only while the confirmation of a link is good; afterwards it waits as after an outage.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::metrics::Metrics;
use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::connection::link::{Link, LinkOptions, Links, Session, Shared};
use crate::redis::topology::majority::Count;
use crate::redis::topology::nodes::Node;
use crate::redis::topology::{Several, Topology};

/// A node is asked so often, and four times as often as its shortest failover timer says.
const EVERY: Duration = Duration::from_millis(500);

/// It is looked so often whether the confirmations are still good.
const LOOK: Duration = Duration::from_millis(100);

/// A confirmation that is missing for less than this is missed by nobody: it is not told.
const TOLD_AFTER: Duration = Duration::from_secs(1);

/// Whether a majority confirms the Redis of a link.
#[derive(Debug, Default)]
pub(crate) struct Confirmation(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The session that it is about.
    session: u64,
    /// Until when the confirmations are good that came last, or were good; none before the first session.
    until: Option<Instant>,
    /// When the session began or, if that is later, when it was confirmed again after it had not been.
    recovered_at: Option<Instant>,
}

/// For how long no majority has confirmed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unconfirmed(Duration);

impl Confirmation {
    /// Takes until when a session is confirmed, which began after an outage or not, as it is known at a time `now`.
    fn put(&self, session: u64, recovered_at: Option<Instant>, until: Option<Instant>, now: Instant) {
        let mut state = self.0.lock();
        if state.session != session {
            *state = State { session, until: until.or(Some(now)), recovered_at };
            return;
        }
        let is_good = |until: Option<Instant>| until.is_some_and(|until| until > now);
        if !is_good(state.until) && is_good(until) {
            state.recovered_at = Some(now);
        }
        // It is good no longer once a majority does not confirm it.
        state.until = until.or(state.until.min(Some(now)));
    }

    /// If a session is confirmed at a time `now`: when the last outage ended, or time without a majority.
    fn of(&self, session: u64, now: Instant) -> Result<Option<Instant>, Unconfirmed> {
        let state = self.0.lock();
        match state.until.filter(|_| state.session == session) {
            Some(until) if until > now => Ok(state.recovered_at),
            Some(until) => Err(Unconfirmed(now.saturating_duration_since(until))),
            None => Err(Unconfirmed(Duration::ZERO)),
        }
    }
}

impl Shared {
    /// Takes what was said so far of where Redis is, for a session that is new or goes on.
    pub(crate) fn note_confirmation(&self, session: &Session) {
        let LinkOptions { place, keys, clock, .. } = &self.options;
        let until = place.confirmed_until(&session.found, keys.slot);
        self.confirmation.put(session.number, session.recovered_at, until, clock.now());
    }
}

impl Link {
    /// Whether a tick may expire in a session: only while a majority confirms that its Redis is the primary. If so, when the
    /// last outage ended, or the last time without a majority.
    pub(crate) fn confirmed(&self, session: &Session) -> Result<Option<Instant>, Fault> {
        let Shared { options: LinkOptions { place, clock, .. }, confirmation, .. } = self.shared();
        if !place.needs_majority() {
            return Ok(session.recovered_at);
        }
        confirmation.of(session.number, clock.now()).map_err(|_| {
            let whose = match place.several() {
                Some(Several::Sentinels) => "Sentinels",
                _ => "Cluster",
            };
            let text = format!("no majority of the {whose} confirms that {} is the primary", session.found);
            Fault { kind: FaultKind::Unreachable, text }
        })
    }

    /// Whether it was not confirmed for so long.
    pub(crate) fn is_unconfirmed_for(&self, session: &Session, time: Duration) -> bool {
        let Shared { options: LinkOptions { place, clock, .. }, confirmation, .. } = self.shared();
        place.needs_majority()
            && confirmation.of(session.number, clock.now()).is_err_and(|Unconfirmed(missing)| missing >= time)
    }

    /// Leaves a Redis that was replaced though it still answers: one that was cut off from those that have replaced it.
    fn leave_if_replaced(&self, session: &Session) {
        if let Some(now) = self.shared().options.place.replaced_by(&session.found, self.keys().slot) {
            let text = format!("another Redis, {now}, is there in place of {}", session.found);
            self.give_up(session, &Fault { kind: FaultKind::ReadOnly, text });
        }
    }
}

/// Warns of what makes confirmations unsafe, or missing without need.
pub(crate) fn warn_of_settings(place: &Topology) {
    if place.several().is_none() {
        return;
    }
    if !place.needs_majority() {
        warn!(
            "--expire-without-majority is on: in a partition a sidecar may report messages that are acknowledged at another; \
             leave it out once a majority of the Sentinels, or of the Cluster's primaries, can be reached"
        );
    } else if let Some(timer) = place.short_timer() {
        warn!(
            "the failover timer is {timer:?} (down-after-milliseconds of the Sentinels, cluster-node-timeout of a Cluster): \
             without an answer of a majority for so long no tick expires; set it to 2000 or more"
        );
    }
}

/// Keeps asking all nodes that know where Redis is, and has links heed what they say; never ends.
pub(crate) async fn watch(place: Arc<Topology>, links: Arc<Links>, clock: Arc<Clock>, metrics: Arc<Metrics>) {
    if place.several().is_none() {
        return;
    }
    let (mut asked, mut being_asked) = (FuturesUnordered::new(), HashSet::new());
    let mut missing = Missing::default();
    loop {
        for node in place.nodes() {
            if being_asked.insert(node.to_string()) {
                asked.push(ask_after(Duration::ZERO, Arc::clone(&place), node, &clock));
            }
        }
        tokio::select! {
            Some((node, pause)) = asked.next() => {
                // One that nobody knows any more is not asked again.
                being_asked.remove(&node.to_string());
                if place.nodes().iter().any(|known| Arc::ptr_eq(known, &node)) {
                    being_asked.insert(node.to_string());
                    asked.push(ask_after(pause, Arc::clone(&place), node, &clock));
                }
            }
            () = tokio::time::sleep(LOOK) => {}
        }
        let mut unconfirmed = Vec::new();
        for link in links.all() {
            let Ok(session) = link.session() else { continue };
            link.leave_if_replaced(&session);
            link.shared().note_confirmation(&session);
            if link.confirmed(&session).is_err() {
                unconfirmed.push((link, session));
            }
        }
        metrics.rings_unconfirmed.set(i64::try_from(unconfirmed.len()).unwrap_or(i64::MAX));
        missing.tell(&place, &unconfirmed, clock.now());
    }
}

/// Asks a node after a pause; returns it, with how long to pause before it is asked again.
async fn ask_after(
    pause: Duration,
    place: Arc<Topology>,
    node: Arc<Node>,
    clock: &Clock,
) -> (Arc<Node>, Duration) {
    tokio::time::sleep(pause).await;
    let asked_at = clock.now();
    let every = match place.ask(&node, asked_at).await {
        Ok((_, view)) => EVERY.min(view.good_for / 4).max(LOOK / 2),
        Err(_) => EVERY,
    };
    (node, every.saturating_sub(clock.now().saturating_duration_since(asked_at)))
}

/// Since when confirmations are missing, and whether people were told.
#[derive(Debug, Default)]
struct Missing {
    since: Option<Instant>,
    is_told: bool,
}

impl Missing {
    fn tell(&mut self, place: &Topology, unconfirmed: &[(Arc<Link>, Session)], now: Instant) {
        let Some((link, session)) = unconfirmed.first() else {
            self.since = None;
            if std::mem::take(&mut self.is_told) {
                info!("a majority confirms the primary again: ticks expire");
            }
            return;
        };
        let since = *self.since.get_or_insert(now);
        if self.is_told || now.saturating_duration_since(since) < TOLD_AFTER {
            return;
        }
        self.is_told = true;
        let Count { confirm, of } = place.confirmations(&session.found, link.keys().slot, now);
        error!(
            redis = %session.found,
            rings = unconfirmed.len(),
            confirmed_by = confirm,
            of,
            "no majority confirms that this Redis is the primary, so no tick expires: another may have taken its place where \
             this sidecar does not see it. Look at the Sentinels, or the nodes of the Cluster, and at the network to them; \
             if they are gone for good, start with --expire-without-majority"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_without_a_majority_ends_like_an_outage() {
        let (confirmation, start) = (Confirmation::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let missing = |ms| Err(Unconfirmed(Duration::from_millis(ms)));
        assert_eq!(confirmation.of(1, start), missing(0), "nothing is known");
        confirmation.put(1, None, Some(at(2_000)), start);
        assert_eq!((confirmation.of(1, at(1_999)), confirmation.of(1, at(2_000))), (Ok(None), missing(0)));
        assert_eq!(confirmation.of(1, at(3_000)), missing(1_000));
        assert_eq!(confirmation.of(2, start), missing(0), "that is another session");
        confirmation.put(1, None, Some(at(3_900)), at(1_900));
        assert_eq!(confirmation.of(1, at(3_000)), Ok(None), "it was confirmed in time");
        confirmation.put(1, None, Some(at(3_900)), at(4_000));
        assert_eq!(confirmation.of(1, at(4_000)), missing(100), "the answer came too late");
        confirmation.put(1, None, None, at(4_050));
        assert_eq!(confirmation.of(1, at(4_050)), missing(150), "and none came");
        confirmation.put(1, None, Some(at(6_000)), at(4_100));
        assert_eq!(confirmation.of(1, at(5_000)), Ok(Some(at(4_100))));
        confirmation.put(1, None, None, at(5_000));
        assert_eq!(confirmation.of(1, at(5_200)), missing(200), "a majority doubts it now");
        confirmation.put(2, Some(at(5_500)), Some(at(7_500)), at(5_500));
        assert_eq!(confirmation.of(2, at(6_000)), Ok(Some(at(5_500))), "an outage ended with the session");
        confirmation.put(3, Some(at(8_000)), None, at(8_000));
        assert_eq!(confirmation.of(3, at(8_300)), missing(300), "none confirmed it yet");
    }
}
