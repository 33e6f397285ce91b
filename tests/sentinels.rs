//! Redis with Sentinels: sidecars follow the primary that these name.

use std::time::{Duration, Instant};

use crate::redis_faults::{PATIENT, take_until};
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

/// Whether a Redis is a replica. One that becomes a replica ends its connections, also the one that asks.
pub fn is_replica(redis: &Redis) -> bool {
    redis.try_command::<String>(&["INFO", "replication"]).is_ok_and(|info| info.contains("role:slave"))
}

/// Puts two sidecars under load, has a primary stall until `replaced` has waited for its replica to take over, and
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
        assert!(!log.contains("Redis has lost this ring"), "{log}");
    }
}

#[test]
fn a_stalled_primary_is_replaced_and_nothing_is_lost() {
    let watched = Watched::start();
    let Watched { primary, replica, .. } = &watched;
    assert_nothing_is_lost(&watched.store(), primary, replica, || watched.wait_for_failover());
}

#[test]
fn a_failover_that_somebody_asks_for_is_followed() {
    let watched = Watched::start();
    let sidecar = sidecar(&watched.store(), "only", &["--tick", "200ms"]);
    sidecar.log().assert_names(&["min-replicas-to-write 1"]);
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
    let another = format!("127.0.0.1:{} has replaced 127.0.0.1:{} as the primary", new.port, old.port);
    sidecar.log().assert_names(&[&another]);
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
    let all = store([&ignorant, &silent].into_iter().chain(&watched.sentinels));
    let first = sidecar(&all, "only", &[]);
    first.connect().ask(&frames::add(&[1, 2, 3], 15, 1)).added();
    assert_eq!((messages(&watched.replica), other.dbsize()), (3, 0));
    // With the flag, where there is no majority, the one counts that has heard of the latest failover.
    watched.sentinels[1..].iter().for_each(Sentinel::stop);
    let two = store([&ignorant, &watched.sentinels[0]]);
    let alone = sidecar(&two, "alone", &["--expire-without-majority"]);
    alone.connect().ask(&frames::add(&[4, 5, 6], 15, 1)).added();
    assert_eq!((messages(&watched.replica), other.dbsize()), (6, 0));
}

#[test]
fn without_a_majority_of_the_sentinels_nothing_times_out_and_all_else_goes_on() {
    let watched = Watched::start();
    let store = watched.store();
    let sidecar_on = |name: &str, more: &[&str]| sidecar(&store, name, &[&PATIENT[..], more].concat());
    let careful = sidecar_on("careful", &["--namespace", "careful"]);
    let daring = sidecar_on("daring", &["--namespace", "daring", "--expire-without-majority"]);
    daring.log().assert_names(&["--expire-without-majority is on"]);
    let mut subscriber = careful.connect().subscribed("default");
    watched.sentinels[1..].iter().for_each(Sentinel::stop);
    wait_until("it waits", || careful.status().rings[0].waits.is_some());
    let mut connection = careful.connect();
    connection.ask(&frames::add(&[1, 2, 3], 5, 1)).added();
    assert_eq!(connection.ask(&frames::del(&[3])).outcomes(), [frames::ACKED]);
    daring.connect().ask(&frames::add(&[1], 5, 1)).added();
    assert_eq!(take_until(&mut daring.connect().subscribed("default"), &[1]), [1]);
    wait_until("their time has passed", || careful.status().rings[0].pointer_lag_seconds > 2.0);
    assert_eq!((careful.is_ready(), careful.metrics().count("rings_unconfirmed")), (true, 1));
    assert_eq!(daring.metrics().count("rings_unconfirmed"), 0);
    connection.ask(&frames::del(&[3]));
    assert!(subscriber.batches_so_far().is_empty());
    watched.sentinels[1].go_on();
    assert_eq!(take_until(&mut subscriber, &[1, 2]), [1, 2]);
    careful.log().assert_names(&["no tick expires", "a majority confirms the primary again"]);
}

#[test]
fn a_sidecar_that_starts_during_a_failover_waits_for_the_new_primary() {
    let redis = Redis::start();
    let sentinel = Sentinel::watching(&redis, 1, "");
    // In a failover the primary that Sentinels name may be a replica already. Nobody listens at that port.
    redis.command::<()>(&["REPLICAOF", "127.0.0.1", &NOBODY.to_string()]);
    let mut process = Process::spawn(&mut serve_at(&store([&sentinel]), "only", &[]));
    let log = Log::of(process.stderr());
    let line = log.line("Redis does not serve yet").unwrap_or_else(|| panic!("{}", log.text()));
    assert_names(&line, &["replica"]);
    redis.command::<()>(&["REPLICAOF", "NO", "ONE"]);
    assert!(log.line("listening").is_some(), "{}", log.text());
}

#[test]
fn a_sentinel_that_lies_alone_about_a_failover_is_not_believed() {
    let (watched, other) = (Watched::start(), Redis::start());
    let liar =
        Sentinel::watching(&other, 1, &format!("sentinel config-epoch {NAME} 99\nsentinel current-epoch 99"));
    assert_eq!(liar.number("config-epoch"), 99);
    let store = store([&liar].into_iter().chain(&watched.sentinels[..2]));
    let sidecar = sidecar(&store, "only", &["--tick", "200ms", "--slots", "5"]);
    sidecar.connect().ask(&frames::add(&[1, 2, 3], 5, 1)).added();
    assert_eq!((messages(&watched.primary), other.dbsize()), (3, 0), "two of three name the right one");
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &[1, 2, 3]), [1, 2, 3]);
}

#[test]
fn an_unreachable_primary_is_reported_with_its_cause_and_a_remedy() {
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
