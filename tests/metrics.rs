//! The admin endpoints: every promised metric is there from the start, and the counters balance.

use std::collections::BTreeSet;

use crate::support::frames::{self, ACKED, LATE, UNKNOWN, WITHDRAWN};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// The second words of rows with so many cells, in the tables of docs/PROTOCOL.md.
fn words_of_the_protocol(cells: usize, is_number: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/PROTOCOL.md");
    let document = std::fs::read_to_string(path).unwrap();
    let word = |line: &str| {
        let row: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').collect();
        let [number, word] = [*row.first()?, *row.get(1)?].map(|cell| cell.trim().trim_matches('`'));
        (row.len() == cells && is_number(number)).then(|| word.to_owned())
    };
    document.lines().filter_map(word).collect()
}

#[test]
fn every_promised_metric_is_there_from_the_start() {
    let sidecar = Sidecar::start(&[]);
    let metrics = sidecar.metrics();
    let zero = [
        "messages_in_flight",
        "messages_added_total",
        "messages_rearmed_total",
        "messages_timed_out_total",
        "ack_latency_seconds_count",
        "ack_latency_seconds_sum",
        "timeout_lateness_seconds_count",
        "timeout_lateness_seconds_sum",
        "storm_ticks_total",
        "batches_published_total",
        "batches_delivered_total",
        "batches_acked_total",
        "batches_redelivered_total",
        "outbox_batches{group=\"default\"}",
        "outbox_oldest_seconds{group=\"default\"}",
        "outbox_dropped_ids_total",
        "subscribers{group=\"default\"}",
        "connections{listener=\"listen\"}",
        "connections{listener=\"socket\"}",
        "connections{listener=\"resp\"}",
        "held_acks",
        "ack_latency_seconds_bucket{le=\"30\"}",
        "timeout_lateness_seconds_bucket{le=\"+Inf\"}",
        "redis_round_trip_seconds_count{script=\"apply\"}",
        "redis_errors_total{kind=\"timeout\"}",
        "redis_reconnects_total",
        "redis_lost_total",
        "journal_damaged",
        "journal_refusing",
        "journal_errors_total",
    ];
    for series in zero {
        assert_eq!(metrics.count(series), 0, "{series}");
    }
    wait_until("the ticker leads", || sidecar.metrics().count("leader_changes_total") == 1);
    let metrics = sidecar.metrics();
    for series in ["leader", "store_up"] {
        assert_eq!(metrics.count(series), 1, "{series}");
    }
    assert!(metrics.value("pointer_lag_seconds") >= 0.0);
    assert_eq!(metrics.count("max_in_flight"), 4_000_000);
    assert_eq!(metrics.count("max_held_acks"), 0, "memory is never away");
    assert_eq!((metrics.count("rings"), metrics.count("rings_led")), (1, 1));
    assert!((metrics.value("ack_timeout_seconds") - 15.0).abs() < 1e-9);
    let ring = &sidecar.status().rings[0];
    assert!(metrics.count("pointer_tick") <= ring.pointer.0 && metrics.count("pointer_tick") > 1_000_000_000);
    assert_eq!(metrics.count("leader_epoch"), ring.epoch);
    let version = format!("build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    assert_eq!(metrics.count(&version), 1);
    for name in ["process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"] {
        assert!(metrics.find(name).is_some(), "{name}");
    }
}

#[test]
fn no_series_is_there_twice() {
    let (code, text) = Sidecar::start(&[]).get("/metrics");
    assert_eq!(code, 200);
    let mut seen = BTreeSet::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, _) = line.rsplit_once(' ').expect("a series and its value");
        assert!(seen.insert(series), "{series} is there twice: Prometheus refuses the whole page");
    }
}

#[test]
fn every_fixed_label_value_is_there_from_the_start() {
    let sidecar = Sidecar::start(&[]);
    let metrics = sidecar.metrics();
    for outcome in ["acked", "late", "unknown", "withdrawn"] {
        assert_eq!(metrics.acked(outcome), 0);
    }
    let reasons = words_of_the_protocol(7, |code| code.parse::<u16>().is_ok());
    let types = words_of_the_protocol(4, |number| number.starts_with("0x"));
    assert!(reasons.contains("slow_reader") && reasons.len() >= 26, "{reasons:?}");
    assert!(types.contains("group_delete_answer") && types.len() == 21, "{types:?}");
    for reason in &reasons {
        assert_eq!(metrics.refusals(reason), 0);
    }
    for name in &types {
        assert_eq!(metrics.count(&format!("frames_total{{type=\"{name}\"}}")), 0);
    }
    let series = |prefix: &str| metrics.names().filter(|name| name.starts_with(prefix)).count();
    let counted = (series("ackwheel_refusals_total{"), series("ackwheel_frames_total{"));
    assert_eq!(counted, (reasons.len(), types.len()), "no others");
}

