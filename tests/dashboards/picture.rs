//! A picture of the figures of the dashboard Overview: its panels at their places, with what a real Prometheus answers
//! to their queries. It is not Grafana's drawing, and says so.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, UNIX_EPOCH};
use std::{fs, iter};

use serde_json::json;

use super::Programs;
use super::drawing::{Chart, Line};
use super::model::{Dashboard, FILES, GridPos, Panel, Target};
use super::units::formatted;
use super::variables::{Choice, RANGE, substituted};
use crate::support::browser::{Browser, View};
use crate::support::png;
use crate::support::prometheus::Prometheus;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::traffic;
use crate::support::watch::Watch;

/// As wide as a README is read.
const VIEW: View = View { width: 1_200, height: 900, dark: false };
/// The sides of a place in the grid of 24 columns, and what is left free between two panels.
const CELL: (f64, f64) = (48.0, 26.0);
const GAP: f64 = 8.0;
/// The margins of a panel to the left and to the right, with its border.
const PADDING: f64 = 13.0;
/// A panel's title, with what is above and below it.
const TITLE: f64 = 36.0;
/// Beside a chart: names, last values, highest values.
const LEGEND: f64 = 232.0;

/// Before that, no message of the traffic has timed out: the default ack timeout, and then the window of a rate.
const WARMING_UP: Duration = Duration::from_secs(22);

/// Series in their order, and the grey of those beyond.
const COLOURS: [&str; 6] = ["#0a655e", "#c98a2b", "#3f6fae", "#b2401d", "#7d6aa8", "#7a828a"];

