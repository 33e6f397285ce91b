//! The sidecars of a run, the store that they share if they do, and the order in which faults happen.

use std::env;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use tempfile::TempDir;

use super::faults::{Kind, Topology};
use super::history::Wheel;
use super::pressure::Pressure;
use super::shared::{Listeners, Shared, side_of};
use super::store::{Store, on_side};
use super::timeline::Timeline;
use crate::support::clock::{Clock, FakeClock};
use crate::support::network::{self, Network};
use crate::support::process::{Log, program};
use crate::support::proxy::Proxy;
use crate::support::sidecar::Sidecar;

/// How long a drain may take: 10 s, and what a busy machine needs.
const LONGEST_DRAIN: Duration = Duration::from_secs(12);

/// How long everything may take to become as it was, after the last fault.
const LONGEST_REPAIR: Duration = Duration::from_secs(60);

/// Written to a log before its reader goes.
pub(super) const READER_LEAVES: &str = "the reader leaves";

/// From one look at what is to end to the next.
const LOOK: Duration = Duration::from_millis(5);

/// From one look which server is the primary to the next.
const WATCH: Duration = Duration::from_millis(500);

/// How long nothing happens before a fault that finds everything in steady state.
const STEADY_MS: std::ops::Range<u64> = 9_000..12_000;

/// The end of a fault, or its next step.
#[derive(Debug)]
pub(super) enum Remedy {
    /// The sidecar of a place is started again, once it has ended.
    Start(usize),
    GoOn(usize),
    LetGo(usize),
    /// A log is read again.
    Read(Log),
    Manners,
    Thaw,
    /// A paused server goes on.
    ServerGoesOn(usize),
    ServerStarts(usize),
    Writable,
    /// A server is started with an older state.
    Restore(TempDir),
    /// A primary is killed whose replica is behind.
    KillPrimary,
    /// The old primary comes back, once the other has taken over.
    Rejoin(usize),
    /// The same after a request, which Sentinels may give up: it is repeated at `again`.
    Requested {
        old: usize,
        again: Instant,
    },
    /// The same for one that is cut off: the network heals some time later.
    HealLater(usize),
    /// The network heals; the server that was cut off is then the replica.
    Heal(usize),
    /// The old primary is made a replica, if the Sentinels have not yet done so.
    Demote(usize),
    /// The old primary is the replica.
    InStep(usize),
    /// Other clients of Redis stop.
    Relax(Pressure),
    /// The load of a flood is over.
    Ebb,
}

/// A fault that lasts.
#[derive(Debug)]
pub(super) struct Ongoing {
    pub due: Instant,
    pub fault: usize,
    /// The place or the store that has no other fault meanwhile.
    pub occupies: Option<Subject>,
    pub remedy: Remedy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Place(usize),
    Store,
}

#[derive(Debug, Default)]
pub(super) struct Place {
    /// The sidecar there, and since when it drains if it does.
    pub sidecar: Option<(Sidecar, Option<Instant>)>,
    /// Its way to Redis.
    pub proxy: Option<Proxy>,
    /// The clock that it believes, if that can be set.
    pub clock: Option<FakeClock>,
}

pub struct Stage {
    pub(super) topology: Topology,
    wheel: Wheel,
    pub(super) shared: Arc<Shared>,
    pub(super) random: SmallRng,
    begun: Instant,
    pub(super) places: Vec<Place>,
    pub(super) store: Store,
    state: TempDir,
    network: Option<Arc<Network>>,
    /// Little time between faults, and none in which there are none.
    is_dense: bool,
    bag: Vec<Kind>,
    pub(super) ongoing: Vec<Ongoing>,
    pub timeline: Timeline,
    pub(super) logs: Vec<Log>,
    /// When it was last seen which server is the primary.
    watched: Instant,
    /// Problems beside the messages, in words.
    pub problems: Vec<String>,
}

