//! Answers that come later: put by a ring, taken by the connection that asked.
//!
//! A connection has one of these for all that it asks, and takes whatever is there at once: however many requests
//! a ring answers together, the connection is woken once, and nothing is allocated for a request.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::burst::Burst;

/// What a connection asked for and is answered, until it takes it.
#[derive(Debug, Default)]
pub struct Answers {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    answered: Burst,
    /// Who waits for the next answer.
    waker: Option<Waker>,
}

impl Answers {
    /// Puts answers in. Returns whom to wake once all that come together are put.
    #[must_use]
    pub fn put(&self, write: impl FnOnce(&mut Burst)) -> Option<Waker> {
        let mut state = self.lock();
        write(&mut state.answered);
        state.waker.take()
    }

    /// Puts something in that belongs to answers which follow: nobody is woken.
    pub fn note(&self, write: impl FnOnce(&mut Burst)) {
        write(&mut self.lock().answered);
    }

    /// Takes what is there, in exchange for an empty burst; where nothing is there, whoever polls is woken later.
    pub fn poll(&self, context: &mut Context<'_>, taken: &mut Burst) -> Poll<()> {
        let mut state = self.lock();
        if state.answered.is_empty() {
            if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                state.waker = Some(context.waker().clone());
            }
            return Poll::Pending;
        }
        debug_assert!(taken.is_empty(), "what was taken before is lost");
        mem::swap(&mut state.answered, taken);
        Poll::Ready(())
    }

    /// Nothing that is done under the lock can leave it half done.
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
    use crate::core::burst::{Asks, Outcome};
    use crate::core::tick::Tick;

    #[derive(Default)]
    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn whoever_waits_is_woken_once_and_takes_all_that_is_there() {
        let (answers, woken, mut taken) = (Answers::default(), Arc::new(Woken::default()), Burst::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut context = Context::from_waker(&waker);
        assert!(answers.poll(&mut context, &mut taken).is_pending());
        for correlation in 1..=3 {
            let one = std::iter::once(Outcome::Acked);
            let put = |burst: &mut Burst| {
                burst.push_answered(correlation, Asks::Del { withdraw: false }, Tick(0), one);
            };
            if let Some(waker) = answers.put(put) {
                waker.wake();
            }
        }
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert!(answers.poll(&mut context, &mut taken).is_ready());
        let correlations: Vec<u32> = taken.requests.iter().map(|request| request.correlation).collect();
        assert_eq!((correlations, taken.outcomes()), (vec![1, 2, 3], &[Outcome::Acked; 3][..]));
        taken.clear(0);
        assert!(answers.poll(&mut context, &mut taken).is_pending(), "it was all of it");
    }
}
