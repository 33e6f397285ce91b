//! The verbs `add`, `del`, `watch` and `status`, as a person uses them.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::frames;
use crate::support::process::{Process, Run, assert_names, lines, program};
use crate::support::sidecar::Sidecar;
use crate::support::watch::Watch;
use crate::support::{PATIENCE, SLACK, sleep_until, wait_until};

const REVOLUTION: Duration = Duration::from_secs(3);
const TICK: Duration = Duration::from_millis(200);

#[test]
fn the_first_session_goes_as_promised() {
    let sidecar = Sidecar::start(&["--tick", "200ms"]);
    let watch = Watch::start(&sidecar, &["--group", "default"]);
    let before = Instant::now();
    assert_eq!(
        sidecar.run(&["add", "101", "102", "103"]).output(),
        "101 added, times out in 3s\n102 added, times out in 3s\n103 added, times out in 3s\n"
    );
    let after = Instant::now();
    assert_eq!(sidecar.run(&["del", "102"]).output(), "102 acked\n");
    assert_eq!(sidecar.run(&["del", "102"]).output(), "102 unknown\n");

    let batch = watch.next();
    assert!(batch.arrived - before >= REVOLUTION, "early: {:?}", batch.arrived - before);
    let latest = REVOLUTION + TICK + Duration::from_millis(200) + SLACK;
    assert!(batch.arrived - after <= latest, "late: {:?}", batch.arrived - after);
    assert_eq!(batch.plain_ids(), [101, 103]);
    assert_eq!((batch.delivery, batch.ring, batch.seq, &batch.attempts[..]), (1, 0, 0, &[1, 1][..]));
    assert_eq!((batch.added, batch.acked, batch.storm, batch.drained), (3, 1, false, false));
    assert!(batch.age_ms <= 1_000, "{batch:?}");

    assert_eq!(sidecar.run(&["del", "101"]).output(), "101 late\n");
    assert_eq!(sidecar.run(&["del", "101:0", "102", "103"]).output(), "101 late\n102 unknown\n103 late\n");
    is_forgotten_a_revolution_after(&sidecar, 101, batch.arrived);
    assert_eq!(sidecar.run(&["del", "101", "103"]).output(), "101 unknown\n103 unknown\n");
}

#[test]
fn a_ping_prints_the_server_that_answered_and_adds_nothing() {
    let sidecar = Sidecar::start(&["--slots", "20", "--tick", "1500ms"]);
    let ping = sidecar.run(&["ping"]);
    let (address, told) = ping.output().split_once(" answered in ").unwrap();
    assert_eq!(address, sidecar.listen.to_string());
    let (took, told) = told.split_once(" ms: ").unwrap();
    assert!(took.parse::<f64>().is_ok_and(|ms| ms > 0.0 && ms < PATIENCE.as_secs_f64() * 1_000.0), "{took}");
    let name = concat!("ackwheel/", env!("CARGO_PKG_VERSION"));
    assert_eq!(told, format!("{name}, memory store, 20 slots of 1s 500ms\n"));
    assert_eq!(sidecar.metrics().count("messages_added_total"), 0);
}

