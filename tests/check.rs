//! `ackwheel check` names what is wrong in prepared situations, and its exit code says whether something must be done.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::certificates::{Authority, Files, YEAR_1999, YEAR_2000};
use crate::support::frames;
use crate::support::process::{Process, Run, assert_names, program};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// A finding as JSON: level, subject, text and remedy.
type Finding = [String; 4];

/// Runs the check as JSON and as text, and returns the exit code and all findings that are not ok.
#[track_caller]
fn check(sidecar: &Sidecar, flags: &[&str]) -> (i32, Vec<Finding>) {
    let run = sidecar.run(&[&["check", "--json"], flags].concat());
    let found: Vec<Value> = serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{error}: {run:?}"));
    let keys = ["level", "subject", "text", "remedy"];
    let found: Vec<Finding> =
        found.iter().map(|one| keys.map(|key| one[key].as_str().expect("a text").to_owned())).collect();
    let failed = found.iter().any(|[level, ..]| level == "fail");
    assert_eq!((run.code, run.stderr.is_empty()), (i32::from(failed), !failed), "{run:?}");

    let text = sidecar.run(&[&["check"], flags].concat());
    assert_eq!((text.code, text.stdout.lines().count()), (run.code, found.len()), "{text:?}");
    for (line, [level, subject, ..]) in text.stdout.lines().zip(&found) {
        assert!(line.starts_with(&format!("{level:<4}  {subject}: ")), "{line}");
    }
    let problems = found.into_iter().filter(|[level, ..]| level != "ok");
    (run.code, problems.inspect(|one| assert!(!one[3].is_empty(), "{one:?} has a remedy")).collect())
}

/// Asserts that a finding has this level and subject, and these words.
#[track_caller]
fn assert_found(found: &[Finding], level: &str, subject: &str, words: &[&str]) {
    let is_named = |[is, of, text, remedy]: &Finding| {
        is == level && of == subject && words.iter().all(|word| text.contains(word) || remedy.contains(word))
    };
    assert!(found.iter().any(is_named), "no {level} {subject} {words:?} in {found:#?}");
}

#[test]
fn a_healthy_sidecar_has_no_problem() {
    let sidecar = Sidecar::start(&[]);
    let _subscriber = sidecar.connect().subscribed("default");
    assert_eq!(check(&sidecar, &[]), (0, Vec::new()));
    let run = sidecar.run(&["check"]);
    let version = concat!("runs version ", env!("CARGO_PKG_VERSION"));
    assert_names(run.output(), &["accepts this token and certificate", version, "the memory store answers"]);
}

#[test]
fn a_ring_without_a_leader_fails() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "follower", &["--never-lead"]);
    let (code, found) = check(&sidecar, &[]);
    assert_eq!(code, 1);
    assert_found(&found, "fail", "rings", &["ring 0 has no leader", "--never-lead"]);
    assert_found(&found, "warn", "redis", &["keeps nothing on disk", "set appendonly yes"]);
}

#[test]
fn a_group_with_batches_and_without_a_subscriber_is_a_warning_until_they_are_old() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "5"]);
    sidecar.connect().subscribed("audit");
    sidecar.run(&["add", "--ack-timeout-ticks", "1", "7"]).output();
    let is_old = |group: ackwheel::admin::status::GroupReport| group.oldest_seconds > 0.1;
    wait_until("it timed out", || ["default", "audit"].iter().all(|name| sidecar.group(name).is_some_and(is_old)));
    for (flags, code, level) in [(&[][..], 0, "warn"), (&["--max-batch-age", "100ms"], 1, "fail")] {
        let (exited, found) = check(&sidecar, flags);
        assert_eq!((exited, found.len()), (code, 2), "{found:?}");
        for group in ["default", "audit"] {
            let words = format!("group {group} has 1 batch and no subscriber");
            assert_found(&found, level, "groups", &[&words, "start its consumers"]);
        }
        // The advice works: `default` cannot be deleted.
        let advised: Vec<&str> =
            found.iter().filter_map(|one| one[3].split_once(": ackwheel ")).map(|one| one.1).collect();
        assert_eq!(advised, ["group delete audit"], "{found:?}");
    }
    sidecar.run(&["group", "delete", "audit"]).output();
    assert_eq!(check(&sidecar, &[]).1.len(), 1, "the group is not named any more");
}

#[test]
fn a_batch_that_is_not_acknowledged_for_long_fails() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "5"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.run(&["add", "--ack-timeout-ticks", "1", "7"]).output();
    subscriber.batch();
    assert_eq!(check(&sidecar, &[]), (0, Vec::new()), "it is not old yet");
    let is_old = |group: ackwheel::admin::status::GroupReport| group.oldest_seconds > 0.1;
    wait_until("it is old", || sidecar.group("default").is_some_and(is_old));
    let (code, found) = check(&sidecar, &["--max-batch-age", "100ms"]);
    assert_eq!((code, found.len()), (1, 1), "{found:?}");
    assert_found(&found, "fail", "groups", &["has not acknowledged a batch", "do they acknowledge?"]);
}

#[test]
fn a_storm_fails() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "5", "--storm-min", "8"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&(1..=10).collect::<Vec<_>>(), 1, 1)).added();
    subscriber.settled_batch();
    sidecar.wait_for_settled("default");
    let (code, found) = check(&sidecar, &[]);
    assert_eq!((code, found.len()), (1, 1), "{found:?}");
    assert_found(&found, "fail", "last minutes", &["1 tick was a storm", "before marking clients offline"]);
}

