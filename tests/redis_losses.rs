//! Redis loses a part of what it had: somebody deleted a key, or it evicted some.

use std::time::{Duration, Instant};

use ackwheel::core::{Advance, Dropped, GroupOptions, Message, Outbox, Retention, RingParts, Store, Wheel};
use ackwheel::redis::RedisOptions;

use crate::redelivery::add_one_a_tick;
use crate::redis_faults::take_until;
use crate::support::clock::Clock;
use crate::support::frames::{self, ACKED, u32_at};
use crate::support::frozen_redis::{self, FrozenRedis};
use crate::support::process::assert_names;
use crate::support::proxy::Proxy;
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::single_request::{AddNewMsg, SingleRequest};
use crate::support::wait_until;

const TICK: Duration = Duration::from_millis(200);

fn sidecar(redis: &Redis) -> Sidecar {
    Sidecar::on(redis, "only", &["--tick", "200ms"])
}

/// Adds messages, and asserts that each subscriber hears of them.
fn assert_delivered(sidecar: &Sidecar, subscribers: &mut [&mut Raw], ids: std::ops::Range<u64>) {
    let ids: Vec<u64> = ids.collect();
    sidecar.connect().ask(&frames::add(&ids, 1, 1)).added();
    for subscriber in subscribers {
        assert_eq!(take_until(subscriber, &ids), ids);
    }
}

#[test]
fn a_lost_outbox_or_group_is_created_again() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let mut default = sidecar.connect().subscribed("default");
    let mut audit = sidecar.connect().subscribed("audit");
    assert_delivered(&sidecar, &mut [&mut default, &mut audit], 0..10);
    let losses: [&[&str]; 3] = [
        &["DEL", "{ackwheel:0}:outbox"],
        &["XGROUP", "DESTROY", "{ackwheel:0}:outbox", "audit"],
        &["DEL", "{ackwheel:0}:groups"],
    ];
    for (first, loss) in (10..).step_by(10).zip(losses) {
        sidecar.wait_for_settled("audit");
        redis.command::<()>(loss);
        // A batch that is published meanwhile and settled by all others may be gone.
        wait_until("all is there again", || {
            redis.command::<u64>(&["HLEN", "{ackwheel:0}:groups"]) == 2
                && redis
                    .try_command::<Vec<redis::Value>>(&["XINFO", "GROUPS", "{ackwheel:0}:outbox"])
                    .is_ok_and(|groups| groups.len() == 2)
        });
        assert_delivered(&sidecar, &mut [&mut default, &mut audit], first..first + 10);
    }
}

#[test]
fn batches_held_by_a_group_stay_held_while_groups_is_lost() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let mut stayer = sidecar.connect().subscribed("default");
    // The leader may repair it before the holder is gone; not three times.
    for round in 0..3 {
        let mut leaver = sidecar.connect().subscribed("default");
        add_one_a_tick(&sidecar, round * 10 + 1..=round * 10 + 6);
        let (held, mine) = ([leaver.batch(), leaver.batch(), leaver.batch()], [(); 3].map(|()| stayer.batch().id));
        redis.command::<()>(&["DEL", "{ackwheel:0}:groups"]);
        let answer = stayer.ask(&frames::batch_ack(&mine));
        drop(leaver);
        assert_eq!(u32_at(&answer.body, 0), 3, "they were not settled before");
        let again = held.each_ref().map(|_| stayer.settled_batch());
        assert_eq!(again.each_ref().map(|batch| batch.id), held.each_ref().map(|batch| batch.id));
        sidecar.wait_for_settled("default");
    }
}

