//! Determines which Redis a majority of the Sentinels or Cluster primaries names as the primary, and how long this
//! confirmation is valid.
//!
//! A failover replaces the primary, if a majority votes for that. A failover begins only after the primary has not
//! answered for the length of the failover timer, a setting of the Sentinels or of the Cluster. Any two majorities have
//! a node in common. So if a failover ended before a majority was asked, at least one of the asked nodes took part in
//! it, and names the new primary now or soon. If a failover begins later, it cannot end before the timer has run out.
//! So a confirmation is valid for the length of the timer, but at most for [`LONGEST`].

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::topology::endpoint::Endpoint;
use crate::redis::topology::nodes::Found;

/// A hash slot of a Cluster.
pub(crate) type Slot = u16;

/// Number of hash slots of a Cluster.
pub(crate) const SLOTS: Slot = 16_384;

/// The maximum number of nodes that other nodes may report. Each of them is asked, and gets the password of Redis. Redis
/// recommends at most 1,000 nodes in a Cluster.
pub(crate) const MAX_NODES: usize = 1_000;

/// The maximum time for which a confirmation is valid.
pub(crate) const LONGEST: Duration = Duration::from_secs(2);

/// A Redis, as one Sentinel or Cluster node describes it.
#[derive(Clone)]
pub(crate) struct NodeEntry {
    pub(crate) redis: Found,
    /// The slots of this Redis. Empty if this Redis is a replica, or has failed.
    pub(crate) slots: Vec<RangeInclusive<Slot>>,
    /// Whether this Redis has a vote in a failover. Used only in a Cluster.
    pub(crate) votes: bool,
    /// Whether this Redis is the node that was asked. Used only in a Cluster.
    pub(crate) is_itself: bool,
    /// Whether this Redis does not answer the node that was asked. Then a failover may replace this Redis soon.
    pub(crate) is_doubted: bool,
}

impl NodeEntry {
    /// Returns the entry of a primary that a Sentinel names. Without a Cluster, one Redis has all slots.
    pub(crate) fn of_all_slots(redis: Found, is_doubted: bool) -> NodeEntry {
        NodeEntry { redis, slots: vec![0..=SLOTS - 1], votes: true, is_itself: true, is_doubted }
    }

    /// Returns whether this entry confirms that `found` is still the primary. An entry with a lower config epoch than
    /// `found` does not confirm this, because its node has not learnt of the last failover.
    pub(crate) fn confirms(&self, found: &Found) -> bool {
        !self.is_doubted && self.redis.is(found) && self.redis.config_epoch >= found.config_epoch
    }
}

/// Returns the entry of the Redis that has a slot. If several entries have the slot, returns the entry with the highest
/// config epoch.
pub(crate) fn owner(entries: &[NodeEntry], slot: Slot) -> Option<&NodeEntry> {
    let owners = entries.iter().filter(|entry| entry.slots.iter().any(|slots| slots.contains(&slot)));
    owners.max_by_key(|entry| entry.redis.config_epoch)
}

/// The answer of one Sentinel or Cluster node.
#[derive(Clone)]
pub(crate) struct View {
    /// The address at which the node was asked.
    pub(crate) address: String,
    /// The id of the node.
    pub(crate) id: String,
    /// When the node was asked. The view is not older than this.
    pub(crate) asked_at: Instant,
    /// Whether the node has a vote in a failover. Every Sentinel has one, and every Cluster primary that has slots.
    pub(crate) votes: bool,
    /// Number of nodes with a vote that the node knows, itself included.
    pub(crate) voters: usize,
    pub(crate) entries: Vec<NodeEntry>,
    /// How long after `asked_at` this view counts as a confirmation. This is the rest of the failover timer, but at
    /// most [`LONGEST`].
    pub(crate) good_for: Duration,
    /// The Sentinels or Cluster nodes that the node reports.
    pub(crate) knows: Vec<Endpoint>,
}

/// The latest view of each node.
#[derive(Default)]
pub(crate) struct Views {
    /// The views by the address of the node.
    pub(super) by_node: BTreeMap<String, View>,
    /// The addresses of the Sentinels that `--store` names. Empty in a Cluster.
    pub(crate) named: BTreeSet<String>,
}

