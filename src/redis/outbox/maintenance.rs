//! What is looked after once a second: the heartbeat, and what was lost on the way; and, if this sidecar leads, the bounds
//! of the outbox and all other sidecars.
//!
//! The heartbeat has a task of its own, and waits for nothing else: a sidecar that is busy is not dead.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::core::outbox::{Dropped, Retention};
use crate::core::refusal::Refusal;
use crate::redis::leader::term::{Term, whole_ms};
use crate::redis::outbox::Shared;
use crate::redis::outbox::sidecars::Beats;

/// How often a sidecar tells that it lives.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);

/// After a start or an outage nothing is dropped for being old before so much time has passed, or the retention, if that
/// is less.
const LONGEST_GRACE: Duration = Duration::from_secs(3_600);

impl Shared {
    /// Sends heartbeats from when the outbox is looked after for the first time.
    pub(super) async fn send_heartbeats(self: Arc<Self>) {
        if self.is_tended.subscribe().wait_for(|is_tended| *is_tended).await.is_err() {
            return;
        }
        let mut beats = tokio::time::interval(HEARTBEAT_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            let beaten = self.heartbeat().await;
            *self.beaten.lock() = beaten;
        }
    }

    /// Tells that this sidecar lives.
    async fn heartbeat(&self) -> Result<(), Refusal> {
        let mut joined = self.joined.write().await;
        let session = self.calls.link.session()?.number;
        let groups = joined.get_mut();
        let Some(beaten) = self.calls.heartbeat(groups).await? else {
            self.report_made(self.calls.announce(groups).await?);
            return Ok(());
        };
        drop(joined);
        self.compare_bounds(&beaten.bounds);
        if self.term().is_none() {
            let now = self.calls.link.clock().now();
            self.sidecars.lock().look(session, beaten.leader, self.lease, now);
        }
        Ok(())
    }

    fn report_made(&self, groups: u64) {
        if groups > 0 {
            warn!(
                ring = self.calls.ring,
                groups,
                "groups were not in Redis any more and are made anew: what the outbox still has comes again, as if it \
                 was new, and what else they had not acknowledged is lost; see whether Redis lost data, or somebody \
                 deleted keys"
            );
        }
    }

    /// The leader keeps its own bounds for all sidecars.
    fn compare_bounds(&self, kept: &str) {
        let Retention { time, max_ids } = self.retention;
        if kept.is_empty() || kept == format!("{} {max_ids}", whole_ms(time)) {
            return;
        }
        let mut reported = self.reported_bounds.lock();
        if *reported != kept {
            kept.clone_into(&mut reported);
            let (kept_ms, kept_ids) = kept.split_once(' ').unwrap_or_default();
            warn!(
                ring = self.calls.ring,
                retention_ms = whole_ms(time),
                max_ids,
                retention_ms_of_leader = %kept_ms,
                max_ids_of_leader = %kept_ids,
                "--outbox-retention or --outbox-max-ids differ between this sidecar and the leader: the leader drops \
                 batches and groups by its own; start all sidecars of this namespace with the same"
            );
        }
    }

    /// The term of this sidecar, if it leads.
    fn term(&self) -> Option<Term> {
        let now = self.calls.link.clock().now();
        self.office.term().filter(|term| now < term.lease_until)
    }

    /// Each part does what it can, whatever became of the others: a Redis that is out of memory takes no heartbeat, and
    /// trimming is what helps it. What was dropped is told even so, since it is told once here.
    pub(super) async fn maintain(&self, now: Instant) -> Result<Dropped, Refusal> {
        self.is_tended.send_replace(true);
        if self.calls.link.is_up() {
            // Hints can be missed; nothing waits for longer than this.
            self.tell();
        }
        let mut dropped = Dropped::default();
        let (mut kept, mut inspected) = (Ok(()), Ok(()));
        if let Some(term) = self.term() {
            kept = self.keep_bounds(term, now, &mut dropped).await;
            inspected = self.inspect().await;
        }
        let beaten = self.beaten.lock().clone();
        let recovered = self.recover_all().await;
        if dropped != Dropped::default() {
            return Ok(dropped);
        }
        beaten.and(inspected).and(kept).and(recovered).map(|()| dropped)
    }

    /// Looks at all sidecars, and frees what dead ones held.
    async fn inspect(&self) -> Result<(), Refusal> {
        let session = self.calls.link.session()?.number;
        let inspected = self.calls.inspect().await?;
        self.report_made(inspected.made);
        let now = self.calls.link.clock().now();
        let dead = self.sidecars.lock().look(session, inspected.sidecars, self.lease, now);
        for dead in dead.iter().filter(|(sidecar, _)| *sidecar != self.calls.sidecar) {
            self.reap(dead).await?;
        }
        for sidecar in inspected.departed {
            self.calls.drop_link(&sidecar).await?;
        }
        Ok(())
    }

    async fn reap(&self, dead: &Beats) -> Result<(), Refusal> {
        let (ring, sidecar, mut batches) = (self.calls.ring, &dead.0, 0);
        loop {
            let Some(reaped) = self.calls.reap(dead).await? else {
                info!(ring, sidecar, batches, "a sidecar that was taken for dead lives");
                return Ok(());
            };
            batches += reaped.freed;
            if !reaped.more {
                info!(ring, sidecar, batches, "a sidecar is gone; what it held goes to others");
                return Ok(());
            }
        }
    }

    /// Leaves nothing of this sidecar behind. From when the lock is held it sends no heartbeat: that would bring it back.
    pub(super) async fn depart(&self, beating: &AbortHandle) -> Result<(), Refusal> {
        let _joined = self.joined.write().await;
        beating.abort();
        while self.calls.depart().await?.is_some_and(|reaped| reaped.more) {}
        Ok(())
    }

    async fn keep_bounds(&self, term: Term, now: Instant, dropped: &mut Dropped) -> Result<(), Refusal> {
        let session = self.calls.link.session()?.number;
        let grace = self.retention.time.min(LONGEST_GRACE);
        let may_drop_old = self.grace.lock().is_over((session, term.epoch), grace, self.lease, now);
        loop {
            let number = self.tended.load(Ordering::Relaxed) + 1;
            let (step, more) = self.calls.maintain(number, self.retention, may_drop_old).await?;
            self.tended.store(number, Ordering::Relaxed);
            dropped.ids += step.ids;
            dropped.batches += step.batches;
            dropped.groups.extend(step.groups);
            if !more {
                return Ok(());
            }
        }
    }

    async fn recover_all(&self) -> Result<(), Refusal> {
        for (group, hand) in self.hands.all() {
            self.recover(&group, &mut *hand.lock().await).await?;
        }
        Ok(())
    }
}
