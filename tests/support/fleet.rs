//! Several sidecars on one Redis: which of them leads, and how the pointer moves under them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ackwheel::admin::status::StatusReport;

use super::clock::{Clock, FakeClock};
use super::http;
use super::redis::Redis;
use super::sidecar::Sidecar;
use super::{PATIENCE, wait_for};

/// Sidecars that stand for election.
pub struct Candidates<'a> {
    redis: &'a Redis,
    flags: Vec<&'a str>,
    running: BTreeMap<String, Sidecar>,
    /// A clock of its own for each, where they have one.
    clocks: Option<BTreeMap<String, FakeClock>>,
    started: usize,
}

impl<'a> Candidates<'a> {
    pub fn start(redis: &'a Redis, count: usize, flags: &[&'a str]) -> Candidates<'a> {
        Candidates::start_as(redis, count, flags, None)
    }

    /// Each believes a clock of its own.
    pub fn start_with_clocks(redis: &'a Redis, count: usize, flags: &[&'a str]) -> Candidates<'a> {
        Candidates::start_as(redis, count, flags, Some(BTreeMap::new()))
    }

    fn start_as(
        redis: &'a Redis,
        count: usize,
        flags: &[&'a str],
        clocks: Option<BTreeMap<String, FakeClock>>,
    ) -> Candidates<'a> {
        let mut candidates =
            Candidates { redis, flags: flags.to_vec(), running: BTreeMap::new(), clocks, started: 0 };
        (0..count).for_each(|_| candidates.start_another());
        candidates
    }

    pub fn start_another(&mut self) {
        self.started += 1;
        let name = format!("candidate-{}", self.started);
        let sidecar = match &mut self.clocks {
            None => Sidecar::on(self.redis, &name, &self.flags),
            Some(clocks) => {
                let clock = clocks.entry(name.clone()).or_insert_with(|| FakeClock::new(Clock::Offset(0)));
                Sidecar::on_with_clock(self.redis, &name, clock, &self.flags)
            }
        };
        self.running.insert(name, sidecar);
    }

    /// The name of the one that leads, as soon as one of those that run does.
    pub fn leader_name(&self) -> String {
        wait_for("one of the candidates leads", || {
            let asked = self.running.values().next().expect("one runs");
            asked.leader().filter(|name| self.running.contains_key(name))
        })
    }

    /// The one that leads.
    pub fn leader(&self) -> &Sidecar {
        &self.running[&self.leader_name()]
    }

    /// The one that leads is no longer one of them.
    pub fn take_leader(&mut self) -> Sidecar {
        let name = self.leader_name();
        self.running.remove(&name).expect("it runs")
    }

    /// Ends the one that leads as a crash would, and starts another.
    pub fn kill_the_leader(&mut self) {
        self.take_leader().kill();
        self.start_another();
    }

    /// Sets the clock of the one that leads.
    pub fn set_clock_of_the_leader(&self, clock: Clock) {
        let clocks = self.clocks.as_ref().expect("they were started with clocks");
        clocks[&self.leader_name()].set(clock);
    }
}

/// A pointer, and between which moments it was there.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub asked: Instant,
    pub answered: Instant,
    pub pointer: u64,
}

/// Looks at the pointer again and again.
pub struct Pointers {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Seen>>,
}

impl Pointers {
    /// Asks a sidecar, by its admin address. Where it has no answer, nothing is seen.
    pub fn watch(admin: SocketAddr) -> Pointers {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut all = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let asked = Instant::now();
                let (code, text) = http::get(admin, "/status");
                let answered = Instant::now();
                let status = serde_json::from_str::<StatusReport>(&text).ok().filter(|_| code == 200);
                if let Some(ring) = status.and_then(|status| status.rings.into_iter().next()) {
                    all.push(Seen { asked, answered, pointer: ring.pointer.0 });
                }
                thread::sleep(Duration::from_millis(50));
            }
            all
        });
        Pointers { stop, thread }
    }

    pub fn finish(self) -> Vec<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the sidecar that is asked lives")
    }
}

/// Asserts that the pointer never went back, and never ran ahead of its pace by more than some ticks that it
/// may catch up; returns how far it came.
#[track_caller]
pub fn assert_pace(all: &[Seen], tick: Duration, catch_up_max_ticks: u64) -> u64 {
    let (Some(first), Some(last)) = (all.first(), all.last()) else { panic!("no pointer was seen") };
    for (index, before) in all.iter().enumerate() {
        for after in &all[index + 1..] {
            assert!(after.pointer >= before.pointer, "the pointer went back: {before:?} {after:?}");
            let (ticks, longest) = (after.pointer - before.pointer, after.answered - before.asked);
            // One tick for where in a tick the looks fell, and one for a report that was a little old.
            let most = longest.as_millis() / tick.as_millis() + 2 + u128::from(catch_up_max_ticks);
            assert!(u128::from(ticks) <= most, "{ticks} ticks of {tick:?} in {longest:?}: {before:?} {after:?}");
        }
    }
    last.pointer - first.pointer
}

/// The sum of a metric over sidecars, as a dashboard has it.
pub fn sum(sidecars: &[&Sidecar], metric: &str) -> f64 {
    sidecars.iter().map(|sidecar| sidecar.metrics().sum(metric)).sum()
}

/// Waits until a sum is right.
#[track_caller]
pub fn wait_for_sum(sidecars: &[&Sidecar], metric: &str, expected: u32) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let value = sum(sidecars, metric);
        if (value - f64::from(expected)).abs() < 0.5 {
            return;
        }
        assert!(Instant::now() < deadline, "the sum of {metric} is {value}, and not {expected}");
        thread::sleep(Duration::from_millis(10));
    }
}