impl Views {
    /// Stores the view of a node, unless a later view of that node is stored. Deletes the views of nodes that have not
    /// answered for [`LONGEST`].
    pub(crate) fn put(&mut self, view: View) {
        let asked_at = view.asked_at;
        if self.by_node.get(&view.address).is_none_or(|before| before.asked_at <= asked_at) {
            self.by_node.insert(view.address.clone(), view);
        }
        self.by_node.retain(|_, view| view.asked_at + LONGEST >= asked_at);
    }

    /// Returns the nodes that are asked too because other nodes report them, by address. In a Cluster, one report is
    /// enough. A Sentinel must be reported by a majority of the Sentinels that `--store` names. Otherwise one of them
    /// could add voters of its own. The limit of [`MAX_NODES`] applies to the sum of all reports.
    pub(crate) fn known(&self) -> BTreeMap<String, Endpoint> {
        let mut known: BTreeMap<String, (Endpoint, usize)> = BTreeMap::new();
        for view in self.by_node.values().filter(|view| self.is_named(view)) {
            let reported = view.knows.iter().map(|endpoint| (endpoint.address().to_string(), endpoint));
            for (address, endpoint) in reported.collect::<BTreeMap<_, _>>() {
                known.entry(address).or_insert((endpoint.clone(), 0)).1 += 1;
            }
        }
        let is_believed = |reports: usize| reports > self.named.len() / 2;
        known
            .into_iter()
            .filter(|(_, (_, reports))| is_believed(*reports))
            .take(MAX_NODES)
            .map(|(at, (one, _))| (at, one))
            .collect()
    }

    /// Returns whether `--store` names the node of a view, or the view is that of a Cluster node.
    fn is_named(&self, view: &View) -> bool {
        self.named.is_empty() || self.named.contains(&view.address)
    }

    /// Returns the Redis that has a slot, according to a majority. In a Cluster, or if ticks expire without a majority,
    /// returns otherwise the Redis with the highest config epoch that any view names for the slot. A single Sentinel is
    /// not believed, because the password is sent to the Redis that it names.
    pub(crate) fn owner(&self, slot: Slot, is_without_majority: bool) -> Result<Found, Fault> {
        let needs_majority = !self.named.is_empty() && !is_without_majority;
        let owner = self.majority(slot).or_else(|| if needs_majority { None } else { self.latest(slot) });
        owner.ok_or_else(|| {
            if needs_majority {
                Fault::new(FaultKind::Disconnected, self.disagreement(slot))
            } else {
                Fault::new(FaultKind::Clustered, format!("no node of the Cluster has slot {slot}"))
            }
        })
    }

    /// Describes which Sentinels name which primary.
    fn disagreement(&self, slot: Slot) -> String {
        let named = self
            .by_node
            .values()
            .filter_map(|view| Some(format!("{} names {}", view.address, owner(&view.entries, slot)?.redis)));
        let named: Vec<String> = named.collect();
        format!(
            "no majority of the {} Sentinels names the same primary ({}): name every Sentinel in --store, and remove \
             one that names a wrong primary; --expire-without-majority believes the highest epoch instead",
            self.total_of_sentinels(slot),
            named.join("; ")
        )
    }

    /// Returns the Redis that a majority names for a slot. Its config epoch is the highest that a majority reports or
    /// exceeds. Otherwise a single node could report an epoch that no other node confirms, and that no failover
    /// reaches.
    pub(crate) fn majority(&self, slot: Slot) -> Option<Found> {
        self.owners(slot).find_map(|found| {
            let (naming, of) = self.votes(slot, |entry| entry.redis.is(found));
            let named = naming.iter().filter_map(|view| owner(&view.entries, slot));
            let mut epochs: Vec<u64> = named.map(|entry| entry.redis.config_epoch).collect();
            epochs.sort_unstable_by(|one, other| other.cmp(one));
            let config_epoch = *epochs.get(of / 2)?;
            Some(Found { config_epoch, ..found.clone() })
        })
    }

    /// Returns the Redis with the highest config epoch that any view names for a slot: the result of the latest known
    /// failover.
    pub(crate) fn latest(&self, slot: Slot) -> Option<Found> {
        self.owners(slot).max_by_key(|found| found.config_epoch).cloned()
    }

