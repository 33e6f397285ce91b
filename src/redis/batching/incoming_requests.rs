//! Passes the requests of all client connections to the task that sends them to Redis. That task later answers each
//! request: it completes or refuses the request.
//!
//! The requests wait in an [`Inbox`]. The task takes all of them at once. It is woken only when enough messages wait,
//! so that a script carries many messages, or when an item is urgent.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

use crate::core::{Completions, ConnectionId, Message, Operation, Outcome, Refusal, RequestBatch, Tick};
use crate::redis::connection::errors::refusal_while_unreachable;

/// A request without an answer: an add or a del of one or more messages. If the frame is dropped, it is refused.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) operation: Operation,
    pub(crate) connection: ConnectionId,
    pub(crate) messages: Box<[Message]>,
    /// Whether any part of the frame was sent to Redis.
    pub(crate) is_sent: bool,
    /// The deadline of the added messages, known after Redis has applied the first part of the frame.
    pub(crate) deadline: Tick,
    /// The outcomes of the messages that Redis has already answered, one letter of `apply.lua` for each. Used only if
    /// the frame needs more than one script.
    pub(crate) letters: Vec<u8>,
    id: u64,
    /// The place for the answer. `None` after the frame was answered.
    completions: Option<Arc<Completions>>,
}

impl Frame {
    pub(crate) fn new(
        operation: Operation,
        connection: ConnectionId,
        id: u64,
        messages: &[Message],
        completions: &Arc<Completions>,
    ) -> Frame {
        Frame {
            operation,
            connection,
            messages: messages.into(),
            is_sent: false,
            deadline: Tick(0),
            letters: Vec::new(),
            id,
            completions: Some(Arc::clone(completions)),
        }
    }

    pub(crate) fn is_add(&self) -> bool {
        self.operation.is_add()
    }

    /// Answers the frame with the outcomes of its messages. The parameter `letters` has the outcomes that are not yet
    /// in the field `letters`. `latencies` says how long each acknowledged message was in flight. Returns the
    /// waker of the connection, which the caller must wake.
    pub(crate) fn complete(mut self, letters: &[u8], latencies: impl Iterator<Item = Duration>) -> Option<Waker> {
        let outcomes = self.letters.iter().chain(letters).map(|letter| outcome(*letter));
        self.completions.take()?.put(|batch| {
            latencies.for_each(|latency| batch.ack_latency.record(latency, 1));
            batch.push_completed(self.id, self.operation, self.deadline, outcomes);
        })
    }

    /// Records how long each acknowledged message was in flight, for a frame that is not yet complete.
    pub(crate) fn record_latencies(&self, latencies: impl Iterator<Item = Duration>) {
        if let Some(completions) = &self.completions {
            completions.record(|batch| latencies.for_each(|latency| batch.ack_latency.record(latency, 1)));
        }
    }

    /// Answers the frame with a refusal. Returns the waker of the connection, which the caller must wake.
    pub(crate) fn refuse(&mut self, refusal: Refusal) -> Option<Waker> {
        let (id, operation, messages) = (self.id, self.operation, self.messages.len());
        self.completions.take()?.put(|batch| batch.push_refused(id, operation, messages, Arc::new(refusal)))
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if self.completions.is_some()
            && let Some(waker) = self.refuse(refusal_while_unreachable())
        {
            waker.wake();
        }
    }
}

fn outcome(letter: u8) -> Outcome {
    match letter {
        b'a' => Outcome::Added,
        b'r' => Outcome::Rearmed,
        b'k' => Outcome::Acked,
        b'l' | b'L' => Outcome::Late,
        b'w' => Outcome::Withdrawn,
        _ => Outcome::Unknown,
    }
}

/// An entry of the inbox.
pub(crate) enum Item {
    Frame(Frame),
    /// A marker between requests. The task sends to this channel when all earlier requests are answered or refused. If
    /// Redis becomes unreachable, the task drops the sender.
    Barrier(oneshot::Sender<()>),
}

/// The requests and barriers that the task has not yet taken, in order.
#[derive(Default)]
pub(crate) struct Inbox(Mutex<State>);

#[derive(Default)]
struct State {
    items: Vec<Item>,
    /// Number of messages in all items.
    messages: usize,
    waker: Option<Waker>,
    /// Whether there is a barrier, or a frame without messages. Then the task is woken at once.
    is_urgent: bool,
    /// Number of messages for which the task is woken, set by the last `poll`.
    enough: usize,
}

