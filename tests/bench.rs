//! `ackwheel bench` against real sidecars: it finishes without errors where all is right, and says so where not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use ackwheel::bench::{self, BenchError, BenchOptions, Op};
use ackwheel::client::Address;
use serde_json::Value;

use crate::support::process::{Run, assert_names, program};
use crate::support::sidecar::Sidecar;

/// Runs a load against a sidecar.
fn bench(sidecar: &Sidecar, flags: &[&str]) -> Run {
    let mut command = sidecar.command(&["bench", "--admin", &sidecar.admin.to_string(), "--json"]);
    Run::of(command.args(flags))
}

/// The report of a load without errors.
#[track_caller]
fn report(sidecar: &Sidecar, flags: &[&str]) -> Value {
    let report: Value = serde_json::from_str(bench(sidecar, flags).output()).expect("JSON");
    assert_eq!((&report["errors"], &report["error_texts"]), (&Value::from(0), &Value::from(Vec::<Value>::new())));
    report
}

#[track_caller]
fn number(report: &Value, path: &str) -> f64 {
    report.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("no number {path} in {report}"))
}

#[track_caller]
fn assert_latency(report: &Value, of: &str) {
    let [p50, p99, p999, max] =
        ["p50", "p99", "p999", "max"].map(|name| number(report, &format!("/latency_us/{of}/{name}")));
    assert!(0.0 < p50 && p50 <= p99 && p99 <= p999 && p999 <= max, "{report}");
}

#[test]
fn a_wheel_is_measured_and_left_empty() {
    let sidecar = Sidecar::start(&[]);
    let report = report(&sidecar, &["--seconds", "1", "--in-flight", "10000", "--connections", "3"]);
    let pairs = number(&report, "/pairs_per_second");
    assert!(pairs > 0.0 && number(&report, "/frames_per_second") >= 2.0 * pairs, "{report}");
    assert_latency(&report, "add");
    assert_latency(&report, "del");
    let asked = ["op", "connections", "pipeline", "ids_per_frame", "in_flight", "seconds"].map(|key| &report[key]);
    let expected: [Value; 6] =
        ["\"wheel\"", "3", "256", "1", "10000", "1.0"].map(|text| serde_json::from_str(text).unwrap());
    assert_eq!(asked, expected.each_ref(), "{report}");
    assert!(report["timeout_lateness_ms"].is_null() && report["timed_out"] == 0, "{report}");
    assert!(number(&report, "/server/cpu_seconds") > 0.0, "{report}");
    assert!(number(&report, "/server/rss_bytes") > 1e6, "{report}");

    let metrics = sidecar.metrics();
    assert_eq!(metrics.count("messages_in_flight"), 0);
    assert_eq!(metrics.count("messages_rearmed_total"), 0);
    // The sidecar counted all that the load reports for its second, and the filling too.
    let (added, acked) = (metrics.count("messages_added_total"), metrics.acked("acked"));
    assert_eq!(added, acked);
    assert!(as_float(added) >= pairs + 10_000.0, "{added} were added, but {report}");
}

#[expect(clippy::cast_precision_loss, reason = "a test adds less than 2^53 messages")]
fn as_float(count: u64) -> f64 {
    count as f64
}

#[test]
fn frames_of_512_ids_and_clients_count_as_messages() {
    let sidecar = Sidecar::start(&[]);
    for clients in [&[][..], &["--clients"]] {
        let flags = ["--seconds", "0.5", "--ids-per-frame", "512", "--pipeline", "4", "--in-flight", "50000"];
        let report = report(&sidecar, &[&flags, clients].concat());
        let ratio = number(&report, "/pairs_per_second") / number(&report, "/frames_per_second");
        assert!((250.0..=256.0).contains(&ratio), "{report}");
        assert_eq!(sidecar.metrics().count("messages_in_flight"), 0);
    }
}

