//! Which sidecars are dead: those whose heartbeat stands still.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A sidecar, and the number of its last heartbeat.
pub(super) type Beats = (String, u64);

/// Time that this process watched: a gap between two looks counts as half a lease at most, so that a process that was
/// stopped has watched nothing meanwhile.
#[derive(Debug, Default)]
struct Watch(Option<Instant>);

impl Watch {
    /// What was watched between the look before and one at `now`.
    fn look(&mut self, lease: Duration, now: Instant) -> Duration {
        let passed = self.0.replace(now).map_or(Duration::ZERO, |then| now.saturating_duration_since(then));
        passed.min(lease / 2)
    }
}

/// How long a leader has been watching: before that is a grace, nothing is dropped because it is old. After a start or an
/// outage, consumers have it to return.
#[derive(Debug, Default)]
pub(super) struct Grace {
    /// The session of the link, and the epoch of the leader.
    term: (u64, u64),
    watch: Watch,
    lasted: Duration,
}

impl Grace {
    /// Whether the grace is over at a look in this term, at `now`.
    pub(super) fn is_over(&mut self, term: (u64, u64), grace: Duration, lease: Duration, now: Instant) -> bool {
        if self.term != term {
            *self = Grace { term, ..Grace::default() };
        }
        self.lasted += self.watch.look(lease, now);
        self.lasted >= grace
    }
}

/// What was seen of the sidecars in one session of the link. A new session begins anew.
///
/// The leader looks at all. Any other sidecar looks at the one that led last, so that a new leader knows whether the one
/// before is dead.
#[derive(Debug, Default)]
pub(super) struct Sidecars {
    session: u64,
    watch: Watch,
    seen: HashMap<String, Seen>,
}

#[derive(Debug)]
struct Seen {
    beats: u64,
    still: Duration,
}

impl Sidecars {
    /// Looks at heartbeats; returns those that stood still for longer than `lease`.
    pub(super) fn look(
        &mut self,
        session: u64,
        found: impl IntoIterator<Item = Beats>,
        lease: Duration,
        now: Instant,
    ) -> Vec<Beats> {
        if self.session != session {
            *self = Sidecars { session, ..Sidecars::default() };
        }
        let watched = self.watch.look(lease, now);
        let mut before = std::mem::take(&mut self.seen);
        let mut dead = Vec::new();
        for (sidecar, beats) in found {
            let still = match before.remove(&sidecar) {
                Some(seen) if seen.beats == beats => seen.still + watched,
                _ => Duration::ZERO,
            };
            if still > lease {
                dead.push((sidecar.clone(), beats));
            }
            self.seen.insert(sidecar, Seen { beats, still });
        }
        dead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);
    const SECOND: Duration = Duration::from_secs(1);

    fn beats(of_a: u64, of_b: u64) -> Vec<Beats> {
        vec![(String::from("a"), of_a), (String::from("b"), of_b)]
    }

    #[test]
    fn a_heartbeat_that_stands_still_for_longer_than_a_lease_is_dead() {
        let (mut sidecars, begun) = (Sidecars::default(), Instant::now());
        for second in 0..=3 {
            let dead = sidecars.look(1, beats(u64::from(second), 7), LEASE, begun + SECOND * second);
            assert_eq!(dead, [], "after {second} s");
        }
        assert_eq!(sidecars.look(1, beats(4, 7), LEASE, begun + SECOND * 4), [(String::from("b"), 7)]);
        assert_eq!(sidecars.look(1, beats(5, 8), LEASE, begun + SECOND * 5), [], "it has beaten");
    }

    #[test]
    fn time_that_was_not_watched_kills_nobody() {
        let (mut sidecars, begun) = (Sidecars::default(), Instant::now());
        sidecars.look(1, beats(1, 1), LEASE, begun);
        assert_eq!(sidecars.look(1, beats(2, 1), LEASE, begun + LEASE * 100), [], "this process was stopped");
        for second in 0..10 {
            let session = 2 + u64::from(second);
            let dead = sidecars.look(session, beats(3, 1), LEASE, begun + LEASE * 100 + SECOND * second);
            assert_eq!(dead, [], "each session begins anew");
        }
    }

    #[test]
    fn a_leader_knows_of_the_one_before_what_it_saw_before_it_led() {
        let (mut sidecars, begun) = (Sidecars::default(), Instant::now());
        for second in 0..=3 {
            let dead = sidecars.look(1, [(String::from("b"), 7)], LEASE, begun + SECOND * second);
            assert_eq!(dead, []);
        }
        assert_eq!(sidecars.look(1, beats(1, 7), LEASE, begun + SECOND * 4), [(String::from("b"), 7)]);
    }

    #[test]
    fn a_grace_lasts_for_time_that_the_leader_watched_in_one_term() {
        let (mut grace, begun) = (Grace::default(), Instant::now());
        let mut is_over = |term, second| grace.is_over(term, LEASE * 2, LEASE, begun + SECOND * second);
        assert!(!is_over((1, 1), 0));
        assert!(!is_over((1, 1), 100), "this process was stopped");
        let over = (101..120).find(|second| is_over((1, 1), *second));
        assert_eq!(over, Some(105), "half a lease of the pause counts");
        assert!(is_over((1, 1), 106));
        assert!(!is_over((2, 1), 107), "Redis was unreachable");
        assert!(!is_over((2, 5), 200), "another led meanwhile");
    }
}
