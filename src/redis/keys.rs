//! Defines the schema: the keys of a ring. docs/REDIS.md describes the keys for operators.
//!
//! All keys of ring 0 in namespace `ackwheel` begin with `{ackwheel:0}:`. The braces are a hash tag: in a Cluster, the
//! keys of a ring lie on one node. Every script declares each key that it may use.
//!
//! | key | type | content |
//! |---|---|---|
//! | `meta` | hash | schema, dimensions, incarnation; pointer and its `due_ms`; epoch and leader; counters |
//! | `lease` | string | the leader's token; expires when the lease ends |
//! | `candidates` | hash | token of a candidate → number of rings that it leads, and its name; the leader deletes it |
//! | `messages` | hash | `id` or `id:client` → `deadline attempt added_ms`, until the `late` period ends |
//! | `tick:<i>` | set | messages of the deadlines D with D mod lists = i; an attempt above 1 is the suffix `/attempt` |
//! | `ticks` | hash | `acked:D`: Acks so far; `frozen:D`: counts of an expired tick that is being published |
//! | `outbox` | stream | timeout batches under the id `tick-seq`; a consumer group for each group |
//! | `held_acks` | hash | sidecar → number of Acks that it held when its session began, until they are applied |
//! | `late` | list | timed-out messages, in chunks, until they are deleted a revolution later |
//! | `groups` | hash | group → `e` if it is ephemeral, else `-`; then the tick since which it has no subscriber |
//! | `sidecars` | hash | sidecar → number of its last heartbeat, then each group that has a subscriber at the sidecar |
//! | `departed` | sorted set | dead sidecar whose link is kept for a while → the tick at which it was found dead |
//! | `link:<sidecar>` | hash | connection generation, last chunk, last two answers, last step of outbox trimming |
//! | `news` | stream | the last few hints: published, returned, vacant, handed |
//!
//! # Lists
//!
//! Seen from the pointer, a deadline is at most `slots` plus [`MAX_CATCH_UP`] ticks ahead. A frozen tick keeps its list
//! until it is published. With [`SPARE_LISTS`] more lists than slots, no two live deadlines share a list. The pointer
//! waits while [`MAX_FROZEN`] ticks are not yet published.

use crate::redis::topology::cluster::slot_of;
use crate::redis::topology::majority::Slot;

/// The version of this schema.
pub const SCHEMA: u32 = 1;
/// The oldest schema that this version can also serve, so that sidecars can be updated one by one.
pub(crate) const OLDEST_SCHEMA: u32 = 1;

/// Number of lists in addition to one per slot.
pub(crate) const SPARE_LISTS: u16 = 34;
/// Maximum number of ticks by which the pointer may lag behind the tick due. Deadlines of adds assume no greater lag.
pub const MAX_CATCH_UP: u16 = 16;
/// Maximum number of ticks that are expired and not yet published.
pub(crate) const MAX_FROZEN: u16 = 16;
/// Maximum number of slots of a ring in Redis, because each script names every list.
pub const MAX_SLOTS: u16 = 240;

const _: () =
    assert!(SPARE_LISTS > MAX_CATCH_UP + MAX_FROZEN, "two deadlines that are alive must not share a list");

/// Defines the keys: a field for each name, with its text in Redis.
macro_rules! keys {
    ($($name:ident)+) => {
        /// The names of a ring's keys, for one sidecar.
        #[derive(Debug)]
        pub(super) struct Keys {
            $(pub(super) $name: String,)+
            pub(super) link: String,
            /// The sidecar that owns `link`.
            pub(super) sidecar: String,
            /// The Cluster slot of all these keys. Unused without a Cluster.
            pub(super) slot: Slot,
            lists: Vec<String>,
            prefix: String,
        }

        impl Keys {
            /// Returns the keys of a ring for `sidecar`.
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

keys! { meta lease candidates messages ticks held_acks outbox late groups sidecars departed news }

impl Keys {
    /// Returns the link key of a sidecar.
    pub(super) fn link_of(&self, sidecar: &str) -> String {
        format!("{}link:{sidecar}", self.prefix)
    }

    /// Returns the key of the list of a deadline.
    pub(super) fn list(&self, deadline: u64) -> &str {
        let index = deadline % self.lists.len() as u64;
        &self.lists[usize::try_from(index).expect("there are few lists")]
    }

    /// Returns the keys `first`, followed by every list.
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
