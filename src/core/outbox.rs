//! The trait of an outbox, which stores timeout batches until all consumer groups have acknowledged them.
//!
//! # Invariants
//!
//! 1. For each group, a batch is *available* (can be delivered), *taken* (delivered to a subscriber) or *settled*
//!    (acknowledged). Taking a batch increments its delivery count. Releasing a taken batch makes it available again.
//!    Settling is final.
//! 2. Batches are taken in the order of their ticks, but released batches come first.
//! 3. A batch is removed when all groups have settled it, or when it is dropped because of a [`Retention`] limit.
//!    Dropped batches are counted.

use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::batch::{BatchId, Delivery};
use super::group::GroupName;
use super::refusal::{Refusal, merge_refusals};

/// The maximum number of batches in a call of [`Outbox::retake`].
pub const MAX_RETAKEN: usize = 16;

/// The options for creating a group. They do not change a group that already exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupOptions {
    /// Whether the group starts with the next batch that is published. Otherwise it starts with the oldest batch in
    /// the outbox.
    pub from_end: bool,
    /// Whether the group is deleted when its last subscriber leaves.
    pub ephemeral: bool,
}

/// The limits of an outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// How long a batch is kept, and how long a group without a subscriber is kept.
    pub time: Duration,
    /// The maximum number of messages in batches that not all groups have acknowledged.
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
    /// Batches that the group has not acknowledged, taken batches included.
    pub batches: u64,
    /// Batches that were delivered to the group and that the group has not acknowledged.
    pub unacked: u64,
    /// The age of the oldest unacknowledged batch of the group; 0 without such a batch.
    pub oldest: Duration,
}

/// The content of an outbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// The number of messages in all batches. [`Retention::max_ids`] limits it.
    pub ids: u64,
    /// The backlog of each group, sorted by name.
    pub groups: Vec<GroupBacklog>,
}

/// The batches and groups that retention dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// The number of messages in the dropped batches. At least one group had not acknowledged these batches.
    pub ids: u64,
    /// The number of dropped batches.
    pub batches: u64,
    /// Groups that were dropped because they had no subscriber for too long.
    pub groups: Vec<GroupName>,
}

/// The result of settling batches.
#[derive(Debug, Default)]
pub struct Settled {
    /// The number of batches that this call settled.
    pub count: u64,
    /// The batches that are settled now. They include batches that were settled before the call.
    pub batches: Vec<BatchId>,
    /// The refusal for the other batches; `None` if all batches are settled.
    pub refusal: Option<Refusal>,
}

impl Settled {
    /// Adds up the answers of several parts of a store. `parts` is the name of the parts in the text of a refusal,
    /// such as `rings`. If some parts refuse, the sum contains the batches that the other parts settled. Refuses only
    /// if no batch is settled.
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
    /// Creates a group if it does not exist, and returns whether the group is new. After a refusal the group may exist
    /// in some of the rings. The caller must then call [`Outbox::leave_group`], unless the group has another
    /// subscriber on this sidecar.
    async fn open_group(&self, group: &GroupName, opening: GroupOptions, now: Instant) -> Result<bool, Refusal>;

    /// Records that the last subscriber of the group on this sidecar has left. An ephemeral group is deleted, unless
    /// it has subscribers on other sidecars.
    async fn leave_group(&self, group: &GroupName) -> Result<(), Refusal>;

    /// Deletes a group with its backlog, and returns whether the group existed. Refuses if the group has subscribers
    /// on other sidecars. The caller must check that the group has no subscriber on this sidecar.
    async fn delete_group(&self, group: &GroupName) -> Result<bool, Refusal>;

    /// Returns whether other sidecars take batches from this outbox too.
    fn is_shared(&self) -> bool {
        false
    }

    /// Takes the next batches of a group until they contain `window` messages or more. The call may stop earlier, so
    /// only an empty answer shows that no batch is available.
    async fn take(&self, group: &GroupName, window: u64, now: Instant) -> Result<Vec<Delivery>, Refusal>;

    /// Takes batches again that this sidecar took before, even if it lent them to other sidecars since. All of them
    /// must belong to one ring, and at most [`MAX_RETAKEN`] are allowed. Returns them in the order of `batches`.
    /// Leaves out batches that are settled, dropped, or taken by another sidecar.
    async fn retake(&self, group: &GroupName, batches: &[BatchId], now: Instant)
    -> Result<Vec<Delivery>, Refusal>;

    /// Settles taken batches for the group. Refuses only if no batch could be settled.
    async fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Result<Settled, Refusal>;

    /// Makes taken batches available again, for all sidecars.
    async fn release(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal>;

    /// Lends taken batches: makes them available to other sidecars. On this sidecar [`Outbox::take`] skips these
    /// batches, and [`Outbox::retake`] can take them. They stay lent until a sidecar takes them, or until they are
    /// settled or released. By default this call releases them, which is enough if the outbox is not shared.
    async fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Result<(), Refusal> {
        self.release(group, batches).await
    }

    /// Enforces the retention limits, and returns the dropped batches and groups. `attended` lists the groups that
    /// have a subscriber on this sidecar.
    async fn maintain(&self, attended: &[GroupName], now: Instant) -> Result<Dropped, Refusal>;

    /// Returns the current backlog of all groups.
    async fn backlog(&self, now: Instant) -> Result<Backlog, Refusal>;

    /// Registers a callback that is called when new batches may be available.
    fn on_new_batches(&self, notify: Box<dyn Fn() + Send + Sync>);
}
