//! Computes the message ids of a load from message numbers. The ids are distinct and look random.
//!
//! Message number n of connection c has the id `mix(seed + (c << 40 | n))`. The function [`mix`] is invertible, so the
//! connection and the number can be computed from the id of a timed-out message. The load stores counters instead of
//! ids, so it can keep twenty million messages in flight.

use crate::core::{Message, mix};

/// The number of low bits that hold the message number in an id before mixing. The higher bits hold the connection.
const NUMBER_BITS: u32 = 40;

/// A salt that makes the order of adds and deletes independent of the ids.
const ORDER_SALT: u64 = 0xa076_1d64_78bd_642f;
/// A salt that makes the choice of acknowledged messages independent of the ids.
const FATE_SALT: u64 = 0x9e37_79b9_7f4a_7c15;
/// A salt that makes the client ids independent of the message ids.
const CLIENT_SALT: u64 = 0xd1b5_4a32_d192_ed03;

/// The inverse of the first multiplier of [`mix`], modulo 2^64.
const FIRST_INVERSE: u64 = 0x96de_1b17_3f11_9089;
/// The inverse of the second multiplier of [`mix`], modulo 2^64.
const SECOND_INVERSE: u64 = 0x3196_42b2_d24d_8ec3;

/// Inverts [`mix`].
const fn unmix(mixed: u64) -> u64 {
    let number = (mixed ^ mixed >> 31 ^ mixed >> 62).wrapping_mul(SECOND_INVERSE);
    let number = (number ^ number >> 27 ^ number >> 54).wrapping_mul(FIRST_INVERSE);
    number ^ number >> 30 ^ number >> 60
}

/// The rules that determine the id of each message, and whether the load acknowledges the message.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ids {
    seed: u64,
    /// The limit for the hash of a message: the load acknowledges messages with a lower hash.
    acked_below: u64,
    pub(super) all_are_acked: bool,
    with_clients: bool,
    connections: u64,
}

impl Ids {
    /// Creates the rules of a load with this number of connections. `acked` is the share of messages to acknowledge,
    /// from 0 to 1. `with_clients` says whether messages have client ids.
    pub(super) fn new(seed: u64, acked: f64, with_clients: bool, connections: usize) -> Ids {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of all hashes: 53 bits of it are enough, and a float that is too large saturates"
        )]
        let acked_below = (acked * u64::MAX as f64) as u64;
        Ids { seed, acked_below, all_are_acked: acked >= 1.0, with_clients, connections: connections as u64 }
    }

    pub(super) const fn message(&self, connection: u64, number: u64) -> Message {
        let plain = connection << NUMBER_BITS | number;
        let client = if self.with_clients { mix(plain ^ CLIENT_SALT) } else { 0 };
        Message::new(mix(self.seed.wrapping_add(plain)), client)
    }

    /// Returns whether the load acknowledges the message. Otherwise the message must time out.
    pub(super) const fn is_acked(&self, connection: u64, number: u64) -> bool {
        self.all_are_acked || mix(self.seed ^ FATE_SALT ^ (connection << NUMBER_BITS | number)) < self.acked_below
    }

    /// Returns a pseudorandom bit for a connection and a number.
    pub(super) const fn draw(&self, connection: u64, number: u64) -> bool {
        mix(self.seed ^ ORDER_SALT ^ (connection << NUMBER_BITS | number)) & 1 == 1
    }

    /// Returns the connection and the number of a message. Returns `None` if the message does not belong to this load.
    pub(super) fn origin(&self, message: Message) -> Option<(u64, u64)> {
        let plain = unmix(message.msg_id.0).wrapping_sub(self.seed);
        let (connection, number) = (plain >> NUMBER_BITS, plain & ((1 << NUMBER_BITS) - 1));
        let ours = connection < self.connections && self.message(connection, number) == message;
        ours.then_some((connection, number))
    }
}

/// The multiplier that scatters message numbers within a block (see [`acknowledged`]). It is odd, so distinct numbers
/// stay distinct.
const SCATTER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the number of the message that a connection acknowledges at position `nth`, counted from 0. `in_flight` is
/// the number of messages that the connection keeps in flight. `added` is the number of messages that it has added so
/// far.
///
/// The numbers are permuted within blocks, so that the order of the deletes differs from the order of the adds. The
/// size of a block is a power of two and at most a quarter of `in_flight`. This limit keeps each message in flight at
/// most a quarter longer than the average.
///
/// A message must not be acknowledged before it is added. Therefore a block keeps its order if its last number is not
/// added yet. A connection reaches such a block only after its last add, so no block changes its order halfway.
pub const fn acknowledged(nth: u64, in_flight: u64, added: u64) -> u64 {
    let Some(bits) = (in_flight / 4).checked_ilog2() else { return nth };
    // A mask of the low bits gives the position in the block. A division would cost as much as the rest of this
    // function.
    let within = (1 << bits) - 1;
    let first = nth & !within;
    if first + within >= added {
        return nth;
    }
    first | nth.wrapping_mul(SCATTER) & within
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_says_whose_it_is() {
        for with_clients in [false, true] {
            let ids = Ids::new(0xfeed_beef_0123_4567, 0.5, with_clients, 8);
            for connection in [0, 1, 7] {
                for number in [0, 1, 2, 1_000_000, (1 << NUMBER_BITS) - 1] {
                    let message = ids.message(connection, number);
                    assert_eq!(ids.origin(message), Some((connection, number)));
                }
            }
        }
    }

    #[test]
    fn the_mixer_can_be_undone_everywhere() {
        for number in (0..1_000).chain((0..64).map(|bit| 1 << bit)).chain([u64::MAX]) {
            assert_eq!(unmix(mix(number)), number);
            assert_eq!(mix(unmix(number)), number);
        }
    }

    #[test]
    fn messages_of_others_are_recognised() {
        let (ids, others) = (Ids::new(1, 1.0, false, 8), Ids::new(u64::MAX / 3, 1.0, false, 8));
        assert!((0..1_000).all(|number| ids.origin(others.message(0, number)).is_none()));
        let with_client = Message { client: crate::core::Client(1), ..ids.message(0, 0) };
        assert_eq!(ids.origin(with_client), None);
    }

    #[test]
    fn about_as_many_are_acknowledged_as_asked_for() {
        for (acked, least, most) in [(1.0, 10_000, 10_000), (0.9, 8_800, 9_200), (0.1, 800, 1_200), (0.0, 0, 0)] {
            let ids = Ids::new(42, acked, false, 8);
            let count = (0..10_000).filter(|number| ids.is_acked(3, *number)).count();
            assert!((least..=most).contains(&count), "{count} of 10,000 for {acked}");
        }
    }

    #[test]
    fn each_message_is_acknowledged_once_and_after_it_was_added() {
        for in_flight in [1, 3, 4, 100, 4_100, 1_000_000] {
            let steady = 0..20_000;
            let mut seen: Vec<u64> =
                steady.clone().map(|nth| acknowledged(nth, in_flight, nth + in_flight + 1)).collect();
            assert!(seen.iter().zip(steady).all(|(number, nth)| *number < nth + in_flight + 1), "{in_flight}");
            // From here on, no more messages are added.
            let added = 20_000 + in_flight;
            seen.extend((20_000..added).map(|nth| acknowledged(nth, in_flight, added)));
            assert!(in_flight < 8 || !seen.is_sorted(), "{in_flight}");
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..added), "{in_flight}");
        }
    }
}
