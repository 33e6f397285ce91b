//! The conventions of every dashboard, so that it works with any Prometheus and any choice of sidecars, and explains its
//! panels. They are those of Grafana's public dashboard linter, and some more.

use std::collections::BTreeMap;

use super::model::{Dashboard, Datasource, FILES, GridPos, Panel};

/// A convention: its name, and what breaks it.
pub struct Convention {
    pub name: &'static str,
    pub broken: fn(&Dashboard) -> Vec<String>,
}

pub const ALL: &[Convention] = &[
    Convention { name: "uid", broken: uid },
    Convention { name: "datasource variable", broken: datasource_variable },
    Convention { name: "job and instance variables", broken: label_variables },
    Convention { name: "datasource of panels and queries", broken: datasources },
    Convention { name: "title and description", broken: words },
    Convention { name: "unit", broken: units },
    Convention { name: "job and instance matchers", broken: matchers },
    Convention { name: "$__rate_interval", broken: ranges },
    Convention { name: "counters", broken: counters },
    Convention { name: "histograms", broken: histograms },
    Convention { name: "ids", broken: ids },
    Convention { name: "places", broken: places },
    Convention { name: "queries", broken: queries },
];

/// The columns of Grafana's grid.
const COLUMNS: u32 = 24;

/// The units that our panels use, by the names that Grafana has for them.
const UNITS: [&str; 11] =
    ["none", "short", "percentunit", "s", "cps", "ops", "pps", "bytes", "Bps", "dateTimeAsIso", "dateTimeFromNow"];

/// Links and bookmarks hold the uid: it stays, whatever the title becomes.
fn uid(dashboard: &Dashboard) -> Vec<String> {
    let known = FILES.iter().any(|(_, uid)| *uid == dashboard.uid);
    said((!known).then(|| format!("the uid {:?} is not one of {FILES:?}", dashboard.uid)))
}

fn said(mistake: Option<String>) -> Vec<String> {
    mistake.into_iter().collect()
}

fn datasource_variable(dashboard: &Dashboard) -> Vec<String> {
    let Some(variable) = dashboard.variable("datasource") else {
        return vec!["there is no variable `datasource`".to_owned()];
    };
    let right = (variable.kind.as_str(), variable.text(), variable.label.as_str())
        == ("datasource", "prometheus", "Data source");
    said((!right).then(|| format!("it is not a Prometheus labelled `Data source`: {variable:?}")))
}

fn by_variable() -> Datasource {
    Datasource { kind: "prometheus".to_owned(), uid: "${datasource}".to_owned() }
}

/// Both can be several at once, or all, and follow the time shown.
fn label_variables(dashboard: &Dashboard) -> Vec<String> {
    let mut mistakes = Vec::new();
    for (name, label) in [("job", "Job"), ("instance", "Instance")] {
        let Some(variable) = dashboard.variable(name) else {
            mistakes.push(format!("there is no variable `{name}`"));
            continue;
        };
        let settings = (variable.multi, variable.include_all, variable.all_value.as_str(), variable.refresh);
        if (variable.kind.as_str(), variable.label.as_str()) != ("query", label) {
            mistakes.push(format!("`{name}` is not a query labelled {label:?}"));
        }
        if settings != (true, true, ".+", 2) {
            mistakes.push(format!("`{name}` is not multi, with all as `.+`, read again as the time changes"));
        }
        if variable.datasource != by_variable() {
            mistakes.push(format!("`{name}` asks {:?} and not ${{datasource}}", variable.datasource));
        }
        if !(variable.text().starts_with("label_values(") && variable.text().ends_with(&format!(", {name})"))) {
            mistakes.push(format!("`{name}` does not ask for label values: {:?}", variable.text()));
        }
    }
    mistakes
}

fn datasources(dashboard: &Dashboard) -> Vec<String> {
    let panels = dashboard.shown().filter(|panel| panel.datasource != by_variable());
    let panels = panels.map(|panel| format!("the panel {:?} does not use ${{datasource}}", panel.title));
    let targets = dashboard.targets().filter(|(_, target)| target.datasource != by_variable());
    let targets = targets
        .map(|(panel, target)| format!("{} of {:?} does not use ${{datasource}}", target.ref_id, panel.title));
    panels.chain(targets).collect()
}

/// A description is at least a sentence.
fn words(dashboard: &Dashboard) -> Vec<String> {
    let mut mistakes = Vec::new();
    let mut seen = BTreeMap::new();
    for panel in &dashboard.panels {
        if panel.title.trim().is_empty() {
            mistakes.push(format!("panel {} has no title", panel.id));
        }
        if let Some(other) = seen.insert(&panel.title, panel.id) {
            mistakes.push(format!("panels {other} and {} are both titled {:?}", panel.id, panel.title));
        }
        if panel.kind != "row" && !(panel.description.len() >= 20 && panel.description.ends_with('.')) {
            mistakes.push(format!("{:?} does not say what a bad value means", panel.title));
        }
    }
    mistakes
}

