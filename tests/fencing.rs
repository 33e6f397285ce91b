//! A deposed leader changes nothing, and neither does a connection that was given up.

use std::time::Duration;

use ackwheel::core::{Leadership, Message, Promise, Ring, RingParts, Store, Wheel};
use ackwheel::redis::{RedisOptions, RedisStore};

use crate::support::frozen_redis::{self, FrozenRedis};
use crate::support::proxy::Proxy;
use crate::support::single_request::{AddNewMsg, SingleRequest};
use crate::support::{redis::Redis, wait_until};

const TICK: Duration = Duration::from_secs(1);

fn wheel() -> Wheel {
    Wheel::new(5, TICK).unwrap()
}

/// How many scripts a server has run.
fn scripts_run(redis: &Redis) -> u64 {
    let stats = redis.info("commandstats");
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    calls.and_then(|calls| calls.split(',').next()?.parse().ok()).unwrap_or_default()
}

async fn add(ring: &dyn Ring, id: u64, time: &FrozenRedis) -> Result<(), Promise> {
    let request = AddNewMsg { messages: &[Message::from(id)], ack_timeout_ticks: 1, attempt: 1 };
    ring.add_new_msg(request, time.now()).await.map(drop).map_err(|refusal| refusal.reason.promise())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_write_of_a_connection_that_was_given_up_is_refused() {
    let time = FrozenRedis::start();
    let proxy = Proxy::to(time.redis.port);
    let store = frozen_redis::open(&RedisOptions { url: proxy.url().into(), ..time.options(wheel()) }).await;
    let ring = &store.rings()[0].ring;
    add(&**ring, 1, &time).await.unwrap();

    proxy.hold_a_request();
    assert_eq!(add(&**ring, 2, &time).await, Err(Promise::OutcomeUnknown), "it is on its way, and stays there");
    assert_eq!(proxy.holding(), 1);
    while !store.is_up() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let before = scripts_run(&time.redis);
    proxy.let_go();
    wait_until("the late write has reached Redis", || scripts_run(&time.redis) > before);

    let status = ring.status(time.now()).await.unwrap();
    assert_eq!(
        status.in_flight, 1,
        "message 2 was told to be of unknown outcome, and must not come into flight now"
    );
    add(&**ring, 3, &time).await.unwrap();
}

/// A leader in a Redis whose clock is stopped, and a way to run its scripts with arguments that are wrong.
struct Leader {
    time: FrozenRedis,
    store: RedisStore,
    epoch: u64,
}

impl Leader {
    /// A leader with one message whose tick is decided, and not yet published.
    async fn with_an_expired_tick() -> Leader {
        let mut time = FrozenRedis::start();
        let store = frozen_redis::open(&time.options(wheel())).await;
        let RingParts { ring, lease, .. } = store.rings()[0].clone();
        let Leadership::Leads { epoch, .. } = lease.maintain(time.now()).await.unwrap() else {
            panic!("nobody else stands for election");
        };
        add(&*ring, 1, &time).await.unwrap();
        for _ in 0..2 {
            time.pass(TICK);
            ring.advance(time.now()).await.unwrap();
        }
        time.pass(TICK);
        Leader { time, store, epoch }
    }

    fn field(&self, key: &str, field: &str) -> u64 {
        self.time.redis.command(&["HGET", &format!("{{test:0}}:{key}"), field])
    }

    fn token(&self) -> String {
        self.time.redis.command(&["GET", "{test:0}:lease"])
    }

    /// Has the lease end now, by the clock of Redis. Returns when it would have ended.
    fn end_the_lease(&self) -> String {
        let redis = &self.time.redis;
        let ends = redis.command(&["HGET", "{test:0}:meta", "lease_until"]);
        redis.command::<()>(&["HSET", "{test:0}:meta", "lease_until", &redis.unix_ms().to_string()]);
        ends
    }

    /// The reply of a script to the leader's own link.
    fn run(&self, script: &str, keys: &[String], arguments: &[&str]) -> Vec<redis::Value> {
        let [link] = &self.time.redis.command::<Vec<String>>(&["KEYS", "{test:0}:link:*"])[..] else {
            panic!("there is one sidecar");
        };
        let generation: String = self.time.redis.command(&["HGET", link, "generation"]);
        let source = format!("{}{script}", include_str!("../src/redis/scripts/refuse_stale_connection.lua"));
        let mut words = vec![String::from("EVAL"), source, (keys.len() + 2).to_string()];
        words.extend([String::from("{test:0}:meta"), link.clone()]);
        words.extend_from_slice(keys);
        words.push(generation);
        words.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.time.redis.command(&words)
    }

    fn word(reply: &[redis::Value]) -> String {
        redis::from_redis_value(reply[0].clone()).unwrap()
    }

    fn keys(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| format!("{{test:0}}:{name}")).collect()
    }

    /// Moves the pointer as the leader of this token and epoch would.
    fn advance(&self, token: &str, epoch: u64) -> String {
        Leader::word(&self.advance_from(self.field("meta", "pointer"), token, epoch))
    }

    fn advance_from(&self, pointer: u64, token: &str, epoch: u64) -> Vec<redis::Value> {
        self.advance_late(pointer, Duration::ZERO, token, epoch)
    }

    /// The same, of a leader that is late by so much as far as it knows.
    fn advance_late(&self, pointer: u64, late: Duration, token: &str, epoch: u64) -> Vec<redis::Value> {
        let lists: Vec<String> = (0..self.field("meta", "lists")).map(|list| format!("tick:{list}")).collect();
        let late_ms = late.as_millis().to_string();
        let arguments = [
            token,
            &epoch.to_string(),
            &pointer.to_string(),
            &late_ms,
            "50",
            "1000",
            "0.5",
            "16",
            "0",
            "",
            "0",
            "0",
        ];
        let names: Vec<&str> =
            ["lease", "ticks", "held_acks"].into_iter().chain(lists.iter().map(String::as_str)).collect();
        let keys = Leader::keys(&names);
        self.run(include_str!("../src/redis/scripts/advance.lua"), &keys, &arguments)
    }

    /// Stands for election as a sidecar that has seen a pointer stall for so many ms, or has just come (0, 0), and
    /// knows no epoch beyond the one before this leader's; wins, and says in how many ms the pointer moves.
    fn elect(&self, token: &str, (pointer, seen_ms): (u64, u64), grace_ms: u64) -> i64 {
        let known = (self.epoch - 1).to_string();
        let (pointer, seen_ms, grace_ms) = (pointer.to_string(), seen_ms.to_string(), grace_ms.to_string());
        let (name, lease_ms, nobody, slack_ms) = ("another", "3000", "", "50");
        let due_ms = self.field("meta", "due_ms").to_string();
        let has_come = if pointer == "0" { "1" } else { "0" };
        let arguments = [
            token, name, lease_ms, &pointer, &seen_ms, has_come, &known, nobody, nobody, "0", &grace_ms, slack_ms,
            "", &due_ms,
        ];
        let keys = Leader::keys(&["lease", "candidates"]);
        let won = self.run(include_str!("../src/redis/scripts/acquire.lua"), &keys, &arguments);
        assert_eq!(Leader::word(&won), "won", "{won:?}");
        redis::from_redis_value(won[3].clone()).unwrap()
    }

    /// Publishes as the leader of this token and epoch would, who expects this seq.
    fn publish_expired(&self, token: &str, epoch: u64, seq: u64) -> String {
        let tick = self.field("meta", "frozen_from");
        let list = format!("tick:{}", tick % self.field("meta", "lists"));
        let arguments = [token, &epoch.to_string(), &tick.to_string(), &seq.to_string(), "1000"];
        let keys = Leader::keys(&["lease", "ticks", &list, "outbox", "late", "news"]);
        Leader::word(&self.run(include_str!("../src/redis/scripts/expire.lua"), &keys, &arguments))
    }

    fn published(&self) -> u64 {
        self.time.redis.command(&["XLEN", "{test:0}:outbox"])
    }

    /// Publishes what is decided before the tick of the message.
    fn publish_the_empty_tick(&self) {
        assert_eq!(self.publish_expired(&self.token(), self.epoch, 0), "published");
        assert_eq!(self.published(), 0);
    }
}

