//! The state that the threads of a bench share.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::BenchOptions;
use super::ids::Ids;
use super::records::{Errors, Recorder};
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
pub(super) struct LoadState {
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

impl LoadState {
    /// The state of a load that begins now. Its ids are drawn from `seed`.
    pub(super) fn new(options: BenchOptions, seed: u64) -> LoadState {
        let ids = Ids::new(seed, options.acked, options.clients, options.connections);
        let clock = Clock::start();
        LoadState {
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
