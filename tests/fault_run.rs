//! Whatever happens, in whatever order: sidecars killed, drained and paused, Redis away, answers lost, subscribers
//! that go. At the end every message has had one outcome, and what clients saw of it is what was promised.
//!
//! A short run is part of the tests. A longer one is a command of its own:
//!
//! ```text
//! FAULT_RUN_SECONDS=600 cargo test --release --test main -- fault_run:: --nocapture
//! ```
//!
//! It prints its seed and all that happens. `FAULT_RUN_SEED` has the same things happen again, as far as processes
//! can be told to.

mod history;
mod load;
mod peer;
mod shared;
mod stage;
mod takers;

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use self::history::{Asked, Did, History, TimedOut, Wheel};
use self::load::{Ledger, Loader};
use self::shared::{Phase, Shared};
use self::stage::Stage;
use self::takers::Manners;
use crate::support::raw::Batch;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{sleep_until, wait_until};

const WHEEL: Wheel = Wheel { tick: Duration::from_millis(200), slots: 15 };

/// Groups, and how many subscribers each has. The lateness of a message is judged by the one that is prompt.
const GROUPS: [(&str, u64, Manners); 3] =
    [("audit", 1, Manners::Any), ("default", 3, Manners::Any), (PROMPT, 1, Manners::Prompt)];

const PROMPT: &str = "prompt";

const LOADERS: u64 = 6;

/// How long there is load after the last fault.
const CALM: Duration = Duration::from_secs(9);

/// So long after a fault everything is as in steady state again.
const RECOVERY: Duration = Duration::from_secs(6);

/// How much later than in its tick a message may come in steady state on a busy machine.
const LATE_AT_REST: Duration = Duration::from_secs(1);

