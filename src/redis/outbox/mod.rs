//! The outbox in Redis: a stream with a consumer group for each group, shared by all sidecars.
//!
//! ```text
//!                take                     settle
//!   unread ───────────────▶ held by a ───────────────▶ gone, once every group has settled it
//!                           sidecar
//!   held by `-` ──────────▶    │  ▲ take_again (delivery count + 1)
//!        ▲   take, take_again  │  └──┘
//!        └─────────────────────┘
//!     release, lend, leave_group, a sidecar has died
//! ```
//!
//! A sidecar is one consumer in all groups. Batches that are given back belong to the consumer `-`, with their delivery
//! count, until a sidecar takes them. Lent batches are given back too, and left out where this sidecar takes: they come
//! back here by `take_again` alone.
//!
//! # Lost answers
//!
//! The answer to a take can be lost: Redis then holds batches for this sidecar that nobody here knows. So each group has
//! an [`Ownership`]: the batches that are known to be held. After a lost answer, and in a new session of the link, this
//! sidecar gives back all others that Redis holds for it. A group without subscribers here has no ownership; the heartbeat
//! frees its batches.
//!
//! # Work of each sidecar, and of the leader for all
//!
//! A heartbeat touches the entry of its own sidecar. The leader of the ring alone looks at all sidecars, frees the batches
//! of dead ones, and keeps the bounds: so the cost of a sidecar does not grow with their number.

mod calls;
mod entry;
mod heartbeat;
mod maintenance;
mod ownership;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use dashmap::DashMap;
use parking_lot::{Mutex, RwLock};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

use self::heartbeat::Heartbeats;
use self::maintenance::Grace;
use self::ownership::Ownership;
use crate::core::batch::{BatchId, Delivery};
use crate::core::group::GroupName;
use crate::core::outbox::{Backlog, Dropped, Opening, Outbox, Settled};
use crate::core::refusal::Refusal;
use crate::core::ring::Reply;
use crate::redis::context::{RingContext, later};

type Listener = Box<dyn Fn() + Send + Sync>;

/// The outbox of one ring in Redis.
pub(super) struct RedisOutbox {
    inner: Arc<Inner>,
    heartbeat: AbortOnDropHandle<()>,
}

struct Inner {
    context: Arc<RingContext>,
    on_news: RwLock<Vec<Listener>>,
    /// Notified when the outbox is maintained: the first time, heartbeats begin.
    maintained: Notify,
    /// The groups that were opened here and not left, and whether they are ephemeral.
    ///
    /// A task that opens, leaves or deletes a group holds the lock for reading until Redis has answered, and no longer;
    /// tasks with the same group run one after the other. The heartbeat holds it for writing, so that its list of groups
    /// is complete: none is just being opened or left.
    joined: tokio::sync::RwLock<Mutex<BTreeMap<GroupName, bool>>>,
    /// Of each group with subscribers here. It is locked while a script changes it in Redis.
    owned: DashMap<GroupName, Arc<tokio::sync::Mutex<Ownership>>>,
    heartbeats: Mutex<Heartbeats>,
    grace: Mutex<Grace>,
    /// How many steps of maintenance were answered.
    steps: AtomicU64,
    last_heartbeat: Mutex<Result<(), Refusal>>,
    /// The bounds of a leader that were last reported to differ from those here.
    reported_bounds: Mutex<String>,
}

impl RedisOutbox {
    pub(super) fn new(context: Arc<RingContext>) -> RedisOutbox {
        let inner = Arc::new(Inner {
            context,
            on_news: RwLock::default(),
            maintained: Notify::new(),
            joined: tokio::sync::RwLock::default(),
            owned: DashMap::new(),
            heartbeats: Mutex::default(),
            grace: Mutex::default(),
            steps: AtomicU64::new(0),
            last_heartbeat: Mutex::new(Ok(())),
            reported_bounds: Mutex::default(),
        });
        let heartbeat = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&inner).send_heartbeats()));
        RedisOutbox { inner, heartbeat }
    }

    /// Calls the listeners: there may be batches to take.
    pub(super) fn tell(&self) {
        self.inner.tell();
    }

    /// Frees the batches of this sidecar, and removes it from Redis.
    pub(super) fn depart(&self) -> Reply<()> {
        let heartbeat = self.heartbeat.abort_handle();
        later(&self.inner, |inner| async move { inner.depart(&heartbeat).await })
    }

    /// The batches of this ring: a client can name batches of rings that do not exist.
    fn of_this_ring(&self, batches: &[BatchId]) -> Vec<BatchId> {
        batches.iter().copied().filter(|batch| batch.ring == self.inner.context.ring).collect()
    }
}

impl Outbox for RedisOutbox {
    fn open_group(&self, group: &GroupName, opening: Opening, _now: Instant) -> Reply<bool> {
        let group = group.clone();
        later(&self.inner, |inner| async move { inner.open_group(group, opening).await })
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
        later(&self.inner, |inner| async move { inner.take(&group, window).await })
    }

    fn take_again(&self, group: &GroupName, batches: &[BatchId], _now: Instant) -> Reply<Vec<Delivery>> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.take_again(&group, &batches).await })
    }

    fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Reply<Settled> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.settle(&group, &batches).await })
    }

    fn release(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.give_back(&group, &batches, false).await })
    }

    fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        let (group, batches) = (group.clone(), self.of_this_ring(batches));
        later(&self.inner, |inner| async move { inner.give_back(&group, &batches, true).await })
    }

    /// The attended groups are not needed: Redis knows which sidecars have a subscriber of a group.
    fn maintain(&self, _attended: &[GroupName], now: Instant) -> Reply<Dropped> {
        later(&self.inner, |inner| async move { inner.maintain(now).await })
    }

    fn backlog(&self, _now: Instant) -> Reply<Backlog> {
        later(&self.inner, |inner| async move { inner.backlog().await })
    }

    fn on_news(&self, listener: Listener) {
        self.inner.on_news.write().push(listener);
    }
}

impl Inner {
    fn tell(&self) {
        self.on_news.read().iter().for_each(|listener| listener());
    }
}
