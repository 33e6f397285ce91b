//! The harness for Redis does what the tests that use it believe, and its checkers see what is wrong.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::clock::{Clock, FakeClock};
use crate::support::fleet::{Pointers, Seen, assert_pace};
use crate::support::flow::{Asked, Evidence, Flow, Plan};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::{PATIENCE, SLACK, sleep_until};

#[test]
fn a_server_is_there_for_its_test_alone() {
    let (one, other) = (Redis::start(), Redis::start());
    assert_eq!(one.command::<String>(&["SET", "key", "value"]), "OK");
    assert_eq!((one.dbsize(), other.dbsize()), (1, 0));
    assert!(one.used_memory() > 100_000);
    assert_eq!(one.command::<Vec<String>>(&["CONFIG", "GET", "maxmemory-policy"])[1], "noeviction");
    assert!(one.slowlog().is_empty());
    let slow = "local begun = redis.call('TIME') repeat local now = redis.call('TIME') \
        until (now[1] - begun[1]) * 1000000 + now[2] - begun[2] > 9000";
    one.command::<()>(&["EVAL", slow, "0"]);
    let slowlog = one.slowlog();
    assert!(matches!(&slowlog[..], [(9_000.., name)] if name.eq_ignore_ascii_case("EVAL")), "{slowlog:?}");
    assert!(one.try_command::<()>(&["NO-SUCH-COMMAND"]).is_err());
}

#[test]
fn a_restart_keeps_what_is_in_the_append_only_file() {
    let mut redis = Redis::with_append_only_file();
    redis.command::<()>(&["SET", "key", "value"]);
    redis.kill();
    assert!(redis.try_command::<()>(&["PING"]).is_err());
    redis.restart();
    assert_eq!(redis.command::<String>(&["GET", "key"]), "value");
    redis.restart_empty();
    assert_eq!(redis.dbsize(), 0);
    redis.command::<()>(&["SET", "key", "value"]);
    redis.restart();
    assert_eq!(redis.dbsize(), 1, "the file is kept again");
}

#[test]
fn a_restart_without_a_file_loses_everything() {
    let mut redis = Redis::start();
    let port = redis.port;
    redis.command::<()>(&["SET", "key", "value"]);
    redis.restart();
    assert_eq!((redis.dbsize(), redis.port), (0, port));
}

#[test]
fn a_stopped_server_takes_connections_and_answers_when_it_goes_on() {
    let redis = Redis::start();
    redis.stop();
    let mut connection = std::thread::scope(|scope| {
        let asked = scope.spawn(|| redis.connect().unwrap());
        sleep_until(Instant::now() + Duration::from_millis(300));
        assert!(!asked.is_finished(), "the handshake of the connection waits for its answer");
        redis.go_on();
        asked.join().unwrap()
    });
    assert_eq!(redis::cmd("PING").query::<String>(&mut connection).unwrap(), "PONG");
}

#[test]
fn a_server_believes_a_stopped_clock() {
    let mut redis = Redis::with_clock(Clock::Frozen(1_767_225_605_750));
    assert_eq!(redis.unix_ms(), 1_767_225_605_750);
    sleep_until(Instant::now() + Duration::from_millis(50));
    assert_eq!(redis.unix_ms(), 1_767_225_605_750);
    redis.set_frozen(1_767_225_606_001);
    redis.command::<()>(&["SET", "key", "value", "PX", "999"]);
    redis.set_frozen(1_767_225_606_999);
    assert_eq!(redis.command::<u64>(&["EXISTS", "key"]), 1);
    redis.set_frozen(1_767_225_607_001);
    assert_eq!(redis.command::<u64>(&["EXISTS", "key"]), 0, "keys expire by that clock");
    redis.restart();
    assert_eq!(redis.unix_ms(), 1_767_225_607_001);
    redis.set_offset(0);
}

#[test]
fn a_server_believes_a_clock_that_is_set() {
    let redis = Redis::with_clock(Clock::Offset(0));
    for seconds in [0, 3_600, -3_600, 0] {
        redis.set_offset(seconds);
        let before = redis.unix_ms();
        sleep_until(Instant::now() + Duration::from_millis(50));
        let passed = redis.unix_ms() - before;
        assert!((45..10_000).contains(&passed), "{passed} ms passed in 50 ms");
    }
}

