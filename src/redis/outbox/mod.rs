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
//! A sidecar is one consumer in all groups. What is given back belongs to the consumer `-`, with its delivery count,
//! until somebody takes it. What is lent is given back too, and left out where this sidecar takes: it comes back here
//! by `take_again` alone.
//!
//! # What a sidecar believes, and what Redis does
//!
//! The answer to a take can be lost: Redis then holds batches for this sidecar of which nobody here knows. So each
//! group has a [`Hand`]: the batches that are known to be held. After a lost answer, and in a new session of the link,
//! what Redis has beyond it is given back. A group without subscribers here has no hand; the heartbeat frees what is left
//! of it.
//!
//! # What each sidecar does, and what the leader does for all
//!
//! A heartbeat touches what belongs to its sidecar. The leader of the ring alone looks at all sidecars, frees what the
//! dead ones held, and keeps the bounds: so the cost of a sidecar does not grow with their number.

mod calls;
mod entry;
mod hand;
mod maintenance;
mod sidecar_calls;
mod sidecars;
mod taking;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt};
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use self::calls::{Calls, MOST_BATCHES, MOST_READ};
use self::hand::{Hand, Hands};
use self::sidecars::{Grace, Sidecars};
use crate::core::batch::{BatchId, Delivery};
use crate::core::group::GroupName;
use crate::core::outbox::{Backlog, Dropped, Opening, Outbox, Retention, Settled};
use crate::core::refusal::{Promise, Reason, Refusal};
use crate::core::ring::Reply;
use crate::redis::connection::link::Link;
use crate::redis::leader::term::LeadershipTerm;

type Tell = Box<dyn Fn() + Send + Sync>;

/// So many scripts that settle are under way at once.
const SETTLED_TOGETHER: usize = 32;

/// The outbox of one ring in Redis.
pub(super) struct RedisOutbox {
    shared: Arc<Shared>,
    beating: AbortHandle,
}

struct Shared {
    calls: Calls,
    retention: Retention,
    lease: Duration,
    told: RwLock<Vec<Tell>>,
    /// Whether this sidecar leads.
    office: Arc<LeadershipTerm>,
    /// Whether the outbox was looked after for the first time.
    is_tended: watch::Sender<bool>,
    /// The groups that were opened here and not left, and whether they are ephemeral. A task that opens, leaves or deletes
    /// a group reads it until Redis has answered, and no longer; tasks with the same group come one after the other. The
    /// heartbeat writes, so that it tells neither of a group that is just being left, nor that one is not here which is
    /// just being opened.
    joined: tokio::sync::RwLock<Mutex<BTreeMap<GroupName, bool>>>,
    hands: Hands,
    sidecars: Mutex<Sidecars>,
    grace: Mutex<Grace>,
    /// Steps of looking after the bounds of which the answer was heard.
    tended: AtomicU64,
    /// What became of the last heartbeat.
    beaten: Mutex<Result<(), Refusal>>,
    /// The bounds of a leader that were last reported to differ from those here.
    reported_bounds: Mutex<String>,
}

impl RedisOutbox {
    /// The outbox of `ring`, as the sidecar of this id sees it.
    pub(super) fn new(
        link: Arc<Link>,
        ring: u16,
        retention: Retention,
        sidecar: String,
        lease: Duration,
        office: Arc<LeadershipTerm>,
    ) -> RedisOutbox {
        let shared = Arc::new(Shared {
            calls: Calls { link, ring, sidecar },
            retention,
            lease,
            told: RwLock::default(),
            office,
            is_tended: watch::Sender::default(),
            joined: tokio::sync::RwLock::default(),
            hands: Hands::default(),
            sidecars: Mutex::default(),
            grace: Mutex::default(),
            tended: AtomicU64::new(0),
            beaten: Mutex::new(Ok(())),
            reported_bounds: Mutex::default(),
        });
        let beating = tokio::spawn(Arc::clone(&shared).send_heartbeats()).abort_handle();
        RedisOutbox { shared, beating }
    }

    /// Tells that there may be something to take.
    pub(super) fn tell(&self) {
        self.shared.tell();
    }

    /// Frees what this sidecar held, and has Redis forget it.
    pub(super) fn depart(&self) -> Reply<()> {
        let beating = self.beating.clone();
        self.later(|shared| async move { shared.depart(&beating).await })
    }

    fn later<T, F>(&self, answer: impl FnOnce(Arc<Shared>) -> F) -> Reply<T>
    where
        F: Future<Output = Result<T, Refusal>> + Send + 'static,
    {
        Reply::Later(Box::pin(answer(Arc::clone(&self.shared))))
    }
}

impl Drop for RedisOutbox {
    fn drop(&mut self) {
        self.beating.abort();
    }
}

impl Outbox for RedisOutbox {
    fn open_group(&self, group: &GroupName, opening: Opening, _now: Instant) -> Reply<bool> {
        let group = group.clone();
        self.later(|shared| async move { shared.open_group(group, opening).await })
    }

    fn leave_group(&self, group: &GroupName) -> Reply<()> {
        let group = group.clone();
        self.later(|shared| async move { shared.leave_group(&group).await })
    }

