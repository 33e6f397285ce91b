//! The cost of heartbeats in Redis, by its own count. The sidecars are simulated: each has a link and a connection, and
//! calls the scripts that a sidecar calls.

use std::thread;
use std::time::{Duration, Instant};

use redis::{Connection, Value};

use crate::support::redis::{Redis, ask};

/// The prefix of the scripts that work on groups.
const GUARD: &str = include_str!("../src/redis/scripts/refuse_stale_connection.lua");
const GROUPS: &str = include_str!("../src/redis/scripts/group_functions.lua");

const NAMES: [&str; 2] = ["default", "audit"];

/// Sidecars of one ring that do nothing but live. The first one leads.
struct Fleet<'a> {
    redis: &'a Redis,
    sidecars: Vec<Simulated>,
    groups: usize,
    steps: u64,
}

struct Simulated {
    name: String,
    link: String,
    generation: String,
    connection: Connection,
}

/// The scripts as Redis counted them: how many, and how long they took in all.
#[derive(Clone, Copy, Debug)]
struct Counted {
    calls: f64,
    usec: f64,
}

fn key(name: &str) -> String {
    format!("{{im:0}}:{name}")
}

impl Simulated {
    fn join(redis: &Redis, number: usize) -> Simulated {
        let name = format!("sidecar-{number}-{number:032x}");
        let mut connection = redis.connect().unwrap();
        let link = key(&format!("link:{name}"));
        let mut words = vec![String::from("EVAL"), include_str!("../src/redis/scripts/open.lua").to_owned()];
        let mut keys = vec![key("meta"), link.clone()];
        keys.extend(["outbox", "groups", "sidecars", "held_acks", "lease", "messages", "ticks", "late"].map(key));
        keys.extend((0..49).map(|list| key(&format!("tick:{list}"))));
        words.push(keys.len().to_string());
        words.extend(keys);
        words.extend(["1", "1", "15", "1000", "1", "49", "once", &name, "5", "0", "0"].map(String::from));
        let opened: Vec<Value> = ask(&mut connection, &borrowed(&words)).unwrap();
        let generation = redis::from_redis_value(opened[1].clone()).unwrap();
        Simulated { name, link, generation, connection }
    }

    /// The reply of a script, by its hash.
    fn run(&mut self, hash: &str, keys: &[&str], arguments: &[&str]) -> Vec<Value> {
        let mut words = vec![String::from("EVALSHA"), hash.to_owned(), (keys.len() + 2).to_string()];
        words.extend([key("meta"), self.link.clone()]);
        words.extend(keys.iter().map(|name| key(name)));
        words.push(self.generation.clone());
        words.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        ask(&mut self.connection, &borrowed(&words)).unwrap()
    }

    fn of_groups(&mut self, hash: &str, arguments: &[&str]) -> Vec<Value> {
        self.run(hash, &["outbox", "groups", "sidecars", "departed", "news", "held_acks"], arguments)
    }

    fn heartbeat(&mut self, hash: &str, groups: &[&str]) {
        let told = format!(" {}", groups.join(" "));
        let name = self.name.clone();
        let reply = self.run(hash, &["sidecars"], &[&name, &told]);
        assert_eq!(word(&reply), "beaten");
    }
}

