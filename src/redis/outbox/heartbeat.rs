//! Heartbeats of sidecars: this sidecar sends its own, and the leader finds those that have stopped.
//!
//! The heartbeat has a task of its own, and waits for nothing else: a sidecar that is busy is not dead.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::core::group::GroupName;
use crate::core::outbox::Retention;
use crate::core::refusal::Refusal;
use crate::redis::connection::errors::Fault;
use crate::redis::context::RingContext;
use crate::redis::leader::term::whole_ms;
use crate::redis::outbox::calls::{Groups, MOST_BATCHES, kind, run, run_expecting};
use crate::redis::scripts::SCRIPTS;

/// How often a sidecar sends a heartbeat.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);

/// The most ephemeral groups that one script deletes with a sidecar.
const MOST_DELETED: usize = 16;

/// How long the link of a dead sidecar is kept, in time that the wheel has turned: a sidecar that was paused finds its
/// last answers there.
const LINK_LIFETIME: Duration = Duration::from_secs(25 * 3_600);

/// The most old links that are deleted after one inspection.
const MOST_LINKS: usize = 16;

/// Time that this process watched: a gap between two looks counts as half a lease at most, so that a process that was
/// stopped has watched nothing meanwhile.
#[derive(Debug, Default)]
pub(super) struct WatchedTime(Option<Instant>);

impl WatchedTime {
    /// The time that was watched between the look before and one at `now`.
    pub(super) fn until(&mut self, now: Instant, lease: Duration) -> Duration {
        let passed = self.0.replace(now).map_or(Duration::ZERO, |then| now.saturating_duration_since(then));
        passed.min(lease / 2)
    }
}

/// The heartbeats seen in one session of the link. A new session starts empty.
///
/// The leader looks at all sidecars. Any other sidecar looks at the one that led last, so that a new leader knows
/// whether that is dead.
#[derive(Debug, Default)]
struct SeenHeartbeats {
    session: u64,
    watched: WatchedTime,
    /// By sidecar, with the time for which the heartbeat was seen unchanged.
    seen: HashMap<String, (u64, Duration)>,
}

impl SeenHeartbeats {
    /// Records sidecars and the numbers of their heartbeats; returns those that have not changed for longer than `lease`.
    fn record(
        &mut self,
        session: u64,
        found: impl IntoIterator<Item = (String, u64)>,
        lease: Duration,
        now: Instant,
    ) -> Vec<(String, u64)> {
        if self.session != session {
            *self = SeenHeartbeats { session, ..SeenHeartbeats::default() };
        }
        let watched = self.watched.until(now, lease);
        let mut before = std::mem::take(&mut self.seen);
        let mut dead = Vec::new();
        for (sidecar, number) in found {
            let unchanged = match before.remove(&sidecar) {
                Some((seen, unchanged)) if seen == number => unchanged + watched,
                _ => Duration::ZERO,
            };
            if unchanged > lease {
                dead.push((sidecar.clone(), number));
            }
            self.seen.insert(sidecar, (number, unchanged));
        }
        dead
    }
}

/// The heartbeats of one outbox.
pub(super) struct Heartbeat {
    context: Arc<RingContext>,
    seen: Mutex<SeenHeartbeats>,
    /// The outcome of the last one.
    sent: Mutex<Result<(), Refusal>>,
    /// The bounds of a leader that were last reported to differ from those here.
    reported_bounds: Mutex<String>,
}

impl Heartbeat {
    pub(super) fn new(context: Arc<RingContext>) -> Heartbeat {
        let sent = Mutex::new(Ok(()));
        Heartbeat { context, seen: Mutex::default(), sent, reported_bounds: Mutex::default() }
    }

    /// The outcome of the last heartbeat.
    pub(super) fn sent(&self) -> Result<(), Refusal> {
        self.sent.lock().clone()
    }