fn from_environment(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// How long things happen.
fn length() -> Duration {
    Duration::from_secs(from_environment("FAULT_RUN_SECONDS").unwrap_or(15))
}

fn seed() -> u64 {
    let by_time = || SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970").as_secs();
    from_environment("FAULT_RUN_SEED").unwrap_or_else(by_time)
}

#[test]
fn sidecars_on_one_redis_keep_what_they_promise_whatever_happens() {
    run(3, Some(Redis::with_append_only_file()));
}

#[test]
fn a_wheel_in_memory_keeps_what_it_promises_whatever_happens() {
    run(1, None);
}

fn run(places: usize, redis: Option<Redis>) {
    let seed = seed();
    println!("FAULT_RUN_SEED={seed}");
    let shared = Arc::new(Shared::new(places));
    let mut stage = Stage::new(WHEEL, &shared, places, redis, seed);
    let takers: Vec<_> = GROUPS
        .iter()
        .flat_map(|(group, count, manners)| (0..*count).map(move |index| (*group, *manners, index)))
        .map(|(group, manners, index)| (group, takers::start(&shared, group, manners, seed + 100 + index)))
        .collect();
    wait_until("all groups are there", || {
        stage.sidecars().all(|sidecar| GROUPS.iter().all(|(group, ..)| sidecar.group(group).is_some()))
    });
    let loaders: Vec<_> =
        (1..=LOADERS).map(|index| Loader::start(WHEEL, &shared, seed + index, index << 40)).collect();

    stage.run(Instant::now() + length());
    shared.begin(Phase::Calm);
    sleep_until(Instant::now() + CALM);
    shared.begin(Phase::Unloaded);
    let mut ledger = Ledger::new();
    for loader in loaders {
        ledger.extend(loader.join().expect("a loader was answered as it must be"));
    }
    wait_for_the_end(&stage);
    shared.begin(Phase::Over);
    let mut delivered: BTreeMap<&str, Vec<Batch>> = BTreeMap::new();
    for (group, taker) in takers {
        delivered.entry(group).or_default().extend(taker.join().expect("a subscriber saw nothing wrong"));
    }
    check(&stage, &ledger, &delivered);
}

/// Waits until nothing is in flight, and every group has settled its batches.
fn wait_for_the_end(stage: &Stage) {
    wait_until("nothing is in flight", || {
        stage.sidecars().map(|sidecar| sidecar.metrics().sum("messages_in_flight")).sum::<f64>() < 0.5
    });
    let settled = |sidecar: &Sidecar, group| sidecar.group(group).is_some_and(|group| group.outbox_batches == 0);
    for (group, ..) in GROUPS {
        wait_until("everything is settled", || stage.sidecars().all(|sidecar| settled(sidecar, group)));
    }
}

/// Asserts that what clients saw is what was promised.
fn check(stage: &Stage, ledger: &Ledger, delivered: &BTreeMap<&str, Vec<Batch>>) {
    let by_group: BTreeMap<&str, HashMap<[u8; 24], Batch>> =
        delivered.iter().map(|(group, batches)| (*group, takers::assert_only_redeliveries(batches))).collect();
    let batches = &by_group[PROMPT];
    for (group, others) in &by_group {
        let only_one_has = batches
            .keys()
            .chain(others.keys())
            .find(|id| !(batches.contains_key(*id) && others.contains_key(*id)));
        assert_eq!(only_one_has, None, "every group sees every batch, and {group} is one");
    }
    let mut timed_out: HashMap<u64, Vec<TimedOut>> = HashMap::new();
    for batch in batches.values() {
        for ((id, _), attempt) in batch.messages.iter().zip(&batch.attempts) {
            timed_out.entry(*id).or_default().push(TimedOut { attempt: *attempt, arrived: batch.arrived });
        }
    }
    let mut wrong = Vec::new();
    let mut at_rest = 0;
    for (id, asked) in ledger {
        let timed_out = timed_out.remove(id).unwrap_or_default();
        let history = History { wheel: WHEEL, asked, timed_out: &timed_out, heard: &|asked| stage.heard(asked) };
        if let Err(why) = history.check() {
            wrong.push(format!("{id}: {why}: {asked:#?} {timed_out:#?}"));
        }
        for late in timed_out.iter().filter_map(|timed_out| lateness_at_rest(stage, asked, timed_out)) {
            at_rest += 1;
            if late > LATE_AT_REST {
                wrong.push(format!("{id} came {late:?} after its tick, with nothing the matter: {asked:#?}"));
            }
        }
    }
    wrong.extend(timed_out.into_keys().map(|id| format!("{id} is in a batch and was never added")));
    for log in stage.logs().filter(|log| log.contains("panicked")) {
        wrong.push(log);
    }
    println!(
        "{} messages, {} batches, {at_rest} timeouts with nothing the matter; {} deliveries by group: {:?}",
        ledger.len(),
        batches.len(),
        delivered.values().map(Vec::len).sum::<usize>(),
        delivered.iter().map(|(group, batches)| (group, batches.len())).collect::<Vec<_>>(),
    );
    assert!(wrong.is_empty(), "{} are wrong: {}", wrong.len(), wrong.iter().take(3).cloned().collect::<String>());
    assert!(ledger.len() > 1_000 && at_rest > 0, "hardly anything was seen");
}

/// How long after its tick a message came, where nothing was the matter from before it was due.
fn lateness_at_rest(stage: &Stage, asked: &[Asked], timed_out: &TimedOut) -> Option<Duration> {
    let adds = asked.iter().filter_map(|asked| match asked.did {
        Did::Add { ack_timeout_ticks, .. } => Some((asked, ack_timeout_ticks)),
        Did::Del(_) => None,
    });
    let (add, ticks) = adds.clone().nth(usize::from(timed_out.attempt) - 1)?;
    let due = add.ended + WHEEL.ticks(ticks + 1);
    stage
        .was_at_rest(add.begun, timed_out.arrived, RECOVERY)
        .then(|| timed_out.arrived.saturating_duration_since(due))
}
