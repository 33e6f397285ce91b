//! Redis with Sentinels: sidecars follow the primary that these name.

use std::time::{Duration, Instant};

use crate::redis_faults::take_until;
use crate::support::certificates::Files;
use crate::support::flow::{Flow, Plan};
use crate::support::frames;
use crate::support::process::{Log, Process, assert_names};
use crate::support::redis::{Redis, Tls};
use crate::support::sentinels::{NAME, Sentinel, Watched, store};
use crate::support::sidecar::{Sidecar, serve, serve_at};
use crate::support::{PATIENCE, sleep_until, wait_until};

/// A port on which nobody listens, and that no other test is given meanwhile.
const NOBODY: u16 = 1;

/// A sidecar with a wheel in this store, once it is ready.
pub fn sidecar(store: &str, name: &str, flags: &[&str]) -> Sidecar {
    Sidecar::spawn(&mut serve_at(store, name, flags)).once_ready()
}

/// Messages that a Redis has in ring 0.
fn messages(redis: &Redis) -> u64 {
    redis.command(&["HLEN", "{ackwheel:0}:messages"])
}

/// What a Redis is. One that becomes a replica ends its connections, the asking one too.
fn is_replica(redis: &Redis) -> bool {
    redis.try_command::<String>(&["INFO", "replication"]).is_ok_and(|info| info.contains("role:slave"))
}

/// Puts two sidecars under load, has a primary stand still until `replaced` has waited for its replica to take over, and
/// go on as what it was; asserts that nothing was lost.
pub fn assert_nothing_is_lost(store: &str, primary: &Redis, replica: &Redis, replaced: impl FnOnce()) {
    let [a, b] = ["a", "b"].map(|name| sidecar(store, name, &["--tick", "500ms", "--slots", "8"]));
    let (begun, plan) = (Instant::now(), Plan::ten_times_a_second(Duration::from_millis(500), 8));
    let flow = Flow::start(plan, a.listen, b.listen);
    sleep_until(begun + Duration::from_secs(5));
    primary.stop();
    replaced();
    let now = format!("redis=127.0.0.1:{}", replica.port);
    for sidecar in [&a, &b] {
        sidecar.log().line(&now).unwrap_or_else(|| panic!("{}", sidecar.log().text()));
        sidecar.wait_until_ready();
    }
    primary.go_on();
    let back = Instant::now();
    wait_until("it is a replica", || is_replica(primary));
    sleep_until(back + Duration::from_secs(5));
    let evidence = flow.finish();
    let latest = evidence.assert_kept(PATIENCE);
    let (acked, late) = evidence.acked_and_late();
    println!("{acked} acked, {late} late; the latest came {latest:?} after its tick; {:?}", evidence.errors);
    assert!(acked > 500, "{acked}");
    for sidecar in [&a, &b] {
        let log = sidecar.log().text();
        assert!(!log.contains("Redis came back without this ring"), "{log}");
    }
}

#[test]
fn a_primary_that_stands_still_is_replaced_and_nothing_is_lost() {
    let watched = Watched::start();
    let Watched { primary, replica, .. } = &watched;
    assert_nothing_is_lost(&watched.store(), primary, replica, || watched.wait_for_failover());
}

#[test]
fn a_failover_that_somebody_asks_for_is_followed() {
    let watched = Watched::start();
    let sidecar = sidecar(&watched.store(), "only", &["--tick", "200ms"]);
    assert_names(&sidecar.log().text(), &["min-replicas-to-write 1"]);
    let ids: Vec<u64> = (0..20).collect();
    sidecar.connect().ask(&frames::add(&ids, 15, 1)).added();
    wait_until("the replica has them", || messages(&watched.replica) == 20);
    watched.sentinels[0].fail_over();
    watched.wait_for_failover();
    wait_until("the old primary follows the new one", || is_replica(&watched.primary));
    sidecar.wait_until_ready();
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &ids), ids);
    wait_until("they are forgotten there, a revolution later", || messages(&watched.replica) == 0);
}

#[test]
fn a_primary_that_was_replaced_is_left_though_it_still_answers() {
    let (old, new) = (Redis::start(), Redis::start());
    new.follow(&old);
    let sentinel = Sentinel::watching(&old, 1, "");
    let sidecar = sidecar(&store([&sentinel]), "only", &[]);
    new.command::<()>(&["REPLICAOF", "NO", "ONE"]);
    sentinel.command::<()>(&["SENTINEL", "REMOVE", NAME]);
    sentinel.command::<()>(&["SENTINEL", "MONITOR", NAME, "127.0.0.1", &new.port.to_string(), "1"]);
    let moved = format!("redis=127.0.0.1:{}", new.port);
    sidecar.log().line(&moved).unwrap_or_else(|| panic!("{}", sidecar.log().text()));
    let another = format!("another Redis, 127.0.0.1:{}, is there in place of 127.0.0.1:{}", new.port, old.port);
    assert_names(&sidecar.log().text(), &[&another]);
    sidecar.wait_until_ready();
    sidecar.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    assert_eq!((messages(&new), messages(&old), is_replica(&old)), (3, 0, false));
    // Hints are heard where they are given.
    let blocked = |redis: &Redis| redis.info_number("clients", "blocked_clients");
    wait_until("it listens there", || (blocked(&new), blocked(&old)) == (1, 0));
}

