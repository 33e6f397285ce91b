//! Batches that were delivered and not yet read, between the background task and the reader.
//!
//! # Why it stays within its bound
//!
//! The server keeps to the credit for batches that it believes to be in our hands. One that a reader leaves
//! lying for too long, or that came on a connection now lost, it gives to another member, or to us again,
//! and then the credit no longer counts our old copy. So a copy replaces the one that lies here, and where
//! the inbox holds more than the credit allows, what arrives is not kept, but given back: the server
//! hands it to others, or to us again. Batches stay here, also across connections: the server that sent it may
//! have gone, and with it the only other copy.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::acknowledged::{Acknowledged, Asking, Status};
use super::error::ClientError;
use crate::core::batch::BatchId;
use crate::protocol::frame::{Subscribed, TimeoutBatch};

/// Where batches wait for their reader.
#[derive(Debug)]
pub(super) struct Inbox {
    /// As the server does, the inbox takes another batch while it holds fewer messages than this.
    credit: usize,
    state: Mutex<State>,
    acknowledged: Acknowledged,
}

/// The outcome for a batch that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    /// It waits for its reader.
    Kept,
    /// There is no room for it: it is to be given back.
    NoRoom,
    /// Its reader has acknowledged it, and the answer may still come.
    Acknowledged,
    /// Its reader has acknowledged it, and has no answer: it is to be acknowledged again.
    Unanswered,
}

#[derive(Debug)]
struct State {
    batches: VecDeque<TimeoutBatch>,
    ids: HashSet<BatchId>,
    messages: usize,
    group: String,
    reconnects: u64,
    ended: bool,
    /// Events that the reader has not received yet.
    error: Option<ClientError>,
    reader: Option<Waker>,
}

impl Inbox {
    /// For a subscription with this credit that joined this group.
    pub(super) fn new(credit: u32, group: String) -> Inbox {
        let credit = usize::try_from(credit).unwrap_or(usize::MAX);
        let state = State {
            batches: VecDeque::new(),
            ids: HashSet::new(),
            messages: 0,
            group,
            reconnects: 0,
            ended: false,
            error: None,
            reader: None,
        };
        Inbox { credit, state: Mutex::new(state), acknowledged: Acknowledged::default() }
    }

    /// The group joined.
    pub(super) fn group(&self) -> String {
        self.state().group.clone()
    }

    /// How often the subscription was renewed on a new connection.
    pub(super) fn reconnects(&self) -> u64 {
        self.state().reconnects
    }

    /// The reader acknowledges batches. Copies of them that it has not read are dropped.
    pub(super) fn acknowledge<'a>(&'a self, batches: &'a [BatchId]) -> Asking<'a> {
        let asking = self.acknowledged.ask(batches);
        let mut state = self.state();
        for batch in batches {
            state.drop_copy(*batch);
        }
        asking
    }

    /// The batches whose acknowledgement is to be repeated.
    pub(super) fn unanswered(&self) -> Vec<BatchId> {
        self.acknowledged.unanswered()
    }

    /// The server says that these are settled.
    pub(super) fn settled(&self, batches: &[BatchId]) {
        self.acknowledged.settled(batches);
    }

    /// A batch arrived.
    #[must_use]
    pub(super) fn deliver(&self, batch: TimeoutBatch) -> Arrived {
        let mut state = self.state();
        match self.acknowledged.status(batch.id) {
            None => {}
            Some(Status::Asked) => return Arrived::Acknowledged,
            Some(Status::Unanswered) => return Arrived::Unanswered,
        }
        if !state.ids.insert(batch.id) {
            let messages = batch.messages.len();
            let copy = state.batches.iter_mut().find(|copy| copy.id == batch.id);
            let before = std::mem::replace(copy.expect("its id is known, so it is here"), batch);
            // Not always as many: a Redis that failed over may have decided the tick again.
            state.messages = state.messages - before.messages.len() + messages;
            return Arrived::Kept;
        }
        if state.messages >= self.credit {
            state.ids.remove(&batch.id);
            return Arrived::NoRoom;
        }
        state.messages += batch.messages.len();
        state.batches.push_back(batch);
        let reader = state.reader.take();
        drop(state);
        wake(reader);
        Arrived::Kept
    }

    /// The subscription was renewed on a new connection.
    pub(super) fn renewed(&self, subscribed: Subscribed) {
        let mut state = self.state();
        state.reconnects += 1;
        state.group = subscribed.group;
    }

    /// Nothing more will come; the reader learns why, unless it wanted that itself. The first end counts.
    pub(super) fn end(&self, error: Option<ClientError>) {
        let mut state = self.state();
        if !state.ended {
            state.ended = true;
            state.error = error;
        }
        let reader = state.reader.take();
        drop(state);
        wake(reader);
    }

