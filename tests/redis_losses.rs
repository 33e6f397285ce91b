//! Redis loses a part of what it had: somebody deleted a key, or it evicted some.

use std::time::{Duration, Instant};

use crate::redis_faults::take_until;
use crate::support::frames;
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

const TICK: Duration = Duration::from_millis(200);

fn sidecar(redis: &Redis) -> Sidecar {
    Sidecar::on(redis, "only", &["--tick", "200ms"])
}

/// Adds messages, and asserts that each subscriber hears of them.
fn assert_delivered(sidecar: &Sidecar, subscribers: &mut [&mut Raw], ids: std::ops::Range<u64>) {
    let ids: Vec<u64> = ids.collect();
    sidecar.connect().ask(&frames::add(&ids, 1, 1)).added();
    for subscriber in subscribers {
        assert_eq!(take_until(subscriber, &ids), ids);
    }
}

#[test]
fn an_outbox_or_a_group_that_is_lost_is_made_anew() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let mut default = sidecar.connect().subscribed("default");
    let mut audit = sidecar.connect().subscribed("audit");
    assert_delivered(&sidecar, &mut [&mut default, &mut audit], 0..10);
    let losses: [&[&str]; 3] = [
        &["DEL", "{ackwheel:0}:outbox"],
        &["XGROUP", "DESTROY", "{ackwheel:0}:outbox", "audit"],
        &["DEL", "{ackwheel:0}:groups"],
    ];
    for (first, loss) in (10..).step_by(10).zip(losses) {
        sidecar.wait_for_settled("audit");
        redis.command::<()>(loss);
        // What is published meanwhile and settled by all others may be gone.
        wait_until("all is there again", || {
            redis.command::<u64>(&["HLEN", "{ackwheel:0}:groups"]) == 2
                && redis
                    .try_command::<Vec<redis::Value>>(&["XINFO", "GROUPS", "{ackwheel:0}:outbox"])
                    .is_ok_and(|groups| groups.len() == 2)
        });
        assert_delivered(&sidecar, &mut [&mut default, &mut audit], first..first + 10);
    }
}

#[test]
fn a_ring_whose_head_is_lost_is_another_ring_that_times_nobody_out_early() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let epoch = || redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "epoch"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&(0..1_000).collect::<Vec<u64>>(), 15, 1)).added();
    let before = epoch();
    redis.command::<()>(&["DEL", "{ackwheel:0}:meta"]);
    wait_until("it is noticed", || sidecar.metrics().count("redis_lost_total") == 1);
    sidecar.wait_until_ready();
    let ids: Vec<u64> = (5_000..5_010).collect();
    let added = Instant::now();
    sidecar.connect().ask(&frames::add(&ids, 10, 1)).added();
    assert_eq!(take_until(&mut subscriber, &ids), ids, "and none of those that were in flight before");
    assert!(added.elapsed() >= TICK * 10, "after {:?}", added.elapsed());
    assert!(epoch() > before, "{} after {before}", epoch());
    let in_flight: i64 = redis.command(&["HGET", "{ackwheel:0}:meta", "in_flight"]);
    assert_eq!(in_flight, 0);
}