#[test]
fn a_ring_whose_head_is_lost_is_another_ring_that_times_nobody_out_early() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let epoch = || redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "epoch"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&(0..1_000).collect::<Vec<u64>>(), 15, 1)).added();
    let before = epoch();
    redis.command::<()>(&["DEL", "{ackwheel:0}:meta"]);
    wait_until("it is noticed", || sidecar.metrics().count("redis_lost_total") == 1);
    sidecar.wait_until_ready();
    let ids: Vec<u64> = (5_000..5_010).collect();
    let added = Instant::now();
    sidecar.connect().ask(&frames::add(&ids, 10, 1)).added();
    assert_eq!(take_until(&mut subscriber, &ids), ids, "and none of those that were in flight before");
    assert!(added.elapsed() >= TICK * 10, "after {:?}", added.elapsed());
    assert!(epoch() > before, "{} after {before}", epoch());
    let in_flight: i64 = redis.command(&["HGET", "{ackwheel:0}:meta", "in_flight"]);
    assert_eq!(in_flight, 0);
}

#[test]
fn an_outbox_whose_ring_is_lost_keeps_its_bound_and_is_published_to_also_by_a_clock_that_was_set_back() {
    const HOUR: i64 = 3_600;
    let redis = Redis::with_clock(Clock::Offset(0));
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms", "--outbox-max-ids", "100"]);
    let waiting = || sidecar.group("default").map_or(0, |group| group.outbox_batches);
    let dropped = || sidecar.metrics().count("outbox_dropped_ids_total");
    sidecar.connect().ask(&frames::add(&(0..60).collect::<Vec<u64>>(), 1, 1)).added();
    wait_until("they are published", || waiting() == 1);
    redis.set_offset(-HOUR);
    redis.command::<()>(&["DEL", "{ackwheel:0}:meta"]);
    wait_until("it is noticed", || sidecar.metrics().count("redis_lost_total") == 1);
    sidecar.wait_until_ready();
    assert_eq!(dropped(), 0);
    let ids: Vec<u64> = (60..120).collect();
    sidecar.connect().ask(&frames::add(&ids, 1, 1)).added();
    wait_until("those of before are dropped, since both are too many", || dropped() == 60);
    assert_eq!(waiting(), 1);
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &ids), ids);
}

#[test]
fn ticks_that_are_lost_while_one_is_published_stop_no_wheel() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let mut subscriber = sidecar.connect().subscribed("default");
    redis.command::<()>(&["ACL", "SETUSER", "default", "-spop"]);
    let ids: Vec<u64> = (0..1_500).collect();
    let (deadline, _) = sidecar.connect().ask(&frames::add(&ids, 1, 1)).added();
    let frozen = || redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "in_flight"]) == 0;
    wait_until("their tick is decided, and cannot be published", frozen);
    // Some parts of it were published, and are acknowledged and gone.
    redis.command::<()>(&["XSETID", "{ackwheel:0}:outbox", &format!("{deadline}-3")]);
    redis.command::<()>(&["DEL", "{ackwheel:0}:ticks"]);
    redis.command::<()>(&["ACL", "SETUSER", "default", "+spop"]);
    assert_eq!(take_until(&mut subscriber, &ids), ids);
    assert_delivered(&sidecar, &mut [&mut subscriber], 5_000..5_010);
}

/// Has Redis lose the lists of all ticks.
fn lose_all_ticks(redis: &Redis) {
    let lists: Vec<String> = redis.command(&["KEYS", "{ackwheel:0}:tick:*"]);
    let lost: Vec<&str> = std::iter::once("DEL").chain(lists.iter().map(String::as_str)).collect();
    assert_eq!(redis.command::<usize>(&lost), lists.len());
}

fn messages(redis: &Redis) -> u64 {
    redis.command(&["HLEN", "{ackwheel:0}:messages"])
}

