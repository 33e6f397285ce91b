//! Runs a task for each group with subscribers on this sidecar. The task takes batches from the outbox and delivers
//! them to these subscribers, which are the *members* of the group. The *credit* of a member limits the messages in the
//! batches that it has not acknowledged.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{MutexGuard, Notify, mpsc};
use tokio::task::yield_now;
use tracing::{debug, info, warn};

use super::{BatchSender, Command, Delivery, GroupHandle, LOCKS};
use crate::core::{
    BatchId, Delivery as Delivered, Dispatch, GroupName, GroupOptions, MAX_RETAKEN, MemberId, Refusal,
};

/// How long a task waits before it tries again after a refusal of the store.
const RETRY: Duration = Duration::from_millis(200);

/// The maximum number of commands that a task applies before it delivers batches again. Each command may take a round
/// trip to the store.
const COMMANDS_PER_ROUND: usize = 4;

/// The maximum number of batches that one call of the store releases. After each call, the task yields to other tasks.
const RELEASED_AT_ONCE: usize = 4_096;

impl Delivery {
    /// Adds a subscriber to a group, by sending the command `join` to the task of the group. If the group has no member
    /// on this sidecar, first opens the group in the store. Returns whether the group is new in the store, and the
    /// sender for further commands.
    pub(super) async fn join(
        self: &Arc<Self>,
        group: &GroupName,
        options: GroupOptions,
        join: Command,
    ) -> Result<(bool, mpsc::UnboundedSender<Command>), Refusal> {
        // While a group has a member on this sidecar, it is open in the store, and the store need not be asked. A
        // handle without members belongs to a task that is about to end.
        let is_open = |handle: &&mut GroupHandle| handle.members > 0;
        if let Some(handle) = self.handles.lock().get_mut(group).filter(is_open) {
            return Ok((false, handle.join(join)));
        }
        let _lock = self.lock(group).await;
        // While this call waited for the lock, another subscriber may have opened the group.
        if let Some(handle) = self.handles.lock().get_mut(group).filter(is_open) {
            return Ok((false, handle.join(join)));
        }
        // If one ring refuses to open the group, other rings may have opened it. In this case, leave the group on all
        // rings.
        let opened = self.outbox.open_group(group, options, self.clock.now()).await;
        if opened.is_err()
            && !self.handles.lock().contains_key(group)
            && let Err(refusal) = self.outbox.leave_group(group).await
        {
            debug!(%group, %refusal, "a group that was not opened could not be left either; the store does this later");
        }
        let created = opened?;
        let mut handles = self.handles.lock();
        let new_task = || GroupTask::spawn(group.clone(), Arc::clone(self));
        Ok((created, handles.entry(group.clone()).or_insert_with(new_task).join(join)))
    }

    /// Locks a group. Three operations hold the lock, so that they do not interleave for the same group: opening and
    /// joining the group, leaving it, and deleting it. Each may take several round trips to the store. So there are
    /// [`LOCKS`] locks, and two groups seldom share one.
    #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash are as good as others")]
    pub(super) async fn lock(&self, group: &GroupName) -> MutexGuard<'_, ()> {
        self.locks[self.random.hash_one(group) as usize % LOCKS].lock().await
    }
}

/// The task of one group.
struct GroupTask {
    name: GroupName,
    delivery: Arc<Delivery>,
    commands: mpsc::UnboundedReceiver<Command>,
    new_batches: Arc<Notify>,
    dispatch: Dispatch,
    senders: HashMap<MemberId, BatchSender>,
    /// Whether the outbox may have batches that this task has not taken.
    may_take: bool,
    /// Whether the store refused during the last delivery. Only the beginning and the end of refusals are logged.
    refused: bool,
}

impl GroupTask {
    /// Starts the task of a group. It runs until the last member has left.
    fn spawn(name: GroupName, delivery: Arc<Delivery>) -> GroupHandle {
        let (sender, commands) = mpsc::unbounded_channel();
        let new_batches = Arc::new(Notify::new());
        let handle = GroupHandle { commands: sender, new_batches: Arc::clone(&new_batches), members: 0 };
        let dispatch = Dispatch::new(delivery.redeliver_after, delivery.outbox.is_shared());
        let senders = HashMap::new();
        let task =
            GroupTask { name, delivery, commands, new_batches, dispatch, senders, may_take: true, refused: false };
        tokio::spawn(task.run());
        handle
    }

