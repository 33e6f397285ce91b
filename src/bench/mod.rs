//! Load over the real protocol, from one process, every answer checked: what `ackwheel bench` does.
//!
//! ```text
//!   run ── coordinator: phases, progress, timeouts, the server's figures       (one thread)
//!    │
//!    ├──── crew: connection ─ traffic ─ wire                                   (a thread or more)
//!    │     crew: …       │        ├── outstanding  what is unanswered
//!    │                   │        ├── ids          messages that nobody stores
//!    │                   │        ├── pace         when a request is due, at a fixed rate
//!    │                   │        └── recorder     latencies
//!    │                 sockets
//! ```
//!
//! A load shares its machine with the server, so that it must cost less than what it measures: frames are written and
//! read in place (`wire`), ids are computed and not kept (`ids`), the clock is read once a round, and answers that
//! came together to requests that were sent together are one record. Whatever is unusual goes through the codec.
//!
//! A load fills the wheel to [`LoadOptions::in_flight`], is measured for [`LoadOptions::seconds`], deletes what is left,
//! and waits for what must time out.
//!
//! ```no_run
//! use ackwheel::bench::{self, LoadOptions};
//!
//! let options = LoadOptions { address: "127.0.0.1:7415".parse()?, seconds: 3.0, ..LoadOptions::default() };
//! let report = load::run(&options, |_| {})?;
//! println!("{:.0} frames/s, {} errors", report.frames_per_second, report.errors);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bystanders;
mod connection;
mod coordinator;
mod crew;
mod errors;
mod figures;
mod ids;
mod options;
mod order;
mod outstanding;
mod pace;
mod plan;
mod recorder;
mod report;
mod timeouts;
mod traffic;
mod unusual;
mod wire;

use std::sync::atomic::{AtomicU64, Ordering};

#[doc(hidden)]
pub use crew::stay_awake;
pub use options::{LoadOptions, Op, Order};
#[doc(hidden)]
pub use order::acknowledged;
pub use report::{Latency, LatencyReport, Lateness, Report, ServerFigures};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The options ask for what cannot be done; the text says what to write instead, as the command line names it.
    #[error("{0}")]
    Options(String),
    /// A connection could not be made, or was lost: what is left of the load would be another load.
    #[error("{0}")]
    Connection(String),
    /// The operating system gave no thread or no timer.
    #[error("the load cannot be started: {0}")]
    Start(#[from] std::io::Error),
}

/// What a load is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Connections are made.
    Connecting,
    /// The wheel is filled.
    Filling,
    /// It is measured.
    Measuring,
    /// What is left is deleted.
    Deleting,
    /// What was not acknowledged times out.
    Waiting,
}

/// How far a load is. It is told about ten times a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// What it is doing.
    pub stage: Stage,
    /// How much of that is done, from 0 to 1.
    pub share: f64,
    /// Requests answered per second since the last time.
    pub frames_per_second: f64,
}

/// Makes a load and waits for its end. It blocks, on threads of its own; within a runtime call it where blocking is
/// allowed. Errors of the server are in the report.
///
/// # Errors
///
/// Where the options are not possible, or a connection cannot be made or is lost.
pub fn run(options: &LoadOptions, progress: impl Fn(Progress) + Send + Sync) -> Result<Report, LoadError> {
    options.check()?;
    crew::run(options, &progress)
}

#[expect(clippy::cast_precision_loss, reason = "what a load counts stays far below 2^53")]
const fn as_float(count: u64) -> f64 {
    count as f64
}

/// What all connections together have done and seen so far.
#[derive(Debug, Default)]
struct Live {
    frames: AtomicU64,
    messages: AtomicU64,
    /// When an AddNewMsg was sent whose answer told the tick, in ns since the load began.
    sighted_at: AtomicU64,
}

impl Live {
    fn count(&self, frames: u64, messages: u64) {
        self.frames.fetch_add(frames, Ordering::Relaxed);
        self.messages.fetch_add(messages, Ordering::Relaxed);
    }

    fn sighted(&self, sent_at: u64) {
        self.sighted_at.fetch_max(sent_at, Ordering::Relaxed);
    }

    fn sighted_at(&self) -> u64 {
        self.sighted_at.load(Ordering::Relaxed)
    }

    fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }
}
