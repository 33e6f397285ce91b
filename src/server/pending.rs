//! Requests of one connection that wait for the store.

use std::pin::Pin;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

/// Requests beyond which a connection is not read from.
const MAX_REQUESTS: usize = 1_024;

/// Messages in them beyond which it is not read from either: few frames can carry many.
const MAX_MESSAGES: usize = 262_144;

type Request<T> = Pin<Box<dyn Future<Output = (usize, T)> + Send>>;

/// Requests that wait, and how many messages they carry.
pub(super) struct Pending<T> {
    requests: FuturesUnordered<Request<T>>,
    messages: usize,
}

impl<T> Pending<T> {
    pub(super) fn new() -> Pending<T> {
        Pending { requests: FuturesUnordered::new(), messages: 0 }
    }

    /// A request of so many messages has to wait.
    pub(super) fn push(&mut self, messages: usize, done: impl Future<Output = T> + Send + 'static) {
        self.messages += messages;
        self.requests.push(Box::pin(async move { (messages, done.await) }));
    }

    /// The next that need not wait any more; `None` at once if there is none. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<T> {
        let (messages, done) = self.requests.next().await?;
        self.messages -= messages;
        Some(done)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether there is room for more requests.
    pub(super) fn has_room(&self) -> bool {
        self.requests.len() < MAX_REQUESTS && self.has_room_for_messages()
    }

    /// Whether there is room for more messages, however many requests there are.
    pub(super) fn has_room_for_messages(&self) -> bool {
        self.messages <= MAX_MESSAGES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn there_is_room_until_the_requests_or_their_messages_are_many() {
        let mut pending = Pending::new();
        for _ in 0..8 {
            assert!(pending.has_room());
            pending.push(MAX_MESSAGES / 8, async {});
        }
        assert!(pending.has_room_for_messages(), "as many as may wait");
        pending.push(1, async {});
        assert!(!pending.has_room() && !pending.has_room_for_messages());
        while pending.next().await.is_some() {}
        assert!(pending.is_empty() && pending.has_room());
        for _ in 0..MAX_REQUESTS {
            assert!(pending.has_room());
            pending.push(0, async {});
        }
        assert!(!pending.has_room() && pending.has_room_for_messages());
    }
}
