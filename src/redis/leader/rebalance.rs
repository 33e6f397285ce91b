//! How sidecars share the leaderships of several rings: who leads the most hands one to who leads the least.
//!
//! Who stands for election in a ring tells there how many rings it leads. The leader of the ring reads that as it renews
//! its lease, and Redis forgets it then: who is named the next time has looked since. So a leader sees all that look, on
//! each of its rings, and soon none that does not. Of two that lead as many the token decides, so that one of them hands
//! over, and the others see it before it is their turn.
//!
//! Nobody is handed a ring who might be gone or lose it: who has just come, or goes, does not tell; nor does who lost one,
//! for longer each time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use crate::redis::leader::term::{Identity, LeadershipTerm};

/// In so many leases without losing a ring a sidecar becomes one that has lost none.
const GOOD_AGAIN: u32 = 64;

/// Who stands for election in a ring, and how many rings it leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Candidacy {
    pub(crate) leads: u64,
    pub(crate) token: String,
    pub(crate) name: String,
}

impl Candidacy {
    /// What the sidecar of this token told.
    pub(crate) fn of(token: String, told: &str) -> Option<Candidacy> {
        let (leads, name) = told.split_once(' ')?;
        Some(Candidacy { leads: leads.parse().ok()?, token, name: name.to_owned() })
    }
}

/// What one sidecar leads, of all rings.
pub(crate) struct Leaderships {
    identity: Identity,
    /// In this time each candidate looks several times, and each leader reads what was told.
    lease: Duration,
    offices: RwLock<Vec<Arc<LeadershipTerm>>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Before this it does not tell what it leads; none before it stands for the first time.
    tells_from: Option<Instant>,
    /// Before this it does not know what the last change has led to.
    hands_over_from: Option<Instant>,
    /// When it last lost a ring, and for how long it did not tell then.
    deposed: Option<(Instant, Duration)>,
}

impl Leaderships {
    /// None yet, of this sidecar.
    pub(crate) fn new(identity: Identity, lease: Duration) -> Leaderships {
        Leaderships { identity, lease, offices: RwLock::default(), state: Mutex::default() }
    }

    /// The office of one more ring.
    pub(crate) fn add_term(&self) -> Arc<LeadershipTerm> {
        let office = Arc::<LeadershipTerm>::default();
        self.offices.write().push(Arc::clone(&office));
        office
    }

    /// Whether there are several rings.
    pub(crate) fn are_shared(&self) -> bool {
        self.offices.read().len() > 1
    }

    /// How many rings this sidecar leads.
    pub(crate) fn count(&self, now: Instant) -> u64 {
        let leads = |office: &Arc<LeadershipTerm>| office.term().is_some_and(|term| now < term.lease_until);
        self.offices.read().iter().map(|office| u64::from(leads(office))).sum()
    }

    /// What the leaders of other rings are told as this sidecar stands for election; nothing where they had better not
    /// hand it one.
    pub(crate) fn told(&self, now: Instant) -> String {
        let tells_from = *self.state.lock().tells_from.get_or_insert(now + self.lease);
        if !self.are_shared() || now < tells_from {
            return String::new();
        }
        format!("{} {}", self.count(now), self.identity.name)
    }

    /// Who is to lead a ring in place of this sidecar, given those who stand for election there.
    pub(crate) fn successor(&self, candidates: Vec<Candidacy>, now: Instant) -> Option<Candidacy> {
        let Identity { token, name, .. } = self.identity.clone();
        let own = Candidacy { leads: self.count(now), token, name };
        let mut state = self.state.lock();
        if state.hands_over_from.is_some_and(|from| now < from) {
            return None;
        }
        let successor = successor(&own, candidates)?;
        state.hands_over_from = Some(now + self.lease);
        Some(successor)
    }

    /// It has won a ring: what it is told may be from before.
    pub(crate) fn has_won(&self, now: Instant) {
        self.state.lock().hands_over_from = Some(now + self.lease);
    }

    /// It gives its rings up, and is to be handed none.
    pub(crate) fn stands_back(&self, now: Instant) {
        self.state.lock().tells_from = Some(now + self.lease);
    }

