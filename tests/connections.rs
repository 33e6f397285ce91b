//! The life of a connection: Hello, versions, tokens, Pings, GoAway, by the bytes of docs/PROTOCOL.md.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::frames::{self, Frame, GO_AWAY, Request, u32_at};
use crate::support::process::{Run, assert_names, program};
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::{SLACK, wait_until};

/// Says Hello on a new connection; returns the answer.
fn greet(sidecar: &Sidecar, hello: &Request) -> (Raw, Frame) {
    let mut connection = Raw::tcp(sidecar.listen);
    let answer = connection.ask(hello);
    (connection, answer)
}

fn assert_turned_away(sidecar: &Sidecar, hello: &Request, code: u16, words: &[&str]) {
    let (mut connection, answer) = greet(sidecar, hello);
    answer.assert_error(code, 0);
    assert_names(answer.text(), words);
    connection.assert_closed();
}

#[test]
fn welcome_says_what_the_server_is_and_accepts() {
    let sidecar = Sidecar::start(&["--tick", "250ms", "--slots", "60", "--max-frame-length", "2097152"]);
    let (_, welcome) = greet(&sidecar, &frames::hello((1, 1), b""));
    let body = &welcome.body;
    assert_eq!((welcome.kind, welcome.flags, welcome.status), (frames::WELCOME, 0, 0));
    assert_eq!((body[0], body[1], u16::from_be_bytes([body[2], body[3]])), (1, 0, 60));
    let numbers: Vec<u32> = (0..5).map(|index| u32_at(body, 4 + 4 * index)).collect();
    assert_eq!((numbers[0], numbers[1], numbers[2]), (250, 2_097_152, 32_768));
    assert!(numbers[3] >= 1_000_000, "max_credit is {}", numbers[3]);
    assert_eq!(numbers[4], 5_000, "a third of 15 s");
    assert_eq!(&body[24..31], b"\x06memory");
    assert_eq!(usize::from(body[31]), body.len() - 32);
    assert!(body[32..].starts_with(b"ackwheel"), "{welcome:?}");
}

#[test]
fn the_highest_version_that_both_speak_is_chosen() {
    let sidecar = Sidecar::start(&[]);
    let (mut connection, welcome) = greet(&sidecar, &frames::hello((1, 200), b""));
    assert_eq!((welcome.kind, welcome.body[0]), (frames::WELCOME, 1));
    assert_eq!(connection.ask(&frames::ping(b"!")).body, b"!");
    assert_turned_away(&sidecar, &frames::hello((2, 3), b""), 6, &["1", "2 to 3", "update"]);
    assert_eq!(sidecar.metrics().refusals("unsupported_version"), 1);
    let line = sidecar.log().line("is turned away").expect("the log says who it was, and why");
    assert_names(&line, &["WARN", "peer=127.0.0.1:", "versions 1 to 1", "2 to 3"]);
}

#[test]
fn a_hello_of_a_later_version_may_say_more() {
    let sidecar = Sidecar::start(&[]);
    let mut hello = frames::hello((1, 9), b"");
    hello.body.extend(b"what version 9 adds");
    let (_, welcome) = greet(&sidecar, &hello);
    assert_eq!((welcome.kind, welcome.body[0]), (frames::WELCOME, 1));
}

#[test]
fn a_bad_hello_ends_the_connection() {
    let sidecar = Sidecar::start(&[]);
    let good = frames::hello((1, 1), b"");
    let mut other_magic = good.clone();
    other_magic.body[0] = b'B';
    let mut short = good.clone();
    short.body.truncate(10);
    let mut name_not_utf8 = good.clone();
    *name_not_utf8.body.last_mut().unwrap() = 0xff;
    let long_token = frames::hello((1, 1), &[b'x'; 1_025]);
    let empty = Request::new(frames::HELLO, 0, Vec::new());
    let backwards = frames::hello((2, 1), b"");
    let bad = [other_magic, short, name_not_utf8, long_token, empty, backwards];
    for hello in &bad {
        assert_turned_away(&sidecar, hello, 5, &["hello"]);
    }
    assert_eq!(sidecar.metrics().refusals("bad_hello"), bad.len() as u64);
    assert_turned_away(&sidecar, &frames::add(&[1], 0, 1), 3, &["hello", "add_new_msg"]);
    let others = [
        Request::new(0x7f, 0, Vec::new()),
        Request { status: 1, ..frames::ping(b"") },
        frames::ping(&[0; 65]),
        frames::add(&[], 0, 1),
    ];
    for other in &others {
        assert_turned_away(&sidecar, other, 3, &["hello"]);
    }
    assert_eq!(sidecar.metrics().refusals("hello_expected"), 1 + others.len() as u64);
    assert_eq!(sidecar.metrics().count("messages_added_total"), 0);
}

