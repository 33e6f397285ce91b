//! From the outbox to subscribers: groups, credit, redelivery.
//!
//! Each group with a subscriber here has a task of its own (`group.rs`) that drives its
//! [`Dispatch`](crate::core::dispatch::Dispatch): it takes batches from the outbox while there is credit,
//! hands them to members, and settles or releases them.

mod group;
mod membership;
mod tending;

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::core::batch::{BatchId, Delivery as Delivered};
use crate::core::dispatch::MemberId;
use crate::core::group::GroupName;
use crate::core::outbox::{Backlog, Opening, Outbox, Start};
use crate::core::refusal::{Reason, Refusal};
use crate::metrics::Metrics;
use crate::process::panics;
use membership::Memberships;

/// How often a drain looks whether all groups are left.
const DESERTED_POLL: Duration = Duration::from_millis(5);

/// How often a group whose last member has left is looked at until its task ends.
const LEAVING: Duration = Duration::from_millis(1);

/// What a subscriber asks for.
#[derive(Clone, Debug)]
pub struct SubscribeRequest {
    /// The group to join; none for a new ephemeral group.
    pub group: Option<GroupName>,
    /// Messages that it will hold unacknowledged.
    pub credit: u64,
    /// Whether the group, if it is new, goes with its last member.
    pub ephemeral: bool,
    /// Where the group, if it is new, begins.
    pub start: Start,
}

/// Hands batches to subscribers.
pub struct Delivery {
    shared: Arc<Shared>,
}

struct Shared {
    outbox: Arc<dyn Outbox>,
    clock: Arc<Clock>,
    metrics: Arc<Metrics>,
    redeliver_after: Duration,
    groups: Mutex<HashMap<GroupName, Handle>>,
    memberships: Memberships,
    next_member: AtomicU64,
    /// Part of the names of ephemeral groups.
    process: u32,
}

/// A group with a task.
struct Handle {
    commands: mpsc::UnboundedSender<Command>,
    news: Arc<Notify>,
    members: u64,
}

/// What a group's task is told.
enum Command {
    Join { member: MemberId, credit: u64, sink: Sink },
    Leave { member: MemberId },
    Ack { batches: Vec<BatchId>, answer: oneshot::Sender<Result<u64, Refusal>> },
    Nack { member: MemberId, batch: BatchId, delay: Duration, answer: oneshot::Sender<bool> },
}

/// The group's end of the way to a subscriber.
#[derive(Clone)]
struct Sink {
    batches: mpsc::UnboundedSender<Delivered>,
    /// Messages on the way.
    unread: Arc<AtomicU64>,
}

impl Sink {
    fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Sends a batch; a subscriber that has just gone says so by itself.
    fn send(&self, delivery: Delivered) {
        self.unread.fetch_add(delivery.batch.messages.len() as u64, Ordering::Relaxed);
        let _ = self.batches.send(delivery);
    }
}

/// A subscriber's end: batches come out of it, acknowledgements go in. Dropping it leaves the group.
pub struct Subscription {
    /// The group.
    pub group: GroupName,
    /// Whether the group is new.
    pub created: bool,
    batches: mpsc::UnboundedReceiver<Delivered>,
    unread: Arc<AtomicU64>,
    member: MemberId,
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
}

impl Delivery {
    /// Delivers from `outbox`; an unacknowledged batch is handed out again after `redeliver_after`.
    #[must_use]
    pub fn new(
        outbox: Arc<dyn Outbox>,
        clock: Arc<Clock>,
        metrics: Arc<Metrics>,
        redeliver_after: Duration,
    ) -> Delivery {
        let shared = Arc::new(Shared {
            outbox,
            clock,
            metrics,
            redeliver_after,
            groups: Mutex::default(),
            memberships: Memberships::new(),
            next_member: AtomicU64::new(1),
            process: random_number(),
        });
        let told = Arc::downgrade(&shared);
        shared.outbox.on_news(Box::new(move || {
            if let Some(shared) = told.upgrade() {
                shared.groups.lock().values().for_each(|group| group.news.notify_one());
            }
        }));
        Delivery { shared }
    }

