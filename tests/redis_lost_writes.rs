//! Redis loses writes that it had answered, or was unreachable while sidecars held Acks: no batch id names two contents,
//! lost Acks are applied again, and the pointer waits for held ones.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use crate::redis_faults::take_until;
use crate::support::frames::{self, ACKED, WITHDRAWN, u32_at};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

fn published(redis: &Redis) -> u64 {
    redis.try_command(&["HGET", "{ackwheel:0}:meta", "published_batches"]).unwrap_or_default()
}

/// Adds messages in frames that a sidecar takes; returns the earliest deadline.
fn add(sidecar: &Sidecar, ids: std::ops::Range<u64>, ack_timeout_ticks: u16) -> u64 {
    let (mut connection, ids) = (sidecar.connect(), ids.collect::<Vec<u64>>());
    let deadlines =
        ids.chunks(30_000).map(|part| connection.ask(&frames::add(part, ack_timeout_ticks, 1)).added().0);
    deadlines.min().expect("there are messages")
}

#[test]
fn no_batch_id_names_two_contents_after_redis_went_back_to_a_snapshot() {
    const MESSAGES: u64 = 120_000;
    let mut redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "1s", "--outage-grace", "100ms"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    add(&sidecar, 0..MESSAGES, 1);
    wait_until("a tick is being published", || published(&redis) >= 10);
    redis.command::<()>(&["SAVE"]);
    let saved = published(&redis);
    wait_until("more of it is published", || published(&redis) >= saved + 20);
    redis.restart();
    // As a consumer does that skips the batches whose ids it knows.
    let mut contents: BTreeMap<[u8; 24], Vec<u64>> = BTreeMap::new();
    let mut reported: BTreeSet<u64> = BTreeSet::new();
    while reported.len() < usize::try_from(MESSAGES).unwrap() {
        let batch = subscriber.batch();
        let ids = batch.ids();
        if let Some(before) = contents.get(&batch.id) {
            assert_eq!(*before, ids, "batch {}-{} has two contents", batch.tick, batch.epoch);
        } else {
            reported.extend(&ids);
            contents.insert(batch.id, ids);
        }
    }
    let epochs: BTreeSet<&[u8]> = contents.keys().map(|id| &id[8..16]).collect();
    assert!(epochs.len() >= 2, "what was published again has another epoch: {epochs:?}");
}

#[test]
fn a_batch_is_settled_only_under_the_epoch_that_published_it() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut held = Vec::new();
    for id in 1..=3 {
        add(&sidecar, id..id + 1, 1);
        held.push(subscriber.batch());
        let epoch = redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "epoch"]);
        redis.command::<()>(&["DEL", "{ackwheel:0}:lease"]);
        wait_until("it leads again", || redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "epoch"]) > epoch);
    }
    let ids = [0, 1, 2].map(|number: usize| held[number].id);
    let with_epoch_of = |number: usize, other: usize| {
        let mut id = ids[number];
        id[8..16].copy_from_slice(&ids[other][8..16]);
        id
    };
    let mut settled = |ids: &[[u8; 24]]| u32_at(&subscriber.ask(&frames::batch_ack(ids)).body, 0);
    for (number, other) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
        assert_eq!(settled(&[with_epoch_of(number, other)]), 0, "batch {number} under the epoch of {other}");
    }
    assert_eq!(settled(&ids), 3);
    assert_eq!(settled(&ids), 0);
}

#[test]
fn a_batch_of_the_last_epoch_is_settled_without_reading_it() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    add(&sidecar, 1..2, 1);
    let batch = subscriber.batch();
    // Without its entry the batch cannot be read.
    redis.command::<()>(&["XDEL", "{ackwheel:0}:outbox", &format!("{}-0", batch.tick)]);
    assert_eq!(u32_at(&subscriber.ask(&frames::batch_ack(&[batch.id])).body, 0), 1);
}

#[test]
fn acks_that_redis_answered_and_lost_are_applied_again() {
    let mut redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "500ms", "--outage-grace", "500ms"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    add(&sidecar, 0..5_000, 15);
    redis.command::<()>(&["SAVE"]);
    let (acked, withdrawn): (Vec<u64>, Vec<u64>) = ((0..4_000).collect(), (4_000..4_500).collect());
    let mut connection = sidecar.connect();
    assert!(connection.ask(&frames::del(&acked)).outcomes().iter().all(|outcome| *outcome == ACKED));
    assert!(connection.ask(&frames::withdraw(&withdrawn)).outcomes().iter().all(|outcome| *outcome == WITHDRAWN));
    add(&sidecar, 7_000..7_100, 15);
    redis.restart();
    let left: Vec<u64> = (4_500..5_000).collect();
    assert_eq!(take_until(&mut subscriber, &left), left, "and none that was acknowledged");
    let metrics = sidecar.metrics();
    assert_eq!(metrics.count("redis_lost_messages_total{kind=\"acked\"}"), 4_500);
    assert_eq!(metrics.count("redis_lost_messages_total{kind=\"added\"}"), 100);
    assert_eq!(metrics.count("redis_reapplied_acks_total"), 4_500);
    assert!(metrics.count("redis_lost_writes_total") > 0);
    sidecar
        .log()
        .assert_names(&["Redis has lost writes that it had answered", "added=100 acked=4500 reapplied=4500"]);
    assert_eq!(redis.command::<i64>(&["HGET", "{ackwheel:0}:meta", "in_flight"]), 0);
}