/// The colours that dashboards name, for lines and, pale, for the ground of a number.
fn named(colour: &str) -> (&'static str, &'static str) {
    match colour {
        "green" => ("#0a6b54", "#e8f1ec"),
        "orange" => ("#b06a08", "#f8eedb"),
        "red" => ("#a3271b", "#fbe6e0"),
        "blue" => ("#3f6fae", "#e8eef5"),
        other => panic!("no dashboard named {other} yet: say here what it looks like"),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The samples of the time that is shown.
struct Shown<'a> {
    prometheus: &'a Prometheus,
    /// Unix times.
    window: (f64, f64),
}

impl Shown<'_> {
    /// The series of a panel, each with its name and colour.
    fn lines(&self, panel: &Panel) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        for target in &panel.targets {
            let query = substituted(&target.expr, Choice::All, Choice::All);
            let start = if target.instant { self.window.1 } else { self.window.0 };
            let answer = self.prometheus.series(&query, start, self.window.1);
            for series in answer.unwrap_or_else(|error| panic!("{query}: {error}")) {
                let name = series_name(target, &series.labels);
                let (colour, dashed) = overridden(panel, &name);
                let usual = COLOURS[lines.len().min(COLOURS.len() - 1)];
                let colour = colour.unwrap_or(usual).to_owned();
                lines.push(Line { name, colour, dashed, points: series.points });
            }
        }
        lines
    }

    fn panel(&self, panel: &Panel) -> String {
        let place = place(panel.grid_pos);
        let title = escaped(&panel.title);
        match panel.kind.as_str() {
            "row" => format!(r#"<h2 style="{place}">{title}</h2>"#),
            "stat" => self.stat(panel, &place),
            "timeseries" => {
                let content = self.chart(panel);
                format!(r#"<section style="{place}"><h3>{title}</h3><div class="chart">{content}</div></section>"#)
            }
            other => panic!("{title}: no panel was a {other} yet: say here how it is drawn"),
        }
    }

    /// A number on the colour of the highest threshold that it has reached, and its course.
    fn stat(&self, panel: &Panel, place: &str) -> String {
        let defaults = &panel.field_config.defaults;
        let mut line = self.lines(panel).pop();
        let last = line.as_ref().and_then(Line::last);
        let reached = |from: Option<f64>| from.is_none_or(|from| last.is_some_and(|last| last >= from));
        let step =
            defaults.thresholds.steps.iter().rfind(|step| reached(step.value)).expect("the first has no value");
        let (colour, pale) = named(&step.color);
        let number =
            last.map_or_else(|| no_value(panel), |last| formatted(last, &defaults.unit, defaults.decimals));
        // From border to border, each a pixel wide.
        let (width, height) = (inner(panel.grid_pos).0 + 2.0 * (PADDING - 1.0), 30.0);
        let course = line.as_mut().filter(|line| line.points.len() > 1).map(|line| {
            colour.clone_into(&mut line.colour);
            self.canvas(panel, width, height).sparkline(line)
        });
        format!(
            r#"<section class="stat" style="{place}background:{pale};border-color:{colour}44">{}<h3>{}</h3><p class="big">{number}</p></section>"#,
            course.unwrap_or_default(),
            escaped(&panel.title),
        )
    }

    /// Lines with their names, last values and highest values.
    fn chart(&self, panel: &Panel) -> String {
        let (width, height) = inner(panel.grid_pos);
        let lines = self.lines(panel);
        let svg = self.canvas(panel, width - LEGEND - 16.0, height - TITLE).svg(&lines);
        if lines.is_empty() {
            return format!(r#"{svg}<p class="words">{}</p>"#, no_value(panel));
        }
        let unit = &panel.field_config.defaults.unit;
        let value =
            |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| formatted(value, unit, None));
        let row = |line: &Line| {
            let (name, colour) = (escaped(&line.name), &line.colour);
            let [last, highest] = [line.last(), line.highest()].map(value);
            format!(r#"<tr><td><i style="background:{colour}"></i>{name}<td>{last}<td>{highest}"#)
        };
        let rows: String = lines.iter().map(row).collect();
        format!("{svg}<table><tr><th><th>last<th>max{rows}</table>")
    }

    fn canvas<'a>(&self, panel: &'a Panel, width: f64, height: f64) -> Chart<'a> {
        let defaults = &panel.field_config.defaults;
        let custom = &defaults.custom;
        let shows_thresholds = custom["thresholdsStyle"]["mode"] == "line";
        let steps = defaults.thresholds.steps.iter().filter(|_| shows_thresholds);
        Chart {
            unit: &defaults.unit,
            bars: custom["drawStyle"] == "bars",
            steps: custom["lineInterpolation"] == "stepAfter",
            filled: custom["drawStyle"] == "line" && custom["fillOpacity"] != 0,
            thresholds: steps.filter_map(|step| Some((step.value?, named(&step.color).0))).collect(),
            window: self.window,
            width,
            height,
        }
    }
}

fn place(GridPos { x, y, w, h }: GridPos) -> String {
    let [x, w] = [x, w].map(|columns| f64::from(columns) * CELL.0);
    let [y, h] = [y, h].map(|rows| f64::from(rows) * CELL.1);
    format!("left:{x}px;top:{y}px;width:{}px;height:{}px;", w - GAP, h - GAP)
}

/// The width and height that a panel has for its content.
fn inner(GridPos { w, h, .. }: GridPos) -> (f64, f64) {
    (f64::from(w) * CELL.0 - GAP - 2.0 * PADDING, f64::from(h) * CELL.1 - GAP)
}

fn no_value(panel: &Panel) -> String {
    panel.field_config.defaults.no_value.clone().unwrap_or_else(|| "No data".to_owned())
}

/// The legend's words, with labels put in.
fn series_name(target: &Target, labels: &BTreeMap<String, String>) -> String {
    let put_in =
        |name: String, (label, value): (&String, &String)| name.replace(&format!("{{{{{label}}}}}"), value);
    labels.iter().fold(target.legend_format.clone(), put_in)
}

