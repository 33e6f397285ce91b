//! The contract of an outbox: timeout batches that not all groups have acknowledged.
//!
//! # Invariants
//!
//! 1. For each group, a batch is in one of three states: available, taken, settled. Taking it increments its delivery
//!    count, releasing it makes it available again, settling it is final.
//! 2. Batches are taken in the order of their ticks, released ones first.
//! 3. A batch is removed once all groups have settled it, or when retention drops it. Drops are counted.

use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::batch::{BatchId, Delivery};
use super::group::GroupName;
use super::refusal::{Refusal, merge_refusals};

/// The most batches of one [`Outbox::retake`].
pub const MAX_RETAKEN: usize = 16;

/// The options of a new group. They do not change an existing group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupOptions {
    /// Whether it starts to read with the next batch that is published, and not with the oldest one in the outbox.
    pub from_end: bool,
    /// Whether it is deleted when its last subscriber leaves.
    pub ephemeral: bool,
}

/// The limits of an outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// How long a batch is kept, and a group without a subscriber.
    pub time: Duration,
    /// The most messages in unacknowledged batches.
    pub max_ids: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Retention { time: Duration::from_secs(24 * 3_600), max_ids: 10_000_000 }
    }
}

/// The backlog of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupBacklog {
    /// The group.
    pub group: GroupName,
    /// Batches that it has not acknowledged, taken ones included.
    pub batches: u64,
    /// Batches that were delivered and not acknowledged.
    pub unacked: u64,
    /// The age of its oldest batch; 0 without batches.
    pub oldest: Duration,
}

/// The content of an outbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Messages in its batches; [`Retention::max_ids`] bounds them.
    pub ids: u64,
    /// The backlog of each group, sorted by name.
    pub groups: Vec<GroupBacklog>,
}

/// The batches and groups that retention dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Messages in batches that not all groups had acknowledged.
    pub ids: u64,
    /// Number of those batches.
    pub batches: u64,
    /// Groups that had no subscriber for too long.
    pub groups: Vec<GroupName>,
}

/// The result of settling batches.
#[derive(Debug, Default)]
pub struct Settled {
    /// Number of batches that were not settled before.
    pub count: u64,
    /// The batches that are settled now.
    pub batches: Vec<BatchId>,
    /// Why the others are not settled, if there are others.
    pub refusal: Option<Refusal>,
}

impl Settled {
    /// The sum of the answers of all `parts`. If one refuses, the batches of the others are settled all the same.
    pub(crate) fn sum(answers: Vec<Result<Settled, Refusal>>, parts: &str) -> Result<Settled, Refusal> {
        let (mut sum, mut refusals, asked) = (Settled::default(), Vec::new(), answers.len());
        for answer in answers {
            let Settled { count, batches, refusal } =
                answer.unwrap_or_else(|refusal| Settled { refusal: Some(refusal), ..Settled::default() });
            sum.count += count;
            sum.batches.extend(batches);
            refusals.extend(refusal);
        }
        sum.refusal = merge_refusals(asked, parts, refusals);
        sum.refusal.take_if(|_| sum.batches.is_empty()).map_or(Ok(sum), Err)
    }
}

/// The queue of timeout batches for all groups.
#[async_trait]
pub trait Outbox: Send + Sync {
    /// Creates a group if it does not exist, and returns whether it is new. After a refusal the group may exist in some
    /// of the rings. The caller then leaves it, unless it has another subscriber here.
    async fn open_group(&self, group: &GroupName, opening: GroupOptions, now: Instant) -> Result<bool, Refusal>;

    /// Records that the last subscriber on this sidecar has left. An ephemeral group is deleted, unless it has
    /// subscribers on other sidecars.
    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal>;

    /// Deletes a group with its backlog, and returns whether it existed. Refused if the group has subscribers on other
    /// sidecars.
    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal>;

    /// Whether other sidecars take from this outbox too.
    fn is_shared(&self) -> bool {
        false
    }

    /// Takes the next batches of a group until they hold `window` messages or more. It may take fewer. Only an empty
    /// answer means that none is left.
    async fn take(&self, group: &GroupName, window: u64, now: Instant) -> Result<Vec<Delivery>, Refusal>;

    /// Takes batches of one ring again that this sidecar took or lent before, at most [`MAX_RETAKEN`], in their order.
    /// The answer leaves out batches that are settled, dropped, or taken by another sidecar.
    async fn retake(&self, group: &GroupName, batches: &[BatchId], now: Instant)
    -> Result<Vec<Delivery>, Refusal>;

    /// Settles taken batches for the group. Refused if none could be settled.
    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal>;

    /// Makes taken batches available again, for all sidecars.
    async fn release(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal>;

    /// Makes taken batches available to other sidecars. [`Outbox::take`] does not return them here. They stay known
    /// here until they are taken again, settled or released.
    async fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        self.release(group, batches).await
    }

    /// Enforces the limits. `attended` are the groups with a subscriber on this sidecar.
    async fn maintain(&self, attended: &[GroupName], now: Instant) -> Result<Dropped, Refusal>;

    /// The current content.
    async fn backlog(&self, now: Instant) -> Result<Backlog, Refusal>;

    /// Registers a callback for when new batches may be available.
    fn on_new_batches(&self, notify: Box<dyn Fn() + Send + Sync>);
}
