//! Redis stalls, dies, comes back with everything or with nothing, or is read-only for a while.

use std::collections::BTreeSet;
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use crate::support::flow::{Flow, Plan};
use crate::support::frames::{self, ACKED, Frame, OUTCOME_UNKNOWN, RETRYABLE, UNKNOWN};
use crate::support::process::assert_names;
use crate::support::raw::Raw;
use crate::support::redis::{Redis, ask};
use crate::support::sidecar::Sidecar;
use crate::support::{PATIENCE, SLACK, sleep_until, wait_for, wait_until};

const STORE_AWAY: u16 = 66;
const STORE_SILENT: u16 = 67;
pub const MAX_HELD_ACKS: u16 = 68;

/// Settings under which nobody is judged silent within 20 s: Pings are answered only while something is read.
pub const PATIENT: [&str; 4] = ["--tick", "200ms", "--slots", "150"];

/// Two sidecars on one Redis.
fn two(redis: &Redis, flags: &[&str]) -> [Sidecar; 2] {
    ["a", "b"].map(|name| Sidecar::on(redis, name, flags))
}

/// Asserts that it is an Error of a store that is away, with either of the two promises.
#[track_caller]
fn assert_store_error(answer: &Frame) {
    match answer.status {
        STORE_SILENT => answer.assert_error(STORE_SILENT, OUTCOME_UNKNOWN | RETRYABLE),
        _ => answer.assert_error(STORE_AWAY, RETRYABLE),
    }
}

/// Takes batches until all of these were in one; returns all ids that were, in order.
pub fn take_until(subscriber: &mut Raw, expected: &[u64]) -> Vec<u64> {
    let mut ids: Vec<u64> = Vec::new();
    while !expected.iter().all(|id| ids.contains(id)) {
        ids.extend(subscriber.settled_batch().ids());
    }
    ids.sort_unstable();
    ids
}

/// Sends DelMsgs of a hundred ids each; returns their correlation ids.
fn send_acks(connection: &mut Raw, ids: std::ops::RangeInclusive<u64>) -> Vec<u32> {
    let ids: Vec<u64> = ids.collect();
    ids.chunks(100).map(|ids| connection.request(&frames::del(ids))).collect()
}

#[test]
fn acks_sent_while_redis_stalls_count() {
    let redis = Redis::start();
    // Twice the usual slots, so that nobody is judged silent who does not read for 20 s.
    let [a, b] = two(&redis, &["--slots", "30"]);
    let mut subscriber = b.connect().subscribed("default");
    let [mut first, mut second, mut third, mut adder] = [&a, &b, &a, &a].map(Sidecar::connect);
    // The last hundred stay silent.
    let asked = Instant::now();
    first.ask(&frames::add(&(1..=1_100).collect::<Vec<_>>(), 15, 1)).added();
    let shifted_ticks =
        || [&a, &b].iter().map(|sidecar| sidecar.metrics().count("shifted_ticks_total")).sum::<u64>();
    let shifted_before = shifted_ticks();
    redis.stop();
    let stopped = Instant::now();
    let waiting = [send_acks(&mut first, 1..=500), send_acks(&mut second, 501..=900)];
    send_acks(&mut third, 901..=1_000);

    let refused = Instant::now();
    assert_store_error(&adder.ask(&frames::add(&[2_000], 15, 1)));
    assert!(refused.elapsed() < Duration::from_secs(2), "refused after {:?}", refused.elapsed());
    for sidecar in [&a, &b] {
        wait_until("it is not ready", || !sidecar.is_ready());
        assert_eq!(sidecar.get("/livez").0, 200);
        assert_eq!(sidecar.metrics().count("store_up"), 0);
    }
    // Known to be away: refused at once, and not applied.
    let refused = Instant::now();
    adder.ask(&frames::add(&[2_001], 15, 1)).assert_error(STORE_AWAY, RETRYABLE);
    assert!(refused.elapsed() < Duration::from_millis(100) + SLACK, "refused after {:?}", refused.elapsed());
    wait_until("all are held", || a.metrics().count("held_acks") == 600 && b.metrics().count("held_acks") == 400);
    drop(third);

    sleep_until(stopped + Duration::from_secs(6));
    let went_on = Instant::now();
    redis.go_on();
    for sidecar in [&a, &b] {
        sidecar.wait_until_ready();
        assert!(went_on.elapsed() < Duration::from_secs(8), "ready after {:?}", went_on.elapsed());
    }
    for (connection, waiting) in [&mut first, &mut second].into_iter().zip(waiting) {
        for correlation in waiting {
            assert_eq!(connection.answer(correlation).outcomes(), [ACKED; 100]);
        }
    }
    let silent: Vec<u64> = (1_001..=1_100).collect();
    let mut ids = take_until(&mut subscriber, &silent);
    // The first of the adds may have reached Redis: its outcome was unknown.
    ids.retain(|id| *id != 2_000);
    assert_eq!(ids, silent);
    assert!(asked.elapsed() >= Duration::from_secs(15), "early: {:?}", asked.elapsed());
    assert_eq!([&a, &b].map(|sidecar| sidecar.metrics().count("held_acks")), [0, 0]);
    let shifted = shifted_ticks() - shifted_before;
    assert!((5..=15).contains(&shifted), "6 s without Redis, and the grace, are counted as {shifted} ticks");
    let waited = wait_for("a person is told", || {
        [&a, &b].iter().find_map(|sidecar| shifted_after_outage(&sidecar.log().text()))
    });
    assert!(
        (1.9..12.0).contains(&waited),
        "the pointer moved {waited} s after Redis was back: Acks are held elsewhere"
    );
}

