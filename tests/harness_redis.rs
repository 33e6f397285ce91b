//! The harness for Redis does what the tests that use it believe.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::clock::{Clock, FakeClock};
use crate::support::redis::Redis;
use crate::support::sidecar::Sidecar;
use crate::support::sleep_until;

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
fn a_server_believes_a_clock_that_stands_still() {
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
