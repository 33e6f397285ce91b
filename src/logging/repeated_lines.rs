//! Limits the lines that a call site may log, and logs how many lines were left out. A call site is a place in the code
//! that logs a line.

use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber, error, info, warn};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::core::{MAX_GROUPS, MAX_RINGS};

/// The length of a window: the time after which a call site gets a new budget of lines.
pub const WINDOW: Duration = Duration::from_secs(10);

/// The maximum number of lines of a call site within [`WINDOW`]: enough for a line about each ring or each group.
pub const MAX_LINES: usize = 100;

/// The number of lines by which the budget of a call site grows after each [`WINDOW`]. So a client that causes lines all
/// day, with texts of its choice, fills no disk.
const REFILL: u64 = 10;

/// The maximum number of equal lines of a call site within [`WINDOW`]. It is 3, so that a fault that begins three times
/// within a window is logged each time.
pub const MAX_SAME: usize = 3;

const _: () =
    assert!(MAX_SAME >= 1 && MAX_SAME < MAX_LINES, "else one line could take the budget of its call site");
const _: () = assert!(MAX_LINES > MAX_GROUPS, "else a fault of all groups would be logged for only some");
const _: () = assert!(MAX_LINES > MAX_RINGS as usize, "else a fault of all rings would be logged for only some");

/// The target of the lines that report how many lines were left out. Filters should let this target pass, because the
/// counted lines themselves have passed the filter.
pub(super) const TARGET: &str = "ackwheel::logging";

/// The name of the span for lines about one ring. Lines with the same fields count as different if they are in spans of
/// different rings. All other spans are ignored.
pub const RING: &str = "ring";

/// How often the log checks whether a window has ended.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How many characters of a left-out line are quoted in the line that reports it.
const MAX_QUOTED: usize = 200;

/// The limit for the error, warn and info lines of each call site. Other lines are not limited. Clones share their
/// state.
#[derive(Clone)]
pub(super) struct Limit(Arc<Shared>);

struct Shared {
    now: Box<dyn Fn() -> Instant + Send + Sync>,
    /// Hashes lines with a random key, so that no client can choose a line with the hash of another line.
    hashes: RandomState,
    budgets: Mutex<HashMap<CallSite, Budget>>,
}

/// A call site, its level and its target.
type CallSite = (Identifier, Level, &'static str);

impl Limit {
    /// Creates a limit with the clock `now`.
    pub(super) fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Limit {
        Limit(Arc::new(Shared { now: Box::new(now), hashes: RandomState::new(), budgets: Mutex::default() }))
    }

    /// Reports the left-out lines of each window that began at least `least_age` ago.
    pub(super) fn report_older_than(&self, least_age: Duration) {
        let now = (self.0.now)();
        let take =
            |(site, budget): (&CallSite, &mut Budget)| Some((site.clone(), budget.take_left_out(now, least_age)?));
        let left_out: Vec<_> = self.0.budgets.lock().iter_mut().filter_map(take).collect();
        for (site, lines) in left_out {
            report(site, &lines, now.saturating_duration_since(lines.since));
        }
    }
}

/// Logs how many lines were left out. The report has the level of these lines, so that a search for the level finds it.
/// Its target is [`TARGET`], so that no filter drops it.
fn report((_, level, place): CallSite, left_out: &LeftOut, within: Duration) {
    let (LeftOut { count, text, .. }, seconds) = (left_out, within.as_secs().max(1));
    macro_rules! line {
        ($level:ident) => {
            $level!(
                target: TARGET,
                place,
                left_out = count,
                "… and {count} more like it in the last {seconds} s: {text}"
            )
        };
    }
    match level {
        Level::ERROR => line!(error),
        Level::WARN => line!(warn),
        _ => line!(info),
    }
}

impl<S> Layer<S> for Limit
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn event_enabled(&self, event: &Event<'_>, context: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO || metadata.target() == TARGET {
            return true;
        }
        let mut line = Line { hasher: self.0.hashes.build_hasher(), text: String::new() };
        event.record(&mut line);
        for span in context.event_scope(event).into_iter().flatten().filter(|span| span.name() == RING) {
            span.id().hash(&mut line.hasher);
        }
        let site = (metadata.callsite(), *metadata.level(), metadata.target());
        let now = (self.0.now)();
        let mut budgets = self.0.budgets.lock();
        budgets.entry(site).or_insert_with(|| Budget::new(now)).admits(line.hasher.finish(), line.text, now)
    }
}

