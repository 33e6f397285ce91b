//! Who leads: the contract of a lease on a ring, and what a candidate may conclude from what it saw.

use std::time::{Duration, Instant};

use super::ring::Reply;
use super::tick::Tick;

/// Whether this sidecar may turn the ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// It leads under this epoch; tend the lease again before the time given, if one is.
    Leads {
        /// The fencing token.
        epoch: u64,
        /// When the lease wants to be renewed; never where nobody else could lead.
        renew_at: Option<Instant>,
    },
    /// Another leads; ask again after this long.
    Follows {
        /// When to stand for election again.
        retry_after: Duration,
    },
}

/// Time-bounded leadership over one ring.
pub trait Lease: Send + Sync {
    /// Acquires or renews, whichever is in order at `now`; or hands the ring over to another that leads fewer.
    fn maintain(&self, now: Instant) -> Reply<Leadership>;

    /// Gives the lease up, so that another can lead at once. Giving up what one does not have is no error.
    fn release(&self, now: Instant) -> Reply<()>;

    /// Registers who is to be told that the lease may be free, so that it is asked for before its time.
    fn on_vacancy(&self, tell: Box<dyn Fn() + Send + Sync>);
}

/// How often a candidate looks, as a share of the lease.
const LOOKS_PER_LEASE: u32 = 6;

/// What a candidate has seen, by its own monotonic clock: of the lease that another holds, and of the pointer.
///
/// A clock that can be set says neither how long a lease still lasts nor how many ticks were missed. What a
/// candidate has watched itself, while the store kept answering, it knows. A gap between two looks counts as half a
/// lease at most: a process that stood still has watched nothing.
#[derive(Debug)]
pub struct Candidate {
    lease: Duration,
    session: u64,
    holder: Option<Seen<(String, String)>>,
    /// How long the lease of the holder lasts.
    holders_lease: Duration,
    pointer: Option<Seen<PointerPosition>>,
}

/// The position of the pointer, and its due time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PointerPosition {
    /// The tick at which it stands.
    pub pointer: Tick,
    /// When it was due there, in ms by the clock of the store. Deadlines count from it.
    pub due_ms: u64,
}

#[derive(Debug)]
struct Seen<T> {
    what: T,
    /// For how long it was watched, up to the last look.
    watched: Duration,
    looked_at: Instant,
}

impl<T: PartialEq> Seen<T> {
    /// Notes what is there now; whether it is something new.
    fn note(seen: &mut Option<Seen<T>>, what: T, now: Instant, longest_gap: Duration) -> bool {
        if let Some(seen) = seen.as_mut().filter(|seen| seen.what == what) {
            seen.watched = seen.until(now, longest_gap);
            seen.looked_at = now;
            return false;
        }
        *seen = Some(Seen { what, watched: Duration::ZERO, looked_at: now });
        true
    }

    fn until(&self, now: Instant, longest_gap: Duration) -> Duration {
        self.watched + now.saturating_duration_since(self.looked_at).min(longest_gap)
    }
}

impl Candidate {
    /// A candidate that has seen nothing, for a lease of this length.
    #[must_use]
    pub fn new(lease: Duration) -> Candidate {
        Candidate { lease, session: 0, holder: None, holders_lease: lease, pointer: None }
    }

    /// Forgets what was seen in another session: nobody watched in between.
    pub fn enter_session(&mut self, session: u64) {
        if self.session != session {
            *self = Candidate { session, ..Candidate::new(self.lease) };
        }
    }

    /// Forgets who led before: it leads itself.
    pub fn leads(&mut self) {
        self.holder = None;
    }

    /// Notes the token and renewal count of the lease that another holds, how long that lasts without being renewed, and
    /// where the pointer stands, with the ms since it was due there by the clock of the store; negative if it is due only
    /// then. Whether the token is new.
    pub fn observe(
        &mut self,
        holder: (String, String),
        lease: Duration,
        standing: PointerPosition,
        since_due_ms: i64,
        now: Instant,
    ) -> bool {
        self.holders_lease = lease;
        let is_other = self.holder.as_ref().is_none_or(|seen| seen.what.0 != holder.0);
        Seen::note(&mut self.holder, holder, now, self.lease / 2);
        Seen::note(&mut self.pointer, standing, now, self.lease / 2);
        if let Some(seen) = &mut self.pointer {
            // Adds count from when it is due. That may be later, also because the clock of the store was set back.
            let ms = Duration::from_millis(since_due_ms.unsigned_abs());
            let (since, until) = if since_due_ms < 0 { (Duration::ZERO, ms) } else { (ms, Duration::ZERO) };
            seen.watched = seen.watched.min(since);
            seen.looked_at = now + until;
        }
        is_other
    }

    /// The lease, if token and renewal count have stood still for two durations, of it and of one's own: its holder is
    /// dead, and a clock that was set back keeps it.
    #[must_use]
    pub fn stalled_holder(&self, now: Instant) -> Option<(String, String)> {
        let seen = self.holder.as_ref()?;
        (seen.until(now, self.lease / 2) >= self.lease.max(self.holders_lease) * 2).then(|| seen.what.clone())
    }

