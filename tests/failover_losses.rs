//! How many Acks a failover loses under load: answered `acked`, and reported all the same.
//!
//! Measures and asserts little; `cargo test --release --test main -- failover_losses --ignored --nocapture` prints it.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::sentinels::sidecar;
use crate::support::cluster::Cluster;
use crate::support::frames::{self, ACKED};
use crate::support::raw::Raw;
use crate::support::sentinels::Watched;
use crate::support::sidecar::Sidecar;
use crate::support::{sleep_until, wait_until};

const ROUNDS: u64 = 5;

const FLAGS: [&str; 4] = ["--tick", "500ms", "--slots", "15"];

/// Adds and acknowledges frames of messages until told to end; returns those whose Ack was answered `acked`.
fn load(mut connection: Raw, first: u64, ended: &CancellationToken) -> BTreeSet<u64> {
    let (mut acked, mut next) = (BTreeSet::new(), first);
    while !ended.is_cancelled() {
        let ids: Vec<u64> = (next..next + 500).collect();
        next += 500;
        if connection.ask(&frames::add(&ids, 15, 1)).kind != frames::ADD_ANSWER {
            continue;
        }
        let answer = connection.ask(&frames::del(&ids));
        if answer.kind == frames::DEL_ANSWER {
            let answered = ids.iter().zip(answer.outcomes());
            acked.extend(answered.filter(|(_, outcome)| **outcome == ACKED).map(|(id, _)| *id));
        }
    }
    acked
}

/// Fails over once under load; returns how many messages were acknowledged, and how many of those were reported.
fn fail_over(sidecar: &Sidecar, kill: impl FnOnce()) -> (usize, usize) {
    let ended = CancellationToken::new();
    let mut subscriber = sidecar.connect().subscribed("default");
    let acked: BTreeSet<u64> = thread::scope(|scope| {
        let loads: Vec<_> = (0..4)
            .map(|nth| {
                let (connection, ended) = (sidecar.connect(), &ended);
                scope.spawn(move || load(connection, nth << 40, ended))
            })
            .collect();
        let end = ended.clone().drop_guard();
        sleep_until(Instant::now() + Duration::from_secs(2));
        kill();
        sidecar.wait_until_ready();
        drop(end);
        loads.into_iter().flat_map(|load| load.join().expect("it ends")).collect()
    });
    // Whatever is in flight has timed out before these.
    let marker = 1 << 50;
    sidecar.connect().ask(&frames::add(&[marker], 15, 1)).added();
    let mut reported = BTreeSet::new();
    while !reported.contains(&marker) {
        reported.extend(subscriber.settled_batch().ids());
    }
    (acked.len(), acked.intersection(&reported).count())
}

fn print(what: &str, rounds: &[(usize, usize)]) {
    let (acked, reported): (usize, usize) =
        rounds.iter().fold((0, 0), |sum, round| (sum.0 + round.0, sum.1 + round.1));
    println!("{what}: {} failovers, {acked} acknowledged, {reported} of them reported {rounds:?}", rounds.len());
    assert!(acked > 10_000, "there was hardly any load");
}

#[test]
#[ignore = "a measurement of a minute"]
fn sentinel() {
    let round = |_| {
        let mut watched = Watched::start();
        let sidecar = sidecar(&watched.store(), "only", &FLAGS);
        fail_over(&sidecar, || {
            watched.primary.kill();
            watched.wait_for_failover();
        })
    };
    print("Sentinel", &(0..ROUNDS).map(round).collect::<Vec<_>>());
}

#[test]
#[ignore = "a measurement of a minute"]
fn cluster() {
    let round = |_| {
        let mut cluster = Cluster::start();
        let sidecar = sidecar(&Cluster::store(&cluster.primaries), "only", &FLAGS);
        fail_over(&sidecar, || {
            cluster.primaries[0].kill();
            let is_primary = |info: &str| info.contains("role:master");
            wait_until("the replica is a primary", || is_primary(&cluster.replica.info("replication")));
        })
    };
    print("Cluster", &(0..ROUNDS).map(round).collect::<Vec<_>>());
}
