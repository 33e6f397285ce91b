//! Charts as SVG: lines or bars over time, a scale, and the thresholds that lie within it.

use std::fmt::Write as _;

use super::units::formatted;

/// Between the left edge and the first moment: the figures of the scale.
const SCALE: f64 = 58.0;
/// Below the chart: from when to when.
const TIMES: f64 = 20.0;
/// Above it, so that the highest line is seen whole.
const HEAD: f64 = 8.0;

/// A series on a chart.
pub struct Line {
    pub name: String,
    pub colour: String,
    pub dashed: bool,
    /// Unix times and values.
    pub points: Vec<(f64, f64)>,
}

/// How a panel draws its series.
pub struct Chart<'a> {
    pub unit: &'a str,
    pub bars: bool,
    pub steps: bool,
    pub filled: bool,
    /// Values with their colours.
    pub thresholds: Vec<(f64, &'a str)>,
    /// The Unix times of the left edge and of the right.
    pub window: (f64, f64),
    pub width: f64,
    pub height: f64,
}

impl Line {
    /// The values that are numbers.
    fn values(&self) -> impl DoubleEndedIterator<Item = f64> {
        self.points.iter().map(|(_, value)| *value).filter(|value| value.is_finite())
    }

    pub fn last(&self) -> Option<f64> {
        self.values().next_back()
    }

    pub fn highest(&self) -> Option<f64> {
        self.values().reduce(f64::max)
    }
}

