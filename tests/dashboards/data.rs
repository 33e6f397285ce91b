//! Every query of every panel, asked of a real Prometheus that scrapes sidecars to which everything happens.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::model::{self, Dashboard};
use super::variables::{Choice, label_values, substituted};
use super::{Programs, ask};
use crate::support::flow::{Flow, Plan};
use crate::support::frames;
use crate::support::prometheus::Prometheus;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{PATIENCE, wait_until};

const TICK: Duration = Duration::from_millis(200);
const FLAGS: [&str; 8] = ["--tick", "200ms", "--slots", "5", "--storm-min", "20", "--storm-share", "0.2"];

/// Counters that must be above 0, since the figures mean nothing otherwise.
const HAPPENED: [&str; 16] = [
    "ackwheel_messages_added_total",
    "ackwheel_messages_rearmed_total",
    r#"ackwheel_messages_acked_total{outcome="acked"}"#,
    r#"ackwheel_messages_acked_total{outcome="late"}"#,
    r#"ackwheel_messages_acked_total{outcome="unknown"}"#,
    r#"ackwheel_messages_acked_total{outcome="withdrawn"}"#,
    "ackwheel_messages_timed_out_total",
    "ackwheel_storm_ticks_total",
    "ackwheel_batches_acked_total",
    "ackwheel_batches_nacked_total",
    "ackwheel_batches_redelivered_total",
    "ackwheel_redis_errors_total",
    "ackwheel_redis_reconnects_total",
    r#"ackwheel_refusals_total{reason="bad_ack_timeout"}"#,
    r#"ackwheel_redis_round_trip_seconds_count{script="apply"}"#,
    "ackwheel_timeout_lateness_seconds_count",
];

/// The queries of a dashboard that fail, or say nothing: no series, or no number in any.
fn silent(prometheus: &Prometheus, dashboard: &Dashboard, jobs: Choice, instances: Choice) -> Vec<String> {
    let mut silent = Vec::new();
    for (panel, target) in dashboard.targets() {
        let query = substituted(&target.expr, jobs, instances);
        let answer = if target.instant {
            prometheus.query(&query)
        } else {
            prometheus.query_range(&query, Duration::from_secs(5))
        };
        let why = match answer {
            Ok(series) if series.iter().flatten().any(|value| value.is_finite()) => {
                continue;
            }
            Ok(series) => format!("no data in {} series", series.len()),
            Err(error) => error,
        };
        silent.push(format!("{} {:?}: {query}: {why}", dashboard.uid, panel.title));
    }
    silent
}

/// Waits until every query of every panel has data.
#[track_caller]
fn assert_all_speak(prometheus: &Prometheus, jobs: Choice, instances: Choice) {
    for dashboard in model::all() {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let silent = silent(prometheus, &dashboard, jobs, instances);
            if silent.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "{jobs:?} {instances:?}: {silent:#?}");
            thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Adds events that the traffic does not contain: withdrawn, unknown and re-armed messages, a refusal, a batch that is given back, and a
/// group that nobody reads.
fn do_the_unusual(sidecar: &Sidecar) {
    let mut connection = sidecar.connect();
    let ids: Vec<u64> = (1 << 40..(1 << 40) + 10).collect();
    connection.ask(&frames::add(&ids, 1, 1)).added();
    connection.ask(&frames::add(&ids, 1, 2)).added();
    connection.ask(&frames::withdraw(&ids[..5])).outcomes();
    connection.ask(&frames::del(&[u64::MAX - 1])).outcomes();
    assert_eq!(connection.ask(&frames::add(&ids, 500, 1)).kind, frames::ERROR);
    let mut audit = sidecar.connect().subscribed("audit");
    let given_back = audit.batch();
    audit.ask(&frames::batch_nack(given_back.id, 1));
    let again = std::iter::repeat_with(|| audit.batch()).take(50).any(|batch| batch.delivery > 1);
    assert!(again, "what was given back comes again");
}

#[test]
fn every_query_of_every_panel_has_data() {
    let Some(programs) = Programs::find() else { return };
    let redis = Redis::start();
    let (first, second) = (Sidecar::on(&redis, "first", &FLAGS), Sidecar::on(&redis, "second", &FLAGS));
    let memory = Sidecar::start(&[]);
    let targets = [("ackwheel", first.admin), ("ackwheel", second.admin), ("ackwheel-memory", memory.admin)];
    let prometheus = Prometheus::start(&programs.prometheus, &targets);
    let flow = Flow::start(Plan::ten_times_a_second(TICK, 5), first.listen, second.listen);
    do_the_unusual(&second);
    wait_until("all are scraped", || prometheus.query("count(ackwheel_build_info)") == Ok(vec![vec![3.0]]));
    redis.stop();
    for sidecar in [&first, &second] {
        wait_until("it knows that Redis is away", || !sidecar.is_ready());
    }
    redis.go_on();

    for counter in HAPPENED {
        let name = counter.trim_start_matches("ackwheel_");
        wait_until(name, || prometheus.query(&format!("sum({counter}) > 0")).is_ok_and(|found| found.len() == 1));
    }
    assert_all_speak(&prometheus, Choice::All, Choice::All);
    let instances = [first.admin.to_string(), second.admin.to_string()];
    let instances: Vec<&str> = instances.iter().map(String::as_str).collect();
    assert_all_speak(&prometheus, Choice::These(&["ackwheel"]), Choice::These(&instances));
    assert_variables_offer(&prometheus, &instances);
    assert_choices_are_obeyed(&prometheus);
    assert_mistakes_are_noticed(&prometheus);
    drop(flow.finish());
}

/// The boxes for job and instance offer what there is.
fn assert_variables_offer(prometheus: &Prometheus, instances: &[&str]) {
    for dashboard in model::all() {
        for (name, expected) in [("job", &["ackwheel", "ackwheel-memory"][..]), ("instance", instances)] {
            let (label, selector) = label_values(dashboard.variable(name).unwrap().text());
            let selector = substituted(selector, Choice::These(&["ackwheel"]), Choice::All);
            let mut offered = prometheus.label_values(label, &selector).unwrap();
            let mut expected: Vec<String> = expected.iter().map(|value| (*value).to_owned()).collect();
            offered.sort();
            expected.sort();
            assert_eq!(offered, expected, "{} {name}", dashboard.uid);
        }
    }
}

/// Every query shows only what is chosen: of a job or an instance that is not there, nothing.
fn assert_choices_are_obeyed(prometheus: &Prometheus) {
    let nobody = Choice::These(&["nobody"]);
    for dashboard in model::all() {
        for (jobs, instances) in [(nobody, Choice::All), (Choice::All, nobody)] {
            let (silent, all) = (silent(prometheus, &dashboard, jobs, instances), dashboard.targets().count());
            assert_eq!(silent.len(), all, "some of {} show {jobs:?} {instances:?} all the same", dashboard.uid);
        }
    }
}

/// A query that is wrong, and one of a metric that nobody exports, are found among all others.
fn assert_mistakes_are_noticed(prometheus: &Prometheus) {
    for (query, why) in [
        (r#"sum(ackwheel_messages_in_fligth{job=~"$job", instance=~"$instance"})"#, "no data in 0 series"),
        (r#"sum(rate(ackwheel_messages_added_total{job=~"$job"}))"#, "expected type range vector"),
    ] {
        let mut json: Value = model::read_json(model::FILES[0].0);
        ask(&mut json, query);
        let found = silent(prometheus, &Dashboard::parse(json), Choice::All, Choice::All);
        assert!(matches!(&found[..], [one] if one.contains("\"Timed out\"") && one.contains(why)), "{found:?}");
    }
}
