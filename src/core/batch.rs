//! Timeout batches: what of one decided tick is handed to subscribers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::message::Message;
use super::tick::Tick;

/// The most messages in one batch; larger ticks are cut.
pub const MAX_BATCH_MESSAGES: usize = 4_096;

/// The name of a batch. It never repeats, across restarts either, so a duplicate is recognisable.
///
/// Ids order as their batches are handed out: earlier ticks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId {
    /// The tick that was decided.
    pub tick: Tick,
    /// The epoch of the leader that decided it: it grows with every leader, and begins at a time in ms.
    pub epoch: u64,
    /// The ring that the tick belongs to.
    pub ring: u16,
    /// The position of the batch within its tick, from 0.
    pub seq: u32,
}

/// `ring-epoch-tick-seq`: as logs print it.
impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}-{}", self.ring, self.epoch, self.tick, self.seq)
    }
}

/// A message that nobody acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimedOut {
    /// The message.
    pub message: Message,
    /// The attempt it was added with.
    pub attempt: u8,
}

/// What is said of a decided tick in each of its batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TickCounts {
    /// Messages whose final deadline was this tick: those acknowledged and those timed out.
    pub added: u64,
    /// Messages of this tick that were acknowledged before it was decided.
    pub acked: u64,
    /// Whether so many timed out that a fault on our side is likelier than that many dead clients.
    pub storm: bool,
    /// Whether the messages are handed out before their time, because the sidecar goes.
    pub drained: bool,
}

impl TickCounts {
    /// Messages of this tick that timed out.
    #[must_use]
    pub const fn timed_out(self) -> u64 {
        self.added - self.acked
    }
}

/// When a tick is a storm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StormRule {
    /// The fewest timed-out messages that make a storm.
    pub min: u64,
    /// The least share of the tick's messages that timed out, 0 to 1.
    pub share: f64,
}

impl Default for StormRule {
    fn default() -> Self {
        StormRule { min: 1_000, share: 0.5 }
    }
}

impl StormRule {
    /// Counts a tick of which `acked` were acknowledged and `timed_out` were not.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
    pub fn count(self, acked: u64, timed_out: u64, drained: bool) -> TickCounts {
        let added = acked + timed_out;
        let storm =
            !drained && timed_out > 0 && timed_out >= self.min && timed_out as f64 >= self.share * added as f64;
        TickCounts { added, acked, storm, drained }
    }
}

/// Messages of one decided tick: the unit of delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeoutBatch {
    /// Its name.
    pub id: BatchId,
    /// What is said of its tick.
    pub counts: TickCounts,
    /// Whether it is the last of its tick.
    pub last: bool,
    /// What timed out, 1 to [`MAX_BATCH_MESSAGES`].
    pub messages: Vec<TimedOut>,
}

/// A batch on its way to a subscriber.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The batch, shared with the outbox.
    pub batch: Arc<TimeoutBatch>,
    /// How often it was handed out to this group, this time included.
    pub delivery_count: u32,
    /// How long ago its tick was decided.
    pub age: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_needs_both_the_number_and_the_share() {
        let rule = StormRule::default();
        assert!(rule.count(1_000, 1_000, false).storm);
        assert!(!rule.count(1_001, 1_000, false).storm, "below the share");
        assert!(!rule.count(0, 999, false).storm, "below the number");
        assert!(!rule.count(0, 5_000, true).storm, "a drain is no storm");
        assert!(!StormRule { min: 0, share: 0.5 }.count(0, 0, false).storm, "an empty tick is none either");
        assert_eq!(rule.count(30, 12, false).added, 42);
    }

    #[test]
    fn earlier_ticks_order_first_whatever_their_epoch() {
        let id = |tick, epoch, seq| BatchId { tick: Tick(tick), epoch, ring: 0, seq };
        assert!(id(5, 9, 7) < id(6, 1, 0));
        assert!(id(5, 9, 0) < id(5, 9, 1));
    }
}
