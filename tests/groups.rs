//! Groups and credit: where a group begins, and how much a subscriber holds.

use std::thread;
use std::time::Duration;

use crate::support::frames::{self, EPHEMERAL, FROM_END, Request, u32_at};
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

fn wait_for_batches(sidecar: &Sidecar, group: &str, count: u64) {
    wait_until("the batches are published", || {
        sidecar.group(group).is_some_and(|group| group.outbox_batches == count)
    });
}

#[test]
fn nothing_is_lost_before_the_first_subscriber_comes() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    wait_for_batches(&sidecar, "default", 1);
    let mut first = sidecar.connect().subscribed("default");
    let batch = first.settled_batch();
    assert_eq!((batch.ids(), batch.delivery), (vec![1], 1));
}

#[test]
fn a_new_group_begins_at_the_outboxs_beginning_or_at_its_end_if_asked() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut adder = sidecar.connect();
    adder.ask(&frames::add(&[1], 1, 1)).added();
    wait_for_batches(&sidecar, "default", 1);
    let mut beginning = sidecar.connect();
    let answer = beginning.ask(&frames::subscribe("beginning", 10, 0));
    assert_eq!((answer.kind, answer.flags), (frames::SUBSCRIBED, 1), "CREATED: {answer:?}");
    assert_eq!(answer.body, b"\x09beginning");
    let mut end = sidecar.connect().subscribed_with(&frames::subscribe("end", 10, FROM_END));
    let mut ephemeral = sidecar.connect();
    let answer = ephemeral.ask(&frames::subscribe("", 10, EPHEMERAL));
    assert_eq!((answer.kind, answer.flags), (frames::SUBSCRIBED, 1), "{answer:?}");
    let made_up = str::from_utf8(&answer.body[1..]).unwrap().to_owned();
    assert!(sidecar.group(&made_up).is_some(), "{made_up:?} is the name of its group");

    adder.ask(&frames::add(&[2], 1, 1)).added();
    assert_eq!([beginning.batch().ids(), beginning.batch().ids()], [[1], [2]]);
    assert_eq!([end.batch().ids(), ephemeral.batch().ids()], [[2], [2]]);

    let mut joined = sidecar.connect();
    let answer = joined.ask(&frames::subscribe("end", 10, 0));
    assert_eq!((answer.kind, answer.flags), (frames::SUBSCRIBED, 0), "it is there already: {answer:?}");
    let other = sidecar.connect().subscribed_with(&frames::subscribe("", 10, EPHEMERAL));
    let metrics = sidecar.metrics();
    assert_eq!(metrics.count("subscribers{group=\"(ephemeral)\"}"), 2, "no series for each");
    assert_eq!(metrics.count("outbox_batches{group=\"(ephemeral)\"}"), 1);
    assert_eq!(metrics.find(&format!("ackwheel_subscribers{{group=\"{made_up}\"}}")), None);
    drop((ephemeral, other));
    wait_until("an ephemeral group goes with its last member", || sidecar.group(&made_up).is_none());
    let log =
        sidecar.log().line("the last subscriber of this group here has left").expect("who looks for it finds it");
    assert!(log.contains("group=ephemeral-"), "{log}");
}

#[test]
fn a_group_keeps_its_place_while_nobody_subscribes() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut adder = sidecar.connect();
    let mut audit = sidecar.connect().subscribed("audit");
    adder.ask(&frames::add(&[1], 1, 1)).added();
    assert_eq!(audit.settled_batch().ids(), [1]);
    drop(audit);
    wait_until("it has gone", || sidecar.subscribers() == 0);
    adder.ask(&frames::add(&[2], 1, 1)).added();
    wait_for_batches(&sidecar, "audit", 1);
    assert_eq!(sidecar.connect().subscribed("audit").batch().ids(), [2], "and not 1 again");
}

/// Whatever was on its way to this connection has come after a few requests that its group answers.
fn batches_after_some_round_trips(connection: &mut Raw) -> usize {
    for _ in 0..3 {
        assert_eq!(connection.ask(&frames::batch_ack(&[[0; 24]])).kind, frames::BATCH_ACK_ANSWER);
    }
    connection.batches_so_far().len()
}

