//! Redis will not do a part of what it is asked: it has no memory, or its user may not.

use crate::redis_faults::{PATIENT, take_until};
use crate::support::frames::{self, ACKED, OUTCOME_UNKNOWN, RETRYABLE, UNKNOWN};
use crate::support::process::{Log, Process, assert_names};
use crate::support::redis::{Redis, ask};
use crate::support::sidecar::{Sidecar, serve};
use crate::support::wait_until;

const STORE_AWAY: u16 = 66;
const STORE_SILENT: u16 = 67;

/// Has Redis refuse one of its user's commands while a tick is published, or messages are acknowledged.
fn denies(redis: &Redis, command: &str, meanwhile: impl FnOnce()) {
    redis.command::<()>(&["ACL", "SETUSER", "default", &format!("-{command}")]);
    meanwhile();
    redis.command::<()>(&["ACL", "SETUSER", "default", &format!("+{command}")]);
}

#[test]
fn no_message_is_lost_where_a_script_that_publishes_fails_halfway() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms"]);
    let mut connection = sidecar.connect();
    let mut first = 1;
    for command in ["rpush", "xadd", "hincrby"] {
        let ids: Vec<u64> = (first..first + 2_500).collect();
        first += 2_500;
        connection.ask(&frames::add(&ids, 2, 1)).added();
        let refused = || sidecar.metrics().count("redis_errors_total{kind=\"forbidden\"}");
        let before = refused();
        denies(&redis, command, || wait_until("it was refused a few times", || refused() > before + 10));
        let mut subscriber = sidecar.connect().subscribed("default");
        let taken = take_until(&mut subscriber, &ids);
        assert_eq!(taken, ids, "without {command}");
        let counted: (u64, u64) =
            redis.command(&["HMGET", "{ackwheel:0}:meta", "published_ids", "published_batches"]);
        let batches = sidecar.metrics().count("batches_published_total");
        assert_eq!(counted, (first - 1, batches), "the outbox would seem to be fuller than it is: {command}");
    }
    wait_until("what is late is forgotten", || redis.command::<u64>(&["HLEN", "{ackwheel:0}:messages"]) == 0);
}

#[test]
fn an_ack_that_a_script_failed_at_can_be_repeated() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms"]);
    let mut connection = sidecar.connect();
    let in_flight = || redis.command::<u64>(&["HGET", "{ackwheel:0}:meta", "in_flight"]);
    for command in ["srem", "hdel", "hincrby"] {
        connection.ask(&frames::add(&[1, 2, 3], 15, 2)).added();
        denies(&redis, command, || {
            connection.ask(&frames::del(&[1, 2, 3])).assert_error(STORE_SILENT, RETRYABLE | OUTCOME_UNKNOWN);
        });
        let again = connection.ask(&frames::del(&[1, 2, 3]));
        assert!(again.outcomes().iter().all(|outcome| [ACKED, UNKNOWN].contains(outcome)), "{again:?}");
        assert_eq!(in_flight(), 0, "without {command}");
    }
    sidecar.wait_for_pointer(sidecar.pointer() + 17);
    assert_eq!(sidecar.metrics().count("messages_timed_out_total"), 0);
}

