//! The groups with subscribers on this sidecar, and the commands to their tasks.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{MutexGuard, Notify, mpsc, oneshot};

use crate::clock::Clock;
use crate::core::batch::{BatchId, Delivery as Delivered};
use crate::core::dispatch::MemberId;
use crate::core::group::GroupName;
use crate::core::outbox::Outbox;
use crate::core::refusal::Refusal;
use crate::metrics::Metrics;

/// So many that two groups seldom share one.
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
    pub(super) news: Arc<Notify>,
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