fn borrowed(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

fn word(reply: &[Value]) -> String {
    redis::from_redis_value(reply[0].clone()).unwrap()
}

impl Fleet<'_> {
    /// So many sidecars with a subscriber of so many groups each.
    fn start(redis: &Redis, count: usize, groups: usize) -> Fleet<'_> {
        redis.command::<()>(&["FLUSHALL"]);
        let mut fleet = Fleet {
            redis,
            sidecars: (0..count).map(|number| Simulated::join(redis, number)).collect(),
            groups,
            steps: 0,
        };
        let hash = fleet.load(&[GUARD, GROUPS, include_str!("../src/redis/scripts/open_group.lua")]);
        for sidecar in &mut fleet.sidecars {
            for group in &NAMES[..groups] {
                let name = sidecar.name.clone();
                assert_eq!(word(&sidecar.of_groups(&hash, &[&name, group, "64", "0", "-"])), "open");
            }
        }
        fleet
    }

    fn load(&self, parts: &[&str]) -> String {
        self.redis.command(&["SCRIPT", "LOAD", &parts.concat()])
    }

    /// Has every sidecar send a heartbeat in each of so many seconds, and the leader look at all. Those of a second are
    /// spread over `spread`.
    fn live(&mut self, seconds: u32, spread: Duration) {
        let heartbeat = self.load(&[GUARD, include_str!("../src/redis/scripts/heartbeat.lua")]);
        let [inspect, tend] = [
            include_str!("../src/redis/scripts/inspect_sidecars.lua"),
            include_str!("../src/redis/scripts/trim_outbox.lua"),
        ]
        .map(|script| self.load(&[GUARD, GROUPS, script]));
        let (begun, count) = (Instant::now(), u32::try_from(self.sidecars.len()).unwrap());
        for second in 0..seconds {
            for (number, sidecar) in (0..).zip(&mut self.sidecars) {
                let at = begun + spread * second + spread / count * number;
                thread::sleep(at.saturating_duration_since(Instant::now()));
                sidecar.heartbeat(&heartbeat, &NAMES[..self.groups]);
            }
            self.steps += 1;
            let (leader, step) = (&mut self.sidecars[0], self.steps.to_string());
            leader.of_groups(&tend, &["86400000", "10000000", "1", &step]);
            let name = leader.name.clone();
            let inspected = leader.of_groups(&inspect, &[&name, "90000000", "16"]);
            assert_eq!(inspected.len(), 3 + 2 * self.sidecars.len(), "it sees all");
        }
    }

    /// The counts of Redis during an action.
    fn count(&mut self, done: impl FnOnce(&mut Self)) -> Counted {
        self.redis.command::<()>(&["CONFIG", "RESETSTAT"]);
        done(self);
        let stats = self.redis.info("commandstats");
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:")).expect("scripts ran");
        let number = |name: &str| -> f64 {
            line.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')).unwrap().parse().unwrap()
        };
        Counted { calls: number("calls"), usec: number("usec") }
    }
}

/// The time that the main thread of Redis has had a processor for, in s.
fn processor_time(redis: &Redis) -> f64 {
    let info = redis.info("cpu");
    let number =
        |name: &str| -> f64 { info.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap() };
    number("used_cpu_user_main_thread:") + number("used_cpu_sys_main_thread:")
}

/// The least that the calls of three runs took each, in µs: on a busy machine Redis may be without its core meanwhile.
fn heartbeat_usec(redis: &Redis, count: usize) -> f64 {
    let mut fleet = Fleet::start(redis, count, 1);
    fleet.live(2, Duration::ZERO);
    let heartbeat = fleet.load(&[GUARD, include_str!("../src/redis/scripts/heartbeat.lua")]);
    let runs = (0..5).map(|_| {
        let counted = fleet.count(|fleet| {
            for nth in 0..2_000 {
                let nth = nth % fleet.sidecars.len();
                fleet.sidecars[nth].heartbeat(&heartbeat, &NAMES[..1]);
            }
        });
        counted.usec / counted.calls
    });
    runs.fold(f64::INFINITY, f64::min)
}

#[test]
fn a_heartbeat_costs_redis_no_more_however_many_sidecars_there_are() {
    let redis = Redis::start();
    let [few, many] = [50, 500].map(|count| heartbeat_usec(&redis, count));
    println!("a heartbeat among 50 sidecars takes {few:.1} us, among 500 {many:.1} us");
    // Ten times as many sidecars made it ten times as dear. Their links and connections do not all fit a cache.
    assert!(many < few * 2.0 + 5.0, "{few:.1} us among 50 sidecars, {many:.1} us among 500");
}

