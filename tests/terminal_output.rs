//! `status` and `watch` on a terminal of 80 columns, and in a pipe.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;

use serde_json::{Value, json};

use crate::support::frames;
use crate::support::process::{Run, assert_names, program};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::wait_for;

/// Asserts that it fits a terminal and says nothing to it but text.
#[track_caller]
fn assert_plain(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{} columns: {line}\n{text}", line.chars().count());
        assert!(!line.contains(char::is_control), "{line:?}");
    }
}

/// The output of `status` for an answer.
fn drawn(status: &Value, flags: &[&str]) -> String {
    told("200 OK", &status.to_string(), flags).output().to_owned()
}

/// A run of `status` that is answered so.
fn told(code: &str, body: &str, flags: &[&str]) -> Run {
    let (address, answering) = answer(code, body, 1);
    let run = Run::of(program(&["status", "--admin", &address]).args(flags));
    answering.join().unwrap();
    run
}

/// A server that gives this answer to so many requests: its address, and its thread.
fn answer(code: &str, body: &str, requests: usize) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answer = format!("HTTP/1.1 {code}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let answering = std::thread::spawn(move || {
        for stream in listener.incoming().take(requests) {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4_096]).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, answering)
}

/// A ring as a sidecar of a later version may show it: with a key that this one does not know.
fn ring(number: u16, slots: &[u64]) -> Value {
    json!({
        "ring": number, "pointer": 1_792_000_001_u64, "epoch": 1_792_000_000_000_u64, "leader": "n".repeat(128),
        "lease_age_seconds": 86_399.6, "in_flight": slots.iter().sum::<u64>(), "slots": slots, "closing": 1_000_000_000,
        "recent": [{ "tick": 1_792_000_000_u64, "added": 5, "acked": 4, "timed_out": 1, "storm": false }],
    })
}

fn status(rings: &[Value]) -> Value {
    let groups: Vec<Value> = ["default", &"g".repeat(63), "audit"]
        .iter()
        .map(|name| {
            json!({
                "group": name, "subscribers": 1_000_000_000, "outbox_batches": 1_000_000_000,
                "unacked_batches": 1_000_000_000, "oldest_seconds": 8_640_000.0, "new": true,
            })
        })
        .collect();
    let slots = rings[0]["slots"].as_array().unwrap().len();
    json!({ "store": "redis", "slots": slots, "tick_ms": 1_000, "rings": rings, "groups": groups, "new": {} })
}

#[test]
fn the_status_fits_80_columns_with_any_figures() {
    for slots in [1, 15, 30, 31, 240, 3_600] {
        let text = drawn(&status(&[ring(0, &vec![1_000_000_000; slots])]), &[]);
        assert_plain(&text);
        let rows = text.lines().filter(|line| line.contains('|')).count();
        assert!(rows <= 30 && rows * slots.div_ceil(30) >= slots, "{rows} rows for {slots} slots\n{text}");
        assert!(text.lines().count() <= 45, "more than a screen: {text}");
        assert_names(&text, &["1,000,000,000 closing", &"g".repeat(63), "100d"]);
    }
    let rings: Vec<Value> = (0..64).map(|number| ring(number, &[1_000_000_000; 15])).collect();
    let text = drawn(&status(&rings), &[]);
    assert_plain(&text);
    assert_eq!(text.lines().filter(|line| line.contains("1792000001")).count(), 64, "{text}");
    let one = drawn(&status(&rings), &["--ring", "63"]);
    assert_plain(&one);
    assert_names(&one, &["\nring 63, led by n"]);
}

#[test]
fn every_problem_in_the_status_fits_80_columns() {
    let stormy = |number: u16, slots: usize| {
        let mut ring = ring(number, &vec![1_000_000_000; slots]);
        ring["pointer_lag_seconds"] = json!(86_400.0);
        let recent = (1_792_000_001_u64 - 60..1_792_000_001).map(|tick| {
            json!({ "tick": tick, "added": 1_000_000_000, "acked": 0, "timed_out": 1_000_000_000, "storm": true })
        });
        ring["recent"] = recent.collect();
        ring
    };
    let one = drawn(&status(&[stormy(0, 3_600)]), &[]);
    let storm =
        "\n! storm in tick 1792000000, the last of 60:\n  1,000,000,000 of 1,000,000,000 messages timed out; ";
    assert_names(&one, &[storm, "\n! led, but the pointer is stalled: 1 of 1 rings; ", ", stalled, 24h behind\n"]);
    assert!(one.lines().count() <= 50, "more than a screen: {one}");
    let rings = drawn(&status(&(0..64).map(|number| stormy(number, 15)).collect::<Vec<_>>()), &[]);
    assert_names(&rings, &["\n! storm of ring 63 in tick 1792000000, the last of 3840:\n", " 64 of 64 rings; "]);
    for text in [one, rings] {
        assert_plain(&text);
        assert!(!text.contains("\nok: "), "{text}");
    }
}

