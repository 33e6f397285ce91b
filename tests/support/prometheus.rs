//! A real Prometheus, with the configuration of this repository in a hurry, and promtool.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;

use super::PATIENCE;
use super::process::{Log, Process};

/// Where grafana/prometheus lies.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("grafana/prometheus")
}

/// The `scrape_interval` and `evaluation_interval` of the configuration, and what tests have in their place.
const INTERVAL: (&str, &str) = ("_interval: 5s", "_interval: 500ms");
/// The `scrape_timeout`, which must not be longer.
const SCRAPE_TIMEOUT: (&str, &str) = ("scrape_timeout: 4s", "scrape_timeout: 500ms");

/// How many times as fast the rules are in [`hurried`].
pub const HURRY: u32 = 60;

/// Rules in which every `for:` and every range and step in brackets lasts a sixtieth of its time, a minute a second. Nothing
/// else is changed: no threshold, no expression, no label.
pub fn hurried(rules: &str) -> String {
    let shorter = |duration: &str| {
        let length = humantime::parse_duration(duration).unwrap_or_else(|error| panic!("{duration}: {error}"));
        format!("{}ms", (length / HURRY).as_millis())
    };
    let in_brackets = |piece: &str| match piece.split_once(']') {
        Some((range, rest)) if range.starts_with(|first: char| first.is_ascii_digit()) => {
            let range: Vec<String> = range.split(':').map(shorter).collect();
            format!("{}]{rest}", range.join(":"))
        }
        _ => piece.to_owned(),
    };
    let line = |line: &str| match line.split_once("for: ") {
        Some((before, duration)) if before.trim().is_empty() => format!("{before}for: {}", shorter(duration)),
        _ => {
            let (before, ranges) = line.split_once('[').unwrap_or((line, ""));
            let ranges = ranges.split('[').filter(|range| !range.is_empty()).map(in_brackets);
            std::iter::once(before.to_owned()).chain(ranges).collect::<Vec<_>>().join("[")
        }
    };
    rules.lines().map(|text| line(text) + "\n").collect()
}

/// Runs promtool to its end; what it said, and whether all was well.
pub fn promtool(program: &Path, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder()).env_clear().stdin(Stdio::null());
    let output = command.output().unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.success(), text.concat())
}

/// A rule as Prometheus understood it.
#[derive(Debug, Deserialize)]
pub struct Rule {
    pub name: String,
    pub query: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    /// How long the condition must hold, in seconds; absent in a recording rule.
    pub duration: Option<f64>,
    pub health: String,
    #[serde(rename = "lastError", default)]
    pub last_error: String,
}

/// An alert that is pending or fires.
#[derive(Debug, Deserialize)]
pub struct Alert {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub state: String,
}

#[derive(Deserialize)]
struct RuleGroups {
    groups: Vec<RuleGroup>,
}

#[derive(Deserialize)]
struct RuleGroup {
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Alerts {
    alerts: Vec<Alert>,
}

#[derive(Deserialize)]
struct QueryData {
    result: Vec<QueryResult>,
}

#[derive(Deserialize)]
struct QueryResult {
    #[serde(default)]
    metric: BTreeMap<String, String>,
    #[serde(default)]
    values: Vec<(f64, String)>,
    value: Option<(f64, String)>,
}

/// A line as a chart has it.
#[derive(Debug)]
pub struct Series {
    pub labels: BTreeMap<String, String>,
    /// Unix times and values, in order; where there is no value, there is no point.
    pub points: Vec<(f64, f64)>,
}

/// A server that ends with its test. Its log is printed if the test fails.
pub struct Prometheus {
    address: SocketAddr,
    agent: ureq::Agent,
    log: Log,
    _process: Process,
    _folder: TempDir,
}

impl Prometheus {
    /// Scrapes these sidecars, each the admin address under the name of its job, by the configuration of this
    /// repository: twice a second, with [`hurried`] rules.
    pub fn start(program: &Path, targets: &[(&str, SocketAddr)]) -> Prometheus {
        let folder = tempfile::tempdir().expect("a folder can be made");
        configure(folder.path(), targets);
        let mut command = Command::new(program);
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.current_dir(folder.path()).args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"]);
        command.args(["--web.listen-address=127.0.0.1:0", "--storage.tsdb.retention.time=1h"]);
        let mut process = Process::spawn(&mut command);
        let log = Log::of(process.stderr());
        let Some(line) = log.line("\"Listening on\"") else { panic!("it did not start: {}", log.text()) };
        let address = line.split_once("address=").and_then(|(_, address)| address.trim().parse().ok());
        let address = address.unwrap_or_else(|| panic!("no address in {line}"));
        assert!(log.line("Server is ready to receive web requests").is_some(), "{}", log.text());
        let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).proxy(None);
        let agent = ureq::Agent::new_with_config(config.http_status_as_error(false).build());
        Prometheus { address, agent, log, _process: process, _folder: folder }
    }

