//! Counts what Redis answered and then lost.

use prometheus::IntCounter;

use super::make::Maker;

/// What Redis answered and then lost.
#[derive(Debug)]
pub struct RedisLosses {
    /// Scripts of adds and Acks.
    pub writes: IntCounter,
    /// Messages that were added in them.
    pub added: IntCounter,
    /// Messages that were acknowledged in them, as far as the sidecar remembers their Acks.
    pub acked: IntCounter,
    /// Acks of those that were applied again.
    pub reapplied: IntCounter,
}

impl RedisLosses {
    pub(super) fn new(make: &Maker) -> RedisLosses {
        let messages = make.counters("redis_lost_messages_total", "Messages that Redis lost, by kind.", "kind");
        RedisLosses {
            writes: make.counter("redis_lost_writes_total", "Scripts that Redis answered and then lost."),
            added: messages.with_label_values(&["added"]),
            acked: messages.with_label_values(&["acked"]),
            reapplied: make.counter("redis_reapplied_acks_total", "Lost Acks that were applied again."),
        }
    }
}