impl Chart<'_> {
    pub fn svg(&self, lines: &[Line]) -> String {
        let (width, height) = (self.width, self.height);
        let (marks, top) = scale(
            lines.iter().filter_map(Line::highest).fold(0.0, f64::max),
            matches!(self.unit, "none" | "short"),
        );
        let mut svg = format!(r#"<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">"#);
        for mark in marks {
            let y = self.y(mark, top);
            let text = formatted(mark, self.unit, None);
            let _ = write!(
                svg,
                r#"<path class="grid" d="M{SCALE} {y:.1}H{width}"/><text x="{}" y="{:.1}" class="mark">{text}</text>"#,
                SCALE - 8.0,
                y + 4.0,
            );
        }
        for (value, colour) in self.thresholds.iter().filter(|(value, _)| *value < top) {
            let y = self.y(*value, top);
            let _ = write!(svg, r#"<path class="threshold" stroke="{colour}" d="M{SCALE} {y:.1}H{width}"/>"#);
        }
        let (from, to) = self.window;
        let _ = write!(
            svg,
            r#"<text x="{SCALE}" y="{0}">{1} ago</text><text x="{width}" y="{0}" class="mark">now</text>"#,
            height - 3.0,
            format_args!("{:.0} s", to - from),
        );
        // The first series lies on top: it is the one that a panel is about.
        lines.iter().rev().for_each(|line| svg += &self.line(line, top));
        svg + "</svg>"
    }

    /// The course of a number alone, over the whole width and height.
    pub fn sparkline(&self, line: &Line) -> String {
        let (width, height) = (self.width, self.height);
        let top = line.highest().unwrap_or_default().max(f64::MIN_POSITIVE) * 1.1;
        let place = |(time, value): &(f64, f64)| {
            let x = (time - self.window.0) / (self.window.1 - self.window.0) * width;
            format!("{x:.1} {:.1}", height * (1.0 - value / top))
        };
        let places: Vec<String> = line.points.iter().filter(|(_, value)| value.is_finite()).map(place).collect();
        let (course, colour) = (places.join("L"), &line.colour);
        format!(
            r#"<svg class="spark" width="{width}" height="{height}"><path fill="{colour}" fill-opacity=".12" d="M0 {height}L{course}L{width} {height}Z"/><path class="line" stroke="{colour}" d="M{course}"/></svg>"#
        )
    }

    fn x(&self, time: f64) -> f64 {
        SCALE + (time - self.window.0) / (self.window.1 - self.window.0) * (self.width - SCALE)
    }

    fn y(&self, value: f64, top: f64) -> f64 {
        HEAD + (1.0 - value / top) * (self.height - HEAD - TIMES)
    }

    fn line(&self, line: &Line, top: f64) -> String {
        let (colour, ground) = (&line.colour, self.y(0.0, top));
        let points = line.points.iter().filter(|(_, value)| value.is_finite());
        if self.bars {
            let bar = |(time, value): &(f64, f64)| {
                format!("M{:.1} {ground:.1}V{:.1}", self.x(*time), self.y(*value, top))
            };
            let bars: String = points.filter(|(_, value)| *value > 0.0).map(bar).collect();
            return format!(r#"<path class="bars" stroke="{colour}" d="{bars}"/>"#);
        }
        let (mut course, mut before) = (String::new(), f64::NEG_INFINITY);
        for (time, value) in points {
            let (x, y) = (self.x(*time), self.y(*value, top));
            // A second without a value is a gap.
            let _ = match time - before {
                1.5.. => write!(course, "M{x:.1} {y:.1}"),
                _ if self.steps => write!(course, "H{x:.1}V{y:.1}"),
                _ => write!(course, "L{x:.1} {y:.1}"),
            };
            before = *time;
        }
        let dashes = if line.dashed { r#" stroke-dasharray="7 5""# } else { "" };
        let mut drawn = format!(r#"<path class="line" stroke="{colour}"{dashes} d="{course}"/>"#);
        if let (true, [(first, _), ..]) = (self.filled, &line.points[..]) {
            let _ = write!(
                drawn,
                r#"<path fill="{colour}" fill-opacity=".1" d="{course}V{ground:.1}H{:.1}Z"/>"#,
                self.x(*first),
            );
        }
        drawn
    }
}

/// The marks of a scale from 0 that reaches above a value, and where it ends: round numbers, three to five of them, and
/// whole ones where things are counted.
fn scale(highest: f64, counts: bool) -> (Vec<f64>, f64) {
    let wanted = if highest > 0.0 { highest } else { 1.0 };
    let power = 10_f64.powf((wanted / 4.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|step| step * 4.0 >= wanted);
    let step = step.expect("ten times the power is more than a quarter").max(if counts { 1.0 } else { 0.0 });
    let marks: Vec<f64> =
        (0..=4).map(|count| f64::from(count) * step).take_while(|mark| *mark <= wanted * 1.02).collect();
    (marks, wanted.max(step) * 1.06)
}

#[test]
fn a_scale_has_round_marks_and_holds_the_highest_value() {
    for (highest, counts, marks) in [
        (0.0, false, &[0.0, 0.5, 1.0][..]),
        (0.0, true, &[0.0, 1.0]),
        (0.3, true, &[0.0]),
        (2.0, true, &[0.0, 1.0, 2.0]),
        (3_400.0, false, &[0.0, 1_000.0, 2_000.0, 3_000.0]),
        (15.0, false, &[0.0, 5.0, 10.0, 15.0]),
    ] {
        let (found, top) = scale(highest, counts);
        assert_eq!(found, marks, "{highest}");
        assert!(top > highest, "{highest} is above {top}");
    }
}

#[test]
fn a_second_without_a_value_is_a_gap() {
    let chart = Chart {
        unit: "none",
        bars: false,
        steps: false,
        filled: false,
        thresholds: vec![(0.5, "red"), (30.0, "blue")],
        window: (0.0, 10.0),
        width: SCALE + 100.0,
        height: HEAD + TIMES + 106.0,
    };
    let points = vec![(0.0, 1.0), (1.0, 0.0), (2.0, f64::NAN), (3.0, 1.0), (4.0, 1.0)];
    let line = Line { name: "x".to_owned(), colour: "black".to_owned(), dashed: false, points };
    assert_eq!((line.last(), line.highest()), (Some(1.0), Some(1.0)));
    let svg = chart.svg(&[line]);
    assert!(svg.contains(r#"d="M58.0 14.0L68.0 114.0M88.0 14.0L98.0 14.0""#), "{svg}");
    // A threshold that no value comes near does not press the lines together.
    assert!(svg.contains(r#"stroke="red""#) && !svg.contains(r#"stroke="blue""#), "{svg}");
}
