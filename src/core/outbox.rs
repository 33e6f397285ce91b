//! The contract of an outbox: timeout batches that not every group has acknowledged.
//!
//! # Invariants
//!
//! 1. A batch in the outbox is, for each group, in one of three states: not yet taken, taken, settled.
//!    Taking counts up its delivery count; releasing makes it not taken again; settling is final.
//! 2. Batches are taken in the order of their ticks, released ones first.
//! 3. A batch leaves when every group has settled it, or when retention drops it, which is counted.

use std::time::{Duration, Instant};

use super::batch::{BatchId, Delivery};
use super::group::GroupName;
use super::refusal::Refusal;
use super::ring::Reply;

/// The most batches that are taken again at a time.
pub const MOST_AGAIN: usize = 16;

/// Where a new group begins to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// With the oldest batch in the outbox.
    #[default]
    Beginning,
    /// With the next batch published.
    End,
}

/// How a new group is to be; one that is there stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opening {
    /// Where it begins to read.
    pub start: Start,
    /// Whether it goes with its last subscriber.
    pub ephemeral: bool,
}

/// The bounds of an outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// How long a batch, or a group without a subscriber, is kept.
    pub time: Duration,
    /// The most messages in unacknowledged batches.
    pub max_ids: u64,
}

impl Default for Retention {
    fn default() -> Self {
        Retention { time: Duration::from_secs(24 * 3_600), max_ids: 10_000_000 }
    }
}

/// What a group has not yet acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupBacklog {
    /// The group.
    pub group: GroupName,
    /// Batches that it has not acknowledged, taken ones included.
    pub batches: u64,
    /// Batches that were handed out and not acknowledged.
    pub unacked: u64,
    /// The age of the oldest of its batches; zero without one.
    pub oldest: Duration,
}

/// What an outbox holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Messages in its batches; [`Retention::max_ids`] bounds them.
    pub ids: u64,
    /// What each group has not acknowledged, ordered by name.
    pub groups: Vec<GroupBacklog>,
}

/// What retention dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Messages in batches that not every group had acknowledged.
    pub ids: u64,
    /// Those batches.
    pub batches: u64,
    /// Groups that nobody subscribed to for too long.
    pub groups: Vec<GroupName>,
}

/// What became of batches that were to be settled.
#[derive(Debug, Default)]
pub struct Settled {
    /// How many of them were not settled before.
    pub count: u64,
    /// Those that are settled now.
    pub batches: Vec<BatchId>,
    /// Why the others are not, if there are any.
    pub refusal: Option<Refusal>,
}

impl Settled {
    /// Adds what became of another part of them; why not all of that is settled.
    pub(crate) fn add(&mut self, part: Result<Settled, Refusal>) -> Result<(), Refusal> {
        let part = part?;
        self.count += part.count;
        self.batches.extend(part.batches);
        part.refusal.map_or(Ok(()), Err)
    }
}

/// Where timeout batches wait for their subscribers.
pub trait Outbox: Send + Sync {
    /// Makes sure that a group exists; whether it is new. Where that is refused, the group may exist in a part of the
    /// rings: it is to be left, unless it has another subscriber here.
    fn open_group(&self, group: &GroupName, opening: Opening, now: Instant) -> Reply<bool>;

    /// Notes that the last subscriber here has left: an ephemeral group is deleted, unless it has subscribers
    /// elsewhere.
    fn leave_group(&self, group: &GroupName) -> Reply<()>;

    /// Deletes a group and what it has not acknowledged; whether there was one. A group with subscribers
    /// elsewhere is refused, as in use.
    fn delete_group(&self, group: &GroupName) -> Reply<bool>;

    /// Whether other sidecars take from it too.
    fn is_shared(&self) -> bool {
        false
    }

    /// Takes the next batches of a group: until they hold `window` messages, the last overshooting. They can be
    /// fewer; none is left only where none is returned.
    fn take(&self, group: &GroupName, window: u64, now: Instant) -> Reply<Vec<Delivery>>;

    /// Takes taken batches of one ring once more, at most [`MOST_AGAIN`], in their order; those are missing that
    /// are settled or dropped.
    /// Where the outbox is shared also such that were given back, unless somebody else has taken them.
    fn take_again(&self, group: &GroupName, batches: &[BatchId], now: Instant) -> Reply<Vec<Delivery>>;

    /// Settles taken batches. Refused where none of them is.
    fn settle(&self, group: &GroupName, batches: &[BatchId]) -> Reply<Settled>;

    /// Gives taken batches back, for the next who takes.
    fn release(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()>;

    /// Gives taken batches back, for others: here they are left alone until they are taken again, settled or
    /// released.
    fn lend(&self, group: &GroupName, batches: &[BatchId]) -> Reply<()> {
        self.release(group, batches)
    }

    /// Keeps the bounds; `attended` are the groups with a subscriber here.
    fn maintain(&self, attended: &[GroupName], now: Instant) -> Reply<Dropped>;

    /// What it holds, and for which groups.
    fn backlog(&self, now: Instant) -> Reply<Backlog>;

    /// Registers who is to be told that there may be something new to take.
    fn on_news(&self, tell: Box<dyn Fn() + Send + Sync>);
}
