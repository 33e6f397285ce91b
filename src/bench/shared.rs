//! The state that the threads of a bench share, its errors, and the counters of each connection.

use std::fmt::Display;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::BenchOptions;
use super::ids::Ids;
use super::latency::Recorder;
use super::timeouts::Timeouts;
use crate::clock::Clock;
use crate::protocol::frame::Welcome;

/// The phase of the whole load: the work of each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Make connections, and answer Pings.
    Rest,
    /// Add until the window of the connection is full.
    Fill,
    /// Add and delete, or ping, between these times in ns since the load began, and make the requests that were due
    /// before the end. This phase is measured.
    Measure { from: u64, until: u64 },
    /// Delete the messages that are left.
    Clean,
    /// The load is over.
    Done,
}

/// The state that the threads of a bench share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: BenchOptions,
    pub(super) ids: Ids,
    pub(super) errors: Errors,
    /// Requests answered so far, by all connections, and the messages in them.
    pub(super) frames: AtomicU64,
    pub(super) messages: AtomicU64,
    /// When the latest AddNewMsg was sent whose answer named the tick, in ns since the load began.
    pub(super) ticked_at: AtomicU64,
    /// A recorder for each thread that makes load.
    pub(super) recorders: Vec<Mutex<Recorder>>,
    pub(super) timeouts: Mutex<Timeouts>,
    /// The Welcome of the server.
    pub(super) welcome: OnceLock<Welcome>,
    clock: Clock,
    begun: Instant,
}

impl Shared {
    /// The state of a load that begins now. Its ids are drawn from `seed`.
    pub(super) fn new(options: BenchOptions, seed: u64) -> Shared {
        let ids = Ids::new(seed, options.acked, options.clients, options.connections);
        let clock = Clock::start();
        Shared {
            recorders: (0..options.threads).map(|_| Mutex::default()).collect(),
            options,
            ids,
            errors: Errors::default(),
            frames: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            ticked_at: AtomicU64::new(0),
            timeouts: Mutex::new(Timeouts::new(ids)),
            welcome: OnceLock::new(),
            begun: clock.now(),
            clock,
        }
    }

    /// The recorder of the thread that serves a connection.
    pub(super) fn recorder(&self, connection: usize) -> &Mutex<Recorder> {
        &self.recorders[connection % self.recorders.len()]
    }

    /// The time in ns since the load began.
    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.clock.now().duration_since(self.begun).as_nanos()).unwrap_or(u64::MAX)
    }

    /// The moment so many ns after the beginning.
    pub(super) fn moment(&self, at: u64) -> Instant {
        self.begun + Duration::from_nanos(at)
    }
}

/// The counters of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    /// The number of the connection.
    pub(super) connection: usize,
    /// Messages added while it was measured.
    pub(super) added: u64,
    /// Messages acknowledged while it was measured.
    pub(super) acked: u64,
    /// Requests answered while it was measured.
    pub(super) frames: u64,
    /// Pairs, or Pings, that were due at a fixed rate and never made.
    pub(super) not_made: u64,
    /// Messages in flight that are not to be acknowledged, since the beginning.
    pub(super) left_to_time_out: u64,
    /// Numbers that were given to messages, since the beginning.
    pub(super) numbers: u64,
}

/// How many different texts are kept.
const KEPT: usize = 8;

/// The errors of a load.
#[derive(Debug, Default)]
pub(super) struct Errors {
    inner: Mutex<(u64, Vec<String>)>,
}

impl Errors {
    /// Counts an error. A text that is known already is not kept again.
    pub(super) fn record(&self, text: impl Into<String>) {
        let text = text.into();
        self.count(|known| *known == text, || text.clone());
    }

    /// Counts an error of a kind; only the first example is kept.
    pub(super) fn record_kind(&self, kind: &str, example: impl Display) {
        self.count(|known| known.starts_with(kind), || format!("{kind} ({example})"));
    }

    fn count(&self, is_known: impl FnMut(&String) -> bool, text: impl FnOnce() -> String) {
        let (count, texts) = &mut *self.inner.lock();
        *count += 1;
        if texts.len() < KEPT && !texts.iter().any(is_known) {
            texts.push(text());
        }
    }

    /// How many there were, and the first different ones.
    pub(super) fn first(&self) -> (u64, Vec<String>) {
        self.inner.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_counted_and_the_first_different_ones_kept() {
        let errors = Errors::default();
        for number in 0..100 {
            errors.record("the same");
            errors.record_kind("a kind", number);
            errors.record(format!("number {number}"));
        }
        let (count, texts) = errors.first();
        assert_eq!((count, texts.len()), (300, KEPT));
        assert_eq!(texts[..4], ["the same", "a kind (0)", "number 0", "number 1"]);
    }
}
