//! What is looked after once a second: the beat, the bounds, the dead, and what was lost on the way.
//!
//! The beat has a task of its own, and waits for nothing else: a sidecar that is busy is not dead.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use super::Shared;
use super::calls::Joined;
use super::sidecars::Beats;
use crate::core::group::GroupName;
use crate::core::outbox::Dropped;
use crate::core::refusal::Refusal;

/// How often a sidecar tells that it lives.
const BEAT_EVERY: Duration = Duration::from_secs(1);

impl Shared {
    /// Beats from when the outbox is looked after for the first time.
    pub(super) async fn beat_on(self: Arc<Self>) {
        if self.attended.subscribe().wait_for(Option::is_some).await.is_err() {
            return;
        }
        let mut beats = tokio::time::interval(BEAT_EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            let beaten = self.beat().await;
            *self.beaten.lock() = beaten;
        }
    }

    /// Tells that this sidecar lives; returns which others are dead.
    async fn beat(&self) -> Result<Vec<Beats>, Refusal> {
        let attended = self.attended.borrow().clone().unwrap_or_default();
        let mut joined = self.joined.write().await;
        let session = self.calls.link.session()?.number;
        let groups = joined.get_mut().iter().map(|(group, ephemeral)| Joined {
            group,
            ephemeral: *ephemeral,
            attended: attended.contains(group),
        });
        let beaten = self.calls.beat(groups).await?;
        drop(joined);
        if beaten.made > 0 {
            let (ring, groups) = (self.calls.ring, beaten.made);
            warn!(
                ring,
                groups,
                "groups were not in Redis any more and are made anew: what the outbox still has comes again, as if it \
                 were new, and what else they had not acknowledged is lost; see whether Redis lost data, or somebody \
                 deleted keys"
            );
        }
        let now = self.calls.link.clock().now();
        let mut dead = self.sidecars.lock().look(session, beaten.sidecars, self.lease, now);
        dead.retain(|(sidecar, _)| *sidecar != self.calls.sidecar);
        Ok(dead)
    }

    /// Each part does what it can, whatever became of the others: a Redis that is out of memory takes no beat, and
    /// trimming is what helps it. What was dropped is told even so, since it is told once here.
    pub(super) async fn tend(&self, attended: Vec<GroupName>) -> Result<Dropped, Refusal> {
        self.attended.send_replace(Some(attended.clone()));
        if self.calls.link.is_up() {
            // Hints can be missed; nothing waits for longer than this.
            self.tell();
        }
        let mut dropped = Dropped::default();
        let kept = self.keep_bounds(&attended, &mut dropped).await;
        let buried = self.bury_all().await;
        let recovered = self.recover_all().await;
        if dropped != Dropped::default() {
            return Ok(dropped);
        }
        buried.and(kept).and(recovered).map(|()| dropped)
    }

    /// Buries the dead of the last beat, unless that was refused. Who is still dead is found so by the next.
    async fn bury_all(&self) -> Result<(), Refusal> {
        let dead = match &mut *self.beaten.lock() {
            Ok(dead) => std::mem::take(dead),
            Err(refusal) => return Err(refusal.clone()),
        };
        for sidecar in dead {
            self.bury(&sidecar).await?;
        }
        Ok(())
    }

    async fn bury(&self, dead: &Beats) -> Result<(), Refusal> {
        let (ring, sidecar, mut batches) = (self.calls.ring, &dead.0, 0);
        loop {
            let Some(burial) = self.calls.bury(dead).await? else {
                info!(ring, sidecar, batches, "a sidecar that was taken for dead lives");
                return Ok(());
            };
            batches += burial.freed;
            if !burial.more {
                info!(ring, sidecar, batches, "a sidecar is gone; what it held goes to others");
                return Ok(());
            }
        }
    }

    /// Leaves nothing of this sidecar behind. From when the lock is held nothing beats: a beat would bring it back.
    pub(super) async fn depart(&self, beating: &AbortHandle) -> Result<(), Refusal> {
        let _joined = self.joined.write().await;
        beating.abort();
        while self.calls.depart().await?.is_some_and(|burial| burial.more) {}
        Ok(())
    }

    async fn keep_bounds(&self, attended: &[GroupName], dropped: &mut Dropped) -> Result<(), Refusal> {
        loop {
            // Who opens a group in this moment does so before it, or makes anew what it dropped.
            let mut joined = self.joined.write().await;
            let number = self.tended.load(Ordering::Relaxed) + 1;
            let (step, more) = self.calls.tend(number, self.retention, attended).await?;
            self.tended.store(number, Ordering::Relaxed);
            dropped.ids += step.ids;
            dropped.batches += step.batches;
            for group in step.groups {
                joined.get_mut().remove(&group);
                self.hands.drop(&group);
                dropped.groups.push(group);
            }
            drop(joined);
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
