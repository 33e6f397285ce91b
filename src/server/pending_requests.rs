//! Counts the requests of one connection that wait for the store, and limits them.
//!
//! A connection with too many waiting requests is not read, so that no client sends requests faster than the store
//! answers. While the store is unreachable, waiting Acks (DelMsg) do not count, so that further Acks are still read.
//! The store then holds the Acks of all connections up to its own limit. Above this limit, it refuses further Acks at
//! once. It refuses all adds at once.
//!
//! The memory of these requests is charged to the connection.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::core::{BatchId, Message, Operation, Refusal, Request, RequestBatch, Requester};
use crate::metrics::Metrics;
use crate::process::panics::uncontained;
use crate::protocol::frame;

/// The number of waiting requests at which a connection is no longer read.
pub(super) const MAX_REQUESTS: usize = 1_024;

/// The maximum number of messages in the waiting requests of a connection. Above it, the connection is not read. This
/// limit is needed in addition to [`MAX_REQUESTS`], because a few frames can carry many messages. A request without
/// messages counts as one message, so that this limit also bounds the number of requests. This is necessary while the
/// session reads for the read barrier, before a tick expires: then [`MAX_REQUESTS`] does not apply.
const MAX_MESSAGES: usize = 16_384;

/// The number of messages with which a connection can exceed [`MAX_MESSAGES`] while the store is reachable: with those of
/// one more request.
const MOST_MESSAGES: usize = MAX_MESSAGES + frame::MAX_MESSAGES;

/// The memory of a waiting request beside its messages: its future, and its places in queues.
const REQUEST_BYTES: usize = 512;

/// The memory of a message or a batch id of a waiting request. While a store has a message, it keeps its outcome too.
const MESSAGE_BYTES: usize = 32;

const _: () = assert!(size_of::<BatchId>() <= MESSAGE_BYTES && size_of::<Message>() < MESSAGE_BYTES);

type RequestFuture<C> = Pin<Box<dyn Future<Output = (Weight, C)> + Send>>;

/// The number of messages that are counted for a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// The messages of a DelMsg, which carries Acks.
    Acks(usize),
    /// The messages of an add or a GetMsg, or the batches of a BatchAck; 0 for other requests.
    Other(usize),
    /// The same of a request that its protocol has queued and not begun.
    Queued(usize),
}

impl Weight {
    pub(super) fn of(request: &Request) -> Weight {
        let messages = request.range().len();
        match request.operation {
            Operation::Add { .. } => Weight::Other(messages),
            Operation::Del { .. } => Weight::Acks(messages),
        }
    }
}

/// The result of a request that waited for the store.
pub(super) trait Completion {
    /// Returns the refusal, if the store refused the request.
    fn refusal(&self) -> Option<&Refusal>;
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    requests: usize,
    messages: usize,
}

/// The requests that wait, and their counts.
pub(super) struct PendingRequests<C> {
    requests: FuturesUnordered<RequestFuture<C>>,
    acks: Count,
    others: Count,
    queued: Count,
}

impl<C> Default for PendingRequests<C> {
    fn default() -> PendingRequests<C> {
        let [acks, others, queued] = [Count::default(); 3];
        PendingRequests { requests: FuturesUnordered::new(), acks, others, queued }
    }
}