#[test]
fn a_second_hello_is_refused_and_the_connection_goes_on() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::hello((1, 1), b"")).assert_error(33, 0);
    assert_eq!(connection.ask(&frames::ping(b"on")).body, b"on");
}

#[test]
fn a_token_is_asked_for_and_read_again_when_its_file_changes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, "first-secret\n").unwrap();
    let sidecar = Sidecar::start(&["--token-file", file.to_str().unwrap()]);
    let hello = |token: &str| frames::hello((1, 1), token.as_bytes());
    assert_turned_away(&sidecar, &hello(""), 7, &["token"]);
    assert_turned_away(&sidecar, &hello("first-secre"), 7, &["token"]);
    assert_turned_away(&sidecar, &hello("first-secret\n"), 7, &["token"]);
    let (mut early, welcome) = greet(&sidecar, &hello("first-secret"));
    assert_eq!(welcome.kind, frames::WELCOME);
    assert_eq!(sidecar.metrics().refusals("unauthorized"), 3);

    let token_flag = ["--token-file", file.to_str().unwrap()];
    assert_eq!(Run::of(sidecar.command(&["add", "1"]).args(token_flag)).output(), "1 added, times out in 15s\n");
    assert_names(Run::of(sidecar.command(&["ping"]).args(token_flag)).output(), &["answered in"]);
    for arguments in [&["add", "2"][..], &["ping"]] {
        assert_names(sidecar.run(arguments).error(1), &["token", "unauthorized"]);
    }

    fs::write(&file, "second-secret").unwrap();
    wait_until("the new token counts", || greet(&sidecar, &hello("second-secret")).1.kind == frames::WELCOME);
    assert_turned_away(&sidecar, &hello("first-secret"), 7, &["token"]);
    early.receive().expect("an Error").assert_error(15, frames::RETRYABLE);
    early.assert_closed();
    assert!(!sidecar.log().text().contains("secret"), "no token in the log");
}

#[test]
fn a_token_that_keeps_the_time_of_its_file_is_read_again_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, "first").unwrap();
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    let sidecar = Sidecar::start(&["--token-file", file.to_str().unwrap()]);
    let next = folder.path().join("next");
    fs::write(&next, "other").unwrap();
    fs::File::options().write(true).open(&next).unwrap().set_modified(modified).unwrap();
    fs::rename(&next, &file).unwrap();
    let hello = frames::hello((1, 1), b"other");
    wait_until("the new token counts", || greet(&sidecar, &hello).1.kind == frames::WELCOME);
    assert_turned_away(&sidecar, &frames::hello((1, 1), b"first"), 7, &["token"]);
}

#[test]
fn a_pipe_in_the_place_of_the_token_file_stops_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, "secret").unwrap();
    let mut sidecar = Sidecar::start(&["--token-file", file.to_str().unwrap()]);
    fs::remove_file(&file).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert!(sidecar.log().line("the old token stays").is_some());
    let asked = Instant::now();
    assert_eq!(greet(&sidecar, &frames::hello((1, 1), b"secret")).1.kind, frames::WELCOME);
    assert!(asked.elapsed() < SLACK, "it answered after {:?}", asked.elapsed());
    sidecar.terminate();
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_token_and_utf_16_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    fs::write(&file, "\u{feff}secret\r\n").unwrap();
    let flags = ["--token-file", file.to_str().unwrap()];
    let check = || Run::of(program(&["serve", "--check-config"]).args(flags));
    assert_eq!((check().code, check().stdout.as_str()), (0, "the configuration is right\n"));
    let sidecar = Sidecar::start(&flags);
    assert_eq!(greet(&sidecar, &frames::hello((1, 1), b"secret")).1.kind, frames::WELCOME);
    assert_eq!(
        Run::of(sidecar.command(&["add", "1"]).args(flags)).output(),
        "1 added, times out in 15s\n",
        "a client reads it alike"
    );
    fs::write(&file, b"\xff\xfes\0e\0c\0").unwrap();
    assert_names(check().error(64), &["--token-file", file.to_str().unwrap(), "UTF-16", "save it as UTF-8"]);
    fs::write(&file, "\u{feff}").unwrap();
    assert_names(check().error(64), &["no token in it", "1 to 1024 bytes"]);
}

