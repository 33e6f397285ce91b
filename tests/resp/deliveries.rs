//! AW.TAKE, AW.ACK, AW.NACK and KEEP.

use std::io::Read;
use std::time::{Duration, Instant};

use super::memory::charged;
use crate::support::resp::{Reply, Resp, Taken, line, start};
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// Flags with which messages time out after a tenth of a second.
pub const FAST: [&str; 4] = ["--tick", "100ms", "--slots", "5"];

/// Takes batches until there is one.
#[track_caller]
pub fn take(client: &mut Resp, options: &str) -> Taken {
    let taken = client.ask(&format!("AW.TAKE default BLOCK 10000{options}")).batches();
    let [batch] = &taken[..] else { panic!("not one batch: {taken:?}") };
    batch.clone()
}

#[test]
fn a_batch_is_taken_and_settled_over_another_connection() {
    let sidecar = start(&FAST);
    let (mut takes, mut acks) = (Resp::to(&sidecar), Resp::to(&sidecar));
    assert_eq!(takes.ask("AW.TAKE default"), Reply::Array(Vec::new()), "nothing is there");
    let began = Instant::now();
    assert_eq!(takes.ask("AW.TAKE default BLOCK 200"), Reply::Array(Vec::new()));
    assert!(began.elapsed() >= Duration::from_millis(200));
    acks.ask("AW.ADD TIMEOUT 1 ATTEMPT 3 101:7 102 18446744073709551615:1");
    acks.ask("AW.DEL 102");
    let batch = take(&mut takes, "");
    let mut messages = batch.messages.clone();
    messages.sort_unstable();
    assert_eq!(messages, ["101:7", "18446744073709551615:1"]);
    assert_eq!((batch.delivery, &batch.attempts[..], batch.added, batch.acked), (1, &[3, 3][..], 3, 1));
    assert_eq!(batch.flags, "last");
    assert!(batch.age_ms < 10_000, "{batch:?}");
    assert_eq!(acks.ask("AW.DEL 101:7").texts(), ["late"]);
    let ack = format!("AW.ACK default {0} {0}", batch.batch);
    assert_eq!(acks.ask(&ack), Reply::Integer(1), "a batch is settled once");
    assert_eq!(acks.ask(&ack), Reply::Integer(0));
    sidecar.wait_for_settled("default");
    assert_eq!(takes.ask("AW.TAKE default"), Reply::Array(Vec::new()));
}

#[test]
fn count_limits_the_batches_and_a_batch_that_is_held_is_not_taken_again() {
    let sidecar = start(&FAST);
    let mut client = Resp::to(&sidecar);
    for id in 0..4 {
        client.ask(&format!("AW.ADD TIMEOUT {} {id}", id + 1));
    }
    wait_until("all are in batches", || sidecar.group("default").is_some_and(|group| group.outbox_batches == 4));
    let first = client.ask("AW.TAKE default COUNT 3").batches();
    let second = client.ask("AW.TAKE default COUNT 16").batches();
    let messages = |taken: &[Taken]| taken.iter().map(|batch| batch.messages[0].clone()).collect::<Vec<_>>();
    assert_eq!(
        (messages(&first), messages(&second)),
        (vec!["0".into(), "1".into(), "2".into()], vec!["3".into()])
    );
    assert_eq!(client.ask("AW.TAKE default COUNT 16"), Reply::Array(Vec::new()));
    let all: Vec<&str> = first.iter().chain(&second).map(|batch| &*batch.batch).collect();
    assert_eq!(client.ask(&format!("AW.ACK default {}", all.join(" "))), Reply::Integer(4));
}

#[test]
fn batches_of_a_connection_that_ended_go_to_another_at_once() {
    let sidecar = start(&FAST);
    let (mut dies, mut waits) = (Resp::to(&sidecar), Resp::to(&sidecar));
    dies.ask("AW.ADD TIMEOUT 1 1");
    let batch = take(&mut dies, "");
    waits.send(&line("AW.TAKE default BLOCK 10000"));
    assert!(waits.is_silent_for(Duration::from_millis(300)), "the first connection holds the batch");
    drop(dies);
    let again = waits.receive().batches();
    assert_eq!((&again[0].batch, again[0].delivery), (&batch.batch, 2));
}

#[test]
fn a_nack_returns_what_any_connection_holds() {
    let sidecar = start(&FAST);
    let (mut takes, mut other) = (Resp::to(&sidecar), Resp::to(&sidecar));
    takes.ask("AW.ADD TIMEOUT 1 1");
    let batch = take(&mut takes, "");
    assert_eq!(other.ask(&format!("AW.NACK default 0 {} 0-1-2-3", batch.batch)), Reply::Integer(1));
    assert_eq!(
        other.ask(&format!("AW.NACK default 0 {}", batch.batch)),
        Reply::Integer(0),
        "it went back already"
    );
    assert_eq!(other.ask(&format!("AW.NACK nobody 0 {}", batch.batch)), Reply::Integer(0));
    let again = take(&mut takes, "");
    assert_eq!((again.batch, again.delivery), (batch.batch, 2));
}

