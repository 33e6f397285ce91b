//! Which lines are written, and how many were left out: a state machine that takes `now`.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::core::group::MAX_GROUPS;
use crate::core::rings::MAX_RINGS;

/// How long a budget lasts.
pub const WINDOW: Duration = Duration::from_secs(10);

/// The most lines of one place within [`WINDOW`]: more than a place rightly has to say at once, one of each ring or of
/// each group.
pub const MAX_LINES: usize = 100;

/// The most of them that are the same. More than one, so that something that goes away and comes back twice within
/// the window is still seen to be back.
pub const MAX_SAME: usize = 3;

const _: () =
    assert!(MAX_SAME >= 1 && MAX_SAME < MAX_LINES, "else a line could take the whole budget of its place");
const _: () = assert!(MAX_LINES > MAX_GROUPS, "else a trouble of all groups would be told of some");
const _: () = assert!(MAX_LINES > MAX_RINGS as usize, "else a trouble of all rings would be told of some");

/// What every place has said lately. There are as many places as call sites: it grows no further.
#[derive(Debug)]
pub(super) struct Repeats<P> {
    places: HashMap<P, Spoken>,
}

/// What one place has said lately.
#[derive(Debug)]
struct Spoken {
    /// When its budget began.
    since: Instant,
    /// The lines that were written since, each as its hash.
    written: Vec<u64>,
    /// The lines that were not, and were not told of yet.
    left_out: Option<Unsaid>,
}

#[derive(Debug)]
struct Unsaid {
    /// Since when they are counted: the begin of the budget that was used up.
    since: Instant,
    count: u64,
    /// The text of the first of them.
    text: String,
}

/// Lines of one place that were not written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LeftOut<P> {
    pub place: P,
    pub count: u64,
    /// The time in which they came.
    pub within: Duration,
    /// The text of the first of them.
    pub text: String,
}

impl<P: Copy + Eq + Hash> Repeats<P> {
    pub fn new() -> Repeats<P> {
        Repeats { places: HashMap::new() }
    }

    /// Whether a line is written; else it is counted. `line` is its hash, `text` its words.
    pub fn admits(&mut self, place: P, line: u64, text: impl FnOnce() -> String, now: Instant) -> bool {
        let spoken =
            self.places.entry(place).or_insert_with(|| Spoken { since: now, written: Vec::new(), left_out: None });
        if now.saturating_duration_since(spoken.since) >= WINDOW {
            spoken.since = now;
            spoken.written.clear();
        }
        let same = spoken.written.iter().filter(|written| **written == line).count();
        if same < MAX_SAME && spoken.written.len() < MAX_LINES {
            spoken.written.push(line);
            return true;
        }
        let since = spoken.since;
        spoken.left_out.get_or_insert_with(|| Unsaid { since, count: 0, text: text() }).count += 1;
        false
    }

    /// What was left out in windows that are over.
    pub fn due(&mut self, now: Instant) -> Vec<LeftOut<P>> {
        self.take(now, |within| within >= WINDOW)
    }

    /// All that was left out and not told of yet: for the end.
    pub fn all(&mut self, now: Instant) -> Vec<LeftOut<P>> {
        self.take(now, |_| true)
    }

    fn take(&mut self, now: Instant, is_due: impl Fn(Duration) -> bool) -> Vec<LeftOut<P>> {
        let places = self.places.iter_mut();
        places
            .filter_map(|(place, spoken)| {
                let unsaid =
                    spoken.left_out.take_if(|unsaid| is_due(now.saturating_duration_since(unsaid.since)))?;
                let within = now.saturating_duration_since(unsaid.since);
                Some(LeftOut { place: *place, count: unsaid.count, within, text: unsaid.text })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says a line and returns whether it is written.
    fn say(repeats: &mut Repeats<&'static str>, place: &'static str, line: u64, now: Instant) -> bool {
        repeats.admits(place, line, || format!("line {line}"), now)
    }

    fn count_written(
        repeats: &mut Repeats<&'static str>,
        lines: impl Iterator<Item = u64>,
        now: Instant,
    ) -> usize {
        lines.filter(|line| say(repeats, "a", *line, now)).count()
    }

    #[test]
    fn the_same_line_is_written_thrice_and_then_counted() {
        let (mut repeats, begin) = (Repeats::new(), Instant::now());
        for millis in 0..415 {
            let written = say(&mut repeats, "a", 7, begin + Duration::from_millis(millis));
            assert_eq!(written, millis < MAX_SAME as u64, "after {millis} ms");
        }
        assert_eq!(repeats.due(begin + Duration::from_millis(9_999)), []);
        let expected = LeftOut { place: "a", count: 412, within: WINDOW, text: String::from("line 7") };
        assert_eq!(repeats.due(begin + WINDOW), [expected]);
        assert_eq!(repeats.all(begin + WINDOW), [], "it is told once");
    }

    #[test]
    fn lines_that_differ_are_written_beside_one_that_repeats() {
        let (mut repeats, now) = (Repeats::new(), Instant::now());
        assert_eq!(count_written(&mut repeats, std::iter::repeat_n(0, 1_000), now), MAX_SAME);
        assert_eq!(count_written(&mut repeats, 1..=5, now), 5, "other groups are heard");
        // However many differ, the place stays within its budget: a stranger may write the text.
        assert_eq!(count_written(&mut repeats, 6..100_000, now), MAX_LINES - MAX_SAME - 5);
        assert!(say(&mut repeats, "b", 0, now), "and other places are heard");
        assert_eq!(
            repeats.all(now).into_iter().map(|left| (left.place, left.count)).collect::<Vec<_>>(),
            [("a", 1_000 + 5 + 100_000 - 6 - MAX_LINES as u64)]
        );
    }

    #[test]
    fn every_group_and_every_ring_is_heard_when_all_are_in_trouble() {
        for all in [MAX_GROUPS, MAX_RINGS.into()] {
            let (mut repeats, now) = (Repeats::new(), Instant::now());
            assert_eq!(count_written(&mut repeats, (0..).take(all), now), all);
            assert_eq!(repeats.all(now), []);
        }
    }

    #[test]
    fn a_new_window_brings_a_new_budget_and_forgets_no_count() {
        let (mut repeats, begin) = (Repeats::new(), Instant::now());
        assert_eq!(count_written(&mut repeats, std::iter::repeat_n(0, 5), begin), MAX_SAME);
        // Nobody asked for what is due meanwhile.
        let later = begin + WINDOW;
        assert_eq!(count_written(&mut repeats, std::iter::repeat_n(0, 5), later), MAX_SAME);
        let left = repeats.due(later);
        assert_eq!((left.len(), left[0].count, left[0].within), (1, 4, WINDOW));
        assert_eq!(count_written(&mut repeats, std::iter::repeat_n(0, 5), later), 0, "the second window goes on");
        assert_eq!(repeats.due(later + WINDOW)[0].count, 5);
    }

    #[test]
    fn what_stays_below_the_budget_is_never_told_of() {
        let (mut repeats, mut now) = (Repeats::new(), Instant::now());
        for _ in 0..100 {
            assert_eq!(count_written(&mut repeats, std::iter::repeat_n(0, MAX_SAME), now), MAX_SAME);
            now += WINDOW;
            assert_eq!(repeats.due(now), []);
        }
        assert_eq!(repeats.places.len(), 1);
        assert!(repeats.places["a"].written.len() <= MAX_LINES);
    }
}