/// The hash of a line's fields, and the beginning of its text.
struct Line {
    hasher: DefaultHasher,
    text: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        (field.name(), &text).hash(&mut self.hasher);
        if field.name() == "message" {
            self.text = text.chars().take(MAX_QUOTED).collect();
        }
    }
}

/// The budget of a call site, and the lines that the call site has logged in its present window.
struct Budget {
    since: Instant,
    /// The hashes of the lines that were written in the present window.
    written: Vec<u64>,
    /// How many of the [`MAX_LINES`] lines of the budget are used.
    used: u64,
    /// The lines that were left out and are not reported yet; `None` without such lines.
    left_out: Option<LeftOut>,
}

/// The lines that were left out.
#[derive(Debug, PartialEq, Eq)]
struct LeftOut {
    /// The beginning of the window in which the first of these lines was left out.
    since: Instant,
    count: u64,
    /// The text of the first left-out line.
    text: String,
}

impl Budget {
    fn new(now: Instant) -> Budget {
        Budget { since: now, written: Vec::new(), used: 0, left_out: None }
    }

    /// Returns whether a line may be written. If not, counts the line as left out. `line` is the hash of the line.
    fn admits(&mut self, line: u64, text: String, now: Instant) -> bool {
        let windows = now.saturating_duration_since(self.since).as_secs() / WINDOW.as_secs();
        if windows > 0 {
            self.since = now;
            self.used = self.used.saturating_sub(windows.saturating_mul(REFILL));
            self.written.clear();
        }
        let same = self.written.iter().filter(|written| **written == line).count();
        if same < MAX_SAME && self.used < MAX_LINES as u64 {
            self.used += 1;
            self.written.push(line);
            return true;
        }
        self.left_out.get_or_insert(LeftOut { since: self.since, count: 0, text }).count += 1;
        false
    }

    /// Takes the left-out lines, if their window began at least `least_age` before `now`.
    fn take_left_out(&mut self, now: Instant, least_age: Duration) -> Option<LeftOut> {
        self.left_out.take_if(|left_out| now.saturating_duration_since(left_out.since) >= least_age)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use tracing::{debug, error_span, info_span};
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::{fmt as lines, registry};

    use super::*;

    /// The lines that were written.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Written {
        fn take(&self) -> Vec<serde_json::Value> {
            let text = String::from_utf8(std::mem::take(&mut *self.0.lock())).unwrap();
            text.lines().map(|line| serde_json::from_str(line).expect("each line is an object")).collect()
        }
    }

    /// Runs `work` with a log that is limited. `work` can set the clock of the limit and read the written lines.
    fn logged(work: impl FnOnce(&Limit, &Mutex<Instant>, &Written)) {
        let (clock, written) = (Arc::new(Mutex::new(Instant::now())), Written::default());
        let (read, writer) = (Arc::clone(&clock), written.clone());
        let limit = Limit::new(move || *read.lock());
        let subscriber =
            registry().with(limit.clone()).with(lines::layer().json().with_writer(move || writer.clone()));
        tracing::subscriber::with_default(subscriber, || work(&limit, &clock, &written));
    }

