//! Logging: limits repeated lines, and writes to stderr without a thread that waits for its reader.
//!
//! Lines are [`tracing`] events. The limit is a layer before the writer: it sees all lines, those of libraries too, and no
//! call site can forget it. Within ten seconds a call site writes at most [`MAX_LINES`] lines, of which at most
//! [`MAX_SAME`] are equal. Further lines are counted, and the count is logged: "… and 412 more like it in the last 10 s".
//!
//! The budget is one of each call site, and equal lines have a part of it, for three reasons:
//!
//! - With one budget for all call sites, a hostile client could silence a storm.
//! - With a budget for each text, a client that writes the text would have no limit.
//! - Without the limit of equal lines, a faulty group would silence the group beside it.
//!
//! Lines are equal if their fields and their ring are. Their connection does not count: a peer that is refused and comes
//! again has a new one each time.

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

use self::repeated_lines::{CHECK_INTERVAL, Limit, TARGET};
pub use self::repeated_lines::{MAX_LINES, MAX_SAME, RING, WINDOW};
use self::writer::{LogWriter, write_to_stderr};

/// How long the end of the process waits for the last lines. A drain may take 9.7 s, and 10 s with this.
const END_TIMEOUT: Duration = Duration::from_millis(250);

/// The log of this process, once it is started.
static LOG: OnceLock<(Limit, LogWriter)> = OnceLock::new();

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// An object a line.
    Json,
}

/// The filter of a `--log`. Lines about omitted lines always pass.
///
/// # Errors
///
/// If the text is no filter.
pub fn filter(text: &str) -> Result<EnvFilter, String> {
    let wrong = |why: String| {
        format!(
            "--log {text:?}: {why}; write error, warn, info, debug, trace or off, or a filter as in \
             info,ackwheel::server=debug"
        )
    };
    // A word that is no level counts as the name of a module, and then nothing else is logged.
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    let is_known = |word: &str| word.contains(['=', '[']) || is_level(word);
    if let Some(word) = text.split(',').map(str::trim).find(|word| !is_known(word)) {
        return Err(wrong(format!("{word:?} is no level")));
    }
    let filter = EnvFilter::try_new(text).map_err(|error| wrong(error.to_string()))?;
    let counts = format!("{TARGET}=info").parse().expect("a target and a level make a directive");
    Ok(filter.add_directive(counts))
}

/// Starts the log of this process, once; `now` is its clock.
///
/// # Errors
///
/// If `log` is no filter, or the system has no thread left.
pub fn start(log: &str, format: LogFormat, now: impl Fn() -> Instant + Send + Sync + 'static) -> io::Result<()> {
    let filter = filter(log).map_err(io::Error::other)?;
    let writer = LogWriter::start(write_to_stderr).map_err(|error| {
        let text = "no thread to write the log could be started";
        io::Error::other(format!("{text}: {error}; look at the limit of processes"))
    })?;
    let (limit, writer) = LOG.get_or_init(|| (Limit::new(now), writer));
    // Errors of the formatter itself would go to stderr around the writer.
    let lines = fmt::layer().with_writer(|| writer.clone()).log_internal_errors(false);
    let lines = match format {
        LogFormat::Text => lines.with_ansi(stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    registry().with(filter).with(limit.clone()).with(lines).init();
    Ok(())
}

/// Logs how many lines each window left out once it is over. Never returns.
pub async fn report_left_out() {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if let Some((limit, _)) = LOG.get() {
            limit.report_older_than(WINDOW);
        }
    }
}

/// Prints a line to stderr: behind all log lines if this process logs, and then without waiting for it.
pub fn print(line: &str) {
    match LOG.get() {
        Some((limit, writer)) => {
            limit.report_older_than(Duration::ZERO);
            writer.push(format!("{line}\n").as_bytes());
        }
        // If stderr cannot be written, there is no other place to report that.
        None => drop(writeln!(stderr(), "{line}")),
    }
}

/// Logs how many lines were left out, and waits until all lines are written, for a quarter of a second at most. For the
/// end of the process.
pub fn flush() {
    if let Some((limit, writer)) = LOG.get() {
        limit.report_older_than(Duration::ZERO);
        writer.wait_until_written(END_TIMEOUT);
    }
}

/// How many log lines this process has dropped.
pub fn dropped_lines() -> u64 {
    LOG.get().map_or(0, |(_, writer)| writer.dropped())
}