/// Adds six messages for each of the next five ticks: as many batches.
fn add_six_a_tick(sidecar: &Sidecar) {
    let mut adder = sidecar.connect();
    for tick in 1..=5_u16 {
        let ids: Vec<u64> = (0..6).map(|index| u64::from(tick) * 10 + index).collect();
        adder.ask(&frames::add(&ids, tick, 1)).added();
    }
}

#[test]
fn credit_is_a_window_that_acknowledgements_reopen() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut bounded = sidecar.connect().subscribed_with(&frames::subscribe("default", 10, 0));
    let mut all = sidecar.connect().subscribed("audit");
    add_six_a_tick(&sidecar);
    let ids: Vec<_> = (0..5).map(|_| all.batch().id).collect();
    let (first, second) = (bounded.batch(), bounded.batch());
    assert_eq!([first.id, second.id], ids[..2], "6 of 10 leave room for another batch");
    assert_eq!(batches_after_some_round_trips(&mut bounded), 0, "12 of 10 do not");
    let group = sidecar.group("default").unwrap();
    assert_eq!((group.outbox_batches, group.unacked_batches), (5, 2));

    bounded.ask(&frames::batch_ack(&[first.id]));
    let third = bounded.batch();
    assert_eq!(third.id, ids[2], "6 of 10 leave room again");
    assert_eq!(batches_after_some_round_trips(&mut bounded), 0);
    bounded.ask(&frames::batch_ack(&[second.id, third.id]));
    assert_eq!([bounded.batch().id, bounded.batch().id], ids[3..]);
}

#[test]
fn credit_bounds_redelivered_batches_too() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut holder = sidecar.connect().subscribed("default");
    add_six_a_tick(&sidecar);
    let ids: Vec<_> = (0..5).map(|_| holder.batch().id).collect();
    let mut bounded = sidecar.connect().subscribed_with(&frames::subscribe("default", 10, 0));
    drop(holder);
    let again = [bounded.batch(), bounded.batch()];
    assert_eq!(again.each_ref().map(|batch| (batch.id, batch.delivery)), [(ids[0], 2), (ids[1], 2)]);
    assert_eq!(batches_after_some_round_trips(&mut bounded), 0, "12 of 10 leave no room");
    bounded.ask(&frames::batch_ack(&[ids[0]]));
    assert_eq!(bounded.batch().id, ids[2], "6 of 10 leave room again");
    assert_eq!(batches_after_some_round_trips(&mut bounded), 0);
}

#[test]
fn credit_is_overshot_by_at_most_one_batch_and_large_ticks_are_cut() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--storm-min", "100000"]);
    let mut stingy = sidecar.connect().subscribed_with(&frames::subscribe("default", 1, 0));
    let ids: Vec<u64> = (1..=9_000).collect();
    sidecar.connect().ask(&frames::add(&ids, 1, 1)).added();
    let mut seen = Vec::new();
    for (seq, (size, last)) in [(4_096, false), (4_096, false), (808, true)].into_iter().enumerate() {
        let batch = stingy.batch();
        assert_eq!((batch.messages.len(), batch.last, batch.storm), (size, last, false));
        assert_eq!((u32_at(&batch.id, 4) as usize, batch.added, batch.acked), (seq, 9_000, 0));
        assert_eq!(batches_after_some_round_trips(&mut stingy), 0, "one at a time");
        seen.extend(batch.ids());
        stingy.ask(&frames::batch_ack(&[batch.id]));
    }
    seen.sort_unstable();
    assert_eq!(seen, ids, "each message is in exactly one batch");
}

