//! Rounds: in each one every subject runs once, in turn.

use serde::Serialize;

/// The measurements of a subject, round by round.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The name of the subject.
    pub subject: String,
    /// The name of the measurement, with its unit.
    pub figure: &'static str,
    /// The median of the rounds.
    pub median: f64,
    /// One a round.
    pub rounds: Vec<f64>,
}

/// All that was measured.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Rows(pub Vec<Row>);

impl Rows {
    /// Notes a figure of the present round.
    pub fn record(&mut self, subject: &str, figure: &'static str, value: f64) {
        let known = self.0.iter().position(|row| row.subject == subject && row.figure == figure);
        let position = known.unwrap_or_else(|| {
            self.0.push(Row { subject: subject.to_owned(), figure, median: value, rounds: Vec::new() });
            self.0.len() - 1
        });
        let row = &mut self.0[position];
        row.rounds.push(value);
        row.median = median(&row.rounds);
    }

    fn row(&self, subject: &str, figure: &str) -> Option<&Row> {
        self.0.iter().find(|row| row.subject == subject && row.figure == figure)
    }

    /// The median of a figure; `None` where it was not measured.
    pub fn median(&self, subject: &str, figure: &str) -> Option<f64> {
        Some(self.row(subject, figure)?.median)
    }

    /// The ratio of two subjects' figures: the median of the ratios within a round.
    pub fn ratio(&self, of: (&str, &str), to: (&str, &str)) -> Option<f64> {
        let (of, to) = (self.row(of.0, of.1)?, self.row(to.0, to.1)?);
        let ratios: Vec<f64> = of.rounds.iter().zip(&to.rounds).map(|(of, to)| of / to).collect();
        Some(median(&ratios))
    }

    /// The ratio to the highest of several subjects.
    pub fn ratio_to_best(&self, of: (&str, &str), to: &[&str], figure: &str) -> Option<f64> {
        let measured = to.iter().filter_map(|subject| Some((self.median(subject, figure)?, *subject)));
        let (_, best) = measured.max_by(|one, other| one.0.total_cmp(&other.0))?;
        self.ratio(of, (best, figure))
    }
}

/// The middle one, or the mean of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_taken_within_a_round() {
        let mut rows = Rows::default();
        // The machine was slow in the second round, for both.
        for (ours, theirs) in [(20.0, 10.0), (2.0, 1.0), (30.0, 10.0)] {
            rows.record("ours", "pairs/s", ours);
            rows.record("theirs", "pairs/s", theirs);
        }
        rows.record("others", "pairs/s", 5.0);
        assert_eq!(rows.ratio(("ours", "pairs/s"), ("theirs", "pairs/s")), Some(2.0));
        assert_eq!(rows.ratio_to_best(("ours", "pairs/s"), &["others", "theirs", "none"], "pairs/s"), Some(2.0));
        assert_eq!(rows.ratio(("ours", "pairs/s"), ("nobody", "pairs/s")), None);
        assert_eq!((median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0])), (2.0, 2.5));
    }
}
