//! AddNewMsg and DelMsg by their bytes: outcomes, order, pipelining, limits.

use std::collections::BTreeMap;

use crate::support::frames::{self, ACKED, LATE, Request, UNKNOWN, WITHDRAWN};
use crate::support::process::assert_names;
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

#[test]
fn every_message_of_a_frame_has_its_outcome() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut connection = sidecar.connect();
    let mut subscriber = sidecar.connect().subscribed("default");
    let (_, rearmed) = connection.ask(&frames::add(&[1, 2, 1, 3, 4, 5, 6, 7, 8, 1], 1, 1)).added();
    let expected: Vec<bool> = (0..10).map(|index| matches!(index, 2 | 9)).collect();
    assert_eq!(rearmed, expected, "repeats within a frame apply in order");
    assert_eq!(connection.ask(&frames::withdraw(&[8, 9, 8])).outcomes(), [WITHDRAWN, UNKNOWN, UNKNOWN]);
    assert_eq!(connection.ask(&frames::del(&[2, 8, 2])).outcomes(), [ACKED, UNKNOWN, UNKNOWN]);
    let batch = subscriber.batch();
    assert_eq!((batch.ids(), batch.added, batch.acked), (vec![1, 3, 4, 5, 6, 7], 7, 1));
    assert_eq!(connection.ask(&frames::del(&[1, 2, 3, 1])).outcomes(), [LATE, UNKNOWN, LATE, LATE]);
    assert_eq!(connection.ask(&frames::withdraw(&[1])).outcomes(), [LATE]);

    let (_, rearmed) = connection.ask(&frames::add(&[1], 15, 1)).added();
    assert_eq!(rearmed, [false], "what timed out is not in flight, so it is added");
    assert_eq!(connection.ask(&frames::del(&[1, 1])).outcomes(), [ACKED, UNKNOWN], "and late no more");
}

#[test]
fn the_deadline_is_the_tick_of_the_batch_and_the_attempt_comes_back() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut connection = sidecar.connect();
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut expected = BTreeMap::new();
    for (id, (ticks, attempt)) in (0..).zip([(1, 1), (5, 2), (9, 255), (13, 0)]) {
        let (deadline, _) = connection.ask(&frames::add(&[id], ticks, attempt)).added();
        assert!(deadline >= sidecar.pointer(), "{deadline} is to come");
        expected.insert(id, (deadline, attempt));
    }
    let (deadline, rearmed) = connection.ask(&frames::add(&[1], 7, 3)).added();
    assert_eq!(rearmed, [true]);
    expected.insert(1, (deadline, 3));
    for _ in 0..expected.len() {
        let batch = subscriber.batch();
        let [(id, 0)] = batch.messages[..] else { panic!("one message a batch: {batch:?}") };
        assert_eq!(expected.remove(&id), Some((batch.tick, batch.attempts[0])), "{batch:?}");
    }
}

#[test]
fn a_message_is_the_pair_of_id_and_client() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut connection = sidecar.connect();
    let mut subscriber = sidecar.connect().subscribed("default");
    let pairs = [(0, 0), (0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX), (5, 6), (6, 5)];
    assert_eq!(connection.ask(&frames::add_pairs(&pairs, 5)).added().1, [false; 6]);
    assert_eq!(connection.ask(&frames::del(&[0, 5, 6])).outcomes(), [ACKED, UNKNOWN, UNKNOWN]);
    let mut batch = subscriber.batch();
    batch.messages.sort_unstable();
    let mut left = pairs[1..].to_vec();
    left.sort_unstable();
    assert_eq!((batch.messages, batch.added, batch.acked), (left, 6, 1));
}

#[test]
fn requests_in_one_write_are_all_answered_and_applied_in_their_order() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    let mut bytes = Vec::new();
    for id in 0..500_u32 {
        let message = u64::from(id);
        bytes.extend(frames::add(&[message], 0, 1).bytes(4 * id + 1_000));
        bytes.extend(frames::del(&[message]).bytes(4 * id + 1_001));
        bytes.extend(frames::ping(&id.to_be_bytes()).bytes(4 * id + 1_002));
        bytes.extend(frames::del(&[message]).bytes(4 * id + 1_003));
    }
    connection.send(&bytes);
    let mut answers = BTreeMap::new();
    for _ in 0..2_000 {
        let answer = connection.next_answer();
        assert!(answers.insert(answer.correlation, answer).is_none(), "one answer each");
    }
    for id in 0..500_u32 {
        let answer = |index: u32| &answers[&(4 * id + 1_000 + index)];
        assert_eq!(answer(0).added().1, [false]);
        assert_eq!(answer(1).outcomes(), [ACKED], "a DelMsg behind an AddNewMsg finds its messages");
        assert_eq!((answer(2).kind, &answer(2).body[..]), (frames::PONG, &id.to_be_bytes()[..]));
        assert_eq!(answer(3).outcomes(), [UNKNOWN]);
    }
}

#[test]
fn frames_split_byte_by_byte_are_put_together_again() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = Raw::tcp(sidecar.listen);
    let mut bytes = frames::hello((1, 1), b"").bytes(1);
    bytes.extend(frames::add_pairs(&[(1, 2), (3, 4)], 15).bytes(2));
    bytes.extend(frames::del(&[1]).bytes(3));
    bytes.extend(frames::ping(b"the end").bytes(4));
    for byte in bytes {
        connection.send(&[byte]);
    }
    assert_eq!(connection.answer(1).kind, frames::WELCOME);
    assert_eq!(connection.answer(2).added().1, [false, false]);
    assert_eq!(connection.answer(3).outcomes(), [UNKNOWN], "it was added with a client");
    assert_eq!(connection.answer(4).body, b"the end");
}