impl Stage {
    /// One sidecar with a wheel in memory, or three that share one.
    pub fn new(
        topology: Topology,
        wheel: Wheel,
        network: Option<Arc<Network>>,
        seed: u64,
        is_dense: bool,
    ) -> Stage {
        let store = Store::start(topology, network.clone());
        let places = if store.is_shared() { 3 } else { 1 };
        let proxy = || (topology == Topology::Redis).then(|| Proxy::to(store.server(0).port));
        // Reading a clock that can be set is slow: one sidecar has it.
        let clock = |place| (place + 1 == places).then(|| FakeClock::new(Clock::Offset(0)));
        let place = |place| Place { sidecar: None, proxy: proxy(), clock: clock(place) };
        let mut stage = Stage {
            topology,
            wheel,
            shared: Arc::new(Shared::new(places)),
            random: SmallRng::seed_from_u64(seed),
            begun: Instant::now(),
            places: (0..places).map(place).collect(),
            state: match store.disk() {
                Some(disk) if !store.is_shared() => tempfile::tempdir_in(disk.path()),
                _ => tempfile::tempdir(),
            }
            .expect("a folder can be made"),
            store,
            network,
            is_dense,
            bag: Vec::new(),
            ongoing: Vec::new(),
            timeline: Timeline { topology, faults: Vec::new() },
            logs: Vec::new(),
            watched: Instant::now(),
            problems: Vec::new(),
        };
        (0..places).for_each(|place| stage.start(place));
        stage.wait_until_ready();
        stage
    }

    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Has faults happen until a moment, and then repairs everything.
    pub fn run(&mut self, until: Instant) {
        while Instant::now() < until {
            if !self.cause_next() {
                self.repair();
                thread::sleep(LOOK);
                continue;
            }
            let pause = match self.random.random_range(0..100) {
                _ if self.is_dense => 0..700,
                0..40 => 200..1_000,
                40..98 => 1_000..2_500,
                _ => {
                    self.repair_until(until, |stage| stage.ongoing.is_empty());
                    STEADY_MS
                }
            };
            let next = Instant::now() + self.ms(pause);
            self.repair_until(until, |_| Instant::now() >= next);
        }
        let longest = Instant::now() + LONGEST_REPAIR;
        self.repair_until(longest, |stage| stage.ongoing.is_empty());
        if self.ongoing.is_empty() {
            self.wait_until_ready();
            self.print("all faults are over");
        } else {
            self.problems.push(format!("after {LONGEST_REPAIR:?} still: {:?}", self.ongoing));
        }
    }

    pub fn sidecars(&self) -> impl Iterator<Item = &Sidecar> {
        self.places.iter().flat_map(|place| &place.sidecar).map(|(sidecar, _)| sidecar)
    }

    /// All logs, also of sidecars that were killed.
    pub fn logs(&self) -> impl Iterator<Item = String> {
        self.logs.iter().map(Log::text)
    }

    fn wait_until_ready(&self) {
        self.sidecars().for_each(Sidecar::wait_until_ready);
    }

    pub(super) fn start(&mut self, index: usize) {
        let tick = humantime::format_duration(self.wheel.tick).to_string();
        let slots = self.wheel.slots.to_string();
        let name = format!("place-{index}");
        let state = self.state.path().join(&name);
        let place = &self.places[index];
        let sidecar = on_side(self.network.as_ref(), side_of(index), || {
            let address = format!("{}:0", network::here());
            let mut command = program(&["serve", "--listen", &address, "--resp", &address, "--admin", &address]);
            command.args(["--tick", &tick, "--slots", &slots, "--redeliver-after", "2s"]);
            if !network::here().is_loopback() {
                command.arg("--insecure");
            }
            if self.store.is_shared() {
                let flags = self.store.flags(place.proxy.as_ref().map(Proxy::url));
                command.args(flags).args(["--name", &name]);
            } else {
                command.arg("--journal").arg(&state);
            }
            if let Some(clock) = &place.clock {
                clock.rule(&mut command);
            }
            Sidecar::spawn(&mut command)
        });
        self.logs.push(sidecar.log().clone());
        let resp = sidecar.resp.expect("it was started with --resp");
        self.shared.set_listen(index, Some(Listeners { native: sidecar.listen, resp }));
        self.places[index].sidecar = Some((sidecar, None));
    }