#[test]
fn a_silent_peer_is_pinged_and_then_given_up() {
    let sidecar = Sidecar::start(&["--tick", "200ms", "--slots", "5"]);
    let interval = Duration::from_secs(1);
    let mut answering = sidecar.connect();
    let answering = thread::spawn(move || {
        for _ in 0..4 {
            let ping = answering.receive_any().expect("it is asked again and again");
            answering.pong(&ping);
        }
        answering
    });
    let mut silent = Raw::tcp(sidecar.listen);
    let greeted = Instant::now();
    silent.ask(&frames::hello((1, 1), b""));
    let first = silent.receive_any().expect("a Ping comes first");
    assert_eq!((first.kind, first.correlation, first.flags, first.status), (frames::PING, 0, 0, 0));
    assert!(greeted.elapsed() <= interval + SLACK, "pinged only after {:?}", greeted.elapsed());

    // The first may come earlier, so that not all are asked at once; then it is an interval.
    let before = Instant::now();
    silent.pong(&first);
    let heard = Instant::now();
    let ping = silent.receive_any().expect("then the next");
    assert_eq!(ping.kind, frames::PING);
    assert!(before.elapsed() >= interval, "pinged after {:?}", before.elapsed());
    assert!(heard.elapsed() <= interval + SLACK, "pinged only after {:?}", heard.elapsed());
    let error = silent.receive_any().expect("an Error comes next");
    error.assert_error(9, frames::RETRYABLE);
    assert_eq!(error.correlation, 0);
    assert!(before.elapsed() >= interval * 2, "given up after {:?}", before.elapsed());
    assert!(heard.elapsed() <= interval * 2 + SLACK * 2, "given up only after {:?}", heard.elapsed());
    silent.assert_closed();

    // A peer that answers Pings stays, although it sends nothing else.
    let mut answering = answering.join().unwrap();
    assert_eq!(answering.ask(&frames::ping(b"here")).body, b"here");
    assert_eq!(sidecar.metrics().refusals("silent"), 1);
}

#[test]
fn a_ping_is_echoed_whatever_its_bytes_are() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    for payload in [&b""[..], &[0, 255, 128], &[7; 64]] {
        let pong = connection.ask(&frames::ping(payload));
        assert_eq!((pong.kind, pong.flags, pong.body.as_slice()), (frames::PONG, 0, payload));
    }
    connection.ask(&frames::ping(&[7; 65])).assert_error(33, 0);
    connection.send(&Request::new(frames::PONG, 0, b"nobody asked".to_vec()).bytes(77));
    assert_eq!(connection.ask(&frames::ping(b"on")).body, b"on", "a Pong that nobody asked for is ignored");
}

#[test]
fn after_a_clients_go_away_what_was_read_is_answered_and_the_server_closes() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    let mut bytes = frames::add(&[1, 2], 0, 1).bytes(11);
    bytes.extend(frames::del(&[2]).bytes(12));
    bytes.extend(frames::go_away().bytes(13));
    connection.send(&bytes);
    let (added, deleted) = (connection.next_answer(), connection.next_answer());
    assert_eq!((added.correlation, added.added().1), (11, vec![false, false]));
    assert_eq!((deleted.correlation, deleted.outcomes()), (12, &[frames::ACKED][..]));
    connection.assert_closed();
}

#[test]
fn one_connection_too_many_is_refused_with_a_reason_and_may_come_later() {
    let sidecar = Sidecar::start(&["--max-connections", "3"]);
    let mut open: Vec<Raw> = (0..3).map(|_| sidecar.connect()).collect();
    let (mut refused, error) = greet(&sidecar, &frames::hello((1, 1), b""));
    error.assert_error(8, frames::RETRYABLE);
    assert_names(error.text(), &["3 connections", "--max-connections"]);
    refused.assert_closed();
    let run = sidecar.run(&["add", "1"]);
    assert_names(run.error(1), &["--max-connections", "too_many_connections"]);
    assert_eq!(open[0].ask(&frames::ping(b"on")).body, b"on");
    let metrics = sidecar.metrics();
    assert_eq!(metrics.connections(), 3);
    assert_eq!((metrics.refusals("too_many_connections"), metrics.count("frames_total{type=\"error\"}")), (2, 2));

    drop(open.pop());
    wait_until("there is room again", || sidecar.metrics().connections() == 2);
    assert_eq!(sidecar.run(&["add", "1"]).output(), "1 added, times out in 15s\n");
}