    /// The current values of a query, one a series, or the error.
    pub fn query(&self, query: &str) -> Result<Vec<Vec<f64>>, String> {
        let data: QueryData = self.api("query", &[("query", query)])?;
        let values = |result: QueryResult| result.value.iter().map(|(_, value)| number(value)).collect();
        Ok(data.result.into_iter().map(values).collect())
    }

    /// The values of a query in the last `window`, second by second, for each series.
    pub fn query_range(&self, query: &str, window: Duration) -> Result<Vec<Vec<f64>>, String> {
        let now = std::time::UNIX_EPOCH.elapsed().expect("it is after 1970");
        let series = self.series(query, now.saturating_sub(window).as_secs_f64(), now.as_secs_f64())?;
        Ok(series.into_iter().map(|series| series.points.into_iter().map(|(_, value)| value).collect()).collect())
    }

    /// The values of a query between two Unix times, second by second.
    pub fn series(&self, query: &str, start: f64, end: f64) -> Result<Vec<Series>, String> {
        let (start, end) = (start.to_string(), end.to_string());
        let arguments = [("query", query), ("start", &start), ("end", &end), ("step", "1")];
        let data: QueryData = self.api("query_range", &arguments)?;
        let points =
            |values: Vec<(f64, String)>| values.iter().map(|(time, value)| (*time, number(value))).collect();
        let series = |result: QueryResult| Series { labels: result.metric, points: points(result.values) };
        Ok(data.result.into_iter().map(series).collect())
    }

    /// The values of a label in the series that a selector matches.
    pub fn label_values(&self, label: &str, selector: &str) -> Result<Vec<String>, String> {
        self.api(&format!("label/{label}/values"), &[("match[]", selector)])
    }

    /// All rules, as it understood them.
    pub fn rules(&self) -> Vec<Rule> {
        let groups: RuleGroups = self.api("rules", &[]).expect("there are rules");
        groups.groups.into_iter().flat_map(|group| group.rules).collect()
    }

    /// All alerts that fire or are pending.
    pub fn alerts(&self) -> Vec<Alert> {
        self.api::<Alerts>("alerts", &[]).expect("there may be alerts").alerts
    }

    /// The data that an endpoint of its API answers, or the error that it names.
    fn api<T: DeserializeOwned>(&self, path: &str, arguments: &[(&str, &str)]) -> Result<T, String> {
        let request = self.agent.get(format!("http://{}/api/v1/{path}", self.address));
        let request = arguments.iter().fold(request, |request, (name, value)| request.query(name, value));
        let answered = request.call().and_then(|mut answer| answer.body_mut().read_to_string());
        let text = answered.unwrap_or_else(|error| panic!("{path} {arguments:?}: {error}"));
        let mut answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        match answer["error"].as_str() {
            Some(error) => Err(error.to_owned()),
            None => Ok(serde_json::from_value(answer["data"].take()).expect("the data has the shape of its kind")),
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of Prometheus at {}\n{}\n---", self.address, self.log.text());
        }
    }
}

fn number(sample: &str) -> f64 {
    sample.parse().expect("a sample is a number")
}

/// The folder grafana/prometheus in a hurry, with targets of its own.
fn configure(folder: &Path, targets: &[(&str, SocketAddr)]) {
    let read = |name: &str| fs::read_to_string(self::folder().join(name)).expect("it is part of the repository");
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).expect("the folder takes files");
    let mut config = read("prometheus.yml");
    for (ours, hurried) in [INTERVAL, SCRAPE_TIMEOUT] {
        assert!(config.contains(ours), "{ours:?} is not in prometheus.yml any more: {config}");
        config = config.replace(ours, hurried);
    }
    write("prometheus.yml", &config);
    for rules in ["rules.yml", "alerts.yml"] {
        write(rules, &hurried(&read(rules)));
    }
    // JSON is YAML. A label of a target named job overrides that of the configuration.
    fs::create_dir(folder.join("targets")).expect("the folder takes folders");
    let groups: Vec<Value> = targets
        .iter()
        .map(|(job, address)| serde_json::json!({"targets": [address.to_string()], "labels": {"job": job}}))
        .collect();
    write("targets/sidecars.yaml", &serde_json::to_string(&groups).expect("JSON can be written"));
}
