//! The RESP protocol, as its clients see it.

mod admission;
mod deliveries;
mod document;
mod handshakes;
mod hostile;
mod loading;
mod memory;
mod pools;
mod redis_replies;
mod shared_store;

use std::io::Write;
use std::time::{Duration, Instant};

use crate::support::process::{Run, assert_names, program};
use crate::support::resp::{Reply, Resp, command, line, start};
use crate::support::wait_until;

#[test]
fn messages_are_added_rearmed_acknowledged_and_withdrawn() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    let added = client.ask("AW.ADD 101:7 102 000000000103:008");
    let [new, rearmed, deadline] = added.array() else { panic!("{added:?}") };
    assert_eq!((new.integer(), rearmed.integer()), (3, 0));
    let pointer = i64::try_from(sidecar.pointer()).unwrap();
    assert!((pointer + 14..=pointer + 15).contains(&deadline.integer()), "{deadline:?} at {pointer}");
    let again = client.ask("aw.add TIMEOUT 5 ATTEMPT 2 101:7 104");
    assert_eq!((again.array()[0].integer(), again.array()[1].integer()), (1, 1));
    assert_eq!(client.ask("AW.DEL 101:7 102 101:7 101").texts(), ["acked", "acked", "unknown", "unknown"]);
    assert_eq!(client.ask("AW.DEL WITHDRAW 103:8").texts(), ["withdrawn"]);
    assert_eq!(client.ask("AW.DEL 104").texts(), ["acked"]);
    let metrics = sidecar.metrics();
    assert_eq!(metrics.find("ackwheel_resp_commands_total{command=\"AW.ADD\"}"), Some(2.0));
    assert_eq!(metrics.find("ackwheel_resp_commands_total{command=\"AW.DEL\"}"), Some(3.0));
    assert_eq!(metrics.find("ackwheel_messages_acked_total{outcome=\"acked\"}"), Some(3.0));
}

#[test]
fn options_of_zero_are_refused_and_nothing_is_added() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client
        .ask("AW.ADD TIMEOUT 0 1")
        .assert_error("BAD_ACK_TIMEOUT not applied: an ack timeout of 0 ticks is not possible");
    client.ask("AW.ADD TIMEOUT 00 1").assert_error("BAD_ACK_TIMEOUT not applied: ");
    client.ask("AW.ADD TIMEOUT 16 1").assert_error("BAD_ACK_TIMEOUT not applied: ");
    client
        .ask("AW.ADD ATTEMPT 0 1")
        .assert_error("MALFORMED_REQUEST not applied: ATTEMPT is a number from 1 to 255");
    client
        .ask("AW.TAKE default COUNT 0")
        .assert_error("MALFORMED_REQUEST not applied: COUNT is a number from 1 to 16");
    assert_eq!(client.ask("AW.DEL 1").texts(), ["unknown"]);
    assert_eq!(client.ask("AW.ADD TIMEOUT 15 ATTEMPT 255 0").array()[0], Reply::Integer(1), "an id of 0 is legal");
}

#[test]
fn the_state_of_messages_is_read_between_the_commands_of_a_pipeline() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.send(&[line("AW.ADD ATTEMPT 4 1"), line("AW.GET 1 2"), line("AW.DEL 1"), line("AW.GET 1")].concat());
    client.receive();
    let states = client.receive();
    let [first, second] = states.array() else { panic!("{states:?}") };
    let [state, deadline, remaining_ms, attempt] = first.array() else { panic!("{first:?}") };
    assert_eq!((state.text(), attempt.integer()), ("in_flight", 4));
    assert!((14_000..=16_000).contains(&remaining_ms.integer()) && deadline.integer() > 0, "{first:?}");
    assert_eq!(second.array()[0].text(), "unknown");
    assert_eq!(client.receive().texts(), ["acked"]);
    assert_eq!(client.receive().array()[0].array()[0].text(), "unknown");
    client.ask("AW.ADD 3:9");
    let run = sidecar.run(&["get", "3:9", "4"]);
    let lines: Vec<&str> = run.output().lines().collect();
    assert!(lines[0].starts_with("3:9 in_flight, attempt 1, times out in 15s "), "{lines:?}");
    assert_eq!(lines[1], "4 unknown");
}

