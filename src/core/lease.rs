//! The leadership over a ring. The *leader* is the sidecar that moves the pointer of the ring, and it leads as long as
//! it holds the *lease*. This file has the trait of a lease, and the observations of a *candidate*, which is a sidecar
//! that may lead next.

use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::refusal::Refusal;
use super::tick::Tick;

/// The result of [`Lease::maintain`]: whether this sidecar may move the pointer of the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// This sidecar leads.
    Leads {
        /// The fencing token, which is larger for each new leader.
        epoch: u64,
        /// When to call [`Lease::maintain`] again; `None` if no other sidecar can lead.
        renew_at: Option<Instant>,
    },
    /// This sidecar does not lead.
    Follows {
        /// When to call [`Lease::maintain`] again, as a candidate.
        retry_after: Duration,
    },
}

/// The leadership over one ring for a limited time.
#[async_trait]
pub trait Lease: Send + Sync {
    /// Acquires the lease if it is free, or renews it if this sidecar holds it. Instead of renewing, a leader can also
    /// hand the lease over to a sidecar that leads fewer rings.
    async fn maintain(&self, now: Instant) -> Result<Leadership, Refusal>;

    /// Releases the lease, so that another sidecar can lead at once. Succeeds also if this sidecar does not hold the
    /// lease.
    async fn release(&self, now: Instant) -> Result<(), Refusal>;

    /// Registers a callback that is called when the lease may be free. The callback makes the ticker call
    /// [`Lease::maintain`] at once.
    fn on_lease_free(&self, notify: Box<dyn Fn() + Send + Sync>);
}

/// The average number of observations that a candidate makes within the duration of a lease.
const LOOKS_PER_LEASE: u32 = 6;

/// The observations of a candidate: the lease of another sidecar, and the pointer. The monotonic clock of the
/// candidate measures for how long each of them has not changed.
///
/// A wall clock can be set. So it cannot show how long a lease is still valid, or how many ticks were missed. Time
/// counts only while the candidate observes the store and the store answers.
#[derive(Debug)]
pub(crate) struct Candidate {
    lease: Duration,
    session: u64,
    /// The token that identifies the holder, and the number of renewals, from the last observed lease.
    holder: Option<Observed<(String, String)>>,
    /// The duration of the holder's lease.
    holders_lease: Duration,
    pointer: Option<Observed<PointerPosition>>,
}

/// The tick at which the pointer stands, and the due time of the move to this tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PointerPosition {
    /// The tick at which the pointer stands.
    pub(crate) pointer: Tick,
    /// When the pointer was due to move to this tick, in ms by the clock of the store. Deadlines count from this
    /// time.
    pub(crate) due_ms: u64,
}

/// A value, and the time for which it was observed without a change. A gap between two observations counts as at most
/// half a lease, because a stalled process observes nothing.
#[derive(Debug)]
pub(crate) struct Observed<T> {
    value: T,
    /// The time for which the value was observed without a change, up to the last observation.
    watched: Duration,
    looked_at: Instant,
}

impl<T: PartialEq> Observed<T> {
    /// Records an observation at `now`. Returns for how long the value was observed without a change. `lease` is the
    /// duration of a lease.
    pub(crate) fn record(observed: &mut Option<Observed<T>>, value: T, now: Instant, lease: Duration) -> Duration {
        let same = observed.as_ref().filter(|observed| observed.value == value);
        let watched = same.map_or(Duration::ZERO, |observed| observed.watched_until(now, lease));
        *observed = Some(Observed { value, watched, looked_at: now });
        watched
    }

    fn watched_until(&self, now: Instant, lease: Duration) -> Duration {
        self.watched + now.saturating_duration_since(self.looked_at).min(lease / 2)
    }
}

impl Candidate {
    /// Creates a candidate without observations, for a lease of this duration.
    pub(crate) fn new(lease: Duration) -> Candidate {
        Candidate { lease, session: 0, holder: None, holders_lease: lease, pointer: None }
    }

