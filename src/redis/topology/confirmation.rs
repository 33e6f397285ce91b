//! The confirmation of one link: until when a majority confirms that its Redis is the primary.
//!
//! A sidecar that was cut off with the primary before a failover would go on expiring ticks there, while the Acks go to
//! another. So a tick expires only while the confirmation of a link is good; afterwards it waits as after an outage.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Whether a majority confirms the Redis of a link.
#[derive(Debug, Default)]
pub(crate) struct Confirmation(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The session that it is about.
    session: u64,
    /// Until when the latest confirmations are, or were, good; none before the first session.
    until: Option<Instant>,
    /// When the session began or, if that is later, when it was confirmed again after it had not been.
    recovered_at: Option<Instant>,
}

impl Confirmation {
    /// Sets until when a session is confirmed, which began after an outage or not, as it is known at a time `now`.
    pub(crate) fn set(&self, session: u64, recovered_at: Option<Instant>, until: Option<Instant>, now: Instant) {
        let mut state = self.0.lock();
        if state.session != session {
            *state = State { session, until: until.or(Some(now)), recovered_at };
            return;
        }
        let is_good = |until: Option<Instant>| until.is_some_and(|until| until > now);
        if !is_good(state.until) && is_good(until) {
            state.recovered_at = Some(now);
        }
        // It is good no longer once a majority does not confirm it.
        state.until = until.or(state.until.min(Some(now)));
    }

    /// If a session is confirmed at a time `now`: when the last outage ended, or the last time without a majority. If
    /// not: for how long it was not confirmed.
    pub(crate) fn of(&self, session: u64, now: Instant) -> Result<Option<Instant>, Duration> {
        let state = self.0.lock();
        match state.until.filter(|_| state.session == session) {
            Some(until) if until > now => Ok(state.recovered_at),
            Some(until) => Err(now.saturating_duration_since(until)),
            None => Err(Duration::ZERO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_without_a_majority_ends_like_an_outage() {
        let (confirmation, start) = (Confirmation::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let missing = |ms| Err(Duration::from_millis(ms));
        assert_eq!(confirmation.of(1, start), missing(0), "nothing is known");
        confirmation.set(1, None, Some(at(2_000)), start);
        assert_eq!((confirmation.of(1, at(1_999)), confirmation.of(1, at(2_000))), (Ok(None), missing(0)));
        assert_eq!(confirmation.of(1, at(3_000)), missing(1_000));
        assert_eq!(confirmation.of(2, start), missing(0), "that is another session");
        confirmation.set(1, None, Some(at(3_900)), at(1_900));
        assert_eq!(confirmation.of(1, at(3_000)), Ok(None), "it was confirmed in time");
        confirmation.set(1, None, Some(at(3_900)), at(4_000));
        assert_eq!(confirmation.of(1, at(4_000)), missing(100), "the answer came too late");
        confirmation.set(1, None, None, at(4_050));
        assert_eq!(confirmation.of(1, at(4_050)), missing(150), "and none came");
        confirmation.set(1, None, Some(at(6_000)), at(4_100));
        assert_eq!(confirmation.of(1, at(5_000)), Ok(Some(at(4_100))));
        confirmation.set(1, None, None, at(5_000));
        assert_eq!(confirmation.of(1, at(5_200)), missing(200), "a majority doubts it now");
        confirmation.set(2, Some(at(5_500)), Some(at(7_500)), at(5_500));
        assert_eq!(confirmation.of(2, at(6_000)), Ok(Some(at(5_500))), "an outage ended with the session");
        confirmation.set(3, Some(at(8_000)), None, at(8_000));
        assert_eq!(confirmation.of(3, at(8_300)), missing(300), "none confirmed it yet");
    }
}