    async fn run(mut self) {
        let mut received = None;
        loop {
            // Apply commands first, so that an acknowledged batch is not redelivered. Limit their number, so that a
            // member that sends commands without a pause does not delay the batches of other members.
            for _ in 0..COMMANDS_PER_ROUND {
                let Some(command) = received.take().or_else(|| self.commands.try_recv().ok()) else { break };
                if self.apply(command).await {
                    return;
                }
            }
            let delivered = self.deliver().await;
            let retry = self.retry_after(delivered);
            let timer = self.dispatch.next_timer().map(|timer| timer - self.delivery.clock.stall_aware_now());
            let wait = [retry, timer].into_iter().flatten().min();
            tokio::select! {
                Some(command) = self.commands.recv() => {
                    received = Some(command);
                    // With the memory store this task never waits for I/O. So yield here, or connections on the same
                    // thread could not read.
                    yield_now().await;
                }
                () = self.new_batches.notified() => self.may_take = true,
                () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
    }

    /// Returns how long to wait before the next attempt, or `None` if the store did not refuse. Logs when refusals
    /// begin and end.
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

    /// Delivers batches to members with free credit: first redeliveries, then new batches. Between these two steps,
    /// lends the batches that no member here can take, so that other sidecars can take them. If the store refuses one
    /// step, the next steps still run. Once a command is queued, each step makes at most one more call of the store.
    async fn deliver(&mut self) -> Result<(), Refusal> {
        self.dispatch.handle_timers(self.delivery.clock.stall_aware_now());
        self.dispatch.record_all_unread(|member| {
            self.senders.get(&member).map(|sender| sender.unread.load(Ordering::Relaxed))
        });
        let (redelivered, is_all) = self.redeliver().await;
        let lent = self.lend().await;
        let new = if is_all { self.deliver_new().await } else { Ok(()) };
        redelivered.and(lent).and(new)
    }

    /// Redelivers waiting batches to members with free credit, until no such batch is left or a command is queued. If a
    /// ring refuses, skips the batches of this ring until the next call. The second result is `false` if a command
    /// ended the redelivery early.
    async fn redeliver(&mut self) -> (Result<(), Refusal>, bool) {
        let outbox = Arc::clone(&self.delivery.outbox);
        let (mut unavailable, mut result) = (Vec::new(), Ok(()));
        loop {
            let next = self.dispatch.next_redeliveries(&unavailable, MAX_RETAKEN);
            let Some((first, _)) = next.first() else { return (result, true) };
            let batches: Vec<BatchId> = next.iter().map(|(batch, _)| *batch).collect();
            match outbox.retake(&self.name, &batches, self.delivery.clock.now()).await {
                Ok(taken) => {
                    let mut taken: HashMap<BatchId, Delivered> =
                        taken.into_iter().map(|delivery| (delivery.batch.id, delivery)).collect();
                    for (batch, member) in next {
                        match taken.remove(&batch) {
                            Some(delivery) => self.send(delivery, member),
                            // The batch is settled, dropped, or taken by another sidecar.
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

    /// Lends the waiting batches that no member here can take now: members on other sidecars may then take them. If the
    /// store refuses, it makes these batches available to other sidecars later, without another call.
    async fn lend(&mut self) -> Result<(), Refusal> {
        let batches = self.dispatch.lend();
        if batches.is_empty() {
            return Ok(());
        }
        debug!(group = %self.name, batches = batches.len(), "lent to members on other sidecars");
        self.delivery.outbox.lend(&self.name, &batches).await
    }

    async fn deliver_new(&mut self) -> Result<(), Refusal> {
        let outbox = Arc::clone(&self.delivery.outbox);
        while self.may_take && self.dispatch.window() > 0 {
            let deliveries = outbox.take(&self.name, self.dispatch.window(), self.delivery.clock.now()).await?;
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
        self.dispatch.deliver(
            batch.id,
            batch.messages.len() as u64,
            member,
            self.delivery.clock.stall_aware_now(),
        );
        self.delivery.metrics.batches_delivered.inc();
        if delivery.delivery_count > 1 {
            self.delivery.metrics.batches_redelivered.inc();
        }
        debug!(group = %self.name, batch = %batch.id, delivery = delivery.delivery_count, "delivered");
        if let Some(sender) = self.senders.get(&member) {
            let messages = delivery.batch.messages.len() as u64;
            self.dispatch.record_unread(member, sender.unread.fetch_add(messages, Ordering::Relaxed) + messages);
            // If the subscriber has left, this send fails, and its `Leave` command is already in the queue.
            let _ = sender.batches.send(delivery);
        }
    }

    /// Applies a command. Returns `true` if the last member has left and the task must end.
    async fn apply(&mut self, command: Command) -> bool {
        match command {
            Command::Join { member, credit, batches } => {
                self.dispatch.join(member, credit);
                self.senders.insert(member, batches);
                self.may_take = true;
            }
            Command::Leave { member } => return self.leave(member).await,
            Command::Ack { batches, answer } => {
                let settled = self.delivery.outbox.settle(&self.name, &batches).await.and_then(|settled| {
                    self.delivery.metrics.batches_acked.inc_by(settled.count);
                    settled.batches.into_iter().for_each(|batch| self.dispatch.forget(batch));
                    settled.refusal.map_or(Ok(settled.count), Err)
                });
                let _ = answer.send(settled);
            }
            Command::Nack { member, batch, delay, answer } => {
                let held = self.dispatch.nack(member, batch, delay, self.delivery.clock.stall_aware_now());
                self.delivery.metrics.batches_nacked.inc_by(u64::from(held));
                let _ = answer.send(held);
            }
        }
        false
    }

    /// Removes a member. Its batches go to the other members. If it was the last member, releases all batches to the
    /// outbox. Returns `true` if the task must end, because no member is left and no new member has joined.
    async fn leave(&mut self, member: MemberId) -> bool {
        self.senders.remove(&member);
        let released = self.dispatch.leave(member, self.delivery.clock.stall_aware_now());
        for released in released.chunks(RELEASED_AT_ONCE) {
            if let Err(refusal) = self.delivery.outbox.release(&self.name, released).await {
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
        let _lock = self.delivery.lock(&self.name).await;
        if !self.commands.is_empty() {
            return false;
        }
        if let Err(refusal) = self.delivery.outbox.leave_group(&self.name).await {
            warn!(
                group = %self.name,
                %refusal,
                "the store was not told that the last subscriber left: if the group is ephemeral, retention drops it"
            );
        }
        self.delivery.handles.lock().remove(&self.name);
        true
    }
}
