//! Several rings: the sidecars that stand for election lead about as many of them each, also when sidecars join and leave.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use crate::support::flow::{Flow, Plan};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{SLACK, sleep_until, wait_until};

const TICK: Duration = Duration::from_millis(500);
const LEASE: Duration = Duration::from_secs(1);
const FLAGS: [&str; 8] = ["--tick", "500ms", "--slots", "5", "--rings", "6", "--lease", "1s"];

/// The sidecar that clients talk to, which never leads.
fn server(redis: &Redis) -> Sidecar {
    Sidecar::on(redis, "server", &[&FLAGS[..], &["--never-lead"]].concat())
}

fn candidate(redis: &Redis, name: &str) -> Sidecar {
    Sidecar::on(redis, name, &FLAGS)
}

/// How many rings each leads, the fewest first.
fn shares(sidecars: &[&Sidecar]) -> Vec<u64> {
    let mut shares: Vec<u64> = sidecars.iter().map(|sidecar| sidecar.metrics().count("rings_led")).collect();
    shares.sort_unstable();
    shares
}

#[track_caller]
fn wait_for_shares(sidecars: &[&Sidecar], expected: &[u64]) {
    wait_until(&format!("they lead {expected:?} rings"), || shares(sidecars) == expected);
}

fn epochs(asked: &Sidecar) -> Vec<u64> {
    asked.status().rings.iter().map(|ring| ring.epoch).collect()
}

/// The rings that a sidecar leads, and since when.
fn epochs_of_led(sidecar: &Sidecar) -> BTreeSet<(u16, u64)> {
    let rings = sidecar.status().rings.into_iter().filter(|ring| ring.leads);
    rings.map(|ring| (ring.ring, ring.epoch)).collect()
}

/// Asserts that no ring changes hands for some leases.
#[track_caller]
fn assert_settled(asked: &Sidecar) {
    let before = epochs(asked);
    sleep_until(Instant::now() + LEASE * 4);
    assert_eq!(epochs(asked), before, "leaderships go round");
}

#[test]
fn a_sidecar_that_joins_gets_its_share_of_rings_and_nothing_is_lost_late_or_twice() {
    let redis = Redis::start();
    let server = server(&redis);
    let first = candidate(&redis, "first");
    wait_for_shares(&[&first, &server], &[0, 6]);
    let flow = Flow::start(Plan::ten_times_a_second(TICK, 5), server.listen, server.listen);

    let mut second = candidate(&redis, "second");
    wait_for_shares(&[&first, &second, &server], &[0, 3, 3]);
    let mut third = candidate(&redis, "third");
    wait_for_shares(&[&first, &second, &third], &[2, 2, 2]);
    assert_settled(&server);

    third.terminate();
    wait_for_shares(&[&first, &second], &[3, 3]);
    let kept = epochs_of_led(&first);
    second.terminate();
    wait_for_shares(&[&first], &[6]);
    assert_settled(&server);
    assert!(epochs_of_led(&first).is_superset(&kept), "none was handed to the one that had gone");
    let evidence = flow.finish();
    let latest = evidence.assert_kept(Duration::from_millis(300) + SLACK);
    println!("the latest came {latest:?} after its tick");
    assert_eq!(evidence.errors.len(), 0, "{:?}", evidence.errors);
    let (acked, late) = evidence.acked_and_late();
    assert!(acked > 100 && late > 0, "{acked} were acknowledged, {late} of them late");
}

#[test]
fn a_stalled_sidecar_gets_no_ring_until_it_resumes() {
    let redis = Redis::start();
    let server = server(&redis);
    let (first, second) = (candidate(&redis, "first"), candidate(&redis, "second"));
    wait_for_shares(&[&first, &second], &[3, 3]);
    second.stop();
    wait_for_shares(&[&first], &[6]);
    assert_settled(&server);
    second.go_on();
    wait_for_shares(&[&first, &second], &[3, 3]);
}

/// When the log has said something, each time.
fn times(sidecar: &Sidecar, words: &str) -> Vec<SystemTime> {
    let text = sidecar.log().text();
    let lines = text.lines().filter(|line| line.contains(words));
    lines.map(|line| humantime::parse_rfc3339(line.split(' ').next().unwrap()).unwrap()).collect()
}

#[test]
fn a_sidecar_that_is_given_a_ring_leads_it_at_once() {
    let redis = Redis::start();
    // A candidate without a hint looks again after 750 ms at the earliest.
    let flags = ["--rings", "4", "--lease", "6s"];
    let [first, second] = ["first", "second"].map(|name| {
        let sidecar = Sidecar::on(&redis, name, &flags);
        wait_until("the first leads all", || shares(&[&sidecar]) == [4] || name == "second");
        sidecar
    });
    wait_for_shares(&[&first, &second], &[2, 2]);
    let (handed, led) = (times(&first, "hands the ring over"), times(&second, "this sidecar leads"));
    assert_eq!((handed.len(), led.len()), (2, 2));
    for (handed, led) in handed.into_iter().zip(led) {
        let took = led.duration_since(handed).unwrap();
        assert!(took < Duration::from_millis(400), "{took:?}");
    }
}