#[test]
fn thousands_of_gets_behind_a_command_that_waits_are_answered_in_order() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.ask("AW.ADD 5");
    let gets = b"AW.GET 5\r\n".repeat(3_000);
    client.send(&[&b"AW.STATUS\r\nAW.TAKE default BLOCK 300\r\n"[..], &gets, b"AW.DEL 5\r\n"].concat());
    client.receive().text();
    assert_eq!(client.receive(), Reply::Array(Vec::new()));
    for _ in 0..3_000 {
        assert_eq!(client.receive().array()[0].array()[0].text(), "in_flight");
    }
    assert_eq!(client.receive().texts(), ["acked"]);
}

#[test]
fn the_native_protocol_and_resp_share_the_ring() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.ask("AW.ADD 9:9");
    assert_names(sidecar.run(&["del", "9:9"]).output(), &["acked"]);
}

#[test]
fn replies_come_in_order_whatever_stands_between_adds_and_acks() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    let mut pipeline = Vec::new();
    for id in 0..500 {
        for text in [
            format!("AW.ADD {id}"),
            format!("ECHO {id}"),
            format!("AW.DEL {id} {id}"),
            String::from("AW.DEL x"),
            String::from("AW.TAKE default BLOCK 60000"),
            String::from("AW.ACK default 0-1-2-3"),
        ] {
            pipeline.extend(line(&text));
        }
    }
    client.send(&pipeline);
    for id in 0..500 {
        assert_eq!(client.receive().array()[0], Reply::Integer(1));
        assert_eq!(client.receive().text(), id.to_string());
        assert_eq!(client.receive().texts(), ["acked", "unknown"]);
        client.receive().assert_error("MALFORMED_REQUEST not applied: 'x' is no message");
        assert_eq!(client.receive(), Reply::Array(Vec::new()));
        assert_eq!(client.receive(), Reply::Integer(0));
    }
}

#[test]
fn a_waiting_take_delays_no_ack_behind_it() {
    let round_trips = round_trips_of_acks_behind_a_take(100);
    let median = round_trips[round_trips.len() / 2];
    assert!(median < Duration::from_millis(20), "{median:?}");
}

#[test]
#[ignore = "measures milliseconds, which takes a machine that does nothing else"]
fn the_p99_of_acks_behind_a_waiting_take_is_below_5_ms() {
    let round_trips = round_trips_of_acks_behind_a_take(1_000);
    let p99 = round_trips[round_trips.len() * 99 / 100];
    println!("p50 {:?}, p99 {p99:?}", round_trips[round_trips.len() / 2]);
    assert!(p99 < Duration::from_millis(5), "{p99:?}");
}

/// Sends Acks over a connection with a waiting AW.TAKE. Returns the time to the outcome of each, in ascending order.
fn round_trips_of_acks_behind_a_take(count: usize) -> Vec<Duration> {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    let mut round_trips = Vec::new();
    for id in 0..count {
        client.ask(&format!("AW.ADD {id}"));
        client.send(&line("AW.TAKE default BLOCK 0"));
        // The command is read, and waits, before the Ack is sent.
        wait_until("the connection takes", || sidecar.subscribers() == 1);
        let sent = Instant::now();
        client.send(&line(&format!("AW.DEL {id}")));
        assert_eq!(client.receive(), Reply::Array(Vec::new()));
        assert_eq!(client.receive().texts(), ["acked"]);
        round_trips.push(sent.elapsed());
    }
    round_trips.sort_unstable();
    round_trips
}

#[test]
fn a_transaction_is_refused_with_everything_in_it() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    // Each transaction comes at once, so that it does not end because nothing arrives for a second.
    let [multi, _, exec, del] = client.ask_all(["MULTI", "AW.ADD 1", "EXEC", "AW.DEL 1"]);
    multi.assert_error("NO_TRANSACTIONS not applied: ");
    exec.assert_error("EXECABORT not applied: ");
    assert_eq!(del.texts(), ["unknown"]);
    let [_, add, discard, after] = client.ask_all(["MULTI", "AW.ADD 1", "DISCARD", "AW.ADD 2"]);
    add.assert_error("NO_TRANSACTIONS not applied: MULTI was refused");
    assert_eq!((discard.text(), &after.array()[0]), ("OK", &Reply::Integer(1)));
    let [_, _, reset, del] = client.ask_all(["MULTI", "AW.ADD 1", "RESET", "AW.DEL 1 2"]);
    assert_eq!((reset.text(), del.texts()), ("RESET", vec!["unknown", "acked"]));
    client.ask("EXEC").assert_error("ERR EXEC without MULTI");
    client.ask("WATCH key").assert_error("NO_TRANSACTIONS not applied: ");
    assert_eq!(client.ask("AW.ADD 1").array()[0], Reply::Integer(1), "a WATCH begins no transaction");
}