impl Inbox {
    /// Appends the requests of `batch`, except those that are already refused. `completions` gets the answers.
    pub(crate) fn push(&self, batch: &RequestBatch, connection: ConnectionId, completions: &Arc<Completions>) {
        let mut state = self.0.lock();
        for request in batch.requests.iter().filter(|request| request.refusal.is_none()) {
            let messages = &batch.messages()[request.range()];
            let frame = Frame::new(request.operation, connection, request.id, messages, completions);
            state.is_urgent |= messages.is_empty();
            state.messages += messages.len();
            state.items.push(Item::Frame(frame));
        }
        State::wake(state);
    }

    /// Appends a barrier.
    pub(crate) fn push_barrier(&self, passed: oneshot::Sender<()>) {
        let mut state = self.0.lock();
        state.items.push(Item::Barrier(passed));
        state.is_urgent = true;
        State::wake(state);
    }

    /// Moves all items to `taken`. The caller must pass an empty vector, whose memory the inbox then uses.
    pub(crate) fn take(&self, taken: &mut Vec<Item>) {
        debug_assert!(taken.is_empty(), "`taken` is not empty, and its items would be lost");
        let mut state = self.0.lock();
        mem::swap(&mut state.items, taken);
        (state.messages, state.is_urgent) = (0, false);
    }

    /// Returns ready if an item is urgent, or if there are items with at least `enough` messages together. Otherwise
    /// wakes the task as soon as this is true.
    pub(crate) fn poll(&self, context: &mut Context<'_>, enough: usize) -> Poll<()> {
        let mut state = self.0.lock();
        state.enough = enough;
        if state.has_enough() {
            return Poll::Ready(());
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            state.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

impl State {
    fn has_enough(&self) -> bool {
        self.is_urgent || !self.items.is_empty() && self.messages >= self.enough
    }

    /// Wakes the task if enough messages wait, or if an item is urgent. Releases the lock before, so that the woken
    /// task need not wait for it.
    fn wake(mut state: MutexGuard<'_, State>) {
        let waker = if state.has_enough() { state.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::Reason;

    const DEL: Operation = Operation::Del { withdraw: false };

    fn batch(ids: &[u64]) -> RequestBatch {
        let mut batch = RequestBatch::default();
        for id in ids {
            batch.push(*id, DEL, std::iter::once(Message::from(*id)));
        }
        batch
    }

    fn is_ready(inbox: &Inbox, enough: usize) -> bool {
        inbox.poll(&mut Context::from_waker(Waker::noop()), enough).is_ready()
    }

    #[test]
    fn requests_are_taken_in_order_with_their_messages() {
        let (inbox, completions, mut items) = (Inbox::default(), Arc::default(), Vec::new());
        inbox.push(&batch(&[1, 2]), ConnectionId::default(), &completions);
        assert!(is_ready(&inbox, 2) && !is_ready(&inbox, 3));
        let (told, _passed) = oneshot::channel();
        inbox.push_barrier(told);
        assert!(is_ready(&inbox, 3), "a barrier is urgent");
        inbox.push(&batch(&[3]), ConnectionId::default(), &completions);
        inbox.take(&mut items);
        assert!(!is_ready(&inbox, 0), "the inbox is empty");
        let seen: Vec<Option<Vec<u64>>> = items
            .iter()
            .map(|item| match item {
                Item::Frame(frame) => Some(frame.messages.iter().map(|message| message.msg_id.0).collect()),
                Item::Barrier(_) => None,
            })
            .collect();
        assert_eq!(seen, [Some(vec![1]), Some(vec![2]), None, Some(vec![3])]);
    }

    #[test]
    fn an_inbox_that_is_dropped_refuses_its_requests() {
        let (inbox, completions, mut refused) = (Inbox::default(), Arc::default(), RequestBatch::default());
        inbox.push(&batch(&[1, 2]), ConnectionId::default(), &completions);
        let (told, mut passed) = oneshot::channel();
        inbox.push_barrier(told);
        drop(inbox);
        assert_eq!(passed.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        assert!(completions.poll(&mut Context::from_waker(Waker::noop()), &mut refused).is_ready());
        let reasons: Vec<_> = refused
            .requests
            .iter()
            .map(|request| (request.id, request.refusal.as_ref().map(|refusal| refusal.reason)))
            .collect();
        assert_eq!(reasons, [(1, Some(Reason::StoreUnreachable)), (2, Some(Reason::StoreUnreachable))]);
    }
}
