//! The batches that a subscription holds: unread batches, and batches whose acknowledgement is not answered yet.
//!
//! # Why memory stays bounded
//!
//! The server delivers batches while this subscriber holds fewer unacknowledged messages than its credit. If a batch is
//! not acknowledged for too long, or its connection is lost, the server redelivers the batch, perhaps to this client.
//! The server then no longer counts the old copy against the credit. So a redelivered batch replaces its unread copy.
//! If the unread messages have reached the credit, the client returns a new batch to the server. Unread batches survive
//! a lost connection: if their server has ended, they may be the only copies.
//!
//! # Acknowledged batches
//!
//! The reader (the caller that reads the subscription) has processed an acknowledged batch and must not get it again.
//! But an acknowledgement can be lost with its connection, and then the server redelivers the batch. The client
//! acknowledges such a batch again, until the server confirms that the batch is settled: no member of the group needs
//! it any more.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::error::ClientError;
use crate::core::BatchId;
use crate::protocol::frame::{MAX_BATCH_IDS, TimeoutBatch};

/// The batches of a subscription.
#[derive(Debug)]
pub(super) struct ReceivedBatches {
    /// The credit, in messages. Another batch is accepted while fewer messages than this are unread. So the last
    /// accepted batch may exceed the credit. The server follows the same rule.
    credit: usize,
    state: Mutex<State>,
}

/// The outcome of [`ReceivedBatches::deliver`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeliverOutcome {
    /// The batch waits for the reader.
    Kept,
    /// There is no room for the batch: return it to the server.
    NoRoom,
    /// The reader has already acknowledged the batch.
    Acknowledged(AckState),
}

/// The state of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AckState {
    /// The acknowledgement was sent, and its caller waits for the answer.
    Asked,
    /// The acknowledgement failed, or its caller stopped waiting: repeat the acknowledgement.
    Unanswered,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Unread batches in the order of their ids: batches of earlier ticks come first.
    unread: BTreeMap<BatchId, TimeoutBatch>,
    unread_messages: usize,
    /// Acknowledged batches that are not settled yet, at most [`MAX_BATCH_IDS`], which is the maximum of one BatchAck
    /// request. A batch beyond this limit is not remembered, so the reader gets it again if it is redelivered.
    acknowledged: HashMap<BatchId, AckState>,
    /// The group that the subscription joined.
    pub(super) group: String,
    /// How many times the subscription was renewed on a new connection.
    pub(super) reconnects: u64,
    ended: bool,
    /// The error that ended the subscription, until the reader receives it.
    error: Option<ClientError>,
    reader: Option<Waker>,
}

impl ReceivedBatches {
    /// Creates the state of a subscription that joined `group`.
    pub(super) fn new(credit: u32, group: String) -> ReceivedBatches {
        let credit = usize::try_from(credit).unwrap_or(usize::MAX);
        ReceivedBatches { credit, state: Mutex::new(State { group, ..State::default() }) }
    }

    /// Records that the reader acknowledges batches, and drops unread copies of these batches. The caller must keep the
    /// returned value until the answer arrives.
    pub(super) fn acknowledge<'a>(&'a self, batches: &'a [BatchId]) -> Acknowledgement<'a> {
        let mut state = self.state();
        for batch in batches {
            if let Some(copy) = state.unread.remove(batch) {
                state.unread_messages -= copy.messages.len();
            }
            if state.acknowledged.len() < MAX_BATCH_IDS || state.acknowledged.contains_key(batch) {
                state.acknowledged.insert(*batch, AckState::Asked);
            }
        }
        Acknowledgement { received: self, batches }
    }

    /// Returns the batches whose acknowledgement must be repeated.
    pub(super) fn unanswered(&self) -> Vec<BatchId> {
        let state = self.state();
        let unanswered = state.acknowledged.iter().filter(|(_, state)| **state == AckState::Unanswered);
        unanswered.map(|(batch, _)| *batch).collect()
    }

    /// Records that the server confirmed these batches as settled.
    pub(super) fn settled(&self, batches: &[BatchId]) {
        let mut state = self.state();
        for batch in batches {
            state.acknowledged.remove(batch);
        }
    }

