//! A fault within a frame is refused with its reason, and the connection goes on.

use std::collections::BTreeMap;

use crate::support::frames::{self, ACKED, Frame, Request, u32_at};
use crate::support::process::assert_names;
use crate::support::raw::Raw;
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;

/// A request, the code of its refusal, and words of its text.
type Wrong = (Request, u16, &'static [&'static str]);

/// Asserts that each is refused, that nothing was applied, and that the connection goes on.
fn assert_refused(sidecar: &Sidecar, connection: &mut Raw, wrong: Vec<Wrong>) {
    for (request, code, words) in wrong {
        let error = connection.ask(&request);
        assert_eq!((error.kind, error.status), (frames::ERROR, code), "{request:?} was answered with {error:?}");
        assert_eq!(error.flags & frames::OUTCOME_UNKNOWN, 0, "not applied: {error:?}");
        assert_names(error.text(), words);
        assert_eq!(connection.ask(&frames::ping(b"on")).body, b"on", "after {request:?}");
    }
    let metrics = sidecar.metrics();
    assert_eq!((metrics.count("messages_added_total"), metrics.connections()), (0, 1));
}

/// A request with one thing changed.
fn with(request: Request, change: impl FnOnce(&mut Request)) -> Request {
    let mut changed = request;
    change(&mut changed);
    changed
}

const MALFORMED: u16 = 33;

#[test]
fn malformed_requests_are_refused() {
    let sidecar = Sidecar::start(&[]);
    let add = || frames::add(&[1, 2], 0, 1);
    let del = || frames::del(&[1, 2]);
    let wrong: Vec<Wrong> = vec![
        (with(add(), |request| request.flags = 0x80), MALFORMED, &["add_new_msg", "0x80"]),
        (with(del(), |request| request.flags = 0x04), MALFORMED, &["del_msg", "0x04"]),
        (with(frames::ping(b""), |request| request.flags = 1), MALFORMED, &["ping"]),
        (with(add(), |request| request.status = 1), MALFORMED, &["status"]),
        (with(add(), |request| request.body[3] = 1), MALFORMED, &["reserved"]),
        (with(add(), |request| request.body.truncate(19)), MALFORMED, &["add_new_msg"]),
        (with(add(), |request| request.body.push(0)), MALFORMED, &["add_new_msg"]),
        (with(add(), |request| request.body.truncate(5)), MALFORMED, &["add_new_msg"]),
        (with(add(), |request| request.flags = frames::CLIENTS), MALFORMED, &["add_new_msg"]),
        (with(add(), |request| request.body.clear()), MALFORMED, &["add_new_msg"]),
        (with(del(), |request| request.body.truncate(19)), MALFORMED, &["del_msg"]),
        (with(del(), |request| request.body[3] = 3), MALFORMED, &["del_msg"]),
        (with(frames::group_delete("audit"), |request| request.body[0] = 4), MALFORMED, &["group_delete"]),
        (with(frames::group_delete("audit"), |request| request.body[5] = 0xff), MALFORMED, &["UTF-8"]),
        (with(frames::subscribe("default", 1, 0), |request| request.flags = 4), MALFORMED, &["subscribe"]),
        (Request::new(frames::BATCH_NACK, 0, vec![0; 27]), MALFORMED, &["batch_nack"]),
        (frames::add(&[], 0, 1), 34, &["add_new_msg", "0", "1 to 32768"]),
        (frames::del(&[]), 34, &["del_msg", "0"]),
    ];
    let number = wrong.len() as u64;
    assert_refused(&sidecar, &mut sidecar.connect(), wrong);
    let metrics = sidecar.metrics();
    assert_eq!(metrics.refusals("malformed_request") + metrics.refusals("bad_count"), number);
}