#[test]
fn a_storm_is_in_the_status_while_it_is_among_the_last_ticks() {
    let sidecar = Sidecar::start(&["--tick", "200ms", "--storm-min", "50"]);
    assert_names(sidecar.run(&["status"]).output(), &["\nok: "]);
    let (tick, _) = sidecar.connect().ask(&frames::add(&(1..=50).collect::<Vec<_>>(), 1, 1)).added();
    let text = wait_for("the storm is told", || {
        let text = sidecar.run(&["status"]).output().to_owned();
        text.contains("storm").then_some(text)
    });
    assert_plain(&text);
    assert_names(&text, &[&format!("\n! storm in tick {tick}:\n  50 of 50 messages timed out; ")]);
}

#[test]
fn a_refusal_commands_no_terminal() {
    let run = told("503 Service Unavailable", "no store\n\u{1b}[2J\u{9b}2Jand\r\u{7}more\n", &[]);
    assert_names(run.error(1), &["answers 503 Service Unavailable: no store\n?[2J?2Jand??more\n"]);
}

#[test]
fn the_json_of_a_server_that_lies_commands_no_terminal() {
    let hostile = "x\u{7f}\u{9b}2J\u{85}\u{202e}\u{2066}y";
    let mut lie = status(&[ring(0, &[1])]);
    lie["groups"][0]["group"] = json!(hostile);
    let told = told("200 OK", &format!("\r{lie}"), &["--json"]);
    let text = told.output();
    let is_dangerous = |one: char| (one.is_control() && one != '\n') || ('\u{202a}'..='\u{2069}').contains(&one);
    assert!(!text.contains(is_dangerous), "{text:?}");
    assert_names(text, &["x\\u007f\\u009b2J\\u0085\\u202e\\u2066y"]);
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), lie, "the JSON has the same meaning");

    let (admin, answering) = answer("503 Service Unavailable", hostile, 2);
    let run = Run::of(&mut program(&["check", "--json", "--addr", "127.0.0.1:1", "--admin", &admin]));
    answering.join().unwrap();
    assert!(!run.stdout.contains(is_dangerous) && run.stdout.contains("\\u009b2J"), "{run:?}");
}

/// A server that lies: its Welcome has this name, and it refuses every request but Ping with this text.
fn lying(name: &'static str, text: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let welcome = move || {
        let mut body = vec![1, 0, 0, 15];
        body.extend([1_000_u32, 1_048_576, 32_768, 1_048_576, 5_000].map(u32::to_be_bytes).concat());
        for text in ["memory", name] {
            body.push(u8::try_from(text.len()).unwrap());
            body.extend(text.as_bytes());
        }
        frames::Request::new(frames::WELCOME, 0, body)
    };
    std::thread::spawn(move || {
        let serve = move |mut stream: TcpStream| {
            let (mut read, mut part) = (Vec::new(), [0; 4_096]);
            while let Ok(length @ 1..) = stream.read(&mut part) {
                read.extend(&part[..length]);
                while let Some(frame) = frames::Frame::take(&mut read) {
                    let answer = match frame.kind {
                        frames::HELLO => welcome(),
                        frames::PING => frames::Request::new(frames::PONG, 0, frame.body),
                        _ => frames::Request { status: 40, ..frames::Request::new(frames::ERROR, 0, text.into()) },
                    };
                    let _ = stream.write_all(&answer.bytes(frame.correlation));
                }
            }
        };
        for stream in listener.incoming().map(Result::unwrap) {
            std::thread::spawn(move || serve(stream));
        }
    });
    address
}

