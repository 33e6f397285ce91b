//! The sidecars of a run, the Redis that they share if they do, and what happens to them.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use tempfile::TempDir;

use super::history::{Asked, Wheel};
use super::shared::Shared;
use crate::support::process::Log;
use crate::support::proxy::Proxy;
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve};
use crate::support::wait_until;

/// How long a drain may take: 10 s, and what a busy machine needs.
const LONGEST_DRAIN: Duration = Duration::from_secs(11);

/// How long after a fault a sidecar may take to reach Redis again.
const HEARS_AGAIN: Duration = Duration::from_secs(2);

/// From one look at what is to end to the next.
const LOOK: Duration = Duration::from_millis(5);

/// What happens.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A sidecar ends as a crash would.
    Kill(usize),
    /// A sidecar is asked to go.
    Terminate(usize),
    /// A sidecar stands still.
    Pause(usize),
    /// An answer of Redis to a sidecar is lost.
    LoseAnswer(usize),
    /// A script of a sidecar is under way for long, with all that follows on its connection.
    HoldScript(usize),
    /// All connections to Redis end.
    CutAll,
    RedisPauses,
    /// Redis ends as a crash would, and comes back with its file.
    RedisDies,
    /// Redis refuses to write.
    Unwritable,
    FlushScripts,
}

/// What ends a fault.
#[derive(Clone, Copy, Debug)]
enum Remedy {
    Start(usize),
    GoOn(usize),
    LetGo(usize),
    RedisGoesOn,
    RedisStarts,
    Writable,
}

#[derive(Debug, Default)]
struct Place {
    /// What runs there, and since when it drains if it does.
    sidecar: Option<(Sidecar, Option<Instant>)>,
    /// Its way to Redis.
    proxy: Option<Proxy>,
    /// Something is the matter with it.
    busy: bool,
}

/// Something that was the matter: with all, or with one place only.
#[derive(Clone, Copy, Debug)]
struct Disturbance {
    place: Option<usize>,
    from: Instant,
    to: Instant,
}

pub struct Stage {
    wheel: Wheel,
    shared: Arc<Shared>,
    random: SmallRng,
    begun: Instant,
    places: Vec<Place>,
    redis: Option<Redis>,
    redis_busy: bool,
    state: TempDir,
    remedies: Vec<(Instant, Remedy)>,
    disturbances: Vec<Disturbance>,
    logs: Vec<Log>,
}

impl Stage {
    /// Sidecars with a wheel each has to itself, kept in a file; or, with a Redis, one that they share.
    pub fn new(wheel: Wheel, shared: &Arc<Shared>, places: usize, redis: Option<Redis>, seed: u64) -> Stage {
        let proxy = || redis.as_ref().map(|redis| Proxy::to(redis.port));
        let mut stage = Stage {
            wheel,
            shared: Arc::clone(shared),
            random: SmallRng::seed_from_u64(seed),
            begun: Instant::now(),
            places: (0..places).map(|_| Place { proxy: proxy(), ..Place::default() }).collect(),
            redis,
            redis_busy: false,
            state: tempfile::tempdir().expect("a folder can be made"),
            remedies: Vec::new(),
            disturbances: Vec::new(),
            logs: Vec::new(),
        };
        (0..places).for_each(|place| stage.start(place));
        stage.wait_until_ready();
        stage
    }

    /// Has things happen until a moment, and then comes to rest.
    pub fn run(&mut self, until: Instant) {
        while Instant::now() < until {
            let Some(fault) = self.choose() else {
                self.remedy();
                thread::sleep(LOOK);
                continue;
            };
            self.cause(fault);
            // Mostly one after the other, sometimes several at once, sometimes time to come to rest.
            let pause = match self.random.random_range(0..40) {
                0..30 => 0..500,
                30..39 => 500..2_500,
                _ => 10_000..15_000,
            };
            let next = Instant::now() + self.ms(pause);
            while Instant::now() < next.min(until) {
                self.remedy();
                thread::sleep(LOOK);
            }
        }
        wait_until("everything is as it was", || {
            self.remedy();
            self.remedies.is_empty()
        });
        self.wait_until_ready();
        self.say("everything is as it was");
    }

