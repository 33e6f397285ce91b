//! What the Sentinels, or the nodes of a Cluster, say of where Redis is, and what a majority of the votes confirms.
//!
//! A failover needs a majority of the votes, and a primary that was not heard for as long as the failover timer says. So
//! one that is over before a majority was asked is known to one of them, or soon to be, and one that begins later is not
//! over before that timer has run out. No confirmation is good for longer than the timer, nor than [`LONGEST`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use redis::Client;

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::topology::cluster::{Map, Slot, Told};
use crate::redis::topology::nodes::Found;

/// No confirmation is good for longer.
pub(crate) const LONGEST: Duration = Duration::from_secs(2);

/// What one node says of where Redis is.
#[derive(Clone)]
pub(crate) struct View {
    /// When it was asked: what it knows is no older.
    pub(crate) asked_at: Instant,
    /// Whether it has a vote: a Sentinel, or a primary of a Cluster with slots.
    pub(crate) votes: bool,
    /// How many have a vote, as far as it knows.
    pub(crate) voters: usize,
    pub(crate) map: Map,
    /// For how long after it was asked its confirmation is good, by its failover timer.
    pub(crate) good_for: Duration,
    /// The nodes that it knows, by their addresses.
    pub(crate) knows: BTreeMap<String, Client>,
}

/// How many votes confirm something, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) confirm: usize,
    pub(crate) of: usize,
}

/// The latest that each node said, by its id.
#[derive(Default)]
pub(crate) struct Views(BTreeMap<String, View>);

impl Views {
    /// Where there is one Redis, it says itself that it has all slots.
    pub(crate) fn of_one(found: Found, asked_at: Instant) -> Views {
        let (map, knows) = (Map::of(found, false), BTreeMap::new());
        let view = View { asked_at, votes: true, voters: 1, map, good_for: LONGEST, knows };
        Views([(String::new(), view)].into())
    }

    /// Takes what a node says in place of what it said before. What others said that are silent since is forgotten.
    pub(crate) fn put(&mut self, id: String, view: View) {
        let asked_at = view.asked_at;
        if self.0.get(&id).is_none_or(|before| before.asked_at <= asked_at) {
            self.0.insert(id, view);
        }
        self.0.retain(|_, view| view.asked_at + LONGEST >= asked_at);
    }

    /// All nodes that any of them knows, by their addresses.
    pub(crate) fn known(&self) -> BTreeMap<String, Client> {
        self.0.values().flat_map(|view| view.knows.clone()).collect()
    }

    /// The Redis that has a slot: the one that a majority names, or, without a majority, that of the latest failover
    /// that anybody knows of. `named` votes there are at least.
    pub(crate) fn owner(&self, slot: Slot, named: usize) -> Result<Found, Fault> {
        self.majority(slot, named).or_else(|| self.latest(slot)).ok_or_else(|| Fault {
            kind: FaultKind::Clustered,
            text: format!("no node of the Cluster has slot {slot}"),
        })
    }

    /// The Redis that a majority names for a slot.
    pub(crate) fn majority(&self, slot: Slot, named: usize) -> Option<Found> {
        let mut named_by_any = self.0.values().filter_map(|view| Some(&view.map.owner(slot)?.node));
        let by_majority = named_by_any.find(|found| {
            let (naming, of) = self.votes(slot, named, |told| told.node.is(found));
            naming.len() > of / 2
        });
        by_majority.cloned()
    }

    /// The Redis that has a slot since the latest failover that anybody knows of.
    pub(crate) fn latest(&self, slot: Slot) -> Option<Found> {
        let owners = self.0.values().filter_map(|view| Some(&view.map.owner(slot)?.node));
        owners.max_by_key(|found| found.config_epoch).cloned()
    }