#[test]
fn only_commands_of_ackwheel_are_refused_behind_a_refused_multi() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.send(
        &[
            "MULTI",
            "PING",
            "ECHO x",
            "CLIENT ID",
            "SELECT 0",
            "UNWATCH",
            "CONFIG GET save",
            "AW.ADD 1",
            "AW.STATUS",
            "AW.TAKE default BLOCK 0",
            "SET a b",
            "MULTI",
            "AUTH token",
            "AW.DEL 1",
            "EXEC",
            "AW.DEL 1",
        ]
        .map(line)
        .concat(),
    );
    client.receive().assert_error("NO_TRANSACTIONS ");
    assert_eq!(client.receive().text(), "PONG");
    assert_eq!(client.receive().text(), "x");
    assert!(client.receive().integer() > 0);
    assert_eq!(client.receive().text(), "OK");
    assert_eq!(client.receive().text(), "OK", "UNWATCH does not end it");
    assert_eq!(client.receive(), Reply::Array(Vec::new()));
    for _ in 0..3 {
        client.receive().assert_error("NO_TRANSACTIONS not applied: MULTI was refused");
    }
    client.receive().assert_error("ERR unknown command 'SET'");
    client.receive().assert_error("NO_TRANSACTIONS ");
    assert_eq!(client.receive().text(), "OK", "AUTH does not end it");
    client.receive().assert_error("NO_TRANSACTIONS ");
    client.receive().assert_error("EXECABORT not applied: ");
    assert_eq!(client.receive().texts(), ["unknown"]);
}

#[test]
fn a_refused_transaction_ends_once_nothing_has_arrived_for_a_second() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.ask("MULTI").assert_error("NO_TRANSACTIONS ");
    // Each byte begins the second again, also one that completes no command.
    let (mut began, mut sent) = (Instant::now(), Instant::now());
    while began.elapsed() < Duration::from_millis(2_500) {
        let before = sent;
        for piece in [&b"*"[..], &line("AW.ADD 1")[1..]] {
            std::thread::sleep(Duration::from_millis(100));
            sent = Instant::now();
            client.send(piece);
        }
        if !matches!(client.receive(), Reply::Error(_)) {
            assert!(before.elapsed() >= Duration::from_secs(1), "it ended early");
            // This machine was slow: try again.
            client.ask_all(["AW.DEL 1", "MULTI"]);
            (began, sent) = (Instant::now(), Instant::now());
        }
    }
    wait_until("the transaction ends", || {
        assert!(client.is_silent_for(Duration::from_millis(1_100)));
        !matches!(client.ask("AW.ADD 2"), Reply::Error(_))
    });
    assert_eq!(client.ask("AW.DEL 1 2").texts(), ["unknown", "acked"]);
}

#[test]
fn a_transaction_that_waits_unread_in_the_socket_is_refused_whole() {
    let sidecar = start(&["--max-queued-bytes", "65536"]);
    let mut client = Resp::to(&sidecar);
    // The sidecar does not run for longer than a second in the middle of it. Whether it then reads first is chance.
    for _ in 0..6 {
        client.ask("MULTI").assert_error("NO_TRANSACTIONS ");
        sidecar.signal(rustix::process::Signal::STOP);
        client.send(&[line("AW.ADD 1"), line("EXEC")].concat());
        std::thread::sleep(Duration::from_millis(1_200));
        sidecar.signal(rustix::process::Signal::CONT);
        client.receive().assert_error("NO_TRANSACTIONS ");
        client.receive().assert_error("EXECABORT ");
    }
    // The sidecar does not read for three seconds in the middle of it, because the client does not read its replies.
    let mut writer = client.stream.try_clone().unwrap();
    let (text, count) = ("x".repeat(4_000), 5_000);
    let pipeline =
        [line("MULTI"), line(&format!("ECHO {text}")).repeat(count), line("AW.ADD 1"), line("EXEC")].concat();
    let writes = std::thread::spawn(move || writer.write_all(&pipeline).unwrap());
    std::thread::sleep(Duration::from_secs(3));
    assert!(!writes.is_finished(), "the replies do not fit into the buffers");
    client.receive().assert_error("NO_TRANSACTIONS ");
    for _ in 0..count {
        assert_eq!(client.receive().text(), text);
    }
    client.receive().assert_error("NO_TRANSACTIONS ");
    client.receive().assert_error("EXECABORT ");
    writes.join().unwrap();
    assert_eq!(client.ask("AW.DEL 1").texts(), ["unknown"]);
}

