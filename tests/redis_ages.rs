//! Ages in Redis are observed: a clock that somebody sets, or an outage, makes nothing old.

use std::time::Duration;

use ackwheel::core::{Dropped, GroupOptions, Retention, Store, Wheel};
use ackwheel::redis::RedisOptions;

use crate::redis_faults::take_until;
use crate::redis_losses::{publish, tend, turn};
use crate::support::clock::Clock;
use crate::support::fleet::{Pointers, assert_pace};
use crate::support::frames::{self, u32_at};
use crate::support::frozen_redis::{self, FrozenRedis};
use crate::support::process::assert_names;
use crate::support::redis::{Keeps, Redis};
use crate::support::sidecar::Sidecar;
use crate::support::{wait_for, wait_until};

const HOUR: i64 = 3_600;
/// A long ring, so that no subscriber has to answer a ping while the test waits.
const FLAGS: [&str; 4] = ["--tick", "200ms", "--slots", "150"];
const TICK: Duration = Duration::from_millis(200);
const CATCH_UP_MAX_TICKS: u64 = 5;

fn groups(redis: &Redis) -> u64 {
    redis.command(&["HLEN", "{ackwheel:0}:groups"])
}

/// Batches, groups and messages that are gone, redeliveries, and connections that were made again.
fn lost(sidecars: &[Sidecar; 2]) -> u64 {
    let counts =
        ["outbox_dropped_ids_total", "groups_dropped_total", "batches_redelivered_total", "redis_lost_total"];
    let count = |sidecar: &Sidecar| -> u64 {
        let metrics = sidecar.metrics();
        counts.iter().map(|name| metrics.count(name)).sum::<u64>() + metrics.count("redis_reconnects_total")
    };
    sidecars.iter().map(count).sum()
}

/// Sets the clock of Redis by so many hours, with a batch in a subscriber's hands, groups with and without subscribers, and
/// an ephemeral one.
fn set_the_clock(hours: i64) {
    let redis = Redis::with_clock(Clock::Offset(0));
    let sidecars = ["a", "b"].map(|name| Sidecar::on(&redis, name, &FLAGS));
    let [a, b] = &sidecars;
    let mut holder = a.connect().subscribed("default");
    let mut watch = b.connect().subscribed_with(&frames::subscribe("", 100, frames::EPHEMERAL));
    let mut audit = b.connect().subscribed("audit");
    drop(a.connect().subscribed("absent"));
    let first: Vec<u64> = (1..=10).collect();
    a.connect().ask(&frames::add(&first, 1, 1)).added();
    let held = holder.batch();
    assert_eq!(take_until(&mut audit, &first), first);
    assert_eq!(take_until(&mut watch, &first), first);
    let noted = || redis.command::<String>(&["HGET", "{ackwheel:0}:groups", "absent"]).contains(' ');
    wait_until("the leader knows which group has no subscriber", noted);
    assert_eq!((groups(&redis), lost(&sidecars)), (4, 0));

    let pointers = Pointers::watch(a.admin);
    for offset in [hours * HOUR, 0] {
        redis.set_offset(offset);
        let pointer = a.pointer();
        // Two leases would be six seconds.
        a.wait_for_pointer(pointer + 15);
        assert!(b.leader().is_some());
        assert_eq!((groups(&redis), lost(&sidecars)), (4, 0), "the clock is {offset} s fast");
        let oldest = wait_for("the leader shows an age", || {
            let series = "ackwheel_outbox_oldest_seconds{group=\"default\"}";
            sidecars.iter().find_map(|sidecar| sidecar.metrics().find(series))
        });
        assert!((0.0..120.0).contains(&oldest), "{oldest} s");
        let ids: Vec<u64> = (1_000..1_010).map(|id| id + u64::from(offset == 0)).collect();
        b.connect().ask(&frames::add(&ids, 1, 1)).added();
        let mut found = holder.settled_batch().ids();
        found.sort_unstable();
        assert_eq!(found, ids);
        assert_eq!(take_until(&mut audit, &ids), ids);
        assert_eq!(take_until(&mut watch, &ids), ids);
    }
    assert_pace(&pointers.finish(), TICK, CATCH_UP_MAX_TICKS);
    let links: Vec<String> = redis.command(&["KEYS", "{ackwheel:0}:link:*"]);
    assert_eq!(links.len(), 2);
    for link in &links {
        assert_eq!(redis.command::<i64>(&["TTL", link]), -1, "no clock of Redis takes it away");
    }
    let settled = holder.ask(&frames::batch_ack(&[held.id]));
    assert_eq!(u32_at(&settled.body, 0), 1, "it was held all the time");
    // A batch without a subscriber waits for the one that comes.
    let all = take_until(&mut a.connect().subscribed("absent"), &first);
    assert_eq!(all, first);
    assert_eq!(lost(&sidecars), 0);
}

#[test]
fn a_clock_of_redis_that_is_set_forwards_by_a_day_drops_nothing() {
    set_the_clock(25);
}

#[test]
fn a_clock_of_redis_that_is_set_forwards_by_a_month_drops_nothing() {
    set_the_clock(30 * 24);
}

#[test]
fn a_clock_of_redis_that_is_set_back_by_a_day_drops_nothing() {
    set_the_clock(-25);
}

#[test]
fn a_clock_of_redis_that_is_set_back_by_a_month_drops_nothing() {
    set_the_clock(-30 * 24);
}

