//! What was answered lately on one link: Redis may lose it in a failover, and its Acks can then be applied again.
//!
//! Chunks are numbered, and Redis keeps the number of the last one that it applied. A session that finds a lower number
//! than was answered knows that Redis lost all chunks behind it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::core::message::Message;

/// How long answered Acks are kept: longer than a replica lags behind, and than an append-only file that is synchronised
/// every second.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// A message that an answered DelMsg took out of flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) message: Message,
    /// When it was added, in ms by Redis' clock: this tells it from a message that was added again later.
    pub(crate) added_ms: u64,
    pub(crate) is_withdrawal: bool,
}

/// What an answered chunk did.
#[derive(Debug)]
struct Chunk {
    number: u64,
    answered_at: Instant,
    added: u64,
    acks: Vec<Ack>,
}

/// What Redis has lost of what it had answered.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) chunks: u64,
    /// Messages that were added, as far as is known here: they will not time out.
    pub(crate) added: u64,
    /// Acks that can be applied again, oldest first.
    pub(crate) acks: Vec<Ack>,
}

/// The chunks of the last seconds, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    chunks: VecDeque<Chunk>,
    acks: usize,
    most_acks: usize,
}

impl Answered {
    /// Keeps at most so many Acks.
    pub(crate) fn new(most_acks: usize) -> Answered {
        Answered { chunks: VecDeque::new(), acks: 0, most_acks }
    }

    /// Notes what an answered chunk did.
    pub(crate) fn push(&mut self, number: u64, answered_at: Instant, added: u64, acks: Vec<Ack>) {
        self.acks += acks.len();
        self.chunks.push_back(Chunk { number, answered_at, added, acks });
        while let Some(oldest) = self.chunks.front()
            && (self.acks > self.most_acks || answered_at.saturating_duration_since(oldest.answered_at) > KEPT_FOR)
        {
            self.acks -= oldest.acks.len();
            self.chunks.pop_front();
        }
    }

    /// Takes out what Redis has lost, if the last chunk that it has is `applied` and `answered` was answered.
    pub(crate) fn take_lost(&mut self, answered: u64, applied: u64) -> Option<Lost> {
        let chunks = answered.checked_sub(applied).filter(|chunks| *chunks > 0)?;
        let kept = self.chunks.partition_point(|chunk| chunk.number <= applied);
        let mut lost = Lost { chunks, ..Lost::default() };
        for chunk in self.chunks.drain(kept..) {
            self.acks -= chunk.acks.len();
            lost.added += chunk.added;
            lost.acks.extend(chunk.acks);
        }
        Some(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acks(ids: std::ops::Range<u64>) -> Vec<Ack> {
        ids.map(|id| Ack { message: Message::from(id), added_ms: 7, is_withdrawal: false }).collect()
    }

    #[test]
    fn what_lies_behind_the_last_chunk_that_redis_has_is_lost() {
        let (mut answered, now) = (Answered::new(100), Instant::now());
        for number in 1..=4 {
            answered.push(number, now, number, acks(number..number + 1));
        }
        assert_eq!(answered.take_lost(4, 4), None);
        let lost = answered.take_lost(4, 2).unwrap();
        assert_eq!(lost, Lost { chunks: 2, added: 3 + 4, acks: acks(3..5) });
        answered.push(3, now, 0, acks(9..10));
        assert_eq!(answered.take_lost(3, 0).unwrap().acks, [acks(1..3), acks(9..10)].concat());
    }

    #[test]
    fn acks_are_kept_for_some_seconds_and_not_too_many() {
        let (mut answered, begun) = (Answered::new(100), Instant::now());
        answered.push(1, begun, 0, acks(0..10));
        answered.push(2, begun + KEPT_FOR, 0, acks(10..20));
        answered.push(3, begun + KEPT_FOR + Duration::from_millis(1), 0, acks(20..30));
        assert_eq!(answered.take_lost(3, 0), Some(Lost { chunks: 3, added: 0, acks: acks(10..30) }));
        answered.push(1, begun, 0, acks(0..60));
        answered.push(2, begun, 0, acks(60..120));
        assert_eq!(answered.take_lost(2, 0), Some(Lost { chunks: 2, added: 0, acks: acks(60..120) }));
    }
}
