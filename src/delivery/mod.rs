//! The delivery: brings batches from the outbox to subscribers, with groups, credit and redelivery.
//!
//! Each group with a subscriber on this sidecar has a task (`groups.rs`). Its decisions are in `core/dispatch.rs`.

mod groups;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, info, warn};

use self::groups::{BatchSender, Command, GroupHandle, GroupLocks, GroupTask, Groups};
use crate::clock::Clock;
use crate::core::batch::{BatchId, Delivery as Delivered};
use crate::core::dispatch::MemberId;
use crate::core::group::GroupName;
use crate::core::outbox::{Backlog, Dropped, GroupOptions, Outbox};
use crate::core::refusal::{Reason, Refusal};
use crate::metrics::Metrics;
use crate::process::panics;

/// How often a drain checks whether all groups are left.
const LEFT_POLL: Duration = Duration::from_millis(5);

/// How often a deletion checks whether the task of a group without members has ended.
const ENDED_POLL: Duration = Duration::from_millis(1);

/// How often the limits of the outbox are enforced.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);

/// A request to subscribe.
#[derive(Clone, Debug)]
pub struct SubscribeRequest {
    /// The group to join; `None` for a new ephemeral group.
    pub group: Option<GroupName>,
    /// The most messages in unacknowledged batches, exceeded by at most one batch.
    pub credit: u64,
    /// Whether the group, if it is new, is deleted with its last member.
    pub ephemeral: bool,
    /// Whether the group, if it is new, starts to read with the next batch, and not with the oldest one in the outbox.
    pub from_end: bool,
}

/// Delivers batches to subscribers.
pub struct Delivery {
    groups: Arc<Groups>,
    last_member: AtomicU64,
    /// A part of the names of ephemeral groups that keeps apart those of this process and of others. A pid would not
    /// do, since pids repeat among hosts.
    process: u32,
}

impl Delivery {
    /// Delivers from `outbox`. An unacknowledged batch is redelivered after `redeliver_after`.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash are as good as others")]
    pub fn new(
        outbox: Arc<dyn Outbox>,
        clock: Arc<Clock>,
        metrics: Arc<Metrics>,
        redeliver_after: Duration,
    ) -> Delivery {
        let (handles, locks) = (Mutex::new(HashMap::new()), GroupLocks::new());
        let groups = Arc::new(Groups { outbox, clock, metrics, redeliver_after, handles, locks });
        let notified = Arc::downgrade(&groups);
        groups.outbox.on_new_batches(Box::new(move || {
            if let Some(groups) = notified.upgrade() {
                groups.handles.lock().values().for_each(|handle| handle.new_batches.notify_one());
            }
        }));
        let random = RandomState::new().hash_one(std::process::id());
        Delivery { groups, last_member: AtomicU64::new(0), process: random as u32 }
    }

