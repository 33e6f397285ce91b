//! `ackwheel bench`: generates load over the real protocol from one process, and checks every answer.
//!
//! ```text
//!   run ── coordinator: phases, progress, timeouts, the server's figures       (one thread)
//!    │
//!    ├──── worker: connection ─ traffic ─ frames                               (a thread or more)
//!    │     worker: …     │        ├── ids          messages, computed from their numbers
//!    │                   │        ├── schedule     when a request is due, at a fixed rate
//!    │                   │        └── records      histograms
//!    │                 sockets
//! ```
//!
//! The bench often shares its machine with the server, so it must use less CPU time than the server. It checks answers
//! in place (`frames`), computes ids instead of storing them (`ids`), and reads the clock once per round. Requests that
//! are sent together and answered together are one record of a histogram.
//!
//! A load is one run of the bench. It adds [`BenchOptions::in_flight`] messages and measures for
//! [`BenchOptions::seconds`]. Then it deletes the remaining messages, and waits for the messages that must time out.
//!
//! ```no_run
//! use ackwheel::bench::{self, BenchOptions};
//!
//! let options = BenchOptions { address: "127.0.0.1:7415".parse()?, seconds: 3.0, ..BenchOptions::default() };
//! let report = bench::run(&options, &|_| {})?;
//! println!("{:.0} frames/s, {} errors", report.frames_per_second, report.errors);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod connection;
mod coordinator;
mod frames;
mod ids;
mod lateness_clients;
mod load_state;
mod options;
mod records;
mod report;
mod schedule;
mod timeouts;
mod traffic;
mod workers;

#[doc(hidden)]
pub use ids::acknowledged;
pub use options::{BenchOptions, Op, Order};
pub(crate) use report::get;
pub use report::{Latency, Report, ServerFigures};
pub use workers::run;
#[doc(hidden)]
pub use workers::stay_awake;

/// The reason why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An option is not possible. The text names the flag and a possible value.
    #[error("{0}")]
    Options(String),
    /// A connection could not be opened or was lost. The bench ends, because fewer connections would make a different
    /// load.
    #[error("{0}")]
    Connection(String),
    /// The operating system could not create a thread or a timer.
    #[error("the load cannot be started: {0}; look at the limits of processes and open files")]
    Start(#[from] std::io::Error),
}

/// The progress of a bench, reported about ten times a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// The stage: connecting, filling, measuring, deleting or timing out.
    pub stage: &'static str,
    /// The share of the stage that is done, from 0 to 1.
    pub share: f64,
    /// Requests answered per second since the last report of progress.
    pub frames_per_second: f64,
}

#[expect(clippy::cast_precision_loss, reason = "what a load counts stays far below 2^53")]
const fn as_float(count: u64) -> f64 {
    count as f64
}

fn lost(text: impl Into<String>) -> BenchError {
    BenchError::Connection(text.into())
}