#[test]
fn a_kept_batch_outlives_its_connection_until_it_is_settled_returned_or_overdue() {
    let sidecar = start(&[&FAST[..], &["--redeliver-after", "3s"]].concat());
    let mut client = Resp::to(&sidecar);
    client.ask("AW.ADD TIMEOUT 1 1");
    client.ask("AW.ADD TIMEOUT 3 2");
    client.ask("AW.ADD TIMEOUT 5 3");
    let keep = || {
        // As `redis-cli` or PHP do: a connection for each command.
        let mut one_shot = Resp::to(&sidecar);
        take(&mut one_shot, " KEEP")
    };
    let kept = [keep(), keep(), keep()];
    let taken_at = Instant::now();
    assert_eq!(client.ask("AW.TAKE default BLOCK 500"), Reply::Array(Vec::new()), "no connection gets them");
    assert_eq!(client.ask(&format!("AW.ACK default {}", kept[0].batch)), Reply::Integer(1));
    assert_eq!(client.ask(&format!("AW.NACK default 0 {}", kept[1].batch)), Reply::Integer(1));
    let returned = take(&mut client, "");
    assert_eq!((&returned.batch, returned.delivery), (&kept[1].batch, 2));
    let overdue = take(&mut client, "");
    assert_eq!((&overdue.batch, overdue.delivery), (&kept[2].batch, 2));
    assert!(taken_at.elapsed() >= Duration::from_millis(2_500), "{:?}", taken_at.elapsed());
}

#[test]
fn batches_are_kept_whatever_follows_in_the_pipeline() {
    let sidecar = start(&["--tick", "100ms", "--slots", "600"]);
    let mut other = Resp::to(&sidecar);
    for (number, (option, behind)) in [
        ("", vec!["AW.TAKE default KEEP"]),
        ("", vec!["AW.TAKE default BLOCK 0 KEEP", "PING"]),
        (" BLOCK 0", vec!["AW.TAKE default KEEP", "AW.TAKE default COUNT 3 KEEP"]),
        ("", vec!["RESET"]),
        ("", vec!["RESET", "AW.TAKE default"]),
        ("", vec!["AW.DEL 5"]),
        ("", vec!["AW.GET 5", "AW.STATUS", "AW.ADD 6", "QUIT"]),
        ("", vec!["AW.ACK default 0-1-2-3", "AW.NACK default 0 0-1-2-3", "RESET"]),
    ]
    .into_iter()
    .enumerate()
    {
        let takes = 1 + behind
            .iter()
            .filter(|command| command.starts_with("AW.TAKE") && command.ends_with("KEEP"))
            .count();
        let count = i64::try_from(takes).unwrap();
        for id in 0..takes {
            other.ask(&format!("AW.ADD TIMEOUT {} {}", id + 1, number * 10 + id));
        }
        wait_until("all are in batches", || {
            sidecar.group("default").is_some_and(|group| group.outbox_batches == takes as u64)
        });
        let mut one_shot = Resp::to(&sidecar);
        let mut pipeline = line(&format!("AW.TAKE default{option} KEEP"));
        for command in &behind {
            pipeline.extend(line(command));
        }
        one_shot.send(&pipeline);
        let mut kept: Vec<String> = Vec::new();
        for command in std::iter::once("AW.TAKE KEEP").chain(behind.iter().copied()) {
            let reply = one_shot.receive();
            if command.ends_with("KEEP") {
                kept.extend(reply.batches().into_iter().map(|batch| batch.batch));
            }
        }
        assert_eq!(kept.len(), takes, "{behind:?}");
        drop(one_shot);
        wait_until("its connection has ended", || sidecar.status().listeners[2].connections == 1);
        assert_eq!(other.ask("AW.TAKE default COUNT 16"), Reply::Array(Vec::new()), "none went back: {behind:?}");
        let kept = kept.join(" ");
        assert_eq!(other.ask(&format!("AW.NACK default 0 {kept}")), Reply::Integer(count), "{behind:?}");
        assert_eq!(other.ask("AW.TAKE default COUNT 16").batches().len(), takes);
        assert_eq!(other.ask(&format!("AW.ACK default {kept}")), Reply::Integer(count));
        sidecar.wait_for_settled("default");
    }
}

/// Flags with which half of the queue of replies is far more than the sockets hold.
const LONG_QUEUE: [&str; 6] = ["--tick", "100ms", "--slots", "600", "--max-queued-bytes", "67108864"];