#[test]
fn requests_out_of_their_limits_are_refused() {
    let sidecar = Sidecar::start(&["--slots", "20"]);
    let long_name = "g".repeat(65);
    let wrong: Vec<Wrong> = vec![
        (frames::add(&[1], 21, 1), 35, &["21 ticks", "1 to 20"]),
        (frames::add(&[1], u16::MAX, 1), 35, &["65535"]),
        (frames::subscribe("default", 0, 0), 42, &["credit of 0"]),
        (frames::subscribe("default", u32::MAX, 0), 42, &["4294967295"]),
        (frames::subscribe("", 1, 0), 36, &["ephemeral"]),
        (frames::subscribe("a b", 1, 0), 36, &["a b"]),
        (frames::subscribe("größe", 1, 0), 36, &["größe"]),
        (frames::subscribe(&long_name, 1, 0), 36, &["64"]),
        (frames::group_delete(""), 36, &[]),
        (frames::group_delete("a/b"), 36, &["a/b"]),
        (frames::group_delete("nobody"), 38, &["no group nobody"]),
        (frames::group_delete("default"), 36, &["default"]),
        (frames::batch_ack(&[[0; 24]]), 41, &["Subscribe"]),
        (frames::batch_nack([0; 24], 5), 41, &["Subscribe"]),
    ];
    assert_refused(&sidecar, &mut sidecar.connect(), wrong);
    assert_eq!(sidecar.status().groups.len(), 1, "no group was made");
    let most = frames::batch_ack(&vec![[0; 24]; 4_096]);
    let more = frames::batch_ack(&vec![[0; 24]; 4_097]);
    let mut subscriber = sidecar.connect().subscribed("default");
    assert_eq!(subscriber.ask(&most).kind, frames::BATCH_ACK_ANSWER);
    subscriber.ask(&more).assert_error(34, 0);
    subscriber.ask(&frames::batch_ack(&[])).assert_error(34, 0);
}

#[test]
fn types_that_nobody_knows_and_those_of_servers_are_refused() {
    let sidecar = Sidecar::start(&[]);
    let mut wrong: Vec<Wrong> = Vec::new();
    for kind in [0x00, 0x04, 0x13, 0x25, 0x7f, 0x80, 0xa5, 0xfe] {
        wrong.push((Request::new(kind, 0, vec![1, 2, 3]), 32, &["type"]));
        wrong.push((Request::new(kind, 0xff, Vec::new()), 32, &["type"]));
    }
    let unknown = wrong.len() as u64;
    let of_servers = [frames::WELCOME, frames::ADD_ANSWER, frames::DEL_ANSWER, frames::SUBSCRIBED];
    let more = [frames::TIMEOUT_BATCH, frames::BATCH_ACK_ANSWER, frames::BATCH_NACK_ANSWER, frames::ERROR];
    for kind in of_servers.into_iter().chain(more).chain([frames::GROUP_DELETE_ANSWER]) {
        wrong.push((Request::new(kind, 0, vec![0; 12]), MALFORMED, &[]));
    }
    wrong.push((Request::new(frames::GROUP_DELETE_ANSWER, 0, Vec::new()), MALFORMED, &["group_delete_answer"]));
    assert_refused(&sidecar, &mut sidecar.connect(), wrong);
    assert_eq!(sidecar.metrics().refusals("unknown_type"), unknown);
}

#[test]
fn a_second_subscription_is_refused_and_the_first_goes_on() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    for group in ["default", "audit"] {
        subscriber.ask(&frames::subscribe(group, 1, 0)).assert_error(40, 0);
    }
    assert!(sidecar.group("audit").is_none(), "not applied");
    sidecar.connect().ask(&frames::add(&[1], 1, 1)).added();
    assert_eq!(subscriber.settled_batch().ids(), [1]);

    let mut eager = sidecar.connect();
    let first = eager.request(&frames::subscribe("audit", 1, 0));
    let second = eager.request(&frames::subscribe("audit", 1, 0));
    let mut answers = [eager.next_answer(), eager.next_answer()];
    answers.sort_by_key(|answer| answer.correlation);
    assert_eq!((answers[0].correlation, answers[0].kind), (first, frames::SUBSCRIBED));
    assert_eq!(answers[1].correlation, second);
    answers[1].assert_error(40, 0);
}

