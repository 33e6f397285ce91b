//! The Redis servers of a run, and the failovers between two of them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::faults::Topology;
use super::shared::Side;
use crate::support::clock::Clock;
use crate::support::cluster::Cluster;
use crate::support::disk::Disk;
use crate::support::network::Network;
use crate::support::redis::Redis;
use crate::support::sentinels::{NAME, Sentinel, Watched};

/// Rings on a Cluster, so that more than one node has a wheel. Elsewhere one ring is right.
const RINGS_OF_A_CLUSTER: u16 = 3;

#[derive(Debug)]
enum Servers {
    None,
    One(Redis),
    Sentinel(Box<Watched>),
    Cluster(Cluster),
}

/// The servers, by number: 0 and 1 are a primary and its replica, which change roles.
#[derive(Debug)]
pub struct Store {
    servers: Servers,
    /// Which of 0 and 1 is the primary.
    pub primary: usize,
    /// The disk with the files of the servers, if it can stall. Dropped after the servers.
    disk: Option<Disk>,
    network: Option<Arc<Network>>,
}

/// Does something on a side of the network, if there is one.
pub fn on_side<T: Send>(network: Option<&Arc<Network>>, side: Side, work: impl FnOnce() -> T + Send) -> T {
    match network {
        Some(network) => network.host(side).run(work),
        None => work(),
    }
}

/// Server 0 is alone with a sidecar.
fn side_of_server(number: usize) -> Side {
    usize::from(number == 0)
}

impl Store {
    pub fn start(topology: Topology, network: Option<Arc<Network>>) -> Store {
        let disk = Disk::mount();
        let folder = disk.as_ref().map_or_else(std::env::temp_dir, |disk| disk.path().to_owned());
        let start = |number: u8, make: fn(&Path, Clock) -> Redis| {
            on_side(network.as_ref(), side_of_server(number.into()), || make(&folder, Clock::Offset(0)))
        };
        let servers = match topology {
            Topology::Memory => Servers::None,
            Topology::Redis => Servers::One(start(0, Redis::in_folder)),
            Topology::Sentinel => {
                Servers::Sentinel(Box::new(Watched::of(start(0, Redis::in_folder), start(1, Redis::in_folder))))
            }
            Topology::Cluster => {
                Servers::Cluster(Cluster::with(|node| start(node, Redis::of_a_cluster_in_folder)))
            }
        };
        Store { servers, primary: 0, disk, network }
    }

    pub fn disk(&self) -> Option<&Disk> {
        self.disk.as_ref()
    }

    pub fn is_shared(&self) -> bool {
        !matches!(self.servers, Servers::None)
    }

    /// The flags of a sidecar on it, if its wheel is not in memory. One Redis is reached through a proxy.
    pub fn flags(&self, proxy: Option<String>) -> Vec<String> {
        let url = match &self.servers {
            Servers::None => return Vec::new(),
            Servers::One(redis) => proxy.unwrap_or_else(|| redis.url()),
            Servers::Sentinel(watched) => watched.store(),
            Servers::Cluster(cluster) => Cluster::store(cluster.primaries.iter().chain([&cluster.replica])),
        };
        let mut flags = vec![String::from("--store"), url];
        if matches!(self.servers, Servers::Cluster(_)) {
            flags.extend([String::from("--rings"), RINGS_OF_A_CLUSTER.to_string()]);
        }
        flags
    }

    pub fn server(&self, number: usize) -> &Redis {
        match (&self.servers, number) {
            (Servers::One(redis), 0) => redis,
            (Servers::Sentinel(watched), 0) => &watched.primary,
            (Servers::Sentinel(watched), 1) => &watched.replica,
            (Servers::Cluster(cluster), 0) => &cluster.primaries[0],
            (Servers::Cluster(cluster), 1) => &cluster.replica,
            (Servers::Cluster(cluster), _) => &cluster.primaries[number - 1],
            _ => panic!("there is no server {number}"),
        }
    }

    /// Starts a server again with what it kept.
    pub fn restart(&mut self, number: usize) {
        let network = self.network.clone();
        let server = self.server_mut(number);
        on_side(network.as_ref(), side_of_server(number), || server.restart());
    }

    /// Cuts server 0 and the sidecar beside it off from everything else.
    pub fn cut(&self) {
        let network = self.network.as_ref().expect("there is a network");
        network.cut_off(&[network.host(1)]);
    }

    pub fn heal(&self) {
        self.network.as_ref().expect("there is a network").heal();
    }

    pub fn can_be_cut(&self) -> bool {
        self.network.is_some()
    }