#[test]
fn messages_whose_ticks_are_lost_time_out_with_them_all_the_same() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut connection = sidecar.connect();
    // More than are looked at at once.
    let (first, second): (Vec<u64>, Vec<u64>) = ((0..2_500).collect(), (2_500..2_600).collect());
    let added = [(&first, 10, 1), (&second, 14, 2)]
        .map(|(ids, timeout, attempt)| connection.ask(&frames::add(ids, timeout, attempt)).added().0);
    lose_all_ticks(&redis);
    let acks = connection.ask(&frames::del(&(0..100).collect::<Vec<u64>>()));
    assert_eq!(acks.outcomes(), [ACKED; 100]);
    let mut timed_out = [Vec::new(), Vec::new()];
    while timed_out.each_ref().map(Vec::len) != [2_400, 100] {
        let batch = subscriber.settled_batch();
        let which = usize::from(batch.attempts[0]) - 1;
        assert!(batch.attempts.iter().all(|attempt| *attempt == batch.attempts[0]), "{:?}", batch.attempts);
        // The first ones were added in three scripts, between which a tick may begin.
        assert!(batch.tick == added[which] || batch.tick + 1 == added[0], "{} and {added:?}", batch.tick);
        timed_out[which].extend(batch.ids());
    }
    for ids in &mut timed_out {
        ids.sort_unstable();
    }
    assert_eq!(timed_out, [first[100..].to_vec(), second]);
    assert_eq!(lost_and_found(&redis, &sidecar), (0, 1));
    sidecar.log().line("the lists of the ticks lack some messages in flight").expect("it is told");
}

/// How many messages count as in flight, and how often a loss was told.
fn lost_and_found(redis: &Redis, sidecar: &Sidecar) -> (i64, u64) {
    let in_flight = redis.command(&["HGET", "{ackwheel:0}:meta", "in_flight"]);
    (in_flight, sidecar.metrics().count("redis_errors_total{kind=\"lost\"}"))
}

#[test]
fn late_messages_are_forgotten_even_if_their_list_is_lost() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms", "--slots", "5"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    assert_delivered(&sidecar, &mut [&mut subscriber], 0..100);
    redis.command::<()>(&["DEL", "{ackwheel:0}:late"]);
    assert_eq!(messages(&redis), 100);
    // The next loss is another one, and waited for.
    sidecar.log().line("the scan of all messages has finished").expect("it is looked for what nobody forgets");
    let ids: Vec<u64> = (100..110).collect();
    sidecar.connect().ask(&frames::add(&ids, 3, 1)).added();
    lose_all_ticks(&redis);
    assert_eq!(take_until(&mut subscriber, &ids), ids);
    wait_until("all are forgotten", || messages(&redis) == 0);
    assert_eq!(lost_and_found(&redis, &sidecar), (0, 1), "nobody misses what was late");
}

#[test]
fn expired_messages_whose_list_was_lost_are_reported_as_lost() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let mut subscriber = sidecar.connect().subscribed("default");
    redis.command::<()>(&["ACL", "SETUSER", "default", "-spop"]);
    sidecar.connect().ask(&frames::add(&(0..20).collect::<Vec<u64>>(), 1, 1)).added();
    wait_until("their tick is decided, and cannot be published", || lost_and_found(&redis, &sidecar).0 == 0);
    lose_all_ticks(&redis);
    redis.command::<()>(&["ACL", "SETUSER", "default", "+spop"]);
    assert_delivered(&sidecar, &mut [&mut subscriber], 20..30);
    assert_names(&sidecar.log().line("messages are lost").expect("it is told"), &["messages=20"]);
    wait_until("they are forgotten", || messages(&redis) == 0);
}

#[test]
fn the_wheel_goes_on_where_the_messages_of_a_lost_tick_cannot_be_put_back() {
    for command in ["-hscan", "-sadd"] {
        let redis = Redis::start();
        let sidecar = sidecar(&redis);
        let mut subscriber = sidecar.connect().subscribed("default");
        let mut connection = sidecar.connect();
        connection.ask(&frames::add(&(0..20).collect::<Vec<u64>>(), 15, 1)).added();
        redis.command::<()>(&["ACL", "SETUSER", "default", command]);
        lose_all_ticks(&redis);
        sidecar.log().line("cannot be put back").expect("it is told");
        assert_names(&sidecar.log().line("messages are lost").expect("it is told"), &["messages=20"]);
        redis.command::<()>(&["ACL", "SETUSER", "default", "+sadd"]);
        assert_delivered(&sidecar, &mut [&mut subscriber], 20..30);
        assert_eq!(connection.ask(&frames::del(&[7])).outcomes(), [ACKED], "nobody was told that it timed out");
        wait_until("it is not counted twice", || lost_and_found(&redis, &sidecar) == (0, 2));
    }
}