#[test]
fn a_tick_in_which_nearly_everything_timed_out_is_flagged_as_a_storm() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--storm-min", "10", "--storm-share", "0.6"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut adder = sidecar.connect();
    let first_of_batch = [1_u64, 101, 201];
    // Timed out and acknowledged: enough and a large share; a small share; not enough.
    for (tick, (first, (timed_out, acked))) in
        (4..).zip(first_of_batch.into_iter().zip([(12, 8), (12, 9), (9, 0)]))
    {
        let ids: Vec<u64> = (first..first + timed_out + acked).collect();
        adder.ask(&frames::add(&ids, tick * 2, 1)).added();
        let acks = usize::try_from(acked).unwrap();
        if acks > 0 {
            assert_eq!(adder.ask(&frames::del(&ids[..acks])).outcomes(), vec![frames::ACKED; acks]);
        }
    }
    for (storm, counts) in [(true, (20, 8)), (false, (21, 9)), (false, (9, 0))] {
        let batch = subscriber.settled_batch();
        assert_eq!((batch.storm, (batch.added, batch.acked)), (storm, counts), "{batch:?}");
    }
    assert_eq!(sidecar.metrics().count("storm_ticks_total"), 1);
    assert!(sidecar.log().line("storm:").is_some(), "a person is told");
}

#[test]
fn batches_that_a_member_cannot_take_any_more_go_to_others_at_once() {
    const COUNT: u64 = 10;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let sidecar = Sidecar::start(&["--tick", "100ms", "--slots", "150", "--socket", socket.to_str().unwrap()]);
    let mut deaf = Raw::unix(&socket).greet().subscribed("logic");
    let mut healthy = sidecar.connect().subscribed("logic");
    deaf.close_ears();
    // It is not silent: it ends with the sidecar.
    let sign_of_life = Request::new(frames::PONG, 0, Vec::new()).bytes(0);
    thread::spawn(move || {
        while deaf.try_send(&sign_of_life).is_ok() {
            thread::sleep(Duration::from_millis(500));
        }
    });
    for id in 0..COUNT {
        let ticks = u16::try_from(id).unwrap() + 1;
        sidecar.connect().ask(&frames::add(&[id], ticks, 1)).added();
    }
    let mut ids: Vec<u64> = (0..COUNT).map(|_| healthy.settled_batch().ids()[0]).collect();
    ids.sort_unstable();
    assert!(ids.into_iter().eq(0..COUNT));
    assert_eq!(sidecar.group("logic").unwrap().subscribers, 1);
}

#[test]
fn there_are_at_most_64_groups() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let subscribe = |name: &str| sidecar.connect().ask(&frames::subscribe(name, 1, 0));
    for number in 1..64 {
        assert_eq!(subscribe(&format!("group-{number}")).kind, frames::SUBSCRIBED);
    }
    subscribe("one-more").assert_error(37, frames::RETRYABLE);
    assert_eq!(subscribe("group-5").kind, frames::SUBSCRIBED, "those that are there may be joined");
    wait_until("nobody uses it", || sidecar.group("group-5").is_some_and(|group| group.subscribers == 0));
    assert_eq!(sidecar.connect().ask(&frames::group_delete("group-5")).kind, frames::GROUP_DELETE_ANSWER);
    assert_eq!(subscribe("one-more").kind, frames::SUBSCRIBED);
    assert_eq!(sidecar.metrics().refusals("too_many_groups"), 1);
}

#[test]
fn batches_dropped_from_a_full_outbox_are_counted_and_logged() {
    let sidecar = Sidecar::start(&["--tick", "100ms", "--outbox-max-ids", "10"]);
    let mut adder = sidecar.connect();
    for tick in 1..=3_u16 {
        let ids: Vec<u64> = (0..5).map(|index| u64::from(tick) * 10 + index).collect();
        adder.ask(&frames::add(&ids, tick, 1)).added();
    }
    wait_until("it is counted", || sidecar.metrics().count("outbox_dropped_ids_total") == 5);
    assert!(sidecar.log().line("the outbox is full").is_some_and(|line| line.contains("messages=5")));
    let mut subscriber = sidecar.connect().subscribed("default");
    assert_eq!(subscriber.batch().ids(), [20, 21, 22, 23, 24], "the oldest fell out");
}
