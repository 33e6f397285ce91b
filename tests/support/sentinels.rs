//! Real Redis Sentinels, which watch Redis servers of the same test.

use std::collections::HashMap;
use std::fs;
use std::net::IpAddr;
use std::process::{Command, Stdio};

use redis::{FromRedisValue, RedisResult};
use rustix::process::Signal;
use tempfile::TempDir;

use super::network::{self, Network};
use super::process::{Log, Process};
use super::redis::{Redis, ask, connect_to, free_port};
use super::{packages, wait_until};

/// The name of the primary.
pub const NAME: &str = "im";

/// How long a Redis must be silent for a Sentinel to take it for down, in ms.
const DOWN_AFTER_MS: u32 = 500;

/// A Sentinel that ends with its test. Its log is printed if the test fails.
#[derive(Debug)]
pub struct Sentinel {
    pub address: IpAddr,
    pub port: u16,
    process: Process,
    log: Log,
    _folder: TempDir,
}

impl Sentinel {
    /// One that watches this primary, and takes it for down when `quorum` Sentinels do.
    pub fn watching(primary: &Redis, quorum: usize, more: &str) -> Sentinel {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let file = folder.path().join("sentinel.conf");
        let (address, mut sentinel) = (network::here(), None);
        wait_until("a Sentinel has a port", || {
            let port = free_port();
            let lines = [
                format!("port {port}"),
                format!("bind {address}"),
                String::from("protected-mode no"),
                format!("dir {}", folder.path().display()),
                format!("sentinel monitor {NAME} {} {} {quorum}", primary.address, primary.port_for_peers()),
                format!("sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}"),
                format!("sentinel failover-timeout {NAME} 3000"),
                String::from(more),
            ];
            fs::write(&file, lines.join("\n") + "\n").expect("the folder can be written to");
            let mut command = Command::new(packages::redis_server());
            command.env_clear().arg(&file).arg("--sentinel");
            let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut process = Process::spawn(command);
            let log = Log::of(process.stdout());
            let is_up = log.line("Sentinel ID is").is_some();
            assert!(is_up || log.text().contains("ddress already in use"), "it did not start: {}", log.text());
            sentinel = is_up.then_some((port, process, log));
            is_up
        });
        let (port, process, log) = sentinel.expect("it is up");
        Sentinel { address, port, process, log, _folder: folder }
    }

    /// The answer to a command.
    #[track_caller]
    pub fn command<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_command(words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    pub fn try_command<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        ask(&mut connect_to(self.address, self.port)?, words)
    }

    /// Asks it for a failover, as soon as it knows a replica well enough.
    pub fn fail_over(&self) {
        wait_until("a failover begins", || self.try_command::<()>(&["SENTINEL", "FAILOVER", NAME]).is_ok());
    }

    /// The port of the primary, as it has it.
    pub fn primary(&self) -> u16 {
        let (_, port): (String, u16) = self.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]);
        port
    }

    /// A number that it has of the primary.
    pub fn number(&self, name: &str) -> usize {
        let told: HashMap<String, String> = self.command(&["SENTINEL", "MASTER", NAME]);
        told[name].parse().expect("it is a number")
    }

    /// Stalls it.
    pub fn stop(&self) {
        self.process.signal(Signal::STOP);
        wait_until("the Sentinel is stopped", || self.process.is_stopped());
    }

    /// Has it go on.
    pub fn go_on(&self) {
        self.process.signal(Signal::CONT);
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the Sentinel at port {}\n{}\n---", self.port, self.log.text());
        }
    }
}

/// The `--store` of a sidecar that asks these.
pub fn store<'a>(sentinels: impl IntoIterator<Item = &'a Sentinel>) -> String {
    let addresses = sentinels.into_iter().map(|sentinel| format!("{}:{}", sentinel.address, sentinel.port));
    format!("redis-sentinel://{}/0?master={NAME}", addresses.collect::<Vec<String>>().join(","))
}

/// A primary with a replica, and three Sentinels that know each other and both.
#[derive(Debug)]
pub struct Watched {
    pub primary: Redis,
    pub replica: Redis,
    pub sentinels: [Sentinel; 3],
}

impl Watched {
    pub fn start() -> Watched {
        Watched::of(Redis::start(), Redis::start())
    }

    /// The same with these servers, which may be on other hosts than the Sentinels.
    pub fn of(primary: Redis, replica: Redis) -> Watched {
        replica.follow(&primary);
        let sentinels = [(); 3].map(|()| Sentinel::watching(&primary, 2, ""));
        Watched { primary, replica, sentinels }.once_known()
    }

    /// The primary and a Sentinel on the first host of a network, the replica and the other Sentinels on the second.
    pub fn across(network: &Network) -> Watched {
        let [here, there] = [network.host(0), network.host(1)];
        let primary = here.run(Redis::start);
        let replica = there.run(|| {
            let replica = Redis::start();
            replica.follow(&primary);
            replica
        });
        let sentinels = [here, there, there].map(|host| host.run(|| Sentinel::watching(&primary, 2, "")));
        let watched = Watched { primary, replica, sentinels };
        here.run(|| watched.once_known())
    }

    fn once_known(self) -> Watched {
        wait_until("the Sentinels know each other and the replica", || {
            let knows = |sentinel: &Sentinel| {
                (sentinel.number("num-other-sentinels"), sentinel.number("num-slaves")) == (2, 1)
            };
            self.sentinels.iter().all(knows)
        });
        self
    }

    /// The `--store` of a sidecar.
    pub fn store(&self) -> String {
        store(&self.sentinels)
    }

    /// Waits until all Sentinels name the replica as the primary.
    pub fn wait_for_failover(&self) {
        wait_until("the replica is the primary", || {
            self.sentinels.iter().all(|sentinel| sentinel.primary() == self.replica.port)
        });
    }
}
