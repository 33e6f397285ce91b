//! Several sidecars on one Redis are one wheel: whatever is done through one counts for all.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::support::fleet::{sum, wait_for_sum};
use crate::support::frames::{self, ACKED, LATE, UNKNOWN, WITHDRAWN, u32_at};
use crate::support::process::{Run, assert_names};
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve_on};
use crate::support::wait_until;
use crate::support::watch::{Line, Watch};

const TICK: [&str; 2] = ["--tick", "200ms"];

/// Three sidecars on one Redis.
fn three(redis: &Redis, flags: &[&str]) -> [Sidecar; 3] {
    ["a", "b", "c"].map(|name| Sidecar::on(redis, name, &[&TICK, flags].concat()))
}

/// How many batches hold each id.
fn count_ids<'a>(lines: impl IntoIterator<Item = &'a Line>) -> BTreeMap<u64, usize> {
    let mut counts = BTreeMap::new();
    lines.into_iter().flat_map(Line::plain_ids).for_each(|id| *counts.entry(id).or_default() += 1);
    counts
}

/// Takes lines until they hold so many ids; none of them is a redelivery.
fn take_ids(watches: &[&Watch], count: usize) -> Vec<Vec<Line>> {
    let mut lines: Vec<Vec<Line>> = watches.iter().map(|_| Vec::new()).collect();
    wait_until("everything is printed", || {
        for (watch, lines) in watches.iter().zip(&mut lines) {
            lines.extend(watch.try_take());
        }
        lines.iter().flatten().map(|line| line.ids.len()).sum::<usize>() >= count
    });
    assert!(lines.iter().flatten().all(|line| line.delivery == 1), "{lines:?}");
    lines
}

#[test]
fn three_sidecars_share_one_wheel() {
    let redis = Redis::start();
    let sidecars = three(&redis, &["--slots", "40"]);
    let [a, b, c] = sidecars.each_ref();
    let members = [Watch::start(a, &["--group", "default"]), Watch::start(b, &["--group", "default"])];
    let audit = Watch::start(c, &["--group", "audit"]);
    wait_for_sum(&[a, b, c], "leader", 1);
    wait_for_sum(&[a, b, c], "messages_in_flight", 0);

    // A hundred through each, in as many ticks as there is room for; ten of them are acknowledged elsewhere.
    let mut connections = [a, b, c].map(Sidecar::connect);
    for tick in 0..20_u16 {
        let first = u64::from(tick) * 15 + 1;
        for (connection, first) in connections.iter_mut().zip([first, first + 5, first + 10]) {
            connection.ask(&frames::add(&(first..first + 5).collect::<Vec<_>>(), 20 + tick, 1)).added();
        }
    }
    wait_for_sum(&[a, b, c], "messages_in_flight", 300);
    let acked: BTreeSet<u64> = (271..=300).collect();
    for (sidecar, ids) in [1, 2, 0].into_iter().zip([271..=275, 276..=280, 281..=285]) {
        let both: Vec<u64> = ids.clone().chain(ids.map(|id| id + 15)).collect();
        assert_eq!(connections[sidecar].ask(&frames::del(&both)).outcomes(), [ACKED; 10]);
    }
    wait_for_sum(&[a, b, c], "messages_in_flight", 270);
    let begun = sum(&[a, b, c], "messages_timed_out_total");
    assert!(begun < 270.0, "still on their way");

    let shares = take_ids(&[&members[0], &members[1]], 270);
    let all = take_ids(&[&audit], 270).remove(0);
    let expected: BTreeMap<u64, usize> = (1..=300).filter(|id| !acked.contains(id)).map(|id| (id, 1)).collect();
    assert_eq!(count_ids(shares.iter().flatten()), expected, "each member's are its own");
    assert_eq!(count_ids(&all), expected, "another group has all");
    assert!(shares.iter().all(|share| !share.is_empty()), "one member got everything");
    assert!(all.is_sorted_by_key(|line| line.tick), "earlier ticks first");
    wait_for_sum(&[a, b, c], "messages_in_flight", 0);
    wait_for_sum(&[a, b, c], "messages_timed_out_total", 270);
    wait_for_sum(&[a, b, c], "leader", 1);
    let added: u64 = sidecars.iter().map(|sidecar| sidecar.metrics().count("messages_added_total")).sum();
    let acked: u64 = sidecars.iter().map(|sidecar| sidecar.metrics().acked("acked")).sum();
    assert_eq!((added, acked), (300, 30), "each sidecar counts what went through it");
    for sidecar in [a, b, c] {
        sidecar.wait_for_settled("default");
    }
}

