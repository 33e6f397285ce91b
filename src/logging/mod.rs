//! Limits repeated log lines. Writes lines on a separate thread, so that no other thread waits for the reader of
//! stderr.
//!
//! A line is a [`tracing`] event, and a call site is a place in the code that logs such events. The limit applies to
//! error, warn and info lines of all call sites, including those of libraries. Within ten seconds a call site writes at
//! most [`MAX_LINES`] lines, and the same line at most [`MAX_SAME`] times. Further lines are counted, and the count is
//! logged: "… and 412 more like it in the last 10 s".
//!
//! Each call site has a budget of its own, and equal lines can use only a part of the budget. There are three reasons:
//!
//! - With one budget for all call sites, a hostile client could suppress important lines of other call sites.
//! - With a budget for each text, a client that chooses the text could log without a limit.
//! - Without the limit of equal lines, lines about one faulty group could suppress lines about another group.
//!
//! Two lines of a call site are equal if their fields are equal and they are about the same ring. Their connection is
//! ignored, because a refused peer that reconnects has a new connection each time.

mod escape;
mod repeated_lines;
mod writer;

use std::io::{self, IsTerminal, Write, stderr};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Deserialize;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt, registry};

use self::escape::{EscapingWriter, escaped};
use self::repeated_lines::{CHECK_INTERVAL, Limit, TARGET};
pub use self::repeated_lines::{MAX_LINES, MAX_SAME, RING, WINDOW};
use self::writer::{LogWriter, write_to_stderr};

/// The maximum time that the process waits at its end until the last lines are written. A drain may take 9.7 s before
/// that, and the process must end within 10 s.
const END_TIMEOUT: Duration = Duration::from_millis(250);

/// The log of this process. Empty before [`start`].
static LOG: OnceLock<(Limit, LogWriter)> = OnceLock::new();

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Parses the filter of `--log`. Lines that report how many lines were left out always pass the filter.
///
/// # Errors
///
/// If `text` is not a valid filter.
pub fn filter(text: &str) -> Result<EnvFilter, String> {
    let wrong = |why: String| {
        format!(
            "--log {text:?}: {why}; write error, warn, info, debug, trace or off, or a filter as in \
             info,ackwheel::server=debug"
        )
    };
    // `EnvFilter` takes a word that is not a level as the name of a module, and then logs only that module.
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    let is_known = |word: &str| word.contains(['=', '[']) || is_level(word);
    if let Some(word) = text.split(',').map(str::trim).find(|word| !is_known(word)) {
        return Err(wrong(format!("{word:?} is no level")));
    }
    let filter = EnvFilter::try_new(text).map_err(|error| wrong(error.to_string()))?;
    let counts = format!("{TARGET}=info").parse().expect("a target and a level make a directive");
    Ok(filter.add_directive(counts))
}

/// Starts the log of this process. Must be called only once. `now` returns the time for the limit of repeated lines.
///
/// # Errors
///
/// If `log` is not a valid filter, or if the system has no thread left.
pub fn start(log: &str, format: LogFormat, now: impl Fn() -> Instant + Send + Sync + 'static) -> io::Result<()> {
    let filter = filter(log).map_err(io::Error::other)?;
    let writer = LogWriter::start(write_to_stderr).map_err(|error| {
        let text = "no thread to write the log could be started";
        io::Error::other(format!("{text}: {error}; look at the limit of processes"))
    })?;
    let (limit, writer) = LOG.get_or_init(|| (Limit::new(now), writer));
    // With its internal errors enabled, the formatter would write them directly to stderr, without the writer.
    let has_colours = format == LogFormat::Text && stderr().is_terminal();
    let writer =
        move || EscapingWriter { writer: writer.clone(), is_json: format == LogFormat::Json, has_colours };
    let lines = fmt::layer().with_writer(writer).log_internal_errors(false);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(has_colours).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    registry().with(filter).with(limit.clone()).with(lines).init();
    Ok(())
}

/// Logs how many lines each call site left out, about every ten seconds while lines are left out. Never returns.
pub async fn report_left_out() {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if let Some((limit, _)) = LOG.get() {
            limit.report_older_than(WINDOW);
        }
    }
}

/// Prints a line to stderr. Before [`start`], writes the line directly. After [`start`], logs how many lines were left
/// out, queues the line after all log lines, and returns before the line is written.
pub fn print(line: &str) {
    let lines = line.split('\n').map(|line| escaped(line, false, false));
    let line = lines.collect::<Vec<_>>().join("\n");
    match LOG.get() {
        Some((limit, writer)) => {
            limit.report_older_than(Duration::ZERO);
            writer.push(format!("{line}\n").as_bytes());
        }
        // If stderr cannot be written, there is no other place to report that.
        None => drop(writeln!(stderr(), "{line}")),
    }
}

/// Logs how many lines were left out. Then waits until all lines are written, but for at most 250 ms. The process calls
/// this at its end.
pub fn flush() {
    if let Some((limit, writer)) = LOG.get() {
        limit.report_older_than(Duration::ZERO);
        writer.wait_until_written(END_TIMEOUT);
    }
}

/// Returns how many log lines this process has dropped, because stderr could not be written, or not fast enough.
pub fn dropped_lines() -> u64 {
    LOG.get().map_or(0, |(_, writer)| writer.dropped())
}