#[test]
fn the_counters_balance_after_a_load_of_every_kind() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "15"]);
    let mut connection = sidecar.connect();
    let mut subscriber = sidecar.connect().subscribed("default");
    let ids: Vec<u64> = (0..500).collect();
    connection.ask(&frames::add(&ids[..300], 15, 1)).added();
    connection.ask(&frames::add(&ids[300..], 2, 1)).added();
    assert_eq!(connection.ask(&frames::add(&ids[..100], 15, 2)).added().1, [true; 100]);
    assert_eq!(connection.ask(&frames::del(&ids[..120])).outcomes(), [ACKED; 120]);
    assert_eq!(connection.ask(&frames::withdraw(&ids[120..150])).outcomes(), [WITHDRAWN; 30]);
    assert_eq!(connection.ask(&frames::del(&ids[100..150])).outcomes(), [UNKNOWN; 50]);
    let mut timed_out = 0;
    while timed_out < 200 {
        timed_out += subscriber.settled_batch().messages.len();
    }
    assert_eq!(connection.ask(&frames::del(&ids[300..310])).outcomes(), [LATE; 10]);
    assert_eq!(connection.ask(&frames::del(&ids[300..310])).outcomes(), [LATE; 10]);

    let balance = |metrics: &crate::support::http::Metrics| {
        let ended =
            metrics.acked("acked") + metrics.acked("withdrawn") + metrics.count("messages_timed_out_total");
        assert_eq!(metrics.count("messages_added_total"), ended + metrics.count("messages_in_flight"));
    };
    let metrics = sidecar.metrics();
    balance(&metrics);
    assert_eq!(metrics.count("messages_in_flight"), 150);
    while timed_out < 350 {
        timed_out += subscriber.settled_batch().messages.len();
    }
    let metrics = sidecar.metrics();
    balance(&metrics);
    let outcomes = ["acked", "withdrawn", "unknown", "late"].map(|outcome| metrics.acked(outcome));
    assert_eq!(outcomes, [120, 30, 50, 20]);
    let counted =
        ["messages_added_total", "messages_rearmed_total", "messages_timed_out_total", "messages_in_flight"];
    assert_eq!(counted.map(|series| metrics.count(series)), [500, 100, 350, 0]);
    assert_eq!(metrics.count("ack_latency_seconds_count"), 130, "acked, and late once a message");
    assert_eq!(metrics.count("timeout_lateness_seconds_count"), 350);
    let batches = ["batches_published_total", "batches_delivered_total", "batches_acked_total"];
    assert_eq!(batches.map(|series| metrics.count(series)), [metrics.count("batches_published_total"); 3]);
    assert_eq!(metrics.count("frames_total{type=\"add_new_msg\"}"), 3);
    assert_eq!(metrics.count("frames_total{type=\"del_msg_answer\"}"), 5);
}

#[test]
fn latencies_are_measured_from_add_to_del() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2, 3], 0, 1)).added();
    let before = std::time::Instant::now();
    std::thread::sleep(std::time::Duration::from_millis(120));
    connection.ask(&frames::del(&[1, 2])).outcomes();
    let most = before.elapsed().as_secs_f64() + 0.6;
    let metrics = sidecar.metrics();
    let sum = metrics.value("ack_latency_seconds_sum");
    assert!((0.24..2.0 * most).contains(&sum), "{sum}");
    assert_eq!(metrics.count("ack_latency_seconds_bucket{le=\"0.1\"}"), 0);
    assert_eq!(metrics.count("ack_latency_seconds_bucket{le=\"30\"}"), 2);
}

#[test]
fn whether_every_ring_has_a_leader_is_seen_over_all_sidecars() {
    let redis = Redis::start();
    let flags = ["--rings", "3", "--slots", "5", "--max-held-acks", "77"];
    let follower = Sidecar::on(&redis, "follower", &[&flags[..], &["--never-lead"]].concat());
    let metrics = follower.metrics();
    assert_eq!((metrics.count("rings"), metrics.count("rings_led"), metrics.count("leader")), (3, 0, 0));
    assert_eq!(metrics.count("max_held_acks"), 77);
    assert!((metrics.value("ack_timeout_seconds") - 5.0).abs() < 1e-9);
    let leader = Sidecar::on(&redis, "leader", &flags);
    wait_until("every ring is led", || leader.metrics().count("rings_led") == 3);
    assert_eq!((leader.metrics().count("rings"), follower.metrics().count("rings_led")), (3, 0));
}

#[test]
fn gauges_follow_connections_and_subscribers() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let subscriber = sidecar.connect().subscribed("audit");
    let mut other = sidecar.connect();
    let metrics = sidecar.metrics();
    assert_eq!((metrics.connections(), metrics.count("subscribers{group=\"audit\"}")), (2, 1));
    other.ask(&frames::add(&[1], 1, 1)).added();
    wait_until("its batch waits", || sidecar.metrics().count("outbox_batches{group=\"audit\"}") == 1);
    wait_until("it grows older", || sidecar.metrics().value("outbox_oldest_seconds{group=\"default\"}") > 0.05);
    drop(subscriber);
    wait_until("it has gone", || sidecar.metrics().connections() == 1);
    assert_eq!(other.ask(&frames::group_delete("audit")).kind, frames::GROUP_DELETE_ANSWER);
    let metrics = sidecar.metrics();
    assert!(
        metrics.find("ackwheel_outbox_batches{group=\"audit\"}").is_none(),
        "a group that is gone has no gauge"
    );
    assert_eq!(metrics.count("outbox_batches{group=\"default\"}"), 1);
}

#[test]
fn probes_and_pages_answer() {
    let sidecar = Sidecar::start(&[]);
    assert_eq!(sidecar.get("/livez"), (200, String::from("alive\n")));
    assert_eq!(sidecar.get("/readyz"), (200, String::from("ready\n")));
    let (status, text) = sidecar.get("/nowhere");
    assert_eq!(status, 404);
    assert!(text.contains("/metrics") && text.contains("/status"), "{text}");
}