#[test]
fn an_ack_counts_wherever_it_arrives() {
    let redis = Redis::start();
    let sidecars = three(&redis, &["--slots", "60"]);
    let watch = Watch::start(&sidecars[1], &["--group", "default"]);
    let [mut a, mut b, mut c] = sidecars.each_ref().map(Sidecar::connect);
    assert_eq!(a.ask(&frames::add(&[1, 2, 3], 15, 1)).added().1, [false; 3]);
    assert_eq!(b.ask(&frames::del(&[1])).outcomes(), [ACKED]);
    assert_eq!(c.ask(&frames::del(&[1])).outcomes(), [UNKNOWN]);
    assert_eq!(c.ask(&frames::withdraw(&[2])).outcomes(), [WITHDRAWN]);
    // Re-armed through another: sooner, so that the first deadline would come after.
    assert_eq!(b.ask(&frames::add(&[3], 3, 2)).added().1, [true]);
    let batch = watch.next();
    assert_eq!((batch.plain_ids(), &batch.attempts[..], batch.delivery), (vec![3], &[2][..], 1));
    for connection in [&mut c, &mut a, &mut b] {
        assert_eq!(connection.ask(&frames::del(&[3, 1, 2])).outcomes(), [LATE, UNKNOWN, UNKNOWN]);
    }
    // Decided after everything above: nothing else timed out.
    a.ask(&frames::add(&[4], 15, 1)).added();
    assert_eq!(watch.next().plain_ids(), [4]);
}

#[test]
fn every_sidecar_names_the_same_leader_and_another_after_it_left() {
    let redis = Redis::start();
    let mut sidecars: BTreeMap<&str, Sidecar> =
        ["a", "b", "c"].into_iter().map(|name| (name, Sidecar::on(&redis, name, &TICK))).collect();
    let agree = |sidecars: &BTreeMap<&str, Sidecar>| {
        let mut leader = None;
        wait_until("all name one leader that lives", || {
            let leaders: BTreeSet<_> = sidecars.values().map(Sidecar::leader).collect();
            leader = leaders.first().cloned().flatten();
            leaders.len() == 1 && leader.as_ref().is_some_and(|leader| sidecars.contains_key(leader.as_str()))
        });
        leader.unwrap()
    };
    let first = agree(&sidecars);
    let others: Vec<&Sidecar> = sidecars.values().collect();
    wait_for_sum(&others, "leader", 1);
    wait_for_sum(&[&sidecars[first.as_str()]], "leader", 1);
    assert_names(sidecars["b"].run(&["status"]).output(), &["store redis", &first]);
    let epoch = sidecars["c"].status().rings[0].epoch;

    sidecars.remove(first.as_str()).unwrap().terminate();
    let second = agree(&sidecars);
    assert_ne!(second, first);
    wait_for_sum(&[&sidecars[second.as_str()]], "leader", 1);
    assert!(sidecars[second.as_str()].status().rings[0].epoch > epoch, "a new leadership has a higher epoch");
}