    /// Returns the shortest failover timer of all nodes with a vote, if this timer is below [`LONGEST`].
    pub(crate) fn short_timer(&self) -> Option<Duration> {
        let timers = self.by_node.values().filter(|view| view.votes).map(|view| view.good_for);
        timers.min().filter(|timer| *timer < LONGEST)
    }

    /// Returns until when a majority confirms that `found` has a slot. Returns `None` if no majority has confirmed it.
    pub(crate) fn confirmed_until(&self, found: &Found, slot: Slot) -> Option<Instant> {
        let (until, of) = self.confirmations(found, slot);
        until.get(of / 2).copied()
    }

    /// Returns the times until which single nodes with a vote confirm that `found` has a slot, latest first. Also
    /// returns the total number of votes, including the votes of nodes that do not confirm this.
    pub(crate) fn confirmations(&self, found: &Found, slot: Slot) -> (Vec<Instant>, usize) {
        let (confirming, of) = self.votes(slot, |entry| entry.confirms(found));
        let mut until: Vec<Instant> = confirming.iter().map(|view| view.asked_at + view.good_for).collect();
        until.sort_unstable_by(|one, other| other.cmp(one));
        (until, of)
    }

    /// Returns, from each view, the Redis that has a slot.
    fn owners(&self, slot: Slot) -> impl Iterator<Item = &Found> {
        self.by_node.values().filter_map(move |view| Some(&owner(&view.entries, slot)?.redis))
    }

    /// Returns the views with a vote in which `is_right` accepts the Redis that has the slot: of a node with several
    /// addresses, the view that is valid longest. Also returns the total number of votes. In a Cluster, this is the
    /// highest number of voters that these views report. Other views do not count, so that one wrong node cannot
    /// prevent a majority.
    fn votes(&self, slot: Slot, is_right: impl Fn(&NodeEntry) -> bool) -> (Vec<&View>, usize) {
        let votes = |view: &&View| view.votes && owner(&view.entries, slot).is_some_and(&is_right);
        let mut voting: BTreeMap<&str, &View> = BTreeMap::new();
        for view in self.by_node.values().filter(votes) {
            let longest = voting.entry(&view.id).or_insert(view);
            if view.asked_at + view.good_for > longest.asked_at + longest.good_for {
                *longest = view;
            }
        }
        let voting: Vec<&View> = voting.into_values().collect();
        let of = if self.named.is_empty() {
            voting.iter().map(|view| view.voters).max().unwrap_or_default().max(1)
        } else {
            self.total_of_sentinels(slot)
        };
        (voting, of)
    }

    /// Returns the total number of votes of Sentinels: the highest number that at least half of the answering Sentinels
    /// in `--store` report or exceed, but at least the number of the Sentinels in `--store`. Two addresses are of one
    /// Sentinel if they report the same id and the same primary. Otherwise a Sentinel that lies about its id could
    /// replace another.
    fn total_of_sentinels(&self, slot: Slot) -> usize {
        let mut reported: Vec<usize> =
            self.by_node.values().filter(|view| self.is_named(view)).map(|view| view.voters).collect();
        reported.sort_unstable();
        let middle = reported.get(reported.len() / 2).copied().unwrap_or_default();
        let identity = |address| {
            let view = self.by_node.get(address);
            let primary = view.and_then(|view| owner(&view.entries, slot)).map(|entry| entry.redis.to_string());
            (view.map_or(address, |view: &View| &view.id), primary)
        };
        let distinct: BTreeSet<_> = self.named.iter().map(identity).collect();
        distinct.len().max(middle)
    }
}

/// The confirmation by a majority that the Redis of one session is the primary. A session is a connection of a ring to
/// its Redis.
///
/// Suppose a network partition separates a sidecar and its primary from the other nodes, and these elect a new primary.
/// Without this check, the sidecar would continue to expire ticks, while the Acks of other sidecars go to the new
/// primary. So a tick expires only while a confirmation is valid. After a time without a confirmation, the next tick
/// expires later, as after an outage.
#[derive(Debug)]
pub(crate) struct Confirmation {
    /// The end of the confirmation.
    until: Instant,
    /// The end of the last outage before the session, or of a later time without a confirmation. `None` if there was
    /// neither.
    pub(crate) recovered_at: Option<Instant>,
}

