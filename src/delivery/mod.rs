//! Takes timeout batches from the outbox, where the store keeps them, and delivers them to subscribers. Every group of
//! subscribers gets every batch. Within a group, only one subscriber at a time holds a batch. A batch without an
//! acknowledgement is redelivered.
//!
//! Each group with subscribers on this sidecar has a task (`groups.rs`). These subscribers are the *members* of the
//! group. `core/dispatch.rs` chooses the member for each batch. The *credit* of a member limits the messages in the
//! batches that it has not acknowledged.

mod groups;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::core::{
    Backlog, BatchId, Delivery as Delivered, Dropped, GroupName, GroupOptions, MemberId, Outbox, Reason, Refusal,
};
use crate::metrics::Metrics;
use crate::process::panics;

/// How often a drain checks whether the tasks of all groups have ended.
const LEFT_POLL: Duration = Duration::from_millis(5);

/// How often a deletion checks whether the task of a group without members has ended.
const ENDED_POLL: Duration = Duration::from_millis(1);

/// How often the limits of the outbox are enforced.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);

/// The number of locks for groups. It is large enough that two groups seldom share a lock.
const LOCKS: usize = 64;

/// Delivers batches to subscribers.
pub struct Delivery {
    outbox: Arc<dyn Outbox>,
    clock: Arc<Clock>,
    metrics: Arc<Metrics>,
    redeliver_after: Duration,
    /// The groups with a running task.
    handles: Mutex<HashMap<GroupName, GroupHandle>>,
    /// The locks of the groups. The hash of a group's name chooses its lock.
    locks: [tokio::sync::Mutex<()>; LOCKS],
    /// A hasher with random keys. It chooses the lock of a group by its name. It also makes the generated names of
    /// ephemeral groups differ between sidecars. Process ids alone do not suffice, because two hosts may use the same
    /// id.
    random: RandomState,
    /// The id of the subscriber that joined last.
    last_member: AtomicU64,
}

impl Delivery {
    /// Creates the delivery for `outbox`. An unacknowledged batch is redelivered after `redeliver_after`.
    pub fn new(
        outbox: Arc<dyn Outbox>,
        clock: Arc<Clock>,
        metrics: Arc<Metrics>,
        redeliver_after: Duration,
    ) -> Arc<Delivery> {
        let delivery = Arc::new(Delivery {
            outbox,
            clock,
            metrics,
            redeliver_after,
            handles: Mutex::default(),
            locks: std::array::from_fn(|_| tokio::sync::Mutex::default()),
            random: RandomState::new(),
            last_member: AtomicU64::new(0),
        });
        let notified = Arc::downgrade(&delivery);
        delivery.outbox.on_new_batches(Box::new(move || {
            if let Some(delivery) = notified.upgrade() {
                delivery.handles.lock().values().for_each(|handle| handle.new_batches.notify_one());
            }
        }));
        delivery
    }

