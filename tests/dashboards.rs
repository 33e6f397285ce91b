//! Dashboards, rules and alerts of grafana/: they keep to their conventions, and a real Prometheus that scrapes real
//! sidecars has an answer to every query of every panel.
//!
//! `cargo test --release dashboards::picture -- --ignored` makes `docs/dashboard.png` again.

mod alerts;
mod conventions;
mod data;
mod drawing;
mod model;
mod picture;
mod promql;
mod units;
mod variables;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use self::model::{Dashboard, FILES};
use crate::support::packages;
use crate::support::prometheus::{hurried, promtool};
use crate::support::sidecar::Sidecar;

/// The programs of the package `prometheus`, if they are there.
struct Programs {
    prometheus: PathBuf,
    promtool: PathBuf,
}

impl Programs {
    fn find() -> Option<Programs> {
        let of = |program| packages::optional(program, "prometheus");
        Some(Programs { prometheus: of("prometheus")?, promtool: of("promtool")? })
    }
}

fn file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The names of all series that a sidecar exports: they are there from the start, whatever its store.
fn exported() -> BTreeSet<String> {
    let metrics = Sidecar::start(&[]).metrics();
    metrics.names().map(|series| series.split('{').next().unwrap_or_default().to_owned()).collect()
}

/// The metrics of a dashboard that nobody exports.
fn unknown(dashboard: &Dashboard, exported: &BTreeSet<String>) -> Vec<String> {
    let unknown = dashboard.selectors().filter(|(_, selector)| !exported.contains(&selector.metric));
    unknown.map(|(panel, selector)| format!("{:?}: nobody exports {}", panel.title, selector.metric)).collect()
}

/// The metrics whose names are fixed; of a histogram, the buckets.
const FIXED: [&str; 30] = [
    "messages_in_flight",
    "messages_added_total",
    "messages_rearmed_total",
    "messages_acked_total",
    "messages_timed_out_total",
    "ack_latency_seconds_bucket",
    "timeout_lateness_seconds_bucket",
    "pointer_tick",
    "pointer_lag_seconds",
    "leader",
    "leader_epoch",
    "leader_changes_total",
    "storm_ticks_total",
    "batches_published_total",
    "batches_delivered_total",
    "batches_acked_total",
    "batches_redelivered_total",
    "outbox_batches",
    "outbox_oldest_seconds",
    "outbox_dropped_ids_total",
    "subscribers",
    "connections",
    "frames_total",
    "refusals_total",
    "held_acks",
    "max_in_flight",
    "store_up",
    "redis_round_trip_seconds_bucket",
    "redis_errors_total",
    "build_info",
];

/// Those of the process, but for the size of its address space, which says nothing.
const PROCESS: [&str; 6] =
    ["cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds", "start_time_seconds", "threads"];

#[test]
fn every_convention_is_kept() {
    for dashboard in model::all() {
        for convention in conventions::ALL {
            let broken = (convention.broken)(&dashboard);
            assert!(broken.is_empty(), "{}: {}: {broken:#?}", dashboard.uid, convention.name);
        }
    }
}