#[test]
fn unacknowledged_messages_time_out_once_and_late_by_little() {
    // Two ticks of 100 ms, so that many revolutions pass.
    let sidecar = Sidecar::start(&["--slots", "2", "--tick", "100ms"]);
    let flags = ["--acked", "0.9", "--seconds", "1", "--in-flight", "1000", "--rate", "20000"];
    let report = report(&sidecar, &[&flags[..], &["--ids-per-frame", "10"]].concat());
    let timed_out = number(&report, "/timed_out");
    // 20,000 pairs, a tenth of which was left.
    assert!((1_000.0..4_000.0).contains(&timed_out), "{report}");
    let [p50, p99, max] =
        ["p50", "p99", "max"].map(|name| number(&report, &format!("/timeout_lateness_ms/{name}")));
    assert!((0.0..=p99).contains(&p50) && p99 <= max, "{report}");
    let metrics = sidecar.metrics();
    assert_eq!(report["timed_out"], metrics.count("messages_timed_out_total"), "{report}");
    assert_eq!(metrics.acked("late") + metrics.acked("unknown"), 0);
}

#[test]
fn the_load_is_what_was_asked_for_and_what_is_reported() {
    for (flags, due) in [
        (&["--rate", "300", "--acked", "0.99"][..], Some(400)),
        (&["--rate", "300", "--acked", "0.5", "--threads", "3", "--clients"], Some(400)),
        (&["--rate", "700", "--acked", "0", "--ids-per-frame", "7"], Some(800)),
        (&["--rate", "300"], Some(400)),
        (&["--order", "mixed", "--acked", "0.9"], None),
        (&["--op", "ping"], Some(0)),
    ] {
        let sidecar = Sidecar::start(&["--slots", "15", "--tick", "100ms"]);
        let started = sidecar.pointer();
        let report = report(&sidecar, &[&["--seconds", "1", "--in-flight", "100"], flags].concat());
        let metrics = sidecar.metrics();
        let [added, acked] = [metrics.count("messages_added_total"), metrics.acked("acked")];
        assert_eq!((&report["adds"], &report["dels"]), (&added.into(), &acked.into()), "{report}");
        assert_eq!(report["timed_out"], added - acked, "{report}");
        // Each connection adds a frame more or less, according to the phase of its bursts.
        assert!(due.is_none_or(|due: u64| added.abs_diff(due) <= 8 * 7), "{added} were added: {report}");
        // The end of a tick is asked for at most ten times.
        let ticks = sidecar.pointer() - started + metrics.count("shifted_ticks_total") + 1;
        let asked = metrics.count("frames_total{type=\"get_msg\"}");
        assert_eq!(asked > 0, report["timeout_lateness_ms"].is_object(), "{report}");
        assert!(asked <= 10 * ticks, "{asked} times in {ticks} ticks: {report}");
    }
}

#[test]
fn nothing_acknowledged_at_all_is_a_load_too() {
    let sidecar = Sidecar::start(&["--slots", "2", "--tick", "100ms"]);
    let report = report(&sidecar, &["--acked", "0", "--seconds", "0.5", "--in-flight", "1000", "--rate", "5000"]);
    assert!(number(&report, "/timed_out") >= 1_000.0, "{report}");
    assert!(report["latency_us"].get("del").is_none(), "{report}");
    assert_latency(&report, "add");
}

#[test]
fn pings_touch_no_wheel_and_idle_connections_live_on() {
    let sidecar = Sidecar::start(&[]);
    let report =
        report(&sidecar, &["--op", "ping", "--seconds", "0.5", "--idle-connections", "21", "--threads", "2"]);
    assert!(report["pairs_per_second"].is_null() && number(&report, "/frames_per_second") > 0.0, "{report}");
    assert_latency(&report, "ping");
    assert!(report["latency_us"].get("add").is_none(), "{report}");
    let metrics = sidecar.metrics();
    assert_eq!(metrics.count("messages_added_total"), 0);
    assert_eq!(metrics.count("connections_opened_total"), 8 + 21);
}

#[test]
fn a_load_that_polls_takes_a_processor_and_one_that_sleeps_does_not() {
    let sidecar = Sidecar::start(&[]);
    let flags = ["--rate", "100", "--connections", "1", "--seconds", "1", "--in-flight", "100"];
    let [sleeps, polls] = [&[][..], &["--busy-poll"]].map(|more| report(&sidecar, &[&flags, more].concat()));
    assert_eq!((&sleeps["busy_poll"], &polls["busy_poll"]), (&false.into(), &true.into()));
    let cpu = |report: &Value| number(report, "/client_cpu_seconds");
    assert!(cpu(&polls) > 3.0 * cpu(&sleeps), "{polls} and {sleeps}");
}

