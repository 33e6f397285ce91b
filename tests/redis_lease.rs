//! The lease of a ring outlives the eviction of keys, and no loss of it makes a storm of elections.

use std::time::{Duration, Instant};

use crate::support::frames;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

const META: &str = "{ackwheel:0}:meta";
const LEASE: &str = "{ackwheel:0}:lease";

fn meta(redis: &Redis, field: &str) -> u64 {
    redis.command::<Option<u64>>(&["HGET", META, field]).unwrap_or_default()
}

#[test]
fn a_full_redis_that_evicts_keys_with_a_ttl_stops_no_wheel() {
    for policy in ["volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"] {
        let redis = Redis::start();
        redis.command::<()>(&["CONFIG", "SET", "maxmemory-policy", policy]);
        let flags = ["--tick", "200ms", "--lease", "20s"];
        let sidecars = ["a", "b"].map(|name| Sidecar::on(&redis, name, &flags));
        wait_until("one leads", || sidecars[0].leader().is_some());
        sidecars[0].connect().ask(&frames::add(&[1, 2], 5, 1)).added();
        let mut subscriber = sidecars[1].connect().subscribed("default");
        redis.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
        let (epoch, pointer) = (meta(&redis, "epoch"), meta(&redis, "pointer"));
        assert_eq!(subscriber.settled_batch().ids().len(), 2, "{policy}");
        wait_until("the pointer moves", || meta(&redis, "pointer") >= pointer + 20);
        assert_eq!(meta(&redis, "epoch"), epoch, "{policy}: one leader moves it all the time");
        assert_eq!(redis.info_number("stats", "evicted_keys"), 0, "{policy}");
        for key in redis.command::<Vec<String>>(&["KEYS", "*"]) {
            // -1 without a TTL, -2 if the key is gone meanwhile.
            assert!(redis.command::<i64>(&["PTTL", &key]) < 0, "{key} could be evicted");
        }
    }
}

#[test]
fn a_lease_that_is_deleted_all_the_time_makes_no_storm_of_elections() {
    let redis = Redis::start();
    // A renewal is due half a second after each election.
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "100ms", "--lease", "1500ms"]);
    wait_until("it leads", || sidecar.leader().is_some());
    let (begun, mut deleted) = (Instant::now(), 0);
    let before = sidecar.metrics().count("leader_changes_total");
    wait_until("the lease was taken again and again", || {
        deleted += redis.command::<u64>(&["DEL", LEASE]);
        deleted >= 6
    });
    // The first may have been elected long before its lease was deleted.
    assert!(begun.elapsed() >= Duration::from_millis(4 * 480), "six elections in {:?}", begun.elapsed());
    assert!(sidecar.metrics().count("leader_changes_total") <= before + 6);
    let pointer = sidecar.pointer();
    sidecar.wait_for_pointer(pointer + 10);
}
