use std::time::Duration;

use super::super::BenchOptions;
use super::*;
use crate::core::{AddNewMsgAnswer, AddOutcome, DelOutcome, Tick};
use crate::protocol::Decoded;
use crate::protocol::frame::{Body, Frame};

/// A server in memory that answers every request correctly and in order.
#[derive(Default)]
struct Server {
    in_flight: std::collections::BTreeSet<u64>,
    most_in_flight: usize,
    /// The type and the messages of each request. A Ping has no messages.
    asked: Vec<(FrameKind, Vec<u64>)>,
}

const MS: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameKind {
    Add,
    Del,
    Ping,
}

fn ids(messages: &[Message]) -> Vec<u64> {
    messages.iter().map(|message| message.msg_id.0).collect()
}

fn frames(bytes: &[u8]) -> Vec<Frame> {
    let mut bytes = BytesMut::from(bytes);
    let frames = std::iter::from_fn(|| Codec::default().decode(&mut bytes).expect("no broken frame"));
    frames
        .map(|decoded| match decoded {
            Decoded::Frame(frame) => frame,
            Decoded::Refused { refusal, .. } => panic!("{refusal}"),
        })
        .collect()
}

fn bytes(frame: &Frame) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    Codec::default().encode_frame(frame, &mut bytes);
    bytes.to_vec()
}

impl Server {
    fn answer(&mut self, requests: &[u8]) -> Vec<u8> {
        frames(requests).into_iter().flat_map(|frame| bytes(&self.answer_one(frame))).collect()
    }

    fn answer_one(&mut self, Frame { correlation, body }: Frame) -> Frame {
        let body = match body {
            Body::AddNewMsg { messages, .. } => {
                let ids = ids(&messages);
                let outcomes = ids
                    .iter()
                    .map(|id| if self.in_flight.insert(*id) { AddOutcome::Added } else { AddOutcome::Rearmed });
                let outcomes = outcomes.collect();
                self.asked.push((FrameKind::Add, ids));
                self.most_in_flight = self.most_in_flight.max(self.in_flight.len());
                Body::AddNewMsgAnswer(AddNewMsgAnswer { deadline: Tick(115), outcomes })
            }
            Body::DelMsg { messages, .. } => {
                let ids = ids(&messages);
                let outcomes = ids
                    .iter()
                    .map(|id| if self.in_flight.remove(id) { DelOutcome::Acked } else { DelOutcome::Unknown });
                let outcomes = outcomes.collect();
                self.asked.push((FrameKind::Del, ids));
                Body::DelMsgAnswer(outcomes)
            }
            Body::Ping(payload) => {
                self.asked.push((FrameKind::Ping, Vec::new()));
                Body::Pong(payload)
            }
            other => panic!("a load never sends {other:?}"),
        };
        Frame::new(correlation, body)
    }
}

fn shared(op: Op, acked: f64, ids_per_frame: u64) -> Arc<LoadState> {
    shared_of(BenchOptions { acked, op, ..options(ids_per_frame) })
}

fn options(ids_per_frame: u64) -> BenchOptions {
    let ids_per_frame = usize::try_from(ids_per_frame).unwrap();
    BenchOptions { connections: 2, pipeline: Some(16), ids_per_frame, ..BenchOptions::default() }
}

fn shared_of(options: BenchOptions) -> Arc<LoadState> {
    Arc::new(LoadState::new(options, 7))
}

fn traffic(shared: &Arc<LoadState>, window: u64) -> Traffic {
    Traffic::new(Arc::clone(shared), 1, window)
}

/// Returns a phase of measured traffic that ends at `until`.
fn measure(until: u64) -> Phase {
    Phase::Measure { from: 0, until }
}

/// Exchanges requests and answers until the phase is done, in rounds of one microsecond. Returns the end of the phase.
fn work(traffic: &mut Traffic, server: &mut Server, phase: Phase, from: u64) -> u64 {
    traffic.start(phase, None);
    let (mut now, mut out) = (from, BytesMut::new());
    while !traffic.is_done(now) {
        traffic.requests(now, &mut out);
        let answers = server.answer(&std::mem::take(&mut out));
        now += 1_000;
        assert_eq!(traffic.answers(&answers, now, &mut out), Ok(answers.len()));
    }
    now
}