    /// The kinds of faults of this run.
    fn kinds(&self) -> Vec<Kind> {
        let only = env::var("FAULT_RUN_ONLY").ok();
        let mut kinds = Kind::of(self.topology);
        kinds.retain(|kind| only.as_ref().is_none_or(|only| only == kind.name()));
        assert!(!kinds.is_empty(), "FAULT_RUN_ONLY={only:?} names no fault of this store");
        kinds
    }

    /// Causes the next fault of a shuffled bag that can happen now; false if none can.
    fn cause_next(&mut self) -> bool {
        let possible = |stage: &Stage| stage.bag.iter().position(|kind| stage.can_happen(*kind));
        let kinds = self.kinds().len();
        // The faults left in the bag may have to wait for the store; others need not.
        if possible(self).is_none() && self.bag.len() < kinds {
            let mut more = self.kinds();
            more.shuffle(&mut self.random);
            self.bag.extend(more);
        }
        let Some(index) = possible(self) else { return false };
        let kind = self.bag.remove(index);
        self.cause(kind);
        true
    }

    pub(super) fn is_free(&self, subject: Subject) -> bool {
        !self.ongoing.iter().any(|ongoing| ongoing.occupies == Some(subject))
    }

    /// The places whose sidecar runs and has no fault of its own.
    pub(super) fn free_places(&self) -> Vec<usize> {
        let runs = |place: &usize| self.places[*place].sidecar.is_some() && self.is_free(Subject::Place(*place));
        (0..self.places.len()).filter(runs).collect()
    }

    fn repair_until(&mut self, latest: Instant, is_enough: impl Fn(&Stage) -> bool) {
        while Instant::now() < latest && !is_enough(self) {
            self.repair();
            thread::sleep(LOOK);
        }
    }

    /// Ends what is to end by now.
    fn repair(&mut self) {
        self.watch_the_primary();
        for _ in 0..self.ongoing.len() {
            // The others stay in the list: what ends may ask for them.
            let ongoing = self.ongoing.remove(0);
            if Instant::now() < ongoing.due {
                self.ongoing.push(ongoing);
            } else {
                self.end(ongoing);
            }
        }
    }

    /// Records a failover that was no fault of the run: on a busy machine a primary may be silent for too long.
    fn watch_the_primary(&mut self) {
        let fails_over = matches!(self.topology, Topology::Sentinel | Topology::Cluster);
        if !fails_over || self.watched.elapsed() < WATCH || !self.is_free(Subject::Store) {
            return;
        }
        let other = self.store.replica();
        if self.store.has_taken_over(other) {
            let fault = self.timeline.begin(Kind::FailoverUnasked, None);
            self.timeline.faults[fault].from = self.watched;
            self.timeline.end(fault);
            self.timeline.lost_all(fault);
            self.store.primary = other;
            self.print(Kind::FailoverUnasked.name());
        }
        self.watched = Instant::now();
    }

    /// Whether nothing runs at a place any more, after a crash or a drain.
    pub(super) fn has_left(&mut self, index: usize) -> bool {
        let Some((sidecar, drains)) = &mut self.places[index].sidecar else { return true };
        let took = drains.expect("it was asked to go").elapsed();
        match sidecar.exited() {
            None if took < LONGEST_DRAIN => return false,
            None => {
                let log = sidecar.log().text();
                sidecar.kill();
                self.problems.push(format!("a drain took longer than {LONGEST_DRAIN:?}: {log}"));
            }
            Some(status) if status.code() == Some(0) => {}
            // The verdict counts lost messages and Acks.
            // A log without a reader does not say why.
            Some(status)
                if status.code() == Some(1)
                    && ["the drain lost ", READER_LEAVES]
                        .iter()
                        .any(|said| sidecar.log().whole().contains(said)) => {}
            Some(status) => self.problems.push(format!("a drain ended with {status}: {}", sidecar.log().text())),
        }
        self.shared.set_listen(index, None);
        self.places[index].sidecar = None;
        true
    }

    pub(super) fn sidecar(&self, index: usize) -> &Sidecar {
        let (sidecar, _) = self.places[index].sidecar.as_ref().expect("it runs");
        sidecar
    }

    pub(super) fn ms(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.random.random_range(range))
    }

    pub(super) fn print(&self, what: &str) {
        println!("{:>8.3} s  {what}", self.begun.elapsed().as_secs_f64());
    }
}
