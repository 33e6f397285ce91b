//! Hashes with secret random keys, so that no client can choose ids whose hashes collide.
//!
//! Ids come from outside. With known keys, one client could put all its messages into one shard and one group of the
//! table. The hash is the folded multiply of foldhash. `foldhash::RandomState` takes its keys from addresses and the
//! clock; here they come from the random numbers of the operating system, once per process. SipHash-1-3, the hash of the
//! standard library, is keyed too. But it takes 200 instructions per message (counted by callgrind). An add and its delete
//! would take 400 more, and together they take about 310 with this hash.

use std::hash::BuildHasher;
use std::sync::OnceLock;

use foldhash::SharedSeed;
use foldhash::quality::{FoldHasher, SeedableRandomState};

/// Makes hashers with secret random keys.
#[derive(Clone, Debug)]
pub struct RandomHasher(SeedableRandomState);

impl Default for RandomHasher {
    /// Draws a key of its own; the other keys are those of the process.
    fn default() -> RandomHasher {
        static SHARED: OnceLock<SharedSeed> = OnceLock::new();
        // The standard library takes the keys of `RandomState` from the operating system.
        let random = || std::hash::RandomState::new().hash_one(0);
        let shared = SHARED.get_or_init(|| SharedSeed::from_u64(random()));
        RandomHasher(SeedableRandomState::with_seed(random(), shared))
    }
}

impl BuildHasher for RandomHasher {
    type Hasher = FoldHasher<'static>;

    #[inline]
    fn build_hasher(&self) -> FoldHasher<'static> {
        self.0.build_hasher()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_has_keys_of_its_own_and_a_clone_has_the_same() {
        let (one, other) = (RandomHasher::default(), RandomHasher::default());
        assert_ne!(one.hash_one(7), other.hash_one(7));
        assert_eq!(one.hash_one(7), one.clone().hash_one(7));
    }
}