/// How many seconds after Redis was back a shift was told, by the log of a sidecar.
fn shifted_after_outage(log: &str) -> Option<f64> {
    let mut lines = log.lines().skip_while(|line| !line.contains("Redis is back"));
    let back = time_of_day(lines.next()?);
    let shifted = time_of_day(lines.find(|line| line.contains("every deadline is shifted"))?);
    Some((shifted - back).rem_euclid(86_400.0))
}

/// When a line was logged, in seconds.
fn time_of_day(line: &str) -> f64 {
    let (_, time) = line.split_once('T').expect("a line begins with its time");
    let parts = time[..15].split(':').map(|part| part.parse::<f64>().expect("hours, minutes, seconds"));
    parts.fold(0.0, |sum, part| sum * 60.0 + part)
}

#[test]
fn a_redis_that_comes_back_with_its_file_has_lost_nothing() {
    let mut redis = Redis::with_append_only_file();
    let [a, b] = two(&redis, &["--tick", "500ms", "--slots", "8"]);
    let (begun, plan) = (Instant::now(), Plan::ten_times_a_second(Duration::from_millis(500), 8));
    let flow = Flow::start(plan, a.listen, b.listen);
    sleep_until(begun + Duration::from_secs(6));
    redis.kill();
    wait_until("it is noticed", || !a.is_ready() && !b.is_ready());
    sleep_until(begun + Duration::from_secs(8));
    redis.restart();
    let back = Instant::now();
    for sidecar in [&a, &b] {
        sidecar.wait_until_ready();
    }
    println!("ready {:?} after Redis was back", back.elapsed());
    sleep_until(back + Duration::from_secs(6));
    let evidence = flow.finish();
    let latest = evidence.assert_kept(PATIENCE);
    println!("the latest came {latest:?} after its tick; errors: {:?}", evidence.errors);
    let known = [STORE_AWAY, STORE_SILENT];
    assert!(evidence.errors.keys().all(|code| known.contains(code)), "{:?}", evidence.errors);
    let lost: f64 = [&a, &b].iter().map(|sidecar| sidecar.metrics().sum("redis_lost_total")).sum();
    assert!(lost.abs() < 0.5, "nothing was lost, and {lost} times it was said");
}

