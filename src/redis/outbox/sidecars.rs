//! Who of the other sidecars is dead: those whose beat stands still.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A sidecar, and how often it has beaten.
pub(super) type Beats = (String, u64);

/// What was seen of the sidecars in one session of the link.
///
/// Time counts only where it was watched: a gap between two looks counts as half a lease at most, so that a process
/// that was stopped does not take all others for dead, and a new session begins anew.
#[derive(Debug, Default)]
pub(super) struct Sidecars {
    session: u64,
    looked_at: Option<Instant>,
    seen: HashMap<String, Seen>,
}

#[derive(Debug)]
struct Seen {
    beats: u64,
    still: Duration,
}

impl Sidecars {
    /// Looks at the beats of all sidecars; returns those that stood still for longer than `lease`.
    pub(super) fn look(&mut self, session: u64, found: Vec<Beats>, lease: Duration, now: Instant) -> Vec<Beats> {
        if self.session != session {
            *self = Sidecars { session, ..Sidecars::default() };
        }
        let passed =
            self.looked_at.replace(now).map_or(Duration::ZERO, |then| now.saturating_duration_since(then));
        let watched = passed.min(lease / 2);
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
    fn a_beat_that_stands_still_for_longer_than_a_lease_is_dead() {
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
}