impl Confirmation {
    /// Returns the confirmation of a session that begins at `now`. `until` is the end of the confirmation, or `None`
    /// without a majority.
    pub(crate) fn new(recovered_at: Option<Instant>, until: Option<Instant>, now: Instant) -> Confirmation {
        Confirmation { until: until.unwrap_or(now), recovered_at }
    }

    /// Sets the end of the confirmation to `until`, as the views show at `now`. `until` is `None` without a majority.
    /// If a time without a confirmation ends, records its end.
    pub(crate) fn update(&mut self, until: Option<Instant>, now: Instant) {
        if self.until <= now && until.is_some_and(|until| until > now) {
            self.recovered_at = Some(now);
        }
        // Without a majority, the confirmation ends now, unless it has ended before.
        self.until = until.unwrap_or(self.until.min(now));
    }

    /// Returns how long the confirmation has been missing at `now`. Returns `None` while it is valid.
    pub(crate) fn missing_for(&self, now: Instant) -> Option<Duration> {
        if self.until > now { None } else { Some(now.saturating_duration_since(self.until)) }
    }
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn primary(port: u16, config_epoch: u64) -> Found {
        let template = Endpoint::new("redis://somewhere/".into_connection_info().unwrap());
        Found { endpoint: template.at("10.0.0.1", port), config_epoch, node: None }
    }

    fn view(asked_at: Instant, names: Found) -> View {
        let (entries, knows) = (vec![NodeEntry::of_all_slots(names, false)], Vec::new());
        View {
            address: String::new(),
            id: String::new(),
            asked_at,
            votes: true,
            voters: 3,
            entries,
            good_for: LONGEST,
            knows,
        }
    }

    fn views<const N: usize>(said: [View; N]) -> Views {
        let mut views = Views { named: ["a", "b", "c"].map(String::from).into(), ..Views::default() };
        said.into_iter().zip('a'..).for_each(|(view, id)| views.put(from(id, view)));
        views
    }

    fn from(id: char, view: View) -> View {
        View { id: id.to_string(), address: id.to_string(), ..view }
    }

    #[test]
    fn a_primary_is_confirmed_for_as_long_as_a_majority_confirmed_it_lately() {
        let (start, old) = (Instant::now(), primary(1, 3));
        let until = |views: &Views| views.confirmed_until(&old, 0).map(|until| until - start);
        let at = |asked| view(start + ms(asked), old.clone());
        assert_eq!(until(&views([at(0)])), None, "only one of three nodes confirms it");
        assert_eq!(until(&views([at(0), at(100)])), Some(LONGEST), "valid as long as the older of two views");
        assert_eq!(until(&views([at(0), at(200), at(100)])), Some(LONGEST + ms(100)), "two views are enough");
        let short = View { good_for: ms(500), ..at(100) };
        assert_eq!(until(&views([at(0), short])), Some(ms(600)), "one node has a shorter failover timer");
        let replica = View { votes: false, ..at(0) };
        assert_eq!(until(&views([at(0), replica])), None, "only one of the nodes has a vote");
        let knows_five = || View { voters: 5, ..at(0) };
        assert_eq!(until(&views([at(0), knows_five()])), None, "two of five nodes are no majority");
        let doubts = View { entries: vec![NodeEntry::of_all_slots(old.clone(), true)], ..at(0) };
        assert_eq!(until(&views([at(0), doubts])), None, "the primary does not answer one node");
        assert_eq!(
            until(&views([at(0), view(start, primary(1, 2))])),
            None,
            "one node does not know the last failover"
        );
        assert_eq!(
            until(&views([at(0), view(start, primary(1, 4))])),
            Some(LONGEST),
            "one node knows a later failover"
        );
        assert_eq!(until(&views([at(0), view(start, primary(2, 4))])), None, "one node names another primary");
    }

