//! A real Redis Cluster: three primaries, which share the slots evenly, and a replica of the one that has ring 0.

use std::path::Path;

use super::certificates::Files;
use super::network::Network;
use super::redis::{Redis, Tls};
use super::wait_until;

const SLOTS: u16 = 16_384;

/// Its nodes.
#[derive(Debug)]
pub struct Cluster {
    /// The one that has ring 0 of the default namespace comes first.
    pub primaries: Vec<Redis>,
    pub replica: Redis,
}

impl Cluster {
    pub fn start() -> Cluster {
        Cluster::with(|_| Redis::of_a_cluster(None))
    }

    /// The primary that has ring 0 on the first host of a network, the other nodes on the second.
    pub fn across(network: &Network) -> Cluster {
        let make = |number| {
            let host = network.host(usize::from(number > 0));
            host.run(|| Redis::of_a_cluster(None))
        };
        let cluster = network.host(0).run(|| Cluster::with(make));
        assert_eq!(cluster.primaries[0].address, network.host(0).address, "ring 0 is where the first slots are");
        cluster
    }

    /// One whose nodes speak TLS too, and to each other alone.
    pub fn speaking_tls(files: &Files, trusted: &Path) -> Cluster {
        Cluster::with(|_| Redis::of_a_cluster(Some(Tls::with(files, trusted))))
    }

    /// One of four nodes, of which number 3 becomes the replica of number 0.
    pub fn with(make: impl Fn(u8) -> Redis) -> Cluster {
        let mut primaries: Vec<Redis> = (0..3).map(&make).collect();
        let replica = make(3);
        let share = SLOTS.div_ceil(3);
        for (first, primary) in (0..SLOTS).step_by(share.into()).zip(&primaries) {
            let last = (first + share).min(SLOTS) - 1;
            primary.command::<()>(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
        }
        let with_ring_0 = slot_of_ring(&primaries[0], 0) / share;
        primaries.rotate_left(with_ring_0.into());
        for (epoch, node) in (1..).zip(primaries.iter().chain([&replica])) {
            node.command::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &i32::to_string(&epoch)]);
            let bus_port = primaries[0].bus_port().to_string();
            let (address, port) = (primaries[0].address.to_string(), primaries[0].port_for_peers().to_string());
            node.command::<()>(&["CLUSTER", "MEET", &address, &port, &bus_port]);
        }
        let cluster = Cluster { primaries, replica };
        cluster.wait_until_all_say("all know each other", |info| {
            info.contains("cluster_known_nodes:4") && info.contains("cluster_state:ok")
        });
        let id: String = cluster.primaries[0].command(&["CLUSTER", "MYID"]);
        cluster.replica.command::<()>(&["CLUSTER", "REPLICATE", &id]);
        wait_until("the replica is in step and known", || {
            cluster.replica.info("replication").contains("master_link_status:up")
                && cluster
                    .primaries
                    .iter()
                    .all(|node| node.command::<String>(&["CLUSTER", "NODES"]).contains("slave"))
        });
        cluster
    }

    fn wait_until_all_say(&self, what: &str, is_right: impl Fn(&str) -> bool) {
        let nodes = || self.primaries.iter().chain([&self.replica]);
        wait_until(what, || nodes().all(|node| is_right(&node.command::<String>(&["CLUSTER", "INFO"]))));
    }

    /// The `--store` of a sidecar that knows some of its nodes.
    pub fn store<'a>(nodes: impl IntoIterator<Item = &'a Redis>) -> String {
        let addresses = nodes.into_iter().map(|node| format!("{}:{}", node.address, node.port));
        format!("redis-cluster://{}", addresses.collect::<Vec<String>>().join(","))
    }

    /// Begins to move the slot of ring 0 to the second primary, and moves none of its keys.
    pub fn open_slot_of_ring_0(&self) {
        open_slot(0, &self.primaries[0], &self.primaries[1]);
    }

    /// Takes that back.
    pub fn close_slot_of_ring_0(&self) {
        for node in &self.primaries[..2] {
            node.command::<()>(&["CLUSTER", "SETSLOT", &slot_of_ring(node, 0).to_string(), "STABLE"]);
        }
    }

    /// Moves ring 0 to the second primary, as a resharding does.
    pub fn move_ring_0(&self) {
        Cluster::move_ring(0, &self.primaries[0], &self.primaries[1]);
    }

    /// Whether the slot of a ring belongs to a node.
    pub fn owns_ring(node: &Redis, ring: u16) -> bool {
        let id: String = node.command(&["CLUSTER", "MYID"]);
        let nodes: String = node.command(&["CLUSTER", "NODES"]);
        let slot = slot_of_ring(node, ring);
        let line = nodes.lines().find(|line| line.starts_with(&id)).expect("a node knows itself");
        line.split(' ').skip(8).filter(|range| !range.starts_with('[')).any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let number = |text: &str| text.parse::<u16>().expect("a slot is a number");
            (number(first)..=number(last)).contains(&slot)
        })
    }

    /// Moves a ring from one node to another.
    pub fn move_ring(ring: u16, from: &Redis, to: &Redis) {
        open_slot(ring, from, to);
        let slot = slot_of_ring(from, ring).to_string();
        let id_of_to: String = to.command(&["CLUSTER", "MYID"]);
        loop {
            let keys: Vec<String> = from.command(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]);
            if keys.is_empty() {
                break;
            }
            let (address, port) = (to.address.to_string(), to.port.to_string());
            let move_them = ["MIGRATE", &address, &port, "", "0", "5000", "KEYS"];
            let words: Vec<&str> = move_them.into_iter().chain(keys.iter().map(String::as_str)).collect();
            // A Cluster that a node is missing of takes nothing for a while.
            wait_until("the keys are moved", || from.try_command::<()>(&words).is_ok());
        }
        for node in [to, from] {
            let give = ["CLUSTER", "SETSLOT", &slot, "NODE", &id_of_to];
            wait_until("the slot is given", || node.try_command::<()>(&give).is_ok());
        }
    }
}

/// The slot of a ring of the default namespace.
fn slot_of_ring(node: &Redis, ring: u16) -> u16 {
    node.command(&["CLUSTER", "KEYSLOT", &format!("{{ackwheel:{ring}}}:meta")])
}

/// Begins to move the slot of a ring.
fn open_slot(ring: u16, from: &Redis, to: &Redis) {
    let slot = slot_of_ring(from, ring).to_string();
    let [id_of_from, id_of_to] = [from, to].map(|node| node.command::<String>(&["CLUSTER", "MYID"]));
    to.command::<()>(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id_of_from]);
    from.command::<()>(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id_of_to]);
}
