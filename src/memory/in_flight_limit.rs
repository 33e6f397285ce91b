//! Counts messages in flight, and keeps their number within `--max-in-flight` by reservations.
//!
//! Room is reserved for every message before the message is added, so adds never bring the number above the limit.
//! Only a journal that is read can do so. A request batch reserves in one of two ways:
//!
//! - Far from the limit, the batch reserves room for all messages that it adds, in one step. Some of them may be in
//!   flight already and need no room. So the batch returns the surplus when it is complete. Until then its reservation
//!   is *provisional*.
//! - Near the limit, the batch first finds out which messages are new. It then reserves room for exactly those.
//!
//! A provisional reservation may still return room. So a message must not be refused for lack of room while any
//! reservation is provisional. To check both at the same moment, one atomic word contains the number of messages and
//! the number of provisional reservations.

use std::sync::atomic::{AtomicU64, Ordering};

/// One provisional reservation in the word. The lower 40 bits count the messages in flight.
const PROVISIONAL: u64 = 1 << 40;

/// The bits of the word that count the messages in flight, reservations included.
const IN_FLIGHT: u64 = PROVISIONAL - 1;

/// The divisor for the room that a provisional reservation must leave free: a sixteenth of the limit, or
/// [`MOST_MARGIN`] messages if that is less.
const MARGIN_SHARE: u64 = 16;

/// The maximum room that a provisional reservation must leave free. It is twice the number of messages that one read
/// of a connection can bring.
const MOST_MARGIN: u64 = 65_536;

/// The number of messages in flight and its limit.
#[derive(Debug)]
pub(super) struct InFlightLimit {
    word: AtomicU64,
    max: u64,
    /// The highest number of messages in flight up to which a reservation may be provisional.
    provisional_max: u64,
}

/// The reason why messages do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// The limit is reached.
    Full,
    /// The limit is reached, but a provisional reservation may still return some room.
    Unsettled,
}

impl InFlightLimit {
    pub(super) fn new(max: u64) -> InFlightLimit {
        let max = max.min(IN_FLIGHT);
        let provisional_max = max - (max / MARGIN_SHARE).min(MOST_MARGIN);
        InFlightLimit { word: AtomicU64::new(0), max, provisional_max }
    }

    /// Returns the number of messages in flight, reservations included.
    pub(super) fn count(&self) -> u64 {
        self.word.load(Ordering::Relaxed) & IN_FLIGHT
    }

    /// Reserves room for this number of messages provisionally. If the limit is near, returns false and reserves
    /// nothing. Otherwise the caller must end the reservation with [`InFlightLimit::settle`].
    #[inline]
    pub(super) fn reserve_provisionally(&self, messages: u64) -> bool {
        let reserve = |word: u64| {
            let fits = (word & IN_FLIGHT).saturating_add(messages) <= self.provisional_max;
            fits.then(|| word + messages + PROVISIONAL)
        };
        self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_ok()
    }

    /// Ends a provisional reservation for this number of messages. `change` is by how much the batch changed the
    /// number of messages in flight; a negative change wraps around.
    #[inline]
    pub(super) fn settle(&self, messages: u64, change: u64) {
        self.word.fetch_add(change.wrapping_sub(messages).wrapping_sub(PROVISIONAL), Ordering::Relaxed);
    }

    /// Checks whether this number of new messages fits. Messages that are in flight already need no room.
    pub(super) fn check(&self, new: u64) -> Result<(), Shortage> {
        self.check_word(self.word.load(Ordering::Relaxed), new)
    }

    /// Reserves room for exactly this number of new messages, if they fit.
    pub(super) fn reserve(&self, new: u64) -> Result<(), Shortage> {
        let reserve = |word| self.check_word(word, new).is_ok().then_some(word + new);
        let reserved = self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve);
        reserved.map(drop).or_else(|word| self.check_word(word, new))
    }

    /// Changes the number of messages in flight without a reservation. A negative change wraps around.
    pub(super) fn change(&self, change: u64) {
        if change != 0 {
            self.word.fetch_add(change, Ordering::Relaxed);
        }
    }

    fn check_word(&self, word: u64, new: u64) -> Result<(), Shortage> {
        if new == 0 || (word & IN_FLIGHT).saturating_add(new) <= self.max {
            Ok(())
        } else if word > IN_FLIGHT {
            Err(Shortage::Unsettled)
        } else {
            Err(Shortage::Full)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_reached_for_certain_only_once_all_reservations_are_settled() {
        let in_flight = InFlightLimit::new(160);
        assert!(in_flight.reserve_provisionally(100));
        assert!(!in_flight.reserve_provisionally(51), "a sixteenth of the limit is left for exact reservations");
        assert_eq!([in_flight.check(60), in_flight.check(61)], [Ok(()), Err(Shortage::Unsettled)]);
        // 40 of the 100 messages were in flight already, and 10 other messages were removed.
        in_flight.settle(100, 60_u64.wrapping_sub(10));
        assert_eq!(in_flight.count(), 50);
        assert_eq!(in_flight.reserve(111), Err(Shortage::Full));
        assert_eq!(in_flight.reserve(110), Ok(()));
        assert_eq!([in_flight.reserve(1), in_flight.reserve(0)], [Err(Shortage::Full), Ok(())]);
        in_flight.change(5_u64.wrapping_neg());
        assert_eq!(
            (in_flight.count(), in_flight.reserve(6), in_flight.reserve(5)),
            (155, Err(Shortage::Full), Ok(()))
        );
    }

    #[test]
    fn no_limit_is_too_large_or_too_small_to_count() {
        let in_flight = InFlightLimit::new(u64::MAX);
        assert!(in_flight.reserve_provisionally(1 << 20));
        assert_eq!([in_flight.check(1 << 39), in_flight.check(u64::MAX)], [Ok(()), Err(Shortage::Unsettled)]);
        in_flight.settle(1 << 20, 0);
        assert_eq!((in_flight.count(), in_flight.reserve(u64::MAX)), (0, Err(Shortage::Full)));
        let one = InFlightLimit::new(1);
        assert!(one.reserve_provisionally(1) && !one.reserve_provisionally(1));
        one.settle(1, 1);
        assert_eq!(one.reserve(1), Err(Shortage::Full));
    }

    #[test]
    fn more_than_the_limit_can_be_restored_and_is_still_rearmed() {
        let in_flight = InFlightLimit::new(10);
        in_flight.change(20);
        assert_eq!([in_flight.reserve(0), in_flight.reserve(1)], [Ok(()), Err(Shortage::Full)]);
        in_flight.change(11_u64.wrapping_neg());
        assert_eq!(in_flight.reserve(1), Ok(()));
    }
}
