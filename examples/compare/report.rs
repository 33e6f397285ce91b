//! The report: a table for people, JSON for machines.

use std::fmt;

use serde::Serialize;

use crate::plan::Plan;
use crate::runs::Rows;

/// The results.
#[derive(Debug, Serialize)]
pub struct Report {
    cores: usize,
    plan: Plan,
    /// Part by part.
    pub parts: Vec<PartReport>,
}

/// The results of one part.
#[derive(Debug, Serialize)]
pub struct PartReport {
    part: String,
    /// The name of the measurement.
    pub rows: Rows,
    /// Its meaning.
    pub targets: Vec<Target>,
    /// The measurements that were skipped, and why.
    pub skipped: Vec<String>,
    /// Why the part ended before its end.
    pub failed: Option<String>,
}

/// A target, and how far it is reached.
#[derive(Debug, Serialize)]
pub struct Target {
    what: String,
    /// Whether more is better.
    more: bool,
    /// The value reached; none if it was not measured.
    figure: Option<f64>,
    /// The condition that must hold.
    first: f64,
    /// The target.
    aim: f64,
    verdict: Verdict,
}

/// From bad to good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
enum Verdict {
    #[serde(rename = "not measured")]
    NotMeasured,
    #[serde(rename = "short of it")]
    Short,
    #[serde(rename = "PASS")]
    Pass,
    #[serde(rename = "PASS, aim")]
    Aim,
}

impl Verdict {
    fn of(figure: Option<f64>, first: f64, aim: f64, more: bool) -> Verdict {
        let Some(figure) = figure else { return Verdict::NotMeasured };
        let holds = |bound: f64| if more { figure >= bound } else { figure <= bound };
        match (holds(first), holds(aim)) {
            (true, true) => Verdict::Aim,
            (true, false) => Verdict::Pass,
            _ => Verdict::Short,
        }
    }
}

impl Report {
    /// A report of nothing yet.
    pub fn new(plan: &Plan) -> Report {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Report { cores, plan: *plan, parts: Vec::new() }
    }

    /// Whether every part came to its end.
    pub fn is_complete(&self) -> bool {
        self.parts.iter().all(|part| part.failed.is_none())
    }

    /// Whether a first target is missed.
    pub fn misses_a_target(&self) -> bool {
        self.parts.iter().flat_map(|part| &part.targets).any(|target| target.verdict == Verdict::Short)
    }
}

impl PartReport {
    /// A report of nothing yet.
    pub fn new(part: String) -> PartReport {
        let (rows, targets, skipped) = (Rows::default(), Vec::new(), Vec::new());
        PartReport { part, rows, targets, skipped, failed: None }
    }

    /// A target of which more is better.
    pub fn at_least(&mut self, what: &str, figure: Option<f64>, first: f64, aim: f64) {
        self.targets.push(Target::at_least(what, figure, first, aim));
    }

    /// A target of which less is better.
    pub fn at_most(&mut self, what: &str, figure: Option<f64>, first: f64, aim: f64) {
        self.targets.push(Target::new(what, figure, (first, aim), false));
    }

    /// Two targets, one of which is to be reached: the one that is reached better counts.
    pub fn either(&mut self, one: Target, other: Target) {
        self.targets.push(if one.verdict >= other.verdict { one } else { other });
    }
}

impl Target {
    /// A target of which more is better.
    pub fn at_least(what: &str, figure: Option<f64>, first: f64, aim: f64) -> Target {
        Target::new(what, figure, (first, aim), true)
    }

    fn new(what: &str, figure: Option<f64>, (first, aim): (f64, f64), more: bool) -> Target {
        let verdict = Verdict::of(figure, first, aim, more);
        Target { what: what.to_owned(), more, figure, first, aim, verdict }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { rounds, idle_rounds, run, .. } = &self.plan;
        writeln!(
            f,
            "{} cores; median of {rounds} rounds (idle: {idle_rounds}) of {run:?} a run, and the lowest and highest",
            self.cores
        )?;
        self.parts.iter().try_for_each(|part| write!(f, "\n{part}"))
    }
}

impl fmt::Display for PartReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.part)?;
        for row in &self.rows.0 {
            let lowest = row.rounds.iter().copied().fold(f64::INFINITY, f64::min);
            let highest = row.rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let (median, range) =
                (Short(row.median).to_string(), format!("{} to {}", Short(lowest), Short(highest)));
            writeln!(f, "  {:<53} {median:>12} {:<31} {range}", row.subject, row.figure)?;
        }
        for target in &self.targets {
            let relation = if target.more { "at least" } else { "at most" };
            let figure = target.figure.map_or_else(|| String::from("-"), |figure| Short(figure).to_string());
            let wanted = format!("{relation} {} ({})", Short(target.first), Short(target.aim));
            writeln!(f, "  > {:<51} {figure:>12} {wanted:<31} {}", target.what, target.verdict)?;
        }
        for skipped in &self.skipped {
            writeln!(f, "  skipped: {skipped}")?;
        }
        self.failed.iter().try_for_each(|cause| writeln!(f, "  could not be measured to its end: {cause}"))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Aim => "PASS, aim",
            Verdict::Pass => "PASS",
            Verdict::Short => "short of it",
            Verdict::NotMeasured => "not measured",
        })
    }
}

/// A figure with about three digits that say something, and thousands apart.
struct Short(f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0.abs();
        let decimals =
            if size >= 100.0 { 0 } else { [3, 2, 1][usize::from(size >= 1.0) + usize::from(size >= 10.0)] };
        let plain = format!("{:.decimals$}", self.0);
        let (whole, fraction) = plain.split_once('.').map_or((plain.as_str(), None), |(a, b)| (a, Some(b)));
        // No figure here is below zero.
        for (position, digit) in whole.char_indices() {
            if position > 0 && (whole.len() - position) % 3 == 0 {
                f.write_str(",")?;
            }
            write!(f, "{digit}")?;
        }
        fraction.map_or(Ok(()), |digits| write!(f, ".{digits}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let cases =
            [(1_234_567.8, "1,234,568"), (999.4, "999"), (45.678, "45.7"), (1.234, "1.23"), (0.0567, "0.057")];
        for (figure, text) in cases {
            assert_eq!(Short(figure).to_string(), text);
        }
    }

    #[test]
    fn a_verdict_knows_which_way_is_better() {
        assert_eq!(Verdict::of(Some(0.5), 1.2, 0.6, false), Verdict::Aim);
        assert_eq!(Verdict::of(Some(1.0), 1.2, 0.6, false), Verdict::Pass);
        assert_eq!(Verdict::of(Some(1.3), 1.2, 0.6, false), Verdict::Short);
        assert_eq!(Verdict::of(Some(25.0), 20.0, 40.0, true), Verdict::Pass);
        assert_eq!(Verdict::of(None, 20.0, 40.0, true), Verdict::NotMeasured);
    }
}