    #[test]
    fn a_fault_that_repeats_is_written_three_times_and_counted() {
        logged(|limit, clock, written| {
            for _ in 0..415 {
                warn!(cause = "too many open files", "no connection could be accepted");
            }
            assert_eq!(written.take().len(), MAX_SAME);
            limit.report_older_than(WINDOW);
            assert!(written.take().is_empty(), "the window is not over");
            *clock.lock() += WINDOW;
            limit.report_older_than(WINDOW);
            let lines = written.take();
            assert_eq!(lines.len(), 1, "{lines:?}");
            let (level, fields) = (&lines[0]["level"], &lines[0]["fields"]);
            assert_eq!((level, &fields["left_out"]), (&"WARN".into(), &412.into()));
            assert_eq!(
                fields["message"],
                "… and 412 more like it in the last 10 s: no connection could be accepted"
            );
            assert_eq!(fields["place"], module_path!());
            warn!(cause = "too many open files", "no connection could be accepted");
            assert_eq!(written.take().len(), 1, "another place has a budget of its own");
        });
    }

    #[test]
    fn lines_differ_by_fields_by_span_and_by_text_and_debug_is_not_limited() {
        logged(|limit, _, written| {
            let say = |group: &str| error!(group, "batches wait");
            (0..50).for_each(|_| say("a"));
            (0..50).for_each(|_| say("b"));
            // Lines with the same fields in the span of one ring count as equal, even if one of them is also in an
            // inner span.
            let rings = [0, 1].map(|number| error_span!(RING, ring = number));
            for ring in rings.iter().cycle().take(50) {
                ring.in_scope(|| say("a"));
                ring.in_scope(|| info_span!("within").in_scope(|| say("a")));
            }
            let lines = written.take();
            let of = |group: &str| lines.iter().filter(|line| line["fields"]["group"] == group).count();
            assert_eq!((of("a"), of("b")), (3 * MAX_SAME, MAX_SAME), "{lines:?}");

            (0..1_000).for_each(|number| info!("text {number}"));
            (0..1_000).for_each(|_| debug!("asked for"));
            assert_eq!(written.take().len(), MAX_LINES + 1_000);
            limit.report_older_than(Duration::ZERO);
            let mut counts: Vec<_> = written
                .take()
                .iter()
                .map(|line| (line["level"].clone(), line["fields"]["left_out"].clone()))
                .collect();
            counts.sort_by_key(|(level, _)| level.to_string());
            let info = 1_000 - MAX_LINES;
            assert_eq!(counts, [("ERROR".into(), (200 - 4 * MAX_SAME).into()), ("INFO".into(), info.into())]);
        });
    }

    #[test]
    fn a_peer_that_comes_again_and_again_does_not_silence_the_others() {
        logged(|_, _, written| {
            let refused = |port: u32, refusal: &str| {
                let connection = info_span!("connection", peer = %format_args!("127.0.0.1:{port}"));
                connection.in_scope(|| info!(refusal, "connection refused further service"));
            };
            (0..10_000).for_each(|port| refused(port, "the frame is not one"));
            refused(10_000, "the token is wrong");
            let lines = written.take();
            assert_eq!(lines.len(), MAX_SAME + 1, "{lines:?}");
            let last = &lines[MAX_SAME];
            assert_eq!(last["fields"]["refusal"], "the token is wrong");
            assert_eq!(last["span"]["peer"], "127.0.0.1:10000", "a written line names its peer");
        });
    }

    #[test]
    fn a_long_text_is_quoted_in_part() {
        logged(|limit, _, written| {
            (0..10).for_each(|_| info!("{}", "ä".repeat(2 * MAX_QUOTED)));
            limit.report_older_than(Duration::ZERO);
            let message = written.take().pop().unwrap()["fields"]["message"].to_string();
            assert!(message.ends_with("ää\"") && message.matches('ä').count() == MAX_QUOTED, "{message}");
        });
    }

    /// Counts a line in the budget, and returns whether the line may be written.
    fn admits(budget: &mut Budget, line: u64, now: Instant) -> bool {
        budget.admits(line, format!("line {line}"), now)
    }

    fn count_written(budget: &mut Budget, lines: impl Iterator<Item = u64>, now: Instant) -> usize {
        lines.filter(|line| admits(budget, *line, now)).count()
    }