    /// Joins a group, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// When there are too many groups, or the store is away.
    pub async fn subscribe(&self, request: SubscribeRequest) -> Result<Subscription, Refusal> {
        let member = MemberId(self.shared.next_member.fetch_add(1, Ordering::Relaxed));
        let group = request.group.unwrap_or_else(|| GroupName::made_up(self.shared.process, member.0));
        let start = if request.ephemeral { Start::End } else { request.start };
        let opening = Opening { start, ephemeral: request.ephemeral };
        let (sender, batches) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicU64::new(0));
        let sink = Sink { batches: sender, unread: Arc::clone(&unread) };
        let join = || Command::Join { member, credit: request.credit, sink: sink.clone() };
        let (created, commands) = self.shared.join(&group, opening, join).await?;
        Ok(Subscription { group, created, batches, unread, member, commands, shared: Arc::clone(&self.shared) })
    }

    /// Deletes a group that has no subscriber.
    ///
    /// # Errors
    ///
    /// When it is the default group, has subscribers, does not exist, or the store is away.
    pub async fn delete_group(&self, group: &GroupName) -> Result<(), Refusal> {
        if group.is_default() {
            return Err(Refusal::new(
                Reason::BadGroupName,
                "the default group is always there and cannot be deleted",
            ));
        }
        let _membership = loop {
            let membership = self.shared.memberships.lock(group).await;
            match self.shared.groups.lock().get(group).map(|handle| handle.members) {
                None => break membership,
                Some(0) => {}
                Some(_) => {
                    return Err(Refusal::new(
                        Reason::GroupInUse,
                        format!("group {group} has subscribers: end them first, then delete it"),
                    ));
                }
            }
            // Its last member has left and its task is about to end, for which it needs the lock.
            drop(membership);
            tokio::time::sleep(LEAVING).await;
        };
        if self.shared.outbox.delete_group(group).await? {
            info!(%group, "group deleted");
            return Ok(());
        }
        Err(Refusal::new(Reason::UnknownGroup, format!("there is no group {group}: `ackwheel status` lists them")))
    }

    /// Number of subscribers of a group here.
    #[must_use]
    pub fn subscribers(&self, group: &GroupName) -> u64 {
        self.shared.groups.lock().get(group).map_or(0, |handle| handle.members)
    }

    /// What waits for subscribers.
    ///
    /// # Errors
    ///
    /// When the store is away.
    pub async fn backlog(&self) -> Result<Backlog, Refusal> {
        self.shared.outbox.backlog(self.shared.clock.now()).await
    }

    /// The groups with subscribers here, and how many each has.
    #[must_use]
    pub fn attended(&self) -> Vec<(GroupName, u64)> {
        let groups = self.shared.groups.lock();
        groups.iter().map(|(group, handle)| (group.clone(), handle.members)).collect()
    }

    /// Waits until what departed subscribers held is given back and their groups are left; at most `patience`.
    pub async fn deserted(&self, patience: Duration) {
        let deserted = async {
            while !self.shared.groups.lock().is_empty() {
                tokio::time::sleep(DESERTED_POLL).await;
            }
        };
        if tokio::time::timeout(patience, deserted).await.is_err() {
            warn!(
                "some batches could not be given back in time: others get them by themselves when they are overdue"
            );
        }
    }
}

impl Shared {
    /// Has a subscriber join a group, which is opened if nobody here attends it; returns whether it is new, and the way to
    /// its task.
    async fn join(
        self: &Arc<Self>,
        group: &GroupName,
        opening: Opening,
        join: impl Fn() -> Command,
    ) -> Result<(bool, mpsc::UnboundedSender<Command>), Refusal> {
        if let Some(commands) = self.join_attended(group, &join) {
            return Ok((false, commands));
        }
        let _membership = self.memberships.lock(group).await;
        // Whoever had the lock before may have opened it.
        if let Some(commands) = self.join_attended(group, &join) {
            return Ok((false, commands));
        }
        let created = self.open_group(group, opening).await?;
        Ok((created, self.tell_or_spawn(group, join())))
    }

