//! Counts and bounds the connections of a listener that are not admitted yet. If there are too many, closes the oldest of
//! the source that has the most. So a source that floods the listener closes its own connections.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

use super::throttle::Source;

/// The unauthenticated connections of one listener.
#[derive(Debug)]
pub(super) struct Unauthenticated {
    max: usize,
    /// The task of each connection by its key, so by source and then in the order of arrival.
    tasks: Mutex<BTreeMap<Key, AbortHandle>>,
}

/// The source of a connection and its number.
type Key = (Source, u64);

/// The place of a connection among the unauthenticated ones. Dropping this value frees the place.
#[derive(Debug)]
pub(super) struct Place {
    unauthenticated: Arc<Unauthenticated>,
    key: Key,
}

impl Unauthenticated {
    pub(super) fn new(max: usize) -> Arc<Unauthenticated> {
        Arc::new(Unauthenticated { max, tasks: Mutex::default() })
    }

    pub(super) fn count(&self) -> usize {
        self.tasks.lock().len()
    }

    /// Takes a place for a connection from `source` whose task is started by `spawn`. If all places are taken, closes
    /// another connection. Returns whether it closed one.
    pub(super) fn add(self: &Arc<Self>, source: Source, spawn: impl FnOnce(Place) -> AbortHandle) -> bool {
        /// The number of the last connection of all listeners.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let is_full = self.count() >= self.max;
        if is_full {
            self.close_one();
        }
        let key = (source, LAST.fetch_add(1, Ordering::Relaxed));
        // The lock is held until the handle is stored, so the task cannot free its place before that.
        let mut tasks = self.tasks.lock();
        tasks.insert(key, spawn(Place { unauthenticated: Arc::clone(self), key }));
        is_full
    }

    /// Returns the number of connections of the source that has the most, and its oldest connection. Of equal sources,
    /// this is the one with the oldest. Results of several listeners can be compared.
    pub(super) fn most(&self) -> Option<(usize, Reverse<u64>, Source)> {
        let tasks = self.tasks.lock();
        let keys: Vec<Key> = tasks.keys().copied().collect();
        let sources = keys.chunk_by(|one, next| one.0 == next.0);
        sources.map(|keys| (keys.len(), Reverse(keys[0].1), keys[0].0)).max()
    }

    /// Closes the oldest connection of the source that has the most, if there is one.
    pub(super) fn close_one(&self) {
        let Some((_, Reverse(number), source)) = self.most() else { return };
        if let Some(task) = self.tasks.lock().remove(&(source, number)) {
            task.abort();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.unauthenticated.tasks.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn spawn(place: Place) -> AbortHandle {
        let task = async move {
            let _place: Place = place;
            pending::<()>().await;
        };
        tokio::spawn(task).abort_handle()
    }

    fn sources(unauthenticated: &Unauthenticated) -> Vec<Source> {
        unauthenticated.tasks.lock().keys().map(|(source, _)| *source).collect()
    }

    #[tokio::test]
    async fn the_oldest_connection_of_the_source_with_the_most_gives_its_place_to_a_new_one() {
        let [flood, slow, user] = [Source::V4([192, 0, 2, 1]), Source::V4([192, 0, 2, 2]), Source::User(7)];
        let unauthenticated = Unauthenticated::new(4);
        for source in [slow, flood, flood, user] {
            assert!(!unauthenticated.add(source, spawn));
        }
        for _ in 0..1_000 {
            let oldest = unauthenticated.most().unwrap();
            assert!(unauthenticated.add(flood, spawn), "it takes the place of another one of the flood");
            assert!(unauthenticated.most().unwrap().1 < oldest.1, "which was the oldest");
        }
        assert_eq!(sources(&unauthenticated), [flood, flood, slow, user]);
        assert!(unauthenticated.add(user, spawn));
        assert_eq!(
            sources(&unauthenticated),
            [flood, slow, user, user],
            "a newcomer also takes it from the flood"
        );
    }

    #[tokio::test]
    async fn of_sources_with_equally_many_the_oldest_connection_is_closed() {
        let unauthenticated = Unauthenticated::new(2);
        let source = |last| Source::V4([192, 0, 2, last]);
        for last in [9, 1, 5] {
            unauthenticated.add(source(last), spawn);
        }
        assert_eq!(sources(&unauthenticated), [source(1), source(5)]);
        (0..3).for_each(|_| unauthenticated.close_one());
        assert_eq!((unauthenticated.count(), unauthenticated.most()), (0, None));
    }
}
