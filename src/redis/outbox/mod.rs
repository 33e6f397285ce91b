//! The outbox in Redis: a stream with a consumer group for each group, shared by all sidecars.
//!
//! ```text
//!                take                     settle
//!   unread ───────────────▶ held by a ───────────────▶ gone, once every group has settled it
//!                           sidecar
//!   held by `-` ──────────▶    │  ▲ retake (delivery count + 1)
//!        ▲   take, retake  │  └──┘
//!        └─────────────────────┘
//!     release, lend, leave_group, a sidecar has died
//! ```
//!
//! A sidecar is one consumer in all groups. Batches that are given back belong to the consumer `-`, with their delivery
//! count, until a sidecar takes them. Lent batches are given back too, and left out where this sidecar takes: they come
//! back here by `retake` alone.
//!
//! # Lost answers
//!
//! The answer to a take can be lost: Redis then holds batches for this sidecar that nobody here knows. So each group
//! has an [`Ownership`](ownership::Ownership): the batches that are known to be held. After a lost answer, and in a new
//! session of the link, this sidecar returns all others that Redis holds for it. A group without subscribers here
//! has no ownership; the heartbeat frees its batches.
//!
//! # Work of each sidecar, and of the leader for all
//!
//! A heartbeat touches the entry of its own sidecar. The leader of the ring alone looks at all sidecars, frees the
//! batches of dead ones, and keeps the bounds: so the cost of a sidecar does not grow with their number.

mod calls;
mod entry;
mod heartbeat;
mod maintenance;
mod ownership;

use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use self::calls::Groups;
use self::heartbeat::Heartbeat;
use self::maintenance::Bounds;
use self::ownership::Ownerships;
use crate::core::batch::{BatchId, Delivery};
use crate::core::group::GroupName;
use crate::core::outbox::{Backlog, Dropped, GroupOptions, Outbox, Settled};
use crate::core::refusal::Refusal;
use crate::core::ring::Reply;
use crate::redis::context::{RingContext, later};

type Listener = Box<dyn Fn() + Send + Sync>;

/// The outbox of one ring in Redis.
pub(super) struct RedisOutbox {
    inner: Arc<Inner>,
    heartbeats: AbortOnDropHandle<()>,
}

struct Inner {
    context: Arc<RingContext>,
    on_new_batches: RwLock<Vec<Listener>>,
    /// Notified when the outbox is maintained: the first time, heartbeats begin.
    maintained: Notify,
    groups: Groups,
    ownerships: Ownerships,
    heartbeat: Heartbeat,
    bounds: Bounds,
}

impl RedisOutbox {
    pub(super) fn new(context: Arc<RingContext>) -> RedisOutbox {
        let inner = Arc::new(Inner {
            on_new_batches: RwLock::default(),
            maintained: Notify::new(),
            groups: Groups::new(Arc::clone(&context)),
            ownerships: Ownerships::new(Arc::clone(&context)),
            heartbeat: Heartbeat::new(Arc::clone(&context)),
            bounds: Bounds::new(Arc::clone(&context)),
            context,
        });
        let sender = Arc::clone(&inner);
        let heartbeats = AbortOnDropHandle::new(tokio::spawn(async move {
            sender.maintained.notified().await;
            sender.heartbeat.send_all(&sender.groups).await;
        }));
        RedisOutbox { inner, heartbeats }
    }

    /// Calls the listeners: there may be batches to take.
    pub(super) fn tell(&self) {
        self.inner.tell();
    }

    /// Frees the batches of this sidecar, and removes it from Redis.
    pub(super) fn depart(&self) -> Reply<()> {
        let sending = self.heartbeats.abort_handle();
        later(&self.inner, |inner| async move { inner.heartbeat.depart(&inner.groups, &sending).await })
    }

    /// The batches of this ring: a client can name batches of rings that do not exist.
    fn of_this_ring(&self, batches: &[BatchId]) -> Vec<BatchId> {
        batches.iter().copied().filter(|batch| batch.ring == self.inner.context.ring).collect()
    }
}

impl Outbox for RedisOutbox {
    fn open_group(&self, group: &GroupName, opening: GroupOptions, _now: Instant) -> Reply<bool> {
        let group = group.clone();
        later(&self.inner, |inner| async move { inner.groups.open(group, opening).await })
    }

    fn leave_group(&self, group: &GroupName) -> Reply<()> {
        let group = group.clone();
        later(&self.inner, |inner| async move { inner.leave_group(&group).await })
    }

    fn delete_group(&self, group: &GroupName) -> Reply<bool> {
        let group = group.clone();
        later(&self.inner, |inner| async move { inner.delete_group(&group).await })
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn take(&self, group: &GroupName, window: u64, _now: Instant) -> Reply<Vec<Delivery>> {
        let group = group.clone();
        later(&self.inner, |inner| async move { inner.ownerships.take(&group, window).await })
    }

    fn retake(&self, group: &GroupName, batches: &[BatchId], _now: Instant) -> Reply<Vec<Delivery>> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.ownerships.retake(&group, &batches).await })
    }

    fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Reply<Settled> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.ownerships.settle(&group, &batches).await })
    }

    fn release(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.ownerships.give_back(&group, &batches, false).await })
    }

    fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.ownerships.give_back(&group, &batches, true).await })
    }

    /// The attended groups are not needed: Redis knows which sidecars have a subscriber of a group.
    fn maintain(&self, _attended: &[GroupName], now: Instant) -> Reply<Dropped> {
        later(&self.inner, |inner| async move { inner.maintain(now).await })
    }

    fn backlog(&self, _now: Instant) -> Reply<Backlog> {
        later(&self.inner, |inner| async move { calls::backlog(&inner.context).await })
    }

    fn on_new_batches(&self, listener: Listener) {
        self.inner.on_new_batches.write().push(listener);
    }
}

impl Inner {
    fn tell(&self) {
        self.on_new_batches.read().iter().for_each(|listener| listener());
    }

    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        self.ownerships.forget(group);
        self.groups.leave(group).await
    }

    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let existed = self.groups.delete(group).await?;
        self.ownerships.forget(group);
        Ok(existed)
    }

    /// Maintains the outbox. A part that fails does not keep the others from being done: a Redis that is out of memory
    /// takes no heartbeat, and trimming helps it. The dropped batches are returned even after a failure, since they are
    /// reported once here.
    async fn maintain(&self, now: Instant) -> Result<Dropped, Refusal> {
        let link = &self.context.link;
        self.maintained.notify_one();
        if link.is_up() {
            // Hints can be missed; nothing waits for longer than this.
            self.tell();
        }
        let mut dropped = Dropped::default();
        let (mut kept, mut inspected) = (Ok(()), Ok(()));
        if let Some(term) = self.context.term.lasting(link.clock().now()) {
            kept = self.bounds.keep(term, now, &mut dropped).await;
            inspected = self.heartbeat.inspect().await;
        }
        let heartbeat = self.heartbeat.sent();
        let recovered = self.ownerships.recover_all().await;
        if dropped != Dropped::default() {
            return Ok(dropped);
        }
        heartbeat.and(inspected).and(kept).and(recovered).map(|()| dropped)
    }
}