    #[test]
    fn a_view_replaces_the_one_before_and_old_views_are_forgotten() {
        let (start, old, new) = (Instant::now(), primary(1, 3), primary(2, 4));
        let mut views = views([view(start, old.clone()), view(start, old.clone()), view(start, old.clone())]);
        let count = |views: &Views, found, now| {
            let (until, of) = views.confirmations(found, 0);
            (until.into_iter().filter(|until| *until > now).count(), of)
        };
        assert_eq!(count(&views, &old, start), (3, 3));
        assert_eq!(count(&views, &old, start + LONGEST), (0, 3));
        for id in ['a', 'b'] {
            views.put(from(id, view(start + ms(500), new.clone())));
        }
        assert_eq!(count(&views, &old, start + ms(500)), (1, 3));
        assert!(views.majority(0).is_some_and(|found| found.is(&new)));
        views.put(from('a', view(start, old.clone())));
        assert_eq!(count(&views, &new, start + ms(500)).0, 2, "a is stored with a later view");
        views.put(from('b', view(start + ms(2_600), new.clone())));
        assert_eq!(count(&views, &new, start + ms(500)).0, 1);
    }

    #[test]
    fn only_a_majority_of_the_sentinels_is_believed_unless_the_flag_allows_the_highest_epoch() {
        let (start, right, lie) = (Instant::now(), primary(1, 3), primary(9, 99));
        let port = |views: &Views| views.owner(0, false).map(|found| found.to_string()).ok();
        let (one, nine) = (Some(String::from("10.0.0.1:1")), "10.0.0.1:9");
        let says = |found: &Found| view(start, found.clone());
        let lies = || View { voters: 100, ..says(&lie) };
        assert_eq!(port(&views([lies(), says(&right), says(&right)])), one);
        let undecided = views([lies(), says(&right)]);
        assert_eq!(undecided.owner(0, true).unwrap().to_string(), nine);
        let error = undecided.owner(0, false).err().unwrap().text;
        for words in ["no majority of the 100 Sentinels", "a names 10.0.0.1:9; b names 10.0.0.1:1", "--store"] {
            assert!(error.contains(words), "{error}");
        }
        assert!(views([]).owner(0, false).is_err());
        let mut single = Views { named: [String::from("a")].into(), ..Views::default() };
        single.put(from('a', View { voters: 1, ..says(&right) }));
        assert_eq!(port(&single), one);
        let mut cluster = Views::default();
        cluster.put(from('a', lies()));
        assert_eq!(cluster.owner(0, false).unwrap().to_string(), nine, "a Cluster node needs no majority here");
    }

    #[test]
    fn a_sentinel_that_lies_about_ids_and_numbers_is_outvoted_and_alone_never_believed() {
        let (start, right, lie) = (Instant::now(), primary(1, 3), primary(9, 99));
        let port = |views: &Views| views.majority(0).map(|found| found.to_string());
        let (says, lies) = (|| view(start, right.clone()), |voters| View { voters, ..view(start, lie.clone()) });
        let at = |address: char, id: char, view: View| View { address: address.to_string(), ..from(id, view) };
        let of = |named: &[&str], said: Vec<View>| {
            let mut views = Views { named: named.iter().map(ToString::to_string).collect(), ..Views::default() };
            for view in said {
                views.put(view);
            }
            views
        };
        for voters in [0, 1, 3, 1_000] {
            let liar = || at('r', 'a', lies(voters));
            let two = of(&["a", "r"], vec![at('a', 'a', says()), liar()]);
            assert_eq!(port(&two), None, "with the id of the other, {voters} voters");
            assert_eq!(port(&of(&["a", "r"], vec![liar()])), None, "alone, {voters} voters");
            let three = of(&["a", "b", "r"], vec![at('a', 'a', says()), at('b', 'b', says()), liar()]);
            assert_eq!(port(&three), Some(String::from("10.0.0.1:1")), "{voters} voters");
            let agrees = at('r', 'r', View { voters, ..says() });
            let three = of(&["a", "b", "r"], vec![at('a', 'a', says()), at('b', 'b', says()), agrees]);
            assert_eq!(port(&three), Some(String::from("10.0.0.1:1")), "{voters} voters, the right primary");
        }
        let twice = of(&["a", "b"], vec![at('a', 'r', lies(1)), at('b', 'r', lies(3))]);
        assert_eq!(port(&twice), None, "one Sentinel with two addresses has one vote of three");
        let knows = |ports: &[u16]| ports.iter().map(|port| primary(*port, 0).endpoint).collect();
        let liar = at('r', 'r', View { knows: knows(&[7, 8]), ..lies(3) });
        let honest = |one| at(one, one, View { knows: knows(&[2, 3]), ..says() });
        let views = of(&["a", "b", "r"], vec![honest('a'), honest('b'), liar]);
        let asked: Vec<String> = views.known().into_keys().collect();
        assert_eq!(asked, ["10.0.0.1:2", "10.0.0.1:3"], "the list of one Sentinel adds no voter");
    }

