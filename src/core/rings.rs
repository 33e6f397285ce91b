//! The rings of a store, and the ring to which a message belongs.
//!
//! A ring is a complete wheel with its own pointer, lease and outbox. A hash of the pair determines the ring of a
//! message, so all sidecars of a store agree on it.

use std::sync::Arc;

use super::message::Message;
use super::refusal::{Promise, Reason, Refusal};
use super::ring::Ring;
use super::store::RingParts;
use super::tick::Wheel;

/// The most rings of a store.
pub const MAX_RINGS: u16 = 64;

/// The ring, of `rings`, to which a message belongs: `mix(mix(msg_id) ^ client) mod rings`, where `mix` is the
/// finalizer of splitmix64. All sidecars and all versions must agree on it.
///
/// # Panics
///
/// If `rings` is 0.
#[must_use]
pub fn ring_of(message: Message, rings: u16) -> u16 {
    let hash = mix(mix(message.msg_id.0) ^ message.client.0);
    u16::try_from(hash % u64::from(rings)).expect("a remainder of a u16 fits a u16")
}

/// The finalizer of splitmix64: each bit of the input affects each bit of the output.
const fn mix(mut bits: u64) -> u64 {
    bits ^= bits >> 30;
    bits = bits.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^= bits >> 27;
    bits = bits.wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// All rings of a store, by number.
#[derive(Clone)]
pub struct Rings(pub(super) Arc<[Arc<dyn Ring>]>);

impl Rings {
    /// The rings of a store, at least one.
    #[must_use]
    pub fn new(rings: &[RingParts]) -> Rings {
        Rings(rings.iter().map(|parts| Arc::clone(&parts.ring)).collect())
    }

    /// The number of slots and the length of a tick, the same for all rings.
    ///
    /// # Panics
    ///
    /// If there are no rings.
    #[must_use]
    pub fn wheel(&self) -> Wheel {
        self.0[0].wheel()
    }
}

/// The answers of all rings, or one refusal for them: see [`merge_refusals`].
pub(super) fn all_answers<T>(answers: Vec<Result<T, Refusal>>) -> Result<Vec<T>, Refusal> {
    let refusals = answers.iter().filter_map(|answer| answer.as_ref().err().cloned()).collect();
    match merge_refusals(answers.len(), refusals) {
        None => Ok(answers.into_iter().flatten().collect()),
        Some(refusal) => Err(refusal),
    }
}

/// One refusal for those of several among the `asked` rings, if there are any.
///
/// If only some rings refused, the request is applied in part, so the outcome is unknown. The exception is a refusal
/// about the group: repeating the request would not help, and the caller undoes the rest.
pub(super) fn merge_refusals(asked: usize, mut refusals: Vec<Refusal>) -> Option<Refusal> {
    let first = refusals.first()?;
    if refusals.len() == asked {
        let unknown = refusals.iter().position(|refusal| refusal.reason.promise() == Promise::OutcomeUnknown);
        return Some(refusals.swap_remove(unknown.unwrap_or_default()));
    }
    let about_group = [Reason::TooManyGroups, Reason::UnknownGroup, Reason::GroupInUse];
    if let Some(refusal) = refusals.iter().find(|refusal| about_group.contains(&refusal.reason)) {
        return Some(refusal.clone());
    }
    let text = format!(
        "{} of {asked} rings applied their part, and the others did not; one of them says: {first}; repeat it, which \
         is safe",
        asked - refusals.len()
    );
    Some(Refusal::new(Reason::StoreTimeout, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_about_the_group_is_passed_on_and_any_other_partial_refusal_makes_the_outcome_unknown() {
        let refusal = |reason| Err(Refusal::new(reason, "no"));
        for (answers, expected) in [
            (vec![Ok(()), refusal(Reason::StoreUnreachable)], Reason::StoreTimeout),
            (vec![Ok(()), refusal(Reason::MaxInFlight)], Reason::StoreTimeout),
            (
                vec![Ok(()), refusal(Reason::StoreUnreachable), refusal(Reason::TooManyGroups)],
                Reason::TooManyGroups,
            ),
            (vec![refusal(Reason::StoreUnreachable), refusal(Reason::StoreUnreachable)], Reason::StoreUnreachable),
        ] {
            assert_eq!(all_answers(answers).unwrap_err().reason, expected);
        }
    }

    #[test]
    fn the_hash_never_changes() {
        for (message, of_2, of_3, of_64) in [
            (Message::new(0, 0), 0, 0, 0),
            (Message::new(1, 0), 1, 1, 61),
            (Message::new(2, 0), 0, 2, 40),
            (Message::new(101, 7), 0, 0, 38),
            (Message::new(102, 7), 0, 2, 18),
            (Message::new(u64::MAX, u64::MAX), 1, 0, 11),
            (Message::new(1 << 53, (1 << 53) + 1), 0, 1, 38),
        ] {
            let found = [1, 2, 3, 64].map(|rings| ring_of(message, rings));
            assert_eq!(found, [0, of_2, of_3, of_64], "{message}");
        }
    }

    #[test]
    fn messages_spread_evenly_whatever_pattern_their_ids_have() {
        const RINGS: u16 = 8;
        const MESSAGES: u64 = 80_000;
        let patterns: [fn(u64) -> Message; 4] = [
            |index| Message::new(index, 0),
            |index| Message::new(index << 32, 0),
            |index| Message::new(7, index),
            |index| Message::new(index, index),
        ];
        for pattern in patterns {
            let mut counts = [0_u64; RINGS as usize];
            (0..MESSAGES).for_each(|index| counts[usize::from(ring_of(pattern(index), RINGS))] += 1);
            let fair = MESSAGES / u64::from(RINGS);
            assert!(counts.iter().all(|count| count.abs_diff(fair) < fair / 20), "{counts:?}");
        }
    }
}