/// A message that timed out is late for a revolution, and then unknown.
fn is_forgotten_a_revolution_after(sidecar: &Sidecar, id: u64, timed_out: Instant) {
    let mut connection = sidecar.connect();
    wait_until("it is forgotten", || {
        let asked = Instant::now();
        match connection.ask(&frames::del(&[id])).outcomes() {
            [frames::LATE] => {
                assert!(asked - timed_out <= REVOLUTION + TICK * 2 + SLACK, "late for {:?}", asked - timed_out);
                false
            }
            [frames::UNKNOWN] => {
                // The batch came some time after it was decided, and memory goes by whole ticks.
                assert!(timed_out.elapsed() >= REVOLUTION - TICK * 2, "forgotten after {:?}", timed_out.elapsed());
                true
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn adding_again_re_arms_and_brings_one_timeout() {
    let sidecar = Sidecar::start(&["--tick", "200ms"]);
    let watch = Watch::start(&sidecar, &["--group", "default"]);
    assert_eq!(sidecar.run(&["add", "7"]).output(), "7 added, times out in 3s\n");
    sleep_until(Instant::now() + Duration::from_secs(1));
    let again = Instant::now();
    assert_eq!(sidecar.run(&["add", "--attempt", "2", "7"]).output(), "7 rearmed, times out in 3s\n");
    let batch = watch.next();
    assert!(batch.arrived - again >= REVOLUTION, "early: {:?}", batch.arrived - again);
    assert_eq!((batch.plain_ids(), batch.attempts, batch.added, batch.acked), (vec![7], vec![2], 1, 0));

    // The next batch has another message: the first deadline of 7 brought nothing.
    assert_eq!(sidecar.run(&["add", "--ack-timeout-ticks", "1", "8"]).output(), "8 added, times out in 200ms\n");
    assert_eq!(watch.next().plain_ids(), [8]);
    assert_eq!(sidecar.metrics().count("messages_timed_out_total"), 2);
}

#[test]
fn one_id_pushed_to_two_clients_is_two_messages() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "10"]);
    let watch = Watch::start(&sidecar, &["--group", "default"]);
    let greatest = "18446744073709551615:18446744073709551615";
    assert_eq!(
        sidecar.run(&["add", "9:1", "9:2", greatest]).output(),
        format!("9:1 added, times out in 1s\n9:2 added, times out in 1s\n{greatest} added, times out in 1s\n")
    );
    assert_eq!(sidecar.run(&["del", "9:1", "9"]).output(), "9:1 acked\n9 unknown\n");
    let batch = watch.next();
    assert_eq!(batch.messages(), [(9, 2), (u64::MAX, u64::MAX)]);
    assert_eq!((batch.added, batch.acked), (3, 1));
}

#[test]
fn a_withdrawn_message_counts_neither_as_acked_nor_as_timed_out() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "10"]);
    let watch = Watch::start(&sidecar, &["--group", "default"]);
    assert_eq!(sidecar.run(&["add", "5", "6"]).output(), "5 added, times out in 1s\n6 added, times out in 1s\n");
    assert_eq!(sidecar.run(&["del", "--withdraw", "5", "4"]).output(), "5 withdrawn\n4 unknown\n");
    let batch = watch.next();
    assert_eq!((batch.plain_ids(), batch.added, batch.acked), (vec![6], 1, 0));
    let metrics = sidecar.metrics();
    assert_eq!((metrics.acked("withdrawn"), metrics.acked("acked")), (1, 0));
    assert_eq!(metrics.count("ack_latency_seconds_count"), 0);
}

#[test]
fn an_ack_timeout_of_its_own_is_kept_to_the_tick() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "20"]);
    let watch = Watch::start(&sidecar, &["--group", "default"]);
    let mut expected = Vec::new();
    for ticks in [12, 3, 1, 20] {
        let before = Instant::now();
        let flag = format!("{ticks}");
        let run = sidecar.run(&["add", "--ack-timeout-ticks", &flag, &flag]);
        assert_eq!(
            run.output(),
            format!("{ticks} added, times out in {}\n", humantime::format_duration(TICK / 2 * ticks))
        );
        expected.push((u64::from(ticks), before + Duration::from_millis(100) * ticks));
    }
    while !expected.is_empty() {
        let batch = watch.next();
        for id in batch.plain_ids() {
            let position = expected.iter().position(|(expected, _)| *expected == id);
            let (_, earliest) = expected.remove(position.expect("it times out once"));
            assert!(batch.arrived >= earliest, "{id} came {:?} early", earliest - batch.arrived);
            let late = batch.arrived - earliest;
            assert!(late <= Duration::from_millis(400) + SLACK * 2, "{id} came {late:?} late");
        }
    }
    let error = sidecar.run(&["add", "--ack-timeout-ticks", "21", "1"]);
    assert_names(error.error(1), &["21 ticks", "1 to 20", "bad_ack_timeout"]);
}