    /// Adds a subscriber to `group`, or to a new group with a generated name if `group` is `None`. If the group does
    /// not exist, creates it with `options`. `credit` limits the messages in the batches that the subscriber has not
    /// acknowledged. The last of these batches may exceed the limit.
    ///
    /// # Errors
    ///
    /// If the limit of groups is reached, or the store is unreachable.
    #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash are as good as others")]
    pub async fn subscribe(
        self: &Arc<Self>,
        group: Option<GroupName>,
        credit: u64,
        options: GroupOptions,
    ) -> Result<Subscription, Refusal> {
        let member = MemberId(self.last_member.fetch_add(1, Ordering::Relaxed) + 1);
        let process = self.random.hash_one(std::process::id()) as u32;
        let group = group.unwrap_or_else(|| GroupName::generated(process, member.0));
        let (sender, batches) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicU64::new(0));
        let sender = BatchSender { batches: sender, unread: Arc::clone(&unread) };
        let (created, commands) =
            self.join(&group, options, Command::Join { member, credit, batches: sender }).await?;
        Ok(Subscription { group, created, batches, unread, member, commands, delivery: Arc::clone(self) })
    }

    /// Deletes a group that has no subscriber.
    ///
    /// # Errors
    ///
    /// If the group is the default group, has subscribers or does not exist, or if the store is unreachable.
    pub async fn delete_group(&self, group: &GroupName) -> Result<(), Refusal> {
        if group.is_default() {
            return Err(Refusal::new(
                Reason::BadGroupName,
                "the default group always exists and cannot be deleted",
            ));
        }
        let _lock = loop {
            let lock = self.lock(group).await;
            let members = self.handles.lock().get(group).map(|handle| handle.members);
            if members.is_some_and(|members| members > 0) {
                let text = format!("group {group} has subscribers: end them first, then delete it");
                return Err(Refusal::new(Reason::GroupInUse, text));
            }
            if members.is_none() {
                break lock;
            }
            // The last member has left, but the task of the group still runs and needs the lock to end.
            drop(lock);
            tokio::time::sleep(ENDED_POLL).await;
        };
        if self.outbox.delete_group(group).await? {
            info!(%group, "group deleted");
            return Ok(());
        }
        Err(Refusal::new(Reason::UnknownGroup, format!("there is no group {group}: `ackwheel status` lists them")))
    }

    /// Returns the number of subscribers of a group on this sidecar.
    pub fn subscribers(&self, group: &GroupName) -> u64 {
        self.handles.lock().get(group).map_or(0, |handle| handle.members)
    }

    /// Returns the backlog of the outbox: the batches that are not acknowledged by every group.
    ///
    /// # Errors
    ///
    /// If the store is unreachable.
    pub async fn backlog(&self) -> Result<Backlog, Refusal> {
        self.outbox.backlog(self.clock.now()).await
    }

    /// Returns the groups with a task on this sidecar, each with its number of subscribers here.
    pub fn attended(&self) -> Vec<(GroupName, u64)> {
        let handles = self.handles.lock();
        handles.iter().map(|(group, handle)| (group.clone(), handle.members)).collect()
    }

    /// Waits until all subscribers have left and their batches are released, but for at most `timeout`.
    pub async fn wait_until_groups_left(&self, timeout: Duration) {
        let left = async {
            while !self.handles.lock().is_empty() {
                tokio::time::sleep(LEFT_POLL).await;
            }
        };
        if tokio::time::timeout(timeout, left).await.is_err() {
            warn!("some batches could not be released in time: they are redelivered once they are overdue");
        }
    }

    /// Enforces the limits of the outbox once a second, until the task is aborted.
    pub async fn maintain(&self) {
        let mut refused = false;
        loop {
            tokio::time::sleep(MAINTENANCE_INTERVAL).await;
            let attended: Vec<GroupName> = self.handles.lock().keys().cloned().collect();
            let dropped = self.outbox.maintain(&attended, self.clock.now()).await;
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
            self.metrics.outbox_dropped_ids.inc_by(dropped.ids);
            error!(
                messages = dropped.ids,
                batches = dropped.batches,
                "the outbox is full or its batches are too old, and it dropped batches that some group never \
                 acknowledged; look for a group without a subscriber in `ackwheel status`"
            );
        }
        self.metrics.groups_dropped.inc_by(dropped.groups.len() as u64);
        for group in dropped.groups {
            warn!(
                %group,
                "group dropped with its backlog: it had no subscriber for the retention time of the outbox; if it is \
                 still needed, subscribe to it, which creates it again, or raise --outbox-retention"
            );
        }
    }
}

/// A group with a running task.
struct GroupHandle {
    commands: mpsc::UnboundedSender<Command>,
    /// Notified when new batches may be available.
    new_batches: Arc<Notify>,
    members: u64,
}

impl GroupHandle {
    /// Counts a new member, and sends its `Join` command to the task. Returns the sender for further commands.
    fn join(&mut self, join: Command) -> mpsc::UnboundedSender<Command> {
        self.members += 1;
        // This send does not fail, because the task removes this handle before it ends.
        let _ = self.commands.send(join);
        self.commands.clone()
    }
}