    #[test]
    fn the_epoch_of_one_sentinel_neither_ends_confirmations_nor_hides_a_failover() {
        let start = Instant::now();
        let says = |port, epoch| view(start, primary(port, epoch));
        for lie in [0, 5, 9_000_000_000_000_000_000] {
            for liar in 0..3 {
                let with = |port, epoch| {
                    let lies = |at| if at == liar { says(port, lie) } else { says(port, epoch) };
                    views([lies(0), lies(1), lies(2)])
                };
                let found = with(1, 3).majority(0).unwrap();
                assert_eq!((found.to_string().as_str(), found.config_epoch), ("10.0.0.1:1", 3), "{lie} of {liar}");
                assert_eq!(with(1, 3).confirmed_until(&found, 0), Some(start + LONGEST), "{lie} of {liar}");
                let next = with(2, 4).majority(0).unwrap();
                assert!(found.is_followed_by(&next) && !next.is_followed_by(&found), "{lie} of {liar}");
            }
        }
    }

    #[test]
    fn the_nodes_that_many_views_report_together_are_limited() {
        let knows = |from: u16| (from..from + 900).map(|port| primary(port, 0).endpoint).collect();
        let reports = |id, first| from(id, View { knows: knows(first), ..view(Instant::now(), primary(1, 3)) });
        let mut views = Views::default();
        views.put(reports('a', 1_000));
        assert_eq!(views.known().len(), 900);
        views.put(reports('b', 5_000));
        assert_eq!(views.known().len(), MAX_NODES);
    }

    #[test]
    fn a_failover_timer_is_short_if_confirmations_are_good_for_longer() {
        let start = Instant::now();
        let with = |good_for| View { good_for, ..view(start, primary(1, 1)) };
        assert_eq!(views([with(LONGEST)]).short_timer(), None);
        assert_eq!(views([with(LONGEST), with(ms(500)), with(ms(1_000))]).short_timer(), Some(ms(500)));
    }

    #[test]
    fn a_time_without_a_majority_ends_like_an_outage() {
        let start = Instant::now();
        let at = |after| start + ms(after);
        let mut confirmation = Confirmation::new(None, Some(at(2_000)), start);
        assert_eq!(
            [1_999, 2_000, 3_000].map(|now| confirmation.missing_for(at(now))),
            [None, Some(ms(0)), Some(ms(1_000))]
        );
        confirmation.update(Some(at(3_900)), at(1_900));
        assert_eq!(
            (confirmation.missing_for(at(3_000)), confirmation.recovered_at),
            (None, None),
            "the confirmation was renewed in time"
        );
        confirmation.update(Some(at(3_900)), at(4_000));
        assert_eq!(confirmation.missing_for(at(4_000)), Some(ms(100)), "the answer came too late");
        confirmation.update(None, at(4_050));
        assert_eq!(confirmation.missing_for(at(4_050)), Some(ms(150)), "no majority confirms it at 4050 ms");
        confirmation.update(Some(at(6_000)), at(4_100));
        assert_eq!((confirmation.missing_for(at(5_000)), confirmation.recovered_at), (None, Some(at(4_100))));
        confirmation.update(None, at(5_000));
        assert_eq!(confirmation.missing_for(at(5_200)), Some(ms(200)), "a majority doubts it now");
        let confirmation = Confirmation::new(Some(at(5_500)), Some(at(7_500)), at(5_500));
        assert_eq!((confirmation.missing_for(at(6_000)), confirmation.recovered_at), (None, Some(at(5_500))));
        let confirmation = Confirmation::new(Some(at(8_000)), None, at(8_000));
        assert_eq!(confirmation.missing_for(at(8_300)), Some(ms(300)), "no majority has confirmed it yet");
    }
}
