//! Runs a task for each group with subscribers on this sidecar, the *members* of the group. The task takes batches from
//! the outbox and delivers them. The *credit* of a member limits the messages in its unacknowledged batches.

mod commands;

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::{MutexGuard, Notify, mpsc, oneshot};
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

/// How long the task of a group lingers: it runs on without members, if the last one got batches by request. So
/// connections that take batches once and end do not open and leave the group each time.
pub(super) const LINGER: Duration = Duration::from_secs(60);

impl Delivery {
    /// Adds a subscriber to a group, by sending the command `join` to the task of the group. If the group has no task
    /// on this sidecar, first opens the group in the store. Returns whether the group is new in the store, and the
    /// sender for further commands.
    pub(super) async fn join(
        self: &Arc<Self>,
        group: &GroupName,
        options: GroupOptions,
        join: Command,
    ) -> Result<(bool, mpsc::UnboundedSender<Command>), Refusal> {
        // While a task runs, its group is open in the store, and the store need not be asked. A task that is about to
        // end is not open.
        let is_open = |handle: &&mut GroupHandle| handle.is_open;
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
    /// The requests that are not answered yet.
    requests: HashMap<MemberId, PendingRequest>,
    /// Until when the task lingers. `None` while the group has members, and after a member that left without a request.
    lingers_until: Option<Instant>,
    /// Whether the task ends as soon as the group has no member, even if the task lingers or has kept batches.
    is_ending: bool,
    /// Whether the outbox may have batches that this task has not taken.
    may_take: bool,
    /// Whether the store refused last. Only the beginning and the end of refusals are logged.
    refused: bool,
    /// How often the store answered in the current round.
    answers: u32,
}

/// A request that is answered after the next delivery.
struct PendingRequest {
    batches: u32,
    answer: oneshot::Sender<Result<(), Refusal>>,
}

impl GroupTask {
    /// Starts the task of a group. It runs until the last member has left, and longer if it lingers or has kept batches.
    fn spawn(name: GroupName, delivery: Arc<Delivery>) -> GroupHandle {
        let (sender, commands) = mpsc::unbounded_channel();
        let new_batches = Arc::new(Notify::new());
        let handle = GroupHandle {
            commands: sender,
            new_batches: Arc::clone(&new_batches),
            members: 0,
            is_open: true,
            is_ending: false,
            lingers: false,
        };
        let dispatch = Dispatch::new(delivery.redeliver_after, delivery.outbox.is_shared());
        let task = GroupTask {
            name,
            delivery,
            commands,
            new_batches,
            dispatch,
            senders: HashMap::new(),
            requests: HashMap::new(),
            lingers_until: None,
            is_ending: false,
            may_take: true,
            refused: false,
            answers: 0,
        };
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
                self.apply(command).await;
            }
            let (delivered, is_complete) = self.deliver().await;
            self.answer_requests(&delivered, is_complete);
            let retry = self.retry_after(&delivered);
            if self.is_over() && self.end().await {
                return;
            }
            let now = self.delivery.clock.stall_aware_now();
            let timers =
                self.dispatch.next_timer().into_iter().chain(self.lingers_until.filter(|until| *until > now));
            let wait = timers.map(|timer| timer.saturating_duration_since(now)).chain(retry).min();
            tokio::select! {
                Some(command) = self.commands.recv() => {
                    received = Some(command);
                    // With the memory store this task may never wait, and connections of its thread could not read.
                    yield_now().await;
                }
                () = self.new_batches.notified() => self.may_take = true,
                () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
    }

    /// Returns how long to wait after a refusal, or `None` without one. Logs when refusals begin and end.
    fn retry_after(&mut self, delivered: &Result<(), Refusal>) -> Option<Duration> {
        let was_refused = self.refused;
        // A round without a call of the store, because no member wants a batch, says nothing about the store.
        self.refused = delivered.is_err() || (was_refused && self.answers == 0);
        match delivered {
            _ if self.refused == was_refused => {}
            Ok(()) => info!(group = %self.name, "batches are taken from the store again"),
            Err(refusal) => warn!(
                group = %self.name,
                %refusal,
                "batches could not be taken from the store; trying again every {RETRY:?}: look at the store"
            ),
        }
        delivered.is_err().then_some(RETRY)
    }

