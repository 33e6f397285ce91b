//! A memory store that is full: adds are refused exactly, cheaply and without a line each, and Acks are as fast as before.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::support::frames::{self, ACKED, ERROR, RETRYABLE};
use crate::support::process::assert_names;
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

/// The code of the refusal, in docs/PROTOCOL.md.
const MAX_IN_FLIGHT: u16 = 64;

/// An ack timeout that is longer than any test.
const LONG: u16 = 3_600;

fn start(max_in_flight: u64) -> Sidecar {
    let (slots, max_in_flight) = (LONG.to_string(), max_in_flight.to_string());
    Sidecar::start(&["--slots", &slots, "--max-in-flight", &max_in_flight])
}

fn add(connection: &mut Raw, ids: &[u64]) {
    for ids in ids.chunks(10_000) {
        connection.ask(&frames::add(ids, LONG, 1)).added();
    }
}

fn is_refused(connection: &mut Raw, ids: &[u64]) {
    connection.ask(&frames::add(ids, LONG, 1)).assert_error(MAX_IN_FLIGHT, RETRYABLE);
}

#[test]
fn the_limit_is_exact_and_what_is_in_flight_is_rearmed_at_it() {
    let sidecar = start(100);
    let mut connection = sidecar.connect();
    let ids: Vec<u64> = (1..=100).collect();
    add(&mut connection, &ids[..99]);
    is_refused(&mut connection, &[100, 101]);
    add(&mut connection, &[100, 100, 1, 100]);
    is_refused(&mut connection, &[101]);
    is_refused(&mut connection, &[1, 2, 3, 101]);
    assert_eq!(connection.ask(&frames::add(&ids, LONG, 2)).added().1, [true; 100], "all of them are re-armed");
    assert_eq!(connection.ask(&frames::del(&[1, 2])).outcomes(), [ACKED; 2]);
    is_refused(&mut connection, &[101, 102, 103]);
    add(&mut connection, &[101, 3, 102, 101]);
    is_refused(&mut connection, &[1]);
    // In one read: each Ack makes room for the add behind it.
    let requests = [frames::del(&[3]), frames::add(&[1], LONG, 1), frames::add(&[2], LONG, 1), frames::del(&[4])];
    let bytes: Vec<u8> = (1_000..).zip(&requests).flat_map(|(number, request)| request.bytes(number)).collect();
    connection.send(&bytes);
    let kinds = requests.map(|_| connection.next_answer().kind);
    assert_eq!(kinds, [frames::DEL_ANSWER, frames::ADD_ANSWER, ERROR, frames::DEL_ANSWER]);
    assert_eq!(sidecar.status().rings[0].in_flight, 99);
    assert_eq!(sidecar.metrics().refusals("max_in_flight"), 6);
}

#[test]
fn refusals_at_the_limit_are_counted_and_reported_in_a_few_lines() {
    let sidecar = start(1);
    let mut connection = sidecar.connect();
    add(&mut connection, &[1]);
    let bytes: Vec<u8> =
        (1_000..21_000).flat_map(|id: u32| frames::add(&[id.into()], LONG, 1).bytes(id)).collect();
    let mut reader = sidecar.connect();
    thread::scope(|scope| {
        scope.spawn(|| {
            connection.send(&bytes);
            (0..20_000).for_each(|_| assert_eq!(connection.next_answer().kind, ERROR));
        });
        wait_until("they are refused", || sidecar.metrics().refusals("max_in_flight") == 20_000);
    });
    is_refused(&mut reader, &[2]);
    let line = sidecar.log().line("max-in-flight reached").expect("it is reported");
    assert_names(&line, &["ERROR", "refused=", "--max-in-flight"]);
    assert!(sidecar.log().text().matches("max-in-flight reached").count() <= 2, "{}", sidecar.log().text());
}

/// Connections that add and acknowledge as fast as they are answered.
const FLOODS: u64 = 4;

/// Messages that each of them adds at a time.
const AT_ONCE: u64 = 1_024;