#[test]
fn a_redis_that_does_not_answer_fails_once() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &[]);
    redis.stop();
    wait_until("it is not ready", || !sidecar.is_ready());
    let (code, found) = check(&sidecar, &[]);
    redis.go_on();
    assert_eq!((code, found.len()), (1, 1), "{found:?}");
    assert_found(&found, "fail", "store", &["no status of the store", "does the store run"]);
}

#[test]
fn a_redis_without_memory_fails() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &[]);
    wait_until("it leads", || sidecar.leader().is_some());
    redis.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    sidecar.run(&["add", "7"]).error(1);
    let (code, found) = check(&sidecar, &[]);
    assert_eq!(code, 1);
    assert_found(&found, "fail", "redis", &["out of memory", "raise maxmemory"]);
}

#[test]
fn a_wrong_token_fails_and_is_counted_as_a_refusal() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, token: &str| {
        let path = folder.path().join(name);
        fs::write(&path, token).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right", "0123456789abcdef-right"), file("wrong", "0123456789abcdef-wrong"));
    let sidecar = Sidecar::start(&["--token-file", &right]);
    assert_eq!(check(&sidecar, &["--token-file", &right]), (0, Vec::new()));
    let (code, found) = check(&sidecar, &["--token-file", &wrong]);
    assert_eq!((code, found.len()), (1, 2), "{found:?}");
    assert_found(&found, "fail", "connection", &["unauthorized", "correct --token-file"]);
    assert_found(
        &found,
        "warn",
        "last minutes",
        &["1 request or connection was refused", "unauthorized", "--token-file"],
    );
}

#[test]
fn an_expired_certificate_fails() {
    let (files, authority) = (Files::new(), Authority::new());
    authority.certify_for(&files, 0, (YEAR_1999, YEAR_2000));
    let trusted = files.authority("ca.pem", &authority);
    let sidecar = Sidecar::start(&files.flags());
    let (code, found) = check(&sidecar, &["--tls-ca", trusted.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert_found(&found, "fail", "connection", &["has expired", "renew the certificate"]);
    assert_found(&found, "fail", "certificate", &["has expired", "--tls-cert"]);
}

#[test]
fn a_limit_that_is_nearly_reached_is_a_warning() {
    let sidecar = Sidecar::start(&["--max-in-flight", "100"]);
    sidecar.connect().ask(&frames::add(&(1..=90).collect::<Vec<_>>(), 15, 1)).added();
    let (code, found) = check(&sidecar, &[]);
    assert_eq!((code, found.len()), (0, 1), "{found:?}");
    assert_found(&found, "warn", "limits", &["--max-in-flight is at 90 of 100", "raise the limit"]);
}

#[test]
fn sidecars_of_several_versions_are_a_warning() {
    let redis = Redis::start();
    let entry = |version: &str, at: u64| format!("{version} {at}");
    let now = redis.unix_ms() / 1_000;
    let key = "{ackwheel:0}:versions";
    redis.command::<()>(&["HSET", key, "other-1", &entry("0.0.1", now), "gone-2", &entry("0.0.2", now - 200)]);
    let sidecar = Sidecar::on(&redis, "only", &[]);
    wait_until("it leads", || sidecar.leader().is_some());
    let (code, found) = check(&sidecar, &[]);
    assert_eq!(code, 0, "{found:?}");
    let mine = concat!("1 with ", env!("CARGO_PKG_VERSION"));
    assert_found(&found, "warn", "versions", &["1 with 0.0.1", mine, "finish the update"]);
    assert!(!format!("{found:?}").contains("0.0.2"), "a sidecar that is gone does not count: {found:?}");
    assert_eq!(redis.command::<u64>(&["HLEN", key]), 2, "and its entry is removed");
}

#[test]
fn a_sidecar_that_does_not_run_fails_and_a_wrong_flag_is_wrong_usage() {
    let nobody = ["check", "--addr", "127.0.0.1:1", "--admin", "127.0.0.1:1"];
    let run = Run::of(&mut program(&nobody));
    assert_eq!(run.code, 1, "{run:?}");
    assert_names(
        &run.stdout,
        &["fail  connection: ", "; is ackwheel serving there?\n", "fail  sidecar: ", "is --admin the"],
    );
    assert_names(&run.stderr, &["2 findings have the level fail"]);
    Run::of(program(&nobody).args(["--max-batch-age", "0s"])).error(64);
}

#[test]
fn a_watched_status_repeats_until_it_is_interrupted() {
    let sidecar = Sidecar::start(&[]);
    let mut watch = Process::spawn(&mut sidecar.command(&["status", "--watch"]));
    let lines = BufReader::new(watch.stdout()).lines().map_while(Result::ok);
    let versions: Vec<String> = lines.filter(|line| line.starts_with("version ")).take(2).collect();
    assert!(
        versions.iter().all(|line| line.contains(concat!(env!("CARGO_PKG_VERSION"), ", up for "))),
        "{versions:?}"
    );
    assert_eq!(versions.len(), 2, "one block after another");
    watch.signal(Signal::INT);
    assert_eq!(watch.exit().code(), Some(0));
}
