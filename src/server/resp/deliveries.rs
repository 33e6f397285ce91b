//! The AW.TAKE, AW.ACK and AW.NACK of a connection: one at a time, in the order of their arrival.
//!
//! A waiting AW.TAKE delays nobody: it ends as soon as the connection sends another complete command. Adds and Acks do
//! not wait for these commands; only their replies keep the order.

use std::collections::{HashMap, VecDeque};
use std::future::pending;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::replies::free_if_empty;
use crate::core::{BatchId, Delivery as Delivered, GroupName, Refusal};
use crate::delivery::{Delivery, MEMBER_BYTES, Subscription};
use crate::protocol::resp::command::{DeliveryCommand, Take, Wait};

/// The commands that wait or run, and the groups of which the connection is a member.
#[derive(Default)]
pub(super) struct Deliveries {
    /// Commands with the numbers of their replies.
    queue: VecDeque<(u64, QueuedCommand)>,
    members: HashMap<GroupName, Subscription>,
    /// Whether a command runs.
    is_running: bool,
    /// Ends the running AW.TAKE, if it waits. Dropping it has the same effect.
    interrupt: Option<oneshot::Sender<()>>,
    to_keep: Option<ToKeep>,
}

/// Batches that are to be detached from the connection once their reply is written. No command begins before that.
struct ToKeep {
    group: GroupName,
    batches: Vec<BatchId>,
    /// The number of the reply.
    number: u64,
    /// The position in the stream of output at which the reply ends. `None` until the reply is queued there.
    end: Option<u64>,
}

pub(super) enum QueuedCommand {
    Delivery(DeliveryCommand),
    /// Leaves all groups, for RESET.
    Leave,
}

impl QueuedCommand {
    /// Returns the number of batches that the command names.
    pub(super) fn batches(&self) -> usize {
        match self {
            QueuedCommand::Delivery(
                DeliveryCommand::Ack { batches, .. } | DeliveryCommand::Nack { batches, .. },
            ) => batches.len(),
            QueuedCommand::Delivery(DeliveryCommand::Take(_)) | QueuedCommand::Leave => 0,
        }
    }
}

/// The result of a command.
pub(super) enum DeliveryReply {
    Taken {
        take: Take,
        member: Option<Subscription>,
        taken: Result<Vec<Delivered>, Refusal>,
    },
    /// The number of batches that an AW.ACK settled, or that an AW.NACK returned.
    Count(Result<u64, Refusal>),
    Left,
}

impl DeliveryReply {
    pub(super) fn refusal(&self) -> Option<&Refusal> {
        match self {
            DeliveryReply::Taken { taken: Err(refusal), .. } | DeliveryReply::Count(Err(refusal)) => Some(refusal),
            _ => None,
        }
    }
}

impl Deliveries {
    /// Returns the memory of the queue, of the memberships and of the running command, without the batches that the
    /// commands name.
    pub(super) fn bytes(&self) -> usize {
        let members = self.members.len() + usize::from(self.is_running);
        self.queue.capacity() * size_of::<(u64, QueuedCommand)>() + members * MEMBER_BYTES
    }

    /// Returns the number of the reply of the next command.
    pub(super) fn next(&self) -> Option<u64> {
        self.queue.front().map(|(number, _)| *number)
    }

    /// Adds a command. `number` is the number of its reply.
    pub(super) fn push(&mut self, number: u64, command: QueuedCommand) {
        self.queue.push_back((number, command));
    }

    /// Ends the waiting of AW.TAKE commands, because another command has arrived.
    pub(super) fn interrupt(&mut self) {
        self.interrupt = None;
        // An earlier one was interrupted by this one.
        if let Some((_, QueuedCommand::Delivery(DeliveryCommand::Take(take)))) = self.queue.back_mut() {
            take.wait = None;
        }
    }

    /// Begins the next command, unless one runs, or batches are to be kept. Returns the number of its reply, the number
    /// of batches that it names, and its future. The caller must pass the result to [`Deliveries::end`].
    pub(super) fn begin(
        &mut self,
        delivery: &Arc<Delivery>,
    ) -> Option<(u64, usize, impl Future<Output = DeliveryReply> + Send + use<>)> {
        if self.is_running || self.to_keep.is_some() {
            return None;
        }
        let (number, command) = self.queue.pop_front()?;
        free_if_empty(&mut self.queue);
        self.is_running = true;
        let (interrupt, interrupted) = oneshot::channel();
        self.interrupt = Some(interrupt);
        let member = match &command {
            QueuedCommand::Delivery(DeliveryCommand::Take(take)) => self.members.remove(&take.group),
            QueuedCommand::Leave => {
                self.members.clear();
                None
            }
            QueuedCommand::Delivery(_) => None,
        };
        Some((number, command.batches(), run(command, member, interrupted, Arc::clone(delivery))))
    }

