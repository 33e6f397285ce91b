//! A clock that somebody sets moves no deadline by more than the catch-up, and stops no ring.

use std::time::{Duration, Instant};

use ackwheel::core::{Advance, Leadership, Message, RingParts, Store, Wheel};
use ackwheel::redis::RedisOptions;

use crate::support::clock::Clock;
use crate::support::fleet::{Candidates, Pointers, assert_pace};
use crate::support::flow::{Flow, Plan};
use crate::support::frozen_redis::{self, FrozenRedis};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::single_request::{AddNewMsg, SingleRequest};
use crate::support::{SLACK, sleep_until};

const FLAGS: [&str; 4] = ["--tick", "1s", "--slots", "5"];
const TICK: Duration = Duration::from_secs(1);
const HOUR: i64 = 3_600;
const CATCH_UP_MAX_TICKS: u64 = 5;

/// The catch-up, and the two leases that a dead leader may cost.
const LATE_AT_MOST: Duration = Duration::from_secs(CATCH_UP_MAX_TICKS + 6);

/// Sets clocks twice under load, and kills a leader after each; then looks at everything.
fn with_clocks_set(redis: &Redis, mut candidates: Candidates, set: impl Fn(&Candidates, i64)) {
    let server = Sidecar::on(redis, "server", &[&FLAGS[..], &["--never-lead"]].concat());
    candidates.leader_name();
    let (begun, pointers) = (Instant::now(), Pointers::watch(server.admin));
    let flow = Flow::start(Plan::ten_times_a_second(TICK, 5), server.listen, server.listen);
    let at = |seconds| sleep_until(begun + Duration::from_secs(seconds));
    at(2);
    set(&candidates, 1);
    at(4);
    candidates.kill_the_leader();
    candidates.leader_name();
    at(11);
    set(&candidates, -1);
    at(13);
    candidates.kill_the_leader();
    candidates.leader_name();
    at(20);
    let evidence = flow.finish();
    let latest = evidence.assert_kept(LATE_AT_MOST + SLACK);
    assert_eq!(evidence.errors.len(), 0, "{:?}", evidence.errors);
    let ran = begun.elapsed();
    let ticks = assert_pace(&pointers.finish(), TICK, CATCH_UP_MAX_TICKS);
    println!("the latest came {latest:?} after its tick; {ticks} ticks in {ran:?}");
    let shifted = Duration::from_secs(ran.as_secs().saturating_sub(ticks));
    assert!(shifted <= LATE_AT_MOST * 2, "the pointer goes on: {ticks} ticks in {ran:?} with two leaders lost");
    assert_eq!(server.metrics().count("store_up"), 1);
}

#[test]
fn the_clock_of_redis_may_be_set_by_an_hour() {
    let redis = Redis::with_clock(Clock::Offset(0));
    let candidates = Candidates::start(&redis, 3, &FLAGS);
    // An hour forwards, and then that hour backwards.
    with_clocks_set(&redis, candidates, |_, way| redis.set_offset(if way > 0 { HOUR } else { 0 }));
}

#[test]
fn the_clock_of_redis_may_be_set_back_by_an_hour() {
    let redis = Redis::with_clock(Clock::Offset(0));
    let candidates = Candidates::start(&redis, 3, &FLAGS);
    // An hour backwards, with the lease of a dead leader in it, and then forwards again.
    with_clocks_set(&redis, candidates, |_, way| redis.set_offset(if way > 0 { -HOUR } else { 0 }));
}

#[test]
fn the_clock_of_a_leader_may_be_set_by_an_hour() {
    let redis = Redis::start();
    let candidates = Candidates::start_with_clocks(&redis, 3, &FLAGS);
    with_clocks_set(&redis, candidates, |candidates, way| {
        candidates.set_clock_of_the_leader(Clock::Offset(way * HOUR));
    });
}

/// Moves the pointer as far as the clock asks for; returns where it stands.
async fn turn(seat: &RingParts, time: &FrozenRedis) -> u64 {
    while let Advance::Moved { .. } = seat.ring.advance(time.now()).await.unwrap() {}
    seat.ring.status(time.now()).await.unwrap().pointer.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_candidate_that_watched_the_pointer_before_an_election_put_it_off_catches_nothing_up() {
    let mut time = FrozenRedis::start();
    let options = RedisOptions { lease: Duration::from_secs(20), ..time.options(Wheel::new(5, TICK).unwrap()) };
    let (leader, candidate) = (frozen_redis::open(&options).await, frozen_redis::open(&options).await);
    let (leader, candidate) = (&leader.rings()[0], &candidate.rings()[0]);
    let leads = |leadership| matches!(leadership, Leadership::Leads { .. });
    assert!(leads(leader.lease.maintain(time.now()).await.unwrap()));
    for _ in 0..4 {
        assert!(!leads(candidate.lease.maintain(time.now()).await.unwrap()));
        time.pass(TICK);
    }
    // Nobody turned the ring for four seconds, and its deadlines are shifted by them.
    time.redis.command::<()>(&["DEL", "{test:0}:lease"]);
    assert!(
        leads(leader.lease.maintain(time.now()).await.unwrap()),
        "its lease had run out, and it is elected again"
    );
    let request = AddNewMsg { messages: &[Message::from(1)], ack_timeout_ticks: 2, attempt: 1 };
    let deadline = leader.ring.add_new_msg(request, time.now()).await.unwrap().deadline;
    // All leases end with a clock that is set by more than they last.
    time.redis.set_frozen(time.unix_ms() + 90_000);
    time.redis.command::<()>(&["DEL", "{test:0}:lease"]);
    assert!(leads(candidate.lease.maintain(time.now()).await.unwrap()));
    let pointer = turn(candidate, &time).await;
    assert!(pointer <= deadline.0, "the message is in flight for two ticks: {pointer} of {deadline}");
}