#[test]
fn a_command_in_many_pieces_costs_at_most_three_times_as_much_as_whole() {
    let sidecar = start(&[]);
    let cpu = || sidecar.metrics().find("process_cpu_seconds_total").unwrap();
    let ids: Vec<String> = (0..32_768).map(|id| format!("{:012}:{id}", id * 7)).collect();
    let arguments: Vec<&str> = std::iter::once("AW.ADD").chain(ids.iter().map(String::as_str)).collect();
    let bytes = command(&arguments);
    let mut client = Resp::to(&sidecar);
    let mut cost_of = |piece: usize| {
        let before = cpu();
        for _ in 0..10 {
            bytes.chunks(piece).for_each(|piece| client.send(piece));
            assert_eq!(client.receive().array().len(), 3);
        }
        cpu() - before
    };
    // Other tests run beside this one, and can only raise the cost.
    let mut least = [f64::INFINITY; 2];
    for _ in 0..4 {
        for (least, piece) in least.iter_mut().zip([bytes.len(), 256]) {
            *least = least.min(cost_of(piece));
        }
    }
    let [whole, in_pieces] = least;
    assert!(in_pieces < whole * 3.0, "{in_pieces} s of processor time in pieces, and {whole} s whole");
}

#[test]
fn a_drain_refuses_adds_and_goes_on_with_the_rest() {
    let mut sidecar = start(&["--drain-timeout", "8s"]);
    let (mut client, mut idle) = (Resp::to(&sidecar), Resp::to(&sidecar));
    client.ask("AW.ADD 1 2");
    idle.ask("PING");
    sidecar.signal(rustix::process::Signal::TERM);
    wait_until("adds are refused", || matches!(client.ask("AW.ADD 3"), Reply::Error(_)));
    client.ask("AW.ADD 3").assert_error("DRAINING not applied: ");
    let taken = client.ask("AW.TAKE default BLOCK 5000").batches();
    assert!(taken[0].messages.len() >= 2 && taken[0].flags == "last drained", "{taken:?}");
    assert_eq!(client.ask("AW.DEL 1").texts(), ["late"]);
    assert_eq!(client.ask(&format!("AW.ACK default {}", taken[0].batch)), Reply::Integer(1));
    assert_eq!(client.rest(), b"", "the sidecar ends");
    assert_eq!(idle.rest(), b"");
    sidecar.end_of_drain();
}

#[test]
fn the_status_is_that_of_the_admin_endpoint() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.ask("AW.ADD 1 2 3");
    let reply = client.ask("AW.STATUS");
    let status: serde_json::Value = serde_json::from_str(reply.text()).unwrap();
    assert_eq!(status["rings"][0]["in_flight"], 3);
}

#[test]
fn redis_cli_and_lines_typed_by_hand_are_served() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    client.send(b"AW.ADD 101:7 102\r\nPING\nAW.DEL 101:7\r\nAW.PUT 1\r\n");
    assert_eq!(client.receive().array()[0], Reply::Integer(2));
    assert_eq!(client.receive(), Reply::Simple(String::from("PONG")));
    assert_eq!(client.receive().texts(), ["acked"]);
    client.receive().assert_error("ERR unknown command 'AW.PUT', with args beginning with: '1' ");
    assert_eq!(client.rest(), b"", "an unknown line ends the connection");
}

#[test]
fn beyond_loopback_the_listener_needs_a_token() {
    let run = Run::of(program(&["serve", "--check-config"]).args(["--resp", "0.0.0.0:7417"]));
    assert_eq!(run.code, 64, "{run:?}");
    assert_names(&run.stderr, &["--resp 0.0.0.0:7417 lets anyone on the network", "--token-file"]);
}

#[test]
fn a_peer_that_reads_nothing_is_closed_and_an_idle_one_is_not() {
    let sidecar = start(&["--max-queued-bytes", "65536"]);
    let (mut idle, mut deaf) = (Resp::to(&sidecar), Resp::to(&sidecar));
    idle.ask("PING");
    let bytes = line(&format!("ECHO {}", "x".repeat(4_000))).repeat(16);
    deaf.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let written = std::iter::from_fn(|| deaf.stream.write_all(&bytes).ok()).take(10_000).count();
    assert!(written < 10_000, "reading stops while replies wait");
    wait_until("it is closed", || sidecar.metrics().refusals("slow_reader") == 1);
    assert_eq!(idle.ask("PING").text(), "PONG");
}