#[test]
fn a_redis_that_comes_back_empty_is_noticed_said_and_served() {
    let mut redis = Redis::start();
    let [a, b] = two(&redis, &PATIENT);
    let mut subscriber = b.connect().subscribed("default");
    let mut adder = a.connect();
    adder.ask(&frames::add(&[1], 1, 1)).added();
    let before = subscriber.settled_batch();
    assert_eq!(before.ids(), [1]);
    adder.ask(&frames::add(&[2], 150, 1)).added();

    redis.restart_empty();
    for sidecar in [&a, &b] {
        wait_until("it is counted", || sidecar.metrics().sum("redis_lost_total") > 0.5);
        wait_until("a person is told", || sidecar.log().text().to_lowercase().contains("lost"));
        sidecar.wait_until_ready();
    }
    wait_until("there is a leader again", || {
        let status = a.status();
        status.rings[0].leader.is_some() && status.rings[0].epoch > before.epoch
    });
    wait_until("what is added is accepted", || {
        let answer = adder.ask(&frames::add(&[3], 2, 1));
        if answer.kind == frames::ERROR {
            assert_store_error(&answer);
        }
        answer.kind == frames::ADD_ANSWER
    });
    let after = subscriber.settled_batch();
    assert_eq!((after.ids(), after.delivery), (vec![3], 1), "message 2 went with Redis");
    assert!(after.epoch > before.epoch, "{} came after {}", after.epoch, before.epoch);
    assert!(after.tick > before.tick, "the new ring begins at the time, and the old one did too");
}

#[test]
fn a_redis_that_was_read_only_is_written_to_again() {
    refuses_writes(&["REPLICAOF", "127.0.0.1", "1"], &["REPLICAOF", "NO", "ONE"], "readonly");
}

#[test]
fn a_redis_with_too_few_replicas_is_written_to_again() {
    let set = |least| ["CONFIG", "SET", "min-replicas-to-write", least];
    refuses_writes(&set("1"), &set("0"), "unwritable");
}

fn refuses_writes(begin: &[&str], end: &[&str], kind: &str) {
    let redis = Redis::start();
    let [a, b] = two(&redis, &PATIENT);
    let mut subscriber = b.connect().subscribed("default");
    let [mut acker, mut adder] = [&a, &a].map(Sidecar::connect);
    adder.ask(&frames::add(&[1, 2], 40, 1)).added();
    redis.command::<()>(begin);
    let acked = acker.request(&frames::del(&[1]));
    let refused = Instant::now();
    assert_store_error(&adder.ask(&frames::add(&[3], 15, 1)));
    assert!(refused.elapsed() < Duration::from_secs(2), "refused after {:?}", refused.elapsed());
    wait_until("it is not ready", || !a.is_ready());
    adder.ask(&frames::add(&[3], 15, 1)).assert_error(STORE_AWAY, RETRYABLE);
    // Also while no connection can be made.
    let refused = format!("redis_errors_total{{kind=\"{kind}\"}}");
    let before = a.metrics().count(&refused);
    wait_until("each attempt is counted by its cause", || a.metrics().count(&refused) > before + 3);

    redis.command::<()>(end);
    for sidecar in [&a, &b] {
        sidecar.wait_until_ready();
    }
    assert_eq!(acker.answer(acked).outcomes(), [ACKED]);
    wait_until("what is added is accepted", || adder.ask(&frames::add(&[4], 15, 1)).kind == frames::ADD_ANSWER);
    let mut ids = take_until(&mut subscriber, &[2, 4]);
    ids.retain(|id| *id != 3);
    assert_eq!(ids, [2, 4]);
}

#[test]
fn no_more_acks_are_held_than_may_be() {
    let redis = Redis::start();
    let a = Sidecar::on(&redis, "a", &[&PATIENT[..], &["--max-held-acks", "10"]].concat());
    let [mut acker, mut other] = [&a, &a].map(Sidecar::connect);
    acker.ask(&frames::add(&(1..=11).collect::<Vec<_>>(), 150, 1)).added();
    redis.stop();
    assert_store_error(&other.ask(&frames::add(&[12], 15, 1)));
    wait_until("it is not ready", || !a.is_ready());
    let held: Vec<u32> = (1..=10).map(|id| acker.request(&frames::del(&[id]))).collect();
    wait_until("all are held", || a.metrics().count("held_acks") == 10);
    let refused = Instant::now();
    other.ask(&frames::del(&[11])).assert_error(MAX_HELD_ACKS, RETRYABLE);
    assert!(refused.elapsed() < Duration::from_millis(100) + SLACK, "refused after {:?}", refused.elapsed());
    assert_eq!(a.metrics().refusals("max_held_acks"), 1);
    a.log().line("raise --max-held-acks").expect("it is an error, whose clients are reported offline");
    redis.go_on();
    for correlation in held {
        assert_eq!(acker.answer(correlation).outcomes(), [ACKED]);
    }
    a.wait_until_ready();
    assert_eq!(other.ask(&frames::del(&[11])).outcomes(), [ACKED]);
}

