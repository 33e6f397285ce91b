//! Rebalances leaderships over several rings: the sidecar that leads the most rings hands one to the sidecar that leads
//! the fewest.
//!
//! A *candidate* of a ring is a sidecar that polls the lease of the ring. With each poll, it announces in Redis how
//! many rings it leads. When the leader renews its lease, it reads and deletes these announcements. So a sidecar that
//! stops polling soon stops being a candidate. If several sidecars lead the most rings, only the one with the greatest
//! token hands a ring over. The others see the change before they hand over a ring.
//!
//! A sidecar announces nothing for a while if it has just started, drains, or has lost a ring. During that time it gets
//! no ring from other leaders.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::redis::leader::term::{CurrentTerm, Identity};

/// Number of leases after which a loss of a ring is forgotten. It is also the maximum pause after a loss, in leases.
const LEASES_UNTIL_FORGIVEN: u32 = 64;

/// A sidecar that announced itself as a candidate of a ring. The order is by the number of rings that the sidecar
/// leads, then by token.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Candidacy {
    pub(crate) leads: u64,
    pub(crate) token: String,
    pub(crate) name: String,
}

impl Candidacy {
    /// Parses the announcement of the sidecar with this token. `announced` is the number of rings that the sidecar
    /// leads, a space, and its name.
    pub(crate) fn parse(token: String, announced: &str) -> Option<Candidacy> {
        let (leads, name) = announced.split_once(' ')?;
        Some(Candidacy { leads: leads.parse().ok()?, token, name: name.to_owned() })
    }
}

/// The leaderships of this sidecar in all rings.
pub(crate) struct Leaderships {
    identity: Identity,
    /// The length of a lease. It is the unit of all pauses here, because within one lease each candidate polls several
    /// times, and each leader reads the announcements at least once.
    lease: Duration,
    /// The current term of this sidecar in each ring, if it leads the ring.
    pub(crate) terms: Vec<Arc<CurrentTerm>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The sidecar announces nothing before this time. `None` until the sidecar first polls a lease.
    announces_from: Option<Instant>,
    /// The sidecar hands no ring over before this time, because announcements may be older than its last win or
    /// hand-over.
    hands_over_from: Option<Instant>,
    /// The time of the last loss of a ring, and the pause after it, in which the sidecar announces nothing.
    lost: Option<(Instant, Duration)>,
}

impl Leaderships {
    pub(crate) fn new(identity: Identity, lease: Duration, rings: u16) -> Leaderships {
        let terms = (0..rings).map(|_| Arc::default()).collect();
        Leaderships { identity, lease, terms, state: Mutex::default() }
    }

    /// Returns whether there are several rings.
    pub(crate) fn are_shared(&self) -> bool {
        self.terms.len() > 1
    }

    /// Returns the number of rings that this sidecar leads at `now`.
    pub(crate) fn count(&self, now: Instant) -> u64 {
        self.terms.iter().map(|term| u64::from(term.lasting(now).is_some())).sum()
    }

    /// Returns the announcement for the leaders of other rings, or an empty text while this sidecar should get no ring.
    pub(crate) fn announcement(&self, now: Instant) -> String {
        let announces_from = *self.state.lock().announces_from.get_or_insert(now + self.lease);
        if !self.are_shared() || now < announces_from {
            return String::new();
        }
        format!("{} {}", self.count(now), self.identity.name)
    }

    /// Returns the candidate to which this sidecar should hand a ring over, or `None`. The successor is the candidate
    /// that leads the fewest rings. This sidecar must be greater than all candidates in the order of [`Candidacy`]. It
    /// must also lead at least two rings more than the successor.
    pub(crate) fn successor(&self, candidates: Vec<Candidacy>, now: Instant) -> Option<Candidacy> {
        let Identity { token, name } = self.identity.clone();
        let own = Candidacy { leads: self.count(now), token, name };
        let mut state = self.state.lock();
        if state.hands_over_from.is_some_and(|from| now < from) {
            return None;
        }
        let successor = successor(&own, candidates)?;
        state.hands_over_from = Some(now + self.lease);
        Some(successor)
    }

    /// Records that this sidecar won a ring. Until new announcements arrive, for one lease, it hands no ring over.
    pub(crate) fn record_win(&self, now: Instant) {
        self.state.lock().hands_over_from = Some(now + self.lease);
    }

    /// Records that this sidecar gives up its rings. It announces nothing for one lease.
    pub(crate) fn withdraw(&self, now: Instant) {
        self.state.lock().announces_from = Some(now + self.lease);
    }

    /// Records that this sidecar lost a ring. The sidecar announces nothing for one lease. This pause doubles with each
    /// further loss, unless a long time without a loss has passed.
    pub(crate) fn record_loss(&self, now: Instant) {
        let (lease, mut state) = (self.lease, self.state.lock());
        let forgiven = lease * LEASES_UNTIL_FORGIVEN;
        let pause = match state.lost {
            // Several losses within one lease count as one.
            Some((then, pause)) if now < then + lease => pause,
            Some((then, pause)) if now < then + pause + forgiven => (pause * 2).min(forgiven),
            _ => lease,
        };
        (state.lost, state.announces_from) = (Some((now, pause)), Some(now + pause));
    }
}

