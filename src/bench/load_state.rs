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

/// A phase of a load (one run of the bench). It says what each connection does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Open connections and answer Pings.
    Rest,
    /// Add messages until each connection has its share of the messages in flight.
    Fill,
    /// Add and delete, or ping, between these times in ns since the load began. This phase is measured. If the rate is
    /// fixed, requests that were due before `until` are still sent for up to one second after `until`.
    Measure { from: u64, until: u64 },
    /// Delete the remaining messages.
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
    /// The number of answered requests of all connections.
    pub(super) frames: AtomicU64,
    /// The number of messages in these requests.
    pub(super) messages: AtomicU64,
    /// One recorder of latencies for each thread that generates load.
    pub(super) recorders: Vec<Mutex<Recorder>>,
    pub(super) timeouts: Mutex<Timeouts>,
    /// The Welcome of the server.
    pub(super) welcome: OnceLock<Welcome>,
    clock: Clock,
    begun: Instant,
}

impl LoadState {
    /// Creates the state of a load that begins now. `seed` determines its message ids.
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
            timeouts: Mutex::new(Timeouts::new(ids)),
            welcome: OnceLock::new(),
            begun: clock.now(),
            clock,
        }
    }

    /// Returns the recorder of the thread that serves a connection.
    pub(super) fn recorder(&self, connection: usize) -> &Mutex<Recorder> {
        &self.recorders[connection % self.recorders.len()]
    }

    /// Returns the time in ns since the load began.
    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.clock.now().duration_since(self.begun).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the moment that is `at` ns after the load began.
    pub(super) fn moment(&self, at: u64) -> Instant {
        self.begun + Duration::from_nanos(at)
    }
}