fn units(dashboard: &Dashboard) -> Vec<String> {
    let unit = |panel: &&Panel| !UNITS.contains(&panel.field_config.defaults.unit.as_str());
    let say = |panel: &Panel| format!("{:?} has the unit {:?}", panel.title, panel.field_config.defaults.unit);
    dashboard.shown().filter(unit).map(say).collect()
}

/// Else a choice of jobs or instances would show the figures of others.
fn matchers(dashboard: &Dashboard) -> Vec<String> {
    let mut mistakes = Vec::new();
    for (panel, selector) in dashboard.selectors() {
        for matcher in [r#"job=~"$job""#, r#"instance=~"$instance""#] {
            if !selector.matchers.iter().any(|found| found == matcher) {
                mistakes.push(format!("{:?}: {} lacks {matcher}", panel.title, selector.metric));
            }
        }
    }
    mistakes
}

/// Only `$__rate_interval` always holds enough samples. A figure for the whole of the time shown may have that.
fn ranges(dashboard: &Dashboard) -> Vec<String> {
    let wrong = dashboard.selectors().filter(|(_, selector)| match selector.range.as_deref() {
        None | Some("$__rate_interval") => false,
        Some("$__range") => !["increase", "last_over_time"].contains(&selector.function()),
        Some(_) => true,
    });
    wrong
        .map(|(panel, selector)| format!("{:?}: a range is no $__rate_interval: {selector:?}", panel.title))
        .collect()
}

/// A counter by itself says how long ago the process started.
fn counters(dashboard: &Dashboard) -> Vec<String> {
    let wrong = dashboard.selectors().filter(|(_, selector)| {
        let counts = ["_total", "_bucket", "_count", "_sum"].iter().any(|end| selector.metric.ends_with(end));
        counts && !["rate", "increase"].contains(&selector.function())
    });
    wrong
        .map(|(panel, selector)| format!("{:?}: {} is not in rate() or increase()", panel.title, selector.metric))
        .collect()
}

/// Buckets are worth nothing without `le`, and with nothing but the sum of what has the same.
fn histograms(dashboard: &Dashboard) -> Vec<String> {
    let wrong = dashboard.selectors().filter(|(_, selector)| {
        let quantile = selector.calls.iter().any(|call| call.name == "histogram_quantile");
        let sums =
            selector.calls.iter().any(|call| call.name == "sum" && call.by.iter().any(|label| label == "le"));
        quantile != selector.metric.ends_with("_bucket") || quantile && !sums
    });
    wrong.map(|(panel, selector)| format!("{:?}: {} loses le", panel.title, selector.metric)).collect()
}

fn ids(dashboard: &Dashboard) -> Vec<String> {
    let mut seen = BTreeMap::new();
    let mut mistakes = Vec::new();
    for panel in &dashboard.panels {
        if let Some(other) = seen.insert(panel.id, &panel.title) {
            mistakes.push(format!("{other:?} and {:?} have the same id {}", panel.title, panel.id));
        }
        let refs: Vec<&str> = panel.targets.iter().map(|target| target.ref_id.as_str()).collect();
        if (1..refs.len()).any(|index| refs[index..].contains(&refs[index - 1])) {
            mistakes.push(format!("{:?} has a refId twice: {refs:?}", panel.title));
        }
    }
    mistakes
}

/// Panels stand in the order in which they are read, within the grid, and none upon another.
fn places(dashboard: &Dashboard) -> Vec<String> {
    let overlap =
        |a: GridPos, b: GridPos| a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;
    let mut mistakes = Vec::new();
    for (index, panel) in dashboard.panels.iter().enumerate() {
        let place = panel.grid_pos;
        if place.x + place.w > COLUMNS || place.w == 0 || place.h == 0 {
            mistakes.push(format!("{:?} is not within {COLUMNS} columns: {place:?}", panel.title));
        }
        for other in &dashboard.panels[..index] {
            if overlap(other.grid_pos, place) {
                mistakes.push(format!("{:?} and {:?} overlap", other.title, panel.title));
            }
            if (other.grid_pos.y, other.grid_pos.x) > (place.y, place.x) {
                mistakes.push(format!("{:?} stands below {:?} and comes first", other.title, panel.title));
            }
        }
    }
    mistakes
}

fn queries(dashboard: &Dashboard) -> Vec<String> {
    let empty = dashboard.shown().filter(|panel| panel.targets.is_empty());
    let empty = empty.map(|panel| format!("{:?} asks nothing", panel.title));
    let known = ["row", "stat", "timeseries"];
    let strange = dashboard.panels.iter().filter(|panel| !known.contains(&panel.kind.as_str()));
    empty.chain(strange.map(|panel| format!("{:?} is of the kind {:?}", panel.title, panel.kind))).collect()
}