    /// Keeps a batch that arrived, unless the reader has acknowledged it or there is no room. Replaces an unread copy
    /// of the batch.
    #[must_use]
    pub(super) fn deliver(&self, batch: TimeoutBatch) -> DeliverOutcome {
        let mut state = self.state();
        if let Some(ack_state) = state.acknowledged.get(&batch.id) {
            return DeliverOutcome::Acknowledged(*ack_state);
        }
        match state.unread.remove(&batch.id) {
            // The new copy can have another number of messages: after a Redis failover, the tick may expire a second
            // time.
            Some(copy) => state.unread_messages -= copy.messages.len(),
            None if state.unread_messages >= self.credit => return DeliverOutcome::NoRoom,
            None => {}
        }
        state.unread_messages += batch.messages.len();
        state.unread.insert(batch.id, batch);
        wake_reader(state);
        DeliverOutcome::Kept
    }

    /// Records that the subscription was renewed on a new connection.
    pub(super) fn renewed(&self, group: String) {
        let mut state = self.state();
        state.reconnects += 1;
        state.group = group;
    }

    /// Ends the subscription. After the unread batches, the reader receives `error` once, then `None`. `error` is
    /// `None` if the subscription was closed on this side. Only the first call has an effect.
    pub(super) fn end(&self, error: Option<ClientError>) {
        let mut state = self.state();
        if !state.ended {
            state.ended = true;
            state.error = error;
        }
        wake_reader(state);
    }

    /// Returns the next unread batch. After the end and the last batch, returns the error that ended the subscription,
    /// then `None`.
    pub(super) fn poll(&self, context: &Context<'_>) -> Poll<Option<Result<TimeoutBatch, ClientError>>> {
        let mut state = self.state();
        if let Some((_, batch)) = state.unread.pop_first() {
            state.unread_messages -= batch.messages.len();
            return Poll::Ready(Some(Ok(batch)));
        }
        if state.ended {
            return Poll::Ready(state.error.take().map(Err));
        }
        if !state.reader.as_ref().is_some_and(|reader| reader.will_wake(context.waker())) {
            state.reader = Some(context.waker().clone());
        }
        Poll::Pending
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Releases the lock, then wakes the reader.
fn wake_reader(mut state: MutexGuard<'_, State>) {
    let reader = state.reader.take();
    drop(state);
    reader.into_iter().for_each(Waker::wake);
}

/// An acknowledgement whose caller waits for the answer. If this value is dropped before the batches are settled, the
/// acknowledgement is repeated.
#[derive(Debug)]
pub(super) struct Acknowledgement<'a> {
    received: &'a ReceivedBatches,
    batches: &'a [BatchId],
}

impl Drop for Acknowledgement<'_> {
    fn drop(&mut self) {
        let mut state = self.received.state();
        for batch in self.batches {
            if let Some(ack) = state.acknowledged.get_mut(batch) {
                *ack = AckState::Unanswered;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{Message, Tick, TickCounts, TimedOut};

    fn batch(seq: u32, messages: u64, delivery_count: u32) -> TimeoutBatch {
        let id = BatchId { tick: Tick(1), epoch: 1, ring: 0, seq };
        let timed_out = |msg_id| TimedOut { message: Message::new(msg_id, 0), attempt: 1 };
        let messages = (0..messages).map(timed_out).collect();
        TimeoutBatch { id, delivery_count, age_ms: 0, counts: TickCounts::default(), last: true, messages }
    }

    fn read_all(received: &ReceivedBatches) -> Vec<(u32, u32)> {
        let context = Context::from_waker(Waker::noop());
        let mut read = Vec::new();
        while let Poll::Ready(Some(Ok(batch))) = received.poll(&context) {
            read.push((batch.id.seq, batch.delivery_count));
        }
        read
    }

    #[test]
    fn a_copy_replaces_what_lies_unread_and_nothing_exceeds_the_credit_by_more_than_a_batch() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        assert_eq!(received.deliver(batch(0, 5, 1)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(1, 4, 1)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(0, 5, 2)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(2, 5, 1)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(3, 1, 1)), DeliverOutcome::NoRoom);
        assert_eq!(read_all(&received), [(0, 2), (1, 1), (2, 1)], "batch 3 did not fit");
        assert_eq!(received.deliver(batch(3, 1, 2)), DeliverOutcome::Kept);
        assert_eq!(read_all(&received), [(3, 2)], "batch 3 fits when it is redelivered");
    }

    #[test]
    fn a_copy_with_more_or_fewer_messages_takes_as_much_of_the_credit_as_it_has() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        for (before, after) in [(1, 25), (25, 1)] {
            assert_eq!(received.deliver(batch(0, before, 1)), DeliverOutcome::Kept);
            assert_eq!(received.deliver(batch(0, after, 2)), DeliverOutcome::Kept);
            assert_eq!(received.deliver(batch(1, 5, 1)) == DeliverOutcome::Kept, after == 1);
            let fits = if after == 1 { &[(0, 2), (1, 1)][..] } else { &[(0, 2)] };
            assert_eq!(read_all(&received), fits);
        }
        assert_eq!(received.deliver(batch(2, 9, 1)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(3, 1, 1)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(4, 1, 1)), DeliverOutcome::NoRoom);
        assert_eq!(read_all(&received), [(2, 1), (3, 1)], "the reads have freed the whole credit");
    }

    #[test]
    fn what_was_acknowledged_is_not_read_again_until_it_is_settled() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        assert_eq!(received.deliver(batch(0, 9, 1)), DeliverOutcome::Kept);
        assert_eq!(read_all(&received), [(0, 1)]);
        assert_eq!(received.deliver(batch(0, 9, 2)), DeliverOutcome::Kept, "the reader has not acknowledged it");
        let ids = [batch(0, 9, 1).id];
        let acknowledgement = received.acknowledge(&ids);
        assert_eq!(read_all(&received), [], "the acknowledgement drops the unread copy");
        assert_eq!(received.deliver(batch(0, 9, 3)), DeliverOutcome::Acknowledged(AckState::Asked));
        drop(acknowledgement);
        assert_eq!(received.deliver(batch(0, 9, 4)), DeliverOutcome::Acknowledged(AckState::Unanswered));
        assert_eq!(received.unanswered(), ids);
        received.settled(&ids);
        assert_eq!(received.deliver(batch(0, 9, 5)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(1, 9, 1)), DeliverOutcome::Kept, "only 9 of the credit of 10 is used");
        assert_eq!(read_all(&received), [(0, 5), (1, 1)]);
    }

