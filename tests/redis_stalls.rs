//! Redis stalls for a moment around a decision, and Acks that were sent before it wait in the sidecars.

use std::time::{Duration, SystemTime};

use crate::support::frames::{self, ACKED};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;

const TICK_MS: u64 = 1_000;

/// How long Redis stalls, and how long before the decision that begins.
#[derive(Clone, Copy, Debug)]
struct Stall {
    length_ms: u64,
    before_ms: u64,
}

fn sleep_until(unix_ms: u64) {
    let then = SystemTime::UNIX_EPOCH + Duration::from_millis(unix_ms);
    std::thread::sleep(then.duration_since(SystemTime::now()).unwrap_or_default());
}

/// When a tick will be decided, in ms by the clock of Redis, which is that of this machine.
fn expired_at(redis: &Redis, deadline: u64) -> u64 {
    let (pointer, due_ms): (u64, u64) = redis.command(&["HMGET", "{ackwheel:0}:meta", "pointer", "due_ms"]);
    due_ms + (deadline - pointer + 1) * TICK_MS
}

/// Acknowledges 3,000 messages through `asked` while Redis stalls, three times.
fn times_nobody_out(stall: Stall, redis: &Redis, asked: &Sidecar, leader: &Sidecar) {
    let mut connection = asked.connect();
    for round in 0..3 {
        let ids: Vec<u64> = (3_000 * round..3_000 * (round + 1)).collect();
        let (deadline, _) = connection.ask(&frames::add(&ids, 2, 1)).added();
        let expired_at = expired_at(redis, deadline);
        sleep_until(expired_at - stall.before_ms);
        redis.stop();
        for some in ids.chunks(100) {
            connection.request(&frames::del(some));
        }
        sleep_until(expired_at - stall.before_ms + stall.length_ms);
        redis.go_on();
        for _ in ids.chunks(100) {
            assert_eq!(connection.next_answer().outcomes(), [ACKED; 100], "{stall:?}, round {round}");
        }
        leader.wait_until_ready();
        asked.wait_until_ready();
    }
    let timed_out = leader.metrics().count("messages_timed_out_total");
    assert_eq!(timed_out, 0, "{stall:?}: {}", leader.log().text());
}

fn with_an_idle_leader(stall: Stall) {
    let redis = Redis::start();
    let leader = Sidecar::on(&redis, "leader", &[]);
    let asked = Sidecar::on(&redis, "asked", &["--never-lead"]);
    times_nobody_out(stall, &redis, &asked, &leader);
}

fn with_a_leader_that_is_asked(stall: Stall) {
    let redis = Redis::start();
    let leader = Sidecar::on(&redis, "leader", &[]);
    times_nobody_out(stall, &redis, &leader, &leader);
}

#[test]
fn a_stall_that_ends_just_after_a_decision_was_due_times_nobody_out() {
    with_an_idle_leader(Stall { length_ms: 240, before_ms: 200 });
}

#[test]
fn a_stall_that_ends_as_a_decision_is_due_times_nobody_out() {
    with_an_idle_leader(Stall { length_ms: 240, before_ms: 240 });
}

#[test]
fn a_stall_that_is_over_while_the_leader_waits_for_what_it_has_read_times_nobody_out() {
    with_a_leader_that_is_asked(Stall { length_ms: 500, before_ms: 250 });
}

#[test]
fn a_stall_in_which_a_move_has_no_answer_times_nobody_out() {
    with_an_idle_leader(Stall { length_ms: 780, before_ms: 100 });
}

#[test]
fn a_stall_of_a_whole_tick_times_nobody_out() {
    with_an_idle_leader(Stall { length_ms: 1_000, before_ms: 900 });
}
