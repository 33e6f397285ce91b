//! The connections of sidecars as Redis sees them, and what becomes of sidecars if there is no room for them.

use std::time::Duration;

use redis::Connection;

use crate::support::frames;
use crate::support::process::{Log, Process, assert_names};
use crate::support::redis::{Redis, ask};
use crate::support::sentinels::Watched;
use crate::support::sidecar::{Sidecar, serve_at, serve_on};
use crate::support::wait_until;

/// Two sidecars with these have 32 connections for requests and hints, and four more.
const RINGS: [&str; 2] = ["--rings", "8"];

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

/// How many connections sidecars have for this purpose.
fn connections(kept: &mut Connection, purpose: &str) -> usize {
    let list: String = ask(kept, &["CLIENT", "LIST"]).unwrap();
    list.matches(&format!(":{purpose} ")).count()
}

/// Sets `maxclients`, beside the connection of the test itself.
fn allow(kept: &mut Connection, connections: usize) {
    ask::<()>(kept, &["CONFIG", "SET", "maxclients", &(connections + 1).to_string()]).unwrap();
}

/// Asserts that both serve, and have their connections for hints once there is room again.
fn assert_served_and_healed(kept: &mut Connection, sidecars: [&Sidecar; 2]) {
    for sidecar in sidecars {
        sidecar.wait_until_ready();
        sidecar.connect().ask(&frames::add(&(1..=100).collect::<Vec<_>>(), 15, 1)).added();
    }
    assert_eq!(connections(kept, "requests"), 16);
    wait_until("those for hints are closed", || connections(kept, "hints") == 0);
    allow(kept, 1_000);
    wait_until("those for hints are back", || connections(kept, "hints") == 16);
}

#[test]
fn sidecars_do_without_hints_where_redis_has_room_for_their_requests_alone() {
    let redis = Redis::start();
    let mut kept = redis.connect().unwrap();
    // Enough for one sidecar with hints, or for two without.
    allow(&mut kept, 22);
    let first = Sidecar::on(&redis, "first", &RINGS);
    wait_until("it has all connections", || connections(&mut kept, "hints") == 8);
    assert!(!first.log().text().contains("maxclients"), "{}", first.log().text());
    let second = Sidecar::on(&redis, "second", &RINGS);
    for sidecar in [&second, &first] {
        let line = sidecar.log().line("no room for the connections of all sidecars").expect("it is said");
        assert_names(&line, &["maxclients 23", "need 36", "rings: 8, sidecars: 2", "raise maxclients"]);
    }
    assert_served_and_healed(&mut kept, [&first, &second]);
}

#[test]
fn connections_for_requests_come_before_those_for_hints_when_all_are_lost() {
    let redis = Redis::start();
    let mut kept = redis.connect().unwrap();
    let [first, second] = ["first", "second"].map(|name| Sidecar::on(&redis, name, &RINGS));
    wait_until("they have all connections", || connections(&mut kept, "hints") == 16);
    allow(&mut kept, 22);
    ask::<u64>(&mut kept, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    wait_until("those for requests are back", || connections(&mut kept, "requests") == 16);
    assert_served_and_healed(&mut kept, [&first, &second]);
}

#[test]
fn a_sidecar_that_starts_without_room_for_its_requests_says_so_and_serves_once_there_is() {
    let redis = Redis::start();
    let mut kept = redis.connect().unwrap();
    allow(&mut kept, 7);
    let mut process = Process::spawn(&mut serve_on(&redis, "only", &RINGS));
    let log = Log::of(process.stderr());
    let line = log.line("no room for the connections of all sidecars").expect("it is said before");
    assert_names(&line, &["maxclients 8", "need 18"]);
    let line = log.line("no room for more connections").expect("it is said");
    assert_names(&line, &["does not serve yet", "raise maxclients in Redis"]);
    assert!(!log.text().contains(": listening "), "{}", log.text());
    allow(&mut kept, 1_000);
    log.line(": listening ").expect("it serves");
}

#[test]
fn settings_are_read_from_info_where_config_is_denied() {
    for (denied, expected) in [("-config", &["may evict keys", "rings: 8"][..]), ("-info", &["may evict keys"])] {
        let redis = Redis::start();
        let mut kept = redis.connect().unwrap();
        ask::<()>(&mut kept, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
        allow(&mut kept, 17);
        ask::<()>(&mut kept, &["ACL", "SETUSER", "default", denied]).unwrap();
        let sidecar = Sidecar::on(&redis, "only", &RINGS);
        let text = sidecar.log().assert_names(expected);
        assert_eq!(text.contains("keeps nothing on disk"), denied == "-info", "only CONFIG knows: {text}");
    }
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
