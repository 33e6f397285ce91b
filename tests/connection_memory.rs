//! The buffers of all connections together have a limit. Beyond it, the largest are closed, and nobody else.

use std::net::SocketAddr;
use std::thread;

use crate::support::frames::{self, ACKED};
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

const MEGABYTE: f64 = 1_048_576.0;

/// The smallest limit, of 16 MiB.
const LIMIT: [&str; 2] = ["--max-connection-memory", "16777216"];

fn resident_bytes(sidecar: &Sidecar) -> f64 {
    sidecar.metrics().find("process_resident_memory_bytes").expect("a process metric")
}

/// Shows that an old connection and a new one are served.
fn assert_served(old: &mut Raw, address: SocketAddr) {
    for connection in [old, &mut Raw::greeted(address)] {
        assert_eq!(connection.ask(&frames::add(&[7], 0, 1)).added().1, [false]);
        assert_eq!(connection.ask(&frames::del(&[7])).outcomes(), [ACKED]);
    }
}

#[test]
fn halves_of_large_frames_fill_no_more_than_the_limit() {
    let sidecar = Sidecar::start(&LIMIT);
    let mut victim = sidecar.connect();
    let resident_before = resident_bytes(&sidecar);
    let mut half = 1_000_000_u32.to_be_bytes().to_vec();
    half.extend(vec![frames::ADD; 800_000]);
    // 100 MB in all. The first connections are the oldest of the largest.
    let mut connections: Vec<Raw> = (0..128).map(|_| sidecar.connect()).collect();
    let mut grown = 0.0_f64;
    for connection in &mut connections {
        // The budget may close a connection while it still sends.
        let _ = connection.try_send(&half);
        grown = grown.max(resident_bytes(&sidecar) - resident_before);
    }
    wait_until("the largest are closed", || sidecar.metrics().refusals("connection_memory") >= 100);
    connections[0].receive().expect("an Error").assert_error(14, frames::RETRYABLE);
    connections[0].assert_closed();
    assert!(grown < 48.0 * MEGABYTE, "grew by {} MB", grown / MEGABYTE);
    assert_served(&mut victim, sidecar.listen);
    assert!(sidecar.metrics().refusals("connection_memory") < 128, "those within the limit stay");
    sidecar.log().assert_names(&["max-connection-memory reached"]);
}

#[test]
fn answers_that_nobody_reads_fill_no_more_than_the_limit() {
    let sidecar = Sidecar::start(&LIMIT);
    let mut victim = sidecar.connect();
    let resident_before = resident_bytes(&sidecar);
    let pings = frames::ping(&[1; 64]).bytes(7).repeat(10_000);
    // Each of 40 would have 4 MiB of answers in the sidecar, beside those in the socket.
    let floods: Vec<_> = (0..40)
        .map(|_| {
            let (mut connection, pings) = (sidecar.connect(), pings.clone());
            thread::spawn(move || while connection.try_send(&pings).is_ok() {})
        })
        .collect();
    let mut grown = 0.0_f64;
    wait_until("the largest are closed", || {
        grown = grown.max(resident_bytes(&sidecar) - resident_before);
        sidecar.metrics().refusals("connection_memory") >= 30
    });
    assert_served(&mut victim, sidecar.listen);
    assert!(grown < 64.0 * MEGABYTE, "grew by {} MB", grown / MEGABYTE);
    // Those that are left within the limit are slow readers.
    for flood in floods {
        flood.join().expect("it ends when its connection is closed");
    }
}

#[test]
fn idle_connections_are_not_closed_whatever_they_kept() {
    let sidecar = Sidecar::start(&LIMIT);
    let mut connections: Vec<Raw> = (0..500).map(|_| sidecar.connect()).collect();
    let ids: Vec<u64> = (0..7_000).collect();
    for connection in &mut connections {
        // 56 KB of request, which is less than an idle connection may keep alone: 28 MB in all.
        assert_eq!(connection.ask(&frames::del(&ids)).outcomes().len(), ids.len());
    }
    for connection in &mut connections {
        assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [frames::UNKNOWN]);
    }
    assert_eq!(sidecar.metrics().refusals("connection_memory"), 0);
}
