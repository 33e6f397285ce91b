//! Defines the *term* of a leader: the data that a sidecar has while it leads a ring. The *pointer* of the ring is the
//! tick that expires next. The leader moves the pointer by one tick per move. The term has the epoch (the number of the
//! election), the end of the lease, and the time of the next move.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::core::{Tick, Wheel};

/// Maximum difference between the leader's clock and Redis' clock over one tick. A greater difference shows that one of
/// the two clocks was set.
pub(crate) const CLOCK_SLACK: Duration = Duration::from_millis(50);

/// How long before a move the leader begins to watch whether Redis stalls. A stall that ended earlier does no harm,
/// because the requests that it delayed arrive before the move.
pub(crate) const WATCH: Duration = Duration::from_millis(300);

/// The names of this sidecar.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// The name in the status and in log lines.
    pub(crate) name: String,
    /// The unique text that identifies this sidecar in leases.
    pub(crate) token: String,
}

/// The term of a leader of one ring. Begins with a won election, and ends when the lease is lost or given up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Term {
    pub(crate) epoch: u64,
    /// The time at which the lease ends if it is not renewed, by the monotonic clock.
    pub(crate) lease_until: Instant,
    /// The number of the session, that is, the registered connection to Redis, in which the election was won.
    pub(crate) session: u64,
    /// The end of the last outage of Redis that `next` already takes into account.
    pub(crate) recovered_at: Option<Instant>,
    pub(crate) pointer: Tick,
    pub(crate) next: NextMove,
    /// Whether the leader has put the next move off itself: to wait for Acks, or to skip missed ticks.
    pub(crate) is_aware: bool,
    /// The time by which moves were put off, minus the whole ticks that earlier moves have reported. Every deadline
    /// shifts by this time.
    pub(crate) shifted: Duration,
    /// The time until which the pointer waits for Acks after an outage. `None` if no outage ended since the last move.
    pub(crate) grace_until: Option<Instant>,
    /// The time at which the pointer began to wait for sidecars that held Acks in an outage. `None` if it has not
    /// waited since the last move.
    pub(crate) held_since: Option<Instant>,
    /// Whether the pointer waits because too many expired ticks are not yet published.
    pub(crate) is_busy: bool,
    /// The expired tick that is published next, as far as this sidecar knows. `seq` is the number of its next batch.
    pub(crate) frozen: Tick,
    pub(crate) seq: u64,
}

impl Term {
    /// Puts the next move off until `at`, and shifts every deadline by this delay.
    pub(crate) fn put_off(&mut self, at: Instant) {
        self.shifted += at.saturating_duration_since(self.next.at);
        (self.next.at, self.is_aware) = (at, true);
    }

    /// Records a move of the pointer. `next` is the move after it. The caller must read
    /// [`shifted_ticks`](Term::shifted_ticks) before, because this function subtracts those ticks from the shift. The
    /// rest of the shift, below one tick, counts for later moves.
    pub(crate) fn moved(&mut self, next: NextMove, wheel: Wheel) {
        (self.pointer, self.next, self.is_aware) = (self.pointer.plus(1), next, false);
        self.shifted -= wheel.ticks(self.shifted_ticks(wheel));
        (self.grace_until, self.held_since, self.is_busy) = (None, None, false);
    }

    /// Returns how long the pointer waits, from `now`, for Redis to apply the requests that this sidecar has already
    /// read. The wait is limited: clients may send more than Redis can process, and the leader must still move the
    /// pointer and renew its lease.
    pub(crate) fn flush_timeout(&self, now: Instant, tick_length: Duration) -> Duration {
        let timeout = (self.lease_until.saturating_duration_since(now) / 2).min(tick_length / 4);
        if self.is_busy { timeout / 16 } else { timeout }
    }

    /// Returns whether this leader may hand the ring over at `now`. It must not if it has put the next move off, or
    /// already watches Redis before the move: the next leader would not know why the pointer should wait.
    pub(crate) fn is_calm(&self, now: Instant, tick_length: Duration) -> bool {
        !self.is_aware && now + WATCH.min(tick_length / 2) < self.next.at
    }

    /// Returns the number of whole ticks in the shift.
    pub(crate) fn shifted_ticks(&self, wheel: Wheel) -> u64 {
        whole_ms(self.shifted) / u64::from(wheel.tick_ms())
    }
}

/// The time of the next move of the pointer, by the monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextMove {
    /// The time at which to send the call to Redis.
    pub(crate) at: Instant,
    /// How long after `at` the move is certainly due. Above zero if Redis is far, because the call is sent early.
    pub(crate) ahead: Duration,
}

impl NextMove {
    /// Computes the next move from an answer of Redis. Redis said, at some time between `asked` and `answered`, that
    /// the move is due in `ms`.
    ///
    /// `at` is early by one round trip minus `spare`. So the call reaches Redis in time, even if the way to Redis takes
    /// nearly the whole round trip, and no tick becomes longer. If the round trip is shorter than `spare`, `at` is the
    /// time at which the move is certainly due.
    pub(crate) fn from_answer(ms: i64, asked: Instant, answered: Instant, spare: Duration) -> NextMove {
        let round_trip = answered.saturating_duration_since(asked);
        let ahead = round_trip.saturating_sub(spare);
        NextMove { at: from_now(answered, ms).checked_sub(ahead).unwrap_or(answered), ahead }
    }