    /// Joins a group, which is created if it does not exist.
    ///
    /// # Errors
    ///
    /// If the limit of groups is reached, or the store is unreachable.
    pub async fn subscribe(&self, request: SubscribeRequest) -> Result<Subscription, Refusal> {
        let member = MemberId(self.last_member.fetch_add(1, Ordering::Relaxed) + 1);
        let group = request.group.unwrap_or_else(|| GroupName::generated(self.process, member.0));
        let from_end = request.ephemeral || request.from_end;
        let opening = GroupOptions { from_end, ephemeral: request.ephemeral };
        let (sender, batches) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicU64::new(0));
        let sender = BatchSender { batches: sender, unread: Arc::clone(&unread) };
        let join = Command::Join { member, credit: request.credit, batches: sender };
        let (created, commands) = self.join(&group, opening, join).await?;
        Ok(Subscription { group, created, batches, unread, member, commands, groups: Arc::clone(&self.groups) })
    }

    /// Deletes a group that has no subscriber.
    ///
    /// # Errors
    ///
    /// If it is the default group, has subscribers, or does not exist, or the store is unreachable.
    pub async fn delete_group(&self, group: &GroupName) -> Result<(), Refusal> {
        if group.is_default() {
            return Err(Refusal::new(
                Reason::BadGroupName,
                "the default group always exists and cannot be deleted",
            ));
        }
        let _lock = loop {
            let lock = self.groups.locks.lock(group).await;
            let members = self.groups.handles.lock().get(group).map(|handle| handle.members);
            if members.is_some_and(|members| members > 0) {
                let text = format!("group {group} has subscribers: end them first, then delete it");
                return Err(Refusal::new(Reason::GroupInUse, text));
            }
            if members.is_none() {
                break lock;
            }
            // Its last member has left, and its task needs the lock in order to end.
            drop(lock);
            tokio::time::sleep(ENDED_POLL).await;
        };
        if self.groups.outbox.delete_group(group).await? {
            info!(%group, "group deleted");
            return Ok(());
        }
        Err(Refusal::new(Reason::UnknownGroup, format!("there is no group {group}: `ackwheel status` lists them")))
    }

    /// Number of subscribers of a group on this sidecar.
    #[must_use]
    pub fn subscribers(&self, group: &GroupName) -> u64 {
        self.groups.handles.lock().get(group).map_or(0, |handle| handle.members)
    }

    /// The content of the outbox.
    ///
    /// # Errors
    ///
    /// If the store is unreachable.
    pub async fn backlog(&self) -> Result<Backlog, Refusal> {
        self.groups.outbox.backlog(self.groups.clock.now()).await
    }

    /// The groups with subscribers on this sidecar, each with their number.
    #[must_use]
    pub fn attended(&self) -> Vec<(GroupName, u64)> {
        let handles = self.groups.handles.lock();
        handles.iter().map(|(group, handle)| (group.clone(), handle.members)).collect()
    }

    /// Waits until the batches of all subscribers that left are released, for at most `timeout`.
    pub async fn wait_until_groups_left(&self, timeout: Duration) {
        let left = async {
            while !self.groups.handles.lock().is_empty() {
                tokio::time::sleep(LEFT_POLL).await;
            }
        };
        if tokio::time::timeout(timeout, left).await.is_err() {
            warn!("some batches could not be released in time: they are redelivered once they are overdue");
        }
    }

    /// Maintains the outbox until the task is aborted.
    pub async fn maintain(&self) {
        let mut refused = false;
        loop {
            tokio::time::sleep(MAINTENANCE_INTERVAL).await;
            let attended: Vec<GroupName> = self.groups.handles.lock().keys().cloned().collect();
            let dropped = self.groups.outbox.maintain(&attended, self.groups.clock.now()).await;
            let was_refused = std::mem::replace(&mut refused, dropped.is_err());
            match dropped {
                Ok(dropped) => {
                    self.report_dropped(dropped);
                    if was_refused {
                        info!("the outbox is maintained again");
                    }
                }
                Err(refusal) if !was_refused => warn!(
                    %refusal,
                    "the outbox could not be maintained and may exceed its limits; trying again every \
                     {MAINTENANCE_INTERVAL:?}: look at the store"
                ),
                Err(_) => {}
            }
        }
    }

    fn report_dropped(&self, dropped: Dropped) {
        if dropped.ids > 0 {
            self.groups.metrics.outbox_dropped_ids.inc_by(dropped.ids);
            error!(
                messages = dropped.ids,
                batches = dropped.batches,
                "the outbox is full or its batches are too old, and it dropped batches that some group never \
                 acknowledged; look for a group without a subscriber in `ackwheel status`"
            );
        }
        self.groups.metrics.groups_dropped.inc_by(dropped.groups.len() as u64);
        for group in dropped.groups {
            warn!(
                %group,
                "group dropped with its backlog: it had no subscriber for the retention time of the outbox; if it is \
                 still needed, subscribe to it, which creates it again, or raise --outbox-retention"
            );
        }
    }
    /// Adds a subscriber to a group, which is opened if it has none here. Returns whether the group is new, and the
    /// sender of commands to its task.
    async fn join(
        &self,
        group: &GroupName,
        opening: GroupOptions,
        join: Command,
    ) -> Result<(bool, mpsc::UnboundedSender<Command>), Refusal> {
        // A group with a subscriber here is open and stays so, and the store need not be asked. A handle without
        // members belongs to a group that is about to be left.
        let is_open = |handle: &&mut GroupHandle| handle.members > 0;
        if let Some(handle) = self.groups.handles.lock().get_mut(group).filter(is_open) {
            return Ok((false, handle.join(join)));
        }
        let _lock = self.groups.locks.lock(group).await;
        // The subscriber that had the lock before may have opened it.
        if let Some(handle) = self.groups.handles.lock().get_mut(group).filter(is_open) {
            return Ok((false, handle.join(join)));
        }
        let created = self.open_group(group, opening).await?;
        let mut handles = self.groups.handles.lock();
        let new_task = || GroupTask::spawn(group.clone(), Arc::clone(&self.groups));
        Ok((created, handles.entry(group.clone()).or_insert_with(new_task).join(join)))
    }

    /// Opens a group in all rings or, if possible, in none. Its lock is held.
    async fn open_group(&self, group: &GroupName, opening: GroupOptions) -> Result<bool, Refusal> {
        let opened = self.groups.outbox.open_group(group, opening, self.groups.clock.now()).await;
        if opened.is_err()
            && !self.groups.handles.lock().contains_key(group)
            && let Err(refusal) = self.groups.outbox.leave_group(group).await
        {
            debug!(%group, %refusal, "a group that could not be opened could not be left either; that follows later");
        }
        opened
    }
}

