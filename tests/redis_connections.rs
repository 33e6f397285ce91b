//! The connections of a sidecar as Redis sees them, and the log of a sidecar if there is no room for them.

use std::time::Duration;

use crate::support::process::assert_names;
use crate::support::redis::{Redis, ask};
use crate::support::sentinels::Watched;
use crate::support::sidecar::{Sidecar, serve_at};
use crate::support::wait_until;

#[test]
fn connections_bear_the_name_of_their_sidecar_and_their_purpose() {
    let redis = Redis::start();
    let _sidecar = Sidecar::on(&redis, "pod 7", &[]);
    for purpose in ["requests", "hints"] {
        let name = format!(" name=ackwheel:pod7:{purpose} ");
        wait_until(&name, || redis.command::<String>(&["CLIENT", "LIST"]).contains(&name));
    }
}

#[test]
fn connections_to_sentinels_bear_a_name_too() {
    let watched = Watched::start();
    let _sidecar = Sidecar::spawn(&mut serve_at(&watched.store(), "only", &[])).once_ready();
    for sentinel in &watched.sentinels {
        let list = || sentinel.command::<String>(&["CLIENT", "LIST"]);
        wait_until("it has a name", || list().contains(" name=ackwheel:only:place "));
    }
}

#[test]
fn a_redis_without_room_for_more_connections_is_called_so() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &[]);
    let mut kept = redis.connect().unwrap();
    ask::<()>(&mut kept, &["CONFIG", "SET", "maxclients", "1"]).unwrap();
    ask::<u64>(&mut kept, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    let line = sidecar.log().line("no room for more connections").expect("it is said");
    assert_names(&line, &["maxclients", "raise maxclients in Redis", "CLIENT LIST"]);
    ask::<()>(&mut kept, &["CONFIG", "SET", "maxclients", "1000"]).unwrap();
    sidecar.wait_until_ready();
}

#[test]
#[ignore = "takes a minute: the checks are repeated once a minute"]
fn a_setting_of_redis_that_becomes_unwise_is_reported_within_a_minute() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &[]);
    assert!(!sidecar.log().text().contains("may evict keys"));
    redis.command::<()>(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    std::thread::sleep(Duration::from_secs(62));
    let text = sidecar.log().assert_names(&["may evict keys"]);
    assert_eq!(text.matches("may evict keys").count(), 1, "{text}");
}
