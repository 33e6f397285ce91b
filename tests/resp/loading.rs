//! A sidecar whose store is being opened: commands are answered with LOADING, on which client libraries wait.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::support::certificates::Files;
use crate::support::process::{Log, Process};
use crate::support::redis::{self, Redis};
use crate::support::resp::{Reply, Resp, line};
use crate::support::{sidecar, tls};

/// Starts a sidecar whose Redis is stopped. Returns once it listens.
fn start_on(redis: &Redis, flags: &[&str]) -> (Process, Log, SocketAddr) {
    redis.stop();
    let resp = SocketAddr::from(([127, 0, 0, 1], redis::free_port()));
    let mut command = sidecar::serve_on(redis, "only", flags);
    let mut process = Process::spawn(command.args(["--resp", &resp.to_string()]));
    let log = Log::of(process.stderr());
    log.line("opening the store").expect("it waits");
    (process, log, resp)
}

#[test]
fn a_connection_waits_on_loading_and_is_served_once_the_store_is_open() {
    let redis = Redis::start();
    let (_process, log, resp) = start_on(&redis, &[]);
    let mut client = Resp::connect(resp);
    let ids: Vec<String> = (0..2_000).map(|id| id.to_string()).collect();
    let many = format!("AW.ADD {}", ids.join(" "));
    for text in ["PING", "PING x", "aw.add 1", &many, "AW.DEL 1", "AW.TAKE default BLOCK 0", "AW.STATUS", "AW.ADD"]
    {
        client.ask(text).assert_error("LOADING not applied: this sidecar is starting");
    }
    // Redis answers these while it loads too.
    for text in ["AUTH any", "CLIENT SETINFO LIB-NAME x", "CLIENT SETNAME x", "SELECT 0", "UNWATCH", "DISCARD"] {
        assert_eq!(client.ask(text).text(), "OK", "{text}");
    }
    assert_eq!(client.ask("ECHO x").text(), "x");
    assert!(matches!(client.ask("HELLO 3 SETNAME y"), Reply::Map(_)));
    assert!(client.ask("INFO").text().contains("\r\nloading:1\r\nloading_eta_seconds:1\r\n"));
    client.ask("SET a b").assert_error("ERR unknown command 'SET'");
    let mut closed = Resp::connect(resp);
    closed.send(b"GET / HTTP/1.1\r\n\r\n");
    assert!(closed.rest().starts_with(b"-ERR unknown command 'GET'"), "an unknown line ends the connection");
    let mut quits = Resp::connect(resp);
    quits.send(&line("QUIT"));
    assert_eq!(quits.rest(), b"+OK\r\n");
    let mut transaction = Resp::connect(resp);
    transaction.ask("MULTI").assert_error("NO_TRANSACTIONS ");
    transaction.ask("AW.ADD 9").assert_error("LOADING ");
    redis.go_on();
    log.line(": listening ").expect("the store is open");
    transaction.ask("AW.ADD 9999").assert_error("NO_TRANSACTIONS ");
    transaction.ask("EXEC").assert_error("EXECABORT ");
    assert_eq!(client.ask("PING").text(), "PONG");
    assert_eq!(client.ask("CLIENT GETNAME").text(), "y", "the state of the connection is kept");
    assert_eq!(client.ask("CONFIG GET save"), Reply::Map(Vec::new()));
    assert!(client.ask("INFO").text().contains("\r\nloading:0\r\n"));
    assert_eq!(client.ask(&many).array()[0], Reply::Integer(2_000));
    assert_eq!(transaction.ask("AW.DEL 9999 1").texts(), ["unknown", "acked"]);
}

#[test]
fn over_tls_a_waiting_client_may_send_as_much_as_an_admitted_one() {
    let (redis, (files, trusted)) = (Redis::start(), Files::vouched_for());
    let (_process, log, resp) = start_on(&redis, &files.flags());
    let mut client = Resp::over(tls::connect(&trusted, TcpStream::connect(resp).unwrap()));
    let ids: Vec<String> = (10_000..12_000).map(|id| id.to_string()).collect();
    let many = format!("AW.ADD {}", ids.join(" "));
    // 88 KB, of which a stranger may send 24.
    for _ in 0..4 {
        client.ask(&many).assert_error("LOADING ");
    }
    redis.go_on();
    log.line(": listening ").expect("the store is open");
    assert_eq!(client.ask(&many).array()[0], Reply::Integer(2_000));
}

#[test]
fn a_login_is_checked_while_the_store_is_opened_and_then_waits_without_a_timeout() {
    const TOKEN: &str = "0123456789abcdef-all";
    let (redis, folder) = (Redis::start(), tempfile::tempdir().unwrap());
    let token = folder.path().join("token");
    fs::write(&token, TOKEN).unwrap();
    let flags = ["--token-file", token.to_str().unwrap(), "--hello-timeout", "500ms"];
    let (_process, log, resp) = start_on(&redis, &flags);
    let (mut waits, mut stranger) = (Resp::connect(resp), Resp::connect(resp));
    for text in ["PING", "AW.ADD 1", "INFO", "HELLO 3"] {
        stranger.ask(text).assert_error("NOAUTH ");
    }
    stranger.ask("AUTH wrong").assert_error("WRONGPASS ");
    assert!(matches!(waits.ask(&format!("HELLO 3 AUTH default {TOKEN}")), Reply::Map(_)));
    waits.ask("AW.ADD 1").assert_error("LOADING ");
    waits.ask("AUTH wrong").assert_error("WRONGPASS ");
    assert!(stranger.rest().starts_with(b"-HELLO_TIMEOUT "));
    assert!(waits.is_silent_for(Duration::from_secs(1)), "it is not closed");
    waits.ask("AW.ADD 1").assert_error("LOADING ");
    let mut late = Resp::connect(resp);
    assert_eq!(late.ask(&format!("AUTH {TOKEN}")).text(), "OK");
    redis.go_on();
    log.line(": listening ").expect("the store is open");
    assert_eq!(waits.ask("AW.ADD 1").array()[0], Reply::Integer(1));
    assert_eq!(late.ask("AW.DEL 1").texts(), ["acked"]);
}