#[test]
fn heartbeats_of_hundreds_of_sidecars_take_less_than_three_percent_of_a_core() {
    let redis = Redis::start();
    for (count, groups) in [(300, 2), (500, 1)] {
        let mut fleet = Fleet::start(&redis, count, groups);
        fleet.live(1, Duration::ZERO);
        let shares = (0..3).map(|_| fleet.count(|fleet| fleet.live(2, Duration::ZERO)).usec / 2e6);
        let share = shares.fold(f64::INFINITY, f64::min);
        println!("{count} sidecars with {groups} groups each: {:.2} % of a core", share * 100.0);
        assert!(share < 0.03, "{count} sidecars with {groups} groups take {:.2} % of a core", share * 100.0);
    }
}

#[test]
#[ignore = "takes 25 s, and prints figures: cargo test --release --test main -- --ignored --nocapture what_heartbeats"]
fn what_heartbeats_cost_at_the_rate_of_sidecars() {
    let redis = Redis::start();
    for (count, groups) in [(300, 2), (500, 1)] {
        let mut fleet = Fleet::start(&redis, count, groups);
        fleet.live(1, Duration::ZERO);
        let (before, begun) = (processor_time(&redis), Instant::now());
        let counted = fleet.count(|fleet| fleet.live(10, Duration::from_secs(1)));
        let (spent, passed) = (processor_time(&redis) - before, begun.elapsed().as_secs_f64());
        let share = counted.usec / 1e6 / passed;
        println!(
            "{count} sidecars with {groups} groups each, for {passed:.1} s: {:.0} scripts of {:.1} us, {:.2} % of a core by \
             commandstats; with the network {:.2} % by INFO cpu",
            counted.calls,
            counted.usec / counted.calls,
            share * 100.0,
            spent / passed * 100.0
        );
        assert!(share < 0.03, "{:.2} % of a core", share * 100.0);
    }
}

#[test]
fn a_dead_sidecar_with_many_ephemeral_groups_holds_redis_up_for_a_few_milliseconds_at_most() {
    let redis = Redis::start();
    let mut longest = Vec::new();
    // On a busy machine Redis may be without its core for some of it.
    for _ in 0..3 {
        let mut fleet = Fleet::start(&redis, 300, 2);
        let [open_group, reap, announce] = [
            include_str!("../src/redis/scripts/open_group.lua"),
            include_str!("../src/redis/scripts/reap.lua"),
            include_str!("../src/redis/scripts/announce_groups.lua"),
        ]
        .map(|script| fleet.load(&[GUARD, GROUPS, script]));
        let dead = fleet.sidecars[1].name.clone();
        for number in 0..60 {
            let group = format!("ephemeral-{number}");
            assert_eq!(word(&fleet.sidecars[1].of_groups(&open_group, &[&dead, &group, "64", "$", "e"])), "open");
        }
        redis.command::<()>(&["SLOWLOG", "RESET"]);
        let mut steps = 1;
        while word(&fleet.sidecars[0].of_groups(&reap, &[&dead, "0", "64", "16"])) == "more" {
            steps += 1;
        }
        assert_eq!(steps, 4, "sixteen groups a step");
        assert_eq!(redis.command::<u64>(&["HLEN", &key("groups")]), 2);
        assert_eq!(redis.command::<u64>(&["HLEN", &key("sidecars")]), 299);
        let of_another = fleet.sidecars[0].name.clone();
        assert_eq!(
            word(&fleet.sidecars[0].of_groups(&announce, &[&of_another, "64", "default", "-"])),
            "announced"
        );
        match redis.slowlog().first() {
            None => return,
            Some((micros, name)) => longest.push(format!("{name} took {micros} us")),
        }
    }
    panic!("a script took more than 5 ms in each of three runs: {longest:?}");
}