#[test]
fn a_server_that_lies_commands_no_terminal_and_adds_no_line() {
    const HOSTILE: &str = "x\u{1b}[2J\nackwheel: all is well\r\u{9b}31m\u{202e}y";
    const SHOWN: &str = "x?[2J?ackwheel: all is well??31m?y";
    let address = lying(HOSTILE, HOSTILE);
    let run = |words: &[&str]| Run::of(program(words).args(["--addr", &address]));
    let ping = run(&["ping"]);
    assert_names(ping.output(), &[SHOWN]);
    assert_eq!(ping.stdout.lines().count(), 1, "{ping:?}");
    for words in [
        &["add", "1"][..],
        &["del", "1"],
        &["watch"],
        &["group", "delete", "a"],
        &["consume", "--group", "a"],
        &["bench", "--seconds", "1"],
    ] {
        let refused = run(words);
        assert_names(refused.error(1), &[SHOWN]);
        assert!(!refused.stderr.trim_end().replace('\n', "").contains(char::is_control), "{refused:?}");
        assert!(refused.stderr.lines().all(|line| line.starts_with("ackwheel: ")), "{refused:?}");
        assert!(!refused.stderr.contains("\nackwheel: all"), "{refused:?}");
    }
}

#[test]
fn a_ring_of_3600_slots_and_a_long_group_are_drawn_as_they_are() {
    let sidecar = Sidecar::start(&["--slots", "3600"]);
    let name = "long-name-".repeat(7)[..64].to_owned();
    let _subscriber = sidecar.connect().subscribed(&name);
    let mut connection = sidecar.connect();
    let ids: Vec<u64> = (0..1_234).collect();
    for ticks in [600, 1_800, 3_600] {
        let ids: Vec<u64> = ids.iter().map(|id| id + u64::from(ticks) * 10_000).collect();
        connection.ask(&frames::add(&ids, ticks, 1)).added();
    }
    let text = sidecar.run(&["status"]).output().to_owned();
    assert_plain(&text);
    assert_names(
        &text,
        &["3600 slots of 1s", "\n3,702 in flight, 0 closing\n", &format!("\n  {name}\n"), "\nok: "],
    );
    let rows: Vec<&str> = text.lines().filter(|line| line.contains('|')).collect();
    assert_eq!(rows.len(), 30, "{text}");
    assert_eq!(rows.iter().filter(|row| row.starts_with('>')).count(), 1, "{text}");
    let count = |row: &&str| row.rsplit(' ').next().unwrap().replace(',', "").parse::<u64>().unwrap();
    assert_eq!(rows.iter().map(count).sum::<u64>(), 3_702, "{text}");
}

#[test]
fn rings_in_redis_have_a_line_each() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "logic-node-17.rack-4.example", &["--rings", "4"]);
    let ids: Vec<u64> = (0..1_000).collect();
    sidecar.connect().ask(&frames::add(&ids, 0, 1)).added();
    let text = sidecar.run(&["status"]).output().to_owned();
    assert_plain(&text);
    assert_names(
        &text,
        &["store redis, 15 slots of 1s", "\n1,000 in flight; slot by slot: ackwheel status --ring N\n"],
    );
    assert_eq!(text.lines().filter(|line| line.contains("logic-node-17.rack-4.")).count(), 4, "{text}");
    let one = sidecar.run(&["status", "--ring", "2"]).output().to_owned();
    assert_plain(&one);
    assert_names(&one, &["\nring 2, led by logic-node-17.rack-4.example for "]);
    assert_eq!(one.lines().filter(|line| line.contains(" slot ")).count(), 15, "{one}");
    let none = sidecar.run(&["status", "--ring", "4"]);
    assert_names(none.error(64), &["--ring 4", "4 rings"]);
}

#[test]
fn a_line_of_watch_fits_80_columns_whatever_timed_out() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--storm-min", "10"]);
    let mut connection = sidecar.connect();
    let mut expected = 0;
    for (count, first) in [(1, 5), (3, u64::MAX - 3), (2_000, u64::MAX - 5_000), (40, 100)] {
        let ids: Vec<u64> = (first..first + count).collect();
        connection.ask(&frames::add(&ids, 1, 1)).added();
        expected += count;
    }
    let mut text = String::new();
    let mut seen = 0;
    while seen < expected {
        let run = sidecar.run(&["consume", "--group", "default", "--count", "1"]);
        let line = run.printed();
        assert_plain(line);
        let (head, _) = line.split_once(" timeouts").unwrap_or_else(|| panic!("{line}"));
        let here = head.rsplit(' ').nth(2).unwrap();
        seen += here.parse::<u64>().unwrap_or_else(|error| panic!("{error}: {line}"));
        let _ = write!(text, "{line}");
    }
    assert_eq!(seen, expected, "{text}");
    assert_names(&text, &[" STORM: ", " more\n"]);
}
