//! Applies Acks again that Redis answered and then lost, in a failover or a restart.
//!
//! A *chunk* is the group of adds and dels that one script applies. Chunks are numbered, and Redis keeps the number of
//! the last applied chunk. Each new session with Redis reads this number. If it is lower than the number of the last
//! answered chunk, Redis has lost the chunks in between. Then the pointer, which is the tick that expires next, waits
//! until this sidecar has applied the lost Acks again. The pointer also waits for Acks that this sidecar held while it
//! had no session.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use crate::core::{Message, Refusal};
use crate::redis::connection::link::{Link, Session};
use crate::redis::scripts::SCRIPTS;

/// How long the sidecar keeps answered Acks. A replica rarely lags for longer, and Redis synchronises an append-only
/// file every second.
const KEPT_FOR: Duration = Duration::from_secs(10);

/// Maximum number of Acks that one script applies again. Redis needs about a millisecond for this number.
const MAX_REAPPLIED: usize = 1_000;

/// A message that an answered DelMsg removed from flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) message: Message,
    /// When the message was added, in ms by Redis' clock. The script skips the Ack if the message now has another time,
    /// because the message was then added again.
    pub(crate) added_ms: u64,
    pub(crate) is_withdrawal: bool,
}

/// A chunk that Redis has answered.
#[derive(Debug)]
struct AnsweredChunk {
    number: u64,
    answered_at: Instant,
    added: u64,
    acks: Vec<Ack>,
}

/// Answered writes that Redis has lost.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) chunks: u64,
    /// Number of messages that the lost chunks added. Chunks that this sidecar no longer keeps do not count. The
    /// added messages will not time out.
    pub(crate) added: u64,
    /// Acks that can be applied again, oldest first.
    pub(crate) acks: Vec<Ack>,
}

/// The chunks that Redis answered in the last [`KEPT_FOR`], oldest first.
#[derive(Debug, Default)]
pub(crate) struct AnsweredChunks {
    chunks: VecDeque<AnsweredChunk>,
    acks: usize,
    /// Maximum number of Acks in `chunks`.
    pub(crate) max_acks: usize,
}

impl AnsweredChunks {
    /// Records an answered chunk: its Acks, and the number of messages that it added. Removes the oldest chunks if they
    /// are too old, or if there are too many Acks.
    pub(crate) fn push(&mut self, number: u64, answered_at: Instant, added: u64, acks: Vec<Ack>) {
        self.acks += acks.len();
        self.chunks.push_back(AnsweredChunk { number, answered_at, added, acks });
        while let Some(oldest) = self.chunks.front()
            && (self.acks > self.max_acks || answered_at.saturating_duration_since(oldest.answered_at) > KEPT_FOR)
        {
            self.acks -= oldest.acks.len();
            self.chunks.pop_front();
        }
    }

    /// Removes and returns the writes that Redis has lost, or returns `None` if nothing is lost. `answered` is the
    /// number of the last chunk that Redis answered. `applied` is the number of the last chunk that Redis has now.
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

/// Counts and logs the writes that Redis has lost, and applies their Acks again.
pub(crate) async fn reapply(link: &Link, session: &Session, Lost { chunks, added, acks }: Lost) {
    let (ring, metrics) = (link.ring, &link.metrics);
    metrics.redis_lost_writes.inc_by(chunks);
    metrics.redis_lost_messages.of("added").inc_by(added);
    metrics.redis_lost_messages.of("acked").inc_by(acks.len() as u64);
    link.count_loss();
    let mut reapplied = 0;
    for part in acks.chunks(MAX_REAPPLIED) {
        match reapply_part(link, session, part).await {
            Ok(count) => reapplied += count,
            Err(refusal) => {
                warn!(%refusal, "acknowledgements that Redis lost could not be applied again: their messages time out");
                break;
            }
        }
    }
    metrics.redis_reapplied_acks.inc_by(reapplied);
    error!(
        ring,
        chunks,
        added,
        acked = acks.len(),
        reapplied,
        "Redis has lost writes that it had answered, in a failover or a restart: lost added messages never time out \
         (logic nodes add them again); lost acknowledgements were applied again to messages in flight; see \
         docs/REDIS.md on what a failover may lose"
    );
}

async fn reapply_part(link: &Link, session: &Session, acks: &[Ack]) -> Result<u64, Refusal> {
    let keys = &link.keys;
    let letters: String = acks.iter().map(|ack| if ack.is_withdrawal { 'w' } else { 'k' }).collect();
    let names = keys.and_lists(&[&keys.messages, &keys.ticks]);
    let times: Vec<_> = acks.iter().map(|ack| (ack.message.to_string(), ack.added_ms)).collect();
    let (word, mut answer) = link.write_in(session, &SCRIPTS.reapply_lost_acks, &names, (letters, times)).await?;
    match word.as_str() {
        "reapplied" => Ok(answer.count()?),
        word => Err(answer.strange(word).into()),
    }
}

/// Records in Redis that the pointer need not wait for this sidecar any longer.
pub(crate) async fn end_wait(link: &Link, session: &Session) {
    let keys = &link.keys;
    let names = [keys.held_acks.as_str()];
    match link.write_in(session, &SCRIPTS.record_acks_applied, &names, &keys.sidecar).await {
        Ok(_) => info!(ring = link.ring, "all acknowledgements that were held are applied"),
        Err(refusal) => warn!(%refusal, "could not record in Redis that all held acknowledgements are applied"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acks(ids: std::ops::Range<u64>) -> Vec<Ack> {
        ids.map(|id| Ack { message: Message::from(id), added_ms: 7, is_withdrawal: false }).collect()
    }

    #[test]
    fn chunks_after_the_last_one_that_redis_has_are_lost() {
        let (mut answered, now) = (AnsweredChunks { max_acks: 100, ..AnsweredChunks::default() }, Instant::now());
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
    fn acks_are_kept_for_some_seconds_up_to_a_limit() {
        let (mut answered, begun) =
            (AnsweredChunks { max_acks: 100, ..AnsweredChunks::default() }, Instant::now());
        answered.push(1, begun, 0, acks(0..10));
        answered.push(2, begun + KEPT_FOR, 0, acks(10..20));
        answered.push(3, begun + KEPT_FOR + Duration::from_millis(1), 0, acks(20..30));
        assert_eq!(answered.take_lost(3, 0), Some(Lost { chunks: 3, added: 0, acks: acks(10..30) }));
        answered.push(1, begun, 0, acks(0..60));
        answered.push(2, begun, 0, acks(60..120));
        assert_eq!(answered.take_lost(2, 0), Some(Lost { chunks: 2, added: 0, acks: acks(60..120) }));
    }
}