    /// The next batch, or the end.
    pub(super) fn poll(&self, context: &Context<'_>) -> Poll<Option<Result<TimeoutBatch, ClientError>>> {
        let mut state = self.state();
        if let Some(batch) = state.pop() {
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pop(&mut self) -> Option<TimeoutBatch> {
        let batch = self.batches.pop_front()?;
        self.ids.remove(&batch.id);
        self.messages -= batch.messages.len();
        Some(batch)
    }

    fn drop_copy(&mut self, batch: BatchId) {
        if self.ids.remove(&batch)
            && let Some(place) = self.batches.iter().position(|copy| copy.id == batch)
            && let Some(copy) = self.batches.remove(place)
        {
            self.messages -= copy.messages.len();
        }
    }
}

fn wake(reader: Option<Waker>) {
    if let Some(reader) = reader {
        reader.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::batch::{TickCounts, TimedOut};
    use crate::core::message::Message;
    use crate::core::tick::Tick;

    fn batch(seq: u32, messages: u64, delivery_count: u32) -> TimeoutBatch {
        let id = BatchId { tick: Tick(1), epoch: 1, ring: 0, seq };
        let timed_out = |msg_id| TimedOut { message: Message::new(msg_id, 0), attempt: 1 };
        let messages = (0..messages).map(timed_out).collect();
        TimeoutBatch { id, delivery_count, age_ms: 0, counts: TickCounts::default(), last: true, messages }
    }

    fn read_all(inbox: &Inbox) -> Vec<(u32, u32)> {
        let context = Context::from_waker(Waker::noop());
        let mut read = Vec::new();
        while let Poll::Ready(Some(Ok(batch))) = inbox.poll(&context) {
            read.push((batch.id.seq, batch.delivery_count));
        }
        read
    }

    #[test]
    fn a_copy_replaces_what_lies_unread_and_nothing_exceeds_the_credit_by_more_than_a_batch() {
        let inbox = Inbox::new(10, "default".to_owned());
        assert_eq!(inbox.deliver(batch(0, 5, 1)), Arrived::Kept);
        assert_eq!(inbox.deliver(batch(1, 4, 1)), Arrived::Kept);
        assert_eq!(inbox.deliver(batch(0, 5, 2)), Arrived::Kept);
        assert_eq!(inbox.deliver(batch(2, 5, 1)), Arrived::Kept);
        assert_eq!(inbox.deliver(batch(3, 1, 1)), Arrived::NoRoom);
        assert_eq!(read_all(&inbox), [(0, 2), (1, 1), (2, 1)], "the last did not fit");
        assert_eq!(inbox.deliver(batch(3, 1, 2)), Arrived::Kept);
        assert_eq!(read_all(&inbox), [(3, 2)], "and fits when it comes again");
    }

    #[test]
    fn a_copy_with_more_or_fewer_messages_takes_as_much_of_the_credit_as_it_has() {
        let inbox = Inbox::new(10, "default".to_owned());
        for (before, after) in [(1, 25), (25, 1)] {
            assert_eq!(inbox.deliver(batch(0, before, 1)), Arrived::Kept);
            assert_eq!(inbox.deliver(batch(0, after, 2)), Arrived::Kept);
            assert_eq!(inbox.deliver(batch(1, 5, 1)) == Arrived::Kept, after == 1);
            let fits = if after == 1 { &[(0, 2), (1, 1)][..] } else { &[(0, 2)] };
            assert_eq!(read_all(&inbox), fits);
        }
        assert_eq!(inbox.deliver(batch(2, 9, 1)), Arrived::Kept);
        assert_eq!(inbox.deliver(batch(3, 1, 1)), Arrived::Kept);
        assert_eq!(inbox.deliver(batch(4, 1, 1)), Arrived::NoRoom);
        assert_eq!(read_all(&inbox), [(2, 1), (3, 1)], "all of the credit is there again");
    }

    #[test]
    fn what_was_acknowledged_is_not_read_again_until_it_is_settled() {
        let inbox = Inbox::new(10, "default".to_owned());
        assert_eq!(inbox.deliver(batch(0, 9, 1)), Arrived::Kept);
        assert_eq!(read_all(&inbox), [(0, 1)]);
        assert_eq!(inbox.deliver(batch(0, 9, 2)), Arrived::Kept, "its reader may be slow");
        let ids = [batch(0, 9, 1).id];
        let asking = inbox.acknowledge(&ids);
        assert_eq!(read_all(&inbox), [], "the copy is of no use any more");
        assert_eq!(inbox.deliver(batch(0, 9, 3)), Arrived::Acknowledged);
        drop(asking);
        assert_eq!(inbox.deliver(batch(0, 9, 4)), Arrived::Unanswered);
        assert_eq!(inbox.unanswered(), ids);
        inbox.settled(&ids);
        assert_eq!(inbox.deliver(batch(0, 9, 5)), Arrived::Kept);
        assert_eq!(inbox.deliver(batch(1, 9, 1)), Arrived::Kept, "all of the credit was there");
        assert_eq!(read_all(&inbox), [(0, 5), (1, 1)]);
    }

    #[test]
    fn what_lies_unread_comes_before_the_end() {
        let inbox = Inbox::new(10, "default".to_owned());
        assert_eq!(inbox.deliver(batch(0, 1, 1)), Arrived::Kept);
        inbox.end(Some(ClientError::InvalidRequest("wrong".to_owned())));
        inbox.end(None);
        assert_eq!(read_all(&inbox), [(0, 1)]);
        let context = Context::from_waker(Waker::noop());
        // read_all has taken the error.
        assert!(matches!(inbox.poll(&context), Poll::Ready(None)));
    }
}
