//! What is on its way on one connection, in the order in which it was put there.

use std::collections::VecDeque;
use std::pin::Pin;

use futures_util::future::{MaybeDone, maybe_done};
use futures_util::poll;

type Exchange<A> = Pin<Box<dyn Future<Output = A> + Send>>;
type Sent<A> = Pin<Box<MaybeDone<Exchange<A>>>>;

/// Exchanges of which only the first is waited for; each with what it carries.
pub(crate) struct InFlight<C, A>(VecDeque<(C, Sent<A>)>);

impl<C, A> InFlight<C, A> {
    pub(crate) fn with_capacity(capacity: usize) -> InFlight<C, A> {
        InFlight(VecDeque::with_capacity(capacity))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Puts one on its way: when this returns it has its place on the connection, or in the row of those who wait for one.
    pub(crate) async fn push(&mut self, carried: C, exchange: impl Future<Output = A> + Send + 'static) {
        // One that was given a place a moment ago has not taken it, and this one must not come first.
        for (_, earlier) in &mut self.0 {
            let _ = poll!(earlier);
        }
        // Its place is taken in the one poll below. A budget that this task has used up would put that off, and the next
        // one would overtake it.
        let exchange: Exchange<A> = Box::pin(tokio::task::unconstrained(exchange));
        let mut sent = Box::pin(maybe_done(exchange));
        let _ = poll!(&mut sent);
        self.0.push_back((carried, sent));
    }

    /// The answer to the first, which stays until [`InFlight::pop`]. To be asked once for each.
    pub(crate) async fn first(&mut self) -> A {
        let Some((_, answer)) = self.0.front_mut() else { return std::future::pending().await };
        answer.as_mut().await;
        answer.as_mut().take_output().expect("it is done, and asked once")
    }

    /// What the first carries.
    pub(crate) fn front(&self) -> Option<&C> {
        self.0.front().map(|(carried, _)| carried)
    }

    /// What each of them carries.
    pub(crate) fn carried(&self) -> impl Iterator<Item = &C> {
        self.0.iter().map(|(carried, _)| carried)
    }

    pub(crate) fn pop(&mut self) -> Option<C> {
        self.0.pop_front().map(|(carried, _)| carried)
    }

    /// Waits for none of them any more.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = C> {
        self.0.drain(..).map(|(carried, _)| carried)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn none_takes_the_place_of_one_that_waits_for_it() {
        let (places, taken) = (Arc::new(Semaphore::new(0)), Arc::new(Mutex::new(Vec::new())));
        let exchange = |number: u32| {
            let (places, taken) = (Arc::clone(&places), Arc::clone(&taken));
            async move {
                places.acquire().await.unwrap().forget();
                taken.lock().push(number);
                number
            }
        };
        let mut flying = InFlight::with_capacity(2);
        flying.push('a', exchange(1)).await;
        assert!(taken.lock().is_empty());
        // One is for the first, which has not been woken yet, and one is free.
        places.add_permits(2);
        flying.push('b', exchange(2)).await;
        assert_eq!(*taken.lock(), [1, 2]);
        assert_eq!((flying.first().await, flying.pop()), (1, Some('a')));
        assert_eq!((flying.first().await, flying.front()), (2, Some(&'b')));
        assert_eq!(flying.take_all().collect::<Vec<char>>(), ['b']);
        assert!(flying.is_empty());
    }
}
