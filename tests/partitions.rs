//! A network that is cut between the old primary, with the leading sidecar, and a majority of those that elect a new one.

use std::time::Duration;

use crate::redis_faults::{PATIENT, take_until};
use crate::sentinels::{is_replica, sidecar};
use crate::support::cluster::Cluster;
use crate::support::frames::{self, ACKED};
use crate::support::network::{Host, Network};
use crate::support::process::assert_names;
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::sentinels::{Sentinel, Watched, store};
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

const ACK_TIMEOUT: Duration = Duration::from_secs(3);

/// Messages that are acknowledged on the other side of the cut.
const MESSAGES: u64 = 5_000;

/// Cuts the first host of a network off, with the primary and the leading sidecar; acknowledges there, where a replica
/// takes over, what was added before, and asserts that the cut-off leader reports none of it, and that all goes on after.
fn assert_nothing_acknowledged_is_reported(
    network: &Network,
    store: &str,
    [primary, replica]: [&Redis; 2],
    has_taken_over: impl Fn() -> bool + Send + Sync,
) {
    let [here, there] = [network.host(0), network.host(1)];
    let start = |host: &Host, name: &str| host.run(|| sidecar(store, name, &PATIENT));
    let a = start(here, "a");
    wait_until("it leads", || here.run(|| a.leader()).as_deref() == Some("a"));
    let b = start(there, "b");
    let connect = |host: &Host, sidecar: &Sidecar| host.run(|| sidecar.connect());
    let mut subscribers = [connect(here, &a), connect(there, &b)].map(|raw| raw.subscribed("default"));
    let ids: Vec<u64> = (0..MESSAGES).collect();
    connect(here, &a).ask(&frames::add(&ids, 15, 1)).added();
    let offset = here.run(|| primary.info_number("replication", "master_repl_offset"));
    there.run(|| {
        let seen = || replica.info_number("replication", "slave_repl_offset");
        wait_until("the replica has them", || seen() >= offset);
    });
    network.cut_off(&[here]);

    there.run(|| {
        wait_until("another primary is there", has_taken_over);
        let now = format!("redis={}:{}", replica.address, replica.port);
        b.log().line(&now).unwrap_or_else(|| panic!("{}", b.log().text()));
        b.wait_until_ready();
        assert_eq!(b.connect().ask(&frames::del(&ids)).outcomes(), vec![ACKED; ids.len()]);
    });
    let [at_a, at_b] = &mut subscribers;
    here.run(|| {
        let lag = || a.status().rings[0].pointer_lag_seconds;
        wait_until("their time is over", || reported_to(at_a) > 0 || lag() > ACK_TIMEOUT.as_secs_f64() + 1.0);
    });
    let reported = reported_to(at_a) + reported_to(at_b);
    println!("{reported} of {MESSAGES} reported");
    assert_eq!(reported, 0, "{}", a.log().text());
    here.run(|| {
        let waits = a.status().rings[0].waits.clone().expect("it says why");
        assert_names(&waits, &["no majority", &primary.port.to_string()]);
        let words = ["! this sidecar may not move the pointer of 1 of 1 rings", "\n  no majority of the "];
        assert_names(a.run(&["status"]).output(), &words);
        assert_eq!((a.metrics().count("rings_unconfirmed"), a.is_ready()), (1, true));
        a.log().line("no tick expires").unwrap_or_else(|| panic!("{}", a.log().text()));
    });

    network.heal();
    let moved = format!("redis={}:{}", replica.address, replica.port);
    a.log().line(&moved).unwrap_or_else(|| panic!("{}", a.log().text()));
    here.run(|| a.wait_until_ready());
    there.run(|| wait_until("the old primary follows the new one", || is_replica(primary)));
    let silent: Vec<u64> = (MESSAGES..MESSAGES + 500).collect();
    connect(here, &a).ask(&frames::add(&silent, 15, 1)).added();
    let mut timed_out: Vec<u64> = Vec::new();
    wait_until("they time out", || {
        for subscriber in &mut subscribers {
            reported_to(subscriber);
            timed_out.extend(subscriber.settle_all().into_iter().flat_map(|batch| batch.ids()));
        }
        timed_out.len() >= silent.len()
    });
    timed_out.sort_unstable();
    assert_eq!(timed_out, silent, "each once, and nothing else");
    assert_eq!(here.run(|| a.metrics().count("rings_unconfirmed")), 0);
}

/// How many messages were reported to a subscriber by now.
fn reported_to(subscriber: &mut Raw) -> usize {
    // Frames sent before the answer have come with it.
    subscriber.ask(&frames::del(&[u64::MAX]));
    subscriber.waiting()
}

#[test]
fn a_leader_that_is_cut_off_from_the_sentinels_reports_nothing_that_is_acknowledged_elsewhere() {
    let Some(network) = Network::of(2) else { return };
    let watched = Watched::across(&network);
    let Watched { primary, replica, sentinels } = &watched;
    let has_taken_over = || sentinels[1..].iter().all(|sentinel| sentinel.primary() == replica.port);
    assert_nothing_acknowledged_is_reported(&network, &watched.store(), [primary, replica], has_taken_over);
}

#[test]
fn a_leader_that_is_cut_off_from_the_other_primaries_reports_nothing_that_is_acknowledged_elsewhere() {
    let Some(network) = Network::of(2) else { return };
    let cluster = Cluster::across(&network);
    let (primary, replica) = (&cluster.primaries[0], &cluster.replica);
    // Else it would refuse every write by itself, soon enough.
    network.host(0).run(|| primary.command::<()>(&["CONFIG", "SET", "cluster-node-timeout", "60000"]));
    let store = Cluster::store(cluster.primaries.iter().chain([replica]));
    let has_taken_over = || replica.info("replication").contains("role:master");
    assert_nothing_acknowledged_is_reported(&network, &store, [primary, replica], has_taken_over);
}

#[test]
fn a_leader_that_alone_loses_the_sentinels_leaves_the_ring_to_a_sidecar_that_reaches_them() {
    let Some(network) = Network::of(3) else { return };
    let [alone, with_redis, with_sentinel] = [0, 1, 2].map(|number| network.host(number));
    let redis = with_redis.run(Redis::start);
    let sentinel = with_sentinel.run(|| Sentinel::watching(&redis, 1, ""));
    let store = store([&sentinel]);
    let a = alone.run(|| sidecar(&store, "a", &PATIENT));
    wait_until("it leads", || alone.run(|| a.leader()).as_deref() == Some("a"));
    let b = with_sentinel.run(|| sidecar(&store, "b", &PATIENT));
    alone.run(|| a.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added());
    alone.lose(with_sentinel);
    let mut adder = alone.run(|| a.connect());
    wait_until("the other leads", || with_sentinel.run(|| b.leader()).as_deref() == Some("b"));
    adder.ask(&frames::add(&[4], 5, 1)).added();
    let mut subscriber = alone.run(|| a.connect()).subscribed("default");
    assert_eq!(
        take_until(&mut subscriber, &[1, 2, 3, 4]),
        [1, 2, 3, 4],
        "also those who ask the one that does not lead"
    );
}
