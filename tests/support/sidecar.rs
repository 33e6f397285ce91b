//! A sidecar: the real program, on free ports.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use ackwheel::admin::status::{GroupReport, StatusReport};
use rustix::process::Signal;

use super::clock::FakeClock;
use super::http::{self, Metrics};
use super::process::{Log, Process, Run, program};
use super::raw::Raw;
use super::redis::Redis;
use super::{wait_for, wait_until};

/// The command of a sidecar on free ports.
pub fn serve(flags: &[&str]) -> Command {
    let mut command = program(&["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    command.args(flags);
    command
}

/// The command of a sidecar with a wheel in Redis.
pub fn serve_on(redis: &Redis, name: &str, flags: &[&str]) -> Command {
    serve_at(&redis.url(), name, flags)
}

/// The command of a sidecar with a wheel in this store.
pub fn serve_at(store: &str, name: &str, flags: &[&str]) -> Command {
    let mut command = serve(&["--store", store, "--name", name]);
    command.args(flags);
    command
}

/// A sidecar that ends with its test. Its log is printed if the test fails.
#[derive(Debug)]
pub struct Sidecar {
    process: Process,
    log: Log,
    pub listen: SocketAddr,
    /// The address of the RESP protocol, if it is served.
    pub resp: Option<SocketAddr>,
    pub admin: SocketAddr,
}

impl Sidecar {
    /// Serves with these flags.
    pub fn start(flags: &[&str]) -> Sidecar {
        Sidecar::spawn(&mut serve(flags))
    }

    /// Serves with these flags, and believes a clock.
    pub fn start_with_clock(clock: &FakeClock, flags: &[&str]) -> Sidecar {
        let mut command = serve(flags);
        clock.rule(&mut command);
        Sidecar::spawn(&mut command)
    }

    /// Serves a wheel in Redis under this name, with these flags; returns once it is ready.
    pub fn on(redis: &Redis, name: &str, flags: &[&str]) -> Sidecar {
        Sidecar::spawn(&mut serve_on(redis, name, flags)).once_ready()
    }

    /// Serves a wheel in Redis, and believes a clock.
    pub fn on_with_clock(redis: &Redis, name: &str, clock: &FakeClock, flags: &[&str]) -> Sidecar {
        let mut command = serve_on(redis, name, flags);
        clock.rule(&mut command);
        Sidecar::spawn(&mut command).once_ready()
    }

    /// This one, once it is ready.
    pub fn once_ready(self) -> Sidecar {
        self.wait_until_ready();
        self
    }

    /// Serves with a command of its own, which must ask for free ports.
    #[track_caller]
    pub fn spawn(command: &mut Command) -> Sidecar {
        let mut process = Process::spawn(command);
        let log = Log::of(process.stderr());
        let Some(line) = log.line(": listening ") else { panic!("it did not start: {}", log.text()) };
        let found = |key: &str| {
            let value = line.split(' ').find_map(|word| word.strip_prefix(key));
            value.and_then(|value| value.parse().ok())
        };
        let address = |key: &str| found(key).unwrap_or_else(|| panic!("no {key} in {line}"));
        let (listen, resp, admin) = (address("listen="), found("resp="), address("admin="));
        Sidecar { process, log, listen, resp, admin }
    }

    /// Runs a verb against it to its end.
    pub fn run(&self, arguments: &[&str]) -> Run {
        Run::of(&mut self.command(arguments))
    }

    /// The command of a verb against it.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program(arguments);
        match arguments {
            ["check", ..] => {
                command.args(["--addr", &self.listen.to_string(), "--admin", &self.admin.to_string()])
            }
            ["status", ..] | ["group", "list", ..] => command.args(["--admin", &self.admin.to_string()]),
            _ => command.args(["--addr", &self.listen.to_string()]),
        };
        command
    }

    /// A connection that has said Hello.
    pub fn connect(&self) -> Raw {
        Raw::greeted(self.listen)
    }

    /// GETs a path of its admin endpoints.
    pub fn get(&self, path: &str) -> (u16, String) {
        http::get(self.admin, path)
    }

    pub fn metrics(&self) -> Metrics {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200, "{text}");
        Metrics::parse(&text)
    }

    /// Its status. Other tests may keep the disk so busy that Redis does not answer for a moment.
    pub fn status(&self) -> StatusReport {
        wait_for("there is a status", || match self.get("/status") {
            (200, text) => Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"))),
            (503, text) if text.contains("(store_silent)") => None,
            other => panic!("{other:?}"),
        })
    }

    /// Whether it says that it is ready.
    pub fn is_ready(&self) -> bool {
        match self.get("/readyz") {
            (200, _) => true,
            (503, _) => false,
            other => panic!("{other:?}"),
        }
    }

    pub fn wait_until_ready(&self) {
        wait_until("it is ready", || self.is_ready());
    }

    /// The name of the leader of the first ring, if the sidecar knows one.
    pub fn leader(&self) -> Option<String> {
        self.status().rings.into_iter().next()?.leader
    }

    pub fn pointer(&self) -> u64 {
        self.status().rings[0].pointer.0
    }

    /// The status of a group, if it is there.
    pub fn group(&self, name: &str) -> Option<GroupReport> {
        self.status().groups.into_iter().find(|group| group.group == name)
    }

    /// Subscribers of all groups.
    pub fn subscribers(&self) -> u64 {
        self.status().groups.iter().map(|group| group.subscribers).sum()
    }

    pub fn wait_for_subscribers(&self, count: u64) {
        wait_until("the subscribers are there", || self.subscribers() == count);
    }

    /// Waits until a group has settled all its batches.
    pub fn wait_for_settled(&self, group: &str) {
        wait_until("everything is settled", || self.group(group).is_some_and(|group| group.outbox_batches == 0));
    }

    /// Waits until the pointer has just come to `tick`; returns a moment at most some milliseconds after that.
    pub fn wait_for_pointer(&self, tick: u64) -> Instant {
        wait_until("the pointer comes", || self.pointer() >= tick);
        Instant::now()
    }

    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The id of its process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Fills the pipe of its log, so that the next line waits for a reader. Returns when nothing fits any more.
    pub fn fill_log_pipe(&self) {
        let lines = [4_096, 64].map(|length| [&vec![b'.'; length - 1][..], b"\n"].concat());
        // A pipe that its reader has closed cannot be opened.
        let Ok(mut pipe) = self.log_pipe() else { return };
        // The reader takes what it has room for, once.
        for _ in 0..20 {
            for line in &lines {
                while pipe.write(line).is_ok() {}
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Writes a line to its log, if that has a reader and room.
    pub fn write_to_log(&self, line: &str) {
        let _ = self.log_pipe().and_then(|mut pipe| pipe.write_all(line.as_bytes()));
    }

    fn log_pipe(&self) -> io::Result<File> {
        let path = format!("/proc/{}/fd/2", self.process.id());
        let mut options = OpenOptions::new();
        options.write(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
        options.open(path)
    }

    /// Stalls it; returns when it does.
    pub fn stop(&self) -> Instant {
        self.signal(Signal::STOP);
        wait_until("every thread is stopped", || self.process.is_stopped());
        Instant::now()
    }

    /// Has it go on; returns a moment before that.
    pub fn go_on(&self) -> Instant {
        let before = Instant::now();
        self.signal(Signal::CONT);
        before
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Waits for its end after a signal, and for that of its log.
    pub fn exit(&mut self) -> ExitStatus {
        let status = self.process.exit();
        self.log.whole();
        status
    }

    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.process.exited()
    }

    /// Waits for the end of its drain, and asserts that the exit code is 1 exactly if the drain lost something.
    #[track_caller]
    pub fn end_of_drain(&mut self) {
        let code = self.exit().code();
        let log = self.log.whole();
        assert_eq!(code, Some(i32::from(log.contains("the drain lost "))), "{log}");
    }

    /// Drains it; returns how long that took.
    pub fn terminate(&mut self) -> Duration {
        let begun = Instant::now();
        self.signal(Signal::TERM);
        self.end_of_drain();
        begun.elapsed()
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the sidecar at {}\n{}\n---", self.listen, self.log.text());
        }
    }
}