#[test]
fn a_group_with_a_subscriber_elsewhere_is_not_deleted() {
    let redis = Redis::start();
    let [a, b, _c] = three(&redis, &[]);
    let mut watch = Watch::start(&a, &["--group", "audit"]);
    assert_names(b.run(&["group", "delete", "audit"]).error(1), &["group_in_use"]);
    watch.kill();
    let mut deleted = None;
    wait_until("it can be deleted", || {
        let run = b.run(&["group", "delete", "audit"]);
        deleted = (run.code == 0).then_some(run);
        deleted.is_some()
    });
    assert_eq!(deleted.unwrap().output(), "audit deleted\n");
    wait_until("no sidecar has it", || a.group("audit").is_none() && b.group("audit").is_none());
    assert_names(b.run(&["group", "delete", "audit"]).error(1), &["unknown_group"]);
}

#[test]
fn an_ephemeral_watch_leaves_no_group_behind() {
    let redis = Redis::start();
    let [a, b, c] = three(&redis, &[]);
    let mut looker_on = Watch::start(&b, &[]);
    wait_until("its group is everywhere", || {
        [&a, &b, &c].iter().all(|sidecar| sidecar.status().groups.len() == 2)
    });
    a.connect().ask(&frames::add(&[1], 1, 1)).added();
    assert_eq!(looker_on.next().plain_ids(), [1]);
    looker_on.kill();
    wait_until("its group is gone", || [&a, &b, &c].iter().all(|sidecar| sidecar.status().groups.len() == 1));
}

/// Adds a message for each of the next four ticks, and has a subscriber that acknowledges nothing take them.
fn held_by(sidecar: &Sidecar) -> (Watch, Vec<Line>) {
    let watch = Watch::start(sidecar, &["--group", "default", "--no-ack"]);
    let mut connection = sidecar.connect();
    for ticks in 1..=4 {
        connection.ask(&frames::add(&[u64::from(ticks)], ticks, 1)).added();
    }
    let held = watch.take(4);
    assert!(held.iter().all(|line| line.delivery == 1), "{held:?}");
    (watch, held)
}

/// Asserts that these are the same batches, delivered once more.
#[track_caller]
fn assert_redelivered(held: &[Line], again: &[Line]) {
    let again: BTreeMap<_, _> = again.iter().map(|line| (line.batch(), line)).collect();
    assert_eq!(again.len(), held.len(), "{again:?}");
    for line in held {
        let after = again.get(&line.batch()).unwrap_or_else(|| panic!("{line:?} was not delivered again"));
        assert!(after.delivery > line.delivery, "{after:?}");
        assert_eq!(after.messages(), line.messages());
    }
}

#[test]
fn batches_of_a_killed_subscriber_go_to_another_sidecar_at_once() {
    let redis = Redis::start();
    let [a, b, c] = three(&redis, &[]);
    let (mut first, held) = held_by(&a);
    let second = Watch::start(&b, &["--group", "default"]);
    let begun = Instant::now();
    first.kill();
    let again = second.take(4);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?} is not at once", begun.elapsed());
    assert_redelivered(&held, &again);
    assert!(again.iter().all(|line| line.delivery == 2), "{again:?}");
    c.wait_for_settled("default");
}

#[test]
fn batches_of_a_killed_sidecar_go_to_another() {
    let redis = Redis::start();
    let [mut a, b, c] = three(&redis, &[]);
    let (_first, held) = held_by(&a);
    let second = Watch::start(&b, &["--group", "default"]);
    let begun = Instant::now();
    a.kill();
    let again = second.take(4);
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?} is more than a few seconds", begun.elapsed());
    assert_redelivered(&held, &again);
    // The wheel goes on without it, leader or not.
    c.connect().ask(&frames::add(&[5], 1, 1)).added();
    assert_eq!(second.next().plain_ids(), [5]);
    c.wait_for_settled("default");
}

/// Flags with which a batch is overdue after a second.
const SOON: [&str; 2] = ["--redeliver-after", "1s"];

