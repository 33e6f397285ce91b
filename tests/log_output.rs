//! Stderr that nobody reads, that nobody can read any more, or whose disk is full: the wheel, the probes and the drain go
//! on, and the lines that were dropped are counted and reported.

use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::frames;
use crate::support::http::{self, Metrics};
use crate::support::process::{Log, Process, Run, assert_names, program};
use crate::support::raw::Raw;
use crate::support::sidecar::serve;
use crate::support::{SLACK, wait_for, wait_until};

/// The length of a tick in these tests.
const TICK: Duration = Duration::from_millis(100);

/// How long a drain may take, with whatever is wrong outside.
const DRAIN: Duration = Duration::from_secs(10);

/// A sidecar that logs a lot to the stderr of the test's choice.
struct Loud {
    process: Process,
    listen: SocketAddr,
    admin: SocketAddr,
}

impl Loud {
    /// Starts it; `listening` finds the line that names its addresses.
    fn start(flags: &[&str], stderr: impl Into<Stdio>, listening: impl FnOnce() -> String) -> Loud {
        let mut command = serve(&["--tick", "100ms", "--slots", "5", "--log", "debug"]);
        let process = Process::spawn(command.args(flags).stderr(stderr));
        let line = listening();
        let address = |key: &str| {
            let value = line.split(' ').find_map(|word| word.strip_prefix(key));
            value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {key} in {line}"))
        };
        let (listen, admin) = (address("listen="), address("admin="));
        Loud { process, listen, admin }
    }

    fn dropped(&self) -> u64 {
        let (status, text) = http::get(self.admin, "/metrics");
        assert_eq!(status, 200, "{text}");
        Metrics::parse(&text).count("log_lines_dropped_total")
    }

    /// Has it log 500 lines: as many requests are refused.
    fn log_500_lines(&self) {
        let mut connection = Raw::greeted(self.listen);
        let refused: Vec<u8> = (1..=500).flat_map(|number| frames::ping(&[0; 65]).bytes(number)).collect();
        connection.send(&refused);
        (0..500).for_each(|_| connection.next_answer().assert_error(33, 0));
    }

    /// Has it log until lines are dropped. All the time it must answer.
    fn wait_until_lines_are_dropped(&self) {
        let before = self.dropped();
        wait_until("lines are dropped", || {
            self.log_500_lines();
            let asked = Instant::now();
            assert_eq!(http::get(self.admin, "/livez").0, 200);
            assert!(asked.elapsed() < SLACK, "it answered after {:?}", asked.elapsed());
            self.dropped() > before
        });
    }

    /// Has a message time out, which must be on time.
    fn assert_that_timeouts_are_on_time(&self, id: u64) {
        let mut subscriber = Raw::greeted(self.listen).subscribed("default");
        let added = Instant::now();
        subscriber.ask(&frames::add(&[id], 5, 1)).added();
        let batch = subscriber.settled_batch();
        assert_eq!(batch.ids(), [id]);
        let took = batch.arrived.duration_since(added);
        assert!(took >= TICK * 5, "early: {took:?}");
        assert!(took < TICK * 6 + SLACK, "late: {took:?}");
    }

    /// Ends it, which takes no longer than it may.
    fn drain(&mut self) {
        let begun = Instant::now();
        self.process.signal(Signal::TERM);
        assert_eq!(self.process.exit().code(), Some(0));
        assert!(begun.elapsed() < DRAIN, "it ended after {:?}", begun.elapsed());
    }
}

/// Reads a log line by line until one names where the sidecar listens.
fn listening_in(mut log: impl Read) -> String {
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        log.read_exact(&mut byte).expect("it logs where it listens");
        match byte[0] {
            b'\n' if String::from_utf8_lossy(&line).contains(": listening ") => {
                return String::from_utf8(line).expect("a log is UTF-8");
            }
            b'\n' => line.clear(),
            byte => line.push(byte),
        }
    }
}

/// Fills a pipe to the brim.
fn fill(mut pipe: &PipeWriter) {
    let flags = fcntl_getfl(pipe).unwrap();
    // The process on the other side shares the flags, and may meet them.
    fcntl_setfl(pipe, flags | OFlags::NONBLOCK).unwrap();
    for length in [4_096, 1] {
        while matches!(pipe.write(&vec![b'.'; length]), Ok(1..)) {}
    }
    fcntl_setfl(pipe, flags).unwrap();
}

fn loud_on_a_pipe(flags: &[&str]) -> (Loud, PipeReader, PipeWriter) {
    let (reader, writer) = io::pipe().unwrap();
    let sidecar = Loud::start(flags, writer.try_clone().unwrap(), || listening_in(&reader));
    (sidecar, reader, writer)
}

#[test]
fn a_stuck_reader_of_the_log_stops_neither_timeouts_nor_probes_nor_the_drain() {
    let (mut sidecar, _reader, writer) = loud_on_a_pipe(&[]);
    fill(&writer);
    sidecar.wait_until_lines_are_dropped();
    sidecar.assert_that_timeouts_are_on_time(1);
    sidecar.drain();
}