#[test]
fn a_pointer_that_redis_has_lost_moves_again_under_another_epoch() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    let number = |field: &str| redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", field]);
    let mut subscriber = sidecar.connect().subscribed("default");
    assert_delivered(&sidecar, &mut [&mut subscriber], 0..10);
    // Beyond the tick of their batch: what is published is lost in other tests.
    sidecar.wait_for_pointer(sidecar.pointer() + 5);
    let epoch = number("epoch");
    // The state of a Redis that was killed and read its file again, without the last second.
    let lost = "local meta = KEYS[1] \
        for _, field in ipairs({'pointer', 'frozen_from'}) do redis.call('HINCRBY', meta, field, -3) end \
        return redis.call('HINCRBY', meta, 'due_ms', -600)";
    redis.command::<i64>(&["EVAL", lost, "1", "{ackwheel:0}:meta"]);
    wait_until("it leads again", || number("epoch") > epoch);
    assert!(sidecar.log().line("batches are published again under a new epoch").is_some(), "a person is told");
    assert_delivered(&sidecar, &mut [&mut sidecar.connect().subscribed("default")], 10..20);
}

#[test]
fn a_group_that_only_the_outbox_knows_can_be_seen_and_deleted() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    drop(sidecar.connect().subscribed("audit"));
    wait_until("it has left", || sidecar.group("audit").is_some_and(|group| group.subscribers == 0));
    redis.command::<()>(&["DEL", "{ackwheel:0}:groups"]);
    wait_until("both are there again", || redis.command::<u64>(&["HLEN", "{ackwheel:0}:groups"]) == 2);
    let ephemeral = sidecar.connect().subscribed_with(&frames::subscribe("", 10, frames::EPHEMERAL));
    for none in ["", "no name of a group"] {
        redis.command::<()>(&["XGROUP", "CREATE", "{ackwheel:0}:outbox", none, "0"]);
    }
    redis.command::<()>(&["DEL", "{ackwheel:0}:groups"]);
    wait_until("three are there again", || redis.command::<u64>(&["HLEN", "{ackwheel:0}:groups"]) == 3);
    assert_eq!(sidecar.status().groups.len(), 3);
    let last = sidecar.connect().subscribed_with(&frames::subscribe("", 10, frames::EPHEMERAL));
    redis.command::<()>(&["DEL", "{ackwheel:0}:outbox"]);
    drop((ephemeral, last));
    wait_until("it goes with its last member", || redis.command::<u64>(&["HLEN", "{ackwheel:0}:groups"]) == 2);
    assert_names(sidecar.run(&["group", "delete", "audit"]).output(), &["audit"]);
    redis.command::<()>(&["DEL", "{ackwheel:0}:groups", "{ackwheel:0}:outbox"]);
    wait_until("the default group is", || redis.command::<u64>(&["HLEN", "{ackwheel:0}:groups"]) == 1);
    let ids = [7, 8, 9];
    sidecar.connect().ask(&frames::add(&ids, 1, 1)).added();
    sidecar.wait_for_pointer(sidecar.pointer() + 3);
    assert_eq!(take_until(&mut sidecar.connect().subscribed("default"), &ids), ids);
}