#[test]
fn a_half_closed_connection_is_answered_when_redis_is_back() {
    let redis = Redis::start();
    // A peer that is silent for 2 s gets a GoAway.
    let sidecar = Sidecar::on(&redis, "only", &["--tick", "200ms", "--slots", "15"]);
    let stream = TcpStream::connect(sidecar.listen).unwrap();
    let mut connection = Raw::over_tcp(stream.try_clone().unwrap()).greet();
    connection.ask(&frames::add(&[1], 15, 1)).added();
    redis.stop();
    let held = connection.request(&frames::del(&[1]));
    stream.shutdown(Shutdown::Write).unwrap();
    wait_until("it is held", || sidecar.metrics().count("held_acks") == 1);
    sleep_until(Instant::now() + Duration::from_secs(4));
    redis.go_on();
    assert_eq!(connection.answer(held).outcomes(), [ACKED]);
    assert_eq!(sidecar.metrics().refusals("silent"), 0);
    connection.assert_closed();

    // A disconnected client does not wait.
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[2], 15, 1)).added();
    redis.stop();
    connection.request(&frames::del(&[2]));
    wait_until("it is held", || sidecar.metrics().count("held_acks") == 1);
    // Nothing is left unread, which would tell the server at once.
    connection.ask(&frames::ping(b"there"));
    drop(connection);
    wait_until("its place is free", || sidecar.metrics().connections() == 0);
    redis.go_on();
    sidecar.wait_until_ready();
    let again = sidecar.connect().ask(&frames::del(&[2]));
    assert_eq!(again.outcomes(), [UNKNOWN], "its Ack was applied all the same");
}

#[test]
fn a_connection_is_heard_however_many_of_its_acks_are_held() {
    const ACKS: u64 = 3_000;
    let redis = Redis::start();
    let leader = Sidecar::on(&redis, "leader", &PATIENT);
    wait_until("it leads", || leader.leader().is_some());
    // One that follows: nothing but its connections can move it while Redis stalls.
    let sidecar = Sidecar::on(&redis, "follower", &[&PATIENT[..], &["--never-lead"]].concat());
    let ids: Vec<u64> = (1..=ACKS).collect();
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&ids, 150, 1)).added();
    redis.stop();
    let mut held: BTreeSet<u32> = ids.iter().map(|id| connection.request(&frames::del(&[*id]))).collect();
    let asked = Instant::now();
    let mut answers = Vec::new();
    let waiting =
        [connection.request(&frames::add(&[ACKS + 1], 150, 1)), connection.request(&frames::ping(b"you"))];
    for _ in waiting {
        answers.push(connection.next_answer());
    }
    assert!(asked.elapsed() < Duration::from_secs(2) + SLACK, "answered after {:?}", asked.elapsed());
    answers.sort_by_key(|answer| answer.correlation);
    assert_eq!([answers[0].correlation, answers[1].correlation], waiting);
    assert_store_error(&answers[0]);
    assert_eq!((answers[1].kind, &answers[1].body[..]), (frames::PONG, &b"you"[..]));
    wait_until("all are held", || sidecar.metrics().count("held_acks") == ACKS);
    assert_names(sidecar.run(&["status"]).error(1), &["503", "store_away"]);

    redis.go_on();
    while !held.is_empty() {
        let answer = connection.next_answer();
        assert!(held.remove(&answer.correlation), "{answer:?}");
        assert_eq!(answer.outcomes(), [ACKED]);
    }
}