    fn delete_group(&self, group: &GroupName) -> Reply<bool> {
        let group = group.clone();
        self.later(|shared| async move { shared.delete_group(&group).await })
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn take(&self, group: &GroupName, window: u64, _now: Instant) -> Reply<Vec<Delivery>> {
        let group = group.clone();
        self.later(|shared| async move { shared.take(&group, window).await })
    }

    fn take_again(&self, group: &GroupName, batches: &[BatchId], _now: Instant) -> Reply<Vec<Delivery>> {
        let (group, batches) = (group.clone(), self.shared.of_this_ring(batches));
        self.later(|shared| async move { shared.take_again(&group, &batches).await })
    }

    fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Reply<Settled> {
        let (group, batches) = (group.clone(), self.shared.of_this_ring(batches));
        self.later(|shared| async move { shared.settle(&group, &batches).await })
    }

    fn release(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        let (group, batches) = (group.clone(), self.shared.of_this_ring(batches));
        self.later(|shared| async move { shared.give_back(&group, &batches, false).await })
    }

    fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        let (group, batches) = (group.clone(), self.shared.of_this_ring(batches));
        self.later(|shared| async move { shared.give_back(&group, &batches, true).await })
    }

    /// Of a group it is known in Redis which sidecars have a subscriber.
    fn maintain(&self, _attended: &[GroupName], now: Instant) -> Reply<Dropped> {
        self.later(|shared| async move { shared.maintain(now).await })
    }

    fn backlog(&self, _now: Instant) -> Reply<Backlog> {
        self.later(|shared| async move { shared.calls.backlog().await })
    }

    fn on_news(&self, tell: Tell) {
        self.shared.told.write().push(tell);
    }
}

impl Shared {
    fn tell(&self) {
        self.told.read().iter().for_each(|tell| tell());
    }

    /// A client can name batches of rings that there are not.
    fn of_this_ring(&self, batches: &[BatchId]) -> Vec<BatchId> {
        batches.iter().copied().filter(|batch| batch.ring == self.calls.ring).collect()
    }

    async fn open_group(&self, group: GroupName, opening: Opening) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let (is_new, ephemeral) = self.calls.open_group(&group, opening).await?;
        joined.lock().insert(group, ephemeral);
        Ok(is_new)
    }

    /// Where Redis does not answer, the next heartbeat does the same.
    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        let joined = self.joined.read().await;
        joined.lock().remove(group);
        self.hands.drop(group);
        let mut more = self.calls.leave_group(group).await?;
        drop(joined);
        while more {
            more = self.calls.leave_group(group).await?;
        }
        Ok(())
    }

    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let deleted = self.calls.delete_group(group).await?;
        joined.lock().remove(group);
        self.hands.drop(group);
        Ok(deleted)
    }

    /// All parts set out together, so that many batches hold the group up no longer than few.
    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let parts: Vec<_> = batches.chunks(MOST_READ).map(|part| self.settle_part(group, part)).collect();
        let (mut sum, mut refused) = (Settled::default(), None);
        for part in stream::iter(parts).buffered(SETTLED_TOGETHER).collect::<Vec<_>>().await {
            if let Err(refusal) = sum.add(part)
                // What may be applied is not called "not applied".
                && (refused.is_none() || refusal.reason.promise() == Promise::OutcomeUnknown)
            {
                refused = Some(refusal);
            }
        }
        match refused {
            Some(refusal) if sum.batches.is_empty() => Err(refusal),
            refused => {
                let told = |Refusal { text, .. }| {
                    Refusal::new(Reason::StoreSilent, format!("a part is settled; of the rest: {text}"))
                };
                Ok(Settled { refusal: refused.map(told), ..sum })
            }
        }
    }

    async fn settle_part(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let count = self.calls.settle(group, batches).await?;
        if let Some(hand) = self.hands.find(group) {
            let mut hand = hand.lock().await;
            for batch in batches {
                hand.held.remove(batch);
                hand.lent.remove(batch);
            }
        }
        Ok(Settled { count, batches: batches.to_vec(), refusal: None })
    }

    /// Where Redis does not answer, what it has beyond the hand is given back later.
    async fn give_back(&self, group: &GroupName, batches: &[BatchId], lent: bool) -> Result<(), Refusal> {
        if batches.is_empty() {
            return Ok(());
        }
        let hand = self.hands.of(group);
        let mut hand = hand.lock().await;
        let sure_in = hand.doubt();
        for batch in batches {
            hand.held.remove(batch);
            if lent {
                hand.lent.insert(*batch);
            } else {
                hand.lent.remove(batch);
            }
        }
        for chunk in batches.chunks(MOST_READ) {
            let entries = chunk.iter().map(|batch| (entry::entry_id(*batch), Some(batch.epoch)));
            self.calls.give_back(group, entries).await?;
        }
        hand.sure_in = sure_in;
        Ok(())
    }

    /// Gives back what Redis holds for this sidecar and nobody here knows of, if that can be.
    async fn recover(&self, group: &GroupName, hand: &mut Hand) -> Result<(), Refusal> {
        let session = self.calls.link.session()?.number;
        if hand.sure_in == Some(session) {
            return Ok(());
        }
        let known = hand.entries();
        let mut last = String::new();
        loop {
            let page = self.calls.held(group, &last).await?;
            let is_last = page.len() < MOST_BATCHES;
            if let Some(entry) = page.last() {
                last.clone_from(entry);
            }
            let unknown: Vec<String> = page.into_iter().filter(|entry| !known.contains(entry)).collect();
            if !unknown.is_empty() {
                self.calls.give_back(group, unknown.into_iter().map(|entry| (entry, None))).await?;
            }
            if is_last {
                break;
            }
        }
        hand.sure_in = Some(session);
        Ok(())
    }
}