#[tokio::test]
async fn the_pointer_moves_for_the_holder_in_his_epoch_alone() {
    let leader = Leader::with_an_expired_tick().await;
    let (token, pointer) = (leader.token(), leader.field("meta", "pointer"));
    assert_eq!(leader.advance("somebody else", leader.epoch), "deposed");
    assert_eq!(leader.advance(&token, leader.epoch - 1), "deposed", "an earlier term of the same sidecar");
    assert_eq!(leader.field("meta", "pointer"), pointer, "nobody has moved it");
    assert_eq!(leader.advance(&token, leader.epoch), "moved");
    leader.end_the_lease();
    assert_eq!(leader.advance(&token, leader.epoch), "deposed", "the lease has run out");
    let _: u64 = leader.time.redis.command(&["DEL", "{test:0}:lease"]);
    assert_eq!(leader.advance(&token, leader.epoch), "deposed", "the lease is lost");
    assert_eq!(leader.field("meta", "pointer"), pointer + 1);
    drop(leader.store);
}

#[tokio::test]
async fn a_clock_that_is_set_back_as_an_answer_is_lost_puts_the_next_move_off_by_a_tick_at_most() {
    const HOUR_MS: u64 = 3_600_000;
    let leader = Leader::with_an_expired_tick().await;
    let (token, pointer) = (leader.token(), leader.field("meta", "pointer"));
    assert_eq!(leader.advance(&token, leader.epoch), "moved");
    let wait_ms = |reply: &[redis::Value], at: usize| redis::from_redis_value::<u64>(reply[at].clone()).unwrap();
    leader.time.redis.set_frozen(leader.time.redis.unix_ms() - HOUR_MS);
    let moved = leader.advance_from(pointer, &token, leader.epoch);
    assert_eq!((Leader::word(&moved).as_str(), wait_ms(&moved, 1)), ("moved", 1_000), "{moved:?}");
    // So does an election whose answer was lost.
    assert_eq!(leader.elect(&token, (0, 0), 2_000), 1_000);
    assert!(leader.field("meta", "epoch") > leader.epoch, "each election that is won has an epoch of its own");
    drop(leader.store);
}

