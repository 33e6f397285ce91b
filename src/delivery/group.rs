//! The task of one group.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tracing::{debug, info, warn};

use super::{Command, Shared, Sink};
use crate::core::batch::{BatchId, Delivery as Delivered};
use crate::core::dispatch::{Dispatch, MemberId};
use crate::core::group::GroupName;
use crate::core::outbox::MOST_AGAIN;
use crate::core::refusal::Refusal;

/// After a refusal of the store the group tries again this much later.
const RETRY: Duration = Duration::from_millis(200);

/// The most commands that are carried out before batches are handed out again: each may take a round trip to the store.
const COMMANDS_A_ROUND: usize = 4;

/// The most batches that are given back before others have the thread.
const MOST_RELEASED: usize = 4_096;

pub(super) struct GroupTask {
    name: GroupName,
    shared: Arc<Shared>,
    commands: mpsc::UnboundedReceiver<Command>,
    news: Arc<Notify>,
    dispatch: Dispatch,
    sinks: HashMap<MemberId, Sink>,
    /// Whether the outbox may hold something that was not taken.
    may_take: bool,
    /// Whether the store refused the last time: that is told when it begins and when it is over.
    refused: bool,
}

impl GroupTask {
    pub(super) fn new(
        name: GroupName,
        shared: Arc<Shared>,
        commands: mpsc::UnboundedReceiver<Command>,
        news: Arc<Notify>,
    ) -> GroupTask {
        let dispatch = Dispatch::new(shared.redeliver_after, shared.outbox.is_shared());
        let sinks = HashMap::new();
        GroupTask { name, shared, commands, news, dispatch, sinks, may_take: true, refused: false }
    }

    /// Runs until the last member has left.
    pub(super) async fn run(mut self) {
        loop {
            // What has been acknowledged is not handed out again, however long the last batch took; but who asks without
            // end does not keep the others from their batches.
            for _ in 0..self.commands.len().min(COMMANDS_A_ROUND) {
                let Ok(command) = self.commands.try_recv() else { break };
                if self.obey(command).await && self.ended().await {
                    return;
                }
            }
            let handed_out = self.hand_out().await;
            let retry = self.judged(handed_out);
            let timer = self.dispatch.next_timer().map(|timer| timer - self.shared.clock.alive());
            let wait = [retry, timer].into_iter().flatten().min();
            tokio::select! {
                command = self.commands.recv() => {
                    // The handle in `shared` holds a sender for as long as the task runs.
                    let Some(command) = command else { return };
                    if self.obey(command).await && self.ended().await {
                        return;
                    }
                    // A store in memory never has it wait, and sessions read on the same thread.
                    tokio::task::yield_now().await;
                }
                () = self.news.notified() => self.may_take = true,
                () = tokio::time::sleep(wait.unwrap_or_default()), if wait.is_some() => {}
            }
        }
    }

    /// When to try again after a refusal.
    fn judged(&mut self, handed_out: Result<(), Refusal>) -> Option<Duration> {
        match handed_out {
            Ok(()) => {
                if std::mem::take(&mut self.refused) {
                    info!(group = %self.name, "batches are taken from the store again");
                }
                None
            }
            Err(refusal) => {
                if !std::mem::replace(&mut self.refused, true) {
                    let group = &self.name;
                    warn!(
                        %group,
                        %refusal,
                        "batches could not be taken from the store; trying again every {RETRY:?}: look at the store"
                    );
                }
                Some(RETRY)
            }
        }
    }

    /// Hands out all that members have room for: what waits to be handed out again before what is new. What is
    /// refused does not hold up the rest, and commands wait for a single batch or script.
    async fn hand_out(&mut self) -> Result<(), Refusal> {
        self.dispatch.handle_timers(self.shared.clock.alive());
        self.dispatch.record_all_unread(|member| self.sinks.get(&member).map(Sink::unread));
        let (again, is_all) = self.hand_out_again().await;
        let lent = self.lend().await;
        let new = if is_all { self.hand_out_new().await } else { Ok(()) };
        again.and(lent).and(new)
    }

    /// A ring that refuses is not asked again before the next try. Returns also whether nothing is left for now.
    async fn hand_out_again(&mut self) -> (Result<(), Refusal>, bool) {
        let outbox = Arc::clone(&self.shared.outbox);
        let (mut away, mut refused) = (Vec::new(), Ok(()));
        loop {
            let next = self.dispatch.next_redeliveries(&away, MOST_AGAIN);
            let Some((first, _)) = next.first() else { break };
            let batches: Vec<BatchId> = next.iter().map(|(batch, _)| *batch).collect();
            match outbox.take_again(&self.name, &batches, self.shared.clock.now()).await {
                Ok(taken) => self.hand_again(next, taken),
                Err(refusal) => {
                    away.push(first.ring);
                    refused = refused.and(Err(refusal));
                }
            }
            if !self.commands.is_empty() {
                let is_all = !self.dispatch.has_redeliveries(&away);
                return (refused, is_all);
            }
            tokio::task::yield_now().await;
        }
        (refused, true)
    }

