//! Counts and bounds the connections of a listener that are not admitted yet. If there are too many, closes the oldest.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::task::AbortHandle;

/// The unauthenticated connections of one listener, in the order of their arrival.
#[derive(Debug)]
pub(super) struct Unauthenticated {
    max: usize,
    tasks: Mutex<BTreeMap<u64, AbortHandle>>,
}

/// The place of a connection among the unauthenticated ones. Dropping this value frees the place.
#[derive(Debug)]
pub(super) struct Place {
    unauthenticated: Arc<Unauthenticated>,
    number: u64,
}

impl Unauthenticated {
    pub(super) fn new(max: usize) -> Arc<Unauthenticated> {
        Arc::new(Unauthenticated { max, tasks: Mutex::default() })
    }

    pub(super) fn count(&self) -> usize {
        self.tasks.lock().len()
    }

    /// Takes a place for a connection whose task is started by `spawn`. If all places are taken, closes the oldest
    /// connection. Returns whether it closed one.
    pub(super) fn add(self: &Arc<Self>, spawn: impl FnOnce(Place) -> AbortHandle) -> bool {
        /// The number of the last connection of all listeners.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let is_full = self.count() >= self.max;
        if is_full {
            self.close_oldest();
        }
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        // The lock is held until the handle is stored, so the task cannot free its place before that.
        let mut tasks = self.tasks.lock();
        tasks.insert(number, spawn(Place { unauthenticated: Arc::clone(self), number }));
        is_full
    }

    /// Returns the number of the oldest connection. Numbers of several listeners can be compared.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.tasks.lock().keys().next().copied()
    }

    /// Closes the oldest connection, if there is one.
    pub(super) fn close_oldest(&self) {
        let oldest = self.tasks.lock().pop_first();
        if let Some((_, task)) = oldest {
            task.abort();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.unauthenticated.tasks.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn the_oldest_connection_gives_its_place_to_a_new_one() {
        let unauthenticated = Unauthenticated::new(2);
        let spawn = |place| {
            let task = async move {
                let _place: Place = place;
                pending::<()>().await;
            };
            tokio::spawn(task).abort_handle()
        };
        assert!(!unauthenticated.add(spawn) && !unauthenticated.add(spawn));
        let oldest = unauthenticated.oldest();
        assert!(unauthenticated.add(spawn), "the third takes the place of the first");
        assert_eq!(unauthenticated.count(), 2);
        assert!(unauthenticated.oldest() > oldest);
        unauthenticated.close_oldest();
        unauthenticated.close_oldest();
        unauthenticated.close_oldest();
        assert_eq!((unauthenticated.count(), unauthenticated.oldest()), (0, None));
    }
}
