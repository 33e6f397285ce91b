//! Sends the heartbeats of this sidecar. If this sidecar is the leader of the ring, also looks for dead sidecars, and
//! drops batches and groups that exceed the retention limits.
//!
//! A separate task sends the heartbeats. This task waits for no other work, so a busy sidecar does not seem dead. If
//! the heartbeats of a sidecar stop, the leader returns the batches of that sidecar, so that others can take them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use crate::core::{Dropped, GroupName, Observed, Refusal, Retention};
use crate::redis::connection::errors::Fault;
use crate::redis::leader::term::{Term, whole_ms};
use crate::redis::outbox::entry::group_name;
use crate::redis::outbox::{MOST_BATCHES, RedisOutbox, kind};
use crate::redis::scripts::SCRIPTS;

/// How often a sidecar sends a heartbeat.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);

/// Maximum number of ephemeral groups that one script deletes when it removes a sidecar. A group is ephemeral if it is
/// deleted when its last subscriber leaves.
const MOST_DELETED: usize = 16;

/// How long the key `link:<sidecar>` of a dead sidecar is kept. If the sidecar was only paused, it finds the answers to
/// its last requests under this key. This time is counted in ticks that the pointer has passed.
const LINK_LIFETIME: Duration = Duration::from_secs(25 * 3_600);

/// Maximum number of old keys `link:<sidecar>` that are deleted after one inspection of all sidecars.
const MOST_LINKS: usize = 16;

/// The maximum grace time. After a start or an outage, consumers need time to reconnect. So during the grace time, no
/// batch or group is dropped because of its age. The grace time is the retention time, but at most this long.
const LONGEST_GRACE: Duration = Duration::from_secs(3_600);