#[test]
fn batches_of_a_silent_subscriber_go_to_another_sidecar() {
    let redis = Redis::start();
    let [a, b, c] = three(&redis, &SOON);
    let silent = Watch::start(&a, &["--group", "default", "--no-ack"]);
    a.connect().ask(&frames::add(&[1], 1, 1)).added();
    let held = silent.next();
    let healthy = Watch::start(&b, &["--group", "default"]);
    let again = healthy.next();
    assert_eq!((again.batch(), again.messages()), (held.batch(), held.messages()));
    assert!(again.delivery >= 2, "{again:?}");
    c.wait_for_settled("default");
    wait_until("the first sidecar has forgotten it", || {
        c.group("default").is_some_and(|group| (group.outbox_batches, group.unacked_batches) == (0, 0))
    });
}

#[test]
fn a_returned_batch_goes_to_another_sidecar_at_once_and_an_ack_of_the_first_counts() {
    let redis = Redis::start();
    let [a, b, _c] = three(&redis, &["--redeliver-after", "60s"]);
    let mut giver = a.connect().subscribed("default");
    a.connect().ask(&frames::add(&[1], 1, 1)).added();
    let batch = giver.batch();
    let mut taker = b.connect().subscribed("default");
    let given = Instant::now();
    let answer = giver.ask(&frames::batch_nack(batch.id, 50_000));
    assert_eq!((answer.kind, answer.flags), (frames::BATCH_NACK_ANSWER, 1), "HELD: {answer:?}");
    let taken = taker.batch();
    assert_eq!((taken.id, taken.delivery, taken.ids()), (batch.id, 2, batch.ids()));
    assert!(given.elapsed() < Duration::from_secs(5), "{:?} is not at once", given.elapsed());
    let answer = giver.ask(&frames::batch_ack(&[batch.id]));
    assert_eq!(u32_at(&answer.body, 0), 1, "a late acknowledgement settles it");
    let answer = taker.ask(&frames::batch_ack(&[batch.id]));
    assert_eq!(u32_at(&answer.body, 0), 0, "once");
}

#[test]
fn a_returned_batch_taken_by_a_subscriber_elsewhere_does_not_come_back_after_the_delay() {
    let redis = Redis::start();
    // A revolution of 12 s, so that nobody who reads nothing for a while is taken for gone.
    let [a, b, _c] = three(&redis, &["--redeliver-after", "60s", "--slots", "60"]);
    let mut giver = a.connect().subscribed("default");
    a.connect().ask(&frames::add(&[1], 1, 1)).added();
    let batch = giver.batch();
    let mut taker = b.connect().subscribed_with(&frames::subscribe("default", 1, 0));
    giver.ask(&frames::batch_nack(batch.id, 2_000));
    assert_eq!(taker.batch().id, batch.id);
    // The taker has no room for more. The delay is over before this one times out, and it would come after the first.
    a.connect().ask(&frames::add(&[2], 12, 1)).added();
    let next = giver.batch();
    assert_eq!((next.ids(), next.delivery), (vec![2], 1));
    assert_eq!(u32_at(&taker.ask(&frames::batch_ack(&[batch.id])).body, 0), 1);
}

#[test]
fn a_returned_batch_without_another_subscriber_comes_back_to_the_only_one() {
    let redis = Redis::start();
    let [a, ..] = three(&redis, &["--redeliver-after", "60s"]);
    let mut only = a.connect().subscribed("default");
    a.connect().ask(&frames::add(&[1], 1, 1)).added();
    let mut batch = only.batch();
    let (id, delay) = (batch.id, Duration::from_millis(400));
    for (delivery, wait) in [(2, delay), (3, delay * 2)] {
        let before = Instant::now();
        only.ask(&frames::batch_nack(id, 400));
        batch = only.batch();
        assert_eq!((batch.id, batch.delivery), (id, delivery));
        assert!(batch.arrived - before >= wait, "{:?} is before its delay is over", batch.arrived - before);
    }
    assert_eq!(u32_at(&only.ask(&frames::batch_ack(&[id])).body, 0), 1);
    a.wait_for_settled("default");
}

