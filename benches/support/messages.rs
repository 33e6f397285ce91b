//! Random messages, the same in every run.

use ackwheel::core::Message;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// `count` messages of 16 random bytes each.
pub fn random_messages(count: usize, seed: u64) -> Vec<Message> {
    let mut random = SmallRng::seed_from_u64(seed);
    (0..count).map(|_| Message::new(random.next_u64(), random.next_u64())).collect()
}