    pub fn sidecars(&self) -> impl Iterator<Item = &Sidecar> {
        self.places.iter().flat_map(|place| &place.sidecar).map(|(sidecar, _)| sidecar)
    }

    /// Whether the sidecar that was asked was there for it, and the others heard of it.
    pub fn heard(&self, asked: &Asked) -> bool {
        // A wheel of one's own waits for its process.
        let concerns = |disturbance: &Disturbance| disturbance.place == Some(asked.at) && self.redis.is_some();
        let meets = |disturbance: &Disturbance| {
            disturbance.from <= asked.ended && asked.begun <= disturbance.to + HEARS_AGAIN
        };
        !self.disturbances.iter().any(|disturbance| concerns(disturbance) && meets(disturbance))
    }

    /// Whether nothing was the matter from one moment to another, nor for a while before.
    pub fn was_at_rest(&self, from: Instant, to: Instant, before: Duration) -> bool {
        let meets = |disturbance: &&Disturbance| disturbance.from <= to && from <= disturbance.to + before;
        !self.disturbances.iter().any(|disturbance| meets(&disturbance))
    }

    /// All logs, also of those that were killed.
    pub fn logs(&self) -> impl Iterator<Item = String> {
        self.logs.iter().map(Log::text)
    }

    fn wait_until_ready(&self) {
        self.sidecars().for_each(Sidecar::wait_until_ready);
    }

    fn start(&mut self, index: usize) {
        let tick = humantime::format_duration(self.wheel.tick).to_string();
        let slots = self.wheel.slots.to_string();
        let name = format!("place-{index}");
        let state = self.state.path().join(&name);
        let place = &mut self.places[index];
        let mut command = serve(&["--tick", &tick, "--slots", &slots, "--redeliver-after", "2s"]);
        match &place.proxy {
            Some(proxy) => command.args(["--store", &proxy.url(), "--name", &name]),
            None => command.arg("--state").arg(state),
        };
        let sidecar = Sidecar::spawn(&mut command);
        self.logs.push(sidecar.log().clone());
        self.shared.set_listen(index, Some(sidecar.listen));
        place.sidecar = Some((sidecar, None));
    }

    /// Something that can happen now, if what was drawn can.
    fn choose(&mut self) -> Option<Fault> {
        let place = self.random.random_range(0..self.places.len());
        let place_rests = !self.places[place].busy;
        let redis_rests = self.redis.is_some() && !self.redis_busy;
        let (fault, possible) = match self.random.random_range(0..100) {
            0..15 => (Fault::Terminate(place), place_rests),
            15..30 => (Fault::Pause(place), place_rests),
            30..50 => (Fault::Kill(place), place_rests && self.redis.is_some()),
            50..58 => (Fault::LoseAnswer(place), place_rests && redis_rests),
            58..66 => (Fault::HoldScript(place), place_rests && self.redis.is_some()),
            66..72 => (Fault::CutAll, redis_rests),
            72..82 => (Fault::RedisPauses, redis_rests),
            82..90 => (Fault::RedisDies, redis_rests),
            90..96 => (Fault::Unwritable, redis_rests),
            _ => (Fault::FlushScripts, redis_rests),
        };
        possible.then_some(fault)
    }

