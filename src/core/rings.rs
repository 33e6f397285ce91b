//! Several rings as one: which ring a message belongs to, and how the answers of many become one.
//!
//! A ring is a whole wheel with a pointer, a lease and an outbox of its own. A message belongs to one ring for
//! ever, by a hash of its pair, so every sidecar of a store asks the same one about it. A frame is split by
//! ring with its order kept, all rings are asked in the call, and the outcomes go back to their places.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use super::message::Message;
use super::refusal::{Promise, Reason, Refusal};
use super::ring::{AddNewMsg, AddNewMsgAnswer, AtOnce, DelMsg, DelMsgAnswer, Later, Reply, Ring};
use super::store::Seat;
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

/// All rings of a store, asked as one.
#[derive(Clone)]
pub struct Rings {
    rings: Vec<Arc<dyn Ring>>,
}

impl Rings {
    /// The rings of `seats`, of which there is at least one.
    #[must_use]
    pub fn new(seats: &[Seat]) -> Rings {
        Rings { rings: seats.iter().map(|seat| Arc::clone(&seat.ring)).collect() }
    }

    /// The dimensions that all rings share.
    ///
    /// # Panics
    ///
    /// If there are no rings.
    #[must_use]
    pub fn wheel(&self) -> Wheel {
        self.rings[0].wheel()
    }

    /// The ring as one that never waits, if there is only one and it is.
    #[must_use]
    pub fn at_once(&self) -> Option<&dyn AtOnce> {
        match &*self.rings {
            [ring] => ring.at_once(),
            _ => None,
        }
    }

    /// The ring as one that answers many requests together, if there is only one and it is.
    #[must_use]
    pub fn later(&self) -> Option<&dyn Later> {
        match &*self.rings {
            [ring] => ring.later(),
            _ => None,
        }
    }

    /// Takes messages into flight; see [`Ring::add_new_msg`]. The deadline is the latest of its rings.
    #[must_use]
    pub fn add_new_msg(&self, request: AddNewMsg<'_>, now: Instant) -> Reply<AddNewMsgAnswer> {
        let split = match self.split(request.messages) {
            Route::One(ring) => return ring.add_new_msg(request, now),
            Route::Many(split) => split,
        };
        let ask = |(ring, messages): (&Arc<dyn Ring>, &Vec<Message>)| {
            ring.add_new_msg(AddNewMsg { messages, ..request }, now)
        };
        let replies = self.asked(&split).map(ask).collect();
        split.answer(replies, |split, answers: Vec<AddNewMsgAnswer>| {
            let deadline = answers.iter().map(|answer| answer.deadline).max().unwrap_or_default();
            let outcomes = split.in_order(answers.into_iter().map(|answer| answer.outcomes));
            AddNewMsgAnswer { deadline, outcomes }
        })
    }

    /// Takes messages out of flight; see [`Ring::del_msg`].
    #[must_use]
    pub fn del_msg(&self, request: DelMsg<'_>, now: Instant) -> Reply<DelMsgAnswer> {
        let split = match self.split(request.messages) {
            Route::One(ring) => return ring.del_msg(request, now),
            Route::Many(split) => split,
        };
        let ask =
            |(ring, messages): (&Arc<dyn Ring>, &Vec<Message>)| ring.del_msg(DelMsg { messages, ..request }, now);
        let replies = self.asked(&split).map(ask).collect();
        split.answer(replies, |split, answers: Vec<DelMsgAnswer>| {
            let mut merged = DelMsgAnswer::default();
            for answer in &answers {
                merged.ack_latency.add(&answer.ack_latency);
            }
            merged.outcomes = split.in_order(answers.into_iter().map(|answer| answer.outcomes));
            merged
        })
    }

    /// The rings that have a part in a frame, with their parts.
    fn asked<'a>(&'a self, split: &'a Split) -> impl Iterator<Item = (&'a Arc<dyn Ring>, &'a Vec<Message>)> {
        self.rings.iter().zip(&split.parts).filter(|(_, part)| !part.is_empty())
    }

    fn split(&self, messages: &[Message]) -> Route<'_> {
        let count = u16::try_from(self.rings.len()).expect("fewer rings than a ring's number can tell");
        let Some(first) = messages.first().filter(|_| count > 1) else { return Route::One(&self.rings[0]) };
        let first = ring_of(*first, count);
        let ring_of_each: Vec<u16> = messages.iter().map(|message| ring_of(*message, count)).collect();
        if ring_of_each.iter().all(|ring| *ring == first) {
            return Route::One(&self.rings[usize::from(first)]);
        }
        let mut parts = vec![Vec::new(); self.rings.len()];
        for (message, ring) in messages.iter().zip(&ring_of_each) {
            parts[usize::from(*ring)].push(*message);
        }
        Route::Many(Split { ring_of_each, parts })
    }
}

/// Where a frame goes.
enum Route<'a> {
    /// All of it to one ring.
    One(&'a Arc<dyn Ring>),
    /// To several.
    Many(Split),
}

/// A frame, split by ring.
struct Split {
    /// For each message of the frame.
    ring_of_each: Vec<u16>,
    /// For each ring; empty where it has no part.
    parts: Vec<Vec<Message>>,
}

impl Split {
    /// The answer to the frame, once all that were asked have answered.
    fn answer<T, A>(
        self,
        replies: Vec<Reply<T>>,
        merge: impl FnOnce(&Split, Vec<T>) -> A + Send + 'static,
    ) -> Reply<A>
    where
        T: Send + Unpin + 'static,
    {
        Reply::Later(Box::pin(async move {
            let answers = together(all(replies).await)?;
            Ok(merge(&self, answers))
        }))
    }

    /// The outcomes of the rings that were asked, in the order of the frame.
    fn in_order<O>(&self, outcomes: impl Iterator<Item = Vec<O>>) -> Vec<O> {
        let mut outcomes = outcomes.map(Vec::into_iter);
        let mut of_each: Vec<_> =
            self.parts.iter().map(|part| if part.is_empty() { None } else { outcomes.next() }).collect();
        let next = |ring: &u16| of_each[usize::from(*ring)].as_mut().and_then(Iterator::next);
        let ordered: Vec<O> = self.ring_of_each.iter().filter_map(next).collect();
        debug_assert_eq!(ordered.len(), self.ring_of_each.len(), "a ring answers for each message");
        ordered
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

/// All answers, or one refusal for them. Where some rings took their part, it promises that nothing was applied only
/// if it says that the request itself cannot be, and repeating it would not help; a caller undoes what was applied.
pub(super) fn together<T>(answers: Vec<Result<T, Refusal>>) -> Result<Vec<T>, Refusal> {
    let asked = answers.len();
    let (mut taken, mut refusals) = (Vec::with_capacity(asked), Vec::new());
    for answer in answers {
        match answer {
            Ok(answer) => taken.push(answer),
            Err(refusal) => refusals.push(refusal),
        }
    }
    let unknown = refusals.iter().position(|refusal| refusal.reason.promise() == Promise::OutcomeUnknown);
    let Some(first) = refusals.first() else { return Ok(taken) };
    if taken.is_empty() {
        return Err(refusals.swap_remove(unknown.unwrap_or_default()));
    }
    if let Some(refusal) = refusals.iter().find(|refusal| is_of_the_group(refusal.reason)) {
        return Err(refusal.clone());
    }
    let text = format!(
        "{} of {asked} rings took their part of it and the others did not, for one of them says: {first}; repeat \
         it, which is safe",
        taken.len()
    );
    Err(Refusal::new(Reason::StoreSilent, text))
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