    /// The same, if the group has a subscriber here: then it is open, stays so, and the store need not be asked. A handle
    /// without members is of a group that is about to be left.
    fn join_attended(
        &self,
        group: &GroupName,
        join: impl Fn() -> Command,
    ) -> Option<mpsc::UnboundedSender<Command>> {
        let mut groups = self.groups.lock();
        let handle = groups.get_mut(group).filter(|handle| handle.members > 0)?;
        Some(handle.admit(join()))
    }

    /// Opens a group in all rings, or, as far as that can be, in none. The membership is locked.
    async fn open_group(&self, group: &GroupName, opening: Opening) -> Result<bool, Refusal> {
        let opened = self.outbox.open_group(group, opening, self.clock.now()).await;
        if opened.is_err()
            && !self.groups.lock().contains_key(group)
            && let Err(refusal) = self.outbox.leave_group(group).await
        {
            debug!(%group, %refusal, "a group that could not be opened could not be left either; that follows later");
        }
        opened
    }

    /// Sends a command to the group's task, which is started if there is none.
    fn tell_or_spawn(self: &Arc<Self>, group: &GroupName, join: Command) -> mpsc::UnboundedSender<Command> {
        let mut groups = self.groups.lock();
        let handle = groups.entry(group.clone()).or_insert_with(|| {
            let (commands, receiver) = mpsc::unbounded_channel();
            let news = Arc::new(Notify::new());
            let task = group::GroupTask::new(group.clone(), Arc::clone(self), receiver, Arc::clone(&news));
            tokio::spawn(task.run());
            Handle { commands, news, members: 0 }
        });
        handle.admit(join)
    }
}

impl Handle {
    /// Counts a subscriber in, and tells the task of it.
    fn admit(&mut self, join: Command) -> mpsc::UnboundedSender<Command> {
        self.members += 1;
        // The task ends only when it has found its queue empty, and while nobody can join.
        let _ = self.commands.send(join);
        self.commands.clone()
    }
}

/// A number that tells this process from others, of the same host or not: pids repeat among hosts.
fn random_number() -> u32 {
    let random = std::hash::RandomState::new().hash_one(std::process::id());
    u32::try_from(random >> 32).expect("32 bits are left")
}

impl Subscription {
    /// The next batch handed out. `None` once nobody hands out any more, since the process ends. Cancel-safe.
    pub async fn next(&mut self) -> Option<Delivered> {
        let delivery = self.batches.recv().await?;
        self.unread.fetch_sub(delivery.batch.messages.len() as u64, Ordering::Relaxed);
        Some(delivery)
    }

    /// Settles batches for the group; returns how many were not settled before.
    ///
    /// The request takes its place when this is called, not when the answer is awaited.
    ///
    /// # Errors
    ///
    /// When the store is away, or the group's task has ended.
    pub fn ack(&self, batches: Vec<BatchId>) -> impl Future<Output = Result<u64, Refusal>> + Send + use<> {
        let (answer, settled) = oneshot::channel();
        let _ = self.commands.send(Command::Ack { batches, answer });
        let ended = "the process ends: acknowledge the batch over another connection";
        async move { settled.await.unwrap_or_else(|_| Err(Refusal::new(Reason::StoreSilent, ended))) }
    }

    /// Gives a batch back; returns whether this subscriber held it.
    pub fn nack(&self, batch: BatchId, delay: Duration) -> impl Future<Output = bool> + Send + use<> {
        let (answer, held) = oneshot::channel();
        let _ = self.commands.send(Command::Nack { member: self.member, batch, delay, answer });
        async move { held.await.unwrap_or(false) }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let _shared = panics::shared();
        if let Some(handle) = self.shared.groups.lock().get_mut(&self.group) {
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
            assert!(seats[1].outbox.open_group(&group, Opening::default(), clock.now()).await.unwrap());
        }
        let outbox = Outboxes::of(&seats);
        let delivery = Delivery::new(outbox, Arc::clone(&clock), Arc::new(Metrics::new()), Duration::from_secs(1));
        let request = SubscribeRequest { group: None, credit: 1, ephemeral: true, start: Start::End };
        let refusal = delivery.subscribe(request).await.err().unwrap();
        assert_eq!(refusal.reason, Reason::TooManyGroups);
        let left = seats[0].outbox.backlog(clock.now()).await.unwrap();
        assert_eq!(left.groups.len(), 1, "the default group alone: {left:?}");
    }
}