    #[test]
    fn what_lies_unread_comes_before_the_end() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        assert_eq!(received.deliver(batch(0, 1, 1)), DeliverOutcome::Kept);
        received.end(Some(ClientError::InvalidRequest("wrong".to_owned())));
        received.end(None);
        assert_eq!(read_all(&received), [(0, 1)]);
        let context = Context::from_waker(Waker::noop());
        // `read_all` has already taken the error.
        assert!(matches!(received.poll(&context), Poll::Ready(None)));
    }

    #[test]
    fn what_was_not_answered_is_repeated_and_what_is_settled_is_forgotten() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        let (lost, settled) = ([batch(1, 1, 1).id], [batch(2, 1, 1).id]);
        let acknowledgement = received.acknowledge(&lost);
        assert_eq!(received.deliver(batch(1, 1, 2)), DeliverOutcome::Acknowledged(AckState::Asked));
        assert!(received.unanswered().is_empty(), "the answer to the acknowledgement may still come");
        drop(acknowledgement);
        let acknowledgement = received.acknowledge(&settled);
        received.settled(&settled);
        drop(acknowledgement);
        assert_eq!(received.unanswered(), lost);
        assert_eq!(received.deliver(batch(2, 1, 2)), DeliverOutcome::Kept);
        received.settled(&lost);
        assert!(received.unanswered().is_empty());
    }

    #[test]
    fn no_more_are_remembered_than_one_batch_ack_carries() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        let many: Vec<BatchId> = (0..).take(MAX_BATCH_IDS + 1).map(|seq| batch(seq, 1, 1).id).collect();
        drop(received.acknowledge(&many));
        assert_eq!(received.unanswered().len(), MAX_BATCH_IDS);
    }
}
