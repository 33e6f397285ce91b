//! docs/METRICS.md has a row for each metric of a sidecar, with its type and its label, and no other.

use std::collections::BTreeMap;

use super::{read, root};
use crate::support::sidecar::Sidecar;

/// The type of a metric, and its label, if it has one.
type Shape = (String, String);

/// The metrics of a sidecar.
fn shown(text: &str) -> BTreeMap<String, Shape> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let label_of = |metric: &str| {
        let mut labels = text.lines().filter_map(|line| {
            let (series, labels) = line.split_once('{')?;
            let belongs = series == metric || series.strip_suffix("_bucket") == Some(metric);
            let label = labels.split_once('=')?.0;
            (belongs && label != "le").then(|| label.to_owned())
        });
        labels.next().unwrap_or_default()
    };
    types.map(|(metric, kind)| (metric.to_owned(), (kind.to_owned(), label_of(metric)))).collect()
}

/// The tables of the page.
fn written(text: &str) -> BTreeMap<String, Shape> {
    let mut written = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(|cell| cell.trim().trim_matches('`')).collect();
        let [_, metric, kind, label, says, _] = cells[..] else { panic!("{line} has not four cells") };
        assert!(!says.is_empty(), "{metric} is not explained");
        let before = written.insert(metric.to_owned(), (kind.to_owned(), label.to_owned()));
        assert_eq!(before, None, "{metric} has two rows");
    }
    written
}

#[test]
fn every_metric_has_a_row_with_its_type_and_label() {
    let (status, text) = Sidecar::start(&[]).get("/metrics");
    assert_eq!(status, 200, "{text}");
    let written = written(&read(root().join("docs/METRICS.md")).text);
    assert_eq!(written, shown(&text));
    assert!(written.len() >= 50, "only {} were looked at: the test is blind", written.len());
}

#[test]
fn every_error_of_redis_has_a_remedy() {
    let runbooks = read(root().join("docs/RUNBOOKS.md")).text;
    let (_, text) = Sidecar::start(&[]).get("/metrics");
    let kinds =
        text.lines().filter_map(|line| line.strip_prefix("ackwheel_redis_errors_total{kind=\"")?.split_once('"'));
    let kinds: Vec<&str> = kinds.map(|(kind, _)| kind).collect();
    for kind in &kinds {
        assert!(
            runbooks.contains(&format!("\n| `{kind}` |")),
            "docs/RUNBOOKS.md does not say what to do about {kind}"
        );
    }
    assert!(kinds.len() >= 10, "only {kinds:?} were looked at: the test is blind");
}