#[test]
fn adds_and_dels_are_mixed_if_that_is_asked_for() {
    let sidecar = Sidecar::start(&[]);
    for rate in [&[][..], &["--rate", "5000"]] {
        let flags = [&["--order", "mixed", "--clients", "--in-flight", "1000", "--seconds", "0.5"], rate].concat();
        let report = report(&sidecar, &flags);
        assert_eq!((&report["order"], &report["errors"]), (&"mixed".into(), &0.into()), "{report}");
        assert!(number(&report, "/pairs_per_second") > 0.0, "{report}");
    }
    assert_eq!(sidecar.metrics().count("messages_in_flight"), 0, "all were acknowledged");
}

#[test]
fn a_fixed_rate_is_not_exceeded() {
    let sidecar = Sidecar::start(&[]);
    for flags in
        [&["--in-flight", "1000"][..], &["--op", "ping"], &["--in-flight", "1000", "--ids-per-frame", "7"]]
    {
        let report = report(&sidecar, &[&["--rate", "3000", "--seconds", "1"], flags].concat());
        let per_second = if report["op"] == "ping" { "/frames_per_second" } else { "/pairs_per_second" };
        let per_second = number(&report, per_second);
        assert!(per_second > 0.0 && per_second <= 3_000.0 * 1.05, "{report}");
    }
}

#[test]
fn bursts_are_as_far_apart_as_was_asked_and_two_of_them_may_be_unanswered() {
    let sidecar = Sidecar::start(&[]);
    let flags = ["--rate", "50000", "--connections", "1", "--seconds", "0.5", "--in-flight", "10000"];
    let asked = |more: &[&str]| {
        let report = report(&sidecar, &[&flags[..], more].concat());
        (number(&report, "/burst_every_ms"), number(&report, "/pipeline"))
    };
    // A pair is two requests, and two bursts may be unanswered: 50 pairs fall into a millisecond.
    assert_eq!(asked(&[]), (4.0, 800.0));
    assert_eq!(asked(&["--burst-every", "20ms"]), (20.0, 4_000.0));
    assert_eq!(asked(&["--burst-every", "100us"]), (0.1, 256.0));
    assert_eq!(asked(&["--pipeline", "7"]), (4.0, 7.0));
    let unhurried = report(&sidecar, &["--seconds", "0.1", "--in-flight", "100"]);
    assert_eq!((&unhurried["burst_every_ms"], &unhurried["pipeline"]), (&Value::Null, &256.into()));
}

#[test]
fn a_table_says_the_same_to_a_person() {
    let sidecar = Sidecar::start(&[]);
    let admin = sidecar.admin.to_string();
    let run = sidecar.run(&["bench", "--seconds", "0.2", "--in-flight", "1000", "--admin", &admin]);
    let words = [
        "8 connections of 256",
        "pairs per second",
        "p99.9",
        "add ",
        "del ",
        "adds in all",
        "dels in all",
        "s of CPU",
        "errors",
    ];
    assert_names(run.output(), &words);
    assert!(run.stdout.lines().all(|line| line.chars().count() <= 80), "{run:?}");
}

#[test]
fn without_the_admin_endpoint_only_the_figures_of_the_server_are_missing() {
    let sidecar = Sidecar::start(&[]);
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let admin = free.local_addr().unwrap().to_string();
    drop(free);
    let run = sidecar.run(&["bench", "--json", "--op", "ping", "--seconds", "0.1", "--admin", &admin]);
    assert_names(&run.stderr, &["no figures of the server", &admin, "--admin"]);
    let report: Value = serde_json::from_str(&run.stdout).expect("JSON");
    assert_eq!((run.code, &report["server"]), (0, &Value::Null), "{run:?}");
    // Nor is another sidecar asked, whose address is the default.
    let run = sidecar.run(&["bench", "--json", "--op", "ping", "--seconds", "0.1"]);
    let report: Value = serde_json::from_str(run.output()).unwrap();
    assert_eq!(report["server"], Value::Null, "{run:?}");
}

#[test]
fn a_unix_socket_is_as_good_and_several_threads_share_the_connections() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let sidecar = Sidecar::start(&["--socket", socket.to_str().unwrap()]);
    let address = format!("unix:{}", socket.display());
    let mut command = program(&["bench", "--addr", &address, "--admin", &sidecar.admin.to_string(), "--json"]);
    let run =
        Run::of(command.args(["--threads", "2", "--connections", "3", "--seconds", "0.2", "--in-flight", "500"]));
    let report: Value = serde_json::from_str(run.output()).expect("JSON");
    assert_eq!((&report["threads"], &report["errors"]), (&2.into(), &0.into()), "{report}");
    assert!(number(&report, "/pairs_per_second") > 0.0, "{report}");
    assert_eq!(sidecar.metrics().count("messages_in_flight"), 0);
}

