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
//! has an [`Ownership`]: the batches that are known to be held. After a lost answer, and in a new
//! session of the link, this sidecar returns all others that Redis holds for it. A group without subscribers here
//! has no ownership; the heartbeat frees its batches.
//!
//! # Work of each sidecar, and of the leader for all
//!
//! A heartbeat touches the entry of its own sidecar. The leader of the ring alone looks at all sidecars, frees the
//! batches of dead ones, and keeps the bounds: so the cost of a sidecar does not grow with their number.

mod entry;
mod maintenance;
mod ownership;
mod state;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dashmap::DashMap;
use futures_util::stream::{self, StreamExt};
use parking_lot::{Mutex, RwLock};
use redis::ToRedisArgs;
use tokio::sync::Notify;

use self::entry::{entry_id, group_name, ids_and_epochs};
use self::state::{Maintenance, Ownership};
use crate::core::{
    Backlog, BatchId, Delivery, Dropped, GroupBacklog, GroupName, GroupOptions, MAX_GROUPS, MAX_RETAKEN, Outbox,
    Reason, Refusal, Settled,
};
use crate::redis::connection::link::Link;
use crate::redis::scripts::{Answer, SCRIPTS, Script};

/// The most batches that one script looks at or delivers, so that none holds Redis up.
const MOST_BATCHES: usize = 64;

/// The most batches that one script reads, with all their messages: it takes ten times longer than without.
const MAX_READ: usize = 16;

const _: () = assert!(MAX_RETAKEN <= MAX_READ);

/// So many scripts that settle are under way at once.
const SETTLED_TOGETHER: usize = 32;

/// The outbox of one ring in Redis.
pub(super) struct RedisOutbox {
    link: Arc<Link>,
    on_new_batches: RwLock<Vec<Box<dyn Fn() + Send + Sync>>>,
    /// Notified when the outbox is maintained: the first time, heartbeats begin.
    maintained: Notify,
    maintenance: Maintenance,
    /// The groups that were opened here and not left, and whether each is ephemeral.
    ///
    /// A task that opens, leaves or deletes a group holds the lock for reading until Redis has answered, and no longer;
    /// tasks with the same group run one after the other. The heartbeat holds it for writing, so that its list of
    /// groups is complete: none is just being opened or left.
    joined: tokio::sync::RwLock<Mutex<BTreeMap<GroupName, bool>>>,
    /// The batches of each group with subscribers here. Each is locked while a script changes it in Redis.
    owned: DashMap<GroupName, Arc<tokio::sync::Mutex<Ownership>>>,
}

