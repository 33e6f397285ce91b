//! Timeout batches. When a tick expires, its unacknowledged messages are delivered to subscribers in these batches.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::message::Message;
use super::tick::Tick;

/// The maximum number of messages in a batch. A tick with more messages becomes several batches.
pub const MAX_BATCH_MESSAGES: usize = 4_096;

/// The id of a batch. An id is never reused, not even after a restart, so a consumer recognises a duplicate.
///
/// Ids sort in the order of delivery: earlier ticks first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct BatchId {
    /// The tick that expired.
    pub tick: Tick,
    /// The epoch of the leader, which is the sidecar that expired the tick. Each new leader has a larger epoch. The
    /// first epoch is a Unix time in ms.
    pub epoch: u64,
    /// The number of the ring to which the tick belongs.
    pub ring: u16,
    /// The position of the batch within its tick, from 0.
    pub seq: u32,
}

/// Writes `ring-epoch-tick-seq`, the form used in logs.
impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}-{}", self.ring, self.epoch, self.tick, self.seq)
    }
}

/// The error for a text that is not a batch id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a batch id: write ring-epoch-tick-seq, as a delivery states it")]
pub struct ParseBatchIdError;

impl FromStr for BatchId {
    type Err = ParseBatchIdError;

    fn from_str(text: &str) -> Result<BatchId, ParseBatchIdError> {
        // `parse` accepts a sign, which no batch id has.
        let number = |text: &str| text.parse::<u64>().ok().filter(|_| !text.starts_with('+'));
        let mut numbers = text.split('-').map(number);
        let mut next = || numbers.next().flatten().ok_or(ParseBatchIdError);
        let (ring, epoch, tick, seq) = (next()?, next()?, Tick(next()?), next()?);
        let fits = |_| ParseBatchIdError;
        let id = BatchId {
            ring: u16::try_from(ring).map_err(fits)?,
            epoch,
            tick,
            seq: u32::try_from(seq).map_err(fits)?,
        };
        if numbers.next().is_some() { Err(ParseBatchIdError) } else { Ok(id) }
    }
}

/// A message that was not acknowledged in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct TimedOut {
    /// The message.
    pub message: Message,
    /// The attempt number that the AddNewMsg stated.
    pub attempt: u8,
}

/// The counts and flags of an expired tick. Every batch of the tick repeats them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct TickCounts {
    /// Messages whose latest deadline is this tick, acknowledged or timed out. Withdrawn messages are not counted.
    pub added: u64,
    /// Messages of this tick that were acknowledged before it expired.
    pub acked: u64,
    /// Whether the tick is a *storm*: its timeouts reach both limits of the [`StormRule`]. The cause of a storm is
    /// more likely a fault on the server side than many offline clients.
    pub storm: bool,
    /// Whether the messages were delivered before their deadline, because the sidecar drained.
    pub drained: bool,
}

impl TickCounts {
    /// Returns the number of messages of this tick that timed out.
    pub const fn timed_out(self) -> u64 {
        self.added - self.acked
    }
}

/// The limits for a storm. A tick is a storm if it reaches both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StormRule {
    /// The minimum number of timed-out messages.
    pub min: u64,
    /// The minimum share of timed-out messages among all messages of the tick, 0 to 1.
    pub share: f64,
}

impl Default for StormRule {
    fn default() -> Self {
        StormRule { min: 1_000, share: 0.5 }
    }
}

impl StormRule {
    /// Returns the counts of a tick in which `acked` messages were acknowledged and `timed_out` messages were not. An
    /// empty tick and a tick of a drain (`drained`) are never a storm.
    #[expect(clippy::cast_precision_loss, reason = "a share needs no more than 53 bits")]
    pub fn count(self, acked: u64, timed_out: u64, drained: bool) -> TickCounts {
        let added = acked + timed_out;
        let storm =
            !drained && timed_out > 0 && timed_out >= self.min && timed_out as f64 >= self.share * added as f64;
        TickCounts { added, acked, storm, drained }
    }
}

/// Messages of one expired tick: the unit of delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "sidecar", derive(serde::Serialize, serde::Deserialize))]
pub struct TimeoutBatch {
    /// The id of the batch.
    pub id: BatchId,
    /// The counts of the tick to which the messages belong.
    pub counts: TickCounts,
    /// Whether this is the last batch of the tick.
    pub last: bool,
    /// The messages that timed out, 1 to [`MAX_BATCH_MESSAGES`].
    pub messages: Vec<TimedOut>,
}

/// A batch that is delivered to a subscriber.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The batch, shared with the outbox.
    pub batch: Arc<TimeoutBatch>,
    /// How often the batch was delivered to this group, this delivery included.
    pub delivery_count: u32,
    /// The time since the tick expired.
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
        assert!(!StormRule { min: 0, share: 0.5 }.count(0, 0, false).storm, "an empty tick is no storm either");
        assert_eq!(rule.count(30, 12, false).added, 42);
    }

    #[test]
    fn a_batch_id_is_read_as_it_is_written() {
        let id = BatchId { tick: Tick(u64::MAX), epoch: 1_700_000_000_000, ring: 63, seq: 4_096 };
        assert_eq!(id.to_string().parse(), Ok(id));
        for text in ["", "1-2-3", "1-2-3-4-5", "1-2-3-", "65536-2-3-4", "1-2-3-4294967296", "+1-2-3-4", "a-2-3-4"]
        {
            assert_eq!(text.parse::<BatchId>(), Err(ParseBatchIdError), "{text}");
        }
    }

    #[test]
    fn earlier_ticks_order_first_whatever_their_epoch() {
        let id = |tick, epoch, seq| BatchId { tick: Tick(tick), epoch, ring: 0, seq };
        assert!(id(5, 9, 7) < id(6, 1, 0));
        assert!(id(5, 9, 0) < id(5, 9, 1));
    }
}
