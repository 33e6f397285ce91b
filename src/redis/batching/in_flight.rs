//! Sends requests on one connection in order, and waits for the first answer.

use std::collections::VecDeque;
use std::pin::Pin;

use futures_util::future::{BoxFuture, MaybeDone, maybe_done};
use futures_util::poll;

/// The exchanges without an answer, in order: the sent value, and the future of its answer.
pub(crate) type InFlight<T, A> = VecDeque<(T, MaybeDone<BoxFuture<'static, A>>)>;

/// Sends `sent`. When this returns, the exchange has its place on the connection, or in the queue for such a place.
pub(crate) async fn send<T, A>(
    in_flight: &mut InFlight<T, A>,
    sent: T,
    exchange: impl Future<Output = A> + Send + 'static,
) {
    // An earlier exchange that got a place a moment ago has not used it, and this one must not be first.
    for (_, earlier) in &mut *in_flight {
        let _ = poll!(earlier);
    }
    // The one poll below takes the place. If this task had used up its budget, that would be put off, and the next
    // exchange would be first.
    let mut exchange: MaybeDone<BoxFuture<'static, A>> =
        maybe_done(Box::pin(tokio::task::unconstrained(exchange)));
    let _ = poll!(&mut exchange);
    in_flight.push_back((sent, exchange));
}

/// The answer to the first, which stays in the queue. To be called once for each.
pub(crate) async fn first_answer<T, A>(in_flight: &mut InFlight<T, A>) -> A {
    let Some((_, answer)) = in_flight.front_mut() else { return std::future::pending().await };
    (&mut *answer).await;
    Pin::new(answer).take_output().expect("it is done, and was not taken before")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn an_exchange_does_not_overtake_an_earlier_one_that_waits() {
        let (places, taken) = (Arc::new(Semaphore::new(0)), Arc::new(Mutex::new(Vec::new())));
        let exchange = |number: u32| {
            let (places, taken) = (Arc::clone(&places), Arc::clone(&taken));
            async move {
                places.acquire().await.unwrap().forget();
                taken.lock().push(number);
                number
            }
        };
        let mut in_flight = InFlight::new();
        send(&mut in_flight, 'a', exchange(1)).await;
        assert!(taken.lock().is_empty());
        // One is for the first, which has not been woken yet, and one is free.
        places.add_permits(2);
        send(&mut in_flight, 'b', exchange(2)).await;
        assert_eq!(*taken.lock(), [1, 2]);
        assert_eq!((first_answer(&mut in_flight).await, in_flight.pop_front().unwrap().0), (1, 'a'));
        assert_eq!((first_answer(&mut in_flight).await, in_flight.front().unwrap().0), (2, 'b'));
        assert_eq!(in_flight.len(), 1);
    }
}