#[test]
fn a_redis_without_memory_takes_no_adds_and_everything_else_goes_on() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms"]);
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut connection = sidecar.connect();
    let ids: Vec<u64> = (1..=100).collect();
    connection.ask(&frames::add(&ids, 10, 1)).added();
    redis.command::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    connection.ask(&frames::add(&[200], 10, 1)).assert_error(STORE_AWAY, RETRYABLE);
    assert_eq!(connection.ask(&frames::del(&[7, 300])).outcomes(), [ACKED, UNKNOWN]);
    assert_eq!(connection.ask(&frames::del(&[300])).outcomes(), [UNKNOWN], "what is unknown blocks nobody");
    let (status, text) = sidecar.get("/readyz");
    assert_eq!(status, 200, "all sidecars share this Redis, and Acks still free memory: {text}");
    assert_names(&text, &["ready, but", "no memory", "no new messages"]);
    // The dels that free memory are in the same script.
    connection.send(&[frames::del(&[8]).bytes(1_001), frames::add(&[201], 10, 1).bytes(1_002)].concat());
    let mut answers = [connection.next_answer(), connection.next_answer()];
    answers.sort_by_key(|answer| answer.correlation);
    assert_eq!(answers[0].outcomes(), [ACKED]);
    answers[1].assert_error(STORE_AWAY, RETRYABLE);
    let expected: Vec<u64> = ids.into_iter().filter(|id| ![7, 8].contains(id)).collect();
    assert_eq!(take_until(&mut subscriber, &expected), expected, "the wheel turns, which is what frees memory");
    drop(subscriber);
    sidecar.connect().subscribed("default");
    redis.command::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    sidecar.connect().ask(&frames::add(&[200], 10, 1)).added();
    assert_eq!(sidecar.get("/readyz"), (200, String::from("ready\n")));
    for said in ["new messages are refused and not tracked", "Redis has memory again"] {
        sidecar.log().line(said).expect("it is said");
        let log = sidecar.log().text();
        assert_eq!(log.matches(said).count(), 1, "{said}: {log}");
    }
}

#[test]
fn a_command_denied_to_a_script_is_reported_while_it_is_denied_and_the_rest_goes_on() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &PATIENT);
    let mut subscriber = sidecar.connect().subscribed("default");
    let mut connection = sidecar.connect();
    redis.command::<()>(&["ACL", "SETUSER", "default", "-spop"]);
    connection.ask(&frames::add(&[1, 2], 1, 1)).added();
    let forbidden = "redis_errors_total{kind=\"forbidden\"}";
    wait_until("it was tried again and again", || sidecar.metrics().count(forbidden) > 30);
    assert_eq!(connection.ask(&frames::add(&[3], 10, 1)).added().1, [false], "others are taken");
    redis.command::<()>(&["ACL", "SETUSER", "default", "+spop"]);
    assert_eq!(subscriber.settled_batch().ids(), [1, 2]);
    wait_until("its end is told", || {
        sidecar.log().text().contains("the store answers again, and the pointer moves")
    });
    let log = sidecar.log().text();
    for said in ["refused to move the pointer", "the store answers again, and the pointer moves"] {
        assert_eq!(log.matches(said).count(), 1, "{said}: {log}");
    }
    redis.command::<()>(&["ACL", "SETUSER", "default", "-xinfo"]);
    assert_eq!((sidecar.metrics().count("store_up"), sidecar.is_ready()), (1, true), "Redis is there");
    sidecar
        .log()
        .line("does not report the state of its rings")
        .unwrap_or_else(|| panic!("{}", sidecar.log().text()));
}

#[test]
fn an_unreachable_redis_is_reported_with_a_remedy() {
    let redis = Redis::start();
    let port = redis.port;
    for (url, remedy) in [
        (format!("redis://127.0.0.1:{port}/99"), "correct the number of the database"),
        (format!("rediss://127.0.0.1:{port}/"), "begin with rediss:// where the port speaks TLS"),
    ] {
        let mut process = Process::spawn(&mut serve(&["--store", &url]));
        let log = Log::of(process.stderr());
        log.line(remedy).unwrap_or_else(|| panic!("{url}: {}", log.text()));
    }
}

#[test]
fn a_password_that_redis_asks_for_later_is_reported_and_counted() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &[]);
    let mut own = redis.connect().expect("it is there");
    ask::<()>(&mut own, &["CONFIG", "SET", "requirepass", "secret"]).unwrap();
    ask::<()>(&mut own, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    let forbidden = || sidecar.metrics().count("redis_errors_total{kind=\"forbidden\"}");
    wait_until("it was tried", || forbidden() > 0);
    sidecar.log().assert_names(&["NOAUTH", "check user and password"]);
    ask::<()>(&mut own, &["CONFIG", "SET", "requirepass", ""]).unwrap();
    sidecar.wait_until_ready();
}
