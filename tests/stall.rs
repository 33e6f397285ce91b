//! A stall on our side is not silence on theirs: Acks that came while the sidecar stalled count, and
//! nobody times out for it.

use std::time::{Duration, Instant};

use crate::support::frames::{self, ACKED, Request};
use crate::support::held_thread::HeldThread;
use crate::support::raw::{Batch, Raw};
use crate::support::sidecar::Sidecar;
use crate::support::sleep_until;

const TICK: Duration = Duration::from_millis(200);
const SLOTS: u16 = 5;
const ACK_TIMEOUT: Duration = Duration::from_secs(1);
const THREE_REVOLUTIONS: Duration = Duration::from_secs(3);

/// Before a boundary of ticks: near enough to fall into the tick's last moments, far enough to be before it.
const JUST_BEFORE: Duration = Duration::from_millis(40);

/// Messages of every test, and those of them that are acknowledged while the sidecar stalls.
const ALL: std::ops::RangeInclusive<u64> = 1..=200;
const ACKNOWLEDGED: std::ops::RangeInclusive<u64> = 1..=150;

/// When the sidecar stalls.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    AfterTheAdd,
    BeforeTheTickCloses,
    BeforeTheTickIsDecided,
}

/// How the acknowledgements are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    OverAConnectionOpenBefore,
    OverNewConnections,
}

/// A sidecar with 200 messages in flight, their connection, and a subscriber.
struct Scene {
    sidecar: Sidecar,
    adder: Raw,
    subscriber: Raw,
    deadline: u64,
    added: Instant,
}

impl Scene {
    fn set() -> Scene {
        Scene::with(&[])
    }

    fn with(flags: &[&str]) -> Scene {
        let sidecar = Sidecar::start(&[&["--tick", "200ms", "--slots", "5"], flags].concat());
        let mut adder = sidecar.connect();
        let subscriber = sidecar.connect().subscribed("default");
        // At the beginning of a tick, so that there is time to meet the end of another.
        sidecar.wait_for_pointer(sidecar.pointer() + 1);
        let added = Instant::now();
        let (deadline, _) = adder.ask(&frames::add(&ALL.collect::<Vec<_>>(), SLOTS, 1)).added();
        Scene { sidecar, adder, subscriber, deadline, added }
    }

    /// Has the sidecar stall at its moment; returns since when.
    fn stop(&mut self, moment: Moment) -> Instant {
        let pointer = match moment {
            Moment::AfterTheAdd => return self.sidecar.stop(),
            Moment::BeforeTheTickCloses => self.deadline - 1,
            Moment::BeforeTheTickIsDecided => self.deadline,
        };
        let begun = self.sidecar.wait_for_pointer(pointer);
        sleep_until(begun + TICK - JUST_BEFORE);
        self.sidecar.stop()
    }

    /// All that timed out.
    fn timed_out(&mut self, count: usize) -> Vec<Batch> {
        let mut batches = Vec::new();
        while batches.iter().map(|batch: &Batch| batch.messages.len()).sum::<usize>() < count {
            batches.push(self.subscriber.settled_batch());
        }
        batches
    }

    /// The connections that were open all the time still are.
    fn assert_nobody_was_judged_silent(&mut self) {
        for connection in [&mut self.adder, &mut self.subscriber] {
            assert_eq!(connection.ask(&frames::ping(b"here")).body, b"here");
        }
        let metrics = self.sidecar.metrics();
        assert_eq!((metrics.refusals("silent"), metrics.refusals("slow_reader")), (0, 0));
        assert_eq!(metrics.count("batches_redelivered_total"), 0);
    }
}

/// Acknowledges in frames of ten; returns the connections and how many answers each awaits.
fn acknowledge(scene: &mut Scene, way: Way) -> Vec<(Raw, usize)> {
    let ids: Vec<u64> = ACKNOWLEDGED.collect();
    let frames: Vec<Request> = ids.chunks(10).map(frames::del).collect();
    match way {
        Way::OverAConnectionOpenBefore => {
            for frame in &frames {
                scene.adder.request(frame);
            }
            Vec::new()
        }
        Way::OverNewConnections => {
            let send = |frames: &[Request]| {
                let mut connection = Raw::tcp(scene.sidecar.listen);
                connection.request(&frames::hello((1, 1), b""));
                for frame in frames {
                    connection.request(frame);
                }
                (connection, frames.len())
            };
            frames.chunks(3).map(send).collect()
        }
    }
}

/// Asserts that everything acknowledged was answered so.
fn assert_all_acked(scene: &mut Scene, connections: Vec<(Raw, usize)>) {
    let mut acked = 0;
    let mut count = |answer: &[u8]| {
        assert!(answer.iter().all(|outcome| *outcome == ACKED), "{answer:?}");
        acked += answer.len();
    };
    if connections.is_empty() {
        (0..15).for_each(|_| count(scene.adder.next_answer().outcomes()));
    }
    for (mut connection, answers) in connections {
        assert_eq!(connection.next_answer().kind, frames::WELCOME);
        (0..answers).for_each(|_| count(connection.next_answer().outcomes()));
    }
    assert_eq!(acked, ACKNOWLEDGED.count());
}