    #[test]
    fn the_same_line_is_written_three_times_and_then_counted() {
        let begin = Instant::now();
        let mut budget = Budget::new(begin);
        for millis in 0..415 {
            let written = admits(&mut budget, 7, begin + Duration::from_millis(millis));
            assert_eq!(written, millis < MAX_SAME as u64, "after {millis} ms");
        }
        assert_eq!(budget.take_left_out(begin + Duration::from_millis(9_999), WINDOW), None);
        let expected = LeftOut { since: begin, count: 412, text: String::from("line 7") };
        assert_eq!(budget.take_left_out(begin + WINDOW, WINDOW), Some(expected));
        assert_eq!(budget.take_left_out(begin + WINDOW, Duration::ZERO), None, "a count is reported only once");
    }

    #[test]
    fn lines_that_differ_are_written_beside_one_that_repeats() {
        let now = Instant::now();
        let mut budget = Budget::new(now);
        assert_eq!(count_written(&mut budget, std::iter::repeat_n(0, 1_000), now), MAX_SAME);
        assert_eq!(count_written(&mut budget, 1..=5, now), 5, "lines about other groups are written");
        // A call site stays within its budget even if all its lines differ, because a client may choose the text.
        assert_eq!(count_written(&mut budget, 6..100_000, now), MAX_LINES - MAX_SAME - 5);
        let left_out = budget.take_left_out(now, Duration::ZERO).map(|left_out| left_out.count);
        assert_eq!(left_out, Some(1_000 + 5 + 100_000 - 6 - MAX_LINES as u64));
    }

    #[test]
    fn every_group_and_every_ring_is_heard_when_all_are_in_trouble() {
        for all in [MAX_GROUPS, MAX_RINGS.into()] {
            let now = Instant::now();
            let mut budget = Budget::new(now);
            assert_eq!(count_written(&mut budget, (0..).take(all), now), all);
            assert_eq!(budget.take_left_out(now, Duration::ZERO), None);
        }
    }

    #[test]
    fn a_new_window_brings_a_new_budget_and_forgets_no_count() {
        let begin = Instant::now();
        let mut budget = Budget::new(begin);
        assert_eq!(count_written(&mut budget, std::iter::repeat_n(0, 5), begin), MAX_SAME);
        // The count of the first window is not taken yet.
        let later = begin + WINDOW;
        assert_eq!(count_written(&mut budget, std::iter::repeat_n(0, 5), later), MAX_SAME);
        let left_out = budget.take_left_out(later, WINDOW).map(|left_out| (left_out.count, left_out.since));
        assert_eq!(left_out, Some((4, begin)));
        assert_eq!(count_written(&mut budget, std::iter::repeat_n(0, 5), later), 0, "the second window goes on");
        assert_eq!(budget.take_left_out(later + WINDOW, WINDOW).map(|left_out| left_out.count), Some(5));
    }

    #[test]
    fn a_call_site_that_logs_all_day_writes_ten_lines_in_each_window() {
        let mut now = Instant::now();
        let mut budget = Budget::new(now);
        let mut lines = 0..;
        let mut write = |budget: &mut Budget, now| count_written(budget, lines.by_ref().take(1_000), now);
        assert_eq!(write(&mut budget, now), MAX_LINES);
        let written: usize = (0..8_640)
            .map(|_| {
                now += WINDOW;
                write(&mut budget, now)
            })
            .sum();
        assert_eq!(written, 86_400, "in a day");
        // After a pause, no more than the whole budget is there.
        assert_eq!(write(&mut budget, now + WINDOW * 5), 50);
        assert_eq!(write(&mut budget, now + WINDOW * 10_000), MAX_LINES);
    }

    #[test]
    fn lines_within_the_budget_are_never_reported() {
        let mut now = Instant::now();
        let mut budget = Budget::new(now);
        for _ in 0..100 {
            assert_eq!(count_written(&mut budget, std::iter::repeat_n(0, MAX_SAME), now), MAX_SAME);
            now += WINDOW;
            assert_eq!(budget.take_left_out(now, WINDOW), None);
        }
        assert!(budget.written.len() <= MAX_LINES);
    }
}
