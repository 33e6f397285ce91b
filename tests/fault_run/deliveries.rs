//! The timeout batches that the subscribers of one group received.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use crate::support::raw::Batch;

/// How long after its begin a subscription may receive batches that waited for a subscriber.
const BEGINS: Duration = Duration::from_secs(1);

/// The id of a batch, and a hash of its content. The same id with two hashes is a broken promise.
pub type Key = ([u8; 24], u64);

/// The ring and the tick of a batch.
pub fn ring_and_tick(key: &Key) -> (u16, u64) {
    let [ring_high, ring_low, _, _, _, _, _, _, _, _, _, _, _, _, _, _, tick @ ..] = key.0;
    (u16::from_be_bytes([ring_high, ring_low]), u64::from_be_bytes(tick))
}

/// A batch, however often it was delivered.
#[derive(Debug)]
pub struct Delivered {
    /// When it first arrived.
    pub arrived: Instant,
    /// Whether that was its first delivery, and the subscriber was there before it: then it came as soon as it was published.
    pub is_prompt: bool,
    /// The ids of its messages, each with its attempt; empty where nobody asks for them.
    pub messages: Vec<(u64, u8)>,
    counts: HashSet<u32>,
}

#[derive(Debug, Default)]
pub struct Deliveries {
    pub batches: HashMap<Key, Delivered>,
    /// How many deliveries there were.
    pub total: u64,
    /// Deliveries of a batch whose delivery count had been seen before.
    pub repeated_counts: u64,
}

impl Deliveries {
    /// Records a delivery.
    pub fn add(&mut self, batch: &Batch, subscribed: Instant, keeps_messages: bool) {
        let mut hasher = DefaultHasher::new();
        (&batch.messages, &batch.attempts, batch.added, batch.acked, batch.last, batch.storm).hash(&mut hasher);
        let messages = || batch.messages.iter().zip(&batch.attempts).map(|((id, _), attempt)| (*id, *attempt));
        let delivered = Delivered {
            arrived: batch.arrived,
            is_prompt: batch.delivery == 1 && batch.arrived >= subscribed + BEGINS,
            messages: if keeps_messages { messages().collect() } else { Vec::new() },
            counts: HashSet::from([batch.delivery]),
        };
        self.total += 1;
        self.merge_one((batch.id, hasher.finish()), delivered);
    }

    /// Takes in what another subscriber of the group received.
    pub fn merge(&mut self, other: Deliveries) {
        self.total += other.total;
        self.repeated_counts += other.repeated_counts;
        for (key, delivered) in other.batches {
            self.merge_one(key, delivered);
        }
    }

    fn merge_one(&mut self, key: Key, delivered: Delivered) {
        match self.batches.get_mut(&key) {
            Some(known) => {
                if delivered.arrived < known.arrived {
                    (known.arrived, known.is_prompt) = (delivered.arrived, delivered.is_prompt);
                }
                for count in delivered.counts {
                    self.repeated_counts += u64::from(!known.counts.insert(count));
                }
            }
            None => {
                self.batches.insert(key, delivered);
            }
        }
    }

    /// How many batch ids came with more than one content.
    pub fn ids_with_two_contents(&self) -> usize {
        let ids: HashSet<[u8; 24]> = self.batches.keys().map(|(id, _)| *id).collect();
        self.batches.len() - ids.len()
    }
}