/// A command to the task of a group.
enum Command {
    Join { member: MemberId, credit: u64, batches: BatchSender },
    Leave { member: MemberId },
    Ack { batches: Vec<BatchId>, answer: oneshot::Sender<Result<u64, Refusal>> },
    Nack { member: MemberId, batch: BatchId, delay: Duration, answer: oneshot::Sender<bool> },
}

/// The sender of batches to one subscriber.
struct BatchSender {
    batches: mpsc::UnboundedSender<Delivered>,
    /// The number of messages in the channel `batches`. While this number is not below the credit of the subscriber,
    /// the subscriber gets no further batches.
    unread: Arc<AtomicU64>,
}

/// The membership of one subscriber in a group. Dropping this value leaves the group.
pub struct Subscription {
    /// The group.
    pub group: GroupName,
    /// Whether this subscription created the group.
    pub created: bool,
    batches: mpsc::UnboundedReceiver<Delivered>,
    unread: Arc<AtomicU64>,
    member: MemberId,
    commands: mpsc::UnboundedSender<Command>,
    delivery: Arc<Delivery>,
}

impl Subscription {
    /// Waits for the next batch. Returns `None` if the task of the group has ended, which happens only when the process
    /// ends. Cancel-safe.
    pub async fn next(&mut self) -> Option<Delivered> {
        let delivery = self.batches.recv().await?;
        self.unread.fetch_sub(delivery.batch.messages.len() as u64, Ordering::Relaxed);
        Some(delivery)
    }

    /// Acknowledges batches, which settles them for the group. Resolves to the number of batches that were not settled
    /// before.
    ///
    /// The call itself queues the request, even if the returned future is never awaited.
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

    /// Gives a batch back to the group (nack), which redelivers it. Other subscribers can get the batch at once, this
    /// subscriber only after `delay`. Resolves to whether this subscriber held the batch.
    pub fn nack(&self, batch: BatchId, delay: Duration) -> impl Future<Output = bool> + Send + use<> {
        let (answer, held) = oneshot::channel();
        let _ = self.commands.send(Command::Nack { member: self.member, batch, delay, answer });
        async move { held.await.unwrap_or(false) }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let _shared = panics::shared();
        if let Some(handle) = self.delivery.handles.lock().get_mut(&self.group) {
            handle.members -= 1;
        }
        let _ = self.commands.send(Command::Leave { member: self.member });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{CombinedOutbox, MAX_GROUPS, Retention, RingParts, Store, StormRule, Wheel};
    use crate::memory::{MemoryOptions, MemoryStore};

    fn seat(clock: &Clock) -> RingParts {
        let options = MemoryOptions {
            wheel: Wheel::new(5, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 10,
            threads: 1,
        };
        MemoryStore::open(options, None, clock.moment()).unwrap().0.rings()[0].clone()
    }

    #[tokio::test]
    async fn a_group_that_only_some_rings_could_open_is_left_on_the_others() {
        let clock = Arc::new(Clock::start());
        let seats = [seat(&clock), seat(&clock)];
        for number in 1..MAX_GROUPS {
            let group = format!("group-{number}").parse().unwrap();
            assert!(seats[1].outbox.open_group(&group, GroupOptions::default(), clock.now()).await.unwrap());
        }
        let outbox = CombinedOutbox::of(&seats);
        let delivery =
            Delivery::new(outbox, Arc::clone(&clock), Arc::new(Metrics::default()), Duration::from_secs(1));
        let options = GroupOptions { from_end: true, ephemeral: true };
        let refusal = delivery.subscribe(None, 1, options).await.err().unwrap();
        assert_eq!(refusal.reason, Reason::TooManyGroups);
        let left = seats[0].outbox.backlog(clock.now()).await.unwrap();
        assert_eq!(left.groups.len(), 1, "only the default group is left: {left:?}");
    }
}