#[async_trait]
impl Outbox for RedisOutbox {
    async fn open_group(&self, group: &GroupName, opening: GroupOptions, _now: Instant) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let start = if opening.from_end { "$" } else { "0" };
        let arguments = (&*self.link.keys.sidecar, group.as_str(), MAX_GROUPS, start, kind(opening.ephemeral));
        let (word, mut answer) = self.run(&SCRIPTS.open_group, &[], arguments).await?;
        match word.as_str() {
            "open" => {
                let (is_new, is_ephemeral) = (answer.count()? == 1, answer.text()? == kind(true));
                joined.lock().insert(group.clone(), is_ephemeral);
                Ok(is_new)
            }
            "full" => Err(Refusal::new(
                Reason::TooManyGroups,
                format!("there are {MAX_GROUPS} groups already: delete one with `ackwheel group delete NAME`"),
            )),
            word => Err(answer.strange(word).into()),
        }
    }

    /// If Redis does not answer, the next heartbeat does the same.
    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal> {
        self.owned.remove(group);
        let joined = self.joined.read().await;
        joined.lock().remove(group);
        let mut joined = Some(joined);
        loop {
            let arguments = (&*self.link.keys.sidecar, group.as_str(), MOST_BATCHES);
            let mut answer = self.run_expecting("left", &SCRIPTS.leave_group, arguments).await?;
            if answer.count()? != 1 {
                return Ok(());
            }
            drop(joined.take());
        }
    }

    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal> {
        let joined = self.joined.read().await;
        let arguments = (&*self.link.keys.sidecar, group.as_str());
        let (word, mut answer) = self.run(&SCRIPTS.delete_group, &[], arguments).await?;
        if word == "in use" {
            let others = answer.count()?;
            let sidecars = if others == 1 { "sidecar" } else { "sidecars" };
            return Err(Refusal::new(
                Reason::GroupInUse,
                format!(
                    "group {group} has subscribers at {others} other {sidecars}: end them first, then delete it"
                ),
            ));
        }
        if !["deleted", "unknown"].contains(&word.as_str()) {
            return Err(answer.strange(&word).into());
        }
        joined.lock().remove(group);
        self.owned.remove(group);
        Ok(word == "deleted")
    }

    fn is_shared(&self) -> bool {
        true
    }

    /// One script alone, unless it finds only entries that cannot be read: its batches are delivered before there are
    /// more, and the lock is soon free again.
    async fn take(&self, group: &GroupName, window: u64, _now: Instant) -> Result<Vec<Delivery>, Refusal> {
        let owned = self.ownership(group);
        let mut owned = owned.lock().await;
        self.recover(group, &mut owned).await?;
        loop {
            let lent: Vec<String> = owned.lent.iter().map(|batch| entry_id(*batch)).collect();
            let arguments = (&*self.link.keys.sidecar, group.as_str(), window, MAX_READ, lent);
            let (found, taken) = self.claim(group, &mut owned, &SCRIPTS.take, arguments, &[]).await?;
            if found == 0 || !taken.is_empty() {
                return Ok(taken);
            }
        }
    }

    async fn retake(
        &self,
        group: &GroupName,
        batches: &[BatchId],
        _now: Instant,
    ) -> Result<Vec<Delivery>, Refusal> {
        let batches = self.of_this_ring(batches);
        if batches.is_empty() {
            return Ok(Vec::new());
        }
        let owned = self.ownership(group);
        let mut owned = owned.lock().await;
        // If the answer is lost, Redis may hold lent batches for this sidecar: then it gives them back, for others to
        // take.
        let arguments = (&*self.link.keys.sidecar, group.as_str(), ids_and_epochs(&batches));
        let (_, taken) = self.claim(group, &mut owned, &SCRIPTS.retake, arguments, &batches).await?;
        Ok(taken)
    }

    /// All parts are sent together, so that many batches hold the group up no longer than few.
    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal> {
        let batches = self.of_this_ring(batches);
        let parts: Vec<_> = batches.chunks(MAX_READ).map(|part| self.settle_part(group, part)).collect();
        Settled::sum(stream::iter(parts).buffered(SETTLED_TOGETHER).collect().await, "scripts")
    }

    async fn release(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        self.give_back(group, &self.of_this_ring(batches), false).await
    }

    async fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        self.give_back(group, &self.of_this_ring(batches), true).await
    }

    /// A part that fails does not keep the others from being done: a Redis that is out of memory takes no heartbeat, and
    /// trimming helps it. The dropped batches are returned even after a failure, since they are reported once here.
    ///
    /// The attended groups are not needed: Redis knows which sidecars have a subscriber of a group.
    async fn maintain(&self, _attended: &[GroupName], now: Instant) -> Result<Dropped, Refusal> {
        let link = &self.link;
        self.maintained.notify_one();
        if link.is_up() {
            // Hints can be missed; nothing waits for longer than this.
            self.notify();
        }
        let mut dropped = Dropped::default();
        let (mut kept, mut inspected) = (Ok(()), Ok(()));
        if let Some(term) = self.link.term.lasting(link.clock.now()) {
            kept = self.keep_bounds(term, now, &mut dropped).await;
            inspected = self.inspect().await;
        }
        let heartbeat = self.maintenance.heartbeat.lock().clone().map_or(Ok(()), Err);
        let recovered = self.recover_all().await;
        if dropped != Dropped::default() {
            return Ok(dropped);
        }
        heartbeat.and(inspected).and(kept).and(recovered).map(|()| dropped)
    }

    async fn backlog(&self, _now: Instant) -> Result<Backlog, Refusal> {
        let link = &self.link;
        let keys = &link.keys;
        let mut answer =
            link.read(&SCRIPTS.backlogs, &[&keys.meta, &keys.outbox, &keys.groups], None::<&str>).await?;
        let ids = answer.count()?;
        let mut groups = answer.rest(|answer| {
            let mut backlog = answer.nested()?;
            Ok::<_, Refusal>(GroupBacklog {
                group: group_name(&mut backlog)?,
                batches: backlog.count()?,
                unacked: backlog.count()?,
                oldest: Duration::from_millis(backlog.count()?),
            })
        })?;
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(Backlog { ids, groups })
    }

    fn on_new_batches(&self, listener: Box<dyn Fn() + Send + Sync>) {
        self.on_new_batches.write().push(listener);
    }
}

impl RedisOutbox {
    pub(super) fn new(link: Arc<Link>) -> RedisOutbox {
        RedisOutbox {
            link,
            on_new_batches: RwLock::default(),
            maintained: Notify::new(),
            maintenance: Maintenance::default(),
            joined: tokio::sync::RwLock::default(),
            owned: DashMap::new(),
        }
    }

    /// Calls the listeners: there may be batches to take.
    pub(super) fn notify(&self) {
        self.on_new_batches.read().iter().for_each(|listener| listener());
    }

    /// The batches of this ring: a client can name batches of rings that do not exist.
    fn of_this_ring(&self, batches: &[BatchId]) -> Vec<BatchId> {
        batches.iter().copied().filter(|batch| batch.ring == self.link.ring).collect()
    }

    /// Runs a script on the keys of the outbox, and `more`. Returns the first word of its answer, and the rest.
    async fn run(
        &self,
        script: &'static Script,
        more: &[&str],
        arguments: impl ToRedisArgs,
    ) -> Result<(String, Answer), Refusal> {
        let link = &self.link;
        let keys = &link.keys;
        let outbox: [&str; 5] = [&keys.outbox, &keys.groups, &keys.sidecars, &keys.departed, &keys.news];
        self.link.write_in(&*link.session()?, script, &[&outbox, more].concat(), arguments).await
    }

    /// Runs a script whose answer always begins with this word. Returns the rest.
    async fn run_expecting(
        &self,
        expected: &str,
        script: &'static Script,
        arguments: impl ToRedisArgs,
    ) -> Result<Answer, Refusal> {
        let (word, answer) = self.run(script, &[], arguments).await?;
        if word == expected { Ok(answer) } else { Err(answer.strange(&word).into()) }
    }
}

/// The mark of a group in Redis, by whether it is ephemeral.
fn kind(is_ephemeral: bool) -> &'static str {
    if is_ephemeral { "e" } else { "-" }
}
