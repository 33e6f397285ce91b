//! Determines which Redis a majority of the Sentinels or Cluster primaries names as the primary, and how long this
//! confirmation is valid.
//!
//! A failover replaces the primary, if a majority votes for that. A failover begins only after the primary has not
//! answered for the length of the failover timer, a setting of the Sentinels or of the Cluster. Any two majorities have
//! a node in common. So if a failover ended before a majority was asked, at least one of the asked nodes took part in
//! it, and names the new primary now or soon. If a failover begins later, it cannot end before the timer has run out.
//! So a confirmation is valid for the length of the timer, but at most for [`LONGEST`].

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use redis::Client;

use crate::redis::connection::errors::{Fault, FaultKind};
use crate::redis::topology::nodes::Found;

/// A hash slot of a Cluster.
pub(crate) type Slot = u16;

/// Number of hash slots of a Cluster.
pub(crate) const SLOTS: Slot = 16_384;

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
    /// Clients for the Sentinels or Cluster nodes that the node reports.
    pub(crate) knows: Vec<Client>,
}

/// The latest view of each node.
#[derive(Default)]
pub(crate) struct Views {
    /// The views by the id of the node.
    pub(super) by_node: BTreeMap<String, View>,
    /// The minimum for the total number of votes, even if the views report fewer.
    pub(crate) least_votes: usize,
}

impl Views {
    /// Stores the view of a node, unless a later view of that node is stored. Deletes the views of nodes that have not
    /// answered for [`LONGEST`].
    pub(crate) fn put(&mut self, view: View) {
        let asked_at = view.asked_at;
        if self.by_node.get(&view.id).is_none_or(|before| before.asked_at <= asked_at) {
            self.by_node.insert(view.id.clone(), view);
        }
        self.by_node.retain(|_, view| view.asked_at + LONGEST >= asked_at);
    }

    /// Returns all nodes that any node reports in its view, by address.
    pub(crate) fn known(&self) -> BTreeMap<String, Client> {
        let known = self.by_node.values().flat_map(|view| view.knows.clone());
        known.map(|client| (client.get_connection_info().addr().to_string(), client)).collect()
    }

    /// Returns the Redis that has a slot, according to a majority. Without a majority, returns the Redis with the
    /// highest config epoch that any view names for the slot.
    pub(crate) fn owner(&self, slot: Slot) -> Result<Found, Fault> {
        let owner = self.majority(slot).or_else(|| self.latest(slot));
        owner.ok_or_else(|| Fault::new(FaultKind::Clustered, format!("no node of the Cluster has slot {slot}")))
    }

    /// Returns the Redis that a majority names for a slot.
    pub(crate) fn majority(&self, slot: Slot) -> Option<Found> {
        let by_majority = self.owners(slot).find(|found| {
            let (naming, of) = self.votes(slot, |entry| entry.redis.is(found));
            naming.len() > of / 2
        });
        by_majority.cloned()
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

    /// Returns the views with a vote in which `is_right` accepts the Redis that has the slot. Also returns the total
    /// number of votes: the highest number of voters that these views report, or `least_votes` if that is higher. Other
    /// views do not count for the total, so that one wrong node cannot prevent a majority.
    fn votes(&self, slot: Slot, is_right: impl Fn(&NodeEntry) -> bool) -> (Vec<&View>, usize) {
        let votes = |view: &&View| view.votes && owner(&view.entries, slot).is_some_and(&is_right);
        let voting: Vec<&View> = self.by_node.values().filter(votes).collect();
        let of = voting.iter().map(|view| view.voters).max().unwrap_or_default().max(self.least_votes);
        (voting, of)
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
    use crate::redis::topology::nodes::client_at;

    const LEAST: usize = 3;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn primary(port: u16, config_epoch: u64) -> Found {
        let template = "redis://somewhere/".into_connection_info().unwrap();
        Found { client: client_at(&template, "10.0.0.1", port).unwrap(), config_epoch, node: None }
    }

    fn view(asked_at: Instant, names: Found) -> View {
        let (entries, knows) = (vec![NodeEntry::of_all_slots(names, false)], Vec::new());
        View { id: String::new(), asked_at, votes: true, voters: 3, entries, good_for: LONGEST, knows }
    }

    fn views<const N: usize>(said: [View; N]) -> Views {
        let mut views = Views { least_votes: LEAST, ..Views::default() };
        said.into_iter().zip('a'..).for_each(|(view, id)| views.put(View { id: id.to_string(), ..view }));
        views
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
        let knows_five = View { voters: 5, ..at(0) };
        assert_eq!(until(&views([at(0), knows_five])), None, "two of five nodes are no majority");
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
        for id in ["a", "b"] {
            views.put(View { id: String::from(id), ..view(start + ms(500), new.clone()) });
        }
        assert_eq!(count(&views, &old, start + ms(500)), (1, 3));
        assert!(views.majority(0).is_some_and(|found| found.is(&new)));
        views.put(View { id: String::from("a"), ..view(start, old.clone()) });
        assert_eq!(count(&views, &new, start + ms(500)).0, 2, "a is stored with a later view");
        views.put(View { id: String::from("b"), ..view(start + ms(2_600), new.clone()) });
        assert_eq!(count(&views, &new, start + ms(500)).0, 1);
    }

    #[test]
    fn a_majority_is_believed_before_the_highest_epoch_and_that_where_there_is_none() {
        let (start, right, lie) = (Instant::now(), primary(1, 3), primary(9, 99));
        let port = |views: &Views| views.owner(0).map(|found| found.to_string()).unwrap();
        let says = |found: &Found| view(start, found.clone());
        let lies = View { voters: 100, ..says(&lie) };
        assert_eq!(port(&views([lies.clone(), says(&right), says(&right)])), "10.0.0.1:1");
        assert_eq!(port(&views([lies, says(&right)])), "10.0.0.1:9", "no Redis has a majority");
        assert!(views([]).owner(0).is_err());
        let mut one = Views { least_votes: 1, ..Views::default() };
        one.put(View { voters: 1, ..says(&right) });
        assert_eq!((port(&one), one.majority(0).is_some()), (String::from("10.0.0.1:1"), true));
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