    /// Returns the time at which the move is certainly due, unless Redis' clock is set.
    pub(crate) fn certain(self) -> Instant {
        self.at + self.ahead
    }

    /// Returns the move with both times limited to `certain`: `at`, and the time at which the move is certainly due.
    pub(crate) fn no_later_than(self, certain: Instant) -> NextMove {
        let at = self.at.min(certain);
        NextMove { at, ahead: self.certain().min(certain) - at }
    }
}

/// The current term of this sidecar in one ring. `None` while the sidecar does not lead.
#[derive(Debug, Default)]
pub(crate) struct CurrentTerm(Mutex<Option<Term>>);

impl CurrentTerm {
    pub(crate) fn get(&self) -> Option<Term> {
        *self.0.lock()
    }

    /// Returns the term if it was won in the session with this number. After a new connection, the leader must be
    /// elected again.
    pub(crate) fn in_session(&self, session: u64) -> Option<Term> {
        self.get().filter(|term| term.session == session)
    }

    /// Returns the term if its lease has not ended at `now`.
    pub(crate) fn lasting(&self, now: Instant) -> Option<Term> {
        self.get().filter(|term| now < term.lease_until)
    }

    pub(crate) fn begin(&self, term: Term) {
        *self.0.lock() = Some(term);
    }

    pub(crate) fn end(&self) {
        *self.0.lock() = None;
    }

    /// Runs `change` on the term, if its epoch is still `epoch`.
    pub(crate) fn update(&self, epoch: u64, change: impl FnOnce(&mut Term)) {
        if let Some(term) = self.0.lock().as_mut().filter(|term| term.epoch == epoch) {
            change(term);
        }
    }
}

/// Returns the time `ms` after `now`, or before `now` if `ms` is negative.
pub(crate) fn from_now(now: Instant, ms: i64) -> Instant {
    let distance = Duration::from_millis(ms.unsigned_abs());
    if ms >= 0 { now + distance } else { now.checked_sub(distance).unwrap_or(now) }
}

/// Converts a duration to whole ms, rounded down.
pub(crate) fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(in crate::redis) fn term(now: Instant) -> Term {
        Term {
            epoch: 1,
            lease_until: now + Duration::from_secs(3),
            session: 1,
            recovered_at: None,
            pointer: Tick(7),
            next: NextMove { at: now, ahead: Duration::ZERO },
            is_aware: true,
            shifted: Duration::ZERO,
            grace_until: None,
            held_since: None,
            is_busy: false,
            frozen: Tick(0),
            seq: 0,
        }
    }

    #[test]
    fn the_pointer_waits_for_requests_no_longer_than_lease_and_tick_allow() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut term = term(now);
        assert_eq!(term.flush_timeout(now, ms(1_000)), ms(250));
        assert_eq!(term.flush_timeout(now, ms(60_000)), ms(1_500));
        assert_eq!(term.flush_timeout(now + ms(2_900), ms(1_000)), ms(50));
        assert_eq!(term.flush_timeout(now + ms(3_100), ms(1_000)), Duration::ZERO);
        term.is_busy = true;
        assert_eq!(term.flush_timeout(now, ms(1_600)), ms(25));
    }

    #[test]
    fn a_leader_that_watches_or_has_put_off_a_move_knows_more_than_another() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let calm = |aware, next, tick| {
            let next = NextMove { at: now + next, ahead: ms(0) };
            Term { is_aware: aware, next, ..term(now) }.is_calm(now, tick)
        };
        assert!(calm(false, ms(400), ms(1_000)));
        assert!(!calm(true, ms(400), ms(1_000)), "the leader put the move off");
        assert!(!calm(false, ms(200), ms(1_000)), "the leader watches Redis");
        assert!(calm(false, ms(200), ms(200)), "the leader watches Redis only for the last half of a short tick");
        assert!(!calm(false, ms(50), ms(200)));
    }

    #[test]
    fn parts_of_a_tick_that_are_put_off_count_once_they_are_a_tick() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let wheel = Wheel::new(15, ms(1_000)).unwrap();
        let mut term = term(now);
        let mut ticks = Vec::new();
        for _ in 0..5 {
            term.put_off(term.next.at + ms(450));
            ticks.push(term.shifted_ticks(wheel));
            term.moved(NextMove { at: term.next.at + ms(1_000), ahead: Duration::ZERO }, wheel);
        }
        assert_eq!(ticks, [0, 0, 1, 0, 1]);
        assert_eq!(term.shifted, ms(250));
    }

    #[test]
    fn a_call_to_a_far_redis_is_sent_ahead_and_one_to_a_near_redis_when_it_is_certain() {
        let (asked, ms) = (Instant::now(), Duration::from_millis);
        let due = |round_trip| NextMove::from_answer(1_000, asked, asked + ms(round_trip), ms(25));
        assert_eq!(due(0), NextMove { at: asked + ms(1_000), ahead: ms(0) });
        assert_eq!(due(20), NextMove { at: asked + ms(1_020), ahead: ms(0) });
        assert_eq!(due(200), NextMove { at: asked + ms(1_025), ahead: ms(175) });
        let before = due(200).no_later_than(asked + ms(1_100));
        assert_eq!(before, NextMove { at: asked + ms(1_025), ahead: ms(75) });
        assert_eq!(before.no_later_than(asked + ms(1_000)), NextMove { at: asked + ms(1_000), ahead: ms(0) });
        assert_eq!(due(20).no_later_than(asked + ms(2_000)), due(20));
    }
}