    /// Sends heartbeats; never ends.
    pub(super) async fn send_all(&self, groups: &Groups) {
        let mut interval = tokio::time::interval(HEARTBEAT_EVERY);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let sent = self.send(groups).await;
            *self.sent.lock() = sent;
        }
    }

    async fn send(&self, groups: &Groups) -> Result<(), Refusal> {
        let link = &self.context.link;
        let mut joined = groups.joined.write().await;
        let session = link.session()?;
        let groups = joined.get_mut();
        let entry =
            |(group, ephemeral): (&GroupName, &bool)| format!(" {group}{}", if *ephemeral { "/e" } else { "" });
        let arguments = (self.context.sidecar(), groups.iter().map(entry).collect::<String>());
        let keys: [&str; 1] = [&link.keys().sidecars];
        let (word, mut answer) = self.context.run(&session, &SCRIPTS.heartbeat, &keys, arguments).await?;
        match word.as_str() {
            "beaten" => {
                drop(joined);
                let (bounds, leader, number) = (answer.text()?, answer.text()?, answer.text()?);
                self.compare_bounds(&bounds);
                let now = link.clock().now();
                if self.context.term.lasting(now).is_none() {
                    let leader = number.parse().ok().map(|number| (leader, number));
                    self.seen.lock().record(session.number, leader, self.context.options.lease, now);
                }
                Ok(())
            }
            "differs" => self.announce(groups).await,
            word => Err(answer.strange(word).into()),
        }
    }

    /// Announces the groups that were joined here, ephemeral or not.
    async fn announce(&self, groups: &BTreeMap<GroupName, bool>) -> Result<(), Refusal> {
        let kinds: Vec<(&str, &str)> = groups.iter().map(|(group, is)| (group.as_str(), kind(*is))).collect();
        let arguments = (self.context.sidecar(), MOST_BATCHES, kinds);
        self.report_made(run_expecting(&self.context, "announced", &SCRIPTS.announce, arguments).await?.count()?);
        Ok(())
    }

    fn report_made(&self, groups: u64) {
        if groups > 0 {
            warn!(
                ring = self.context.ring,
                groups,
                "groups were missing in Redis and are created again: they get all batches in the outbox again, as new \
                 ones, and other batches that they had not acknowledged are lost; find out whether Redis lost data, or \
                 somebody deleted keys"
            );
        }
    }

    /// Compares the bounds here with those of the leader, which keeps its own for all sidecars.
    fn compare_bounds(&self, kept: &str) {
        let Retention { time, max_ids } = self.context.options.retention;
        if kept.is_empty() || kept == format!("{} {max_ids}", whole_ms(time)) {
            return;
        }
        let mut reported = self.reported_bounds.lock();
        if *reported != kept {
            kept.clone_into(&mut reported);
            let (kept_ms, kept_ids) = kept.split_once(' ').unwrap_or_default();
            warn!(
                ring = self.context.ring,
                retention_ms = whole_ms(time),
                max_ids,
                retention_ms_of_leader = %kept_ms,
                max_ids_of_leader = %kept_ids,
                "--outbox-retention or --outbox-max-ids differ between this sidecar and the leader: the leader drops \
                 batches and groups by its own bounds; start all sidecars of this namespace with the same"
            );
        }
    }

    /// As the leader: looks at all sidecars, repairs lost groups, and frees the batches of dead sidecars.
    pub(super) async fn inspect(&self) -> Result<(), Refusal> {
        let link = &self.context.link;
        let session = link.session()?.number;
        let arguments = (self.context.sidecar(), whole_ms(LINK_LIFETIME), MOST_LINKS);
        let mut answer = run_expecting(&self.context, "inspected", &SCRIPTS.inspect, arguments).await?;
        let (made, links) = (answer.count()?, answer.count()?);
        let old_links: Vec<String> = (0..links).map(|_| answer.text()).collect::<Result<_, _>>()?;
        let found = answer.rest(|answer| Ok::<_, Fault>((answer.text()?, answer.count()?)))?;
        self.report_made(made);
        let now = link.clock().now();
        let dead = self.seen.lock().record(session, found, self.context.options.lease, now);
        for (sidecar, heartbeat) in dead.iter().filter(|(sidecar, _)| sidecar != self.context.sidecar()) {
            self.reap(sidecar, *heartbeat).await?;
        }
        for sidecar in old_links {
            let link = link.keys().link_of(&sidecar);
            run(&self.context, &SCRIPTS.drop_link, &[&link], sidecar).await?;
        }
        Ok(())
    }

    /// Frees the batches of a dead sidecar.
    async fn reap(&self, sidecar: &str, heartbeat: u64) -> Result<(), Refusal> {
        let (ring, mut batches) = (self.context.ring, 0);
        loop {
            let Some((freed, more)) = self.reap_part(sidecar, &heartbeat.to_string()).await? else {
                info!(ring, sidecar, batches, "a sidecar that seemed dead sends heartbeats again");
                return Ok(());
            };
            batches += freed;
            if !more {
                info!(ring, sidecar, batches, "a sidecar is dead: its batches go to other sidecars");
                return Ok(());
            }
        }
    }

    /// Removes this sidecar. It sends no heartbeat while the lock is held, and none later: that would bring it back.
    pub(super) async fn depart(&self, groups: &Groups, sending: &AbortHandle) -> Result<(), Refusal> {
        let _joined = groups.joined.write().await;
        sending.abort();
        while self.reap_part(self.context.sidecar(), "ends").await?.is_some_and(|(_, more)| more) {}
        Ok(())
    }

    /// Does a step of freeing the batches of a sidecar. Returns how many it freed, and whether there are more; none if
    /// the sidecar lives.
    async fn reap_part(&self, sidecar: &str, heartbeat: &str) -> Result<Option<(u64, bool)>, Refusal> {
        let arguments = (sidecar, heartbeat, MOST_BATCHES, MOST_DELETED);
        let (word, mut answer) =
            run(&self.context, &SCRIPTS.reap, &[&self.context.link.keys().held_acks], arguments).await?;
        match word.as_str() {
            "reaped" | "more" => Ok(Some((answer.count()?, word == "more"))),
            "alive" => Ok(None),
            word => Err(answer.strange(word).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);
    const SECOND: Duration = Duration::from_secs(1);

    fn beats(of_a: u64, of_b: u64) -> Vec<(String, u64)> {
        vec![(String::from("a"), of_a), (String::from("b"), of_b)]
    }

    #[test]
    fn a_sidecar_without_a_new_heartbeat_for_longer_than_a_lease_is_dead() {
        let (mut heartbeats, begun) = (SeenHeartbeats::default(), Instant::now());
        for second in 0..=3 {
            let dead = heartbeats.record(1, beats(u64::from(second), 7), LEASE, begun + SECOND * second);
            assert_eq!(dead, [], "after {second} s");
        }
        assert_eq!(heartbeats.record(1, beats(4, 7), LEASE, begun + SECOND * 4), [(String::from("b"), 7)]);
        assert_eq!(heartbeats.record(1, beats(5, 8), LEASE, begun + SECOND * 5), [], "there is a new heartbeat");
    }

    #[test]
    fn time_that_was_not_watched_does_not_count() {
        let (mut heartbeats, begun) = (SeenHeartbeats::default(), Instant::now());
        heartbeats.record(1, beats(1, 1), LEASE, begun);
        assert_eq!(heartbeats.record(1, beats(2, 1), LEASE, begun + LEASE * 100), [], "this process was stopped");
        for second in 0..10 {
            let session = 2 + u64::from(second);
            let dead = heartbeats.record(session, beats(3, 1), LEASE, begun + LEASE * 100 + SECOND * second);
            assert_eq!(dead, [], "each session starts empty");
        }
    }

    #[test]
    fn a_new_leader_knows_how_long_the_heartbeat_of_the_one_before_was_unchanged() {
        let (mut heartbeats, begun) = (SeenHeartbeats::default(), Instant::now());
        for second in 0..=3 {
            let dead = heartbeats.record(1, [(String::from("b"), 7)], LEASE, begun + SECOND * second);
            assert_eq!(dead, []);
        }
        assert_eq!(heartbeats.record(1, beats(1, 7), LEASE, begun + SECOND * 4), [(String::from("b"), 7)]);
    }
}