#[test]
fn the_wheel_is_filled_kept_full_and_left_empty() {
    for (ids_per_frame, window) in [(1, 1), (1, 100), (7, 100), (50, 50)] {
        let shared = shared(Op::Wheel, 1.0, ids_per_frame);
        let (mut traffic, mut server) = (traffic(&shared, window), Server::default());
        let filled = work(&mut traffic, &mut server, Phase::Fill, 0);
        assert_eq!((server.in_flight.len() as u64, traffic.counters().frames), (window, 0));
        let until = filled + 50_000;
        let end = work(&mut traffic, &mut server, measure(until), filled);
        assert!(server.most_in_flight as u64 <= window + ids_per_frame, "{ids_per_frame} {window}");
        let counters = traffic.counters();
        // Fifty rounds have sixteen frames each. The answers of the last round come at the end and are not measured.
        assert_eq!(counters.frames, 49 * 16);
        assert_eq!((counters.added, counters.acked), (49 * 8 * ids_per_frame, 49 * 8 * ids_per_frame));
        work(&mut traffic, &mut server, Phase::Clean, end);
        assert!(server.in_flight.is_empty());
        assert_eq!(shared.errors.first().0, 0, "{:?}", shared.errors);
        let recorder = shared.recorder(1).lock();
        assert_eq!((recorder.adds.len(), recorder.dels.len()), (49 * 8, 49 * 8));
        assert_eq!(recorder.adds.value_at_quantile(0.99).abs_diff(1_000), 0);
    }
}

#[test]
fn adds_and_dels_come_in_turn_or_as_drawn() {
    for (order, ids_per_frame, most_ahead) in
        [(Order::InTurn, 1, 1), (Order::Mixed, 1, 8), (Order::Mixed, 3, 6), (Order::Mixed, 9, 9)]
    {
        let shared = shared_of(BenchOptions { order, ..options(ids_per_frame) });
        let (mut traffic, mut server) = (traffic(&shared, 100), Server::default());
        let filled = work(&mut traffic, &mut server, Phase::Fill, 0);
        server.asked.clear();
        work(&mut traffic, &mut server, measure(filled + 1_000_000), filled);
        assert_eq!(server.most_in_flight as u64, 100 + most_ahead, "{order:?} {ids_per_frame}");
        let kinds = server.asked.iter().map(|(kind, _)| *kind);
        let (frames, repeats) =
            (server.asked.len(), kinds.clone().zip(kinds.skip(1)).filter(|(a, b)| a == b).count());
        // If there is room beyond the window, about half of the frames have the same type as the frame before.
        let drawn = order == Order::Mixed && 2 * ids_per_frame <= most_ahead;
        assert!(if drawn { repeats > frames / 5 } else { repeats == 0 }, "{repeats} of {frames}");
        assert_eq!(shared.errors.first().0, 0, "{:?}", shared.errors);
    }
}

#[test]
fn what_is_due_is_deleted_even_if_no_add_is_due_with_it() {
    let shared = shared_of(BenchOptions { order: Order::Mixed, ..options(1) });
    let (mut traffic, mut server) = (traffic(&shared, 10), Server::default());
    let filled = work(&mut traffic, &mut server, Phase::Fill, 0);
    server.asked.clear();
    let (schedule, until) =
        (Schedule::new(filled, 1_000.0, Duration::from_millis(4), 0, 1), filled + 1_000_000_000);
    traffic.start(measure(until), Some(schedule));
    let mut out = BytesMut::new();
    // Four pairs are due now, and the next ones only after 4 ms.
    traffic.requests(filled + 1_000, &mut out);
    assert_eq!(traffic.answers(&server.answer(&out), filled + 2_000, &mut BytesMut::new()), Ok(4 * (29 + 17)));
    assert_eq!((server.asked.len(), server.in_flight.len()), (8, 10));
}

#[test]
fn what_is_not_to_be_acknowledged_is_left_and_counted() {
    for (acked, ids_per_frame) in [(0.0, 1), (0.3, 1), (0.9, 10), (0.5, 100)] {
        let shared = shared(Op::Wheel, acked, ids_per_frame);
        let (mut traffic, mut server) = (traffic(&shared, 200), Server::default());
        let filled = work(&mut traffic, &mut server, Phase::Fill, 0);
        let end = work(&mut traffic, &mut server, measure(filled + 20_000), filled);
        work(&mut traffic, &mut server, Phase::Clean, end);
        let counters = traffic.counters();
        assert_eq!(server.in_flight.len() as u64, counters.left_to_time_out);
        let left = (0..counters.numbers).filter(|number| !shared.ids.is_acked(1, *number));
        assert!(left.map(|number| shared.ids.message(1, number).msg_id.0).eq(traffic_order(&server, &shared)));
        assert!(server.asked.iter().all(|(_, ids)| !ids.is_empty() && ids.len() as u64 <= ids_per_frame));
        assert_eq!(
            shared.recorder(1).lock().tick_times.last_at_or_before(115).is_some(),
            counters.left_to_time_out > 0
        );
        assert_eq!(shared.errors.first().0, 0, "{:?}", shared.errors);
    }
}

