//! Implements the outbox in Redis, which all sidecars share. The outbox is a stream. Each entry is a timeout batch:
//! some messages that timed out in the same tick. Each group of subscribers has a consumer group in this stream, so
//! each group gets every batch.
//!
//! ```text
//!                take                     settle
//!   unread ───────────────▶ held by a ───────────────▶ removed, once every group has settled it
//!                           sidecar
//!   held by `-` ──────────▶    │  ▲ retake (delivery count + 1)
//!        ▲   take, retake  │  └──┘
//!        └─────────────────────┘
//!     release, lend, leave_group, a sidecar has died
//! ```
//!
//! Each sidecar is one consumer, with the same name in every group. A returned batch keeps its delivery count, and
//! belongs to the consumer `-` until a sidecar takes it. A batch can also be *lent* to other sidecars: it is returned,
//! but at the sidecar that lent it, `take` skips the batch, and only `retake` delivers it again.
//!
//! # Lost answers
//!
//! If the answer to a take is lost, Redis has assigned batches to this sidecar, but the sidecar does not know which. So
//! the sidecar keeps an [`Ownership`] for each group: the batches that, as far as the sidecar knows, Redis has
//! assigned to it. After a lost answer or a reconnection, the sidecar returns all other batches that Redis has assigned
//! to it. A group without subscribers at this sidecar has no `Ownership`. The next heartbeat returns the batches of
//! such a group.
//!
//! # Work of each sidecar, and work of the leader
//!
//! A heartbeat updates only the sidecar's own entry in the Redis hash `sidecars`, so its cost does not grow with the
//! number of sidecars. Only the leader of the ring inspects the entries of all sidecars, returns the batches of dead
//! sidecars, and drops batches and groups beyond the retention limits.

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
use crate::redis::connection::errors::Fault;
use crate::redis::connection::link::Link;
use crate::redis::scripts::{Answer, SCRIPTS, Script};

/// Maximum number of batches that one script lists or releases, so that no script blocks Redis for long.
const MOST_BATCHES: usize = 64;

/// Maximum number of batches that one script reads together with their messages. It is less than [`MOST_BATCHES`],
/// because reading the messages takes ten times longer.
const MAX_READ: usize = 16;

const _: () = assert!(MAX_RETAKEN <= MAX_READ);

/// Maximum number of scripts of one `settle` call that wait for their answers at the same time.
const SETTLED_TOGETHER: usize = 32;

/// The outbox of one ring in Redis.
pub(super) struct RedisOutbox {
    link: Arc<Link>,
    on_new_batches: RwLock<Vec<Box<dyn Fn() + Send + Sync>>>,
    /// Notified by each call of `maintain`. The heartbeats begin after the first call.
    maintained: Notify,
    maintenance: Maintenance,
    /// The groups that have subscribers at this sidecar: `open_group` adds a group, and `leave_group` removes it. The
    /// value is true for an ephemeral group, which is deleted when its last subscriber leaves.
    ///
    /// A task that opens, leaves or deletes a group holds the outer lock for reading until Redis has answered. So tasks
    /// for different groups can run at the same time. The caller must run the tasks of the same group one after the
    /// other. A heartbeat holds the lock for writing. So no group is being opened or left while the heartbeat sends the
    /// list of groups.
    joined: tokio::sync::RwLock<Mutex<BTreeMap<GroupName, bool>>>,
    /// For each group with subscribers at this sidecar, the batches that the sidecar holds. An `Ownership` is locked
    /// while a script in Redis changes which batches the sidecar holds.
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

    /// Removes this sidecar from the group, and gives the group's batches at this sidecar back to the outbox. If Redis
    /// does not answer, the next heartbeat does the same.
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

    /// Runs the script `take` once, for at most [`MAX_READ`] batches. So these batches are delivered soon, and the lock
    /// is held only briefly. Repeats the script only if it found entries and this version can read none of them.
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
        // If the answer is lost, Redis may have assigned lent batches to this sidecar. Then `recover` returns them
        // later, so that other sidecars can take them.
        let arguments = (&*self.link.keys.sidecar, group.as_str(), ids_and_epochs(&batches));
        let (_, taken) = self.claim(group, &mut owned, &SCRIPTS.retake, arguments, &batches).await?;
        Ok(taken)
    }

    /// Sends up to [`SETTLED_TOGETHER`] scripts before it waits for their answers. So a call with many batches takes
    /// about as long as a call with few.
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

    /// Runs every step even if an earlier step fails, because no step needs the result of another. If batches or groups
    /// were dropped, returns them even if a step fails, because no later call reports them.
    ///
    /// Does not use the parameter `_attended`: Redis stores which sidecars have a subscriber of a group.
    async fn maintain(&self, _attended: &[GroupName], now: Instant) -> Result<Dropped, Refusal> {
        let link = &self.link;
        self.maintained.notify_one();
        if link.is_up() {
            // Other sidecars send hints when there are new batches, and a hint can get lost. So each maintenance calls
            // the listeners too, and no batch waits longer than until the next maintenance.
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
        let groups = answer.rest(|answer| {
            let mut backlog = answer.nested()?;
            let Some(group) = group_name(&mut backlog)? else { return Ok(None) };
            Ok::<_, Fault>(Some(GroupBacklog {
                group,
                batches: backlog.count()?,
                unacked: backlog.count()?,
                oldest: Duration::from_millis(backlog.count()?),
            }))
        })?;
        let mut groups: Vec<GroupBacklog> = groups.into_iter().flatten().collect();
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

    /// Calls all listeners. The caller uses this function when there may be new batches to take.
    pub(super) fn notify(&self) {
        self.on_new_batches.read().iter().for_each(|listener| listener());
    }

    /// Returns the elements of `batches` that belong to this ring. A request may contain ids of other rings, even of
    /// rings that do not exist.
    fn of_this_ring(&self, batches: &[BatchId]) -> Vec<BatchId> {
        batches.iter().copied().filter(|batch| batch.ring == self.link.ring).collect()
    }

    /// Runs one of the scripts that work on the outbox and its groups. Passes the keys that all these scripts have (see
    /// `group_functions.lua`), and then the keys `more`. Returns the first word of the answer, and the rest of the
    /// answer.
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

    /// Runs a script like `run`, and returns the answer without its first word. Returns an error if this word is not
    /// `expected`.
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

/// Returns the letter that Redis stores for a group: `e` if the group is ephemeral, else `-`.
fn kind(is_ephemeral: bool) -> &'static str {
    if is_ephemeral { "e" } else { "-" }
}
