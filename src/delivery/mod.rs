//! Takes timeout batches from the outbox, where the store keeps them, and delivers them to subscribers. Every group of
//! subscribers gets every batch. Within a group, only one subscriber at a time holds a batch. A batch without an
//! acknowledgement is redelivered.
//!
//! Each group with subscribers on this sidecar has a task (`groups.rs`). These subscribers are the *members* of the
//! group. `core/dispatch.rs` chooses the member for each batch. The *credit* of a member limits the messages in the
//! batches that it has not acknowledged, or is a number of batches that the member requested.

mod groups;
mod subscription;

use std::collections::HashMap;
use std::hash::RandomState;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::{error, info, warn};

pub use self::subscription::{MEMBER_BYTES, Subscription};
use crate::clock::Clock;
use crate::core::{
    Backlog, BatchId, Credit, Delivery as Delivered, Dropped, GroupName, MemberId, Outbox, Reason, Refusal,
};
use crate::metrics::Metrics;

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

    /// Acknowledges batches, which settles them for the group. Any connection or sidecar may hold them. Returns the
    /// number of batches that were not settled before. Ignores ids that no batch has.
    ///
    /// # Errors
    ///
    /// If the group does not exist, or the store is unreachable.
    pub async fn ack(&self, group: &GroupName, batches: Vec<BatchId>) -> Result<u64, Refusal> {
        let (answer, settled) = oneshot::channel();
        self.send(group, Command::Ack { batches: batches.clone(), answer });
        if let Ok(settled) = settled.await {
            return settled;
        }
        // The group has no task here, or its task ended before it read the command.
        let settled = self.outbox.settle(group, &batches).await?;
        self.metrics.batches_acked.inc_by(settled.count);
        if let Some(refusal) = settled.refusal {
            return Err(refusal);
        }
        if settled.count == 0
            && !group.is_default()
            && !self.backlog().await?.groups.iter().any(|known| known.group == *group)
        {
            return Err(unknown_group(group));
        }
        Ok(settled.count)
    }

    /// Gives batches back to the group (nack). Any connection of this sidecar may hold them, or may have kept them with
    /// [`Subscription::keep`]. Returns the number of batches that went back. The connection that holds a batch gets it
    /// again after `delay`, other connections at once.
    pub async fn nack(&self, group: &GroupName, batches: Vec<BatchId>, delay: Duration) -> u64 {
        let (answer, returned) = oneshot::channel();
        self.send(group, Command::NackOfAny { batches, delay, answer });
        // Without a task, no connection of this sidecar holds a batch of the group.
        returned.await.unwrap_or(0)
    }

    /// Sends a command to the task of a group. Drops the command if the group has no task here.
    fn send(&self, group: &GroupName, command: Command) {
        if let Some(handle) = self.handles.lock().get(group) {
            let _ = handle.commands.send(command);
        }
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
            let members = self.handles.lock().get_mut(group).map(|handle| {
                handle.end_without_members();
                handle.members
            });
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
        Err(unknown_group(group))
    }

    /// Returns the number of subscribers of a group on this sidecar. A group that lingers has one: connections take from
    /// it from time to time.
    pub fn subscribers(&self, group: &GroupName) -> u64 {
        self.handles.lock().get(group).map_or(0, GroupHandle::subscribers)
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
        handles.iter().map(|(group, handle)| (group.clone(), handle.subscribers())).collect()
    }

    /// Waits until all subscribers have left and their batches are released, but for at most `timeout`.
    pub async fn wait_until_groups_left(&self, timeout: Duration) {
        let left = async {
            loop {
                {
                    let mut handles = self.handles.lock();
                    if handles.is_empty() {
                        break;
                    }
                    handles.values_mut().for_each(GroupHandle::end_without_members);
                }
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

fn unknown_group(group: &GroupName) -> Refusal {
    Refusal::new(Reason::UnknownGroup, format!("there is no group {group}: `ackwheel status` lists them"))
}

/// A group with a running task.
struct GroupHandle {
    commands: mpsc::UnboundedSender<Command>,
    /// Notified when new batches may be available.
    new_batches: Arc<Notify>,
    members: u64,
    /// Whether new members may join the task. The task sets this to `false` before it leaves the group in the store.
    /// Until then the group is open in the store, even without members.
    is_open: bool,
    /// Whether the task got the command `End` and no `Join` after it.
    is_ending: bool,
    /// Whether the task lingers: it waits for a new member.
    lingers: bool,
}

impl GroupHandle {
    fn subscribers(&self) -> u64 {
        self.members.max(u64::from(self.lingers))
    }

    /// If the group has no member, tells its task to end at once, even if the task lingers or has kept batches.
    fn end_without_members(&mut self) {
        if self.members == 0 && !std::mem::replace(&mut self.is_ending, true) {
            let _ = self.commands.send(Command::End);
        }
    }

    /// Counts a new member, and sends its `Join` command to the task. Returns the sender for further commands.
    fn join(&mut self, join: Command) -> mpsc::UnboundedSender<Command> {
        self.members += 1;
        self.is_ending = false;
        // This send does not fail, because the task removes this handle before it ends.
        let _ = self.commands.send(join);
        self.commands.clone()
    }
}

/// A command to the task of a group.
enum Command {
    Join {
        member: MemberId,
        credit: Credit,
        batches: BatchSender,
    },
    Leave {
        member: MemberId,
    },
    /// Ends the task as soon as the group has no member, and releases kept batches. A later `Join` cancels this command.
    End,
    Request {
        member: MemberId,
        batches: u32,
        answer: oneshot::Sender<Result<(), Refusal>>,
    },
    Keep {
        member: MemberId,
        batches: Vec<BatchId>,
    },
    Ack {
        batches: Vec<BatchId>,
        answer: oneshot::Sender<Result<u64, Refusal>>,
    },
    Nack {
        member: MemberId,
        batch: BatchId,
        delay: Duration,
        answer: oneshot::Sender<bool>,
    },
    NackOfAny {
        batches: Vec<BatchId>,
        delay: Duration,
        answer: oneshot::Sender<u64>,
    },
}

/// The sender of batches to one subscriber.
struct BatchSender {
    batches: mpsc::UnboundedSender<Delivered>,
    /// The number of messages in the channel `batches`. While this number is not below the credit of the subscriber,
    /// the subscriber gets no further batches.
    unread: Arc<AtomicU64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{CombinedOutbox, GroupOptions, MAX_GROUPS, Retention, RingParts, Store, StormRule, Wheel};
    use crate::memory::{MemoryOptions, MemoryStore};

    pub(super) fn seat(clock: &Clock) -> RingParts {
        let options = MemoryOptions {
            wheel: Wheel::new(5, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 10,
            threads: 1,
        };
        MemoryStore::new(options, clock.moment()).rings()[0].clone()
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