/// The colour that a panel gives a series of this name, and whether it is dashed.
fn overridden(panel: &Panel, name: &str) -> (Option<&'static str>, bool) {
    let mine = panel.field_config.overrides.iter().filter(|it| it["matcher"]["options"] == name);
    let properties = mine.flat_map(|it| it["properties"].as_array().expect("an override has properties"));
    properties.fold((None, false), |(colour, dashed), property| match property["id"].as_str() {
        Some("color") => (property["value"]["fixedColor"].as_str().map(|colour| named(colour).0), dashed),
        Some("custom.lineStyle") => (colour, property["value"]["fill"] == "dash"),
        other => panic!("no override was of {other:?} yet: say here what it does"),
    })
}

fn page(dashboard: &Dashboard, shown: &Shown) -> String {
    let panels: String = dashboard.panels.iter().map(|panel| shown.panel(panel)).collect();
    let rows =
        dashboard.panels.iter().map(|panel| panel.grid_pos.y + panel.grid_pos.h).max().expect("it has panels");
    let (title, style) = (escaped(&dashboard.title), include_str!("picture.css"));
    let (file, height) = (FILES[0].0, f64::from(rows) * CELL.1);
    let chosen =
        iter::once("all jobs, all instances".to_owned()).chain([format!("last {} seconds", RANGE.as_secs())]);
    format!(
        r#"<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>
<header><h1>{title}</h1><p>{}</p></header><main style="height:{height}px">{panels}</main>
<footer>Drawn from grafana/dashboards/{file} and the answers of a Prometheus to its queries. Grafana draws it in its own way.</footer></html>"#,
        chosen.collect::<Vec<_>>().join(" · "),
    )
}

#[test]
#[ignore = "makes docs/dashboard.png again, in the two minutes that its charts take to be full"]
fn of_the_overview() {
    let (Some(programs), Some(mut browser)) = (Programs::find(), Browser::start()) else { return };
    let redis = Redis::start();
    let names = ["logic-node-17", "logic-node-18"];
    let sidecars = names.map(|name| Sidecar::on(&redis, name, &[]));
    let targets = sidecars.each_ref().map(|sidecar| ("ackwheel", sidecar.admin));
    let prometheus = Prometheus::start(&programs.prometheus, &targets);
    let _default = sidecars.each_ref().map(|sidecar| Watch::start(sidecar, &["--group", "default"]));
    let _audit = Watch::start(&sidecars[0], &["--group", "audit"]);
    thread::scope(|scope| {
        for (seed, sidecar) in (1..).zip(&sidecars) {
            scope.spawn(move || traffic::run(sidecar.listen, seed, WARMING_UP + RANGE));
        }
    });
    let end = UNIX_EPOCH.elapsed().expect("it is after 1970");
    let shown = Shown { prometheus: &prometheus, window: ((end - RANGE).as_secs_f64(), end.as_secs_f64()) };
    let dashboard = Dashboard::read(FILES[0].0);
    for panel in dashboard.shown() {
        let speaks = shown.lines(panel).iter().any(|line| line.last().is_some());
        assert!(speaks, "{:?} has nothing to show", panel.title);
    }

    let html = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dashboard.html");
    fs::write(&html, page(&dashboard, &shown)).unwrap();
    browser.open(&format!("file://{}", html.display()), VIEW);
    let cut_off = browser.value(
        "[...document.querySelectorAll('section')].filter((it) => it.scrollWidth > it.clientWidth || \
         it.scrollHeight > it.clientHeight).map((it) => it.innerText)",
    );
    assert_eq!(cut_off, json!([]), "in {}", html.display());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/dashboard.png");
    let taken = browser.screenshot(VIEW, &path);
    let pixels = browser.pixels(&taken);
    let picture = png::indexed(VIEW.width, &pixels);
    assert!((20_000..180_000).contains(&picture.len()), "{} bytes are too few or too many", picture.len());
    let differences = browser.pixels(&picture).into_iter().zip(pixels).map(|(one, other)| one.abs_diff(other));
    let greatest = differences.max();
    assert!(greatest.is_some_and(|greatest| greatest < 24), "the palette changed a colour by {greatest:?}");
    println!("{}: {} bytes, a colour changed by {greatest:?} at most", path.display(), picture.len());
    fs::write(path, picture).unwrap();
}
