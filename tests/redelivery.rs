//! Batches are redelivered when they were not acknowledged, and only then.

use std::time::{Duration, Instant};

use crate::support::frames::{self, u32_at};
use crate::support::sidecar::Sidecar;
use crate::support::watch::{Line, Watch};
use crate::support::{SLACK, wait_until};

/// Adds a message for each of the next ticks: as many batches.
pub fn add_one_a_tick(sidecar: &Sidecar, ids: std::ops::RangeInclusive<u64>) {
    let mut connection = sidecar.connect();
    let first = *ids.start();
    for id in ids {
        let ticks = u16::try_from(id - first + 1).unwrap();
        connection.ask(&frames::add(&[id], ticks, 1)).added();
    }
}

#[test]
fn a_killed_watch_leaves_its_batches_to_the_next_at_once() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut first = Watch::start(&sidecar, &["--group", "default", "--no-ack"]);
    add_one_a_tick(&sidecar, 1..=4);
    let held = first.take(4);
    assert!(held.iter().all(|batch| batch.delivery == 1), "{held:?}");
    first.kill();

    let begun = Instant::now();
    // Perhaps before the sidecar has noticed that the first one is gone.
    let second = Watch::spawn(&sidecar.listen.to_string(), &["--group", "default"]);
    let again = second.take(4);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?} is not at once", begun.elapsed());
    for (before, after) in held.iter().zip(&again) {
        assert_eq!((after.batch(), after.delivery), (before.batch(), 2), "oldest first");
        assert_eq!(after.messages(), before.messages());
        assert!(after.age_ms >= before.age_ms, "{after:?}");
    }
    sidecar.wait_for_settled("default");
    let metrics = sidecar.metrics();
    assert_eq!((metrics.count("batches_delivered_total"), metrics.count("batches_redelivered_total")), (8, 4));
}

#[test]
fn members_share_every_group_sees_all_and_a_looker_on_takes_nothing() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let members = [(), ()].map(|()| Watch::start(&sidecar, &["--group", "default"]));
    let audit = Watch::start(&sidecar, &["--group", "audit"]);
    let mut looker_on = Watch::start(&sidecar, &[]);
    assert_eq!(sidecar.status().groups.len(), 3, "the looker-on has a group of its own");
    add_one_a_tick(&sidecar, 1..=12);

    for all in [audit.take(12), looker_on.take(12)] {
        let ids: Vec<u64> = all.iter().flat_map(Line::plain_ids).collect();
        assert_eq!(ids, (1..=12).collect::<Vec<_>>(), "each batch once, in the order of ticks");
        assert!(all.iter().all(|batch| batch.delivery == 1), "{all:?}");
    }
    sidecar.wait_for_settled("default");
    looker_on.kill();
    wait_until("its group goes with it", || sidecar.status().groups.len() == 2);
    let mut shares = Vec::new();
    wait_until("the members have printed everything", || {
        shares.extend(members.iter().enumerate().flat_map(|(member, watch)| {
            watch.try_take().into_iter().flat_map(move |batch| batch.plain_ids()).map(move |id| (id, member))
        }));
        shares.len() >= 12
    });
    shares.sort_unstable();
    assert_eq!(shares.iter().map(|(id, _)| *id).collect::<Vec<_>>(), (1..=12).collect::<Vec<_>>());
    for member in [0, 1] {
        let share = shares.iter().filter(|(_, whose)| *whose == member).count();
        assert!(share >= 3, "member {member} got {share} of 12: {shares:?}");
    }
    let metrics = sidecar.metrics();
    assert_eq!(metrics.count("batches_delivered_total"), 36);
    assert_eq!(metrics.count("batches_redelivered_total"), 0);
}

#[test]
fn a_returned_batch_is_redelivered_after_a_delay_that_doubles() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut only = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    let mut batch = only.batch();
    assert_eq!((batch.ids(), batch.delivery), (vec![1], 1));
    let (id, delay) = (batch.id, Duration::from_millis(300));
    for (delivery, wait) in [(2, delay), (3, delay * 2), (4, delay * 4)] {
        let before = Instant::now();
        let answer = only.ask(&frames::batch_nack(id, 300));
        assert_eq!((answer.kind, answer.flags), (frames::BATCH_NACK_ANSWER, 1), "HELD: {answer:?}");
        let after = Instant::now();
        batch = only.batch();
        assert_eq!((batch.id, batch.delivery), (id, delivery));
        let (least, most) = (batch.arrived - before, batch.arrived - after);
        assert!(least >= wait, "came {:?} before its delay was over", wait - least);
        assert!(most <= wait + SLACK, "came {:?} after its delay was over", most - wait);
    }
    only.ask(&frames::batch_ack(&[id]));
    let answer = only.ask(&frames::batch_nack(id, 300));
    assert_eq!((answer.kind, answer.flags), (frames::BATCH_NACK_ANSWER, 0), "nothing was done: {answer:?}");
}