impl RedisOutbox {
    /// Waits for the first call of `maintain`, and then sends a heartbeat every second. Never ends.
    pub(in crate::redis) async fn send_heartbeats(self: Arc<RedisOutbox>) {
        self.maintained.notified().await;
        let mut interval = tokio::time::interval(HEARTBEAT_EVERY);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let sent = self.send_heartbeat().await;
            *self.maintenance.heartbeat.lock() = sent.err();
        }
    }

    async fn send_heartbeat(&self) -> Result<(), Refusal> {
        let link = &self.link;
        let mut joined = self.joined.write().await;
        let session = link.session()?;
        let groups = joined.get_mut();
        let entry =
            |(group, ephemeral): (&GroupName, &bool)| format!(" {group}{}", if *ephemeral { "/e" } else { "" });
        let arguments = (&*self.link.keys.sidecar, groups.iter().map(entry).collect::<String>());
        let (word, mut answer) =
            self.link.write_in(&session, &SCRIPTS.heartbeat, &[&link.keys.sidecars], arguments).await?;
        match word.as_str() {
            "beaten" => {
                drop(joined);
                let (bounds, leader, number) = (answer.text()?, answer.text()?, answer.text()?);
                self.compare_bounds(&bounds);
                let now = link.clock.now();
                if self.link.term.lasting(now).is_none() {
                    let leader = number.parse().ok().map(|number| (leader, number));
                    self.maintenance.seen.lock().record(session.number, leader, self.link.options.lease, now);
                }
                Ok(())
            }
            "differs" => {
                let kinds: Vec<(&str, &str)> =
                    groups.iter().map(|(name, is)| (name.as_str(), kind(*is))).collect();
                let arguments = (&*self.link.keys.sidecar, MOST_BATCHES, kinds);
                let mut answer = self.run_expecting("announced", &SCRIPTS.announce_groups, arguments).await?;
                self.report_made(answer.count()?);
                Ok(())
            }
            word => Err(answer.strange(word).into()),
        }
    }

    fn report_made(&self, groups: u64) {
        if groups > 0 {
            warn!(
                ring = self.link.ring,
                groups,
                "groups were missing in Redis and are created again: Redis delivers all batches of the outbox to them \
                 again, and batches that are no longer in the outbox are lost for them; find out whether Redis lost \
                 data, or somebody deleted keys"
            );
        }
    }

    /// Warns if `kept`, the retention limits of the leader, differ from the limits of this sidecar. The leader applies
    /// its own limits for all sidecars. `kept` is empty if no sidecar has led yet.
    fn compare_bounds(&self, kept: &str) {
        let Retention { time, max_ids } = self.link.options.retention;
        if kept.is_empty() || kept == format!("{} {max_ids}", whole_ms(time)) {
            return;
        }
        let mut reported = self.maintenance.reported_bounds.lock();
        if *reported != kept {
            kept.clone_into(&mut reported);
            let (kept_ms, kept_ids) = kept.split_once(' ').unwrap_or_default();
            warn!(
                ring = self.link.ring,
                retention_ms = whole_ms(time),
                max_ids,
                retention_ms_of_leader = %kept_ms,
                max_ids_of_leader = %kept_ids,
                "--outbox-retention or --outbox-max-ids differ between this sidecar and the leader: the leader drops \
                 batches and groups by its own limits; start all sidecars of this namespace with the same limits"
            );
        }
    }

    /// Inspects the entries of all sidecars in Redis: creates lost groups again, returns the batches of dead sidecars
    /// to the outbox, and deletes old keys `link:<sidecar>`. Only the leader calls this function.
    pub(super) async fn inspect(&self) -> Result<(), Refusal> {
        let (link, ring) = (&self.link, self.link.ring);
        let session = link.session()?.number;
        let arguments = (&*self.link.keys.sidecar, whole_ms(LINK_LIFETIME), MOST_LINKS);
        let mut answer = self.run_expecting("inspected", &SCRIPTS.inspect_sidecars, arguments).await?;
        let (made, links) = (answer.count()?, answer.count()?);
        let old_links: Vec<String> = (0..links).map(|_| answer.text()).collect::<Result<_, _>>()?;
        let found = answer.rest(|answer| Ok::<_, Fault>((answer.text()?, answer.count()?)))?;
        self.report_made(made);
        let now = link.clock.now();
        let dead = self.maintenance.seen.lock().record(session, found, self.link.options.lease, now);
        for (sidecar, heartbeat) in dead.iter().filter(|(sidecar, _)| **sidecar != self.link.keys.sidecar) {
            let (batches, is_alive) = self.reap(sidecar, &heartbeat.to_string()).await?;
            if is_alive {
                info!(ring, sidecar, batches, "a sidecar that seemed dead sends heartbeats again");
            } else {
                info!(ring, sidecar, batches, "a sidecar is dead: other sidecars get its batches");
            }
        }
        for sidecar in old_links {
            let link = link.keys.link_of(&sidecar);
            self.run(&SCRIPTS.delete_dead_link, &[&link], sidecar).await?;
        }
        Ok(())
    }

    /// Removes this sidecar from Redis. A later heartbeat would add the sidecar again. So this function first waits
    /// until no heartbeat is being sent, and ends the task `heartbeats`.
    pub(in crate::redis) async fn depart(&self, heartbeats: &AbortOnDropHandle<()>) -> Result<(), Refusal> {
        let _joined = self.joined.write().await;
        heartbeats.abort();
        self.reap(&self.link.keys.sidecar, "ends").await.map(drop)
    }

    /// Gives the batches of a sidecar back to the outbox, and removes the sidecar from Redis. `heartbeat` is the number
    /// of the last heartbeat that was seen, or `ends` if this sidecar removes itself. If Redis has another number, the
    /// sidecar is alive and is not removed. Returns the number of batches given back, and whether the sidecar is alive.
    async fn reap(&self, sidecar: &str, heartbeat: &str) -> Result<(u64, bool), Refusal> {
        let mut batches = 0;
        loop {
            let arguments = (sidecar, heartbeat, MOST_BATCHES, MOST_DELETED);
            let (word, mut answer) = self.run(&SCRIPTS.reap, &[&self.link.keys.held_acks], arguments).await?;
            match word.as_str() {
                "more" => batches += answer.count()?,
                "reaped" => return Ok((batches + answer.count()?, false)),
                "alive" => return Ok((batches, true)),
                word => return Err(answer.strange(word).into()),
            }
        }
    }

    /// Drops batches and groups beyond the retention limits, and adds them to `dropped`. Each call of the script does a
    /// part of the work and has a number. If an answer is lost, the next call has the same number. Then Redis repeats
    /// the lost answer, so every drop is counted once.
    pub(super) async fn keep_bounds(
        &self,
        term: Term,
        now: Instant,
        dropped: &mut Dropped,
    ) -> Result<(), Refusal> {
        let options = &self.link.options;
        let retention = options.retention;
        let session = self.link.session()?.number;
        let term = (session, term.epoch);
        let watched = Observed::record(&mut self.maintenance.watched.lock(), term, now, options.lease);
        let may_drop_old = watched >= retention.time.min(LONGEST_GRACE);
        loop {
            let number = self.maintenance.steps.load(Ordering::Relaxed) + 1;
            let arguments = (whole_ms(retention.time), retention.max_ids, may_drop_old, number);
            let mut answer = self.run_expecting("tended", &SCRIPTS.trim_outbox, arguments).await?;
            let more = answer.count()? == 1;
            let (ids, batches, groups) = (answer.count()?, answer.count()?, answer.rest(group_name)?);
            self.maintenance.steps.store(number, Ordering::Relaxed);
            dropped.ids += ids;
            dropped.batches += batches;
            dropped.groups.extend(groups.into_iter().flatten());
            if !more {
                return Ok(());
            }
        }
    }
}