impl<C: Completion + Send + 'static> PendingRequests<C> {
    /// Counts a request that was submitted to the rings or is queued. The caller must call [`PendingRequests::end`] when
    /// the request is complete, or is no longer queued.
    pub(super) fn begin(&mut self, weight: Weight) {
        let (count, messages) = self.count(weight);
        count.requests += 1;
        count.messages += messages;
    }

    /// Stops counting a request of [`PendingRequests::begin`], because it is complete.
    pub(super) fn end(&mut self, weight: Weight) {
        let (count, messages) = self.count(weight);
        count.requests -= 1;
        count.messages -= messages;
    }

    /// Adds the future of a request, and counts the request until the future completes.
    pub(super) fn push(&mut self, weight: Weight, request: impl Future<Output = C> + Send + 'static) {
        self.begin(weight);
        let request = uncontained(request);
        self.requests.push(Box::pin(async move { (weight, request.await) }));
    }

    /// Waits until a request that was added by [`PendingRequests::push`] is complete, and returns it. Returns `None` at
    /// once if no such request waits. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<C> {
        let (weight, completed) = self.requests.next().await?;
        self.end(weight);
        Some(completed)
    }

    fn count(&mut self, weight: Weight) -> (&mut Count, usize) {
        match weight {
            Weight::Acks(messages) => (&mut self.acks, messages.max(1)),
            Weight::Other(messages) => (&mut self.others, messages.max(1)),
            Weight::Queued(messages) => (&mut self.queued, messages.max(1)),
        }
    }

    /// Returns the memory of all these requests, in bytes. Acks beyond the bounds of a connection wait for a store that
    /// is unreachable, and have a limit of their own (`--max-held-acks`).
    pub(super) fn bytes(&self) -> usize {
        let Count { requests, messages } = self.acks;
        let acks = Count { requests: requests.min(MAX_REQUESTS), messages: messages.min(MOST_MESSAGES) };
        let all = [acks, self.others, self.queued];
        all.iter().map(|count| count.requests * REQUEST_BYTES + count.messages * MESSAGE_BYTES).sum()
    }

    /// Returns whether any request waits that was begun.
    pub(super) fn is_waiting(&self) -> bool {
        self.acks.requests + self.others.requests > 0
    }

    /// Returns whether another request may be read. `max_requests` is the limit for the number of waiting requests.
    /// Calls `store_is_up` only if the result depends on it.
    pub(super) fn has_room(&self, max_requests: usize, store_is_up: impl FnOnce() -> bool) -> bool {
        let is_within = |requests, messages| requests < max_requests && messages <= MAX_MESSAGES;
        let (requests, messages) =
            (self.others.requests + self.queued.requests, self.others.messages + self.queued.messages);
        is_within(requests + self.acks.requests, messages + self.acks.messages)
            || is_within(requests, messages) && !store_is_up()
    }

    /// Waits until the requests of a closed connection are complete, and counts their outcomes in the metrics.
    pub(super) async fn complete(mut self, mut requester: Requester, metrics: Arc<Metrics>) {
        let mut completed = RequestBatch::default();
        while self.is_waiting() {
            tokio::select! {
                () = poll_fn(|context| requester.poll(context, &mut completed)) => {
                    for request in &completed.requests {
                        self.end(Weight::of(request));
                        request.refusal.iter().for_each(|refusal| metrics.refusals.of(refusal.reason).inc());
                    }
                    metrics.count_requests(&completed);
                    completed.clear(0);
                }
                Some(completed) = self.next() => {
                    completed.refusal().iter().for_each(|refusal| metrics.refusals.of(refusal.reason).inc());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::native::Completed;
    use super::*;

    #[tokio::test]
    async fn there_is_room_until_the_requests_or_their_messages_are_many() {
        let mut pending = PendingRequests::default();
        for _ in 0..8 {
            assert!(pending.has_room(MAX_REQUESTS, || true));
            pending.push(Weight::Other(MAX_MESSAGES / 8), async { Completed::NotBegun });
        }
        assert!(pending.has_room(usize::MAX, || true), "the messages are at the limit, and not above it");
        pending.push(Weight::Acks(1), async { Completed::NotBegun });
        assert!(!pending.has_room(MAX_REQUESTS, || true) && !pending.has_room(usize::MAX, || true));
        while pending.next().await.is_some() {}
        assert!(!pending.is_waiting() && pending.has_room(MAX_REQUESTS, || true));
        for _ in 0..MAX_REQUESTS {
            assert!(pending.has_room(MAX_REQUESTS, || true));
            pending.push(Weight::Other(0), async { Completed::NotBegun });
        }
        assert!(!pending.has_room(MAX_REQUESTS, || true) && pending.has_room(usize::MAX, || true));
        assert!(!pending.has_room(MAX_REQUESTS, || false), "adds count whether the store is reachable or not");
        for _ in MAX_REQUESTS..=MAX_MESSAGES {
            assert!(pending.has_room(usize::MAX, || true));
            pending.push(Weight::Other(0), async { Completed::NotBegun });
        }
        assert!(!pending.has_room(usize::MAX, || true), "requests without messages are bounded, too");
    }

    #[tokio::test]
    async fn requests_that_are_completed_outside_of_the_queue_count_too() {
        let mut pending: PendingRequests<Completed> = PendingRequests::default();
        pending.begin(Weight::Acks(3));
        pending.begin(Weight::Other(MAX_MESSAGES + 1));
        assert!(pending.is_waiting() && !pending.has_room(MAX_REQUESTS, || true));
        pending.end(Weight::Other(MAX_MESSAGES + 1));
        assert!(pending.is_waiting() && pending.has_room(MAX_REQUESTS, || true));
        pending.end(Weight::Acks(3));
        assert!(!pending.is_waiting());
    }

    #[tokio::test]
    async fn acks_do_not_count_while_the_store_is_unreachable() {
        let mut pending = PendingRequests::default();
        for _ in 0..MAX_REQUESTS {
            pending.push(Weight::Acks(MAX_MESSAGES), async { Completed::NotBegun });
        }
        assert!(!pending.has_room(MAX_REQUESTS, || true) && !pending.has_room(usize::MAX, || true));
        assert!(pending.has_room(MAX_REQUESTS, || false) && pending.has_room(usize::MAX, || false));
        assert_eq!(pending.bytes(), MAX_REQUESTS * REQUEST_BYTES + MOST_MESSAGES * MESSAGE_BYTES);
        while pending.next().await.is_some() {}
        assert!(!pending.is_waiting() && pending.has_room(MAX_REQUESTS, || true));
    }
}