    pub fn server_mut(&mut self, number: usize) -> &mut Redis {
        match (&mut self.servers, number) {
            (Servers::One(redis), 0) => redis,
            (Servers::Sentinel(watched), 0) => &mut watched.primary,
            (Servers::Sentinel(watched), 1) => &mut watched.replica,
            (Servers::Cluster(cluster), 0) => &mut cluster.primaries[0],
            (Servers::Cluster(cluster), 1) => &mut cluster.replica,
            (Servers::Cluster(cluster), _) => &mut cluster.primaries[number - 1],
            _ => panic!("there is no server {number}"),
        }
    }

    /// The numbers of all servers with a wheel, of which each is a primary.
    pub fn primaries(&self) -> Vec<usize> {
        match &self.servers {
            Servers::None => Vec::new(),
            Servers::One(_) | Servers::Sentinel(_) => vec![self.primary],
            Servers::Cluster(_) => vec![self.primary, 2, 3],
        }
    }

    pub fn replica(&self) -> usize {
        1 - self.primary
    }

    /// Asks for a failover while both servers live; false if it is refused for now.
    pub fn request_failover(&self) -> bool {
        match &self.servers {
            Servers::Sentinel(watched) => {
                // One may know no replica that it could promote, for as long as nothing changes.
                let asked =
                    |sentinel: &Sentinel| sentinel.try_command::<()>(&["SENTINEL", "FAILOVER", NAME]).is_ok();
                watched.sentinels.iter().any(asked)
            }
            Servers::Cluster(_) => self.server(self.replica()).try_command::<()>(&["CLUSTER", "FAILOVER"]).is_ok(),
            Servers::None | Servers::One(_) => false,
        }
    }

    /// Cuts the replica off from its primary, so that it falls behind, or lets it follow again.
    pub fn set_behind(&self, replica: usize, is_behind: bool) {
        // The primary has no password, and refuses a replica that brings one.
        let password = if is_behind { "wrong" } else { "" };
        let server = self.server(replica);
        server.command::<()>(&["CONFIG", "SET", "masterauth", password]);
        if is_behind {
            // There may be no link at the moment.
            let _ = server.try_command::<u64>(&["CLIENT", "KILL", "TYPE", "master"]);
        }
    }

    /// Whether a server is the primary for all that know of it.
    pub fn has_taken_over(&self, number: usize) -> bool {
        let server = self.server(number);
        let leads = || {
            server.try_command::<String>(&["INFO", "replication"]).is_ok_and(|info| info.contains("role:master"))
        };
        let known = match &self.servers {
            Servers::Sentinel(watched) => {
                watched.sentinels.iter().all(|sentinel| sentinel.primary() == server.port)
            }
            Servers::Cluster(_) => [number, 2, 3].into_iter().all(|other| {
                let info = self.server(other).try_command::<String>(&["CLUSTER", "INFO"]);
                info.is_ok_and(|info| info.contains("cluster_state:ok"))
            }),
            Servers::None | Servers::One(_) => true,
        };
        known && leads()
    }

    /// Starts the old primary again, or lets it go on, after the other has taken over.
    pub fn rejoin(&mut self, old: usize) {
        if self.server(old).runs() {
            self.server(old).go_on();
        } else {
            self.restart(old);
            self.demote(old);
        }
    }

    /// Makes the old primary a replica at once, where Sentinels would take some ten seconds more.
    pub fn demote(&self, old: usize) {
        if matches!(self.servers, Servers::Sentinel(_)) {
            let primary = self.server(1 - old);
            let (address, port) = (primary.address.to_string(), primary.port.to_string());
            self.server(old).command::<()>(&["REPLICAOF", &address, &port]);
        }
    }

    /// Whether a server is a replica that could take over.
    pub fn is_in_step(&self, number: usize) -> bool {
        let info = self.server(number).try_command::<String>(&["INFO", "replication"]).unwrap_or_default();
        let follows = info.contains("role:slave") && info.contains("master_link_status:up");
        follows
            && match &self.servers {
                Servers::Sentinel(watched) => watched.sentinels.iter().all(|sentinel| {
                    let replicas =
                        sentinel.try_command::<Vec<HashMap<String, String>>>(&["SENTINEL", "REPLICAS", NAME]);
                    replicas.is_ok_and(|replicas| replicas.len() == 1 && replicas[0]["flags"] == "slave")
                }),
                _ => true,
            }
    }

    /// Moves a ring from one node of a Cluster to another; false if none lies where it can be moved.
    pub fn move_a_ring(&self) -> bool {
        let rings = (0..RINGS_OF_A_CLUSTER).flat_map(|ring| [(ring, 2, 3), (ring, 3, 2)]);
        let mut moves = rings.filter(|(ring, from, _)| Cluster::owns_ring(self.server(*from), *ring));
        let Some((ring, from, to)) = moves.next() else { return false };
        Cluster::move_ring(ring, self.server(from), self.server(to));
        true
    }
}
