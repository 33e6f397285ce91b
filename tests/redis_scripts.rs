//! Redis forgets its scripts all the time: what was sent is sent again, and no client sees it.

use std::thread;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::support::flow::{Flow, Plan};
use crate::support::frames::{self, ACKED, UNKNOWN};
use crate::support::proxy::Proxy;
use crate::support::redis::{Redis, ask};
use crate::support::sidecar::{Sidecar, serve};
use crate::support::{SLACK, sleep_until, wait_until};

/// Has Redis forget its scripts every few milliseconds for as long as something is done; says how often it did.
fn forgetting<T>(redis: &Redis, done: impl FnOnce() -> T) -> (T, u32) {
    let ended = CancellationToken::new();
    thread::scope(|scope| {
        let flusher = scope.spawn(|| {
            let (mut connection, mut flushes) = (redis.connect().unwrap(), 0);
            while !ended.is_cancelled() {
                ask::<()>(&mut connection, &["SCRIPT", "FLUSH"]).unwrap();
                flushes += 1;
                thread::sleep(Duration::from_millis(3));
            }
            flushes
        });
        let end = ended.clone().drop_guard();
        let result = done();
        drop(end);
        (result, flusher.join().unwrap())
    })
}

#[test]
fn a_flushed_script_cache_reaches_no_client() {
    let redis = Redis::start();
    let [a, b] = ["a", "b"].map(|name| Sidecar::on(&redis, name, &["--tick", "200ms", "--slots", "10"]));
    let (evidence, flushes) = forgetting(&redis, || {
        let (begun, plan) = (Instant::now(), Plan::ten_times_a_second(Duration::from_millis(200), 10));
        let flow = Flow::start(plan, a.listen, b.listen);
        sleep_until(begun + Duration::from_secs(6));
        flow.finish()
    });
    assert_eq!(evidence.errors.len(), 0, "{:?}", evidence.errors);
    let latest = evidence.assert_kept(Duration::from_secs(1) + SLACK);
    println!("the latest came {latest:?} after its tick");
    assert!(flushes > 500, "only {flushes} flushes");
    for sidecar in [&a, &b] {
        let metrics = sidecar.metrics();
        for reason in ["store_away", "store_silent"] {
            assert_eq!(metrics.refusals(reason), 0, "{reason}");
        }
    }
}

#[test]
fn a_connection_keeps_its_order_whatever_is_sent_again() {
    for rings in ["1", "2"] {
        let redis = Redis::start();
        let sidecar = Sidecar::on(&redis, "only", &["--rings", rings]);
        let mut connections = [(); 3].map(|()| sidecar.connect());
        let (overtaken, flushes) = forgetting(&redis, || {
            let mut overtaken = 0;
            for round in 0..40 {
                for (connection, nth) in connections.iter_mut().zip(0..) {
                    let ids = 500 * (3 * round + nth)..500 * (3 * round + nth + 1);
                    for id in ids.clone() {
                        connection.request(&frames::add(&[id], 15, 1));
                    }
                    for id in ids {
                        connection.request(&frames::del(&[id]));
                    }
                }
                for connection in &mut connections {
                    let answers = std::iter::repeat_with(|| connection.next_answer()).take(1_000);
                    let of_dels = answers.filter(|answer| answer.kind == frames::DEL_ANSWER);
                    overtaken += of_dels.filter(|answer| answer.outcomes() != [ACKED]).count();
                }
            }
            overtaken
        });
        assert_eq!(overtaken, 0, "of 60,000 Acks, with {rings} rings and {flushes} flushes");
        assert!(flushes > 20, "only {flushes} flushes");
    }
}

#[test]
fn a_script_whose_loading_is_never_answered_holds_nobody_up() {
    let redis = Redis::start();
    let way = Proxy::to(redis.port);
    let sidecar = Sidecar::spawn(&mut serve(&["--store", &way.url(), "--outage-grace", "0s"]));
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2], 15, 1)).added();
    way.hold_a_load();
    redis.command::<()>(&["SCRIPT", "FLUSH"]);
    let held = connection.request(&frames::del(&[1]));
    wait_until("the load is under way", || way.holding() == 1);
    assert_eq!(connection.answer(held).outcomes(), [ACKED], "by a new connection");
    assert_eq!(connection.ask(&frames::del(&[2])).outcomes(), [ACKED]);
    assert!(sidecar.metrics().count("redis_reconnects_total") >= 1);
    way.let_go();
}

/// A chunk on its way has the number of one that is in the link again, since Redis went back to an earlier state.
#[test]
fn an_answer_from_before_redis_lost_writes_is_not_taken_for_another() {
    let redis = Redis::start();
    let way = Proxy::to(redis.port);
    let sidecar = Sidecar::spawn(&mut serve(&["--store", &way.url(), "--outage-grace", "0s"]));
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1, 2], 15, 1)).added();
    assert_eq!(connection.ask(&frames::del(&[1])).outcomes(), [ACKED]);
    let [link] = &redis.command::<Vec<String>>(&["KEYS", "{ackwheel:0}:link:*"])[..] else {
        panic!("one sidecar")
    };
    let chunk = |link: &str| redis.command::<u64>(&["HGET", link, "chunk"]);
    let earlier: Vec<String> = redis.command(&["HGETALL", link]);
    assert_eq!(chunk(link), 2);

    redis.command::<()>(&["HSET", link, "chunk", "0"]);
    assert_eq!(connection.ask(&frames::del(&[3])).outcomes(), [UNKNOWN], "by a new session");
    assert_eq!(chunk(link), 1);
    way.hold_a_request();
    let held = connection.request(&frames::del(&[2]));
    wait_until("a request is held", || way.holding() == 1);
    let restore: Vec<&str> = ["HSET", link].into_iter().chain(earlier.iter().map(String::as_str)).collect();
    redis.command::<()>(&restore);
    assert_eq!(connection.answer(held).outcomes(), [ACKED]);
    assert_eq!(
        connection.ask(&frames::del(&[2])).outcomes(),
        [UNKNOWN],
        "it was acknowledged, and not only said to be"
    );
    way.let_go();
}