#[test]
fn a_log_whose_reader_has_gone_stops_nothing() {
    let (mut sidecar, reader, _) = loud_on_a_pipe(&[]);
    drop(reader);
    sidecar.wait_until_lines_are_dropped();
    sidecar.assert_that_timeouts_are_on_time(1);
    sidecar.drain();
}

#[test]
fn a_reader_that_comes_back_learns_in_the_same_format_how_many_lines_are_missing() {
    for format in ["text", "json"] {
        let (reader, writer) = io::pipe().unwrap();
        // The addresses are read from a log in text.
        let (mut sidecar, reader, writer) = if format == "text" {
            loud_on_a_pipe(&[])
        } else {
            let stderr = writer.try_clone().unwrap();
            let sidecar = Loud::start(&["--log-format", format], stderr, || {
                let line = listening_in_json(&reader);
                let word = |name: &str| line[name].as_str().unwrap();
                format!("listen={} admin={}", word("listen"), word("admin"))
            });
            (sidecar, reader, writer)
        };
        fill(&writer);
        sidecar.wait_until_lines_are_dropped();
        drop(writer);
        let log = Log::of(reader);
        let line = log.line("log lines are missing here").expect("it is told");
        let dropped = sidecar.dropped();
        let said = match format {
            "text" => line.split("dropped=").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse().ok()),
            _ => serde_json::from_str::<serde_json::Value>(&line).unwrap()["fields"]["dropped"].as_u64(),
        };
        assert_names(&line, &["WARN", "ackwheel::logging", "stderr"]);
        assert!(said.is_some_and(|said| 0 < said && said <= dropped), "{dropped} were dropped: {line}");
        sidecar.drain();
        assert_names(&log.whole(), &["drained; "]);
    }
}

fn listening_in_json(mut log: &PipeReader) -> serde_json::Value {
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        log.read_exact(&mut byte).expect("it logs where it listens");
        if byte != *b"\n" {
            line.push(byte[0]);
            continue;
        }
        let value: serde_json::Value = serde_json::from_slice(&line).expect("each line is an object");
        if value["fields"]["message"] == "listening" {
            return value["fields"].clone();
        }
        line.clear();
    }
}

/// A file system in memory that has room for 256 KiB.
struct SmallDisk(TempDir);

impl SmallDisk {
    /// None where the system does not allow to mount one.
    fn mount() -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"]).arg(folder.path()).output();
        if mount.is_ok_and(|mount| mount.status.success()) {
            return Some(SmallDisk(folder));
        }
        crate::support::skipped::skip("a disk that fills up: mounting a file system is not permitted here");
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).output();
    }
}

#[test]
fn a_full_disk_under_the_log_stops_nothing_and_the_log_goes_on_once_there_is_room() {
    let Some(disk) = SmallDisk::mount() else { return };
    let path = disk.path().join("log");
    let file = File::options().create(true).append(true).open(&path).unwrap();
    let text = || String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
    let mut sidecar = Loud::start(&[], file, || {
        wait_for("it listens", || text().lines().find(|line| line.contains(": listening ")).map(str::to_owned))
    });
    sidecar.wait_until_lines_are_dropped();
    sidecar.assert_that_timeouts_are_on_time(1);
    // As a rotation with `copytruncate` does.
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    sidecar.log_500_lines();
    wait_until("it is told", || text().contains("log lines are missing here"));
    sidecar.wait_until_lines_are_dropped();
    sidecar.drain();
}

#[test]
fn a_sidecar_whose_log_could_never_be_written_serves_and_drains() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut command = serve(&["--log", "debug", "--socket", socket.to_str().unwrap()]);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut process = Process::spawn(command.stderr(full));
    // It listens before its store is open, and refuses Hello until then.
    let is_welcome = || Raw::unix(&socket).ask(&frames::hello((1, 1), b"")).kind == frames::WELCOME;
    wait_until("it serves", || UnixStream::connect(&socket).is_ok() && is_welcome());
    let mut connection = Raw::unix(&socket).greet();
    assert_eq!(connection.ask(&frames::add(&[1], 0, 1)).added().1, [false]);
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [frames::ACKED]);
    let begun = Instant::now();
    process.signal(Signal::TERM);
    assert_eq!(process.exit().code(), Some(0));
    assert!(begun.elapsed() < DRAIN);
}

#[test]
fn a_failed_start_ends_even_if_its_log_cannot_be_written() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let flags = ["serve", "--admin", "127.0.0.1:0", "--listen", &address];
    let told = Run::of(&mut program(&flags));
    assert_names(told.error(1), &["ackwheel: cannot listen on ", "--listen"]);
    let (_reader, writer) = io::pipe().unwrap();
    fill(&writer);
    let mut process = Process::spawn(program(&flags).stderr(writer));
    assert_eq!(process.exit().code(), Some(1));
}