    /// Each goes to the member that it was chosen for; what was not taken is settled, dropped, or somebody else's.
    fn hand_again(&mut self, chosen: Vec<(BatchId, MemberId)>, taken: Vec<Delivered>) {
        let mut taken: HashMap<BatchId, Delivered> =
            taken.into_iter().map(|delivery| (delivery.batch.id, delivery)).collect();
        for (batch, member) in chosen {
            match taken.remove(&batch) {
                Some(delivery) => self.hand(delivery, member),
                None => self.dispatch.forget(batch),
            }
        }
    }

    /// Gives back what only members elsewhere can have now. What could not be given back is so later.
    async fn lend(&mut self) -> Result<(), Refusal> {
        let batches = self.dispatch.lend();
        if batches.is_empty() {
            return Ok(());
        }
        debug!(group = %self.name, batches = batches.len(), "lent to members elsewhere");
        self.shared.outbox.lend(&self.name, &batches).await
    }

    async fn hand_out_new(&mut self) -> Result<(), Refusal> {
        let outbox = Arc::clone(&self.shared.outbox);
        while self.may_take && self.dispatch.window() > 0 {
            let deliveries = outbox.take(&self.name, self.dispatch.window(), self.shared.clock.now()).await?;
            self.may_take = !deliveries.is_empty();
            for delivery in deliveries {
                let member = self.dispatch.next_member().expect("no more was taken than there was room for");
                self.hand(delivery, member);
            }
            if !self.commands.is_empty() {
                break;
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    fn hand(&mut self, delivery: Delivered, member: MemberId) {
        let batch = &delivery.batch;
        self.dispatch.deliver(batch.id, batch.messages.len() as u64, member, self.shared.clock.alive());
        self.shared.metrics.batches_delivered.inc();
        if delivery.delivery_count > 1 {
            self.shared.metrics.batches_redelivered.inc();
        }
        debug!(group = %self.name, batch = %batch.id, delivery = delivery.delivery_count, "handed out");
        if let Some(sink) = self.sinks.get(&member) {
            sink.send(delivery);
            self.dispatch.record_unread(member, sink.unread());
        }
    }

    /// Carries out a command; returns whether the last member has left.
    async fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Join { member, credit, sink } => {
                self.dispatch.join(member, credit);
                self.sinks.insert(member, sink);
                self.may_take = true;
            }
            Command::Leave { member } => {
                self.sinks.remove(&member);
                let released = self.dispatch.leave(member, self.shared.clock.alive());
                for released in released.chunks(MOST_RELEASED) {
                    if let Err(refusal) = self.shared.outbox.release(&self.name, released).await {
                        warn!(group = %self.name, %refusal, "batches could not be given back; that follows by itself");
                        break;
                    }
                    tokio::task::yield_now().await;
                }
                let is_last = self.dispatch.members() == 0;
                if is_last {
                    info!(group = %self.name, "the last subscriber of this group here has left");
                }
                return is_last;
            }
            Command::Ack { batches, answer } => {
                let settled = self.shared.outbox.settle(&self.name, &batches).await.and_then(|settled| {
                    self.shared.metrics.batches_acked.inc_by(settled.count);
                    for batch in settled.batches {
                        self.dispatch.forget(batch);
                    }
                    settled.refusal.map_or(Ok(settled.count), Err)
                });
                let _ = answer.send(settled);
            }
            Command::Nack { member, batch, delay, answer } => {
                let held = self.dispatch.nack(member, batch, delay, self.shared.clock.alive());
                self.shared.metrics.batches_nacked.inc_by(u64::from(held));
                let _ = answer.send(held);
            }
        }
        false
    }

    /// Ends the task after its last member, unless another has joined meanwhile.
    async fn ended(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let _membership = shared.memberships.lock(&self.name).await;
        if !self.commands.is_empty() {
            return false;
        }
        if let Err(refusal) = shared.outbox.leave_group(&self.name).await {
            warn!(
                group = %self.name,
                %refusal,
                "a group could not be left: if it is ephemeral, retention drops it by itself"
            );
        }
        shared.groups.lock().remove(&self.name);
        true
    }
}
