//! Redis is far away: what a script is asked takes a while to get there.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::support::clock::Clock;
use crate::support::frames;
use crate::support::proxy::Proxy;
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve};
use crate::support::wait_until;

const TICK_MS: u64 = 1_000;
const WAY: Duration = Duration::from_millis(100);
const HOUR: i64 = 3_600;

/// A leader whose Redis is so far away.
fn far_from(redis: &Redis) -> Sidecar {
    let way = Proxy::with_way(WAY, redis.port);
    let sidecar = Sidecar::spawn(&mut serve(&["--store", &way.url()]));
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

/// A client that deletes groups without end waits for itself alone. Deletions not begun when it goes never begin.
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

/// Has the group of a far sidecar hold so many batches, which another member then gets. Returns that member, and when
/// the first had gone.
fn comes_again(sidecar: &Sidecar, redis: &Redis, batches: usize) -> (Raw, Instant) {
    let (pointer, epoch): (u64, u64) = redis.command(&["HMGET", "{ackwheel:0}:meta", "pointer", "epoch"]);
    for seq in 0..batches {
        let id = format!("{pointer}-{seq}");
        let fields = [("epoch", epoch), ("count", 1), ("added", 1), ("acked", 0), ("storm", 0), ("last", 1)];
        let more = [("decided_ms", redis.unix_ms()), ("messages", 7)];
        let mut add: Vec<String> = ["XADD", "{ackwheel:0}:outbox", &id].map(String::from).into();
        add.extend(fields.iter().chain(&more).flat_map(|(name, value)| [String::from(*name), value.to_string()]));
        redis.command::<String>(&add.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let mut holder = sidecar.connect().subscribed("default");
    for _ in 0..batches {
        assert_eq!(holder.batch().delivery, 1);
    }
    let other = sidecar.connect().subscribed("default");
    holder.reset();
    (other, Instant::now())
}

/// A script asks for 16 of them.
#[test]
fn many_batches_are_redelivered_in_a_few_round_trips() {
    const BATCHES: usize = 64;
    let redis = Redis::start();
    let sidecar = far_from(&redis);
    let (mut other, begun) = comes_again(&sidecar, &redis, BATCHES);
    let ids: BTreeSet<[u8; 24]> = (0..BATCHES)
        .map(|_| {
            let batch = other.batch();
            assert_eq!(batch.delivery, 2);
            batch.id
        })
        .collect();
    let elapsed = begun.elapsed();
    assert_eq!(ids.len(), BATCHES);
    assert!(elapsed < WAY * 40, "{elapsed:?}: one by one it takes 128 times the way");
}

/// In between the group hears its members.
#[test]
fn acks_are_read_while_many_batches_are_redelivered() {
    const BATCHES: usize = 256;
    let redis = Redis::start();
    let sidecar = far_from(&redis);
    let (mut other, _) = comes_again(&sidecar, &redis, BATCHES);
    let first = other.batch();
    let begun = Instant::now();
    let ack = other.request(&frames::batch_ack(&[first.id]));
    assert_eq!(frames::u32_at(&other.answer(ack).body, 0), 1);
    let elapsed = begun.elapsed();
    assert!(elapsed < WAY * 14, "{elapsed:?}: behind all redelivered batches it takes 30 times the way");
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

#[test]
fn a_long_way_and_a_clock_that_is_set_forwards_shorten_no_tick() {
    let redis = Redis::with_clock(Clock::Offset(0));
    let sidecar = far_from(&redis);
    let mut moved = Vec::new();
    let mut pointer = standing(&redis).0;
    while moved.len() < 7 {
        wait_until("the pointer moves", || standing(&redis).0 > pointer);
        moved.push(Instant::now());
        assert_eq!(standing(&redis).0, pointer + 1);
        pointer += 1;
        // More than clocks may differ, and less than a stall.
        redis.set_fast_by_ms(300 * moved.len() as u64);
    }
    let shortest = moved.windows(2).map(|pair| pair[1] - pair[0]).min().expect("it moved");
    // The test sees a move a few ms late.
    assert!(shortest >= Duration::from_millis(TICK_MS - 50), "{shortest:?} of a second: {}", sidecar.log().text());
}
