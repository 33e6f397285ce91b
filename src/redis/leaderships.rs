//! How sidecars share the leaderships of several rings: who leads the most hands one to who leads the least.
//!
//! Who stands for election in a ring tells there how many rings it leads. The leader of the ring reads that as it renews
//! its lease, and Redis forgets it then: who is named the next time has looked since. So a leader sees all that live, on
//! each of its rings, and none that does not. Of two that lead as many the token decides, so that one of them hands over,
//! and the others see it before it is their turn.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use super::office::Office;

/// Who stands for election in a ring, and how many rings it leads.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidacy {
    pub(super) leads: u64,
    pub(super) token: String,
}

/// What one sidecar leads, of all rings.
pub(super) struct Leaderships {
    token: String,
    /// For so long after it handed one over it does not know yet what that has changed.
    pause: Duration,
    offices: RwLock<Vec<Arc<Office>>>,
    handed_over: Mutex<Option<Instant>>,
}

impl Leaderships {
    /// None yet, of a sidecar that puts `token` into its leases. Candidates look more than once in `lease`.
    pub(super) fn new(token: String, lease: Duration) -> Leaderships {
        Leaderships { token, pause: lease, offices: RwLock::default(), handed_over: Mutex::default() }
    }

    /// The office of one more ring.
    pub(super) fn add_office(&self) -> Arc<Office> {
        let office = Arc::<Office>::default();
        self.offices.write().push(Arc::clone(&office));
        office
    }

    /// How many rings this sidecar leads, for the others to know; none where there is nothing to share.
    pub(super) fn told(&self) -> Option<u64> {
        let offices = self.offices.read();
        (offices.len() > 1).then(|| offices.iter().map(|office| u64::from(office.term().is_some())).sum())
    }

    /// Who is to lead a ring in place of this sidecar, given those who stand for election there.
    pub(super) fn successor(&self, candidates: Vec<Candidacy>, now: Instant) -> Option<Candidacy> {
        let own = Candidacy { leads: self.told()?, token: self.token.clone() };
        let mut handed_over = self.handed_over.lock();
        if handed_over.is_some_and(|then| now < then + self.pause) {
            return None;
        }
        let successor = successor(&own, candidates)?;
        *handed_over = Some(now);
        Some(successor)
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

    fn candidacies(leads: &[u64]) -> Vec<Candidacy> {
        let candidacy = |(index, leads): (usize, &u64)| Candidacy { leads: *leads, token: index.to_string() };
        leads.iter().enumerate().map(candidacy).collect()
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
    fn one_leadership_is_handed_over_at_a_time() {
        let lease = Duration::from_secs(3);
        let (leaderships, now) = (Leaderships::new(String::from("own"), lease), Instant::now());
        let offices: Vec<Arc<Office>> = (0..4).map(|_| leaderships.add_office()).collect();
        assert_eq!(leaderships.successor(candidacies(&[0]), now), None, "it leads nothing");
        for office in &offices {
            office.enter(crate::redis::office::tests::term(now));
        }
        assert_eq!(leaderships.told(), Some(4));
        assert_eq!(leaderships.successor(Vec::new(), now), None, "nobody else is there");
        assert!(leaderships.successor(candidacies(&[0]), now).is_some());
        offices[0].leave();
        assert_eq!(
            leaderships.successor(candidacies(&[0]), now + lease / 2),
            None,
            "it may not have told of it yet"
        );
        assert!(leaderships.successor(candidacies(&[1]), now + lease).is_some());
    }

    #[test]
    fn a_single_ring_is_not_shared() {
        let (leaderships, now) = (Leaderships::new(String::from("own"), Duration::ZERO), Instant::now());
        leaderships.add_office().enter(crate::redis::office::tests::term(now));
        assert_eq!(leaderships.told(), None);
        assert_eq!(leaderships.successor(candidacies(&[0]), now), None);
    }
}