/// Returns the messages in flight, in the order in which they were added.
fn traffic_order<'a>(server: &'a Server, shared: &'a LoadState) -> impl Iterator<Item = u64> + 'a {
    let mut numbers: Vec<u64> = server
        .in_flight
        .iter()
        .map(|id| shared.ids.origin(Message::new(*id, 0)).expect("the message belongs to this load").1)
        .collect();
    numbers.sort_unstable();
    numbers.into_iter().map(|number| shared.ids.message(1, number).msg_id.0)
}

#[test]
fn pings_are_all_that_a_load_of_pings_asks() {
    let shared = shared(Op::Ping, 1.0, 1);
    let (mut traffic, mut server) = (traffic(&shared, 100), Server::default());
    work(&mut traffic, &mut server, measure(10_000), 0);
    assert!(server.asked.iter().all(|(kind, _)| *kind == FrameKind::Ping));
    assert_eq!((traffic.counters().frames, server.asked.len(), shared.errors.first().0), (9 * 16, 10 * 16, 0));
}

#[test]
fn at_a_fixed_rate_latency_counts_from_when_a_request_was_due() {
    let shared = shared(Op::Wheel, 1.0, 1);
    let (mut traffic, mut server) = (traffic(&shared, 10), Server::default());
    let filled = work(&mut traffic, &mut server, Phase::Fill, 0);
    // One pair is due every 5 ms, so five pairs are due at 20 ms. None was made before, because the server was slow.
    let schedule = Schedule::new(filled, 200.0, Duration::from_millis(4), 0, 1);
    traffic.start(measure(filled + 1_000 * MS), Some(schedule));
    let mut out = BytesMut::new();
    traffic.requests(filled + 20_000_000, &mut out);
    let answers = server.answer(&std::mem::take(&mut out));
    assert_eq!(traffic.answers(&answers, filled + 30_000_000, &mut out), Ok(answers.len()));
    let recorder = shared.recorder(1).lock();
    for histogram in [&recorder.adds, &recorder.dels] {
        let latencies: Vec<u64> = histogram.iter_recorded().map(|value| value.value_iterated_to()).collect();
        let expected = [10_000_000_u64, 15_000_000, 20_000_000, 25_000_000, 30_000_000];
        assert_eq!(latencies.len(), expected.len());
        assert!(
            latencies.iter().zip(expected).all(|(found, expected)| found.abs_diff(expected) <= expected / 500),
            "{latencies:?}"
        );
    }
}

#[test]
fn at_a_fixed_rate_a_server_that_stands_still_at_the_end_hides_nothing() {
    let shared = shared_of(BenchOptions { pipeline: Some(4), ..options(1) });
    let (mut traffic, mut server) = (traffic(&shared, 10), Server::default());
    let filled = work(&mut traffic, &mut server, Phase::Fill, 0);
    // One pair is due every 100 ms for a second. Two pairs are sent, and then the server answers nothing for 3 s.
    let (until, mut out) = (filled + 1_000 * MS, BytesMut::new());
    traffic.start(measure(until), Some(Schedule::new(filled, 10.0, Duration::from_millis(4), 0, 1)));
    for now in [0, 100, 200, 900, 1_100, 1_900] {
        traffic.requests(filled + now * MS, &mut out);
    }
    assert!(!traffic.is_done(filled + 1_950 * MS), "requests are still unanswered");
    let now = filled + 3_000 * MS;
    let answers = server.answer(&std::mem::take(&mut out));
    assert_eq!(traffic.answers(&answers, now, &mut out), Ok(answers.len()));
    traffic.requests(now, &mut out);
    assert!(out.is_empty() && traffic.is_done(now), "more than a second after the end, no request is made");
    traffic.count_missed(now);
    let (counters, recorder) = (traffic.counters(), shared.recorder(1).lock());
    assert_eq!((counters.added, counters.acked, counters.frames, counters.not_made), (0, 0, 0, 8), "all too late");
    for histogram in [&recorder.adds, &recorder.dels] {
        assert_eq!(histogram.len(), 10);
        assert!(histogram.min().abs_diff(2_100 * MS) <= 5 * MS && histogram.max().abs_diff(3_000 * MS) <= 5 * MS);
    }
}