    /// Starts a session with the store. If the session is new, forgets all observations, because the candidate
    /// observed nothing between the sessions.
    pub(crate) fn enter_session(&mut self, session: u64) {
        if self.session != session {
            *self = Candidate { session, ..Candidate::new(self.lease) };
        }
    }

    /// Forgets the last holder. Must be called when this sidecar begins to lead.
    pub(crate) fn forget_holder(&mut self) {
        self.holder = None;
    }

    /// Records an observation: the token and the number of renewals of another sidecar's lease, the duration of that
    /// lease, and the pointer. `since_due_ms` is the time since `position.due_ms`, by the clock of the store. It is
    /// negative if that time is in the future. Returns whether the token differs from the last observed token.
    pub(crate) fn observe(
        &mut self,
        holder: (String, String),
        lease: Duration,
        position: PointerPosition,
        since_due_ms: i64,
        now: Instant,
    ) -> bool {
        self.holders_lease = lease;
        let is_other = self.holder.as_ref().is_none_or(|seen| seen.value.0 != holder.0);
        Observed::record(&mut self.holder, holder, now, self.lease);
        Observed::record(&mut self.pointer, position, now, self.lease);
        if let Some(seen) = &mut self.pointer {
            // The time before the due time must not count as observed, because deadlines count from the due time. The
            // due time can be in the future, for example because the clock of the store was set back.
            let ms = Duration::from_millis(since_due_ms.unsigned_abs());
            let (since, until) = if since_due_ms < 0 { (Duration::ZERO, ms) } else { (ms, Duration::ZERO) };
            seen.watched = seen.watched.min(since);
            seen.looked_at = now + until;
        }
        is_other
    }

    /// Returns the holder if its lease has not changed for twice the duration of a lease. If the durations of the
    /// holder and of this candidate differ, the longer one counts. Normally such a lease has expired long before. It
    /// persists only if the clock of the store was set back.
    pub(crate) fn stalled_holder(&self, now: Instant) -> Option<(String, String)> {
        let seen = self.holder.as_ref()?;
        let watched = seen.watched_until(now, self.lease);
        (watched >= self.lease.max(self.holders_lease) * 2).then(|| seen.value.clone())
    }

    /// Returns the last observed position of the pointer, and for how long the pointer was observed there.
    pub(crate) fn observed_pointer(&self, now: Instant) -> Option<(PointerPosition, Duration)> {
        let seen = self.pointer.as_ref()?;
        Some((seen.value, seen.watched_until(now, self.lease)))
    }

    /// Returns whether the last observation is at most half a lease old. If it is older, the candidate does not know
    /// whether the store answered and a sidecar led since then.
    pub(crate) fn is_current(&self, now: Instant) -> bool {
        let is_recent = |seen: &Observed<_>| now.saturating_duration_since(seen.looked_at) <= self.lease / 2;
        self.pointer.as_ref().is_some_and(is_recent)
    }

    /// Returns the time until the next observation. `random` is a random number. It makes the candidates observe at
    /// different times.
    pub(crate) fn retry_after(&self, random: u64) -> Duration {
        let look = self.lease / LOOKS_PER_LEASE;
        let spread = u32::try_from(random % 512).unwrap_or_default();
        look * 3 / 4 + look * spread / 1_024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);

    /// A value for `since_due_ms` that is longer than any observation.
    const LONG_AGO: i64 = 1_000_000;

    fn at(tick: u64) -> PointerPosition {
        PointerPosition { pointer: Tick(tick), due_ms: 1 }
    }

    fn holder(renewals: u32) -> (String, String) {
        (String::from("other"), renewals.to_string())
    }

    /// Records the same observation every half second.
    fn watch(candidate: &mut Candidate, from: Instant, time: Duration) {
        let looks = time.as_millis() / 500;
        for look in 0..=u32::try_from(looks).unwrap() {
            candidate.observe(holder(2), LEASE, at(8), LONG_AGO, from + Duration::from_millis(500) * look);
        }
    }