#[test]
fn a_sentinel_that_leads_a_failover_is_asked_for_the_new_primary_before_that_is_over() {
    let (old, new, slow) = (Redis::start(), Redis::start(), Redis::start());
    for replica in [&new, &slow] {
        replica.follow(&old);
    }
    slow.command::<()>(&["CONFIG", "SET", "replica-priority", "0"]);
    // Until `slow` follows the new primary the failover goes on.
    let patient =
        ["down-after-milliseconds", "failover-timeout"].map(|name| format!("sentinel {name} {NAME} 60000"));
    let sentinel = Sentinel::watching(&old, 1, &patient.join("\n"));
    wait_until("the Sentinel knows the replicas", || sentinel.number("num-slaves") == 2);
    let sidecar = sidecar(&store([&sentinel]), "only", &[]);
    let epoch = sentinel.number("config-epoch");
    slow.stop();
    sentinel.fail_over();
    let moved = format!("redis=127.0.0.1:{}", new.port);
    sidecar.log().line(&moved).unwrap_or_else(|| panic!("{}", sidecar.log().text()));
    assert_eq!(
        (sentinel.number("port"), sentinel.number("config-epoch") > epoch),
        (usize::from(old.port), true),
        "it has the new epoch, and in SENTINEL MASTER the address of before"
    );
    sidecar.wait_until_ready();
    sidecar.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    assert_eq!((messages(&new), messages(&old)), (3, 0));
    assert!(!is_replica(&old), "what it had taken would have been lost");
}

#[test]
fn a_sentinel_that_lets_its_user_ask_for_the_primary_alone_is_enough() {
    let redis = Redis::start();
    let user = "user default on nopass ~* &* +@all -sentinel|get-master-addr-by-name";
    let sentinel = Sentinel::watching(&redis, 1, user);
    let denied =
        sentinel.try_command::<(String, u16)>(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]).unwrap_err();
    assert_eq!(denied.code(), Some("NOPERM"), "{denied}");
    let sidecar = sidecar(&store([&sentinel]), "only", &[]);
    sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    assert_eq!(messages(&redis), 1);
}

#[test]
fn a_sentinel_that_knows_less_is_not_believed_and_one_that_is_silent_is_in_nobodys_way() {
    let watched = Watched::start();
    let other = Redis::start();
    // It knows another Redis by the same name, and of no failover.
    let (ignorant, silent) = (Sentinel::watching(&other, 1, ""), Sentinel::watching(&other, 1, ""));
    watched.sentinels[0].fail_over();
    watched.wait_for_failover();
    silent.stop();
    let store = store([&ignorant, &silent].into_iter().chain(&watched.sentinels));
    let sidecar = sidecar(&store, "only", &[]);
    sidecar.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    assert_eq!((messages(&watched.replica), other.dbsize()), (3, 0));
}

#[test]
fn what_keeps_a_sidecar_from_its_primary_is_told_with_what_to_do() {
    let redis = Redis::start();
    let sentinel = Sentinel::watching(&redis, 1, "requirepass secret");
    let at = |port: u16, parameters: &str| format!("redis-sentinel://127.0.0.1:{port}?{parameters}");
    let password = "sentinel_password=secret";
    for (url, words) in [
        (at(NOBODY, "master=im"), ["no Sentinel names the primary \"im\"", "are the Sentinels running"]),
        (at(sentinel.port, &format!("master=other&{password}")), ["knows no primary \"other\"", "?master="]),
        (at(redis.port, "master=im"), ["unknown command", "name the Sentinels in --store"]),
        (at(sentinel.port, "master=im"), ["NOAUTH", "sentinel_password"]),
        (at(sentinel.port, "master=im&sentinel_password=wrong"), ["authentication failed", "sentinel_password"]),
    ] {
        let mut process = Process::spawn(&mut serve(&["--store", &url]));
        let log = Log::of(process.stderr());
        let line = log.line(words[0]).unwrap_or_else(|| panic!("{url}: {}", log.text()));
        assert_names(&line, &words);
        assert!(!log.text().contains("secret"), "{}", log.text());
    }
    let sidecar = sidecar(&at(sentinel.port, &format!("master=im&{password}")), "only", &[]);
    sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    assert_eq!(messages(&redis), 1);
}

#[test]
fn a_failover_is_followed_over_tls_to_sentinels_and_redis() {
    let (files, trusted) = Files::vouched_for();
    let [primary, replica] = [(); 2].map(|()| Redis::speaking_tls(&files, &trusted));
    replica.follow(&primary);
    let tls = Tls::with(&files, &trusted);
    let settings: Vec<String> = tls.settings().map(|(name, value)| format!("{name} {value}")).collect();
    let sentinel = Sentinel::watching(&primary, 1, &settings.join("\n"));
    let store = format!("rediss-sentinel://127.0.0.1:{}/0?master={NAME}", tls.port);
    let mut serve = serve_at(&store, "only", &["--tick", "200ms"]);
    let sidecar = Sidecar::spawn(serve.env("SSL_CERT_FILE", &trusted)).once_ready();
    let ids: Vec<u64> = (0..20).collect();
    sidecar.connect().ask(&frames::add(&ids, 15, 1)).added();
    wait_until("the replica has them", || messages(&replica) == 20);
    sentinel.fail_over();
    wait_until("the replica is the primary", || sentinel.primary() == replica.port_for_peers());
    wait_until("the old primary follows the new one", || is_replica(&primary));
    sidecar.wait_until_ready();
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &ids), ids);
}
