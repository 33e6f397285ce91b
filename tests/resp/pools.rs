//! The commands that connection pools and health checks send at check-out and check-in, and the replies that they need.
//! `.ci/resp-clients` runs real pools.

use super::deliveries::{FAST, take};
use crate::support::resp::{Reply, Resp, command, start};

/// A pool: its name, and the commands of one borrow with the beginnings of the replies that it accepts. With any other
/// reply, it closes the connection and opens another one.
type Pool = (&'static str, &'static [(&'static [&'static str], &'static str)]);

const POOLS: &[Pool] = &[
    ("deadpool-redis", &[(&["UNWATCH"], "+OK\r\n"), (&["PING", "17"], "$2\r\n17\r\n")]),
    ("bb8-redis, r2d2, mobc, generic-pool", &[(&["PING"], "+PONG\r\n")]),
    ("redis-py, health check", &[(&["PING"], "+PONG\r\n")]),
    ("redis-py, pipeline that is reset", &[(&["UNWATCH"], "+OK\r\n")]),
    ("phpredis, pconnect", &[(&["ECHO", "phpredis_5e1a"], "$13\r\nphpredis_5e1a\r\n")]),
    (
        "phpredis, pconnect with a password and a database",
        &[
            (&["AUTH", "token"], "+OK\r\n"),
            (&["ECHO", "phpredis_5e1a"], "$13\r\nphpredis_5e1a\r\n"),
            (&["SELECT", "0"], "+OK\r\n"),
        ],
    ),
    ("redigo, at check-in", &[(&["DISCARD"], "+OK\r\n"), (&["UNWATCH"], "+OK\r\n"), (&["PING"], "+PONG\r\n")]),
    ("Jedis, JedisPool", &[(&["PING"], "+PONG\r\n"), (&["SELECT", "0"], "+OK\r\n"), (&["UNWATCH"], "+OK\r\n")]),
    ("Spring Data Redis over Lettuce", &[(&["PING"], "+PONG\r\n"), (&["DISCARD"], "+OK\r\n")]),
    ("Spring Boot, health", &[(&["INFO"], "$"), (&["INFO", "server"], "$")]),
    ("Redisson, ping", &[(&["PING"], "+PONG\r\n"), (&["CLIENT", "NO-EVICT", "ON"], "+OK\r\n")]),
    ("StackExchange.Redis, heartbeat", &[(&["ECHO", "0123456789abcdef"], "$16\r\n0123456789abcdef\r\n")]),
    ("ServiceStack.Redis", &[(&["ROLE"], "*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"), (&["UNWATCH"], "+OK\r\n")]),
    ("valkey-glide", &[(&["INFO", "REPLICATION"], "$"), (&["PING"], "+PONG\r\n")]),
    ("a pool that undoes CLIENT REPLY", &[(&["CLIENT", "REPLY", "ON"], "+OK\r\n")]),
    ("a pool that interrupts waiting commands", &[(&["CLIENT", "UNBLOCK", "1"], ":0\r\n")]),
    ("HAProxy, Envoy, Kubernetes", &[(&["PING"], "+PONG\r\n"), (&["INFO", "replication"], "$")]),
];

#[test]
fn a_batch_in_hand_outlives_the_check_in_and_check_out_of_every_pool() {
    for (pool, commands) in POOLS {
        let sidecar = start(&FAST);
        let mut client = Resp::to(&sidecar);
        client.ask("AW.ADD TIMEOUT 1 1:7");
        let batch = take(&mut client, "");
        for _ in 0..50 {
            for (words, wanted) in *commands {
                client.send(&command(words));
                let reply = client.receive_bytes();
                assert!(reply.starts_with(wanted), "{pool}: {words:?}: {reply:?} and not {wanted:?}");
            }
        }
        assert_eq!(client.ask("AW.TAKE default"), Reply::Array(Vec::new()), "{pool}: the batch is still in hand");
        assert_eq!(client.ask(&format!("AW.ACK default {}", batch.batch)), Reply::Integer(1), "{pool}");
        let metrics = sidecar.metrics();
        assert_eq!(metrics.find("ackwheel_batches_redelivered_total"), Some(0.0), "{pool}");
        assert_eq!(metrics.find("ackwheel_connections_opened_total"), Some(1.0), "{pool}");
    }
}

/// Pools that send RESET at check-in, as node-redis and redis-py do for a connection that has changed its state.
#[test]
fn a_reset_at_check_in_returns_the_batches_and_keeps_the_connection() {
    let sidecar = start(&FAST);
    let mut client = Resp::to(&sidecar);
    client.ask("HELLO 3 SETNAME borrowed");
    client.ask("AW.ADD TIMEOUT 1 1:7");
    let batch = take(&mut client, "");
    client.ask("MULTI").assert_error("NO_TRANSACTIONS ");
    assert_eq!(client.ask("RESET"), Reply::Simple(String::from("RESET")));
    assert_eq!(client.ask("CLIENT GETNAME"), Reply::Null);
    assert_eq!(client.ask("CONFIG GET save"), Reply::Array(Vec::new()), "RESP2 again");
    let again = take(&mut client, "");
    assert_eq!((again.batch, again.delivery), (batch.batch, 2));
}