#[test]
fn a_lost_ack_is_not_applied_to_a_message_that_was_added_again() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "500ms"]);
    add(&sidecar, 1..3, 15);
    let link = &redis.command::<Vec<String>>(&["KEYS", "{ackwheel:0}:link:*"])[0];
    let generation: String = redis.command(&["HGET", link, "generation"]);
    let entry: String = redis.command(&["HGET", "{ackwheel:0}:messages", "1"]);
    let added_ms: u64 = entry.split(' ').next_back().unwrap().parse().unwrap();
    let lists: Vec<String> = (0..49).map(|list| format!("{{ackwheel:0}}:tick:{list}")).collect();
    let reapply = |added_ms: u64| {
        let source = concat!(
            include_str!("../src/redis/scripts/refuse_stale_connection.lua"),
            include_str!("../src/redis/scripts/reapply_lost_acks.lua")
        );
        let keys = ["{ackwheel:0}:meta", link, "{ackwheel:0}:messages", "{ackwheel:0}:ticks"];
        let (count, added_ms) = ((keys.len() + lists.len()).to_string(), added_ms.to_string());
        let mut words = vec!["EVAL", source, &count];
        words.extend(keys);
        words.extend(lists.iter().map(String::as_str));
        words.extend([generation.as_str(), "k", "1", &added_ms]);
        redis.command::<(String, u64)>(&words)
    };
    assert_eq!(reapply(added_ms + 1), ("reapplied".into(), 0), "it was added at another time");
    assert_eq!(reapply(added_ms), ("reapplied".into(), 1));
    assert_eq!(reapply(added_ms), ("reapplied".into(), 0), "it is applied once");
    assert_eq!(redis.command::<i64>(&["HGET", "{ackwheel:0}:meta", "in_flight"]), 1);
    assert_eq!(sidecar.connect().ask(&frames::del(&[2])).outcomes(), [ACKED]);
}

#[test]
fn the_pointer_waits_until_every_sidecar_has_applied_the_acks_that_it_held() {
    const HELD: u64 = 90_000;
    let redis = Redis::start();
    let flags = ["--tick", "1s", "--outage-grace", "50ms"];
    let sidecars = ["a", "b", "c"].map(|name| Sidecar::on(&redis, name, &flags));
    let mut subscriber = sidecars[0].connect().subscribed("default");
    let ranges = [0, 1, 2].map(|nth| nth * HELD..(nth + 1) * HELD);
    let deadline = thread::scope(|scope| {
        let adds = sidecars.iter().zip(&ranges);
        let adds: Vec<_> = adds.map(|(sidecar, range)| scope.spawn(|| add(sidecar, range.clone(), 1))).collect();
        adds.into_iter().map(|add| add.join().unwrap()).min().unwrap()
    });
    // Redis stops while the pointer stands at the tick of the first messages.
    sidecars[0].wait_for_pointer(deadline);
    redis.stop();
    let mut connections: Vec<_> = sidecars.iter().map(Sidecar::connect).collect();
    let mut asked = Vec::new();
    for (connection, range) in connections.iter_mut().zip(&ranges) {
        let newest_first: Vec<u64> = range.clone().rev().collect();
        asked.push(newest_first.chunks(30_000).map(|part| connection.request(&frames::del(part))).count());
    }
    wait_until("all Acks are held", || {
        sidecars.iter().all(|sidecar| sidecar.metrics().count("held_acks") == HELD)
    });
    redis.go_on();
    let mut late = 0;
    for (connection, asked) in connections.iter_mut().zip(asked) {
        for _ in 0..asked {
            let answer = connection.next_answer();
            late += answer.outcomes().iter().filter(|outcome| **outcome != ACKED).count();
        }
    }
    assert_eq!(late, 0, "of messages whose Acks were held");
    add(&sidecars[0], 1_000_000..1_000_001, 1);
    assert_eq!(take_until(&mut subscriber, &[1_000_000]), [1_000_000], "no client that answered is reported");
    assert_eq!(redis.command::<u64>(&["EXISTS", "{ackwheel:0}:held_acks"]), 0);
}

#[test]
fn an_entry_that_others_wrote_refuses_no_chunk() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    for (name, entry) in [("1", "written by hand"), ("2", ""), ("3", "12"), ("4", "1 2")] {
        redis.command::<()>(&["HSET", "{ackwheel:0}:messages", name, entry]);
    }
    redis.command::<()>(&["RPUSH", "{ackwheel:0}:late", "written by hand", "12"]);
    let mut connection = sidecar.connect();
    let outcomes = connection.ask(&frames::del(&[1, 2, 9])).outcomes().to_vec();
    assert_eq!(outcomes, [frames::UNKNOWN; 3]);
    connection.ask(&frames::add(&[3, 4, 5], 1, 1)).added();
    assert_eq!(take_until(&mut subscriber, &[3, 4, 5]), [3, 4, 5]);
    assert_eq!(sidecar.metrics().count("redis_errors_total{kind=\"other\"}"), 0);
}