#[test]
fn a_broken_frame_ends_the_connection_as_soon_as_its_length_is_there() {
    let sidecar = Sidecar::start(&[]);
    let mut stranger = Raw::tcp(sidecar.listen);
    stranger.send(&[0, 0, 0x10, 1]);
    let error = stranger.receive().expect("an Error");
    error.assert_error(2, 0);
    assert_names(error.text(), &["4097", "4096"]);
    stranger.assert_closed();
    for (bytes, code, words) in [
        (&[0, 0, 0, 7][..], 1, &["7", "8"][..]),
        (&[0, 0, 0, 0], 1, &["0"]),
        (&[0, 0x10, 0, 1], 2, &["1048577", "limit"]),
        (&[0xff; 4], 2, &["4294967295"]),
        (b"GET ", 2, &["HTTP"]),
    ] {
        for connection in [&mut Raw::tcp(sidecar.listen), &mut sidecar.connect()] {
            connection.send(bytes);
            let error = connection.receive().expect("an Error");
            error.assert_error(code, 0);
            assert_eq!(error.correlation, 0);
            assert_names(error.text(), words);
            connection.assert_closed();
        }
    }
    let metrics = sidecar.metrics();
    assert_eq!((metrics.refusals("malformed_frame"), metrics.refusals("frame_too_large")), (4, 7));
}

#[test]
fn requests_before_a_broken_frame_are_answered_first() {
    let redis = Redis::start();
    for sidecar in [Sidecar::start(&[]), Sidecar::on(&redis, "only", &[])] {
        for round in 0..20 {
            let mut connection = sidecar.connect();
            let requests =
                [frames::add(&[round], 15, 1).bytes(7), frames::del(&[round]).bytes(8), vec![0, 0, 0, 7]];
            connection.send(&requests.concat());
            let mut answers = [connection.next_answer(), connection.next_answer()];
            answers.sort_by_key(|answer| answer.correlation);
            assert_eq!(answers[1].outcomes(), [ACKED]);
            let [added, _] = answers;
            added.added();
            connection.next_answer().assert_error(1, 0);
            connection.assert_closed();
        }
    }
}

/// Numbers that look random and are the same in every run.
pub fn random_numbers(seed: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(seed), |state| {
        let mut next = *state;
        next ^= next << 13;
        next ^= next >> 7;
        next ^= next << 17;
        Some(next)
    })
    .map(|state| state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 8)
}

#[test]
fn every_frame_of_random_content_is_answered_exactly_once() {
    let sidecar = Sidecar::start(&[]);
    let mut connection = sidecar.connect();
    let mut numbers = random_numbers(7);
    let mut number = |below: u64| numbers.next().unwrap() % below;
    let kinds = [0x00, 0x02, 0x10, 0x11, 0x20, 0x22, 0x23, 0x24, 0x90, 0x21, 0xff, 0x33, 0x7f];
    let (mut bytes, mut asked) = (Vec::new(), 0);
    for correlation in 1_000..4_000_u32 {
        let kind = kinds[usize::try_from(number(13)).unwrap()];
        let flags = if number(2) == 0 { 0 } else { u8::try_from(number(256)).unwrap() };
        let length = number(80);
        // Small numbers where counts and lengths are, so that some requests are nearly right.
        let body =
            (0..length).map(|_| u8::try_from(if number(3) == 0 { number(256) } else { number(2) }).unwrap());
        bytes.extend(Request::new(kind, flags, body.collect()).bytes(correlation));
        asked += 1;
    }
    connection.send(&bytes);
    let mut answers: BTreeMap<u32, Frame> = BTreeMap::new();
    while answers.len() < asked {
        let answer = connection.next_answer();
        assert!((1_000..4_000).contains(&answer.correlation), "{answer:?}");
        assert!(answers.insert(answer.correlation, answer).is_none(), "answered twice");
    }
    assert_eq!(connection.ask(&frames::ping(b"on")).body, b"on");
    let errors = answers.values().filter(|answer| answer.kind == frames::ERROR).count();
    assert!(errors > 2_000 && errors < asked, "{errors} errors of {asked}");
    let add = frames::add(&[u64::MAX], 0, 1);
    assert_eq!(u32_at(&connection.ask(&add).body, 8), 1, "and it serves");
}
