//! A network of hosts, each a network namespace, whose links can be cut and healed.
//!
//! ```text
//!   host 10.0.0.1 ── port1 ─┐                       ┌─ port3 ── host 10.0.0.3
//!                           ├─ side0        side1 ──┤
//!   host 10.0.0.2 ── port2 ─┘                       └─ port4 ── host 10.0.0.4
//! ```
//!
//! A cut moves the ports of one side to another bridge: the hosts see no link go down, frames just never arrive. The
//! namespaces have no name once they are made, so the kernel removes them with the test and the processes in them.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::{Command, Stdio, id};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::packages;
use super::skipped::skip;

thread_local! {
    static HERE: Cell<IpAddr> = const { Cell::new(IpAddr::V4(Ipv4Addr::LOCALHOST)) };
}

/// The address under which others reach what this thread starts: that of its host, or loopback outside a network.
pub fn here() -> IpAddr {
    HERE.get()
}

/// Hosts that reach each other, until links are cut.
#[derive(Debug)]
pub struct Network {
    switch: Namespace,
    hosts: Vec<Host>,
}

/// A host of a network.
#[derive(Debug)]
pub struct Host {
    namespace: Namespace,
    pub address: IpAddr,
    /// The number of its port at the switch.
    port: u8,
}

#[derive(Debug)]
struct Namespace(File);

impl Network {
    /// A network of so many hosts; none, and said so, where this process may not make one.
    pub fn of(hosts: u8) -> Option<Network> {
        packages::optional("ip", "iproute2")?;
        let switch = Namespace::make().or_else(|| {
            skip("a partition: making network namespaces is not permitted here, run it as root");
            None
        })?;
        let make = |port: u8| {
            let namespace = Namespace::make().expect("the first could be made");
            Host { namespace, address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, port)), port }
        };
        let network = Network { switch, hosts: (1..=hosts).map(make).collect() };
        let mut wiring: Vec<String> = (0..=1)
            .map(|side| format!("link add side{side} type bridge forward_delay 0\nlink set side{side} up\n"))
            .collect();
        wiring.extend(network.hosts.iter().map(|Host { namespace, port, .. }| {
            let peer = namespace.path();
            format!(
                "link add port{port} type veth peer name eth0 netns {peer}\n\
                 link set port{port} master side0\nlink set port{port} up\n"
            )
        }));
        network.switch.run_ip(&wiring.concat());
        for Host { namespace, address, .. } in &network.hosts {
            namespace.run_ip(&format!("link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up\n"));
        }
        Some(network)
    }

    pub fn host(&self, number: usize) -> &Host {
        &self.hosts[number]
    }

    /// Cuts these hosts off from all others. Among themselves, and among the others, they are reached as before.
    pub fn cut_off(&self, hosts: &[&Host]) {
        let is_among = |host: &Host| hosts.iter().any(|one| one.port == host.port);
        self.attach(|host| u8::from(is_among(host)));
    }

    /// Has all hosts reach each other again.
    pub fn heal(&self) {
        self.attach(|_| 0);
    }

    fn attach(&self, side_of: impl Fn(&Host) -> u8) {
        let moves =
            self.hosts.iter().map(|host| format!("link set port{} master side{}\n", host.port, side_of(host)));
        self.switch.run_ip(&moves.collect::<String>());
    }
}

impl Host {
    /// Lets nothing more of this host reach another, while all others reach both as before.
    pub fn lose(&self, other: &Host) {
        self.namespace.run_ip(&format!("route add unreachable {}\n", other.address));
    }

    /// Does something on this host: sockets that are opened and processes that are started there stay there.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.namespace.run(self.address, work)
    }
}

impl Namespace {
    /// None where that is not allowed. Its name is taken back at once: it lives as long as something has it open.
    fn make() -> Option<Namespace> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("ackwheel-{}-{}", id(), MADE.fetch_add(1, Ordering::Relaxed));
        let ip = |verb: &str| {
            let mut command = Command::new("ip");
            command.args(["netns", verb, &name]).stdin(Stdio::null()).stdout(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        if !ip("add") {
            return None;
        }
        let file = File::open(Path::new("/run/netns").join(&name)).expect("ip put it there");
        assert!(ip("delete"), "{name} keeps its name");
        Some(Namespace(file))
    }

    /// The path that `ip` takes in place of a name.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", id(), self.0.as_raw_fd())
    }

    fn run<T: Send>(&self, address: IpAddr, work: impl FnOnce() -> T + Send) -> T {
        let entered = || {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(self.0.as_fd(), kind).expect("a thread may enter it");
            HERE.set(address);
            work()
        };
        thread::scope(|scope| scope.spawn(entered).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Has `ip` carry out lines of commands.
    fn run_ip(&self, lines: &str) {
        self.run(IpAddr::V4(Ipv4Addr::LOCALHOST), || {
            let mut command = Command::new("ip");
            let mut child = command.args(["-batch", "-"]).stdin(Stdio::piped()).spawn().expect("ip can be run");
            let mut stdin = child.stdin.take().expect("it is piped");
            stdin.write_all(lines.as_bytes()).expect("ip reads");
            drop(stdin);
            assert!(child.wait().expect("ip ends").success(), "ip failed with {lines}");
        });
    }
}