#[test]
fn a_consumer_ends_after_as_many_batches_as_asked_and_has_acknowledged_them() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "10"]);
    for (ticks, id) in [("1", "1"), ("4", "2"), ("8", "3")] {
        sidecar.run(&["add", "--ack-timeout-ticks", ticks, id]).output();
    }
    let run = sidecar.run(&["consume", "--group", "default", "--count", "2"]);
    let lines: Vec<&str> = run.printed().lines().collect();
    assert_eq!(lines.len(), 2, "{run:?}");
    for (line, id) in lines.iter().zip(["1", "2"]) {
        let words: Vec<&str> = line.split(' ').collect();
        assert!(words[1].trim_end_matches(':').parse::<u64>().is_ok(), "{line}");
        assert_eq!((words[0], &words[2..]), ("tick", &["1", "of", "1", "timeouts:", id][..]), "{line}");
    }
    wait_until("the third batch is alone", || {
        sidecar.group("default").is_some_and(|group| (group.outbox_batches, group.unacked_batches) == (1, 0))
    });

    let run = sidecar.run(&["consume", "--group", "default", "--count", "1", "--no-ack", "--json"]);
    let line: Value = serde_json::from_str(run.printed()).expect("a line of JSON");
    assert_eq!((&line["ids"], &line["delivery"]), (&serde_json::json!(["3"]), &Value::from(1)));
    let run = sidecar.run(&["consume", "--group", "default", "--count", "1"]);
    assert_names(run.printed(), &[": 1 of 1 timeouts, delivery 2: 3\n"]);
    sidecar.wait_for_settled("default");
}

#[test]
fn watch_takes_no_batch_and_consume_says_that_it_takes_them() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "5"]);
    let address = sidecar.listen.to_string();
    let mut watch = Process::spawn(&mut sidecar.command(&["watch", "--count", "1"]));
    let said = lines(watch.stderr());
    let waiting =
        format!("ackwheel: connected to {address}, waiting for timeout batches; none is taken from a consumer");
    assert_eq!(said.recv_timeout(PATIENCE).expect("it says that it waits").1, waiting);
    sidecar.run(&["add", "--ack-timeout-ticks", "1", "1"]).output();
    let printed = lines(watch.stdout());
    assert_names(&printed.recv_timeout(PATIENCE).expect("the watch prints it").1, &[": 1 of 1 timeouts: 1"]);
    assert_eq!(sidecar.group("default").map(|group| group.outbox_batches), Some(1), "the consumers still get it");

    let kept = sidecar.run(&["consume", "--group", "default", "--count", "1", "--no-ack"]);
    assert_names(kept.printed(), &[": 1 of 1 timeouts: 1\n"]);
    let waiting = format!("ackwheel: connected to {address}, waiting for timeout batches of the group default\n");
    let takes = "ackwheel: this command takes batches from the group default and ";
    assert_eq!(kept.stderr, format!("{takes}does not acknowledge them: they are delivered again\n{waiting}"));
    let taken = sidecar.run(&["consume", "--group", "default", "--count", "1"]);
    assert_names(taken.printed(), &[": 1 of 1 timeouts, delivery 2: 1\n"]);
    assert_eq!(taken.stderr, format!("{takes}acknowledges each one after printing it\n{waiting}"));
    sidecar.wait_for_settled("default");
}

#[test]
fn consume_says_that_it_made_a_group() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "5"]);
    sidecar.run(&["add", "--ack-timeout-ticks", "1", "1"]).output();
    let taken = sidecar.run(&["consume", "--group", "defualt", "--count", "1"]);
    assert_names(
        &taken.stderr,
        &["the group defualt is new, and begins with the oldest batch", "ackwheel group delete defualt"],
    );
    let again = sidecar.run(&["add", "--ack-timeout-ticks", "1", "2"]);
    assert_eq!(again.code, 0);
    let taken = sidecar.run(&["consume", "--group", "defualt", "--count", "1"]);
    assert!(!taken.stderr.contains("is new"), "{}", taken.stderr);
}

#[test]
fn a_watch_whose_reader_is_slow_stays_connected_and_prints_everything() {
    const COUNT: u64 = 12_000;
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "5"]);
    let mut watch = Process::spawn(&mut sidecar.command(&["watch", "--json"]));
    sidecar.wait_for_subscribers(1);
    // A line is longer than what a pipe holds.
    let ids: Vec<String> = (1..=COUNT).map(|nth| (u64::MAX - nth).to_string()).collect();
    let words: Vec<&str> = ["add"].into_iter().chain(ids.iter().map(String::as_str)).collect();
    sidecar.run(&words).output();
    // A peer that answers no Ping for two seconds is silent.
    let begun = sidecar.pointer();
    wait_until("four seconds have passed", || sidecar.pointer() >= begun + 40);
    assert_eq!(sidecar.metrics().refusals("silent"), 0);
    let printed = lines(watch.stdout());
    let mut left = COUNT;
    while left > 0 {
        let (_, line) = printed.recv_timeout(PATIENCE).expect("what timed out is printed");
        let line: Value = serde_json::from_str(&line).expect("a line of JSON");
        assert_eq!(line["delivery"], 1);
        left -= line["ids"].as_array().expect("a list").len() as u64;
    }
}