#[test]
fn the_unix_socket_speaks_the_same_and_goes_with_the_sidecar() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let flags = ["--socket", path.to_str().unwrap()];
    let mut sidecar = Sidecar::start(&flags);
    let mut connection = Raw::unix(&path).greet();
    assert_eq!(connection.ask(&frames::add(&[1], 0, 1)).added().1, [false]);
    assert_eq!(sidecar.connect().ask(&frames::del(&[1])).outcomes(), [frames::ACKED], "it is the same wheel");
    assert_eq!(over(&path, &["add", "2"]).output(), "2 added, times out in 15s\n");
    drop(connection);
    sidecar.terminate();
    assert!(!path.exists(), "the socket is removed");
    assert_names(over(&path, &["add", "3"]).error(1), &[path.to_str().unwrap(), "is ackwheel serving there?"]);

    let mut killed = Sidecar::start(&flags);
    killed.kill();
    assert!(path.exists(), "a killed sidecar leaves its socket behind");
    let _sidecar = Sidecar::start(&flags);
    assert_eq!(over(&path, &["add", "4"]).output(), "4 added, times out in 15s\n", "and the next one replaces it");
    let occupied = Run::of(program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]).args(flags));
    assert_names(occupied.error(1), &[path.to_str().unwrap(), "--socket"]);
    assert_eq!(over(&path, &["del", "4"]).output(), "4 acked\n", "but not that of one that serves");
}

#[test]
fn a_socket_that_another_process_has_put_in_its_place_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let [path, other] = ["socket", "other"].map(|name| folder.path().join(name));
    let flags = ["--socket", path.to_str().unwrap()];
    let mut sidecar = Sidecar::start(&flags);
    let foreign = UnixListener::bind(&other).unwrap();
    fs::rename(&other, &path).unwrap();
    sidecar.log().assert_names(&["WARN", "the file of --socket is gone", path.to_str().unwrap()]);
    sidecar.terminate();
    assert!(sidecar.log().text().contains("the file stays"), "{}", sidecar.log().text());
    assert!(UnixStream::connect(&path).is_ok(), "the other process still serves there");
    drop(foreign);
    let mut next = Sidecar::start(&flags);
    fs::remove_file(&path).unwrap();
    next.terminate();
    assert!(!next.log().text().contains("could not be removed"), "a socket that is gone already needs no words");
}

#[test]
fn a_socket_whose_file_is_swept_away_is_there_again_and_its_connections_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let mut sidecar = Sidecar::start(&["--socket", path.to_str().unwrap()]);
    let mut before = Raw::unix(&path).greet();
    for id in [1, 2] {
        fs::remove_file(&path).unwrap();
        wait_until("the file is there again", || path.exists());
        before.ask(&frames::add(&[id], 0, 1)).added();
        assert_eq!(Raw::unix(&path).greet().ask(&frames::del(&[id])).outcomes(), [frames::ACKED]);
    }
    sidecar.log().assert_names(&["WARN", "the file of --socket was gone", path.to_str().unwrap()]);
    // A file that is no socket is left.
    fs::remove_file(&path).unwrap();
    wait_until("a file is in its place", || {
        let created = fs::File::create_new(&path).is_ok();
        created || fs::remove_file(&path).is_err()
    });
    sidecar.log().assert_names(&["no client can connect there", "no socket"]);
    sidecar.terminate();
    assert!(path.is_file(), "it is left");
}

fn over(path: &Path, arguments: &[&str]) -> Run {
    Run::of(program(arguments).args(["--addr", &format!("unix:{}", path.display())]))
}

#[test]
fn a_file_that_is_no_socket_is_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("precious");
    std::fs::write(&path, "precious").unwrap();
    let listeners = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
    let run = Run::of(program(&listeners).args(["--socket", path.to_str().unwrap()]));
    assert_names(run.error(1), &[path.to_str().unwrap(), "no socket", "--socket"]);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_request_that_arrives_within_the_grace_is_answered() {
    let mut sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 0, 1)).added();
    sidecar.signal(rustix::process::Signal::TERM);
    assert_eq!(connection.receive().expect("a GoAway").kind, GO_AWAY);
    let outcomes = connection.ask(&frames::del(&[1])).outcomes().to_vec();
    assert!([[frames::ACKED], [frames::LATE]].contains(&[outcomes[0]]), "before the drain's decision or after it");
    sidecar.end_of_drain();
}

#[test]
fn a_go_away_says_that_the_server_drains() {
    let mut sidecar = Sidecar::start(&["--drain-timeout", "3s"]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::ping(b"here"));
    sidecar.terminate();
    let frame = connection.receive().expect("a GoAway");
    assert_eq!((frame.kind, frame.flags, frame.status, frame.correlation), (GO_AWAY, 0, 0, 0));
    assert_eq!(frame.body[..4], [0, 1, 0, 0], "the reason is that it drains");
    assert_eq!(u32_at(&frame.body, 4), 500, "and this is its grace");
    connection.assert_closed();
}
