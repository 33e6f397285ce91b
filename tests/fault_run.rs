//! Load with faults, on each kind of store: what clients see is compared with the promises, message by message.
//!
//! A short run of each is part of the tests. A long run is a command of its own; the name says the store: `memory`,
//! `one_redis`, `sentinel` or `cluster`.
//!
//! ```text
//! FAULT_RUN_SECONDS=600 FAULT_RUN_SEED=1 cargo test --release --test main -- fault_run::sentinel --nocapture
//! ```
//!
//! It prints a line for each fault, and at the end a section for docs/RELIABILITY.md: over all messages, and by kind of
//! fault for the messages whose life overlapped it. Each count is of broken promises; a second number behind a plus
//! sign is what the contract allows, for example writes that a failover loses. Settings, in the environment:
//!
//! - `FAULT_RUN_SECONDS`: how long faults happen; 8 if not set.
//! - `FAULT_RUN_SEED`: the order of faults and the load; 1 if not set. Processes and threads add chance of their own.
//! - `FAULT_RUN_LOGS`: a folder for the logs of all sidecars, each in a file; none if not set.
//! - `FAULT_RUN_ONLY`: the name of the only fault that happens, for example `sidecar killed`; all if not set.
//! - `FAULT_RUN_RATE`: new messages a second; 25,000 with `FAULT_RUN_SECONDS`, and 2,000 without, beside other tests.

mod cause;
mod client;
mod deliveries;
mod faults;
mod history;
mod ledger;
mod load;
mod peer;
mod pressure;
mod pulse;
mod report;
mod resp_peer;
mod shared;
mod stage;
mod store;
mod subscribers;
mod timeline;
mod verdict;

use std::collections::{BTreeMap, HashSet};
use std::env;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use self::client::Protocol;
use self::deliveries::{Deliveries, Key};
use self::faults::{Kind, Topology};
use self::history::{Breach, Wheel};
use self::ledger::Ledger;
use self::load::Loader;
use self::pulse::Pulse;
use self::report::Batches;
use self::shared::Phase;
use self::stage::Stage;
use self::store::on_side;
use self::subscribers::Group;
use self::timeline::Timeline;
use self::verdict::{Judge, Timeouts, Verdict};
use crate::support::network::Network;
use crate::support::sidecar::Sidecar;
use crate::support::{sleep_until, wait_until};

const WHEEL: Wheel = Wheel { tick: Duration::from_millis(200), slots: 15 };

const PROMPT: &str = "prompt";

const GROUPS: [Group; 3] = [
    Group { name: "audit", subscribers: 2, is_prompt: false },
    Group { name: "default", subscribers: 3, is_prompt: false },
    Group { name: PROMPT, subscribers: 2, is_prompt: true },
];

const LOADERS: u32 = 6;

/// How long there is load after the last fault.
const CALM: Duration = Duration::from_secs(9);

/// How long the last messages and batches may take.
const LONGEST_END: Duration = Duration::from_secs(60);

/// How late a message may come in steady state, and in a short run beside other tests, which keep the machine busy.
const LATE_AT_REST_MS: u64 = 1_000;
const LATE_BESIDE_OTHERS_MS: u64 = 3_000;

/// How long after its first delivery a batch may still be on its way to another group.
const UNDELIVERED: Duration = Duration::from_secs(15);

/// Every second client speaks RESP, among them those on the other side of the network.
fn protocol_of(client: usize) -> Protocol {
    if client % 2 == 1 { Protocol::Resp } else { Protocol::Native }
}