    /// The last position of the pointer that was seen, and for how long it has been watched there.
    #[must_use]
    pub fn pointer_seen(&self, now: Instant) -> Option<(PointerPosition, Duration)> {
        let seen = self.pointer.as_ref()?;
        Some((seen.what, seen.until(now, self.lease / 2)))
    }

    /// Whether it has looked lately: then it knows whether the store was there, and somebody led.
    #[must_use]
    pub fn watches(&self, now: Instant) -> bool {
        let looked_at = self.pointer.as_ref().map(|seen| seen.looked_at);
        looked_at.is_some_and(|looked_at| now.saturating_duration_since(looked_at) <= self.lease / 2)
    }

    /// When to look again; `random` spreads the candidates.
    #[must_use]
    pub fn retry_after(&self, random: u64) -> Duration {
        let look = self.lease / LOOKS_PER_LEASE;
        let spread = u32::try_from(random % 512).unwrap_or_default();
        look * 3 / 4 + look * spread / 1_024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);

    /// The pointer was due there before anybody looked.
    const LONG_AGO: i64 = 1_000_000;

    fn at(tick: u64) -> PointerPosition {
        PointerPosition { pointer: Tick(tick), due_ms: 1 }
    }

    fn holder(renewals: u32) -> (String, String) {
        (String::from("other"), renewals.to_string())
    }

    /// Looks every half second, and sees the same.
    fn watch(candidate: &mut Candidate, from: Instant, time: Duration) {
        let looks = time.as_millis() / 500;
        for look in 0..=u32::try_from(looks).unwrap() {
            candidate.observe(holder(2), LEASE, at(8), LONG_AGO, from + Duration::from_millis(500) * look);
        }
    }

    #[test]
    fn a_lease_stands_still_only_after_two_durations_without_a_renewal() {
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
    fn a_longer_lease_of_another_has_longer_to_be_renewed() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        let looks = (0..=20).map(|look| start + LEASE / 2 * look);
        let mut still = looks.map(|now| {
            candidate.observe(holder(1), LEASE * 4, at(7), LONG_AGO, now);
            (now - start, candidate.stalled_holder(now).is_some())
        });
        assert_eq!(still.find(|(_, still)| *still), Some((LEASE * 8, true)));
    }

    #[test]
    fn a_pointer_that_is_put_off_or_not_yet_due_is_watched_from_then_on() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        let ms = |ms| start + Duration::from_millis(ms);
        let mut look = |due_ms, since_due_ms, at| {
            let standing = PointerPosition { pointer: Tick(8), due_ms };
            candidate.observe(holder(2), LEASE, standing, since_due_ms, ms(at));
            candidate.pointer_seen(ms(at + 100)).map(|(seen, watched)| (seen.due_ms, watched.as_millis()))
        };
        assert_eq!([look(1_000, 700, 0), look(1_000, 1_700, 1_000)], [Some((1_000, 100)), Some((1_000, 1_100))]);
        assert_eq!(look(3_000, 0, 1_500), Some((3_000, 100)), "an election has put it off");
        assert_eq!(look(3_000, -60, 1_900), Some((3_000, 40)), "it is due in 60 ms");
        assert_eq!(look(3_000, -600, 2_000), Some((3_000, 0)), "it is not yet due");
        assert_eq!(look(3_000, 200, 2_500), Some((3_000, 100)), "it was to be due at 2,600 ms");
        assert_eq!(look(3_000, 90_000, 2_600), Some((3_000, 200)), "the clock of the store was set forwards");
    }

    #[test]
    fn what_was_seen_before_an_outage_counts_for_nothing() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        candidate.enter_session(1);
        watch(&mut candidate, start, LEASE);
        assert_eq!(candidate.pointer_seen(start + LEASE), Some((at(8), LEASE)));
        assert!(candidate.watches(start + LEASE));
        candidate.enter_session(2);
        assert!(!candidate.watches(start + LEASE));
        assert_eq!(candidate.pointer_seen(start + LEASE * 9), None);
        assert_eq!(candidate.stalled_holder(start + LEASE * 9), None);
    }

    #[test]
    fn a_candidate_that_stood_still_has_watched_nothing() {
        let (mut candidate, start) = (Candidate::new(LEASE), Instant::now());
        watch(&mut candidate, start, LEASE / 3);
        let woken = start + Duration::from_secs(600);
        assert_eq!(candidate.pointer_seen(woken), Some((at(8), LEASE * 5 / 6)), "a third, and half at most");
        assert!(candidate.watches(start + LEASE / 3 + LEASE / 2) && !candidate.watches(woken));
        candidate.observe(holder(2), LEASE, at(8), LONG_AGO, woken);
        assert_eq!(candidate.stalled_holder(woken), None);
    }

    #[test]
    fn candidates_look_several_times_a_lease_and_not_all_at_once() {
        let candidate = Candidate::new(LEASE);
        let looks: Vec<Duration> = (0..2_000).step_by(97).map(|random| candidate.retry_after(random)).collect();
        assert!(looks.iter().all(|look| (LEASE / 8..=LEASE / 4).contains(look)), "{looks:?}");
        assert!(looks.iter().max() > looks.iter().min());
    }
}