#[test]
fn a_sidecar_believes_a_clock_and_its_monotonic_clock_stays_true() {
    let clock = FakeClock::new(Clock::Offset(3_600));
    let sidecar = Sidecar::start_with_clock(&clock, &["--tick", "100ms"]);
    let true_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    let ahead = u128::from(sidecar.pointer()) * 100 - true_ms;
    assert!((3_590_000..3_610_000).contains(&ahead), "the wheel began {ahead} ms in the future");

    let (begun, pointer) = (Instant::now(), sidecar.pointer());
    clock.set(Clock::Offset(-3_600));
    sidecar.wait_for_pointer(pointer + 5);
    assert!(begun.elapsed() >= Duration::from_millis(390), "five ticks passed in {:?}", begun.elapsed());
}

/// The evidence of a load through a sidecar with a wheel of its own: some messages acknowledged, late and timed out.
fn evidence() -> Evidence {
    let sidecar = Sidecar::start(&["--tick", "50ms", "--slots", "4"]);
    let plan = Plan::ten_times_a_second(Duration::from_millis(50), 4);
    let (begun, pointers) = (Instant::now(), Pointers::watch(sidecar.admin));
    let flow = Flow::start(plan, sidecar.listen, sidecar.listen);
    sleep_until(begun + Duration::from_millis(1_200));
    let evidence = flow.finish();
    assert!(assert_pace(&pointers.finish(), plan.tick, 0) >= 20);
    evidence
}

/// Asserts that the checker says this of the evidence.
#[track_caller]
fn assert_seen(evidence: &Evidence, words: &str) {
    let checked = catch_unwind(AssertUnwindSafe(|| evidence.assert_kept(PATIENCE)));
    let panic = checked.expect_err("the checker is blind");
    let said = panic.downcast_ref::<String>().expect("it says what is wrong");
    assert!(said.contains(words), "{words:?} is missing in: {said}");
}

#[test]
fn the_checker_of_a_load_sees_what_is_wrong() {
    let mut evidence = evidence();
    evidence.assert_kept(SLACK);
    let (acked, late) = evidence.acked_and_late();
    assert!(acked > 50 && late > 10 && evidence.errors.is_empty(), "{acked} acked, {late} late");
    assert_eq!(evidence.messages.len() as u64 % 50, 1, "the sentinel came last");
    let whole = evidence.batches.clone();

    let lost = evidence.batches[1].messages.pop().unwrap().0;
    assert_seen(&evidence, &format!("{lost} is in 0 batches"));
    evidence.batches.clone_from(&whole);
    evidence.batches[2].messages.push((lost, 0));
    assert_seen(&evidence, &format!("{lost} is in 2 batches"));
    evidence.batches.clone_from(&whole);
    evidence.batches.push(whole[0].clone());
    assert_seen(&evidence, "no redelivery of");
    evidence.batches.last_mut().unwrap().delivery = 2;
    evidence.assert_kept(SLACK);
    evidence.batches.clone_from(&whole);
    evidence.batches[0].arrived -= Duration::from_millis(200);
    assert_seen(&evidence, " early");
    evidence.batches[0].arrived += PATIENCE * 2;
    assert_seen(&evidence, " after its tick");
    evidence.batches.clone_from(&whole);
    let (acked, _) = evidence.messages.iter().find(|(_, message)| message.deleted == Asked::Acked).unwrap();
    evidence.batches[0].messages.push((*acked, 0));
    assert_seen(&evidence, &format!("{acked} is in 1 batches"));
    evidence.batches.clone_from(&whole);
    evidence.batches[0].messages.push((1 << 40, 0));
    assert_seen(&evidence, "was never added");
    evidence.batches.clone_from(&whole);
    evidence.messages.get_mut(&lost).unwrap().deleted = Asked::Unknown;
    assert_seen(&evidence, "is unknown");
}

#[test]
fn the_checker_of_the_pointer_sees_what_is_wrong() {
    let begun = Instant::now();
    let seen = |ms, pointer| {
        let asked = begun + Duration::from_millis(ms);
        Seen { asked, answered: asked, pointer }
    };
    let check = |all: &[Seen]| catch_unwind(|| assert_pace(all, Duration::from_secs(1), 5));
    assert_eq!(
        check(&[seen(0, 10), seen(500, 10), seen(7_000, 10), seen(7_100, 17), seen(8_000, 18)]).unwrap(),
        8
    );
    assert!(check(&[seen(0, 10), seen(1_000, 11), seen(1_010, 10)]).is_err(), "it went back");
    assert!(check(&[seen(0, 10), seen(500, 18)]).is_err(), "it ran");
    assert!(check(&[seen(0, 10), seen(2_000, 14), seen(4_000, 18), seen(6_000, 24)]).is_err(), "it ran on and on");
}
