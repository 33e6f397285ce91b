//! The comparison of ackwheel with what one would use instead: that every part of it can be repeated, and not what it
//! finds.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::packages;
use crate::support::process::Run;

/// One quick round of a part, by the example that `cargo test` builds beside the tests.
fn quick(part: &str, environment: impl FnOnce(&mut Command)) -> Value {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().and_then(Path::parent).unwrap().join("examples/compare");
    assert!(program.exists(), "{} is missing: run all tests with `cargo test`", program.display());
    let mut command = Command::new(program);
    command.args(["--quick", "--json", "--only", part]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    environment(&mut command);
    let run = Run::of(&mut command);
    assert_eq!(run.code, 0, "{run:?}");
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["plan"]["rounds"], 1, "{report}");
    assert_eq!(report["parts"].as_array().unwrap().len(), 1, "{report}");
    report["parts"][0].clone()
}

#[track_caller]
fn assert_is_positive(figure: &Value, of: &Value) {
    assert!(figure.as_f64().is_some_and(|figure| figure.is_finite() && figure > 0.0), "{of}");
}

/// Asserts that these subjects have figures.
#[track_caller]
fn assert_figures(part: &Value, subjects: &[&str]) {
    assert_eq!(part["failed"], Value::Null, "{part}");
    let rows = part["rows"].as_array().unwrap();
    for subject in subjects {
        assert!(rows.iter().any(|row| row["subject"] == *subject), "{subject} is missing: {part}");
    }
    for row in rows {
        assert_is_positive(&row["median"], row);
        assert_eq!(row["rounds"].as_array().unwrap().len(), 1, "{row}");
    }
}

/// Asserts that these subjects have figures, and that each of so many targets was measured.
#[track_caller]
fn assert_measured(part: &Value, subjects: &[&str], targets: usize) {
    assert_figures(part, subjects);
    let judged = part["targets"].as_array().unwrap();
    assert_eq!(judged.len(), targets, "{part}");
    for target in judged {
        for name in ["figure", "first", "aim"] {
            assert_is_positive(&target[name], target);
        }
        let (figure, first) = (target["figure"].as_f64().unwrap(), target["first"].as_f64().unwrap());
        let holds = if target["more"] == true { figure >= first } else { figure <= first };
        assert_eq!(target["verdict"] != "short of it", holds, "{target}");
    }
}

#[test]
fn the_ring_is_compared_with_maps_and_a_delay_queue() {
    let part = quick("ring", |_| ());
    let two_threads = std::thread::available_parallelism().unwrap().get() > 1;
    let subjects = [
        "ring",
        "hashbrown alone",
        "dashmap alone",
        "dashmap alone, a lock a shard and batch",
        "a ring on dashmap",
        "DelayQueue and its map of keys",
        "ring, ten times as many",
        "ring, a tick of which one in a hundred is left",
        "a ring on dashmap, the same tick",
    ];
    if two_threads {
        assert_measured(&part, &subjects, 7);
    } else {
        assert_eq!(part["failed"], Value::Null, "{part}");
    }
}

#[test]
fn a_sidecar_in_memory_is_compared_with_one_on_dashmap() {
    // Without Redis and beanstalkd.
    let part = quick("wire", |command| {
        command.env_clear();
    });
    let subjects = [
        "memory, 8 x 256",
        "memory on dashmap, 8 x 256",
        "ping to an echo, 8 x 256",
        "memory, 512 ids a frame, 8 x 8",
        "memory on dashmap, 512 ids a frame, 8 x 8",
    ];
    assert_figures(&part, &subjects);
    let ratios =
        part["rows"].as_array().unwrap().iter().filter(|row| row["figure"] == "times that: our ring, pairs/s");
    assert_eq!(ratios.count(), 2, "{part}");
}

#[test]
fn a_sidecar_on_redis_is_compared_with_its_script_and_with_redis_by_hand() {
    let part = quick("redis", |command| {
        command.env("REDIS_SERVER", packages::redis_server());
    });
    assert_eq!(part["skipped"], Value::Array(Vec::new()), "{part}");
    let subjects = [
        "sidecar on Redis, 64 x 16",
        "its Redis",
        "our script called directly, 1,000 ids, one in flight",
        "our script called directly, 1,000 ids, two in flight",
        "HSET + SADD and back together, 64 x 1",
        "HSET, SADD and back one by one, 64 x 1",
        "sidecar on Redis, 1 x 1",
        "our script called directly, 1 id, one in flight",
    ];
    assert_measured(&part, &subjects, 4);
}

#[test]
fn programs_that_are_not_installed_are_skipped() {
    let part = quick("redis", |command| {
        command.env_clear();
    });
    assert!(part["skipped"][0].as_str().unwrap().contains("apt-get install redis-server"), "{part}");
    assert_measured(&part, &[], 0);
}