#[test]
fn what_was_due_before_the_end_is_made_after_it_and_nothing_else() {
    let shared = shared(Op::Ping, 1.0, 1);
    let (mut traffic, mut server) = (traffic(&shared, 10), Server::default());
    let (until, mut out) = (1_000 * MS, BytesMut::new());
    traffic.start(measure(until), Some(Schedule::new(0, 10.0, Duration::from_millis(4), 0, 1)));
    assert!(!traffic.is_done(until), "ten Pings were due");
    traffic.requests(until + 1, &mut out);
    let answers = server.answer(&std::mem::take(&mut out));
    assert_eq!(traffic.answers(&answers, until + 2, &mut out), Ok(answers.len()));
    traffic.requests(until + 500 * MS, &mut out);
    assert!(traffic.is_done(until + 500 * MS));
    traffic.count_missed(until + 500 * MS);
    let (counters, recorder) = (traffic.counters(), shared.recorder(1).lock());
    assert_eq!((server.asked.len(), counters.not_made, counters.frames), (10, 0, 0));
    assert_eq!((recorder.adds.len(), recorder.dels.len()), (10, 0));
}

#[test]
fn the_tick_is_seen_when_a_request_is_made_and_not_when_it_was_due() {
    let shared = shared(Op::Wheel, 0.0, 1);
    let (mut traffic, mut server) = (traffic(&shared, 10), Server::default());
    let filled = work(&mut traffic, &mut server, Phase::Fill, 0);
    let schedule = Schedule::new(filled, 200.0, Duration::from_millis(4), 0, 1);
    traffic.start(measure(filled + 1_000 * MS), Some(schedule));
    let (mut out, made_at) = (BytesMut::new(), filled + 22_000_000);
    traffic.requests(made_at, &mut out);
    let answers = server.answer(&std::mem::take(&mut out));
    assert_eq!(traffic.answers(&answers, made_at + 1_000_000, &mut out), Ok(answers.len()));
    assert_eq!(
        shared.recorder(1).lock().tick_times.last_at_or_before(115),
        Some(made_at),
        "the request tells the tick of the time at which it was made"
    );
}

#[test]
fn answers_in_another_order_and_in_pieces_are_taken() {
    let shared = shared(Op::Wheel, 1.0, 1);
    let (mut traffic, mut server) = (traffic(&shared, 16), Server::default());
    traffic.start(Phase::Fill, None);
    let mut out = BytesMut::new();
    traffic.requests(0, &mut out);
    let mut answers: Vec<Vec<u8>> =
        frames(&out).into_iter().map(|frame| bytes(&server.answer_one(frame))).collect();
    answers.reverse();
    let (whole, half) = (answers[..10].concat(), &answers[10][..20]);
    out.clear();
    assert_eq!(traffic.answers(&[&whole, half].concat(), 5, &mut out), Ok(whole.len()));
    assert!(traffic.is_waiting());
    let rest = answers[10..].concat();
    assert_eq!(traffic.answers(&rest, 5, &mut out), Ok(rest.len()));
    assert!(!traffic.is_waiting() && traffic.is_done(5));
    assert_eq!((shared.errors.first().0, traffic.counters().numbers), (0, 16));
}

#[test]
fn what_the_server_says_unasked_is_answered_or_ends_the_connection() {
    let shared = shared(Op::Wheel, 1.0, 1);
    let mut traffic = traffic(&shared, 16);
    let mut out = BytesMut::new();
    let ping = bytes(&Frame::new(0, Body::Ping(vec![1, 2, 3])));
    assert_eq!(traffic.answers(&ping, 0, &mut out), Ok(ping.len()));
    assert_eq!(frames(&out), [Frame::new(0, Body::Pong(vec![1, 2, 3]))]);
    let answer = bytes(&Frame::new(99, Body::Pong(Vec::new())));
    assert_eq!(traffic.answers(&answer, 0, &mut out), Ok(answer.len()));
    assert_eq!(shared.errors.first(), (1, vec!["the server sent a pong that nobody asked for".to_owned()]));
    let text = "too slow".to_owned();
    let error = crate::protocol::frame::Error {
        code: 1,
        promise: crate::core::Promise::NotApplied,
        retryable: false,
        text,
    };
    let error = bytes(&Frame::new(0, Body::Error(error)));
    assert_eq!(traffic.answers(&error, 0, &mut out), Err("the server said: too slow".to_owned()));
    assert!(traffic.answers(b"HTTP/1.1", 0, &mut out).is_err());
}