    /// The shortest failover timer, as far as it is below [`LONGEST`].
    pub(crate) fn short_timer(&self) -> Option<Duration> {
        let timers = self.0.values().filter(|view| view.votes).map(|view| view.good_for);
        timers.min().filter(|timer| *timer < LONGEST)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Until when a majority confirms that a Redis has a slot.
    pub(crate) fn confirmed_until(&self, found: &Found, slot: Slot, named: usize) -> Option<Instant> {
        let (confirming, of) = self.votes(slot, named, |told| told.confirms(found));
        let mut until: Vec<Instant> = confirming.iter().map(|view| view.asked_at + view.good_for).collect();
        until.sort_unstable();
        until.iter().rev().nth(of / 2).copied()
    }

    /// How many votes confirm at a time `now` that a Redis has a slot.
    pub(crate) fn count(&self, found: &Found, slot: Slot, named: usize, now: Instant) -> Count {
        let (confirming, of) = self.votes(slot, named, |told| told.confirms(found));
        Count { confirm: confirming.iter().filter(|view| view.asked_at + view.good_for > now).count(), of }
    }

    /// The votes of those by whom the owner of a slot is right, and of how many: as those know that vote so, and at least
    /// as many as are named. Nobody else can make it more, so that one that lies stops no majority.
    fn votes(&self, slot: Slot, named: usize, is_right: impl Fn(&Told) -> bool) -> (Vec<&View>, usize) {
        let votes = |view: &&View| view.votes && view.map.owner(slot).is_some_and(&is_right);
        let voting: Vec<&View> = self.0.values().filter(votes).collect();
        let of = voting.iter().map(|view| view.voters).max().unwrap_or_default().max(named).max(1);
        (voting, of)
    }
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;
    use crate::redis::topology::nodes::Manner;

    const NAMED: usize = 3;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn primary(port: u16, config_epoch: u64) -> Found {
        let manner = Manner("redis://somewhere/".into_connection_info().unwrap());
        Found { client: manner.at("10.0.0.1", port).unwrap(), config_epoch, node: None }
    }

    fn view(asked_at: Instant, names: Found) -> View {
        let (map, knows) = (Map::of(names, false), BTreeMap::new());
        View { asked_at, votes: true, voters: 3, map, good_for: LONGEST, knows }
    }

    fn views<const N: usize>(said: [View; N]) -> Views {
        let mut views = Views::default();
        said.into_iter().zip('a'..).for_each(|(view, id)| views.put(id.to_string(), view));
        views
    }

    #[test]
    fn a_primary_is_confirmed_for_as_long_as_a_majority_confirmed_it_lately() {
        let (start, old) = (Instant::now(), primary(1, 3));
        let until = |views: &Views| views.confirmed_until(&old, 0, NAMED).map(|until| until - start);
        let at = |asked| view(start + ms(asked), old.clone());
        assert_eq!(until(&views([at(0)])), None, "one of three");
        assert_eq!(until(&views([at(0), at(100)])), Some(LONGEST), "as long as the older of two");
        assert_eq!(until(&views([at(0), at(200), at(100)])), Some(LONGEST + ms(100)), "the oldest is not needed");
        let short = View { good_for: ms(500), ..at(100) };
        assert_eq!(until(&views([at(0), short])), Some(ms(600)), "its failover timer is shorter");
        let replica = View { votes: false, ..at(0) };
        assert_eq!(until(&views([at(0), replica])), None, "only one has a vote");
        let knows_five = View { voters: 5, ..at(0) };
        assert_eq!(until(&views([at(0), knows_five])), None, "two of five");
        let doubts = View { map: Map::of(old.clone(), true), ..at(0) };
        assert_eq!(until(&views([at(0), doubts])), None, "it does not hear the primary");
        assert_eq!(until(&views([at(0), view(start, primary(1, 2))])), None, "it has not heard of a failover");
        assert_eq!(until(&views([at(0), view(start, primary(1, 4))])), Some(LONGEST), "it has heard of more");
        assert_eq!(until(&views([at(0), view(start, primary(2, 4))])), None, "it names another");
    }

    #[test]
    fn what_a_voter_says_replaces_what_it_said_and_what_is_old_is_forgotten() {
        let (start, old, new) = (Instant::now(), primary(1, 3), primary(2, 4));
        let mut views = views([view(start, old.clone()), view(start, old.clone()), view(start, old.clone())]);
        assert_eq!(views.count(&old, 0, NAMED, start), Count { confirm: 3, of: 3 });
        assert_eq!(views.count(&old, 0, NAMED, start + LONGEST), Count { confirm: 0, of: 3 });
        for id in ["a", "b"] {
            views.put(String::from(id), view(start + ms(500), new.clone()));
        }
        assert_eq!(views.count(&old, 0, NAMED, start + ms(500)), Count { confirm: 1, of: 3 });
        assert!(views.majority(0, NAMED).is_some_and(|found| found.is(&new)));
        views.put(String::from("a"), view(start, old.clone()));
        assert_eq!(views.count(&new, 0, NAMED, start + ms(500)).confirm, 2, "that was asked before");
        views.put(String::from("b"), view(start + ms(2_600), new.clone()));
        assert_eq!(views.count(&new, 0, NAMED, start + ms(500)).confirm, 1);
    }

    #[test]
    fn a_majority_is_believed_before_the_highest_epoch_and_that_where_there_is_none() {
        let (start, right, lie) = (Instant::now(), primary(1, 3), primary(9, 99));
        let port = |views: &Views| views.owner(0, NAMED).map(|found| found.to_string()).unwrap();
        let says = |found: &Found| view(start, found.clone());
        let lies = View { voters: 100, ..says(&lie) };
        assert_eq!(port(&views([lies.clone(), says(&right), says(&right)])), "10.0.0.1:1");
        assert_eq!(port(&views([lies, says(&right)])), "10.0.0.1:9", "nobody can tell who is right");
        assert!(views([]).owner(0, NAMED).is_err());
        let one = Views::of_one(right, start);
        assert_eq!((port(&one), one.majority(0, 1).is_some()), (String::from("10.0.0.1:1"), true));
    }

    #[test]
    fn a_failover_timer_is_short_below_what_a_confirmation_is_good_for() {
        let start = Instant::now();
        let with = |good_for| View { good_for, ..view(start, primary(1, 1)) };
        assert_eq!(views([with(LONGEST)]).short_timer(), None);
        assert_eq!(views([with(LONGEST), with(ms(500)), with(ms(1_000))]).short_timer(), Some(ms(500)));
    }
}
