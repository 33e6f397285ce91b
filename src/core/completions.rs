//! The completed requests of a connection. Rings put requests in, and the connection takes them out.
//!
//! A connection has one [`Completions`] and takes all completed requests at once. Requests that complete together wake
//! the connection only once. No request needs an allocation of its own.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::request_batch::RequestBatch;

/// The completed requests that the connection has not taken yet.
#[derive(Debug, Default)]
pub struct Completions {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    completed: RequestBatch,
    /// The waker of the connection. `None` if the connection does not wait.
    waker: Option<Waker>,
}

impl Completions {
    /// Calls `write` to append completed requests. Returns the waker of the connection, if the connection waits. The
    /// caller must wake the connection after the last `put` of requests that complete together.
    #[must_use]
    pub fn put(&self, write: impl FnOnce(&mut RequestBatch)) -> Option<Waker> {
        let mut state = self.lock();
        write(&mut state.completed);
        state.waker.take()
    }

    /// Calls `write` to add data, such as latencies, about requests that complete later. Wakes no connection.
    pub fn record(&self, write: impl FnOnce(&mut RequestBatch)) {
        write(&mut self.lock().completed);
    }

    /// Moves all completed requests into `taken`, which must be empty. If there are none, registers the waker of
    /// `context` and returns `Pending`.
    pub fn poll(&self, context: &mut Context<'_>, taken: &mut RequestBatch) -> Poll<()> {
        let mut state = self.lock();
        if state.completed.is_empty() {
            if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                state.waker = Some(context.waker().clone());
            }
            return Poll::Pending;
        }
        debug_assert!(taken.is_empty(), "the requests in it would be lost");
        mem::swap(&mut state.completed, taken);
        Poll::Ready(())
    }

    /// Locks the state. Ignores that the lock may be poisoned, because no code panics in the middle of a change.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;
    use crate::core::{Operation, Outcome, Tick};

    #[derive(Default)]
    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_waiting_connection_is_woken_once_and_takes_all_completed_requests() {
        let (completions, woken, mut taken) =
            (Completions::default(), Arc::new(Woken::default()), RequestBatch::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        assert!(completions.poll(&mut context, &mut taken).is_pending());
        for id in 1..=3 {
            let one = std::iter::once(Outcome::Acked);
            let put = |batch: &mut RequestBatch| {
                batch.push_completed(id, Operation::Del { withdraw: false }, Tick(0), one);
            };
            if let Some(waker) = completions.put(put) {
                waker.wake();
            }
        }
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert!(completions.poll(&mut context, &mut taken).is_ready());
        let ids: Vec<u64> = taken.requests.iter().map(|request| request.id).collect();
        assert_eq!((ids, taken.outcomes()), (vec![1, 2, 3], &[Outcome::Acked; 3][..]));
        taken.clear(0);
        assert!(completions.poll(&mut context, &mut taken).is_pending(), "the first poll took all requests");
    }
}