    /// It has lost a ring: it is to be handed none for a lease, and twice as long each time that it comes again.
    pub(crate) fn was_deposed(&self, now: Instant) {
        let (lease, mut state) = (self.lease, self.state.lock());
        let pause = match state.deposed {
            // Several rings at once are one loss.
            Some((then, pause)) if now < then + lease => pause,
            Some((then, pause)) if now < then + pause + lease * GOOD_AGAIN => (pause * 2).min(lease * GOOD_AGAIN),
            _ => lease,
        };
        (state.deposed, state.tells_from) = (Some((now, pause)), Some(now + pause));
    }
}

/// The one that leads the least, if `own` leads the most, and at least two more than that.
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
            Candidacy::of(index.to_string(), &format!("{leads} sidecar {index}")).unwrap()
        };
        leads.iter().enumerate().map(candidacy).collect()
    }

    /// The leaderships of a sidecar, and the offices of so many rings.
    fn own(rings: u16) -> (Leaderships, Vec<Arc<LeadershipTerm>>) {
        let identity = Identity { name: "me".into(), sidecar: "me-1".into(), token: "own".into() };
        let leaderships = Leaderships::new(identity, LEASE);
        let offices = (0..rings).map(|_| leaderships.add_term()).collect();
        (leaderships, offices)
    }

    /// Has each that leads something look at the others, as often as rings, until nobody hands over.
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
        let ((leaderships, offices), now) = (own(4), Instant::now());
        assert_eq!(leaderships.successor(candidacies(&[0]), now), None, "it leads nothing");
        for office in &offices {
            office.enter(term(now + LEASE * 2));
        }
        assert_eq!(leaderships.successor(Vec::new(), now), None, "nobody else is there");
        assert!(leaderships.successor(candidacies(&[0]), now).is_some());
        offices[0].leave();
        let later = now + LEASE / 2;
        assert_eq!(leaderships.successor(candidacies(&[0]), later), None, "what changed is not told yet");
        leaderships.has_won(later);
        assert_eq!(leaderships.successor(candidacies(&[0]), now + LEASE), None, "who told that may have gone");
        assert_eq!(
            leaderships.successor(candidacies(&[1]), later + LEASE).map(|candidacy| candidacy.name).as_deref(),
            Some("sidecar 0")
        );
    }

    #[test]
    fn a_ring_whose_lease_has_run_out_does_not_count() {
        let ((leaderships, offices), now) = (own(2), Instant::now());
        offices[0].enter(term(now));
        assert_eq!(leaderships.count(now), 1);
        assert_eq!(leaderships.count(now + LEASE), 0);
    }

    #[test]
    fn who_comes_goes_or_loses_rings_does_not_tell_for_a_while() {
        let ((leaderships, _), begun) = (own(2), Instant::now());
        let tells_at = |now| leaderships.told(now) == "0 me";
        assert!(!tells_at(begun));
        assert!(tells_at(begun + LEASE));
        leaderships.stands_back(begun + LEASE);
        assert!(!tells_at(begun + LEASE * 15 / 8));
        let mut now = begun + LEASE * 2;
        let mut pauses = Vec::new();
        for _ in 0..9 {
            for ring in 0..3 {
                leaderships.was_deposed(now + LEASE / 8 * ring);
            }
            now += LEASE / 4;
            let pause = (1..=GOOD_AGAIN).find(|pause| tells_at(now + LEASE * *pause)).unwrap();
            pauses.push(pause);
            now += LEASE * pause;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        now += LEASE * (GOOD_AGAIN + 1);
        leaderships.was_deposed(now);
        assert!(tells_at(now + LEASE), "it had lost nothing for long");
    }

    #[test]
    fn a_single_ring_is_not_shared() {
        let ((leaderships, _), now) = (own(1), Instant::now());
        leaderships.told(now);
        assert_eq!(leaderships.told(now + LEASE), "");
        assert!(!leaderships.are_shared());
        assert!(own(2).0.are_shared());
    }
}