fn setting(name: &str) -> Option<u32> {
    let value = env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

#[test]
fn memory_keeps_its_promises_whatever_happens() {
    run(Topology::Memory, "memory");
}

#[test]
fn one_redis_keeps_its_promises_whatever_happens() {
    run(Topology::Redis, "one_redis");
}

#[test]
fn sentinel_keeps_its_promises_whatever_happens() {
    run(Topology::Sentinel, "sentinel");
}

#[test]
fn cluster_keeps_its_promises_whatever_happens() {
    run(Topology::Cluster, "cluster");
}

/// Where servers can be cut off, the run is on one host of a network, and some of its threads are on the other.
fn run(topology: Topology, name: &str) {
    let has_network = matches!(topology, Topology::Sentinel | Topology::Cluster);
    let network = has_network.then(|| Network::of(2)).flatten().map(Arc::new);
    on_side(network.as_ref(), 0, || run_on(topology, name, network.as_ref()));
}

fn run_on(topology: Topology, name: &str, network: Option<&Arc<Network>>) {
    let (seconds, seed) = (setting("FAULT_RUN_SECONDS"), setting("FAULT_RUN_SEED").unwrap_or(1));
    let rate = setting("FAULT_RUN_RATE").unwrap_or(if seconds.is_some() { 25_000 } else { 2_000 });
    let is_dense = seconds.is_none();
    let seconds = seconds.unwrap_or(8);
    let command = format!(
        "FAULT_RUN_SECONDS={seconds} FAULT_RUN_SEED={seed} FAULT_RUN_RATE={rate} cargo test --release --test main -- \
         fault_run::{name} --nocapture"
    );
    let mut stage = Stage::new(topology, WHEEL, network.cloned(), seed.into(), is_dense);
    let shared = stage.shared().clone();
    let subscribers: Vec<_> = GROUPS
        .iter()
        .flat_map(|group| (0..group.subscribers).map(move |index| (*group, index)))
        .map(|(group, index)| {
            // One of each group is on the other side.
            let side = usize::from(index == 1);
            let seed = u64::from(seed) + 100 + index as u64;
            let protocol = protocol_of(index);
            let start = || subscribers::start(&shared, side, protocol, group, seed);
            (group.name, protocol, on_side(network, side, start))
        })
        .collect();
    wait_until("all groups are there", || {
        stage.sidecars().all(|sidecar| GROUPS.iter().all(|group| sidecar.group(group.name).is_some()))
    });
    let share = f64::from(rate) / f64::from(LOADERS);
    let loaders: Vec<_> = (1..=LOADERS)
        .map(|index| {
            let (side, seed, first_id) =
                (usize::from(index == 1), u64::from(seed + index), u64::from(index) << 40);
            let protocol = protocol_of(index as usize);
            on_side(network, side, || Loader::start(WHEEL, &shared, side, protocol, seed, first_id, share))
        })
        .collect();

    let pulse = Pulse::start();
    stage.run(Instant::now() + Duration::from_secs(seconds.into()));
    shared.begin(Phase::Calm);
    sleep_until(Instant::now() + CALM);
    shared.begin(Phase::Unloaded);
    let ledgers: Vec<Ledger> =
        loaders.into_iter().map(|loader| loader.join().expect("every answer was a known one")).collect();
    wait_for_the_end(&mut stage);
    let mut stalls = pulse.finish();
    if is_dense {
        // Beside other tests, one process can be starved while this one is not. A long run has the machine for itself.
        stalls.extend(stage.logs().flat_map(|log| pulse::silences_of_redis(&log)));
    }
    if is_dense && matches!(topology, Topology::Sentinel | Topology::Cluster) {
        // A primary that is starved for a second is replaced, also while nobody watches for it.
        for loss in stage.logs().flat_map(|log| pulse::losses_of_redis(&log)).collect::<Vec<_>>() {
            stage.timeline.insert_loss(loss);
        }
    }
    for stall in stalls {
        stage.timeline.insert(Kind::MachineStalled, stall);
    }
    shared.begin(Phase::Over);
    let groups = merged(subscribers);
    assert!(ledgers.iter().all(|ledger| ledger.indices().end > 100), "a load generator added hardly anything");
    judge(stage, &ledgers, &groups, &command);
}

type Started = (&'static str, Protocol, JoinHandle<Deliveries>);

/// The deliveries of each group. Subscribers of both protocols got some.
fn merged(subscribers: Vec<Started>) -> BTreeMap<&'static str, Deliveries> {
    let mut groups: BTreeMap<&str, Deliveries> = BTreeMap::new();
    for (group, protocol, subscriber) in subscribers {
        let deliveries = subscriber.join().expect("every batch was well-formed");
        println!("a subscriber of {group} over {protocol:?} got {} deliveries", deliveries.total);
        let is_fed = deliveries.total > 0 || group != PROMPT;
        assert!(is_fed, "a prompt subscriber over {protocol:?} got nothing");
        groups.entry(group).or_default().merge(deliveries);
    }
    groups
}

/// Waits until nothing is in flight, and every group has settled its batches.
fn wait_for_the_end(stage: &mut Stage) {
    let latest = Instant::now() + LONGEST_END;
    let in_flight =
        |stage: &Stage| stage.sidecars().map(|sidecar| sidecar.metrics().sum("messages_in_flight")).sum::<f64>();
    let settled = |sidecar: &Sidecar| {
        let is_settled = |group: &Group| sidecar.group(group.name).is_some_and(|group| group.outbox_batches == 0);
        GROUPS.iter().all(is_settled)
    };
    while in_flight(stage) > 0.5 || !stage.sidecars().all(settled) {
        if Instant::now() > latest {
            stage.problems.push(format!("after {LONGEST_END:?} {} messages are in flight", in_flight(stage)));
            return;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn judge(mut stage: Stage, ledgers: &[Ledger], groups: &BTreeMap<&str, Deliveries>, command: &str) {
    let timeouts = Timeouts::of(&groups[PROMPT]);
    let timeline = stage.timeline.clone();
    let mut verdict = Verdict::default();
    thread::scope(|scope| {
        let judges: Vec<_> = ledgers
            .iter()
            .map(|ledger| Judge { wheel: WHEEL, timeline: &timeline, ledger, timeouts: &timeouts })
            .map(|judge| scope.spawn(move || judge.judge()))
            .collect();
        for judge in judges {
            verdict.merge(judge.join().expect("a judge does not fail"));
        }
    });
    let batches = compare(&timeline, groups);
    report::print(&timeline, &verdict, &batches, command);

    if let Ok(folder) = env::var("FAULT_RUN_LOGS") {
        for (number, log) in stage.logs().enumerate() {
            let file = Path::new(&folder).join(format!("sidecar-{number}.log"));
            fs::write(&file, log).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        }
    }
    let never_added = timeouts.ids().find(|id| !ledgers.iter().any(|ledger| ledger.index_of(*id).is_some()));
    let panicked: Vec<String> = stage.logs().filter(|log| log.contains("panicked")).collect();
    stage.problems.extend(panicked);
    let broken: u64 = verdict.all.broken.iter().sum();
    assert!(broken == 0, "{broken} broken promises:\n{}", verdict.shown.join("\n"));
    assert_eq!(never_added, None, "a message is in a batch and was never added");
    assert_eq!((batches.ids_with_two_contents, batches.missing_broken), (0, 0), "{batches:?}");
    assert!(stage.problems.is_empty(), "{}", stage.problems.join("\n"));
    let (seen, latest) = (verdict.steady.messages, verdict.steady.late_ms.max());
    let is_judged = seen > 0 || timeline.count(Kind::MachineStalled) > 0;
    assert!(verdict.all.messages > 1_000 && is_judged, "hardly anything was seen");
    let most = if setting("FAULT_RUN_SECONDS").is_none() { LATE_BESIDE_OTHERS_MS } else { LATE_AT_REST_MS };
    assert!(latest <= most, "{latest} ms late in steady state");
    assert_eq!(verdict.all.allowed[Breach::Early as usize], 0, "nothing allows an early report");
}

/// Every group sees every batch, unless a fault lost it.
fn compare(timeline: &Timeline, groups: &BTreeMap<&str, Deliveries>) -> Batches {
    let all: HashSet<Key> = groups.values().flat_map(|group| group.batches.keys().copied()).collect();
    let (mut missing_allowed, mut missing_broken) = (0, 0);
    for key in &all {
        let arrivals = groups.values().filter_map(|group| Some(group.batches.get(key)?.arrived));
        let (got, first) = arrivals.fold((0, None::<Instant>), |(got, first), arrived| {
            (got + 1, Some(first.map_or(arrived, |first| first.min(arrived))))
        });
        let first = first.expect("a group got it");
        if got == groups.len() {
            continue;
        }
        if timeline.allows(Breach::Lost, first, first + UNDELIVERED, None) {
            missing_allowed += 1;
        } else {
            missing_broken += 1;
        }
    }
    Batches {
        count: all.len() as u64,
        deliveries: groups.values().map(|group| group.total).sum(),
        ids_with_two_contents: groups.values().map(Deliveries::ids_with_two_contents).max().unwrap_or(0),
        missing_allowed,
        missing_broken,
    }
}