    /// Delivers batches to members with free credit: first redeliveries, then new batches. Between these two steps,
    /// releases or lends the batches that no member here can take, so that other sidecars can take them. If the store
    /// refuses one step, the next steps still run. Once a command is queued, each step makes at most one more call of
    /// the store. The second result is `false` if a command ended the delivery early.
    async fn deliver(&mut self) -> (Result<(), Refusal>, bool) {
        self.answers = 0;
        self.dispatch.handle_timers(self.delivery.clock.stall_aware_now());
        self.dispatch.record_all_unread(|member| {
            self.senders.get(&member).map(|sender| sender.unread.load(Ordering::Relaxed))
        });
        let (redelivered, is_all) = self.redeliver().await;
        let idle = self.dispatch.release_idle();
        self.release(&idle).await;
        let lent = self.lend().await;
        let (new, is_complete) = if is_all { self.deliver_new().await } else { (Ok(()), false) };
        (redelivered.and(lent).and(new), is_complete)
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
                    self.answers += 1;
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

    /// Delivers new batches to members with free credit, until none is left or a command is queued. The second result is
    /// `false` if a command ended the delivery early.
    async fn deliver_new(&mut self) -> (Result<(), Refusal>, bool) {
        let outbox = Arc::clone(&self.delivery.outbox);
        while self.may_take && self.dispatch.window() > 0 {
            let taken = outbox.take(&self.name, self.dispatch.window(), self.delivery.clock.now()).await;
            let deliveries = match taken {
                Ok(deliveries) => deliveries,
                Err(refusal) => return (Err(refusal), true),
            };
            (self.may_take, self.answers) = (!deliveries.is_empty(), self.answers + 1);
            for delivery in deliveries {
                let member = self.dispatch.next_member().expect("no more was taken than there was room for");
                self.send(delivery, member);
            }
            if !self.commands.is_empty() {
                return (Ok(()), !self.may_take || self.dispatch.window() == 0);
            }
            yield_now().await;
        }
        (Ok(()), true)
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

    /// Answers the requests for which the delivery is over: all batches are delivered, or no further one is available.
    fn answer_requests(&mut self, delivered: &Result<(), Refusal>, is_complete: bool) {
        let dispatch = &self.dispatch;
        let is_over = |member: &MemberId| is_complete || delivered.is_err() || dispatch.requested(*member) == 0;
        for (member, PendingRequest { batches, answer }) in self.requests.extract_if(|member, _| is_over(member)) {
            let got_none = dispatch.requested(member) == batches;
            let _ = answer.send(if got_none { delivered.clone() } else { Ok(()) });
        }
    }

    /// Releases batches to the outbox. If the store refuses, it releases them later, or they become overdue.
    async fn release(&self, batches: &[BatchId]) {
        for released in batches.chunks(RELEASED_AT_ONCE) {
            if let Err(refusal) = self.delivery.outbox.release(&self.name, released).await {
                warn!(
                    group = %self.name,
                    %refusal,
                    "batches could not be released; they are redelivered once they are overdue"
                );
            }
            yield_now().await;
        }
    }

    /// Returns whether the task must end: the group has no member, and the task neither lingers nor has kept batches.
    fn is_over(&self) -> bool {
        let lingers = self.lingers_until.is_some_and(|until| until > self.delivery.clock.stall_aware_now());
        self.senders.is_empty() && (self.is_ending || !lingers && !self.dispatch.has_kept())
    }

    /// Leaves the group in the store. Returns `false` if a command was sent meanwhile, so that the task runs on.
    async fn end(&mut self) -> bool {
        let kept = self.dispatch.release_all();
        self.release(&kept).await;
        let delivery = Arc::clone(&self.delivery);
        let _lock = delivery.lock(&self.name).await;
        // From here on, a new member waits for the lock.
        if let Some(handle) = delivery.handles.lock().get_mut(&self.name) {
            if !self.commands.is_empty() {
                return false;
            }
            handle.is_open = false;
        }
        info!(group = %self.name, "the last subscriber of this group here has left");
        if let Err(refusal) = delivery.outbox.leave_group(&self.name).await {
            warn!(
                group = %self.name,
                %refusal,
                "the store was not told that the last subscriber left: if the group is ephemeral, retention drops it"
            );
        }
        delivery.handles.lock().remove(&self.name);
        true
    }
}
