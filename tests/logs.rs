//! The log under faults that repeat: bounded, counted, and without ids.

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ackwheel::logging::{MAX_SAME, WINDOW};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::frames;
use crate::support::held_thread::HeldThread;
use crate::support::process::{Log, Process, assert_names};
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve};
use crate::support::wait_until;

/// A sidecar whose log is JSON, and may open so many files.
struct Logging {
    process: Process,
    log: Log,
    address: String,
}

impl Logging {
    fn start(files: u32) -> Logging {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {files} && exec \"$0\" \"$@\"")]);
        let serve = serve(&["--log-format", "json"]);
        command.arg(serve.get_program()).args(serve.get_args());
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process::spawn(&mut command);
        let log = Log::of(process.stderr());
        let line = log.line("\"listening\"").unwrap_or_else(|| panic!("it did not start: {}", log.text()));
        let line: Value = serde_json::from_str(&line).unwrap();
        let address = line["fields"]["listen"].as_str().unwrap().to_owned();
        Logging { process, log, address }
    }

    /// Ends it; returns all that it logged.
    fn end(mut self) -> Vec<Value> {
        self.process.signal(Signal::TERM);
        assert_eq!(self.process.exit().code(), Some(0));
        let text = self.log.whole();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
            .collect()
    }
}

/// Of the lines with these words: how many were written, and how many were left out.
fn counted(lines: &[Value], words: &str) -> (usize, u64) {
    let with_words = lines.iter().filter(|line| line["fields"]["message"].as_str().unwrap().contains(words));
    let (counts, written): (Vec<&Value>, Vec<&Value>) =
        with_words.partition(|line| line["fields"]["left_out"].is_u64());
    for count in &counts {
        let (message, left_out) = (count["fields"]["message"].as_str().unwrap(), &count["fields"]["left_out"]);
        assert!(message.starts_with(&format!("… and {left_out} more like it in the last ")), "{message}");
        assert_eq!(count["level"], written[0]["level"], "it is found where the others are");
    }
    (written.len(), counts.iter().map(|count| count["fields"]["left_out"].as_u64().unwrap()).sum())
}

/// How many windows can begin within a time.
fn windows(within: Duration) -> usize {
    usize::try_from(within.as_secs() / WINDOW.as_secs()).unwrap() + 1
}

#[test]
fn a_hostile_client_that_comes_three_hundred_times_writes_three_lines_and_a_count() {
    let sidecar = Logging::start(4_096);
    let begun = Instant::now();
    for _ in 0..300 {
        let mut client = Raw::greeted(sidecar.address.parse().unwrap());
        client.send(&[0, 0, 0, 5, 1, 2, 3, 4, 5]);
        client.receive().expect("it is told why");
        client.assert_closed();
    }
    let lines = sidecar.end();
    let (written, left_out) = counted(&lines, "connection refused further service");
    assert_eq!(written as u64 + left_out, 300, "each is written or counted");
    assert!((1..=MAX_SAME * windows(begun.elapsed())).contains(&written), "{written} lines");
}

#[test]
fn a_sidecar_out_of_files_logs_three_lines_and_a_count_of_the_rest() {
    let sidecar = Logging::start(64);
    let begun = Instant::now();
    // The kernel completes their handshakes, and no file is left to accept them with.
    let waiting: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(&sidecar.address).unwrap()).collect();
    let line = sidecar.log.line("more like it in the last ").expect("it is counted while it lasts");
    let took = begun.elapsed();
    assert!(took >= WINDOW, "a window was over after {took:?}");
    assert_names(&line, &["WARN", "could not be accepted", "ulimit -n"]);
    drop(waiting);
    let lines = sidecar.end();
    let (written, left_out) = counted(&lines, "could not be accepted");
    assert!((1..=MAX_SAME * windows(begun.elapsed())).contains(&written), "{written} lines");
    assert!(left_out >= 20, "ten times a second it is tried again: {left_out} left out");
}

#[test]
fn a_line_about_a_ring_says_which_whatever_the_filter() {
    let redis = Redis::start();
    // The line that says where it listens is of another module.
    let filter = "info,ackwheel::app=warn,ackwheel::ticker=warn";
    let flags = ["--rings", "2", "--drain-timeout", "0s", "--log", filter];
    let sidecar = Sidecar::on(&redis, "a", &flags);
    wait_until("it leads", || sidecar.status().rings.iter().all(|ring| ring.leads));
    redis.stop();
    for ring in 0..2 {
        let of_ring =
            format!("ring{{ring={ring}}}: ackwheel::ticker::reports: the store refused to move the pointer");
        let _ = sidecar.log().line(&of_ring).expect("each ring is told of");
    }
    // A drain in time is not told of.
    let Some(_held) = HeldThread::hold(sidecar.id(), "ticker") else { return };
    sidecar.signal(Signal::TERM);
    for ring in 0..2 {
        let of_ring = format!("ring{{ring={ring}}}: ackwheel::app::drain: a ring could not be drained in time");
        let _ = sidecar.log().line(&of_ring).expect("each ring is told of");
    }
}

#[test]
fn a_client_does_not_choose_how_long_a_line_is() {
    let sidecar = Sidecar::start(&[]);
    let mut body = b"ACKW\x01\x01\0\0".to_vec();
    body.extend([&[255][..], &[b'n'; 255]].concat());
    let mut client = Raw::tcp(sidecar.listen);
    assert_eq!(client.ask(&frames::Request::new(frames::HELLO, 0, body)).kind, frames::WELCOME);
    client.send(&[0; 64]);
    let line = sidecar.log().line("refused further service").unwrap();
    assert!(line.contains(&"n".repeat(64)) && !line.contains(&"n".repeat(65)), "{line}");
}

#[test]
fn the_log_names_no_message_and_no_client() {
    let mut sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "5", "--storm-min", "3", "--log", "info"]);
    let mut connection = sidecar.connect();
    let (ids, client) = ([7_234_567_890_123_456_701, 7_234_567_890_123_456_702], 7_234_567_890_123_456_700);
    let pairs: Vec<(u64, u64)> = ids.iter().flat_map(|id| [(*id, client), (*id, client + 9)]).collect();
    connection.ask(&frames::add_pairs(&pairs, 1)).added();
    wait_until("a storm is seen", || sidecar.log().text().contains("storm: "));
    assert_eq!(connection.ask(&frames::del(&ids)).outcomes().len(), 2);
    connection.ask(&frames::add_pairs(&pairs, 5)).added();
    connection.ask(&frames::add(&ids, 6, 1)).assert_error(35, 0);
    let mut hostile = sidecar.connect();
    hostile.send(&[&[0, 0, 0, 3][..], &ids[0].to_be_bytes(), &client.to_be_bytes()].concat());
    hostile.receive().expect("it is told why");
    sidecar.terminate();
    let log = sidecar.log().text();
    assert_names(&log, &["storm: ", "connection refused further service", "did not acknowledge its last batches"]);
    assert!(!log.contains("72345678901234567"), "{log}");
}
