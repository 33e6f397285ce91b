//! A Redis Cluster: each ring is on one of its nodes, and is found there, also when that is another one.

use ackwheel::core::{Message, ring_of};

use crate::redis_faults::{MAX_HELD_ACKS, PATIENT, take_until};
use crate::sentinels::{assert_nothing_is_lost, sidecar};
use crate::support::certificates::Files;
use crate::support::cluster::Cluster;
use crate::support::frames;
use crate::support::process::{Log, Process, assert_names};
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve, serve_at};
use crate::support::wait_until;

/// Has a sidecar with 16 rings add a thousand messages, and hand them out.
fn assert_all_nodes_are_used(cluster: &Cluster, sidecar: &Sidecar) {
    let ids: Vec<u64> = (0..1_000).collect();
    sidecar.connect().ask(&frames::add(&ids, 2, 1)).added();
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &ids), ids);
    let keys: Vec<u64> = cluster.primaries.iter().map(Redis::dbsize).collect();
    assert!(keys.iter().all(|keys| *keys > 0), "{keys:?}");
}

#[test]
fn the_rings_of_a_wheel_are_on_several_nodes() {
    let cluster = Cluster::start();
    let evicting = &cluster.primaries[1];
    evicting.command::<()>(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    // It learns of the others from the one that it is told of.
    let store = Cluster::store(&cluster.primaries[2..]);
    let sidecar = sidecar(&store, "only", &["--tick", "200ms", "--rings", "16"]);
    assert_all_nodes_are_used(&cluster, &sidecar);
    let advice = sidecar.log().line("maxmemory-policy allkeys-lru").expect("all nodes are looked at");
    assert!(advice.contains(&format!("redis=\"127.0.0.1:{}\"", evicting.port)), "{advice}");
}

#[test]
fn a_stalled_node_is_replaced_by_its_replica_and_nothing_is_lost() {
    let cluster = Cluster::start();
    let (primary, replica) = (&cluster.primaries[0], &cluster.replica);
    assert_nothing_is_lost(&Cluster::store(&cluster.primaries), primary, replica, || {
        wait_until("the replica is a primary", || replica.info("replication").contains("role:master"));
    });
}

/// While a ring is away, connections are still read for requests that are to be held. Requests for a slow ring are
/// bounded too.
#[test]
fn acks_for_a_ring_that_is_there_and_slow_are_bounded_while_another_is_away() {
    let cluster = Cluster::start();
    for node in &cluster.primaries {
        node.command::<()>(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]);
    }
    let sidecar = sidecar(
        &Cluster::store(&cluster.primaries),
        "only",
        &["--tick", "200ms", "--slots", "150", "--rings", "16", "--max-held-acks", "160"],
    );
    let ids: Vec<u64> = (0..).filter(|id| ring_of(Message::from(*id), 16) == 0).take(16).collect();
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&ids, 150, 1)).added();
    cluster.primaries[1].stop();
    wait_until("some rings are away", || !sidecar.is_ready());
    cluster.primaries[0].command::<()>(&["CLIENT", "PAUSE", "400"]);
    let [taken, refused] = [&ids[..8], &ids[8..]].map(|ids| connection.request(&frames::del(ids)));
    connection.answer(refused).assert_error(MAX_HELD_ACKS, frames::RETRYABLE);
    assert_eq!(connection.answer(taken).outcomes(), [frames::ACKED; 8]);
    assert_eq!(connection.ask(&frames::del(&ids[8..])).outcomes(), [frames::ACKED; 8]);
}

#[test]
fn a_ring_that_is_moved_to_another_node_is_followed() {
    let cluster = Cluster::start();
    let sidecar = sidecar(&Cluster::store(&cluster.primaries[..1]), "only", &["--tick", "200ms"]);
    let ids: Vec<u64> = (0..20).collect();
    sidecar.connect().ask(&frames::add(&ids, 15, 1)).added();
    cluster.move_ring_0();
    let now = format!("redis=127.0.0.1:{}", cluster.primaries[1].port);
    sidecar.log().line(&now).unwrap_or_else(|| panic!("{}", sidecar.log().text()));
    sidecar.wait_until_ready();
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &ids), ids);
    assert!(!sidecar.log().text().contains("Redis has lost this ring"), "{}", sidecar.log().text());
    assert_eq!(cluster.primaries[0].dbsize(), 0);
}

#[test]
fn a_slot_that_stays_open_is_named_and_nothing_is_lost_once_it_is_closed() {
    let cluster = Cluster::start();
    let sidecar = sidecar(&Cluster::store(&cluster.primaries), "only", &PATIENT);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2, 3], 25, 1)).added();
    cluster.open_slot_of_ring_0();
    let line = sidecar
        .log()
        .line("Redis cannot be used; trying again")
        .unwrap_or_else(|| panic!("{}", sidecar.log().text()));
    let words = ["ring=0", "is being moved to another node", "CLUSTER SETSLOT"];
    assert_names(&line, &words);
    let (status, text) = sidecar.get("/status");
    assert_eq!((status, sidecar.is_ready()), (503, false));
    assert_names(&text, &words[1..2]);
    assert!(sidecar.metrics().value("redis_errors_total{kind=\"open_slot\"}") > 0.0);
    let held = connection.request(&frames::del(&[3]));
    cluster.close_slot_of_ring_0();
    assert_eq!(connection.answer(held).outcomes(), [frames::ACKED]);
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &[1, 2]), [1, 2]);
}

#[test]
fn a_wrong_cluster_setting_is_reported_with_a_remedy() {
    let (cluster, single) = (Cluster::start(), Redis::start());
    for (url, words) in [
        (
            format!("redis://127.0.0.1:{}/", cluster.primaries[1].port),
            ["Moved", "begin --store with redis-cluster://"],
        ),
        (Cluster::store([&single]), ["cluster support disabled", "begin --store with redis://"]),
    ] {
        let mut process = Process::spawn(&mut serve(&["--store", &url]));
        let log = Log::of(process.stderr());
        let line = log.line(words[0]).unwrap_or_else(|| panic!("{url}: {}", log.text()));
        assert_names(&line, &words);
    }
}

#[test]
fn the_nodes_of_a_cluster_that_speaks_tls_are_found_over_tls() {
    let (files, trusted) = Files::vouched_for();
    let cluster = Cluster::speaking_tls(&files, &trusted);
    let store = format!("rediss-cluster://127.0.0.1:{}", cluster.primaries[2].port_for_peers());
    let mut serve = serve_at(&store, "only", &["--tick", "200ms", "--rings", "16"]);
    let sidecar = Sidecar::spawn(serve.env("SSL_CERT_FILE", &trusted)).once_ready();
    assert_all_nodes_are_used(&cluster, &sidecar);
}