#[test]
fn the_status_adds_up_and_has_the_promised_shape() {
    let sidecar = Sidecar::start(&["--slots", "30"]);
    let _watch = Watch::start(&sidecar, &["--group", "audit"]);
    for ticks in ["5", "9", "30"] {
        sidecar.run(&["add", "--ack-timeout-ticks", ticks, ticks, &format!("{ticks}:1")]).output();
    }
    sidecar.run(&["del", "9:1"]).output();
    let text = sidecar.run(&["status", "--json"]).output().to_owned();
    let status: Value = serde_json::from_str(&text).expect("the status is JSON");
    let promised = [
        "access",
        "certificate_expiry",
        "groups",
        "journal",
        "last_minutes",
        "limits",
        "listeners",
        "rates",
        "resp_commands",
        "rings",
        "shared_store",
        "sidecar",
        "slots",
        "store",
        "tick_ms",
        "uptime_seconds",
        "version",
    ];
    assert_eq!(keys(&status), promised);
    assert_eq!(
        (&status["store"], &status["slots"], &status["tick_ms"]),
        (&"memory".into(), &30.into(), &1_000.into())
    );
    let ring = &status["rings"][0];
    let promised =
        ["closing", "epoch", "in_flight", "leader", "leads", "pointer", "pointer_lag_seconds", "recent", "ring"];
    assert_eq!(keys(ring), [&promised[..], &["slots"]].concat());
    let slots: Vec<u64> = ring["slots"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).collect();
    assert_eq!((slots.len(), status["rings"].as_array().unwrap().len()), (30, 1));
    let sum = slots.iter().sum::<u64>() + ring["closing"].as_u64().unwrap();
    assert_eq!((sum, &ring["in_flight"]), (5, &5.into()), "{text}");
    let groups = status["groups"].as_array().unwrap();
    let mut names: Vec<&str> = groups.iter().map(|group| group["group"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["audit", "default"]);
    for group in groups {
        assert_eq!(keys(group), ["group", "oldest_seconds", "outbox_batches", "subscribers", "unacked_batches"]);
        assert_eq!(group["subscribers"], u64::from(group["group"] == "audit"));
    }
    let (code, page) = sidecar.get("/status");
    assert_eq!((code, keys(&serde_json::from_str(&page).unwrap())), (200, keys(&status)));

    let drawn = sidecar.run(&["status"]);
    assert_names(drawn.output(), &["store memory, 30 slots of 1s", "5 in flight", "> slot", "audit", "default"]);
    assert_eq!(drawn.stdout.lines().filter(|line| line.contains(" slot ")).count(), 30, "{}", drawn.stdout);
}

fn keys(object: &Value) -> Vec<String> {
    let mut keys: Vec<String> = object.as_object().expect("an object").keys().cloned().collect();
    keys.sort_unstable();
    keys
}

#[test]
fn a_watch_comes_back_when_the_sidecar_does() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, journal) = (folder.path().join("socket"), folder.path().join("journal"));
    let flags = ["--tick", "100ms", "--socket", socket.to_str().unwrap(), "--journal", journal.to_str().unwrap()];
    let address = format!("unix:{}", socket.display());
    let add = |id| Run::of(&mut program(&["add", "--ack-timeout-ticks", "1", id, "--addr", &address]));

    let mut sidecar = Sidecar::start(&flags);
    let watch = Watch::spawn(&address, &["--group", "default"]);
    assert_eq!(add("1").output(), "1 added, times out in 100ms\n");
    assert_eq!(watch.next().plain_ids(), [1]);
    sidecar.wait_for_settled("default");
    sidecar.terminate();
    assert_names(&watch.remark(), &["no connection, and trying again"]);
    let restarted = Sidecar::start(&flags);
    assert_eq!(add("2").output(), "2 added, times out in 100ms\n");
    let batch = watch.next();
    assert_eq!((batch.plain_ids(), batch.delivery), (vec![2], 1));
    assert_names(&watch.remark(), &["the connection was lost and made again"]);
    restarted.wait_for_settled("default");
}