    #[test]
    fn a_holder_is_stalled_only_after_two_durations_without_a_renewal() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        assert!(candidate.observe(holder(1), LEASE, at(7), LONG_AGO, start));
        let renewed = start + LEASE;
        assert!(!candidate.observe(holder(2), LEASE, at(8), LONG_AGO, renewed), "the holder is the same");
        watch(&mut candidate, renewed, LEASE * 11 / 6);
        assert_eq!(candidate.stalled_holder(renewed + LEASE * 11 / 6), None);
        watch(&mut candidate, renewed, LEASE * 2);
        assert_eq!(candidate.stalled_holder(renewed + LEASE * 2), Some(holder(2)));
    }

    #[test]
    fn a_holder_with_a_longer_lease_has_more_time_to_renew() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        let looks = (0..=20).map(|look| start + LEASE / 2 * look);
        let mut still = looks.map(|now| {
            candidate.observe(holder(1), LEASE * 4, at(7), LONG_AGO, now);
            (now - start, candidate.stalled_holder(now).is_some())
        });
        assert_eq!(still.find(|(_, still)| *still), Some((LEASE * 8, true)));
    }

    #[test]
    fn a_pointer_that_is_delayed_or_not_yet_due_is_observed_from_its_due_time() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        let ms = |ms| start + Duration::from_millis(ms);
        let mut look = |due_ms, since_due_ms, at| {
            let position = PointerPosition { pointer: Tick(8), due_ms };
            candidate.observe(holder(2), LEASE, position, since_due_ms, ms(at));
            candidate.observed_pointer(ms(at + 100)).map(|(seen, watched)| (seen.due_ms, watched.as_millis()))
        };
        assert_eq!([look(1_000, 700, 0), look(1_000, 1_700, 1_000)], [Some((1_000, 100)), Some((1_000, 1_100))]);
        assert_eq!(look(3_000, 0, 1_500), Some((3_000, 100)), "an election has delayed the pointer");
        assert_eq!(look(3_000, -60, 1_900), Some((3_000, 40)), "the pointer is due in 60 ms");
        assert_eq!(look(3_000, -600, 2_000), Some((3_000, 0)), "the pointer is not yet due");
        assert_eq!(look(3_000, 200, 2_500), Some((3_000, 100)), "the pointer was expected at 2,600 ms");
        assert_eq!(look(3_000, 90_000, 2_600), Some((3_000, 200)), "the clock of the store was set forwards");
    }

    #[test]
    fn observations_from_before_an_outage_do_not_count() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        candidate.enter_session(1);
        watch(&mut candidate, start, LEASE);
        assert_eq!(candidate.observed_pointer(start + LEASE), Some((at(8), LEASE)));
        assert!(candidate.is_current(start + LEASE));
        candidate.enter_session(2);
        assert!(!candidate.is_current(start + LEASE));
        assert_eq!(candidate.observed_pointer(start + LEASE * 9), None);
        assert_eq!(candidate.stalled_holder(start + LEASE * 9), None);
    }

    #[test]
    fn a_stalled_candidate_observed_nothing() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        watch(&mut candidate, start, LEASE / 3);
        let woken = start + Duration::from_secs(600);
        assert_eq!(candidate.observed_pointer(woken), Some((at(8), LEASE * 5 / 6)), "a third, and a half at most");
        assert!(candidate.is_current(start + LEASE / 3 + LEASE / 2) && !candidate.is_current(woken));
        candidate.observe(holder(2), LEASE, at(8), LONG_AGO, woken);
        assert_eq!(candidate.stalled_holder(woken), None);
    }

    #[test]
    fn candidates_observe_several_times_per_lease_and_not_all_at_once() {
        let candidate = Candidate::new(LEASE);
        let looks: Vec<Duration> = (0..2_000).step_by(97).map(|random| candidate.retry_after(random)).collect();
        assert!(looks.iter().all(|look| (LEASE / 8..=LEASE / 4).contains(look)), "{looks:?}");
        assert!(looks.iter().max() > looks.iter().min());
    }
}