    fn cause(&mut self, fault: Fault) {
        self.say(&format!("{fault:?}"));
        match fault {
            Fault::Kill(index) => {
                let (mut sidecar, _) = self.places[index].sidecar.take().expect("it runs");
                sidecar.kill();
                self.shared.set_listen(index, None);
                self.disturb(Some(index), 0..3_000, Some(Remedy::Start(index)));
            }
            Fault::Terminate(index) => {
                let (sidecar, drains) = self.places[index].sidecar.as_mut().expect("it runs");
                sidecar.signal(Signal::TERM);
                *drains = Some(Instant::now());
                self.disturb(Some(index), 0..2_000, Some(Remedy::Start(index)));
            }
            Fault::Pause(index) => {
                self.sidecar(index).stop();
                let long = self.random.random_bool(0.3);
                let takes = if long { 3_000..8_000 } else { 50..2_000 };
                self.disturb(Some(index), takes, Some(Remedy::GoOn(index)));
            }
            Fault::LoseAnswer(index) => {
                self.proxy(index).lose_an_answer();
                self.disturb(Some(index), 2_000..2_001, None);
            }
            Fault::HoldScript(index) => {
                self.proxy(index).hold_a_request();
                self.disturb(Some(index), 100..4_000, Some(Remedy::LetGo(index)));
            }
            Fault::CutAll => {
                self.redis().command::<u64>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
                self.disturb(None, 0..1, None);
            }
            Fault::FlushScripts => {
                self.redis().command::<()>(&["SCRIPT", "FLUSH"]);
                self.disturb(None, 0..1, None);
            }
            Fault::RedisPauses => {
                self.redis().stop();
                self.disturb(None, 50..6_000, Some(Remedy::RedisGoesOn));
            }
            Fault::RedisDies => {
                self.redis.as_mut().expect("there is one").kill();
                self.disturb(None, 0..3_000, Some(Remedy::RedisStarts));
            }
            Fault::Unwritable => {
                self.redis().command::<()>(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
                self.disturb(None, 100..3_000, Some(Remedy::Writable));
            }
        }
    }

    /// Notes that something is the matter for a while, and what ends that.
    fn disturb(&mut self, place: Option<usize>, ms: Range<u64>, remedy: Option<Remedy>) {
        let to = Instant::now() + self.ms(ms);
        self.disturbances.push(Disturbance { place, from: Instant::now(), to });
        let Some(remedy) = remedy else { return };
        self.remedies.push((to, remedy));
        match place {
            Some(index) => self.places[index].busy = true,
            None => self.redis_busy = true,
        }
    }

    /// Ends what is to end by now.
    fn remedy(&mut self) {
        for (moment, remedy) in std::mem::take(&mut self.remedies) {
            if Instant::now() < moment || !self.end(remedy) {
                self.remedies.push((moment, remedy));
            }
        }
    }

    /// Ends a fault; false if that has to wait.
    fn end(&mut self, remedy: Remedy) -> bool {
        let place = match remedy {
            Remedy::Start(index) => {
                // Where Redis stays away for 10 s, a sidecar does not start at all.
                if !self.has_left(index) || self.redis_busy {
                    return false;
                }
                self.start(index);
                Some(index)
            }
            Remedy::GoOn(index) => {
                self.sidecar(index).go_on();
                Some(index)
            }
            Remedy::LetGo(index) => {
                self.proxy(index).let_go();
                Some(index)
            }
            Remedy::RedisGoesOn => {
                self.redis().go_on();
                None
            }
            Remedy::RedisStarts => {
                self.redis.as_mut().expect("there is one").restart();
                None
            }
            Remedy::Writable => {
                self.redis().command::<()>(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
                None
            }
        };
        match place {
            Some(index) => self.places[index].busy = false,
            None => self.redis_busy = false,
        }
        let now = Instant::now();
        let latest = self.disturbances.iter_mut().rfind(|disturbance| disturbance.place == place);
        latest.expect("something was the matter").to = now;
        self.say(&format!("  {remedy:?}"));
        true
    }

    /// Whether nothing runs at a place any more, after a crash or a drain.
    fn has_left(&mut self, index: usize) -> bool {
        let Some((sidecar, drains)) = &mut self.places[index].sidecar else { return true };
        let took = drains.expect("it was asked to go").elapsed();
        let Some(status) = sidecar.exited() else {
            assert!(took < LONGEST_DRAIN, "it drains since {took:?}: {}", sidecar.log().text());
            return false;
        };
        assert_eq!(status.code(), Some(0), "{}", sidecar.log().text());
        self.shared.set_listen(index, None);
        self.places[index].sidecar = None;
        true
    }

    fn sidecar(&self, index: usize) -> &Sidecar {
        let (sidecar, _) = self.places[index].sidecar.as_ref().expect("it runs");
        sidecar
    }

    fn proxy(&self, index: usize) -> &Proxy {
        self.places[index].proxy.as_ref().expect("there is a Redis")
    }

    fn redis(&self) -> &Redis {
        self.redis.as_ref().expect("there is one")
    }

    fn ms(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.random.random_range(range))
    }

    fn say(&self, what: &str) {
        println!("{:>8.3} s  {what}", self.begun.elapsed().as_secs_f64());
    }
}
