//! If a leader ends in any way, the wheel turns on, and no message is lost, early or reported twice.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::fleet::{Candidates, Pointers, assert_pace};
use crate::support::flow::{Flow, Plan};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{SLACK, sleep_until, wait_until};

const FLAGS: [&str; 4] = ["--tick", "1s", "--slots", "5"];
const TICK: Duration = Duration::from_secs(1);
const CATCH_UP_MAX_TICKS: u64 = 5;

/// The sidecar that clients talk to, which never leads, and candidates that nobody talks to.
fn scene(redis: &Redis, candidates: usize) -> (Sidecar, Candidates<'_>) {
    let server = Sidecar::on(redis, "server", &[&FLAGS[..], &["--never-lead"]].concat());
    let candidates = Candidates::start(redis, candidates, &FLAGS);
    candidates.leader_name();
    (server, candidates)
}

fn flow(server: &Sidecar) -> Flow {
    Flow::start(Plan::ten_times_a_second(TICK, 5), server.listen, server.listen)
}

#[test]
fn a_killed_leader_is_replaced_and_nothing_is_lost_early_or_twice() {
    let redis = Redis::start();
    let (server, mut candidates) = scene(&redis, 3);
    let (begun, flow, pointers) = (Instant::now(), flow(&server), Pointers::watch(server.admin));
    let mut epoch = server.status().rings[0].epoch;
    for seconds in [3, 13, 23, 33] {
        sleep_until(begun + Duration::from_secs(seconds));
        candidates.kill_the_leader();
        candidates.leader_name();
        wait_until("a new leadership has begun", || server.status().rings[0].epoch > epoch);
        epoch = server.status().rings[0].epoch;
    }
    sleep_until(begun + Duration::from_secs(41));
    let evidence = flow.finish();
    let latest = evidence.assert_kept(Duration::from_secs(9));
    assert_eq!(evidence.errors.len(), 0, "Redis was there all the time: {:?}", evidence.errors);
    let (acked, late) = evidence.acked_and_late();
    assert!(acked > 1_000 && late > 0, "{acked} were acknowledged, {late} of them late");
    let (ran, ticks) = (begun.elapsed(), assert_pace(&pointers.finish(), TICK, CATCH_UP_MAX_TICKS));
    println!("the latest came {latest:?} after its tick; {ticks} ticks in {ran:?}");
    assert!(ticks + 20 >= ran.as_secs(), "{ticks} ticks in {ran:?} with four leaders lost");
}

#[test]
fn a_leader_that_is_asked_to_go_costs_no_tick() {
    let redis = Redis::start();
    let (server, mut candidates) = scene(&redis, 2);
    let (begun, flow) = (Instant::now(), flow(&server));
    for seconds in [2, 6, 10] {
        sleep_until(begun + Duration::from_secs(seconds));
        candidates.start_another();
        let leader = candidates.leader_name();
        // Shortly before a tick, which is when it hurts most.
        let tick = server.wait_for_pointer(server.pointer() + 1);
        sleep_until(tick + TICK - Duration::from_millis(100));
        candidates.take_leader().terminate();
        assert_ne!(candidates.leader_name(), leader);
    }
    sleep_until(begun + Duration::from_secs(13));
    let evidence = flow.finish();
    let latest = evidence.assert_kept(Duration::from_millis(300) + SLACK);
    println!("the latest came {latest:?} after its tick");
    assert_eq!(evidence.errors.len(), 0, "{:?}", evidence.errors);
}

#[test]
fn a_leader_that_stood_still_changes_nothing_when_it_wakes() {
    let redis = Redis::start();
    let (server, mut candidates) = scene(&redis, 2);
    let (begun, flow, pointers) = (Instant::now(), flow(&server), Pointers::watch(server.admin));
    sleep_until(begun + Duration::from_secs(2));
    let sleeper = candidates.take_leader();
    let stopped = sleeper.stop();
    let other = candidates.leader_name();
    sleep_until(stopped + Duration::from_secs(7));
    assert_eq!(server.leader().as_deref(), Some(other.as_str()));
    let woken = sleeper.go_on();
    wait_until("it knows that it does not lead", || sleeper.metrics().sum("leader") < 0.5);
    sleep_until(woken + Duration::from_secs(5));
    let evidence = flow.finish();
    evidence.assert_kept(Duration::from_secs(9));
    assert_eq!(evidence.errors.len(), 0, "{:?}", evidence.errors);
    assert_pace(&pointers.finish(), TICK, CATCH_UP_MAX_TICKS);
    // It stands for election like any other: alone, it leads again.
    candidates.leader().signal(Signal::TERM);
    wait_until("it leads again", || sleeper.metrics().sum("leader") > 0.5);
}
