//! Redis is far away: what a script is asked takes a while to get there.

use std::time::{Duration, Instant};

use crate::support::clock::Clock;
use crate::support::frames;
use crate::support::proxy::Proxy;
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve};
use crate::support::wait_until;

const TICK_MS: u64 = 1_000;
const WAY: Duration = Duration::from_millis(100);
const HOUR: i64 = 3_600;

/// A leader whose Redis is so far away.
fn far_from(redis: &Redis) -> Sidecar {
    far_from_with(redis, &[])
}

/// The same, with these flags.
fn far_from_with(redis: &Redis, flags: &[&str]) -> Sidecar {
    let way = Proxy::with_way(WAY, redis.port);
    let sidecar = Sidecar::spawn(serve(&["--store", &way.url()]).args(flags));
    sidecar.wait_until_ready();
    // The first move is that of a new leader, which knows nothing of the way yet.
    sidecar.wait_for_pointer(sidecar.pointer() + 2);
    sidecar
}

/// Where the pointer is, and when it was due there.
fn standing(redis: &Redis) -> (u64, u64) {
    redis.command(&["HMGET", "{ackwheel:0}:meta", "pointer", "due_ms"])
}

#[test]
fn a_long_way_lengthens_no_tick() {
    let redis = Redis::start();
    let sidecar = far_from(&redis);
    let (first, due) = standing(&redis);
    sidecar.wait_for_pointer(first + 6);
    let (pointer, due_then) = standing(&redis);
    assert_eq!(due_then - due, (pointer - first) * TICK_MS, "{}", sidecar.log().text());
    let late_ms = redis.unix_ms() - due_then;
    assert!(late_ms < TICK_MS + 250, "it is where it should be, or a way later: {late_ms} ms");
    assert_eq!(sidecar.metrics().count("shifted_ticks_total"), 0);
}

/// Whoever deletes groups without end waits for itself; what it has not begun when it goes is not begun any more.
#[test]
fn deleting_many_groups_holds_up_no_subscribe_of_others() {
    let redis = Redis::start();
    let way = Proxy::with_way(Duration::from_millis(5), redis.port);
    let sidecar = Sidecar::spawn(&mut serve(&["--store", &way.url()]));
    sidecar.wait_until_ready();
    let mut flood = sidecar.connect();
    flood.send(&frames::group_delete("nobody").bytes(7).repeat(1_000));
    let subscribe = || {
        let asked = Instant::now();
        let subscribed = sidecar.connect().subscribed("default");
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
        subscribed
    };
    wait_until("it is heard", || sidecar.metrics().count("frames_total{type=\"group_delete\"}") == 1_000);
    drop(subscribe());
    flood.reset();
    drop(subscribe());
}

/// Of one group only the first needs the store, and those of others do not wait for it.
#[test]
fn many_subscribe_at_the_same_time() {
    const EACH: usize = 20;
    let redis = Redis::start();
    let sidecar = far_from(&redis);
    let named = |number| if number < EACH { String::from("default") } else { format!("group-{number}") };
    let mut connections: Vec<_> = (0..2 * EACH).map(|number| (named(number), sidecar.connect())).collect();
    let asked = Instant::now();
    for (group, connection) in &mut connections {
        connection.request(&frames::subscribe(group, 100, 0));
    }
    for (group, connection) in &mut connections {
        assert_eq!(connection.next_answer().kind, frames::SUBSCRIBED, "{group}");
    }
    // One after the other, those of groups alone would need twice the way for each.
    let elapsed = asked.elapsed();
    assert!(elapsed < WAY * 25, "{elapsed:?} for {} of them", connections.len());
    assert_eq!(sidecar.metrics().count("subscribers{group=\"default\"}"), EACH as u64);
}

/// A script settles 16 batches, and those for many are under way together: the group waits for one round trip, or two.
#[test]
fn many_batches_are_acknowledged_as_fast_as_few() {
    let redis = Redis::start();
    let sidecar = far_from(&redis);
    let [mut one, mut other] = [(); 2].map(|()| sidecar.connect().subscribed("default"));
    let nobodys: Vec<[u8; 24]> = (0..512_u32)
        .map(|seq| {
            let mut batch = [0; 24];
            batch[4..8].copy_from_slice(&seq.to_be_bytes());
            batch
        })
        .collect();
    let asked = Instant::now();
    let many = one.request(&frames::batch_ack(&nobodys));
    let few = other.request(&frames::batch_ack(&nobodys[..1]));
    for (connection, request) in [(&mut one, many), (&mut other, few)] {
        assert_eq!(frames::u32_at(&connection.answer(request).body, 0), 0, "nobody was handed these");
    }
    let elapsed = asked.elapsed();
    assert!(elapsed < WAY * 15, "{elapsed:?}: one after the other they take 64 times the way");
}

/// What comes again is asked for batch by batch, and in between the group hears its members.
#[test]
fn acks_are_heard_while_many_batches_come_again() {
    const BATCHES: u16 = 15;
    let redis = Redis::start();
    let sidecar = far_from_with(&redis, &["--tick", "200ms", "--slots", "30"]);
    let mut holder = sidecar.connect().subscribed("default");
    let mut adder = sidecar.connect();
    let adds: Vec<u32> = (1..=BATCHES).map(|k| adder.request(&frames::add(&[k.into()], k, 1))).collect();
    for add in adds {
        adder.answer(add).added();
    }
    for _ in 0..BATCHES {
        holder.batch();
    }
    let mut other = sidecar.connect().subscribed("default");
    drop(holder);
    let first = other.batch();
    let begun = Instant::now();
    let ack = other.request(&frames::batch_ack(&[first.id]));
    assert_eq!(frames::u32_at(&other.answer(ack).body, 0), 1);
    let elapsed = begun.elapsed();
    assert!(elapsed < WAY * 14, "{elapsed:?}: behind all that come again it takes twice the way for each");
    for _ in 1..BATCHES {
        assert_eq!(other.batch().delivery, 2);
    }
}

#[test]
fn a_long_way_and_a_clock_that_is_set_stop_no_ring() {
    let redis = Redis::with_clock(Clock::Offset(0));
    let sidecar = far_from(&redis);
    for offset in [-HOUR, 0] {
        redis.set_offset(offset);
        let (pointer, _) = standing(&redis);
        sidecar.wait_for_pointer(pointer + 4);
    }
}
