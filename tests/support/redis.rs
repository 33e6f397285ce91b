//! Real Redis servers, each of its test alone: started, stopped, killed, restarted, and asked.

use std::fs;
use std::net::{IpAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use redis::{Connection, FromRedisValue, RedisResult};
use rustix::process::Signal;
use tempfile::TempDir;

use super::certificates::Files;
use super::clock::{Clock, FakeClock};
use super::process::{Log, Process};
use super::{PATIENCE, network, packages, wait_until};

/// The log line of a server that is ready.
const READY: &str = "Ready to accept connections";

/// Ports below those that the system gives to outgoing connections: while a server is away, nothing else can
/// take its port, not even a connection to that port itself.
const PORTS: std::ops::Range<u16> = 10_000..32_000;

/// The files of a server that ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keeps {
    /// Nothing.
    Nothing,
    /// Everything: an append-only file that is synchronised before every answer.
    Everything,
}

/// The TLS files of a server or a Sentinel.
#[derive(Clone, Debug)]
pub struct Tls {
    pub port: u16,
    settings: Vec<(&'static str, String)>,
}

impl Tls {
    /// At a free port, with a certificate and whom to trust; also to its peers, who all may ask.
    pub fn with(files: &Files, trusted: &Path) -> Tls {
        let path = |path: &Path| path.display().to_string();
        let settings = vec![
            ("tls-cert-file", path(&files.certificate)),
            ("tls-key-file", path(&files.key)),
            ("tls-ca-cert-file", path(trusted)),
            ("tls-auth-clients", String::from("no")),
            ("tls-replication", String::from("yes")),
            ("tls-cluster", String::from("yes")),
        ];
        Tls { port: free_port(), settings }
    }

    /// Its settings, by name.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.settings.iter().cloned().chain([("tls-port", self.port.to_string())])
    }
}

/// A server that ends with its test. Its log is printed if the test fails.
#[derive(Debug)]
pub struct Redis {
    /// Where it is, also for other hosts of a network.
    pub address: IpAddr,
    pub port: u16,
    folder: TempDir,
    keeps: Keeps,
    /// Where the other nodes of its Cluster find it.
    bus_port: Option<u16>,
    tls: Option<Tls>,
    clock: Option<FakeClock>,
    /// None while it is away.
    process: Option<Process>,
    logs: Vec<Log>,
}

impl Redis {
    /// A server that keeps nothing when it ends.
    pub fn start() -> Redis {
        Redis::with(Keeps::Nothing, None)
    }

    /// A server that keeps everything.
    pub fn with_append_only_file() -> Redis {
        Redis::with(Keeps::Everything, None)
    }

    /// A server that believes another clock.
    pub fn with_clock(clock: Clock) -> Redis {
        Redis::with(Keeps::Nothing, Some(clock))
    }

    /// A server that speaks TLS too, and to its peers alone.
    pub fn speaking_tls(files: &Files, trusted: &Path) -> Redis {
        Redis::made(Keeps::Nothing, None, None, Some(Tls::with(files, trusted)))
    }

    /// A node of a Cluster that has no other node yet.
    pub fn of_a_cluster(tls: Option<Tls>) -> Redis {
        Redis::made(Keeps::Nothing, None, Some(free_port()), tls)
    }

    /// A server that believes another clock, and keeps everything in a folder below this one.
    pub fn in_folder(parent: &Path, clock: Clock) -> Redis {
        Redis::made_below(parent, clock, None)
    }

    /// The same, as a node of a Cluster that has no other node yet.
    pub fn of_a_cluster_in_folder(parent: &Path, clock: Clock) -> Redis {
        Redis::made_below(parent, clock, Some(free_port()))
    }

    fn made_below(parent: &Path, clock: Clock, bus_port: Option<u16>) -> Redis {
        let folder = tempfile::tempdir_in(parent).expect("a folder can be made");
        Redis::made_in(folder, Keeps::Everything, Some(clock), bus_port, None)
    }

    pub fn with(keeps: Keeps, clock: Option<Clock>) -> Redis {
        Redis::made(keeps, clock, None, None)
    }

    fn made(keeps: Keeps, clock: Option<Clock>, bus_port: Option<u16>, tls: Option<Tls>) -> Redis {
        let folder = tempfile::tempdir().expect("a folder can be made");
        Redis::made_in(folder, keeps, clock, bus_port, tls)
    }

    fn made_in(
        folder: TempDir,
        keeps: Keeps,
        clock: Option<Clock>,
        bus_port: Option<u16>,
        tls: Option<Tls>,
    ) -> Redis {
        let clock = clock.map(FakeClock::new);
        let (address, process, logs) = (network::here(), None, Vec::new());
        let mut redis = Redis { address, port: 0, folder, keeps, bus_port, tls, clock, process, logs };
        wait_until("a port is free", || {
            redis.port = free_port();
            redis.bus_port = redis.bus_port.map(|_| free_port());
            redis.tls.iter_mut().for_each(|tls| tls.port = free_port());
            redis.spawn()
        });
        redis
    }