fn successor(own: &Candidacy, mut candidates: Vec<Candidacy>) -> Option<Candidacy> {
    candidates.retain(|candidate| candidate.token != own.token);
    let leads_most = candidates.iter().all(|candidate| candidate < own);
    candidates.into_iter().min().filter(|least| leads_most && own.leads >= least.leads + 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::leader::term::tests::term;

    const LEASE: Duration = Duration::from_secs(3);

    fn candidacies(leads: &[u64]) -> Vec<Candidacy> {
        let candidacy = |(index, leads): (usize, &u64)| {
            Candidacy::parse(index.to_string(), &format!("{leads} sidecar {index}")).unwrap()
        };
        leads.iter().enumerate().map(candidacy).collect()
    }

    /// Returns the leaderships of a sidecar, and the terms of its rings.
    fn own(rings: u16) -> (Leaderships, Vec<Arc<CurrentTerm>>) {
        let identity = Identity { name: "me".into(), token: "own".into() };
        let leaderships = Leaderships::new(identity, LEASE, rings);
        let terms = leaderships.terms.clone();
        (leaderships, terms)
    }

    /// Applies the rule for a hand-over to each sidecar in turn, until no sidecar hands a ring over. Returns the number
    /// of rings that each sidecar then leads, and the number of hand-overs.
    fn share(mut leads: Vec<u64>) -> (Vec<u64>, u64) {
        let mut handed_over = 0;
        loop {
            let before = handed_over;
            for leader in 0..leads.len() {
                let all = candidacies(&leads);
                if let Some(least) = successor(&all[leader], all.clone()) {
                    leads[leader] -= 1;
                    leads[least.token.parse::<usize>().unwrap()] += 1;
                    handed_over += 1;
                }
            }
            if handed_over == before {
                return (leads, handed_over);
            }
            assert!(handed_over < 1_000, "leaderships go round: {leads:?}");
        }
    }

    #[test]
    fn all_come_to_lead_about_as_many_with_no_more_changes_than_it_takes() {
        for (leads, changes) in [
            (vec![8, 0], 4),
            (vec![0, 16, 0, 0], 12),
            (vec![2, 2, 2, 0], 1),
            (vec![3, 1, 7, 1], 4),
            (vec![1, 0, 0], 0),
        ] {
            let (shared, handed_over) = share(leads.clone());
            let (most, least) = (shared.iter().max().unwrap(), shared.iter().min().unwrap());
            assert!(most - least <= 1, "{leads:?} became {shared:?}");
            assert_eq!(shared.iter().sum::<u64>(), leads.iter().sum::<u64>());
            assert_eq!(handed_over, changes, "{leads:?} became {shared:?}");
        }
    }

    #[test]
    fn of_several_that_lead_the_most_one_hands_over() {
        let all = candidacies(&[2, 2, 0, 0, 2]);
        let by: Vec<Option<u64>> =
            all.iter().map(|own| successor(own, all.clone()).map(|least| least.leads)).collect();
        assert_eq!(by, [None, None, None, None, Some(0)]);
    }

    #[test]
    fn one_leadership_is_handed_over_at_a_time_and_none_just_after_one_was_won() {
        let ((leaderships, terms), now) = (own(4), Instant::now());
        assert_eq!(leaderships.successor(candidacies(&[0]), now), None, "this sidecar leads no ring");
        for ring in &terms {
            ring.begin(term(now + LEASE * 2));
        }
        assert_eq!(leaderships.successor(Vec::new(), now), None, "there is no candidate");
        assert!(leaderships.successor(candidacies(&[0]), now).is_some());
        terms[0].end();
        let later = now + LEASE / 2;
        assert_eq!(leaderships.successor(candidacies(&[0]), later), None, "the change is not announced yet");
        leaderships.record_win(later);
        assert_eq!(
            leaderships.successor(candidacies(&[0]), now + LEASE),
            None,
            "the announcement may be older than the win"
        );
        assert_eq!(
            leaderships.successor(candidacies(&[1]), later + LEASE).map(|candidacy| candidacy.name).as_deref(),
            Some("sidecar 0")
        );
    }

    #[test]
    fn a_ring_whose_lease_has_run_out_does_not_count() {
        let ((leaderships, terms), now) = (own(2), Instant::now());
        terms[0].begin(term(now));
        assert_eq!(leaderships.count(now), 1);
        assert_eq!(leaderships.count(now + LEASE), 0);
    }

    #[test]
    fn a_sidecar_that_comes_drains_or_loses_rings_announces_nothing_for_a_while() {
        let ((leaderships, _), begun) = (own(2), Instant::now());
        let announces_at = |now| leaderships.announcement(now) == "0 me";
        assert!(!announces_at(begun));
        assert!(announces_at(begun + LEASE));
        leaderships.withdraw(begun + LEASE);
        assert!(!announces_at(begun + LEASE * 15 / 8));
        let mut now = begun + LEASE * 2;
        let mut pauses = Vec::new();
        for _ in 0..9 {
            for ring in 0..3 {
                leaderships.record_loss(now + LEASE / 8 * ring);
            }
            now += LEASE / 4;
            let pause = (1..=LEASES_UNTIL_FORGIVEN).find(|pause| announces_at(now + LEASE * *pause)).unwrap();
            pauses.push(pause);
            now += LEASE * pause;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        now += LEASE * (LEASES_UNTIL_FORGIVEN + 1);
        leaderships.record_loss(now);
        assert!(announces_at(now + LEASE), "the earlier losses are forgotten");
    }

    #[test]
    fn a_single_ring_is_not_shared() {
        let ((leaderships, _), now) = (own(1), Instant::now());
        leaderships.announcement(now);
        assert_eq!(leaderships.announcement(now + LEASE), "");
        assert!(!leaderships.are_shared());
        assert!(own(2).0.are_shared());
    }
}
