//! Where connections leave their requests for the task that carries them to Redis.
//!
//! Requests lie in one row, their messages in another; the task takes both rows in exchange for empty ones, so that
//! neither side allocates for a request. It is woken only when as much is there as it waits for.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::core::completions::Completions;
use crate::core::message::Message;
use crate::core::request_batch::{Request, RequestBatch};
use crate::core::ring::ConnectionId;
use crate::redis::batching::request::Asked;

/// Something left in the inbox.
pub(crate) enum Item {
    /// A frame, with so many of the messages.
    Frame(Asked, usize),
    /// Told once everything before it is answered or refused.
    Barrier(oneshot::Sender<()>),
}

/// Requests in order, and their messages in the same order.
#[derive(Default)]
pub(crate) struct Letters {
    items: Vec<Item>,
    messages: Vec<Message>,
}

impl Letters {
    /// Takes every item out, with its messages.
    pub(crate) fn take_each(&mut self, mut with: impl FnMut(Item, &[Message])) {
        let mut rest = self.messages.as_slice();
        for item in self.items.drain(..) {
            let count = if let Item::Frame(_, count) = &item { *count } else { 0 };
            let (own, others) = rest.split_at(count);
            rest = others;
            with(item, own);
        }
        self.messages.clear();
    }
}

#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    letters: Letters,
    waker: Option<Waker>,
    /// Whether there is a barrier among the letters, or a frame without messages: neither waits for more to come.
    barred: bool,
    /// Whether nobody takes anything out any more.
    closed: bool,
    /// The messages that the task waits for.
    enough: usize,
}

impl Inbox {
    /// Leaves the requests of a batch that are not refused.
    pub(crate) fn leave(&self, batch: &RequestBatch, connection: ConnectionId, completions: &Arc<Completions>) {
        let mut state = self.state.lock();
        for request in batch.requests.iter().filter(|request| request.refusal.is_none()) {
            let Request { id, operation, .. } = request;
            let messages = &batch.messages()[request.range()];
            let frame = Asked::new(*operation, connection, *id, messages.len(), completions);
            if state.closed {
                // Dropped, it is refused.
                continue;
            }
            state.barred |= messages.is_empty();
            state.letters.items.push(Item::Frame(frame, messages.len()));
            state.letters.messages.extend_from_slice(messages);
        }
        let waker = if state.has_enough() { state.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Leaves a barrier.
    pub(crate) fn bar(&self, told: oneshot::Sender<()>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        state.letters.items.push(Item::Barrier(told));
        state.barred = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes what is there, in exchange for letters that were read.
    pub(crate) fn take(&self, read: &mut Letters) {
        debug_assert!(read.items.is_empty(), "what was taken before is lost");
        let mut state = self.state.lock();
        mem::swap(&mut state.letters, read);
        state.barred = false;
    }

    /// Nothing is taken out any more: what is in it, and what comes, is refused.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let letters = mem::take(&mut state.letters);
        drop(state);
        drop(letters);
    }

    /// Ready when at least so many messages wait, or a barrier does.
    pub(crate) fn poll(&self, context: &mut Context<'_>, enough: usize) -> Poll<()> {
        let mut state = self.state.lock();
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
        self.barred || !self.letters.items.is_empty() && self.letters.messages.len() >= self.enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::refusal::Reason;
    use crate::core::request_batch::Operation;

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
        let (inbox, completions, mut letters) = (Inbox::default(), Arc::default(), Letters::default());
        inbox.leave(&batch(&[1, 2]), ConnectionId::default(), &completions);
        assert!(is_ready(&inbox, 2) && !is_ready(&inbox, 3));
        let (told, _passed) = oneshot::channel();
        inbox.bar(told);
        assert!(is_ready(&inbox, 3), "a barrier is enough");
        inbox.leave(&batch(&[3]), ConnectionId::default(), &completions);
        inbox.take(&mut letters);
        assert!(!is_ready(&inbox, 0), "nothing is left");
        let mut seen = Vec::new();
        letters.take_each(|item, messages| {
            let is_frame = matches!(item, Item::Frame(..));
            seen.push((is_frame, messages.iter().map(|message| message.msg_id.0).collect::<Vec<_>>()));
        });
        assert_eq!(seen, [(true, vec![1]), (true, vec![2]), (false, vec![]), (true, vec![3])]);
    }

    #[test]
    fn what_nobody_will_take_out_is_refused() {
        let (inbox, completions, mut refused) = (Inbox::default(), Arc::default(), RequestBatch::default());
        inbox.leave(&batch(&[1]), ConnectionId::default(), &completions);
        let (told, mut passed) = oneshot::channel();
        inbox.bar(told);
        inbox.close();
        assert_eq!(passed.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        inbox.leave(&batch(&[2]), ConnectionId::default(), &completions);
        assert!(completions.poll(&mut Context::from_waker(Waker::noop()), &mut refused).is_ready());
        let reasons: Vec<_> = refused
            .requests
            .iter()
            .map(|request| (request.id, request.refusal.as_ref().map(|refusal| refusal.reason)))
            .collect();
        assert_eq!(reasons, [(1, Some(Reason::StoreAway)), (2, Some(Reason::StoreAway))]);
    }
}