#[test]
fn a_batch_given_back_goes_to_another_member_at_once() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut giver = sidecar.connect().subscribed("default");
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    let batch = giver.batch();
    let mut taker = sidecar.connect().subscribed("default");
    let given = Instant::now();
    giver.ask(&frames::batch_nack(batch.id, 25_000));
    let taken = taker.batch();
    assert_eq!((taken.id, taken.delivery), (batch.id, 2));
    assert!(given.elapsed() < Duration::from_secs(5), "{:?} is not at once", given.elapsed());
}

#[test]
fn any_member_may_acknowledge_and_the_batch_is_settled_for_all() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut holder = sidecar.connect().subscribed("default");
    let mut other_group = sidecar.connect().subscribed("audit");
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    let batch = holder.batch();
    assert_eq!(other_group.batch().id, batch.id);
    let mut member = sidecar.connect().subscribed("default");
    let answer = member.ask(&frames::batch_ack(&[batch.id]));
    assert_eq!(u32_at(&answer.body, 0), 1, "settled by a member that never held it");
    let answer = holder.ask(&frames::batch_ack(&[batch.id, batch.id]));
    assert_eq!(u32_at(&answer.body, 0), 0, "settled already, which is no error");
    let audit = sidecar.group("audit").unwrap();
    assert_eq!((audit.outbox_batches, audit.unacked_batches), (1, 1), "another group has its own copy");
    assert_eq!(sidecar.group("default").unwrap().outbox_batches, 0);

    // Its holder goes, and what the others get next is something else: it is not redelivered.
    drop(holder);
    wait_until("the holder is gone", || sidecar.subscribers() == 2);
    sidecar.connect().ask(&frames::add(&[2], 1, 1)).added();
    assert_eq!(member.batch().ids(), [2]);
}

#[test]
fn a_batch_that_is_not_acknowledged_in_time_is_overdue() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--redeliver-after", "700ms"]);
    let watch = Watch::start(&sidecar, &["--group", "default", "--no-ack"]);
    add_one_a_tick(&sidecar, 1..=1);
    let (first, second) = (watch.next(), watch.next());
    assert_eq!((first.delivery, second.delivery, second.batch()), (1, 2, first.batch()));
    // The first line was printed some time after the batch was delivered.
    let pause = second.arrived - first.arrived;
    assert!(pause >= Duration::from_millis(400), "{pause:?} is too early");
    assert!(u128::from(second.age_ms - first.age_ms) >= 700, "{} ms", second.age_ms - first.age_ms);
}

#[test]
fn batches_of_a_silent_member_go_to_another_once_they_are_overdue() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--redeliver-after", "2s"]);
    let silent = Watch::start(&sidecar, &["--group", "default", "--no-ack"]);
    let other = Watch::start(&sidecar, &["--group", "default"]);
    add_one_a_tick(&sidecar, 1..=10);
    let settled = other.take(10);
    let (once, twice): (Vec<&Line>, Vec<&Line>) = settled.iter().partition(|line| line.delivery == 1);
    let batches = |lines: &[&Line]| lines.iter().map(|line| line.batch()).collect::<Vec<_>>();
    let held = silent.try_take();
    assert!(!once.is_empty() && !held.is_empty(), "both have their turns");
    assert_eq!(
        batches(&twice),
        batches(&held.iter().collect::<Vec<_>>()),
        "each comes once more, and not to who was silent"
    );
    assert!(twice.iter().all(|line| line.delivery == 2), "{twice:?}");
    sidecar.wait_for_settled("default");
}

#[test]
fn a_disconnected_member_leaves_its_batches_to_the_others_at_once() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut leaver = sidecar.connect().subscribed("default");
    add_one_a_tick(&sidecar, 1..=3);
    let held: Vec<_> = (0..3).map(|_| leaver.batch().id).collect();
    let mut stayer = sidecar.connect().subscribed("default");
    drop(leaver);
    let again: Vec<_> = (0..3).map(|_| stayer.settled_batch()).collect();
    assert_eq!(again.iter().map(|batch| batch.id).collect::<Vec<_>>(), held, "oldest first");
    assert!(again.iter().all(|batch| batch.delivery == 2), "{again:?}");
}
