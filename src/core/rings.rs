//! The rings of a store, and the ring that a message belongs to.
//!
//! A ring is a whole wheel with a pointer, a lease and an outbox of its own. A message belongs to one ring for ever, by a
//! hash of its pair, so every sidecar of a store asks the same one about it.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use super::message::Message;
use super::refusal::{Promise, Reason, Refusal};
use super::requester::Requester;
use super::ring::{Reply, Ring};
use super::store::RingParts;
use super::tick::Wheel;

/// The most rings of a store.
pub const MAX_RINGS: u16 = 64;

/// The ring, of `rings`, that a message belongs to: `mix(mix(msg_id) ^ client) mod rings`, where `mix` is the
/// finalizer of splitmix64. Every sidecar and every version must agree on it.
///
/// # Panics
///
/// If there are no rings.
#[must_use]
pub fn ring_of(message: Message, rings: u16) -> u16 {
    let hash = mix(mix(message.msg_id.0) ^ message.client.0);
    u16::try_from(hash % u64::from(rings)).expect("a remainder of a u16 fits a u16")
}

/// The finalizer of splitmix64, after which each bit of the input has touched each bit of the output.
const fn mix(mut bits: u64) -> u64 {
    bits ^= bits >> 30;
    bits = bits.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^= bits >> 27;
    bits = bits.wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// All rings of a store.
#[derive(Clone)]
pub struct Rings(Arc<[Arc<dyn Ring>]>);

impl Rings {
    /// The rings of `seats`, of which there is at least one.
    #[must_use]
    pub fn new(seats: &[RingParts]) -> Rings {
        Rings(seats.iter().map(|seat| Arc::clone(&seat.ring)).collect())
    }

    /// The dimensions that all rings share.
    ///
    /// # Panics
    ///
    /// If there are no rings.
    #[must_use]
    pub fn wheel(&self) -> Wheel {
        self.0[0].wheel()
    }

    /// A way to these rings for a connection of its own.
    #[must_use]
    pub fn requester(&self) -> Requester {
        Requester::new(self.clone())
    }

    /// The rings by number.
    pub(super) fn all(&self) -> &[Arc<dyn Ring>] {
        &self.0
    }
}

/// Awaits all replies at the same time.
pub(super) async fn all<T: Unpin>(mut replies: Vec<Reply<T>>) -> Vec<Result<T, Refusal>> {
    let mut answers: Vec<Option<Result<T, Refusal>>> = replies.iter().map(|_| None).collect();
    poll_fn(|context| {
        let mut all_are_there = true;
        for (reply, answer) in replies.iter_mut().zip(&mut answers).filter(|(_, answer)| answer.is_none()) {
            match Pin::new(reply).poll(context) {
                Poll::Ready(found) => *answer = Some(found),
                Poll::Pending => all_are_there = false,
            }
        }
        if all_are_there { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers.into_iter().flatten().collect()
}

/// All answers, or one refusal for them: see [`one_refusal`].
pub(super) fn together<T>(answers: Vec<Result<T, Refusal>>) -> Result<Vec<T>, Refusal> {
    let asked = answers.len();
    let (mut taken, mut refusals) = (Vec::with_capacity(asked), Vec::new());
    for answer in answers {
        match answer {
            Ok(answer) => taken.push(answer),
            Err(refusal) => refusals.push(refusal),
        }
    }
    match one_refusal(asked, refusals) {
        None => Ok(taken),
        Some(refusal) => Err(refusal),
    }
}

/// One refusal for those of so many rings, if there are any.
///
/// If only some rings refused, the request is applied in part. Then the refusal promises that nothing was applied only if
/// the request itself is impossible, and repeating it would not help; a caller undoes the rest.
pub(super) fn one_refusal(asked: usize, mut refusals: Vec<Refusal>) -> Option<Refusal> {
    let first = refusals.first()?;
    if refusals.len() == asked {
        let unknown = refusals.iter().position(|refusal| refusal.reason.promise() == Promise::OutcomeUnknown);
        return Some(refusals.swap_remove(unknown.unwrap_or_default()));
    }
    if let Some(refusal) = refusals.iter().find(|refusal| is_of_the_group(refusal.reason)) {
        return Some(refusal.clone());
    }
    let text = format!(
        "{} of {asked} rings took their part of it and the others did not, for one of them says: {first}; repeat \
         it, which is safe",
        asked - refusals.len()
    );
    Some(Refusal::new(Reason::StoreSilent, text))
}

/// Whether a refusal is about the group that was asked for, and no fault of the store.
fn is_of_the_group(reason: Reason) -> bool {
    matches!(reason, Reason::TooManyGroups | Reason::UnknownGroup | Reason::GroupInUse)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_of_the_group_is_passed_on_and_any_other_of_a_part_makes_the_outcome_unknown() {
        let refusal = |reason| Err(Refusal::new(reason, "no"));
        for (answers, expected) in [
            (vec![Ok(()), refusal(Reason::StoreAway)], Reason::StoreSilent),
            (vec![Ok(()), refusal(Reason::MaxInFlight)], Reason::StoreSilent),
            (vec![Ok(()), refusal(Reason::StoreAway), refusal(Reason::TooManyGroups)], Reason::TooManyGroups),
            (vec![refusal(Reason::StoreAway), refusal(Reason::StoreAway)], Reason::StoreAway),
        ] {
            assert_eq!(together(answers).unwrap_err().reason, expected);
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
