//! The number of messages in flight, and the reservations that keep it within `--max-in-flight`.
//!
//! Every message is counted before it is added, so the number never exceeds the limit. A request batch reserves in
//! one of two ways:
//!
//! - Far from the limit it reserves for all messages that it adds, in one step, and returns the surplus when it is done:
//!   some of them may be in flight already. Until then its reservation is *provisional*.
//! - Near the limit it first looks at which messages are new, and reserves exactly for those.
//!
//! The limit is reached for certain only while no reservation is provisional. So both numbers are one word.

use std::sync::atomic::{AtomicU64, Ordering};

/// One provisional reservation. The bits below it are the number of messages in flight.
const PROVISIONAL: u64 = 1 << 40;

/// The number of messages in flight, with what is reserved.
const IN_FLIGHT: u64 = PROVISIONAL - 1;

/// A request batch reserves provisionally if at least this share of the limit, and at most [`MOST_MARGIN`], stays free.
const MARGIN_SHARE: u64 = 16;

/// As many messages as a read of a connection can bring, twice.
const MOST_MARGIN: u64 = 65_536;

/// Counts messages in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    word: AtomicU64,
    max: u64,
    /// Above this a reservation is exact.
    provisional_max: u64,
}

/// The answer to a request for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// There is room for that many more.
    Enough,
    /// There is not.
    Full,
    /// There is not, unless a provisional reservation returns some.
    Unsettled,
}

impl InFlight {
    pub(super) fn new(max: u64) -> InFlight {
        let max = max.min(IN_FLIGHT);
        let provisional_max = max - (max / MARGIN_SHARE).min(MOST_MARGIN);
        InFlight { word: AtomicU64::new(0), max, provisional_max }
    }

    /// Messages in flight, those reserved for included.
    pub(super) fn count(&self) -> u64 {
        self.word.load(Ordering::Relaxed) & IN_FLIGHT
    }

    /// Reserves provisionally for so many messages, unless the limit is near. A reservation is ended by
    /// [`InFlight::settle`].
    #[inline]
    pub(super) fn reserve_provisionally(&self, messages: u64) -> bool {
        let reserve = |word: u64| {
            let fits = (word & IN_FLIGHT).saturating_add(messages) <= self.provisional_max;
            fits.then(|| word + messages + PROVISIONAL)
        };
        self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_ok()
    }

    /// Ends a provisional reservation for so many messages, after which the number in flight has changed by `change`: a
    /// number that wraps around.
    #[inline]
    pub(super) fn settle(&self, messages: u64, change: u64) {
        self.word.fetch_add(change.wrapping_sub(messages).wrapping_sub(PROVISIONAL), Ordering::Relaxed);
    }

    /// Whether there is room for so many new messages. Messages that are in flight already need none.
    pub(super) fn room_for(&self, new: u64) -> Room {
        self.room(self.word.load(Ordering::Relaxed), new)
    }

    /// Reserves for so many new messages, if there is room.
    pub(super) fn reserve(&self, new: u64) -> Room {
        let reserve = |word| (self.room(word, new) == Room::Enough).then_some(word + new);
        match self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve) {
            Ok(_) => Room::Enough,
            Err(word) => self.room(word, new),
        }
    }

    /// The number in flight has changed by so many, without a reservation: a number that wraps around.
    pub(super) fn change(&self, change: u64) {
        if change != 0 {
            self.word.fetch_add(change, Ordering::Relaxed);
        }
    }

    fn room(&self, word: u64, new: u64) -> Room {
        if new == 0 || (word & IN_FLIGHT).saturating_add(new) <= self.max {
            Room::Enough
        } else if word > IN_FLIGHT {
            Room::Unsettled
        } else {
            Room::Full
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_reached_for_certain_only_once_all_reservations_are_settled() {
        let in_flight = InFlight::new(160);
        assert!(in_flight.reserve_provisionally(100));
        assert!(!in_flight.reserve_provisionally(51), "a sixteenth of the limit is left for exact reservations");
        assert_eq!([in_flight.room_for(60), in_flight.room_for(61)], [Room::Enough, Room::Unsettled]);
        // 40 of the 100 were in flight already, and 10 others left.
        in_flight.settle(100, 60_u64.wrapping_sub(10));
        assert_eq!(in_flight.count(), 50);
        assert_eq!(in_flight.reserve(111), Room::Full);
        assert_eq!(in_flight.reserve(110), Room::Enough);
        assert_eq!([in_flight.reserve(1), in_flight.reserve(0)], [Room::Full, Room::Enough]);
        in_flight.change(5_u64.wrapping_neg());
        assert_eq!(
            (in_flight.count(), in_flight.reserve(6), in_flight.reserve(5)),
            (155, Room::Full, Room::Enough)
        );
    }

    #[test]
    fn no_limit_is_too_large_or_too_small_to_count() {
        let in_flight = InFlight::new(u64::MAX);
        assert!(in_flight.reserve_provisionally(1 << 20));
        assert_eq!([in_flight.room_for(1 << 39), in_flight.room_for(u64::MAX)], [Room::Enough, Room::Unsettled]);
        in_flight.settle(1 << 20, 0);
        assert_eq!((in_flight.count(), in_flight.reserve(u64::MAX)), (0, Room::Full));
        let one = InFlight::new(1);
        assert!(one.reserve_provisionally(1) && !one.reserve_provisionally(1));
        one.settle(1, 1);
        assert_eq!(one.reserve(1), Room::Full);
    }

    #[test]
    fn more_than_the_limit_can_be_restored_and_is_still_rearmed() {
        let in_flight = InFlight::new(10);
        in_flight.change(20);
        assert_eq!([in_flight.reserve(0), in_flight.reserve(1)], [Room::Enough, Room::Full]);
        in_flight.change(11_u64.wrapping_neg());
        assert_eq!(in_flight.reserve(1), Room::Enough);
    }
}
