//! The dashboards of grafana/, as Grafana reads them.

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::promql::{self, Selector};

/// The files, each with the uid under which it is known to links and bookmarks.
pub const FILES: [(&str, &str); 2] =
    [("ackwheel-overview.json", "ackwheel-overview"), ("ackwheel-sidecar-redis.json", "ackwheel-sidecar")];

#[derive(Clone, Debug, Deserialize)]
pub struct Dashboard {
    pub uid: String,
    pub title: String,
    pub templating: Templating,
    pub panels: Vec<Panel>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Templating {
    pub list: Vec<Variable>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Variable {
    pub name: String,
    pub label: String,
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub datasource: Datasource,
    /// A text, or an object with the text in `query`.
    pub query: Value,
    #[serde(default)]
    pub multi: bool,
    #[serde(default)]
    pub include_all: bool,
    #[serde(default)]
    pub all_value: String,
    #[serde(default)]
    pub refresh: u8,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct Datasource {
    #[serde(rename = "type")]
    pub kind: String,
    pub uid: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Panel {
    pub id: u32,
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub title: String,
    #[serde(default)]
    pub description: String,
    pub grid_pos: GridPos,
    #[serde(default)]
    pub datasource: Datasource,
    #[serde(default)]
    pub field_config: FieldConfig,
    #[serde(default)]
    pub targets: Vec<Target>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub struct GridPos {
    pub x: u32,
    pub y: u32,
    pub w: u32,
    pub h: u32,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct FieldConfig {
    pub defaults: FieldDefaults,
    /// The exceptions for a series: a matcher and properties.
    pub overrides: Vec<Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FieldDefaults {
    pub unit: String,
    pub decimals: Option<usize>,
    /// The text if there is nothing to show.
    pub no_value: Option<String>,
    pub thresholds: Thresholds,
    /// How a chart draws: style, fill, interpolation.
    pub custom: Value,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Thresholds {
    pub steps: Vec<Step>,
}

/// From this value on, this colour; the first has no value.
#[derive(Clone, Debug, Deserialize)]
pub struct Step {
    pub color: String,
    pub value: Option<f64>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Target {
    pub ref_id: String,
    pub expr: String,
    /// The name of a series, with `{{label}}` for the value of a label.
    #[serde(default)]
    pub legend_format: String,
    #[serde(default)]
    pub datasource: Datasource,
    /// Only the value now is asked for.
    #[serde(default)]
    pub instant: bool,
}

impl Dashboard {
    pub fn read(file: &str) -> Dashboard {
        Dashboard::parse(read_json(file))
    }

    pub fn parse(json: Value) -> Dashboard {
        serde_json::from_value(json).unwrap_or_else(|error| panic!("no dashboard: {error}"))
    }

    /// The panels that show something.
    pub fn shown(&self) -> impl Iterator<Item = &Panel> {
        self.panels.iter().filter(|panel| panel.kind != "row")
    }

    /// Every query, with its panel.
    pub fn targets(&self) -> impl Iterator<Item = (&Panel, &Target)> {
        self.shown().flat_map(|panel| panel.targets.iter().map(move |target| (panel, target)))
    }

    /// Every selector of every query, with its panel.
    pub fn selectors(&self) -> impl Iterator<Item = (&Panel, Selector)> {
        self.targets().flat_map(|(panel, target)| {
            promql::selectors(&target.expr).into_iter().map(move |selector| (panel, selector))
        })
    }

    pub fn variable(&self, name: &str) -> Option<&Variable> {
        self.templating.list.iter().find(|variable| variable.name == name)
    }
}

impl Variable {
    /// Its query.
    pub fn text(&self) -> &str {
        self.query.as_str().or_else(|| self.query["query"].as_str()).unwrap_or_default()
    }
}

pub fn read_json(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("grafana/dashboards").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub fn all() -> Vec<Dashboard> {
    FILES.iter().map(|(file, _)| Dashboard::read(file)).collect()
}