#[test]
fn a_batch_that_cannot_be_read_does_not_hold_up_the_others() {
    let redis = Redis::start();
    let [a, b, _c] = three(&redis, &[]);
    let key = {
        let found: Vec<String> = redis.command(&["KEYS", "*:outbox"]);
        assert_eq!(found.len(), 1, "{found:?}");
        found[0].clone()
    };
    let _: String = redis.command(&["XADD", &key, "0-1", "schema", "2"]);
    a.connect().ask(&frames::add(&[1], 1, 1)).added();
    let watch = Watch::start(&b, &["--group", "default"]);
    assert_eq!(watch.next().plain_ids(), [1]);
    let advice = format!("redis-cli XACK {key} default 0-1");
    assert!(b.log().line(&advice).is_some(), "a person is told what to do");
    let unsettled = || a.group("default").map(|group| group.outbox_batches);
    wait_until("the other is settled", || unsettled() == Some(1));
    assert_eq!(redis.command::<u64>(&["XACK", &key, "default", "0-1"]), 1);
    wait_until("nothing is left", || unsettled() == Some(0));
}

#[test]
fn four_rings_are_one_wheel() {
    let redis = Redis::start();
    let sidecars = three(&redis, &["--rings", "4"]);
    let [a, b, c] = sidecars.each_ref();
    let watch = Watch::start(b, &["--group", "default"]);
    wait_until("every ring has a leader", || {
        c.status().rings.into_iter().filter_map(|ring| ring.leader).count() == 4
    });
    for (sidecar, first) in [a, b, c].into_iter().zip([1, 101, 201]) {
        sidecar.connect().ask(&frames::add(&(first..first + 100).collect::<Vec<_>>(), 15, 1)).added();
    }
    wait_for_sum(&[a, b, c], "messages_in_flight", 300);
    let lines = take_ids(&[&watch], 300).remove(0);
    assert_eq!(count_ids(&lines), (1..=300).map(|id| (id, 1)).collect());
    let rings: BTreeSet<u16> = lines.iter().map(|line| line.ring).collect();
    assert_eq!(rings, (0..4).collect(), "300 messages are on all of four rings");
    assert_eq!(a.connect().ask(&frames::del(&(1..=300).collect::<Vec<_>>())).outcomes(), [LATE; 300]);
    a.wait_for_settled("default");
}

/// Asserts that a sidecar ends at once, with a sentence that has all these words.
fn assert_refused(redis: &Redis, flags: &[&str], words: &[&str]) {
    let run = Run::of(&mut serve_on(redis, "other", flags));
    assert!([1, 64].contains(&run.code) && run.stdout.is_empty(), "{run:?}");
    let sentence = run.stderr.lines().last().unwrap_or_default();
    let said: Vec<&str> = sentence.split(|character: char| !character.is_ascii_alphanumeric()).collect();
    for word in words {
        assert!(said.contains(word), "{word} is missing in: {sentence}");
    }
}

#[test]
fn a_sidecar_with_other_settings_is_refused() {
    let redis = Redis::start();
    let _first = Sidecar::on(&redis, "first", &["--tick", "300ms"]);
    assert_refused(&redis, &["--tick", "300ms", "--slots", "7"], &["slots", "7", "15"]);
    assert_refused(&redis, &["--tick", "200ms"], &["tick", "200ms", "300ms"]);
    assert_refused(&redis, &["--tick", "300ms", "--rings", "2"], &["rings", "2", "1"]);
    redis.command::<()>(&["HSET", "{ackwheel:0}:meta", "schema", "99"]);
    assert_refused(&redis, &["--tick", "300ms"], &["schema", "99", "update"]);
    let elsewhere = Sidecar::on(&redis, "elsewhere", &["--slots", "7", "--namespace", "another"]);
    assert_eq!(elsewhere.status().slots, 7, "another namespace is another wheel");
}
