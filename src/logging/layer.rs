//! The limit as a layer of [`tracing_subscriber`].

use std::collections::hash_map::RandomState;
use std::convert::Infallible;
use std::fmt::{self, Debug, Write as _};
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Metadata, Subscriber, error, info, warn};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::repeats::{LeftOut, Repeats};

/// The target of the lines that say how many were left out. A filter should let them through: they speak only of
/// what it let through before.
pub const TARGET: &str = "ackwheel::logging";

/// The name of spans that tell, in their fields, of which ring a line speaks. Of all spans these alone tell lines of the
/// same words apart.
pub const RING: &str = "ring";

/// How often it is looked whether a window is over.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The most bytes of a line's text that the line about its repetitions quotes.
const MAX_QUOTED: usize = 200;

/// Leaves out what a place says again and again, and says how much that was. Clones share what they know.
///
/// Errors, warnings and information are limited; whoever asks for `debug` wants all of it.
#[derive(Clone)]
pub struct Limit {
    shared: Arc<Shared>,
}

struct Shared {
    now: Box<dyn Fn() -> Instant + Send + Sync>,
    /// Keyed at random: a stranger must not be able to write a line that is taken for another.
    hashes: RandomState,
    repeats: Mutex<Repeats<Place>>,
}

/// A call site.
#[derive(Clone, Copy, Debug)]
struct Place(&'static Metadata<'static>);

impl PartialEq for Place {
    fn eq(&self, other: &Place) -> bool {
        self.0.callsite() == other.0.callsite()
    }
}

impl Eq for Place {}

impl Hash for Place {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.callsite().hash(state);
    }
}

impl Limit {
    /// A limit by this clock.
    pub fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Limit {
        let shared =
            Shared { now: Box::new(now), hashes: RandomState::new(), repeats: Mutex::new(Repeats::new()) };
        Limit { shared: Arc::new(shared) }
    }

    /// Says, once a window is over, what was left out in it; for as long as it is awaited.
    pub async fn maintain(&self) -> Infallible {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.say_what_is_due();
        }
    }

    /// Says what was left out in windows that are over.
    pub fn say_what_is_due(&self) {
        let due = self.shared.repeats.lock().due((self.shared.now)());
        due.iter().for_each(say);
    }

    /// Says all that was left out so far: the last that a process logs.
    pub fn say_all(&self) {
        let all = self.shared.repeats.lock().all((self.shared.now)());
        all.iter().for_each(say);
    }
}

impl Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limit").field("repeats", &self.shared.repeats).finish_non_exhaustive()
    }
}

/// In the level of what was left out, so that it is found by whoever looks for that level. The target is [`TARGET`], so
/// that no filter keeps it back; that of what was left out is the field `place`.
fn say(left: &LeftOut<Place>) {
    let LeftOut { place: Place(metadata), count, within, text } = left;
    let (place, seconds) = (metadata.target(), within.as_secs().max(1));
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
    match *metadata.level() {
        Level::ERROR => line!(error),
        Level::WARN => line!(warn),
        _ => line!(info),
    }
}

impl<S> Layer<S> for Limit
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if attributes.metadata().name() != RING {
            return;
        }
        let mut fields = Line { hasher: self.shared.hashes.build_hasher(), text: String::new() };
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(OfRing(fields.hasher.finish()));
        }
    }

    fn event_enabled(&self, event: &Event<'_>, context: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO || metadata.target() == TARGET {
            return true;
        }
        let mut line = Line { hasher: self.shared.hashes.build_hasher(), text: String::new() };
        event.record(&mut line);
        // The same words about another ring are another line.
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(ring) = span.extensions().get::<OfRing>() {
                ring.hash(&mut line.hasher);
            }
        }
        let now = (self.shared.now)();
        let Line { hasher, text } = line;
        self.shared.repeats.lock().admits(Place(metadata), hasher.finish(), || text, now)
    }
}

/// The fields of a span that names a ring, as their hash.
#[derive(Hash)]
struct OfRing(u64);

/// What makes a line the same as another: its fields, the text among them.
struct Line<H> {
    hasher: H,
    text: String,
}

impl<H: Hasher> Visit for Line<H> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        field.name().hash(&mut self.hasher);
        // Neither writer fails.
        if field.name() == "message" {
            let _ = write!(self.text, "{value:?}");
            self.text.hash(&mut self.hasher);
            let mut ends = (0..=MAX_QUOTED.min(self.text.len())).rev();
            self.text.truncate(ends.find(|end| self.text.is_char_boundary(*end)).unwrap_or_default());
        } else {
            let _ = write!(Hashing(&mut self.hasher), "{value:?}");
        }
    }
}

/// What is written goes into a hash, and nowhere else.
struct Hashing<'a, H>(&'a mut H);

impl<H: Hasher> fmt::Write for Hashing<'_, H> {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        self.0.write(part.as_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use tracing::{debug, error_span, info_span};
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::{fmt as lines, registry};

    use super::*;
    use crate::logging::{MAX_LINES, MAX_SAME, WINDOW};

    /// What was written, and a clock to turn.
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

    /// Has `work` log through a limit, and turn its clock.
    fn logged(work: impl FnOnce(&Limit, &Mutex<Instant>, &Written)) {
        let (clock, written) = (Arc::new(Mutex::new(Instant::now())), Written::default());
        let (read, writer) = (Arc::clone(&clock), written.clone());
        let limit = Limit::new(move || *read.lock());
        let subscriber =
            registry().with(limit.clone()).with(lines::layer().json().with_writer(move || writer.clone()));
        tracing::subscriber::with_default(subscriber, || work(&limit, &clock, &written));
    }

    #[test]
    fn a_fault_that_repeats_is_written_thrice_and_counted() {
        logged(|limit, clock, written| {
            for _ in 0..415 {
                warn!(cause = "too many open files", "no connection could be accepted");
            }
            assert_eq!(written.take().len(), MAX_SAME);
            limit.say_what_is_due();
            assert!(written.take().is_empty(), "the window is not over");
            *clock.lock() += WINDOW;
            limit.say_what_is_due();
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
            // A ring is the same whoever speaks of it, and wherever.
            for number in (0..2).cycle().take(50) {
                error_span!(RING, ring = number).in_scope(|| say("a"));
                info_span!("within").in_scope(|| error_span!(RING, ring = number).in_scope(|| say("a")));
            }
            let lines = written.take();
            let of = |group: &str| lines.iter().filter(|line| line["fields"]["group"] == group).count();
            assert_eq!((of("a"), of("b")), (3 * MAX_SAME, MAX_SAME), "{lines:?}");

            (0..1_000).for_each(|number| info!("text {number}"));
            (0..1_000).for_each(|_| debug!("asked for"));
            assert_eq!(written.take().len(), MAX_LINES + 1_000);
            limit.say_all();
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
            assert_eq!(last["span"]["peer"], "127.0.0.1:10000", "what is written says whom it is about");
        });
    }

    #[test]
    fn a_long_text_is_quoted_in_part() {
        logged(|limit, _, written| {
            (0..10).for_each(|_| info!("{}", "ä".repeat(MAX_QUOTED)));
            limit.say_all();
            let message = written.take().pop().unwrap()["fields"]["message"].to_string();
            assert!(message.ends_with("ää\"") && message.matches('ä').count() == MAX_QUOTED / 2, "{message}");
        });
    }
}
