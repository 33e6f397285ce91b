//! Passwords of Redis: never printed, never sent to a server that no majority names, read again from files. And text in
//! Redis that forges log lines.

use std::fs;
use std::path::Path;

use crate::support::certificates::Files;
use crate::support::frames;
use crate::support::process::{Log, Process, Run, assert_names, program};
use crate::support::redis::Redis;
use crate::support::sentinels::{NAME, Sentinel, store};
use crate::support::sidecar::{Sidecar, serve, serve_at};
use crate::support::wait_until;

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_secret_in_a_wrong_store_is_never_printed() {
    for store in [
        "redis://me:secret@here:port",
        "redis://me:x/secret@here",
        "redis://me:1?secret@here",
        "redis://me:1#secret@here",
        "redis://here?protocol=secret",
        "redis+unix:///x?pass=a@secret&wrong=secret",
        "redis-sentinel://one?sentinel_password=a/secret",
        "redis-sentinel://one?sentinel_password=a?secret&secret=1",
        "redis-cluster://me:secret@one/7",
        "secret",
    ] {
        let run = Run::of(&mut program(&["serve", "--check-config", "--store", store]));
        assert_names(run.error(64), &["--store"]);
        assert!(!run.stderr.contains("secret"), "{store}: {}", run.stderr);
    }
    let good = ["serve", "--check-config", "--store", "redis+unix:///x?pass=a@secret/1&user=secret"];
    let run = Run::of(&mut program(&good));
    assert!(run.code == 0 && !format!("{run:?}").contains("secret"), "{run:?}");
    let run =
        Run::of(&mut serve(&["--store", "redis+unix:///no/socket?pass=a@secret/1&user=secret", "--log", "trace"]));
    assert_names(&run.stderr, &["redis+unix://***@/no/socket?db=0"]);
    assert!(!format!("{run:?}").contains("secret"), "{run:?}");
}

#[test]
fn tls_without_a_check_of_the_certificate_is_refused() {
    for flags in [&["--check-config"][..], &["--insecure"]] {
        let run = Run::of(serve(&["--store", "rediss://me:secret@here/0#insecure"]).args(flags));
        assert_names(run.error(64), &["#insecure turns off", "leave it out", "--redis-ca"]);
        assert!(!run.stderr.contains("secret"), "{}", run.stderr);
    }
}

#[test]
fn credentials_come_from_files_and_a_changed_password_needs_no_restart() {
    let (files, trusted) = Files::vouched_for();
    let redis = Redis::speaking_tls(&files, &trusted);
    redis.command::<()>(&["CONFIG", "SET", "tls-auth-clients", "yes"]);
    redis.command::<()>(&["ACL", "SETUSER", "im", "on", ">first", "~*", "&*", "+@all"]);
    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    fs::write(&password, " first\n").unwrap();
    let store = format!("rediss://im@127.0.0.1:{}/", redis.port_for_peers());
    let ca = ["--redis-ca", path(&trusted), "--redis-password-file", path(&password)];
    let mut stranger = Process::spawn(&mut serve_at(&store, "stranger", &ca));
    assert!(
        Log::of(stranger.stderr()).line("Redis cannot be reached").is_some(),
        "without a certificate of its own"
    );
    let own = ["--redis-cert", path(&files.certificate), "--redis-key", path(&files.key)];
    let sidecar = Sidecar::spawn(&mut serve_at(&store, "only", &[ca, own].concat())).once_ready();
    sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    redis.command::<()>(&["ACL", "SETUSER", "im", "resetpass", ">second"]);
    fs::write(&password, "second").unwrap();
    assert!(redis.command::<u64>(&["CLIENT", "KILL", "USER", "im"]) > 0);
    assert!(sidecar.log().line("Redis is back").is_some());
    sidecar.wait_until_ready();
    sidecar.connect().ask(&frames::add(&[2], 15, 1)).added();
    assert_eq!(redis.command::<u64>(&["HLEN", "{ackwheel:0}:messages"]), 2);
    for secret in ["first", "second"] {
        assert!(!sidecar.log().text().contains(secret), "{}", sidecar.log().text());
    }
}

