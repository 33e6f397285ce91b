//! Where connections leave their requests for the task that carries them to Redis.
//!
//! Requests lie in one row, their messages in another; the task takes both rows in exchange for empty ones, so that
//! neither side allocates for a request. It is woken only when as much is there as it waits for.

use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::request::Asked;
use crate::core::answers::Answers;
use crate::core::burst::{Burst, Request};
use crate::core::message::Message;

/// Something left in the inbox.
pub(super) enum Item {
    /// A frame, with so many of the messages.
    Frame(Asked, usize),
    /// Told once everything before it is answered or refused.
    Barrier(oneshot::Sender<()>),
}

/// Requests in order, and their messages in the same order.
#[derive(Default)]
pub(super) struct Letters {
    items: Vec<Item>,
    messages: Vec<Message>,
}

impl Letters {
    /// Takes every item out, with its messages.
    pub(super) fn take_each(&mut self, mut with: impl FnMut(Item, &[Message])) {
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
pub(super) struct Inbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    letters: Letters,
    waker: Option<Waker>,
    /// Whether there is a barrier among the letters.
    barred: bool,
    /// The messages that the task waits for.
    enough: usize,
}

impl Inbox {
    /// Leaves the requests of a burst that are not refused.
    pub(super) fn leave(&self, burst: &Burst, answers: &Arc<Answers>) {
        let mut state = self.state.lock();
        for request in burst.requests.iter().filter(|request| request.refusal.is_none()) {
            let Request { correlation, asks, .. } = request;
            let messages = &burst.messages()[request.range()];
            let asked = Asked::new(*asks, *correlation, messages.len(), answers);
            state.letters.items.push(Item::Frame(asked, messages.len()));
            state.letters.messages.extend_from_slice(messages);
        }
        let waker = if state.has_enough() { state.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Leaves a barrier.
    pub(super) fn bar(&self, told: oneshot::Sender<()>) {
        let mut state = self.state.lock();
        state.letters.items.push(Item::Barrier(told));
        state.barred = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes what is there, in exchange for letters that were read.
    pub(super) fn take(&self, read: &mut Letters) {
        debug_assert!(read.items.is_empty(), "what was taken before is lost");
        let mut state = self.state.lock();
        mem::swap(&mut state.letters, read);
        state.barred = false;
    }

    /// Ready when at least so many messages wait, or a barrier does.
    pub(super) fn poll(&self, context: &mut Context<'_>, enough: usize) -> Poll<()> {
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
