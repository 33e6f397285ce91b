//! Batches of a subscription, between the background task and the reader: those that are not read, and those whose
//! acknowledgement is not answered.
//!
//! # Why it stays within its bound
//!
//! The server limits batches in our hands by the credit. It gives a batch that a reader does not read for too long, or
//! that came on a connection now lost, to another member or to us again, and then the credit no longer counts our old
//! copy. So a copy replaces the unread one, and if more is held than the credit allows, a new batch is returned:
//! the server delivers it to others, or to us again. Batches stay here across connections: the server that sent one may
//! have ended, and with it the only other copy.
//!
//! # Acknowledged batches
//!
//! Their reader has dealt with them. Until the server confirms that they are settled, they are not read again, but
//! acknowledged again: an acknowledgement may be lost with its connection, and the server then redelivers the batch.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::error::ClientError;
use crate::core::BatchId;
use crate::protocol::frame::{MAX_BATCH_IDS, TimeoutBatch};

/// The batches of a subscription.
#[derive(Debug)]
pub(super) struct ReceivedBatches {
    /// As the server does, it takes another batch while it holds fewer messages than this.
    credit: usize,
    state: Mutex<State>,
}

/// The outcome for a batch that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeliverOutcome {
    /// It waits for its reader.
    Kept,
    /// There is no room for it: return it.
    NoRoom,
    /// Its reader has acknowledged it.
    Acknowledged(AckState),
}

/// The state of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AckState {
    /// A caller waits for its answer.
    Asked,
    /// It has failed, or its caller did not wait for the answer: repeat it.
    Unanswered,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// In the order of their ids: earlier ticks first.
    unread: BTreeMap<BatchId, TimeoutBatch>,
    unread_messages: usize,
    /// At most as many as one BatchAck carries. One more is not remembered: it is read again.
    acknowledged: HashMap<BatchId, AckState>,
    /// The group joined.
    pub(super) group: String,
    /// How often the subscription was renewed on a new connection.
    pub(super) reconnects: u64,
    ended: bool,
    /// Why it ended, until the reader has learnt it.
    error: Option<ClientError>,
    reader: Option<Waker>,
}

impl ReceivedBatches {
    /// For a subscription with this credit that joined this group.
    pub(super) fn new(credit: u32, group: String) -> ReceivedBatches {
        let credit = usize::try_from(credit).unwrap_or(usize::MAX);
        ReceivedBatches { credit, state: Mutex::new(State { group, ..State::default() }) }
    }

    /// The reader acknowledges batches. Copies of them that it has not read are dropped.
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

    /// The batches whose acknowledgement is to be repeated.
    pub(super) fn unanswered(&self) -> Vec<BatchId> {
        let state = self.state();
        let unanswered = state.acknowledged.iter().filter(|(_, state)| **state == AckState::Unanswered);
        unanswered.map(|(batch, _)| *batch).collect()
    }

    /// The server confirms that these are settled.
    pub(super) fn settled(&self, batches: &[BatchId]) {
        let mut state = self.state();
        for batch in batches {
            state.acknowledged.remove(batch);
        }
    }

    /// A batch arrived.
    #[must_use]
    pub(super) fn deliver(&self, batch: TimeoutBatch) -> DeliverOutcome {
        let mut state = self.state();
        if let Some(ack_state) = state.acknowledged.get(&batch.id) {
            return DeliverOutcome::Acknowledged(*ack_state);
        }
        match state.unread.remove(&batch.id) {
            // It can have another number of messages: a Redis that failed over may have expired the tick again.
            Some(copy) => state.unread_messages -= copy.messages.len(),
            None if state.unread_messages >= self.credit => return DeliverOutcome::NoRoom,
            None => {}
        }
        state.unread_messages += batch.messages.len();
        state.unread.insert(batch.id, batch);
        wake_reader(state);
        DeliverOutcome::Kept
    }

    /// The subscription was renewed on a new connection.
    pub(super) fn renewed(&self, group: String) {
        let mut state = self.state();
        state.reconnects += 1;
        state.group = group;
    }

    /// Nothing more will come. The reader learns why, unless it closed the subscription itself. The first end counts.
    pub(super) fn end(&self, error: Option<ClientError>) {
        let mut state = self.state();
        if !state.ended {
            state.ended = true;
            state.error = error;
        }
        wake_reader(state);
    }

    /// The next batch, or the end.
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

/// Wakes the reader after the lock is released.
fn wake_reader(mut state: MutexGuard<'_, State>) {
    let reader = state.reader.take();
    drop(state);
    reader.into_iter().for_each(Waker::wake);
}

/// An acknowledgement whose caller waits for the answer. If this is dropped before the batches are settled, it is
/// repeated.
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
        assert_eq!(read_all(&received), [(0, 2), (1, 1), (2, 1)], "the last did not fit");
        assert_eq!(received.deliver(batch(3, 1, 2)), DeliverOutcome::Kept);
        assert_eq!(read_all(&received), [(3, 2)], "and fits when it comes again");
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
        assert_eq!(read_all(&received), [(2, 1), (3, 1)], "all of the credit is there again");
    }

    #[test]
    fn what_was_acknowledged_is_not_read_again_until_it_is_settled() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        assert_eq!(received.deliver(batch(0, 9, 1)), DeliverOutcome::Kept);
        assert_eq!(read_all(&received), [(0, 1)]);
        assert_eq!(received.deliver(batch(0, 9, 2)), DeliverOutcome::Kept, "its reader may be slow");
        let ids = [batch(0, 9, 1).id];
        let acknowledgement = received.acknowledge(&ids);
        assert_eq!(read_all(&received), [], "the copy is of no use any more");
        assert_eq!(received.deliver(batch(0, 9, 3)), DeliverOutcome::Acknowledged(AckState::Asked));
        drop(acknowledgement);
        assert_eq!(received.deliver(batch(0, 9, 4)), DeliverOutcome::Acknowledged(AckState::Unanswered));
        assert_eq!(received.unanswered(), ids);
        received.settled(&ids);
        assert_eq!(received.deliver(batch(0, 9, 5)), DeliverOutcome::Kept);
        assert_eq!(received.deliver(batch(1, 9, 1)), DeliverOutcome::Kept, "all of the credit was there");
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
        // read_all has taken the error.
        assert!(matches!(received.poll(&context), Poll::Ready(None)));
    }

    #[test]
    fn what_was_not_answered_is_repeated_and_what_is_settled_is_forgotten() {
        let received = ReceivedBatches::new(10, "default".to_owned());
        let (lost, settled) = ([batch(1, 1, 1).id], [batch(2, 1, 1).id]);
        let acknowledgement = received.acknowledge(&lost);
        assert_eq!(received.deliver(batch(1, 1, 2)), DeliverOutcome::Acknowledged(AckState::Asked));
        assert!(received.unanswered().is_empty(), "its answer may still come");
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