/// The subscription of one subscriber. Dropping it leaves the group.
pub struct Subscription {
    /// The group.
    pub group: GroupName,
    /// Whether the group is new.
    pub created: bool,
    batches: mpsc::UnboundedReceiver<Delivered>,
    unread: Arc<AtomicU64>,
    member: MemberId,
    commands: mpsc::UnboundedSender<Command>,
    groups: Arc<Groups>,
}

impl Subscription {
    /// The next delivered batch. `None` once the process ends. Cancel-safe.
    pub async fn next(&mut self) -> Option<Delivered> {
        let delivery = self.batches.recv().await?;
        self.unread.fetch_sub(delivery.batch.messages.len() as u64, Ordering::Relaxed);
        Some(delivery)
    }

    /// Settles batches for the group. Returns how many were not settled before.
    ///
    /// The request takes its place when this is called, not when the answer is awaited.
    ///
    /// # Errors
    ///
    /// If the store is unreachable, or the task of the group has ended.
    pub fn ack(&self, batches: Vec<BatchId>) -> impl Future<Output = Result<u64, Refusal>> + Send + use<> {
        let (answer, settled) = oneshot::channel();
        let _ = self.commands.send(Command::Ack { batches, answer });
        let ended = "the process ends: acknowledge the batch over another connection";
        async move { settled.await.unwrap_or_else(|_| Err(Refusal::new(Reason::StoreTimeout, ended))) }
    }

    /// Gives a batch back. Returns whether this subscriber held it.
    pub fn nack(&self, batch: BatchId, delay: Duration) -> impl Future<Output = bool> + Send + use<> {
        let (answer, held) = oneshot::channel();
        let _ = self.commands.send(Command::Nack { member: self.member, batch, delay, answer });
        async move { held.await.unwrap_or(false) }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let _shared = panics::shared();
        if let Some(handle) = self.groups.handles.lock().get_mut(&self.group) {
            handle.members -= 1;
        }
        let _ = self.commands.send(Command::Leave { member: self.member });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::group::MAX_GROUPS;
    use crate::core::outbox::Retention;
    use crate::core::outboxes::Outboxes;
    use crate::core::store::{RingParts, Store};
    use crate::core::tick::Wheel;
    use crate::memory::{MemoryOptions, MemoryStore};

    fn seat(clock: &Clock) -> RingParts {
        let options = MemoryOptions {
            wheel: Wheel::new(5, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 10,
            threads: 1,
            state_file: None,
        };
        MemoryStore::open(options, clock.moment()).unwrap().0.rings()[0].clone()
    }

    #[tokio::test]
    async fn a_group_that_only_some_rings_could_open_is_left_on_the_others() {
        let clock = Arc::new(Clock::start());
        let seats = [seat(&clock), seat(&clock)];
        for number in 1..MAX_GROUPS {
            let group = format!("group-{number}").parse().unwrap();
            assert!(seats[1].outbox.open_group(&group, GroupOptions::default(), clock.now()).await.unwrap());
        }
        let outbox = Outboxes::of(&seats);
        let delivery = Delivery::new(outbox, Arc::clone(&clock), Arc::new(Metrics::new()), Duration::from_secs(1));
        let request = SubscribeRequest { group: None, credit: 1, ephemeral: true, from_end: true };
        let refusal = delivery.subscribe(request).await.err().unwrap();
        assert_eq!(refusal.reason, Reason::TooManyGroups);
        let left = seats[0].outbox.backlog(clock.now()).await.unwrap();
        assert_eq!(left.groups.len(), 1, "the default group alone: {left:?}");
    }
}