fn a_long_stall(moment: Moment, way: Way) {
    let mut scene = Scene::set();
    let stopped = scene.stop(moment);
    let connections = acknowledge(&mut scene, way);
    sleep_until(stopped + THREE_REVOLUTIONS);
    let went_on = scene.sidecar.go_on();

    assert_all_acked(&mut scene, connections);
    let batches = scene.timed_out(50);
    assert_exactly_the_others_timed_out(&batches);
    for batch in &batches {
        // Time in which the sidecar did not run does not count.
        let alive = batch.arrived - scene.added - (went_on - stopped);
        assert!(alive >= ACK_TIMEOUT, "timed out after {alive:?} alive");
        assert!(batch.arrived - went_on >= TICK, "decided {:?} after waking", batch.arrived - went_on);
        assert!(alive <= ACK_TIMEOUT + TICK * 3 + Duration::from_millis(800), "only after {alive:?}");
    }
    scene.assert_nobody_was_judged_silent();
    assert!(scene.sidecar.metrics().count("shifted_ticks_total") >= 13, "about 15 ticks were missed");
    assert!(scene.sidecar.log().line("every deadline is shifted").is_some(), "a person is told");
}

fn assert_exactly_the_others_timed_out(batches: &[Batch]) {
    let mut ids: Vec<u64> = batches.iter().flat_map(Batch::ids).collect();
    ids.sort_unstable();
    assert_eq!(ids, (151..=200).collect::<Vec<_>>());
    for batch in batches {
        assert_eq!((batch.added, batch.acked, batch.storm, batch.drained), (200, 150, false, false));
    }
}

#[test]
fn acks_sent_during_a_stall_count() {
    a_long_stall(Moment::AfterTheAdd, Way::OverAConnectionOpenBefore);
}

#[test]
fn acks_sent_over_new_connections_during_a_stall_count() {
    a_long_stall(Moment::AfterTheAdd, Way::OverNewConnections);
}

#[test]
fn a_stall_just_before_the_tick_closes_times_nobody_out() {
    a_long_stall(Moment::BeforeTheTickCloses, Way::OverAConnectionOpenBefore);
}

#[test]
fn a_stall_just_before_the_tick_closes_times_nobody_out_over_new_connections() {
    a_long_stall(Moment::BeforeTheTickCloses, Way::OverNewConnections);
}

#[test]
fn a_stall_just_before_the_tick_is_decided_times_nobody_out() {
    a_long_stall(Moment::BeforeTheTickIsDecided, Way::OverAConnectionOpenBefore);
}

#[test]
fn a_stall_just_before_the_tick_is_decided_times_nobody_out_over_new_connections() {
    a_long_stall(Moment::BeforeTheTickIsDecided, Way::OverNewConnections);
}

/// A stall that begins before the tick is decided and ends that much after that was due.
fn a_short_stall(ends_after: Duration) {
    let mut scene = Scene::set();
    let decided = scene.sidecar.wait_for_pointer(scene.deadline) + TICK;
    sleep_until(decided - JUST_BEFORE);
    scene.sidecar.stop();
    acknowledge(&mut scene, Way::OverAConnectionOpenBefore);
    sleep_until(decided + ends_after);
    scene.sidecar.go_on();

    assert_all_acked(&mut scene, Vec::new());
    let batches = scene.timed_out(50);
    assert_exactly_the_others_timed_out(&batches);
    assert!(batches.iter().all(|batch| batch.arrived - scene.added >= ACK_TIMEOUT), "{batches:?}");
    scene.assert_nobody_was_judged_silent();
}

#[test]
fn a_stall_that_ends_as_the_decision_is_due_times_nobody_out() {
    a_short_stall(Duration::from_millis(2));
}

#[test]
fn a_stall_that_ends_just_after_the_decision_was_due_times_nobody_out() {
    a_short_stall(Duration::from_millis(8));
}

#[test]
fn a_stall_of_half_a_tick_times_nobody_out() {
    a_short_stall(Duration::from_millis(60));
}

#[test]
fn a_stall_of_nearly_a_tick_times_nobody_out() {
    a_short_stall(Duration::from_millis(150));
}

/// Not the process stalls here, but the one thread that reads: the decision is due and waits for it.
#[test]
fn a_decision_waits_for_acks_that_nobody_has_read() {
    let mut scene = Scene::with(&["--threads", "1"]);
    let decided = scene.sidecar.wait_for_pointer(scene.deadline) + TICK;
    sleep_until(decided - JUST_BEFORE);
    let Some(held) = HeldThread::hold(scene.sidecar.id(), "tokio-rt-worker") else { return };
    acknowledge(&mut scene, Way::OverAConnectionOpenBefore);
    // Far less than half a tick, for which it waits at most.
    sleep_until(decided + Duration::from_millis(20));
    drop(held);

    assert_all_acked(&mut scene, Vec::new());
    assert_exactly_the_others_timed_out(&scene.timed_out(50));
}

/// More than a socket holds: the rest waits at the peer, and comes as there is room for it.
#[test]
fn acks_that_waited_at_the_peer_in_a_stall_shorter_than_a_tick_count() {
    const TICK: Duration = Duration::from_secs(1);
    const MANY: u64 = 20_000;
    let sidecar = Sidecar::start(&["--tick", "1s"]);
    for round in 0..4 {
        // The system makes room for a connection as it is used: one that is new has little.
        let mut connection = sidecar.connect();
        let ids: Vec<u64> = (round * MANY..(round + 1) * MANY).collect();
        let (deadline, _) = connection.ask(&frames::add(&ids, 1, 1)).added();
        let acks: Vec<u8> = ids.iter().flat_map(|id| frames::del(&[*id]).bytes(1)).collect();
        let begun = sidecar.wait_for_pointer(deadline);
        sleep_until(begun + TICK / 2);
        sidecar.stop();
        std::thread::scope(|scope| {
            scope.spawn(|| connection.send(&acks));
            sleep_until(begun + TICK + TICK / 10);
            sidecar.go_on();
        });
        let late = ids.iter().filter(|_| connection.next_answer().outcomes() != [ACKED]).count();
        assert_eq!(late, 0, "in round {round}");
    }
}
