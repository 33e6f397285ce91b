//! The groups with subscribers on this sidecar. The task of a group takes batches and delivers them to its subscribers.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{MutexGuard, Notify, mpsc, oneshot};
use tokio::task::yield_now;
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::core::batch::{BatchId, Delivery as Delivered};
use crate::core::dispatch::{Dispatch, MemberId};
use crate::core::group::GroupName;
use crate::core::outbox::{MAX_RETAKEN, Outbox};
use crate::core::refusal::Refusal;
use crate::metrics::Metrics;

/// The pause after a refusal of the store.
const RETRY: Duration = Duration::from_millis(200);

/// The most commands that are applied before batches are delivered again. Each may take a round trip to the store.
const COMMANDS_PER_ROUND: usize = 4;

/// The most batches that are released before the task yields.
const RELEASED_AT_ONCE: usize = 4_096;

/// Number of locks, so that two groups seldom share one.
const LOCKS: usize = 64;

/// The state that the delivery, its subscriptions and the tasks of groups share.
pub(super) struct Groups {
    pub(super) outbox: Arc<dyn Outbox>,
    pub(super) clock: Arc<Clock>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) redeliver_after: Duration,
    pub(super) handles: Mutex<HashMap<GroupName, GroupHandle>>,
    pub(super) locks: GroupLocks,
}

/// A group with a running task.
pub(super) struct GroupHandle {
    pub(super) commands: mpsc::UnboundedSender<Command>,
    /// Notified when new batches may be available.
    pub(super) new_batches: Arc<Notify>,
    pub(super) members: u64,
}

impl GroupHandle {
    /// Adds a subscriber. Returns the sender of its commands.
    pub(super) fn join(&mut self, join: Command) -> mpsc::UnboundedSender<Command> {
        self.members += 1;
        // The task ends only with an empty queue, and while no subscriber can join.
        let _ = self.commands.send(join);
        self.commands.clone()
    }
}

/// A command to the task of a group.
pub(super) enum Command {
    Join { member: MemberId, credit: u64, batches: BatchSender },
    Leave { member: MemberId },
    Ack { batches: Vec<BatchId>, answer: oneshot::Sender<Result<u64, Refusal>> },
    Nack { member: MemberId, batch: BatchId, delay: Duration, answer: oneshot::Sender<bool> },
}

/// Sends batches to a subscriber.
pub(super) struct BatchSender {
    pub(super) batches: mpsc::UnboundedSender<Delivered>,
    /// Messages that were sent and that the subscriber has not read.
    pub(super) unread: Arc<AtomicU64>,
}

impl BatchSender {
    pub(super) fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Sends a batch. A subscriber that is gone sends `Leave` by itself.
    pub(super) fn send(&self, delivery: Delivered) {
        self.unread.fetch_add(delivery.batch.messages.len() as u64, Ordering::Relaxed);
        let _ = self.batches.send(delivery);
    }
}

/// Locks for opening and joining a group, and for leaving or deleting it once it is found empty. These steps must not
/// interleave for the same group. They may take several round trips to the store, for which other groups do not wait.
pub(super) struct GroupLocks {
    locks: [tokio::sync::Mutex<()>; LOCKS],
    hasher: RandomState,
}

impl GroupLocks {
    pub(super) fn new() -> GroupLocks {
        GroupLocks { locks: std::array::from_fn(|_| tokio::sync::Mutex::new(())), hasher: RandomState::new() }
    }

    #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash are as good as others")]
    pub(super) async fn lock(&self, group: &GroupName) -> MutexGuard<'_, ()> {
        self.locks[self.hasher.hash_one(group) as usize % LOCKS].lock().await
    }
}

/// The task of one group.
pub(super) struct GroupTask {
    name: GroupName,
    groups: Arc<Groups>,
    commands: mpsc::UnboundedReceiver<Command>,
    new_batches: Arc<Notify>,
    dispatch: Dispatch,
    senders: HashMap<MemberId, BatchSender>,
    /// Whether the outbox may have batches that were not taken.
    may_take: bool,
    /// Whether the store refused the last time. The begin and the end of refusals are logged.
    refused: bool,
}