    pub fn url(&self) -> String {
        format!("redis://{}:{}/", self.address, self.port)
    }

    /// Stalls it; returns when it does.
    pub fn stop(&self) {
        self.process().signal(Signal::STOP);
        wait_until("the server is stopped", || self.process().is_stopped());
    }

    /// Has it go on.
    pub fn go_on(&self) {
        self.process().signal(Signal::CONT);
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        self.process.take().expect("it runs").kill();
    }

    /// Starts it again on the same port with what it kept, after killing it if it runs.
    pub fn restart(&mut self) {
        if self.process.is_some() {
            self.kill();
        }
        assert!(self.spawn(), "port {} was taken meanwhile", self.port);
    }

    /// Starts it again on the same port without any data, after killing it if it runs.
    pub fn restart_empty(&mut self) {
        if self.process.is_some() {
            self.kill();
        }
        empty(self.folder.path());
        self.restart();
    }

    /// A copy of what it keeps, as a backup makes one while it runs.
    pub fn snapshot(&self) -> TempDir {
        // The files must not change their names meanwhile.
        self.command::<()>(&["CONFIG", "SET", "auto-aof-rewrite-percentage", "0"]);
        wait_until("no file is rewritten", || self.info_number("persistence", "aof_rewrite_in_progress") == 0);
        let copy = tempfile::tempdir().expect("a folder can be made");
        copy_files(self.folder.path(), copy.path());
        self.command::<()>(&["CONFIG", "SET", "auto-aof-rewrite-percentage", "100"]);
        copy
    }

    /// Starts it again on the same port with what a snapshot holds, after killing it if it runs.
    pub fn restore(&mut self, snapshot: &TempDir) {
        if self.process.is_some() {
            self.kill();
        }
        empty(self.folder.path());
        copy_files(snapshot.path(), self.folder.path());
        self.restart();
    }

    /// Whether its process runs, or is stalled.
    pub fn runs(&self) -> bool {
        self.process.is_some()
    }

    /// The answer to a command.
    #[track_caller]
    pub fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_command(words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// The answer to a command, or why there is none.
    pub fn try_command<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        ask(&mut self.connect()?, words)
    }

    /// A connection that gives up after [`PATIENCE`].
    pub fn connect(&self) -> RedisResult<Connection> {
        connect_to(self.address, self.port)
    }

    /// Has it follow a primary, with all that this has; returns when it is in step.
    pub fn follow(&self, primary: &Redis) {
        primary.command::<()>(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
        let (address, port) = (primary.address.to_string(), primary.port_for_peers().to_string());
        self.command::<()>(&["REPLICAOF", &address, &port]);
        wait_until("the replica is in step", || self.info("replication").contains("master_link_status:up"));
    }

    /// A section of INFO: `name:value`, a line each.
    pub fn info(&self, section: &str) -> String {
        self.command(&["INFO", section])
    }

    /// A number in a section of INFO.
    #[track_caller]
    pub fn info_number(&self, section: &str, name: &str) -> u64 {
        let info = self.info(section);
        let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name} in {info}"))
    }

    /// Where Redis and Sentinels find it: the port that speaks TLS, if it has one.
    pub fn port_for_peers(&self) -> u16 {
        self.tls.as_ref().map_or(self.port, |tls| tls.port)
    }

    /// Where the other nodes of its Cluster find it.
    pub fn bus_port(&self) -> u16 {
        self.bus_port.expect("it is a node of a Cluster")
    }

    /// How many keys it holds.
    pub fn dbsize(&self) -> u64 {
        self.command(&["DBSIZE"])
    }

    /// How many bytes it has allocated.
    pub fn used_memory(&self) -> u64 {
        self.info_number("memory", "used_memory")
    }

    /// The commands that took at least 5 ms, the latest first: how long each took in µs, and its name.
    pub fn slowlog(&self) -> Vec<(u64, String)> {
        type Entry = (u64, u64, u64, Vec<String>, String, String);
        let entries: Vec<Entry> = self.command(&["SLOWLOG", "GET", "1024"]);
        entries.into_iter().map(|(_, _, micros, mut words, _, _)| (micros, words.swap_remove(0))).collect()
    }

    /// Its clock, as Unix time in ms.
    pub fn unix_ms(&self) -> u64 {
        let (seconds, micros): (u64, u64) = self.command(&["TIME"]);
        seconds * 1_000 + micros / 1_000
    }

    /// Has its clock stop at this Unix time in ms.
    pub fn set_frozen(&self, unix_ms: u64) {
        self.fake_clock().set(Clock::Frozen(unix_ms));
        assert_eq!(self.unix_ms(), unix_ms, "the clock stands where it was set");
    }