/// The limit of the wheel on which they do so.
const LIMIT: u64 = 200_000;

/// Acks whose time is taken in a round.
const ACKS: usize = 300;

const ROUNDS: usize = 5;

/// Adds messages in pipelined requests, so many in each, and acknowledges them in the same way, again and again.
fn flood(address: SocketAddr, number: u64, a_request: usize, is_over: &CancellationToken) {
    let mut connection = Raw::greeted(address);
    let ids: Vec<u64> = (number << 32..(number << 32) + AT_ONCE).collect();
    let of_all = |request: fn(&[u64]) -> frames::Request| -> Vec<u8> {
        (1..).zip(ids.chunks(a_request)).flat_map(|(number, ids)| request(ids).bytes(number)).collect()
    };
    let (adds, dels) = (of_all(|ids| frames::add(ids, LONG, 1)), of_all(frames::del));
    while !is_over.is_cancelled() {
        for requests in [&adds, &dels] {
            connection.send(requests);
            ids.chunks(a_request).for_each(|_| drop(connection.next_answer()));
        }
    }
}

/// A wheel on which the floods want as many messages in flight as a share of the limit, in percent.
struct Loaded {
    sidecar: Sidecar,
    probe: Raw,
    others: Vec<u64>,
    a_request: usize,
}

impl Loaded {
    fn new(percent: u64, a_request: usize) -> Loaded {
        let sidecar = start(LIMIT);
        let mut probe = sidecar.connect();
        let others: Vec<u64> = (1..=LIMIT * percent / 100 - FLOODS * AT_ONCE).collect();
        add(&mut probe, &others);
        Loaded { sidecar, probe, others, a_request }
    }

    /// The 99th percentile of the time to the answer of an Ack.
    fn p99(&mut self) -> Duration {
        let (address, a_request, is_over) = (self.sidecar.listen, self.a_request, CancellationToken::new());
        let acked = &self.others[..ACKS];
        let mut times: Vec<Duration> = thread::scope(|scope| {
            let _end_the_floods = is_over.clone().drop_guard();
            (1..=FLOODS).for_each(|number| {
                drop(scope.spawn({
                    let is_over = &is_over;
                    move || flood(address, number, a_request, is_over)
                }));
            });
            let before = self.sidecar.metrics().acked("acked");
            wait_until("the floods are there", || {
                self.sidecar.metrics().acked("acked") > before + FLOODS * AT_ONCE
            });
            let time = |id: &u64| {
                let begun = Instant::now();
                assert_eq!(self.probe.ask(&frames::del(&[*id])).outcomes(), [ACKED]);
                begun.elapsed()
            };
            acked.iter().map(time).collect()
        });
        add(&mut self.probe, acked);
        times.sort_unstable();
        times[times.len() * 99 / 100]
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// The share that a busy machine may add to one of two figures.
const NOISE: Duration = Duration::from_millis(2);

#[test]
fn an_ack_waits_at_most_three_times_as_long_above_the_limit_as_below() {
    assert_an_ack_is_not_held_up(1);
}

#[test]
fn an_ack_waits_no_longer_above_the_limit_where_adds_come_in_large_requests() {
    assert_an_ack_is_not_held_up(64);
}

#[track_caller]
fn assert_an_ack_is_not_held_up(a_request: usize) {
    let (mut below, mut above) = (Loaded::new(90, a_request), Loaded::new(101, a_request));
    let (mut times_below, mut times_above) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        times_below.push(below.p99());
        times_above.push(above.p99());
    }
    let refused = [&below, &above].map(|loaded| loaded.sidecar.metrics().refusals("max_in_flight"));
    let (below, above) = (median(times_below), median(times_above));
    println!("p99 of an Ack: {below:?} at 90 % of the limit, {above:?} at 101 %; refused: {refused:?}");
    assert!(refused[0] == 0 && refused[1] > 100, "{refused:?}");
    assert!(above <= below * 3 + NOISE, "{above:?} at 101 % of the limit, {below:?} at 90 %");
}