#[test]
fn a_pause_of_the_sidecar_is_no_silence_of_redis() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &[]);
    let mut connection = sidecar.connect();
    for round in 0..8 {
        let ids: Vec<u64> = (20_000 * round..20_000 * (round + 1)).collect();
        // Some of it is on its way to Redis, or back, when the sidecar stops.
        for some in ids.chunks(50) {
            connection.request(&frames::add(some, 15, 1));
        }
        sidecar.stop();
        std::thread::sleep(Duration::from_secs(1));
        sidecar.go_on();
        for _ in ids.chunks(50) {
            connection.next_answer().added();
        }
    }
    let metrics = sidecar.metrics();
    assert_eq!(
        (metrics.count("redis_errors_total{kind=\"timeout\"}"), metrics.count("redis_reconnects_total")),
        (0, 0)
    );
}

#[test]
fn acks_sent_while_somebody_elses_script_runs_without_end_count() {
    let redis = Redis::start();
    let sidecar = Sidecar::on(&redis, "only", &[]);
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 10, 1)).added();
    redis.command::<()>(&["CONFIG", "SET", "busy-reply-threshold", "1"]);
    let mut endless = redis.connect().expect("it is there");
    let endless = std::thread::spawn(move || ask::<()>(&mut endless, &["EVAL", "while true do end", "0"]));
    wait_until("Redis is busy", || {
        redis.try_command::<()>(&["PING"]).is_err_and(|error| error.code() == Some("BUSY"))
    });
    connection.request(&frames::del(&[1]));
    wait_until("the sidecar has seen it", || sidecar.metrics().value("redis_errors_total{kind=\"busy\"}") > 0.0);
    redis.command::<()>(&["SCRIPT", "KILL"]);
    assert_eq!(connection.next_answer().outcomes(), [ACKED]);
    endless.join().expect("it does not panic").expect_err("it was killed");
}

#[test]
fn requests_sent_before_a_connection_broke_are_done_and_counted() {
    for rings in ["1", "2"] {
        let redis = Redis::start();
        let sidecar = Sidecar::on(&redis, "only", &["--rings", rings]);
        let mut connection = sidecar.connect();
        let ids: Vec<u64> = (1..=300).collect();
        connection.ask(&frames::add(&ids, 15, 1)).added();
        redis.stop();
        send_acks(&mut connection, 1..=300);
        wait_until("all are held", || sidecar.metrics().count("held_acks") == 300);
        connection.reset();
        wait_until("it is gone", || sidecar.metrics().connections() == 0);
        redis.go_on();
        let acked = "messages_acked_total{outcome=\"acked\"}";
        wait_until("all are counted", || sidecar.metrics().count(acked) == 300);
    }
}

#[test]
fn refusals_to_a_broken_connection_are_counted() {
    for rings in ["1", "2"] {
        let redis = Redis::start();
        let sidecar = Sidecar::on(&redis, "only", &["--rings", rings]);
        let mut connection = sidecar.connect();
        redis.stop();
        for id in 1..=3 {
            connection.request(&frames::add(&[id], 15, 1));
        }
        let read = connection.request(&frames::ping(b"all before it were read"));
        connection.answer(read);
        connection.reset();
        let refused = || {
            let metrics = sidecar.metrics();
            metrics.refusals("store_silent") + metrics.refusals("store_away")
        };
        wait_until("all are counted", || refused() == 3);
    }
}

#[test]
fn a_sidecar_that_starts_while_redis_loads_its_file_waits_for_it() {
    let redis = Redis::start();
    redis.command::<()>(&["EVAL", "for i = 1, 2000 do redis.call('SET', 'key:' .. i, i) end", "0"]);
    // In µs a key, and answering others meanwhile.
    redis.command::<()>(&[
        "CONFIG",
        "SET",
        "key-load-delay",
        "500",
        "loading-process-events-interval-bytes",
        "1024",
    ]);
    std::thread::scope(|scope| {
        scope.spawn(|| redis.command::<()>(&["DEBUG", "RELOAD"]));
        wait_until("it loads", || {
            redis.try_command::<String>(&["GET", "key:1"]).is_err_and(|error| error.to_string().contains("oading"))
        });
        let sidecar = Sidecar::on(&redis, "only", &[]);
        sidecar.log().assert_names(&["WARN", "does not serve yet", "oading"]);
        sidecar.connect().ask(&frames::add(&[1], 15, 1)).added();
    });
}