#[test]
fn a_frame_carries_up_to_32768_messages() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    let pairs: Vec<(u64, u64)> = (0..32_768).map(|id| (id, id + 1)).collect();
    assert_eq!(connection.ask(&frames::add_pairs(&pairs, 0)).added().1, vec![false; 32_768]);
    let more: Vec<u64> = (0..32_769).collect();
    for request in [frames::add(&more, 0, 1), frames::del(&more)] {
        let error = connection.ask(&request);
        error.assert_error(34, 0);
        assert_names(error.text(), &["32769", "1 to 32768"]);
    }
    assert_eq!(sidecar.metrics().count("messages_added_total"), 32_768, "no part of it was applied");
    assert_eq!(sidecar.metrics().refusals("bad_count"), 2);
}

#[test]
fn messages_in_flight_are_bounded_and_a_frame_is_taken_whole_or_not_at_all() {
    let sidecar = Sidecar::start(&["--max-in-flight", "10"]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2, 3, 4, 5, 6, 7, 8], 0, 1)).added();
    let error = connection.ask(&frames::add(&[11, 12, 13], 0, 1));
    error.assert_error(64, frames::RETRYABLE);
    assert_names(error.text(), &["the limit --max-in-flight is reached", "raise --max-in-flight"]);
    assert_eq!(connection.ask(&frames::del(&[11, 12, 13])).outcomes(), [UNKNOWN; 3], "not applied");
    connection.ask(&frames::add(&[9, 10], 0, 1)).added();
    connection.ask(&frames::add(&[11], 0, 1)).assert_error(64, frames::RETRYABLE);
    assert_eq!(connection.ask(&frames::add(&[9, 10, 9], 0, 2)).added().1, [true; 3], "a re-arm needs no room");
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [ACKED]);
    connection.ask(&frames::add(&[11], 0, 1)).added();
    let metrics = sidecar.metrics();
    assert_eq!((metrics.count("messages_in_flight"), metrics.count("max_in_flight")), (10, 10));
    assert_eq!((metrics.refusals("max_in_flight"), metrics.count("messages_added_total")), (2, 11));
    sidecar.log().line("max-in-flight reached: rejecting adds").expect("somebody has to make room");
}

#[test]
fn an_ack_over_another_connection_finds_its_message() {
    let sidecar = Sidecar::start(&[]);
    let (mut adder, mut acker) = (sidecar.connect(), sidecar.connect());
    for id in 0..50 {
        adder.ask(&frames::add(&[id], 0, 1)).added();
        assert_eq!(acker.ask(&frames::del(&[id])).outcomes(), [ACKED]);
    }
}

#[test]
fn answers_come_before_a_half_closed_connection_ends() {
    let sidecar = Sidecar::start(&[]);
    let stream = std::net::TcpStream::connect(sidecar.listen).unwrap();
    let mut connection = Raw::over_tcp(stream.try_clone().unwrap()).greet();
    let requests: Vec<Request> = (0..100).map(|id| frames::add(&[id], 0, 1)).collect();
    let ids: Vec<u32> = requests.iter().map(|request| connection.request(request)).collect();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    for id in ids {
        assert_eq!(connection.answer(id).added().1, [false]);
    }
    connection.assert_closed();
    wait_until("it is gone", || sidecar.metrics().connections() == 0);
}

#[test]
fn the_state_of_a_message_is_that_between_the_requests_around_it_and_any_token_may_ask() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "writes:0123456789abcdef-writes produce\nreads:0123456789abcdef-reads consume").unwrap();
    let sidecar = Sidecar::start(&["--token-file", path.to_str().unwrap()]);
    let admitted = |token: &str| {
        let mut connection = Raw::tcp(sidecar.listen);
        let welcome = connection.ask(&frames::hello((1, 1), token.as_bytes()));
        assert_eq!(welcome.kind, frames::WELCOME, "{welcome:?}");
        connection
    };
    let (mut writes, mut reads) = (admitted("0123456789abcdef-writes"), admitted("0123456789abcdef-reads"));
    let asked = [frames::add(&[1], 0, 5), frames::get(&[1, 2]), frames::del(&[1]), frames::get(&[1])];
    let asked: Vec<u32> = asked.iter().map(|request| writes.request(request)).collect();
    writes.answer(asked[0]).added();
    let states = writes.answer(asked[1]).states();
    let [(1, remaining_ms, 5), (0, 0, 0)] = states[..] else { panic!("{states:?}") };
    assert!((14_000..=16_000).contains(&remaining_ms), "{remaining_ms}");
    assert_eq!(writes.answer(asked[2]).outcomes(), [ACKED]);
    assert_eq!(writes.answer(asked[3]).states(), [(0, 0, 0)]);
    assert_eq!(reads.ask(&frames::get(&[1])).states(), [(0, 0, 0)]);
    reads.ask(&frames::get(&[])).assert_error(34, 0);
    assert_eq!(sidecar.metrics().count("frames_total{type=\"get_msg\"}"), 3);
}