#[test]
fn a_group_that_was_there_is_none_too_many_when_all_are_lost() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    for number in 1..64 {
        drop(sidecar.connect().subscribed(&format!("group-{number}")));
    }
    let subscribed =
        || redis.command::<Vec<String>>(&["HVALS", "{ackwheel:0}:sidecars"]).concat().contains("group");
    wait_until("all have left", || !subscribed());
    redis.command::<()>(&["DEL", "{ackwheel:0}:groups"]);
    // Nobody knows whether the leader's look or the subscriber comes first.
    drop(sidecar.connect().subscribed("group-7"));
    wait_until("all are there again", || redis.command::<u64>(&["HLEN", "{ackwheel:0}:groups"]) == 64);
    sidecar.connect().ask(&frames::subscribe("one-more", 10, 0)).assert_error(37, frames::RETRYABLE);
}

#[test]
fn batches_of_a_dead_sidecar_go_to_another_even_if_groups_or_sidecars_were_lost() {
    for lost in [&["groups"][..], &["sidecars"], &["sidecars", "groups"]] {
        let redis = Redis::start();
        let [mut dead, lives] =
            ["dead", "lives"].map(|name| Sidecar::on(&redis, name, &["--tick", "200ms", "--lease", "500ms"]));
        let mut holder = dead.connect().subscribed("audit");
        dead.connect().ask(&frames::add(&[1, 2, 3], 1, 1)).added();
        assert_eq!(holder.batch().delivery, 1);
        dead.kill();
        for key in lost {
            redis.command::<()>(&["DEL", &format!("{{ackwheel:0}}:{key}")]);
        }
        let batch = lives.connect().subscribed("audit").settled_batch();
        assert_eq!((batch.ids(), batch.delivery), (vec![1, 2, 3], 2), "{lost:?}");
    }
}

#[test]
fn a_ring_whose_head_is_lost_starts_again_also_without_later_permissions() {
    let redis = Redis::start();
    let sidecar = sidecar(&redis);
    sidecar.connect().ask(&frames::add(&(0..20).collect::<Vec<u64>>(), 15, 1)).added();
    redis.command::<()>(&["ACL", "SETUSER", "default", "-unlink", "-rpop", "-xinfo|stream"]);
    let before = redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "epoch"]);
    redis.command::<()>(&["DEL", "{ackwheel:0}:meta"]);
    wait_until("it is noticed", || sidecar.metrics().count("redis_lost_total") == 1);
    sidecar.wait_until_ready();
    assert_eq!(redis.command::<u64>(&["HLEN", "{ackwheel:0}:messages"]), 0);
    wait_until("it leads", || sidecar.leader().is_some());
    let after = redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "epoch"]);
    assert!(after > before, "{after} after {before}");
}

#[test]
fn an_ephemeral_group_that_nobody_can_leave_any_more_goes_within_minutes_of_the_wheel() {
    let redis = Redis::with_clock(Clock::Offset(0));
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "50ms", "--slots", "240"]);
    let groups = || redis.command::<Vec<String>>(&["HKEYS", "{ackwheel:0}:groups"]);
    let orphan = "ephemeral-0123abcd-7";
    redis.command::<()>(&["XGROUP", "CREATE", "{ackwheel:0}:outbox", orphan, "$"]);
    redis.command::<()>(&["XGROUP", "CREATE", "{ackwheel:0}:outbox", "ephemeral-a-7", "$"]);
    let _watch = sidecar.connect().subscribed_with(&frames::subscribe("", 10, frames::EPHEMERAL));
    wait_until("all are known", || groups().len() == 4);
    let is_there = || groups().iter().any(|group| group == orphan);
    redis.set_offset(120);
    sidecar.wait_for_pointer(sidecar.pointer() + 40);
    assert!(is_there(), "a clock that was set is no time that passed");
    let noted = || redis.command::<String>(&["HGET", "{ackwheel:0}:groups", orphan]);
    wait_until("it is noted that it has no subscriber", || noted().contains(' '));
    // The effect of a wheel of more than a minute.
    let since = noted()[2..].parse::<u64>().unwrap() - 61_000 / 50;
    redis.command::<()>(&["HSET", "{ackwheel:0}:meta", "begun_at", "0"]);
    redis.command::<()>(&["HSET", "{ackwheel:0}:groups", orphan, &format!("e {since}")]);
    wait_until("it has gone", || !is_there());
    assert_eq!(groups().len(), 3, "the default group, one that has a subscriber, and one that somebody named");
}