#[tokio::test]
async fn a_new_sidecar_and_a_follower_wait_for_the_acks_of_an_outage() {
    let mut leader = Leader::with_an_expired_tick().await;
    let pointer = leader.field("meta", "pointer");
    let vacate = |leader: &Leader| leader.time.redis.command::<u64>(&["DEL", "{test:0}:lease"]);
    leader.time.pass(TICK * 3);
    vacate(&leader);
    assert_eq!(leader.elect("watched", (pointer, 3_500), 2_000), -2_500, "all that it saw is caught up");
    leader.time.pass(TICK * 3);
    vacate(&leader);
    assert_eq!(leader.elect("has just come", (0, 0), 2_000), 2_000);
    leader.time.pass(Duration::from_millis(600));
    assert_eq!(leader.elect("has just come", (0, 0), 2_000), 1_400, "the first answer was lost");
    // The leader goes, and with it what it knew.
    leader.time.pass(Duration::from_millis(300));
    vacate(&leader);
    assert_eq!(leader.elect("watched", (pointer, 4_000), 2_000), 1_100);
    // A clock that is set back by more than that is no reason to wait.
    leader.time.redis.set_frozen(leader.time.redis.unix_ms() - 3_600_000);
    vacate(&leader);
    assert_eq!(leader.elect("watched", (pointer, 4_000), 2_000), 1_000);
    // A candidate that has seen a leader move the pointer a moment ago knows that a leader was there.
    leader.time.redis.set_frozen(leader.time.redis.unix_ms() + 3_000);
    vacate(&leader);
    assert_eq!(leader.elect("watched", (pointer - 1, 400), 2_000), 1_000, "all that is missed is shifted");
    drop(leader.store);
}

#[tokio::test]
async fn a_leader_that_was_held_up_between_its_look_at_the_clock_and_the_move_decides_nothing_early() {
    let mut leader = Leader::with_an_expired_tick().await;
    let catch_up = TICK * u32::try_from(leader.field("meta", "catch_up")).unwrap();
    let late = catch_up + Duration::from_millis(30);
    leader.time.pass(late);
    add(&*leader.store.rings()[0].ring, 2, &leader.time).await.unwrap();
    let added_ms = leader.time.redis.unix_ms();
    let moved = leader.advance_late(leader.field("meta", "pointer"), late, &leader.token(), leader.epoch);
    assert_eq!(Leader::word(&moved), "moved");
    let due_ms = leader.field("meta", "due_ms");
    let catch_up_ms = u64::try_from(catch_up.as_millis()).unwrap();
    assert_eq!(due_ms, added_ms - catch_up_ms, "the message counts on no more ticks than these");
    drop(leader.store);
}

#[tokio::test]
async fn batches_are_published_by_the_holder_in_his_epoch_alone_and_each_seq_once() {
    let leader = Leader::with_an_expired_tick().await;
    leader.publish_the_empty_tick();
    let token = leader.token();
    assert_eq!(leader.publish_expired("somebody else", leader.epoch, 0), "deposed");
    assert_eq!(
        leader.publish_expired(&token, leader.epoch - 1, 0),
        "deposed",
        "an earlier term of the same sidecar"
    );
    assert_eq!(leader.publish_expired(&token, leader.epoch, 1), "expected", "seq 0 comes first");
    assert_eq!(leader.published(), 0, "nobody has published");
    let ends = leader.end_the_lease();
    assert_eq!(leader.publish_expired(&token, leader.epoch, 0), "deposed", "the lease has run out");
    let _: u64 = leader.time.redis.command(&["HSET", "{test:0}:meta", "lease_until", &ends]);
    let _: u64 = leader.time.redis.command(&["DEL", "{test:0}:lease"]);
    assert_eq!(leader.publish_expired(&token, leader.epoch, 0), "deposed", "the lease is lost");
    assert_eq!(leader.published(), 0, "nobody has published");
    let _: () = leader.time.redis.command(&["SET", "{test:0}:lease", &token]);
    assert_eq!(leader.publish_expired(&token, leader.epoch, 0), "published");
    assert_eq!(leader.publish_expired(&token, leader.epoch, 0), "expected", "it is published already");
    assert_eq!(leader.published(), 1);
}