    /// The same, for when it starts again.
    pub fn set_offset_of_next_start(&self, seconds: i64) {
        self.fake_clock().set(Clock::Offset(seconds));
    }

    /// Has its clock run, so many seconds fast, or slow where they are negative.
    pub fn set_offset(&self, seconds: i64) {
        self.fake_clock().set(Clock::Offset(seconds));
        let true_ms = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970").as_millis();
        let ahead_ms =
            i128::from(self.unix_ms()) - i128::try_from(true_ms).expect("it is before the year 292 million");
        let off_by_ms = (ahead_ms - i128::from(seconds) * 1_000).abs();
        assert!(off_by_ms < 30_000, "the clock is ahead by {ahead_ms} ms, and not by {seconds} s");
    }

    /// Has its clock run, so many ms fast.
    pub fn set_fast_by_ms(&self, ms: u64) {
        self.fake_clock().set(Clock::FastByMs(ms));
    }

    fn fake_clock(&self) -> &FakeClock {
        self.clock.as_ref().expect("the server was started with a clock")
    }

    fn process(&self) -> &Process {
        self.process.as_ref().expect("it runs")
    }

    /// Starts it, and returns once it answers; false if its port is taken.
    fn spawn(&mut self) -> bool {
        let mut process = Process::spawn(&mut self.server());
        let log = Log::of(process.stdout());
        self.logs.push(log.clone());
        if log.line(READY).is_none() {
            assert!(log.text().contains("ddress already in use"), "it did not start: {}", log.text());
            return false;
        }
        self.process = Some(process);
        wait_until("it answers", || self.try_command::<String>(&["PING"]).is_ok_and(|answer| answer == "PONG"));
        true
    }

    fn server(&self) -> Command {
        let mut command = Command::new(packages::redis_server());
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let (address, port) = (self.address.to_string(), self.port.to_string());
        command.args(["--port", &port, "--bind", &address, "--protected-mode", "no"]);
        command.arg("--dir").arg(self.folder.path());
        command.args(["--save", "", "--maxmemory-policy", "noeviction"]);
        command.args(["--slowlog-log-slower-than", "5000", "--slowlog-max-len", "1024"]);
        command.args(["--enable-debug-command", "local"]);
        match self.keeps {
            Keeps::Nothing => command.args(["--appendonly", "no"]),
            Keeps::Everything => command.args(["--appendonly", "yes", "--appendfsync", "always"]),
        };
        if let Some(bus_port) = self.bus_port {
            command.args(["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]);
            command.args(["--cluster-port", &bus_port.to_string()]);
        }
        for (name, value) in self.tls.iter().flat_map(Tls::settings) {
            command.args([&format!("--{name}"), &value]);
        }
        if let Some(clock) = &self.clock {
            clock.rule_with_the_allocator_of_the_c_library(&mut command);
        }
        command
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs: Vec<String> = self.logs.iter().map(Log::text).collect();
            eprintln!("--- log of Redis at port {}\n{}\n---", self.port, logs.join("\n--- restarted\n"));
        }
    }
}

/// A connection that gives up after [`PATIENCE`].
pub fn connect_to(address: IpAddr, port: u16) -> RedisResult<Connection> {
    let client = redis::Client::open(format!("redis://{address}:{port}/"))?;
    let connection = client.get_connection_with_timeout(PATIENCE)?;
    connection.set_read_timeout(Some(PATIENCE))?;
    connection.set_write_timeout(Some(PATIENCE))?;
    Ok(connection)
}

/// The answer to a command over a connection.
pub fn ask<T: FromRedisValue>(connection: &mut Connection, words: &[&str]) -> RedisResult<T> {
    let (name, arguments) = words.split_first().expect("a command has a name");
    redis::cmd(name).arg(arguments).query(connection)
}

/// A port that nobody listens on now.
pub fn free_port() -> u16 {
    let tries = std::iter::repeat_with(|| rand::random_range(PORTS));
    let mut free = tries.filter(|port| TcpListener::bind((network::here(), *port)).is_ok());
    free.next().expect("the tries do not end")
}

fn empty(folder: &Path) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("the folder can be read").path();
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.unwrap_or_else(|error| panic!("cannot remove {}: {error}", path.display()));
    }
}

fn copy_files(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("the folder is there") {
        let path = entry.expect("the folder can be read").path();
        let copy = to.join(path.file_name().expect("an entry has a name"));
        if path.is_dir() {
            fs::create_dir_all(&copy).expect("a folder can be made");
            copy_files(&path, &copy);
        } else {
            fs::copy(&path, &copy).unwrap_or_else(|error| panic!("cannot copy {}: {error}", path.display()));
        }
    }
}
