//! Who opens, joins, leaves or deletes a group waits for whoever does so with the same group.

use std::hash::{BuildHasher, RandomState};

use tokio::sync::{Mutex, MutexGuard};

use crate::core::group::GroupName;

/// So many that two groups seldom share one.
const LOCKS: usize = 64;

/// Held while a group is opened and joined, or found empty and then left or deleted: the two must not interleave. What
/// they ask of the store may take a round trip or two, for which other groups do not wait.
#[derive(Debug)]
pub(super) struct Memberships {
    locks: [Mutex<()>; LOCKS],
    hasher: RandomState,
}

impl Memberships {
    pub(super) fn new() -> Memberships {
        Memberships { locks: std::array::from_fn(|_| Mutex::new(())), hasher: RandomState::new() }
    }

    #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash are as good as others")]
    pub(super) async fn lock(&self, group: &GroupName) -> MutexGuard<'_, ()> {
        self.locks[self.hasher.hash_one(group) as usize % LOCKS].lock().await
    }
}
