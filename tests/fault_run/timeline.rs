//! The faults of a run in the order of their time, and the messages that they concern.

use std::time::{Duration, Instant};

use super::faults::{Kind, Topology};
use super::history::{Breach, Request};

/// How long after a fault a sidecar may take to reach Redis again.
const RECONNECT: Duration = Duration::from_secs(2);

/// How long after a fault everything is as in steady state again.
pub const RECOVERY: Duration = Duration::from_secs(6);

/// How long a primary that was cut off may expire ticks: 2 s without a confirmation, and the way of a batch.
const UNCONFIRMED: Duration = Duration::from_secs(3);

/// The last Ack of a message that was reported all the same.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    pub place: usize,
    pub begun: Instant,
    /// When its last batch arrived.
    pub reported: Instant,
}

/// A fault: of everything, or of the sidecar at one place.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub kind: Kind,
    pub place: Option<usize>,
    pub from: Instant,
    pub to: Instant,
    /// Until when writes may be lost with it, if it loses any: a server is replaced by one with an older state.
    pub loses_until: Option<Instant>,
}

impl Fault {
    fn meets(&self, from: Instant, to: Instant, after: Duration) -> bool {
        self.from <= to && from <= self.to + after
    }
}

#[derive(Clone, Debug)]
pub struct Timeline {
    pub topology: Topology,
    pub faults: Vec<Fault>,
}

impl Timeline {
    /// Records that a fault begins; returns its number.
    pub fn begin(&mut self, kind: Kind, place: Option<usize>) -> usize {
        let now = Instant::now();
        self.faults.push(Fault { kind, place, from: now, to: now, loses_until: None });
        self.faults.len() - 1
    }

    pub fn end(&mut self, fault: usize) {
        self.faults[fault].to = Instant::now();
    }

    /// Records that from now on nothing more is lost with a fault, but for requests that are on their way.
    pub fn lost_all(&mut self, fault: usize) {
        self.faults[fault].loses_until = Some(Instant::now() + RECONNECT);
    }

    /// Takes in what happened from one moment to another.
    pub fn insert(&mut self, kind: Kind, (from, to): (Instant, Instant)) {
        self.faults.push(Fault { kind, place: None, from, to, loses_until: None });
    }

    /// Takes in that a replica took over by itself, from one moment to another, and that writes were lost with it.
    pub fn insert_loss(&mut self, (from, to): (Instant, Instant)) {
        let loses_until = Some(to + RECONNECT);
        self.faults.push(Fault { kind: Kind::FailoverUnasked, place: None, from, to, loses_until });
    }

    /// How many faults the run caused.
    pub fn caused(&self) -> usize {
        self.faults.iter().filter(|fault| fault.kind.is_caused()).count()
    }

    pub fn count(&self, kind: Kind) -> usize {
        self.faults.iter().filter(|fault| fault.kind == kind).count()
    }

    /// Whether the sidecar that was asked could pass on a request to the others.
    pub fn heard(&self, request: &Request) -> bool {
        // A wheel in memory waits for its own process.
        let isolated = |fault: &Fault| {
            fault.place == Some(request.place)
                && fault.kind.isolates()
                && fault.meets(request.begun, request.ended, RECONNECT)
        };
        self.topology == Topology::Memory || !self.faults.iter().any(isolated)
    }

    /// Whether there was no fault from one moment to another, nor for a while before.
    pub fn is_steady(&self, from: Instant, to: Instant) -> bool {
        !self.faults.iter().any(|fault| fault.meets(from, to, RECOVERY))
    }

    /// The kinds of the faults from one moment to another, a bit each.
    pub fn kinds(&self, from: Instant, to: Instant) -> u32 {
        let met = self.faults.iter().filter(|fault| fault.meets(from, to, Duration::ZERO));
        met.fold(0, |bits, fault| bits | fault.kind.bit())
    }

    /// Whether the contract allows this breach for a message that lived from one moment to another.
    ///
    /// Acks that reached the new primary stay valid: the old one, which is cut off, expires nothing after a moment.
    pub fn allows(&self, breach: Breach, from: Instant, to: Instant, acked: Option<Acked>) -> bool {
        let meets = |fault: &Fault| match fault.loses_until {
            Some(until) => fault.from <= to && from <= until,
            None => fault.meets(from, to, RECOVERY),
        };
        let is_kept = |fault: &Fault| {
            (fault.kind, breach) == (Kind::PrimaryPartitioned, Breach::AckedAndReported)
                && acked.is_some_and(|acked| {
                    Some(acked.place) != fault.place
                        && acked.begun > fault.from
                        && acked.reported > fault.from + UNCONFIRMED
                })
        };
        let allows = |fault: &Fault| fault.kind.allows(breach, self.topology) && meets(fault) && !is_kept(fault);
        self.faults.iter().any(allows)
    }
}