#[test]
fn credential_files_that_cannot_be_used_are_refused_with_their_flag() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    fs::write(&empty, "\n").unwrap();
    let empty = path(&empty);
    for (store, flags, words) in [
        ("redis://me@here", ["--redis-password-file", empty], ["there is no password in it", empty]),
        ("redis://me:x@here", ["--redis-password-file", empty], ["contains a password too", "remove it"]),
        ("redis://here", ["--sentinel-password-file", empty], ["names no Sentinels", "leave it out"]),
        ("redis://here", ["--redis-ca", empty], ["does not use TLS", "rediss"]),
        ("rediss://here", ["--redis-ca", empty], ["there is no certificate in PEM", empty]),
        ("rediss://here", ["--redis-cert", empty], ["--redis-cert and --redis-key", "both"]),
        ("memory", ["--redis-ca", empty], ["--redis-ca belongs to a Redis store", "leave it out"]),
    ] {
        let run = Run::of(serve(&["--check-config", "--store", store]).args(flags));
        assert_names(run.error(64), &words);
    }
}

#[test]
fn a_redis_that_only_one_of_two_sentinels_names_gets_no_password() {
    let (honest, rogue) = (Redis::start(), Redis::start());
    for redis in [&honest, &rogue] {
        redis.command::<()>(&["ACL", "SETUSER", "im", "on", ">secret", "~*", "&*", "+@all"]);
        redis.command::<()>(&["CONFIG", "RESETSTAT"]);
    }
    let right = Sentinel::watching(&honest, 1, "");
    let lines = format!("sentinel config-epoch {NAME} 99\nsentinel current-epoch 99");
    let liar = Sentinel::watching(&rogue, 1, &lines);
    let both = store([&right, &liar]).replace("://", "://im:secret@");
    let mut process = Process::spawn(&mut serve_at(&both, "only", &[]));
    let log = Log::of(process.stderr());
    let line = log.line("no majority of the 2 Sentinels").unwrap_or_else(|| panic!("{}", log.text()));
    let names =
        |sentinel: &Sentinel, redis: &Redis| format!("127.0.0.1:{} names 127.0.0.1:{}", sentinel.port, redis.port);
    assert_names(&line, &[&names(&right, &honest), &names(&liar, &rogue), "name every Sentinel in --store"]);
    assert!(log.whole().contains("no majority"), "it gives up");
    for redis in [&honest, &rogue] {
        let stats = redis.info("commandstats");
        assert!(!stats.contains("cmdstat_auth") && !stats.contains("cmdstat_hello"), "{stats}");
    }
    let flags = ["--expire-without-majority"];
    let _sidecar = Sidecar::spawn(&mut serve_at(&both, "only", &flags)).once_ready();
    wait_until("the highest epoch is believed", || rogue.info("commandstats").contains("cmdstat_auth"));
}

#[test]
fn a_group_that_another_program_made_is_ignored_and_forges_no_log_line() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms"]);
    let _subscribed = sidecar.connect().subscribed("default");
    sidecar.wait_for_subscribers(1);
    let name = "x\n\x1b[31m\u{9b}forged";
    redis.command::<()>(&["XGROUP", "CREATE", "{ackwheel:0}:outbox", name, "$", "MKSTREAM"]);
    // A group that only the stream has harms nothing.
    sidecar.status();
    let entry: String = redis.command(&["HGET", "{ackwheel:0}:groups", "default"]);
    redis.command::<()>(&["HSET", "{ackwheel:0}:groups", name, &entry]);
    wait_until("the status is computed again", || {
        sidecar.status();
        sidecar.log().text().contains("is not a name of a group")
    });
    let line = sidecar.log().line("is not a name of a group").expect("it is said");
    assert_names(&line, &["forged", "XGROUP DESTROY"]);
    assert!(sidecar.group("default").is_some() && sidecar.group(name).is_none());
    let log = sidecar.log().text();
    assert_eq!(log.matches("is not a name of a group").count(), 1, "{log}");
    let is_bare = |line: &str| line.starts_with("forged") || line.contains(['\x1b', '\u{9b}']);
    assert!(!log.lines().any(is_bare), "{log:?}");
}