#[tokio::test]
async fn a_clock_that_is_set_makes_no_batch_and_no_group_old_and_ticks_do() {
    const MONTH_MS: u64 = 30 * 24 * 3_600_000;
    let mut time = FrozenRedis::start();
    let retention = Retention { time: Duration::from_secs(20), ..Retention::default() };
    let options = time.options(Wheel::new(15, Duration::from_secs(1)).unwrap());
    let store = frozen_redis::open(&RedisOptions { retention, ..options }).await;
    let seat = &store.rings()[0];
    let outbox = &*seat.outbox;
    seat.lease.maintain(time.now()).await.unwrap();
    assert_eq!(tend(outbox, time.now()).await, Dropped::default());
    // The grace after its election is over.
    turn(seat, &mut time, 21).await;
    assert_eq!(tend(outbox, time.now()).await, Dropped::default());

    publish(seat, &mut time, 200).await;
    let audit = "audit".parse().unwrap();
    outbox.open_group(&audit, GroupOptions::default(), time.now()).await.unwrap();
    outbox.leave_group(&audit).await.unwrap();
    assert_eq!(tend(outbox, time.now()).await, Dropped::default());
    for unix_ms in [time.unix_ms() + MONTH_MS, time.unix_ms() - MONTH_MS, time.unix_ms()] {
        time.redis.set_frozen(unix_ms);
        assert_eq!(tend(outbox, time.now()).await, Dropped::default());
        let oldest = outbox.backlog(time.now()).await.unwrap().groups[0].oldest;
        assert!(oldest < Duration::from_secs(5), "{oldest:?}");
    }
    let mut dropped = Dropped::default();
    // A busy machine can make the store connect again, and then it observes the age from the beginning.
    for _ in 0..4 {
        turn(seat, &mut time, 22).await;
        let Dropped { ids, batches, groups } = tend(outbox, time.now()).await;
        dropped.ids += ids;
        dropped.batches += batches;
        dropped.groups.extend(groups);
        if dropped.ids > 0 && !dropped.groups.is_empty() {
            break;
        }
    }
    assert_eq!(dropped, Dropped { ids: 200, batches: 1, groups: vec![audit] });
}

#[test]
fn after_downtime_nothing_is_dropped_before_a_consumer_can_return() {
    const RETENTION: [&str; 4] = ["--tick", "200ms", "--outbox-retention", "6s"];
    let mut redis = Redis::with(Keeps::Everything, Some(Clock::Offset(0)));
    let mut before = Sidecar::on(&redis, "before", &RETENTION);
    drop(before.connect().subscribed("audit"));
    let ids: Vec<u64> = (1..=10).collect();
    let (deadline, _) = before.connect().ask(&frames::add(&ids, 1, 1)).added();
    // Nearly as old as it may become.
    before.wait_for_pointer(deadline + 20);
    before.kill();
    redis.kill();
    // Downtime that needs no waiting.
    redis.set_offset_of_next_start(HOUR);
    redis.restart();
    let after = Sidecar::on(&redis, "after", &RETENTION);
    wait_until("it leads", || after.leader().as_deref() == Some("after"));
    after.wait_for_pointer(after.pointer() + 15);
    let dropped =
        || (after.metrics().count("outbox_dropped_ids_total"), after.metrics().count("groups_dropped_total"));
    assert_eq!(
        (dropped(), groups(&redis)),
        ((0, 0), 2),
        "it is older than the retention, and nobody could return yet"
    );
    assert_eq!(take_until(&mut after.connect().subscribed("default"), &ids), ids);
    // Nobody comes for the other copy.
    wait_until("the retention counts again", || dropped() == (10, 1));
    assert_eq!(groups(&redis), 1);
}

#[test]
fn the_link_of_a_dead_sidecar_goes_once_the_wheel_has_turned_for_a_day() {
    let redis = Redis::with_clock(Clock::Offset(0));
    let flags = ["--tick", "200ms", "--lease", "500ms"];
    let [mut dead, lives] = ["dead", "lives"].map(|name| Sidecar::on(&redis, name, &flags));
    drop(dead.connect().subscribed("default"));
    dead.kill();
    let departed = || redis.command::<Vec<String>>(&["ZRANGE", "{ackwheel:0}:departed", "0", "-1"]);
    let links = || redis.command::<Vec<String>>(&["KEYS", "{ackwheel:0}:link:*"]).len();
    wait_until("it is found dead", || departed().len() == 1);
    assert_eq!(links(), 2, "it may be paused, and come back");
    redis.set_offset(26 * HOUR);
    lives.wait_for_pointer(lives.pointer() + 15);
    assert_eq!((links(), departed().len()), (2, 1), "a clock that was set is no time that passed");
    let day = (26 * HOUR * 5).to_string();
    redis.command::<()>(&["ZINCRBY", "{ackwheel:0}:departed", &format!("-{day}"), &departed()[0]]);
    wait_until("it has gone", || (links(), departed().len()) == (1, 0));
}

#[test]
fn a_retention_that_differs_from_that_of_the_leader_is_reported() {
    let redis = Redis::start();
    let leader = Sidecar::on(&redis, "leader", &["--outbox-retention", "1h"]);
    wait_until("it leads", || leader.leader().is_some());
    let follower = Sidecar::on(&redis, "follower", &["--outbox-retention", "2h"]);
    let line = follower.log().line("differ between this sidecar and the leader").expect("it is reported");
    assert_names(&line, &["retention_ms=7200000", "retention_ms_of_leader=3600000", "--outbox-retention"]);
    assert!(!leader.log().text().contains("differ between"), "the leader's holds");
}