#[test]
fn a_token_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let token = token.to_str().unwrap();
    let sidecar = Sidecar::start(&["--token-file", token]);
    let flags = ["--seconds", "0.1", "--in-flight", "100"];
    report(&sidecar, &[&flags[..], &["--token-file", token]].concat());
    assert_names(bench(&sidecar, &flags).error(1), &["token"]);
}

#[test]
fn impossible_options_end_with_64_and_what_to_write_instead() {
    for (flags, words) in [
        (&["--connections", "0"][..], &["--connections 0", "write 1 to"][..]),
        (&["--pipeline", "0"], &["--pipeline 0", "write 1 to"]),
        (&["--ids-per-frame", "0"], &["--ids-per-frame 0", "write 1 to 32768"]),
        (&["--ids-per-frame", "32769", "--in-flight", "1000000"], &["--ids-per-frame 32769", "write 1 to 32768"]),
        (&["--threads", "9"], &["--threads 9", "write 1 to 8"]),
        (&["--seconds", "0"], &["--seconds 0", "write 0.01 to"]),
        (&["--seconds", "nan"], &["--seconds NaN", "write 0.01 to"]),
        (&["--rate", "0"], &["--rate 0", "leave it out"]),
        (&["--rate", "9", "--burst-every", "99us"], &["--burst-every 99µs", "write 100us to 1s"]),
        (&["--rate", "9", "--burst-every", "1001ms"], &["--burst-every 1.001s", "write 100us to 1s"]),
        (&["--burst-every", "4ms"], &["--rate"]),
        (&["--acked", "1.5"], &["--acked 1.5", "write 0 to 1"]),
        (&["--in-flight", "7"], &["--in-flight 7", "write at least 8"]),
        (&["--in-flight", "4095", "--ids-per-frame", "512"], &["--in-flight 4095", "write at least 4096"]),
        (&["--ack-timeout-ticks", "0"], &["--ack-timeout-ticks", "'0'"]),
        (&["--op", "pong"], &["pong", "wheel, ping"]),
    ] {
        let run = Run::of(&mut program(&[&["bench"], flags].concat()));
        assert_names(run.error(64), words);
    }
    let sidecar = Sidecar::start(&["--slots", "2", "--tick", "100ms"]);
    for (flags, words) in [
        (&["--ack-timeout-ticks", "3"][..], &["--ack-timeout-ticks 3", "write 1 to 2"][..]),
        (&["--in-flight", "201", "--rate", "1000"], &["--in-flight 201", "200ms", "write --in-flight 200"]),
    ] {
        assert_names(bench(&sidecar, flags).error(64), words);
    }
}

#[test]
fn without_a_sidecar_it_fails_with_1_and_names_the_address() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let run = Run::of(program(&["bench"]).args(["--addr", &address]));
    assert_names(run.error(1), &[&address, "is ackwheel serving there?"]);
}

#[test]
fn a_refused_frame_is_an_error_with_the_servers_words() {
    let sidecar = Sidecar::start(&["--max-in-flight", "500"]);
    let run = bench(&sidecar, &["--in-flight", "1000", "--seconds", "0.2"]);
    assert_eq!(run.code, 1, "{run:?}");
    let report: Value = serde_json::from_str(&run.stdout).expect("JSON all the same");
    assert!(number(&report, "/errors") >= 500.0, "{report}");
    assert_names(&report["error_texts"].to_string(), &["an AddNewMsg was refused", "--max-in-flight"]);
    assert_names(&run.stderr, &["errors, as: an AddNewMsg was refused"]);
}

/// Carries bytes between clients and a server, and changes what the server says: `change` gets whole frames.
fn changing_proxy(to: SocketAddr, change: fn(&mut [u8])) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(to) else { break };
            let (mut requests_in, mut requests_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            thread::spawn(move || {
                let _ = std::io::copy(&mut requests_in, &mut requests_out);
                let _ = requests_out.shutdown(std::net::Shutdown::Both);
            });
            thread::spawn(move || carry_frames(far, near, change));
        }
    });
    address
}

