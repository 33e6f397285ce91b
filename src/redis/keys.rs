//! Defines the Redis keys of a ring. docs/REDIS.md describes them for operators.
//!
//! Time is counted in ticks. Each message has a deadline, a tick. The pointer is the tick that expires next. A *frozen*
//! tick has expired and is not yet published. Each election of a leader has a number, the epoch, which is higher than
//! all earlier ones.
//!
//! All keys of ring 0 in namespace `ackwheel` begin with `{ackwheel:0}:`. The braces are a hash tag: in a Cluster, all
//! keys of a ring lie on one node. Every script declares all keys that it may use.
//!
//! | key | type | content |
//! |---|---|---|
//! | `meta` | hash | settings and random name of the ring; pointer and its due time `due_ms`; epoch; leader; counters |
//! | `lease` | string | the leader's token, a unique name; the end of the lease is `lease_until` in `meta` |
//! | `candidates` | hash | token of a candidate → number of rings that it leads, and its name; deleted by the leader |
//! | `messages` | hash | `id` or `id:client` → `deadline attempt added_ms`; kept for `slots` ticks after a timeout |
//! | `tick:<i>` | set | messages with deadline modulo (number of these sets) = i; suffix `/attempt` unless it is 1 |
//! | `ticks` | hash | `acked:D`: Acks so far of messages with deadline D; `frozen:D`: counts of the frozen tick D |
//! | `outbox` | stream | timeout batches, with entry ids `tick-seq`; a consumer group for each group of subscribers |
//! | `held_acks` | hash | sidecar whose Acks the pointer waits for → number of Acks that it held when it connected |
//! | `late` | list | one element for each published batch: the timed-out messages to delete from `messages` later |
//! | `groups` | hash | group → `e` if it is ephemeral, else `-`; then the tick since which it has no subscriber |
//! | `sidecars` | hash | sidecar → number of its last heartbeat, then each group that has a subscriber at the sidecar |
//! | `departed` | sorted set | dead sidecar with a kept `link:` key; its score is the tick at which it was found dead |
//! | `link:<sidecar>` | hash | number of its connection; number and answer of its last requests; last outbox trim |
//! | `news` | stream | about the last 16 hints that wake sidecars: `published`, `returned`, `vacant`, `handed`, `maxclients` |
//! | `versions` | hash | of ring 0 only: sidecar → its version, and the Unix time of its last check of Redis |
//!
//! # Tick sets
//!
//! A *tick set* is one of the Redis sets `tick:<i>`. Names in the code call it a list. A deadline is at most `slots`
//! plus [`MAX_CATCH_UP`] ticks after the pointer. A frozen tick keeps its set until it is published, and the pointer
//! waits while [`MAX_FROZEN`] ticks are frozen. There are [`SPARE_LISTS`] more tick sets than slots. So no two
//! deadlines that need a tick set at the same time share one.

use crate::redis::topology::cluster::slot_of;
use crate::redis::topology::majority::Slot;

/// The version of the keys and of the formats of their values.
pub const SCHEMA: u32 = 1;
/// The oldest schema that this program can use. While sidecars are updated one by one, old and new ones share a ring.
pub(crate) const OLDEST_SCHEMA: u32 = 1;

/// Number of tick sets in addition to one for each slot. The section [Tick sets](self#tick-sets) explains this number.
pub(crate) const SPARE_LISTS: u16 = 34;
/// The upper limit for `--catch-up-max-ticks`. If the pointer is late, an add counts its deadline from the tick that is
/// due by the clock. The option limits how many ticks after the pointer this tick may be.
pub const MAX_CATCH_UP: u16 = 16;
/// Maximum number of ticks that are expired and not yet published.
pub(crate) const MAX_FROZEN: u16 = 16;
/// Maximum number of slots of a ring in Redis. The scripts that add messages and move the pointer declare every tick
/// set as a key, so more slots make each call longer.
pub const MAX_SLOTS: u16 = 240;

const _: () =
    assert!(SPARE_LISTS > MAX_CATCH_UP + MAX_FROZEN, "two deadlines that are in use must not share a tick set");

/// Defines the struct `Keys`, which has a field for each of these names. The field contains the key in Redis.
macro_rules! keys {
    ($($name:ident)+) => {
        /// The keys of a ring, and the key `link:<sidecar>` of one sidecar.
        #[derive(Debug)]
        pub(super) struct Keys {
            $(pub(super) $name: String,)+
            pub(super) link: String,
            /// The sidecar that owns `link`.
            pub(super) sidecar: String,
            /// The Cluster hash slot of all these keys. Unused without a Cluster.
            pub(super) slot: Slot,
            lists: Vec<String>,
            prefix: String,
        }

        impl Keys {
            /// Returns the keys of a ring, with the key `link:<sidecar>` of `sidecar`.
            pub(super) fn new(namespace: &str, ring: u16, slots: u16, sidecar: &str) -> Keys {
                let tag = format!("{namespace}:{ring}");
                let prefix = format!("{{{tag}}}:");
                let key = |name: &str| format!("{prefix}{name}");
                Keys {
                    $($name: key(stringify!($name)),)+
                    link: key(&format!("link:{sidecar}")),
                    sidecar: sidecar.to_owned(),
                    slot: slot_of(&tag),
                    lists: (0..slots + SPARE_LISTS).map(|list| key(&format!("tick:{list}"))).collect(),
                    prefix,
                }
            }
        }
    };
}

keys! { meta lease candidates messages ticks held_acks outbox late groups sidecars departed news versions }

impl Keys {
    /// Returns the key `link:<sidecar>` of any sidecar.
    pub(super) fn link_of(&self, sidecar: &str) -> String {
        format!("{}link:{sidecar}", self.prefix)
    }

    /// Returns the key of the tick set that contains the messages with this deadline.
    pub(super) fn list(&self, deadline: u64) -> &str {
        let index = deadline % self.lists.len() as u64;
        &self.lists[usize::try_from(index).expect("the index is below the number of tick sets")]
    }

    /// Returns the keys `first`, followed by the keys of all tick sets.
    pub(super) fn and_lists<'a>(&'a self, first: &[&'a String]) -> Vec<&'a str> {
        first.iter().copied().chain(&self.lists).map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_keys_of_a_ring_share_its_hash_tag() {
        let keys = Keys::new("im", 3, 15, "a");
        let singles = [&keys.meta, &keys.lease, &keys.candidates, &keys.messages, &keys.link, &keys.news];
        assert!(singles.into_iter().chain(&keys.lists).all(|key| key.starts_with("{im:3}:")));
        assert_eq!((keys.link_of("a"), keys.link_of("b").as_str()), (keys.link.clone(), "{im:3}:link:b"));
        assert_eq!(keys.lists.len(), 49);
        assert_eq!(keys.list(49 * 7 + 3), "{im:3}:tick:3");
    }
}
