//! The harness of networks cuts what it is told to cut, heals it, and leaves nothing behind.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process;
use std::time::Duration;

use crate::support::PATIENCE;
use crate::support::network::{Host, Network, here};
use crate::support::redis::Redis;

/// As long as something that is cut off is waited for.
const SILENCE: Duration = Duration::from_millis(300);

/// Both ends of a connection from one host to another.
fn connection(from: &Host, to: &Host) -> [TcpStream; 2] {
    let listener = to.run(|| TcpListener::bind((here(), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let connected = from.run(|| TcpStream::connect(address).unwrap());
    let (accepted, peer) = listener.accept().unwrap();
    assert_eq!((address.ip(), peer.ip()), (to.address, from.address));
    [connected, accepted]
}

/// Sends a byte; whether it arrives within a time.
fn arrives([from, to]: &mut [TcpStream; 2], within: Duration) -> bool {
    from.write_all(b"x").unwrap();
    to.set_read_timeout(Some(within)).unwrap();
    match to.read_exact(&mut [0]) {
        Ok(()) => true,
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => false,
        Err(error) => panic!("the connection broke: {error}"),
    }
}

#[test]
fn a_cut_stops_all_that_crosses_it_until_it_is_healed() {
    let Some(network) = Network::of(3) else { return };
    let [one, two, three] = [0, 1, 2].map(|number| network.host(number));
    let (mut across, mut beside) = (connection(one, two), connection(two, three));
    assert!(arrives(&mut across, PATIENCE) && arrives(&mut beside, PATIENCE));
    network.cut_off(&[one]);
    assert!(!arrives(&mut across, SILENCE));
    assert!(arrives(&mut beside, PATIENCE), "both are on the other side");
    network.cut_off(&[one, two]);
    assert!(!arrives(&mut beside, SILENCE));
    network.heal();
    for connection in [&mut across, &mut beside] {
        connection[1].set_read_timeout(Some(PATIENCE)).unwrap();
        connection[1].read_exact(&mut [0]).expect("what was sent meanwhile arrives");
        assert!(arrives(connection, PATIENCE));
    }
}

#[test]
fn a_server_of_a_host_is_found_by_other_hosts() {
    let Some(network) = Network::of(2) else { return };
    let redis = network.host(0).run(Redis::start);
    assert_eq!(redis.address, network.host(0).address);
    assert_eq!(network.host(1).run(|| redis.command::<String>(&["PING"])), "PONG");
}

#[test]
fn the_namespaces_of_a_network_keep_no_name() {
    let Some(_network) = Network::of(2) else { return };
    let ours = format!("ackwheel-{}-", process::id());
    let names = fs::read_dir("/run/netns").unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(&ours)).collect();
    assert!(left.is_empty(), "{left:?}");
}