    /// Ends the command that runs, whose reply has this number. Returns the batches that it took, if it is an AW.TAKE.
    pub(super) fn end(&mut self, number: u64, reply: DeliveryReply) -> Result<Outcome, Refusal> {
        (self.is_running, self.interrupt) = (false, None);
        match reply {
            DeliveryReply::Left => Ok(Outcome::Left),
            DeliveryReply::Count(count) => count.map(Outcome::Count),
            DeliveryReply::Taken { take, member, taken } => {
                if let Some(member) = member {
                    self.members.insert(take.group.clone(), member);
                }
                let taken = taken?;
                if take.keep && !taken.is_empty() {
                    let batches = taken.iter().map(|delivery| delivery.batch.id).collect();
                    self.to_keep = Some(ToKeep { group: take.group, batches, number, end: None });
                }
                Ok(Outcome::Taken(taken))
            }
        }
    }

    /// Records that all replies before the one with the number `first` are queued for the socket, where they end at
    /// `end`.
    pub(super) fn queued(&mut self, first: u64, end: u64) {
        if let Some(to_keep) = self.to_keep.as_mut().filter(|to_keep| to_keep.number < first) {
            to_keep.end.get_or_insert(end);
        }
    }

    /// Detaches the batches of an AW.TAKE with KEEP, if its reply is written. The socket has taken the output up to
    /// `written`.
    pub(super) fn keep_written(&mut self, written: u64) {
        let is_written = |to_keep: &mut ToKeep| to_keep.end.is_some_and(|end| end <= written);
        if let Some(ToKeep { group, batches, .. }) = self.to_keep.take_if(is_written)
            && let Some(member) = self.members.get(&group)
        {
            member.keep(batches);
        }
    }

    /// Keeps no batches, because the reply with them will never be written.
    pub(super) fn keep_nothing(&mut self) {
        self.to_keep = None;
    }

    /// Ends the waiting, and leaves the groups: the batches that the connection holds go back. Stays in a group of which
    /// a reply with kept batches is not written yet.
    pub(super) fn stop(&mut self) {
        self.interrupt();
        let to_keep = &self.to_keep;
        self.members.retain(|group, _| to_keep.as_ref().is_some_and(|to_keep| to_keep.group == *group));
    }
}

/// The outcome of a command.
pub(super) enum Outcome {
    Taken(Vec<Delivered>),
    Count(u64),
    Left,
}

async fn run(
    command: QueuedCommand,
    member: Option<Subscription>,
    interrupted: oneshot::Receiver<()>,
    delivery: Arc<Delivery>,
) -> DeliveryReply {
    let command = match command {
        QueuedCommand::Delivery(command) => command,
        QueuedCommand::Leave => return DeliveryReply::Left,
    };
    match command {
        DeliveryCommand::Take(take) => {
            let member = match member {
                Some(member) => Ok(member),
                None => delivery.join_for_requests(&take.group).await,
            };
            match member {
                Err(refusal) => DeliveryReply::Taken { take, member: None, taken: Err(refusal) },
                Ok(mut member) => {
                    let taken = take_batches(&take, &mut member, interrupted).await;
                    DeliveryReply::Taken { take, member: Some(member), taken }
                }
            }
        }
        DeliveryCommand::Ack { group, batches } => DeliveryReply::Count(delivery.ack(&group, batches).await),
        DeliveryCommand::Nack { group, delay, batches } => {
            DeliveryReply::Count(Ok(delivery.nack(&group, batches, delay).await))
        }
    }
}

/// Takes the batches that there are. If there are none, waits for the first one.
async fn take_batches(
    take: &Take,
    member: &mut Subscription,
    interrupted: oneshot::Receiver<()>,
) -> Result<Vec<Delivered>, Refusal> {
    let tried = member.request(take.count).await;
    let mut taken: Vec<Delivered> = std::iter::from_fn(|| member.try_next()).collect();
    if taken.is_empty()
        && tried.is_ok()
        && let Some(wait) = take.wait
    {
        let timeout = async {
            match wait {
                Wait::AtMost(time) => tokio::time::sleep(time).await,
                Wait::Forever => pending().await,
            }
        };
        tokio::select! {
            first = member.next() => taken.extend(first),
            () = timeout => {}
            _ = interrupted => {}
        }
    }
    // After this answer, no further batch comes.
    let _ = member.request(0).await;
    taken.extend(std::iter::from_fn(|| member.try_next()));
    tried.map_or_else(|refusal| if taken.is_empty() { Err(refusal) } else { Ok(()) }, Ok)?;
    Ok(taken)
}