/// Looks after an outbox until all of that succeeds; returns what it was told of in all.
pub async fn tend(outbox: &dyn Outbox, now: Instant) -> Dropped {
    let (begun, mut told) = (Instant::now(), Dropped::default());
    loop {
        match outbox.maintain(&[], now).await {
            Ok(dropped) if dropped == Dropped::default() => return told,
            Ok(dropped) => {
                told.ids += dropped.ids;
                told.batches += dropped.batches;
                told.groups.extend(dropped.groups);
            }
            Err(refusal) => assert!(begun.elapsed() < Duration::from_secs(10), "{refusal}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The same, where the first answer is lost.
async fn tend_without_answer(outbox: &dyn Outbox, proxy: &Proxy, now: Instant) -> Dropped {
    let lost = proxy.lost();
    proxy.lose_an_answer();
    // It asks for that first, and sends heartbeats behind it.
    outbox.maintain(&[], now).await.unwrap_err();
    assert_eq!(proxy.lost(), lost + 1);
    tend(outbox, now).await
}

/// Publishes a batch of so many messages.
pub async fn publish(seat: &RingParts, time: &mut FrozenRedis, count: u64) {
    let messages: Vec<Message> = (0..count).map(Message::from).collect();
    let request = AddNewMsg { messages: &messages, ack_timeout_ticks: 1, attempt: 1 };
    seat.ring.add_new_msg(request, time.now()).await.unwrap();
    turn(seat, time, 3).await;
}

/// Lets ticks pass.
pub async fn turn(seat: &RingParts, time: &mut FrozenRedis, ticks: u32) {
    for _ in 0..ticks {
        time.pass(Duration::from_secs(1));
        // A leader whose connection was rebuilt is elected again.
        seat.lease.maintain(time.now()).await.unwrap();
        while !matches!(seat.ring.advance(time.now()).await.unwrap(), Advance::Waiting(_)) {}
        while seat.ring.publish_expired(time.now()).await.unwrap().more {}
    }
}

#[tokio::test]
async fn dropped_batches_are_reported_even_if_the_answer_is_lost() {
    let mut time = FrozenRedis::start();
    let options = time.options(Wheel::new(15, Duration::from_secs(1)).unwrap());
    let proxy = Proxy::to(time.redis.port);
    let retention = Retention { max_ids: 10, time: Duration::from_secs(20) };
    let store = frozen_redis::open(&RedisOptions { url: proxy.url().into(), retention, ..options.clone() }).await;
    let seat = &store.rings()[0];
    let outbox = &*seat.outbox;
    seat.lease.maintain(time.now()).await.unwrap();

    publish(seat, &mut time, 200).await;
    let dropped = tend_without_answer(outbox, &proxy, time.now()).await;
    assert_eq!((dropped.ids, dropped.batches), (200, 1));
    assert_eq!(seat.outbox.backlog(time.now()).await.unwrap().ids, 0);

    let audit = "audit".parse().unwrap();
    seat.outbox.open_group(&audit, GroupOptions::default(), time.now()).await.unwrap();
    seat.outbox.leave_group(&audit).await.unwrap();
    // The lost answer ended its session. From its next election on it watches before it drops what is old.
    seat.lease.maintain(time.now()).await.unwrap();
    assert_eq!(tend(outbox, time.now()).await, Dropped::default(), "it is noted that it has no subscriber");
    turn(seat, &mut time, 21).await;
    let dropped = tend_without_answer(outbox, &proxy, time.now()).await;
    assert_eq!(dropped, Dropped { groups: vec![audit], ..Dropped::default() });
}
