//! The state of an outbox in this process: the batches that this sidecar holds, and the heartbeats that it has seen.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::core::{BatchId, Observed, Refusal};

/// The batches of one group that, as far as this sidecar knows, Redis has assigned to it.
#[derive(Debug, Default)]
pub(super) struct Ownership {
    pub(super) held: HashSet<BatchId>,
    /// Batches that this sidecar has given back for other sidecars, so `take` must skip them here. A batch stays in
    /// this set until this sidecar retakes, settles or releases it.
    pub(super) lent: HashSet<BatchId>,
    /// Ids of stream entries that this sidecar holds and cannot read. The sidecar does not return these entries,
    /// because sidecars would take them again and again.
    pub(super) unreadable: HashSet<String>,
    /// The number of the session (the connection to Redis) in which this record is known to agree with Redis, so that
    /// `recover` has nothing to do. `None` while a script changes the batches of this sidecar. If the answer of that
    /// script is lost or the caller is cancelled, stays `None` until `recover` compares the record with Redis.
    pub(super) verified_in: Option<u64>,
}

impl Ownership {
    pub(super) fn remove(&mut self, batches: &[BatchId]) {
        for batch in batches {
            self.held.remove(batch);
            self.lent.remove(batch);
        }
    }
}

/// The state that the heartbeats and `maintain` keep between two runs.
#[derive(Default)]
pub(super) struct Maintenance {
    pub(super) seen: Mutex<SeenHeartbeats>,
    /// The error of the last heartbeat. `None` if that heartbeat succeeded.
    pub(super) heartbeat: Mutex<Option<Refusal>>,
    /// The limits of the leader in the last warning about different retention limits. The sidecar warns again only if
    /// the limits of the leader change.
    pub(super) reported_bounds: Mutex<String>,
    /// The measurement of the grace time, in which the leader drops no batch or group because of its age: how long this
    /// sidecar has led without a reconnection or a new election. The observed value is the number of the session and
    /// the epoch of the election.
    pub(super) watched: Mutex<Option<Observed<(u64, u64)>>>,
    /// The number of the last call of the script `trim_outbox` that Redis answered. A call after a lost answer has the
    /// number of the lost call, so Redis repeats the answer.
    pub(super) steps: AtomicU64,
}

/// The number of the last heartbeat of each sidecar, and for how long this sidecar has observed that number without a
/// change. In a new session with Redis, this time starts again at zero.
///
/// The leader observes all sidecars. Any other sidecar observes only the last leader. If it becomes the leader itself,
/// it has already measured for how long its predecessor has sent no heartbeat.
#[derive(Debug, Default)]
pub(super) struct SeenHeartbeats(HashMap<String, Option<Observed<(u64, u64)>>>);

impl SeenHeartbeats {
    /// Records the sidecars and heartbeat numbers that were read in a session, and forgets all other sidecars. Returns
    /// the sidecars whose number has not changed for longer than `lease`.
    pub(super) fn record(
        &mut self,
        session: u64,
        found: impl IntoIterator<Item = (String, u64)>,
        lease: Duration,
        now: Instant,
    ) -> Vec<(String, u64)> {
        let mut before = std::mem::take(&mut self.0);
        let mut dead = Vec::new();
        for (sidecar, number) in found {
            let mut seen = before.remove(&sidecar).flatten();
            if Observed::record(&mut seen, (session, number), now, lease) > lease {
                dead.push((sidecar.clone(), number));
            }
            self.0.insert(sidecar, seen);
        }
        dead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);
    const SECOND: Duration = Duration::from_secs(1);

    fn beats(of_a: u64, of_b: u64) -> Vec<(String, u64)> {
        vec![(String::from("a"), of_a), (String::from("b"), of_b)]
    }

    #[test]
    fn a_sidecar_without_a_new_heartbeat_for_longer_than_a_lease_is_dead() {
        let (mut heartbeats, begun) = (SeenHeartbeats::default(), Instant::now());
        for second in 0..=3 {
            let dead = heartbeats.record(1, beats(u64::from(second), 7), LEASE, begun + SECOND * second);
            assert_eq!(dead, [], "after {second} s");
        }
        assert_eq!(heartbeats.record(1, beats(4, 7), LEASE, begun + SECOND * 4), [(String::from("b"), 7)]);
        assert_eq!(heartbeats.record(1, beats(5, 8), LEASE, begun + SECOND * 5), [], "b has sent a new heartbeat");
    }

    #[test]
    fn time_that_was_not_watched_does_not_count() {
        let (mut heartbeats, begun) = (SeenHeartbeats::default(), Instant::now());
        heartbeats.record(1, beats(1, 1), LEASE, begun);
        assert_eq!(heartbeats.record(1, beats(2, 1), LEASE, begun + LEASE * 100), [], "this process was paused");
        for second in 0..10 {
            let session = 2 + u64::from(second);
            let dead = heartbeats.record(session, beats(3, 1), LEASE, begun + LEASE * 100 + SECOND * second);
            assert_eq!(dead, [], "each session measures from zero");
        }
    }

    #[test]
    fn a_new_leader_knows_how_long_the_heartbeat_of_the_one_before_was_unchanged() {
        let (mut heartbeats, begun) = (SeenHeartbeats::default(), Instant::now());
        for second in 0..=3 {
            let dead = heartbeats.record(1, [(String::from("b"), 7)], LEASE, begun + SECOND * second);
            assert_eq!(dead, []);
        }
        assert_eq!(heartbeats.record(1, beats(1, 7), LEASE, begun + SECOND * 4), [(String::from("b"), 7)]);
    }

    #[test]
    fn a_grace_lasts_for_time_that_the_leader_watched_in_one_term() {
        let (mut watched, begun) = (None, Instant::now());
        let mut is_over = |term: (u64, u64), second| {
            Observed::record(&mut watched, term, begun + SECOND * second, LEASE) >= LEASE * 2
        };
        assert!(!is_over((1, 1), 0));
        assert!(!is_over((1, 1), 100), "this process was paused");
        let over = (101..120).find(|second| is_over((1, 1), *second));
        assert_eq!(over, Some(105), "of the pause, half a lease counts");
        assert!(is_over((1, 1), 106));
        assert!(!is_over((2, 1), 107), "a new session measures from zero");
        assert!(!is_over((2, 5), 200), "a new election measures from zero");
    }
}
