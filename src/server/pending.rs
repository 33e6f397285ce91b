//! Requests of one connection that wait for the store.
//!
//! A connection with too many is not read from, so that nobody asks faster than the store answers. While the store
//! is away that would make it deaf for as long: then acknowledgements do not count here. The store itself bounds how
//! many it holds, over all connections, and refuses the rest, as it refuses adds, at once.

use std::pin::Pin;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::process::panics::uncontained;

/// Requests beyond which a connection is not read from.
const MAX_REQUESTS: usize = 1_024;

/// Messages in them beyond which it is not read from either: few frames can carry many. A request without messages counts
/// as one, for before a decision this is the only bound.
const MAX_MESSAGES: usize = 16_384;

type Request<T> = Pin<Box<dyn Future<Output = (Load, T)> + Send>>;

/// What a request that waits counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Load {
    /// Acknowledgements of so many messages.
    Acks(usize),
    /// Anything else, with so many messages.
    Other(usize),
}

/// Requests, and the messages in them.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    requests: usize,
    messages: usize,
}

/// Requests that wait, and how many messages they carry.
pub(super) struct Pending<T> {
    requests: FuturesUnordered<Request<T>>,
    acks: Sum,
    others: Sum,
}

impl<T: 'static> Pending<T> {
    pub(super) fn new() -> Pending<T> {
        Pending { requests: FuturesUnordered::new(), acks: Sum::default(), others: Sum::default() }
    }

    /// A request has to wait whose answer comes elsewhere.
    pub(super) fn begin(&mut self, load: Load) {
        let (sum, messages) = self.sum_of(load);
        sum.requests += 1;
        sum.messages += messages;
    }

    /// A request need not wait any more.
    pub(super) fn end(&mut self, load: Load) {
        let (sum, messages) = self.sum_of(load);
        sum.requests -= 1;
        sum.messages -= messages;
    }

    /// A request has to wait.
    pub(super) fn push(&mut self, load: Load, done: impl Future<Output = T> + Send + 'static) {
        self.begin(load);
        let done = uncontained(done);
        self.requests.push(Box::pin(async move { (load, done.await) }));
    }

    /// The next that need not wait any more; `None` at once if there is none. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<T> {
        let (load, done) = self.requests.next().await?;
        self.end(load);
        Some(done)
    }

    fn sum_of(&mut self, load: Load) -> (&mut Sum, usize) {
        match load {
            Load::Acks(messages) => (&mut self.acks, messages.max(1)),
            Load::Other(messages) => (&mut self.others, messages.max(1)),
        }
    }

    /// Whether none of those waits whose answer comes from here.
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether any request waits, wherever its answer comes from.
    pub(super) fn is_waiting(&self) -> bool {
        self.acks.requests + self.others.requests > 0
    }

    /// Whether there is room for more requests. Acknowledgements take none while the store is away, which is asked only
    /// where it matters.
    pub(super) fn has_room(&self, store_is_up: impl FnOnce() -> bool) -> bool {
        self.fits(store_is_up, |sum| sum.requests < MAX_REQUESTS && sum.messages <= MAX_MESSAGES)
    }

    /// Whether there is room for more messages, however many requests there are.
    pub(super) fn has_room_for_messages(&self, store_is_up: impl FnOnce() -> bool) -> bool {
        self.fits(store_is_up, |sum| sum.messages <= MAX_MESSAGES)
    }

    fn fits(&self, store_is_up: impl FnOnce() -> bool, fits: impl Fn(&Sum) -> bool) -> bool {
        let requests = self.others.requests + self.acks.requests;
        let messages = self.others.messages + self.acks.messages;
        fits(&Sum { requests, messages }) || fits(&self.others) && !store_is_up()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn there_is_room_until_the_requests_or_their_messages_are_many() {
        let mut pending = Pending::new();
        for _ in 0..8 {
            assert!(pending.has_room(|| true));
            pending.push(Load::Other(MAX_MESSAGES / 8), async {});
        }
        assert!(pending.has_room_for_messages(|| true), "as many as may wait");
        pending.push(Load::Acks(1), async {});
        assert!(!pending.has_room(|| true) && !pending.has_room_for_messages(|| true));
        while pending.next().await.is_some() {}
        assert!(pending.is_empty() && pending.has_room(|| true));
        for _ in 0..MAX_REQUESTS {
            assert!(pending.has_room(|| true));
            pending.push(Load::Other(0), async {});
        }
        assert!(!pending.has_room(|| true) && pending.has_room_for_messages(|| true));
        assert!(
            !pending.has_room(|| false),
            "what is no acknowledgement counts whether the store is there or not"
        );
        for _ in MAX_REQUESTS..=MAX_MESSAGES {
            assert!(pending.has_room_for_messages(|| true));
            pending.push(Load::Other(0), async {});
        }
        assert!(!pending.has_room_for_messages(|| true), "requests without messages are bounded, too");
    }

    #[tokio::test]
    async fn what_is_answered_elsewhere_counts_as_well() {
        let mut pending = Pending::<()>::new();
        pending.begin(Load::Acks(3));
        pending.begin(Load::Other(MAX_MESSAGES + 1));
        assert!(pending.is_empty() && pending.is_waiting() && !pending.has_room(|| true));
        pending.end(Load::Other(MAX_MESSAGES + 1));
        assert!(pending.is_waiting() && pending.has_room(|| true));
        pending.end(Load::Acks(3));
        assert!(!pending.is_waiting());
    }

    #[tokio::test]
    async fn acknowledgements_make_no_connection_deaf_while_the_store_is_away() {
        let mut pending = Pending::new();
        for _ in 0..MAX_REQUESTS {
            pending.push(Load::Acks(MAX_MESSAGES), async {});
        }
        assert!(!pending.has_room(|| true) && !pending.has_room_for_messages(|| true));
        assert!(pending.has_room(|| false) && pending.has_room_for_messages(|| false));
        while pending.next().await.is_some() {}
        assert!(pending.is_empty() && pending.has_room(|| true));
    }
}