/// Returns a connection whose replies to these commands wait behind others that the sockets do not take.
fn stuck(sidecar: &Sidecar, commands: &[&str]) -> Resp {
    let mut stuck = Resp::to(sidecar);
    // The memory of the queue doubles when it is full. Commands about batches begin below half of 64 MiB.
    while charged(sidecar) < 24_000_000 {
        stuck.send(&b"COMMAND DOCS\r\n".repeat(200));
    }
    let held = sidecar.group("default").map_or(0, |group| group.unacked_batches);
    for command in commands {
        stuck.send(&line(command));
    }
    wait_until("a batch is taken", || sidecar.group("default").is_some_and(|group| group.unacked_batches > held));
    stuck
}

/// Adds messages that time out in a batch each.
fn add_batches(sidecar: &Sidecar, client: &mut Resp, batches: u64) {
    for id in 0..batches {
        client.ask(&format!("AW.ADD TIMEOUT {} {id}", id + 1));
    }
    wait_until("all are in batches", || {
        sidecar.group("default").is_some_and(|group| group.outbox_batches == batches)
    });
}

#[test]
fn a_batch_whose_reply_was_not_written_is_not_kept() {
    let sidecar = start(&LONG_QUEUE);
    let mut other = Resp::to(&sidecar);
    add_batches(&sidecar, &mut other, 1);
    let mut unread = stuck(&sidecar, &["AW.TAKE default KEEP"]);
    // The sidecar writes something, but nothing of the last reply.
    let sent = || sidecar.metrics().find("ackwheel_sent_bytes_total{listener=\"resp\"}");
    let before = sent();
    while sent() == before {
        unread.stream.read_exact(&mut vec![0; 50_000]).unwrap();
    }
    drop(unread);
    assert_eq!(take(&mut other, "").delivery, 2);
}

#[test]
fn batches_are_kept_one_after_another_however_long_their_replies_wait() {
    let sidecar = start(&LONG_QUEUE);
    let mut other = Resp::to(&sidecar);
    add_batches(&sidecar, &mut other, 2);
    let mut slow = stuck(&sidecar, &["AW.TAKE default KEEP", "AW.TAKE default KEEP", "PING"]);
    let mut kept = Vec::new();
    loop {
        match slow.receive() {
            Reply::Simple(_) => break,
            Reply::Array(replies) if replies.first().is_some_and(|reply| matches!(reply, Reply::Array(_))) => {
                kept.push(replies[0].array()[0].text().to_owned());
            }
            _ => {}
        }
    }
    drop(slow);
    wait_until("its connection has ended", || sidecar.status().listeners[2].connections == 1);
    assert_eq!(other.ask("AW.TAKE default COUNT 16"), Reply::Array(Vec::new()), "none went back");
    assert_eq!(other.ask(&format!("AW.ACK default {}", kept.join(" "))), Reply::Integer(2));
}

#[test]
fn a_kept_batch_is_overdue_although_its_group_has_no_member() {
    let sidecar = start(&[&FAST[..], &["--redeliver-after", "1s"]].concat());
    Resp::to(&sidecar).ask("AW.ADD TIMEOUT 1 1");
    let kept = take(&mut Resp::to(&sidecar), " KEEP");
    wait_until("its connection has ended", || sidecar.status().listeners[2].connections == 0);
    wait_until("the batch waits again", || {
        sidecar.group("default").is_some_and(|group| group.unacked_batches == 0)
    });
    let again = take(&mut Resp::to(&sidecar), "");
    assert_eq!((again.batch, again.delivery), (kept.batch, 2));
}

#[test]
fn a_connection_takes_from_several_groups_and_reset_leaves_them() {
    let sidecar = start(&FAST);
    let (mut client, mut other) = (Resp::to(&sidecar), Resp::to(&sidecar));
    client.ask("AW.TAKE audit");
    client.ask("AW.ADD TIMEOUT 1 1");
    let default = take(&mut client, "");
    let audit = client.ask("AW.TAKE audit BLOCK 5000").batches();
    assert_eq!(default.batch, audit[0].batch);
    assert_eq!(sidecar.group("audit").unwrap().subscribers, 1);
    assert_eq!(client.ask("RESET").text(), "RESET");
    assert_eq!(take(&mut other, "").delivery, 2, "the batch went back at once");
}

#[test]
fn a_group_is_deleted_although_connections_took_from_it_a_moment_ago() {
    let sidecar = start(&FAST);
    Resp::to(&sidecar).ask("AW.TAKE audit");
    wait_until("its connection has ended", || sidecar.status().listeners[2].connections == 0);
    assert_eq!(sidecar.group("audit").unwrap().subscribers, 1, "the group counts as attended for a while");
    let began = Instant::now();
    assert_eq!(sidecar.run(&["group", "delete", "audit"]).code, 0);
    assert!(began.elapsed() < Duration::from_secs(5), "it took {:?}", began.elapsed());
    let mut client = Resp::to(&sidecar);
    client.ask("AW.ACK audit 0-1-2-3").assert_error("UNKNOWN_GROUP not applied: ");
    assert_eq!(client.ask("AW.TAKE audit"), Reply::Array(Vec::new()), "it is made again");
}