impl GroupTask {
    /// Starts the task of a group. It runs until the last member has left.
    pub(super) fn spawn(name: GroupName, groups: Arc<Groups>) -> GroupHandle {
        let (sender, commands) = mpsc::unbounded_channel();
        let new_batches = Arc::new(Notify::new());
        let handle = GroupHandle { commands: sender, new_batches: Arc::clone(&new_batches), members: 0 };
        let dispatch = Dispatch::new(groups.redeliver_after, groups.outbox.is_shared());
        let senders = HashMap::new();
        let task =
            GroupTask { name, groups, commands, new_batches, dispatch, senders, may_take: true, refused: false };
        tokio::spawn(task.run());
        handle
    }

    async fn run(mut self) {
        let mut received = None;
        loop {
            // Commands come first, so that an acknowledged batch is not redelivered. Their number is limited, so that a
            // member that sends commands without a pause does not delay the batches of others.
            for _ in 0..COMMANDS_PER_ROUND {
                let Some(command) = received.take().or_else(|| self.commands.try_recv().ok()) else { break };
                if self.apply(command).await {
                    return;
                }
            }
            let delivered = self.deliver().await;
            let retry = self.retry_after(delivered);
            let timer = self.dispatch.next_timer().map(|timer| timer - self.groups.clock.stall_aware_now());
            let wait = [retry, timer].into_iter().flatten().min();
            tokio::select! {
                Some(command) = self.commands.recv() => {
                    received = Some(command);
                    // A store in memory never makes the task wait, and connections read on the same thread.
                    yield_now().await;
                }
                () = self.new_batches.notified() => self.may_take = true,
                () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
    }

    /// When to try again, if the store refused. Logs when refusals begin and end.
    fn retry_after(&mut self, delivered: Result<(), Refusal>) -> Option<Duration> {
        let was_refused = mem::replace(&mut self.refused, delivered.is_err());
        match delivered {
            Ok(()) if was_refused => info!(group = %self.name, "batches are taken from the store again"),
            Err(refusal) if !was_refused => warn!(
                group = %self.name,
                %refusal,
                "batches could not be taken from the store; trying again every {RETRY:?}: look at the store"
            ),
            _ => {}
        }
        self.refused.then_some(RETRY)
    }

    /// Delivers all that the members have room for: redeliveries before new batches. A refusal does not stop the rest.
    /// Commands wait for at most one batch or script.
    async fn deliver(&mut self) -> Result<(), Refusal> {
        self.dispatch.handle_timers(self.groups.clock.stall_aware_now());
        self.dispatch.record_all_unread(|member| self.senders.get(&member).map(BatchSender::unread));
        let (redelivered, is_all) = self.redeliver().await;
        let lent = self.lend().await;
        let new = if is_all { self.deliver_new().await } else { Ok(()) };
        redelivered.and(lent).and(new)
    }

    /// A ring that refuses is not asked again before the next round. Also returns whether no redelivery is left for
    /// now.
    async fn redeliver(&mut self) -> (Result<(), Refusal>, bool) {
        let outbox = Arc::clone(&self.groups.outbox);
        let (mut unavailable, mut result) = (Vec::new(), Ok(()));
        loop {
            let next = self.dispatch.next_redeliveries(&unavailable, MAX_RETAKEN);
            let Some((first, _)) = next.first() else { return (result, true) };
            let batches: Vec<BatchId> = next.iter().map(|(batch, _)| *batch).collect();
            match outbox.retake(&self.name, &batches, self.groups.clock.now()).await {
                Ok(taken) => {
                    let mut taken: HashMap<BatchId, Delivered> =
                        taken.into_iter().map(|delivery| (delivery.batch.id, delivery)).collect();
                    for (batch, member) in next {
                        match taken.remove(&batch) {
                            Some(delivery) => self.send(delivery, member),
                            // It is settled, dropped, or taken by another sidecar.
                            None => self.dispatch.forget(batch),
                        }
                    }
                }
                Err(refusal) => {
                    unavailable.push(first.ring);
                    result = result.and(Err(refusal));
                }
            }
            if !self.commands.is_empty() {
                return (result, !self.dispatch.has_redeliveries(&unavailable));
            }
            yield_now().await;
        }
    }

    /// Returns the batches that only members on other sidecars can have now. After a refusal that happens later.
    async fn lend(&mut self) -> Result<(), Refusal> {
        let batches = self.dispatch.lend();
        if batches.is_empty() {
            return Ok(());
        }
        debug!(group = %self.name, batches = batches.len(), "lent to members on other sidecars");
        self.groups.outbox.lend(&self.name, &batches).await
    }

    async fn deliver_new(&mut self) -> Result<(), Refusal> {
        let outbox = Arc::clone(&self.groups.outbox);
        while self.may_take && self.dispatch.window() > 0 {
            let deliveries = outbox.take(&self.name, self.dispatch.window(), self.groups.clock.now()).await?;
            self.may_take = !deliveries.is_empty();
            for delivery in deliveries {
                let member = self.dispatch.next_member().expect("no more was taken than there was room for");
                self.send(delivery, member);
            }
            if !self.commands.is_empty() {
                break;
            }
            yield_now().await;
        }
        Ok(())
    }

    fn send(&mut self, delivery: Delivered, member: MemberId) {
        let batch = &delivery.batch;
        self.dispatch.deliver(batch.id, batch.messages.len() as u64, member, self.groups.clock.stall_aware_now());
        self.groups.metrics.batches_delivered.inc();
        if delivery.delivery_count > 1 {
            self.groups.metrics.batches_redelivered.inc();
        }
        debug!(group = %self.name, batch = %batch.id, delivery = delivery.delivery_count, "delivered");
        if let Some(sender) = self.senders.get(&member) {
            sender.send(delivery);
            self.dispatch.record_unread(member, sender.unread());
        }
    }

    /// Applies a command. Returns whether the task ends, because the last member has left.
    async fn apply(&mut self, command: Command) -> bool {
        match command {
            Command::Join { member, credit, batches } => {
                self.dispatch.join(member, credit);
                self.senders.insert(member, batches);
                self.may_take = true;
            }
            Command::Leave { member } => return self.leave(member).await,
            Command::Ack { batches, answer } => {
                let settled = self.groups.outbox.settle(&self.name, &batches).await.and_then(|settled| {
                    self.groups.metrics.batches_acked.inc_by(settled.count);
                    settled.batches.into_iter().for_each(|batch| self.dispatch.forget(batch));
                    settled.refusal.map_or(Ok(settled.count), Err)
                });
                let _ = answer.send(settled);
            }
            Command::Nack { member, batch, delay, answer } => {
                let held = self.dispatch.nack(member, batch, delay, self.groups.clock.stall_aware_now());
                self.groups.metrics.batches_nacked.inc_by(u64::from(held));
                let _ = answer.send(held);
            }
        }
        false
    }

    /// A member leaves. Returns whether the task ends: after its last member, unless another has joined meanwhile.
    async fn leave(&mut self, member: MemberId) -> bool {
        self.senders.remove(&member);
        let released = self.dispatch.leave(member, self.groups.clock.stall_aware_now());
        for released in released.chunks(RELEASED_AT_ONCE) {
            if let Err(refusal) = self.groups.outbox.release(&self.name, released).await {
                warn!(
                    group = %self.name,
                    %refusal,
                    "batches could not be released; they are redelivered once they are overdue"
                );
                break;
            }
            yield_now().await;
        }
        if !self.senders.is_empty() {
            return false;
        }
        info!(group = %self.name, "the last subscriber of this group here has left");
        let _lock = self.groups.locks.lock(&self.name).await;
        if !self.commands.is_empty() {
            return false;
        }
        if let Err(refusal) = self.groups.outbox.leave_group(&self.name).await {
            warn!(
                group = %self.name,
                %refusal,
                "the store was not told that the last subscriber left: if the group is ephemeral, retention drops it"
            );
        }
        self.groups.handles.lock().remove(&self.name);
        true
    }
}