#[test]
fn uids_and_titles_are_those_of_one_dashboard() {
    let titles: BTreeSet<String> = model::all().into_iter().map(|dashboard| dashboard.title).collect();
    assert_eq!(titles.len(), FILES.len(), "{titles:?}");
    for (file, uid) in FILES {
        assert_eq!(Dashboard::read(file).uid, uid, "links and bookmarks hold the uid");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("grafana/dashboards");
    assert_eq!(fs::read_dir(folder).unwrap().count(), FILES.len(), "each file is named in this test");
}

/// A way to spoil a dashboard, and the convention that must notice it.
type Mistake = (&'static str, fn(&mut Value));

const MISTAKES: [Mistake; 21] = [
    ("uid", |it| it["uid"] = json!("other")),
    ("datasource variable", |it| it["templating"]["list"][0]["query"] = json!("loki")),
    ("job and instance variables", |it| it["templating"]["list"][1]["multi"] = json!(false)),
    ("job and instance variables", |it| it["templating"]["list"][2]["allValue"] = json!("")),
    ("job and instance variables", |it| it["templating"]["list"][2]["datasource"]["uid"] = json!("mine")),
    ("datasource of panels and queries", |it| it["panels"][1]["datasource"]["uid"] = json!("mine")),
    ("datasource of panels and queries", |it| it["panels"][1]["targets"][0]["datasource"] = json!({})),
    ("title and description", |it| it["panels"][1]["title"] = json!("")),
    ("title and description", |it| it["panels"][1]["description"] = json!("Shows it")),
    ("unit", |it| it["panels"][1]["fieldConfig"]["defaults"]["unit"] = json!("")),
    ("job and instance matchers", |it| ask(it, "max(ackwheel_store_up)")),
    ("job and instance matchers", |it| ask(it, r#"max(ackwheel_store_up{job=~"$job", instance="$instance"})"#)),
    ("$__rate_interval", |it| ask(it, "sum(rate(ackwheel_messages_added_total{}[5m]))")),
    ("$__rate_interval", |it| ask(it, "sum(rate(ackwheel_messages_added_total{}[$__range]))")),
    ("counters", |it| ask(it, "sum(ackwheel_messages_added_total{})")),
    ("counters", |it| ask(it, "max(delta(ackwheel_messages_added_total{}[$__rate_interval]))")),
    ("histograms", |it| {
        ask(
            it,
            "histogram_quantile(0.5, sum by (job) (rate(ackwheel_ack_latency_seconds_bucket{}[$__rate_interval])))",
        );
    }),
    ("ids", |it| it["panels"][2]["id"] = it["panels"][1]["id"].clone()),
    ("places", |it| it["panels"][2]["gridPos"] = it["panels"][1]["gridPos"].clone()),
    ("places", |it| it["panels"][1]["gridPos"]["w"] = json!(25)),
    ("queries", |it| it["panels"][1]["targets"] = json!([])),
];

/// Has the first panel ask something else.
fn ask(dashboard: &mut Value, query: &str) {
    dashboard["panels"][1]["targets"][0]["expr"] = json!(query);
}

#[test]
fn every_convention_notices_its_mistakes() {
    for (name, spoil) in MISTAKES {
        let mut json = model::read_json(FILES[0].0);
        spoil(&mut json);
        let spoilt = Dashboard::parse(json);
        let convention = conventions::ALL.iter().find(|convention| convention.name == name);
        let broken = (convention.unwrap().broken)(&spoilt);
        assert!(!broken.is_empty(), "{name} did not notice that the dashboard was spoilt");
    }
    for convention in conventions::ALL {
        let tried = MISTAKES.iter().any(|(name, _)| *name == convention.name);
        assert!(tried, "nothing shows that {} notices anything", convention.name);
    }
}

#[test]
fn every_metric_that_is_shown_exists_and_every_one_that_exists_is_shown() {
    let exported = exported();
    let mut shown = BTreeSet::new();
    for dashboard in model::all() {
        assert_eq!(unknown(&dashboard, &exported), [""; 0]);
        shown.extend(dashboard.selectors().map(|(_, selector)| selector.metric));
    }
    for metric in FIXED {
        assert!(shown.contains(&format!("ackwheel_{metric}")), "no panel shows ackwheel_{metric}");
    }
    for metric in PROCESS {
        assert!(shown.contains(&format!("process_{metric}")), "no panel shows process_{metric}");
    }
    // Beyond the fixed ones, nothing is exported that nobody would see. A histogram is shown by its buckets.
    let is_seen = |name: &&String| {
        let histogram = ["_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        shown.contains(*name) || histogram.is_some_and(|name| shown.contains(&format!("{name}_bucket")))
    };
    let ours = exported.iter().filter(|name| name.starts_with("ackwheel_"));
    let unseen: Vec<&String> = ours.filter(|name| !is_seen(name)).collect();
    assert!(unseen.is_empty(), "no panel shows {unseen:?}");
}

#[test]
fn a_metric_that_nobody_exports_is_noticed() {
    let mut json = model::read_json(FILES[0].0);
    ask(&mut json, r#"sum(ackwheel_messages_in_fligth{job=~"$job", instance=~"$instance"})"#);
    let found = unknown(&Dashboard::parse(json), &exported());
    assert_eq!(found, [r#""Timed out": nobody exports ackwheel_messages_in_fligth"#]);
}

#[test]
fn promtool_finds_configuration_rules_and_their_unit_tests_right() {
    let Some(Programs { promtool: program, .. }) = Programs::find() else { return };
    for arguments in [
        &["check", "config", "prometheus.yml"][..],
        &["check", "rules", "--lint=all", "--lint-fatal", "rules.yml", "alerts.yml"],
        &["test", "rules", "alerts_test.yml"],
    ] {
        let (right, text) = promtool(&program, arguments);
        assert!(right, "promtool {arguments:?}: {text}");
    }
}

#[test]
fn every_alert_has_a_unit_test_and_a_runbook() {
    let (rules, tests) = (file("grafana/prometheus/alerts.yml"), file("grafana/prometheus/alerts_test.yml"));
    let runbooks = file("docs/RUNBOOKS.md");
    let named: BTreeSet<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert_eq!(named, BTreeSet::from(alerts::NAMES), "the names are fixed");
    for name in alerts::NAMES {
        let fires = tests.match_indices(&format!("- alertname: {name}\n")).count();
        assert!(fires > 0, "no unit test has {name} fire");
        let silent = |line: &str| {
            let case = line.trim().strip_prefix(&format!("- {{alertname: {name}, eval_time: "));
            case.is_some_and(|rest| rest.ends_with(", exp_alerts: []}"))
        };
        assert!(tests.lines().any(silent), "no unit test has {name} be silent");
        assert!(runbooks.contains(&format!("\n### {name}\n")), "docs/RUNBOOKS.md has no section {name}");
        let section =
            runbooks.split(&format!("\n### {name}\n")).nth(1).and_then(|rest| rest.split("\n### ").next());
        for part in ["**Meaning.** ", "**Check.** ", "**Fix.**", "**Harmless when** "] {
            assert!(
                section.is_some_and(|section| section.contains(part)),
                "docs/RUNBOOKS.md: {name} lacks {part}"
            );
        }
    }
}

/// `$__rate_interval` is computed from what the datasource says of the scrape interval.
#[test]
fn the_datasource_knows_the_scrape_interval() {
    let value = |text: &str, key: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(key)).map(str::to_owned);
        line.unwrap_or_else(|| panic!("no {key} in {text}"))
    };
    let scraped = value(&file("grafana/prometheus/prometheus.yml"), "scrape_interval: ");
    let known = value(&file("grafana/provisioning/datasources/prometheus.yaml"), "timeInterval: ");
    assert_eq!(known, scraped);
}

#[test]
fn rules_in_a_hurry_differ_in_their_durations_alone() {
    let rules = "  expr: increase(x:rate5m{y=\"[2m]z\"}[10m] offset 1m) > 5 # [no]\n  for: 30s\n  text: for: 5m\n";
    let hurried = hurried(rules);
    // Strings are not looked into: no rule of ours has a bracket in one.
    let expected =
        rules.replace("[10m]", "[10000ms]").replace("[2m]", "[2000ms]").replace("for: 30s", "for: 500ms");
    assert_eq!(hurried, expected);
}
