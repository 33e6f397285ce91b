//! The RESP protocol with a store in Redis.

use std::time::{Duration, Instant};

use super::deliveries::take;
use crate::support::redis::Redis;
use crate::support::resp::{Reply, Resp, line};
use crate::support::sidecar::{Sidecar, serve_on};
use crate::support::wait_until;

fn start_on(redis: &Redis, name: &str, flags: &[&str]) -> Sidecar {
    Sidecar::spawn(serve_on(redis, name, flags).args(["--resp", "127.0.0.1:0"])).once_ready()
}

#[test]
fn replies_keep_their_order_over_several_rings() {
    let redis = Redis::start();
    let sidecar = start_on(&redis, "a", &["--rings", "4"]);
    let mut client = Resp::to(&sidecar);
    let mut pipeline = Vec::new();
    for id in 0..200 {
        pipeline.extend(line(&format!("AW.ADD {id} {} {}", id + 1_000, id + 2_000)));
        pipeline.extend(line(&format!("AW.DEL {id} {} 77777", id + 1_000)));
        pipeline.extend(line(&format!("ECHO {id}")));
        pipeline.extend(line(&format!("AW.GET {} {id}", id + 2_000)));
        pipeline.extend(line(&format!("AW.DEL {id}")));
    }
    client.send(&pipeline);
    for id in 0..200 {
        assert_eq!(client.receive().array()[0], Reply::Integer(3));
        assert_eq!(client.receive().texts(), ["acked", "acked", "unknown"]);
        assert_eq!(client.receive().text(), id.to_string());
        let states = client.receive();
        let names: Vec<&str> = states.array().iter().map(|state| state.array()[0].text()).collect();
        assert_eq!(names, ["in_flight", "unknown"]);
        assert_eq!(client.receive().texts(), ["unknown"]);
    }
}

#[test]
fn a_batch_of_a_connection_that_ended_goes_to_another_sidecar_at_once() {
    let redis = Redis::start();
    let fast = ["--tick", "200ms", "--slots", "5"];
    let (first, second) = (start_on(&redis, "a", &fast), start_on(&redis, "b", &fast));
    let (mut dies, mut waits) = (Resp::to(&first), Resp::to(&second));
    dies.ask("AW.ADD TIMEOUT 1 1");
    let batch = take(&mut dies, "");
    waits.send(&line("AW.TAKE default BLOCK 15000"));
    assert!(waits.is_silent_for(Duration::from_millis(500)));
    let died = Instant::now();
    drop(dies);
    let again = waits.receive().batches();
    assert_eq!((&again[0].batch, again[0].delivery), (&batch.batch, 2));
    assert!(died.elapsed() < Duration::from_secs(5), "{:?}", died.elapsed());
    assert_eq!(Resp::to(&first).ask(&format!("AW.ACK default {}", batch.batch)), Reply::Integer(1));
    second.wait_for_settled("default");
}

#[test]
fn acks_are_held_while_redis_is_unreachable_and_stall_no_reply_behind_them() {
    let redis = Redis::start();
    let sidecar = start_on(&redis, "a", &[]);
    let mut client = Resp::to(&sidecar);
    client.ask("AW.ADD 1 2 3");
    redis.stop();
    let began = Instant::now();
    client.send(&[line("AW.DEL 1 2"), line("PING"), line("AW.ADD 4"), line("AW.TAKE default")].concat());
    assert_eq!(client.receive().texts(), ["held", "held"]);
    assert_eq!(client.receive().text(), "PONG");
    client.send(&line("AW.GET 1"));
    let refused = client.receive();
    assert!(matches!(&refused, Reply::Error(text) if text.starts_with("STORE_")), "{refused:?}");
    let _ = client.receive();
    let get = client.receive();
    assert!(matches!(&get, Reply::Error(text) if text.starts_with("STORE_")), "{get:?}");
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    redis.go_on();
    wait_until("the held Acks are applied", || sidecar.metrics().acked("acked") == 2);
    assert_eq!(client.ask("AW.DEL 1 2 3").texts(), ["unknown", "unknown", "acked"]);
}