fn carry_frames(mut from: TcpStream, mut to: TcpStream, change: fn(&mut [u8])) {
    let mut length = [0; 4];
    while from.read_exact(&mut length).is_ok() {
        let mut frame = length.to_vec();
        frame.resize(4 + u32::from_be_bytes(length) as usize, 0);
        if from.read_exact(&mut frame[4..]).is_err() {
            break;
        }
        change(&mut frame);
        if to.write_all(&frame).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// A small load over a proxy.
fn changed(sidecar: &Sidecar, change: fn(&mut [u8])) -> BenchOptions {
    BenchOptions {
        address: Address::from(changing_proxy(sidecar.listen, change)),
        admin: None,
        connections: 2,
        pipeline: Some(8),
        in_flight: 100,
        seconds: 0.2,
        ..BenchOptions::default()
    }
}

const OF_TYPE: usize = 4;
const BODY: usize = 12;

#[test]
fn every_wrong_answer_is_noticed() {
    let sidecar = Sidecar::start(&["--slots", "2", "--tick", "200ms"]);
    let wheel = [
        (
            (|frame| {
                if frame[OF_TYPE] == 0x90 {
                    (frame[BODY + 15], frame[BODY + 16]) = (1, 1);
                }
            }) as fn(&mut [u8]),
            "re-armed for 1 of 1",
        ),
        (
            |frame| {
                if frame[OF_TYPE] == 0x91 {
                    frame[BODY + 4] = 0;
                }
            },
            "answered with unknown, not with acked",
        ),
        (
            |frame| {
                if frame[OF_TYPE] == 0x91 {
                    frame[BODY + 4] = 2;
                }
            },
            "answered with late, not with acked: the message timed out before its turn",
        ),
    ];
    for (change, words) in wheel {
        let report = bench::run(&changed(&sidecar, change), &|_| {}).expect("a report");
        assert!(report.errors > 0, "{report:?}");
        assert_names(&report.error_texts.join("\n"), &[words]);
    }
    let pong: fn(&mut [u8]) = |frame| {
        if frame[OF_TYPE] == 0x82 {
            *frame.last_mut().unwrap() ^= 1;
        }
    };
    let options = BenchOptions { op: Op::Ping, ..changed(&sidecar, pong) };
    let report = bench::run(&options, &|_| {}).expect("a report");
    assert!(report.errors > 0, "{report:?}");
    assert_names(&report.error_texts.join("\n"), &["a Ping was answered with an unexpected pong"]);
}

/// Where the messages of a timeout batch begin.
const BATCH_MESSAGES: usize = BODY + 56;

#[test]
fn a_timeout_that_is_lost_or_comes_twice_is_noticed() {
    let sidecar = Sidecar::start(&["--slots", "2", "--tick", "100ms"]);
    let run = |change| {
        let options = BenchOptions { acked: 0.5, rate: Some(2_000), ..changed(&sidecar, change) };
        bench::run(&options, &|_| {}).expect("a report")
    };
    let report = run(|frame| {
        if frame[OF_TYPE] == 0x21 {
            // Another id than the one that timed out.
            frame[BATCH_MESSAGES] ^= 1;
        }
    });
    assert_names(&report.error_texts.join("\n"), &["were neither acknowledged nor did they time out"]);
    assert!(report.timed_out_of_others > 0 && report.errors == 1, "{report:?}");
    let report = run(|frame| {
        if frame[OF_TYPE] == 0x21 && frame.len() >= BATCH_MESSAGES + 2 * 17 {
            // The first id again in the place of the second.
            frame.copy_within(BATCH_MESSAGES..BATCH_MESSAGES + 8, BATCH_MESSAGES + 8);
        }
    });
    assert_names(&report.error_texts.join("\n"), &["timed out in two batches", "neither acknowledged nor"]);
}

#[test]
fn a_lost_connection_ends_the_load() {
    let sidecar = Sidecar::start(&[]);
    let change: fn(&mut [u8]) = |frame| {
        if frame[OF_TYPE] == 0x91 {
            frame[..4].copy_from_slice(&3_u32.to_be_bytes());
        }
    };
    let error = bench::run(&changed(&sidecar, change), &|_| {}).expect_err("no frame has this length");
    assert!(matches!(error, BenchError::Connection(_)), "{error:?}");
    assert_names(&error.to_string(), &["length is 3"]);
}
