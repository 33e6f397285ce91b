//! A sidecar whose Redis does not answer yet: its endpoints answer, and a client hears at once that it must wait.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::frames::{self, RETRYABLE};
use crate::support::http;
use crate::support::process::{Log, Process, assert_names};
use crate::support::raw::Raw;
use crate::support::redis::{self, Redis};
use crate::support::sidecar;
use crate::support::wait_until;

/// The code of `starting`.
const STARTING: u16 = 13;

/// A sidecar that waits for its store.
struct Waiting {
    process: Process,
    log: Log,
    listen: SocketAddr,
    admin: SocketAddr,
}

impl Waiting {
    fn on(store: &str) -> Waiting {
        let mut process = Process::spawn(&mut sidecar::serve_at(store, "only", &[]));
        let log = Log::of(process.stderr());
        let line = log.line("opening the store").expect("it says where it listens");
        let address = |key: &str| {
            line.split(' ').find_map(|word| word.strip_prefix(key)).and_then(|value| value.parse().ok()).unwrap()
        };
        let (listen, admin) = (address("listen="), address("admin="));
        Waiting { process, log, listen, admin }
    }

    /// Asserts that the endpoints say that the sidecar waits, and that a Hello is refused, all without a wait.
    fn assert_waits(&self) {
        let begun = Instant::now();
        assert_eq!(http::get(self.admin, "/livez"), (200, String::from("alive\n")));
        for path in ["/readyz", "/status"] {
            let (status, text) = http::get(self.admin, path);
            assert_eq!(status, 503, "{path}: {text}");
            assert_names(&text, &["the store is being opened"]);
        }
        let (status, text) = http::get(self.admin, "/metrics");
        assert_eq!(status, 200, "{text}");
        assert_names(&text, &["ackwheel_store_up 0", "ackwheel_rings 0"]);
        let mut client = Raw::tcp(self.listen);
        let refused = client.ask(&frames::hello((1, 1), b""));
        refused.assert_error(STARTING, RETRYABLE);
        assert_names(refused.text(), &["starting", "connect again"]);
        client.assert_closed();
        assert!(begun.elapsed() < Duration::from_secs(2), "the answers took {:?}", begun.elapsed());
    }
}

#[test]
fn probes_and_clients_are_answered_while_redis_is_awaited() {
    let redis = Redis::start();
    redis.stop();
    let waiting = Waiting::on(&redis.url());
    waiting.assert_waits();
    redis.go_on();
    wait_until("it is ready", || http::get(waiting.admin, "/readyz") == (200, String::from("ready\n")));
    Raw::greeted(waiting.listen).ask(&frames::add(&[1], 15, 1)).added();
}

#[test]
fn a_signal_ends_the_wait_at_once_and_the_socket_goes_too() {
    let redis = Redis::start();
    redis.stop();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut process =
        Process::spawn(&mut sidecar::serve_on(&redis, "only", &["--socket", socket.to_str().unwrap()]));
    let log = Log::of(process.stderr());
    log.line("opening the store").expect("it waits");
    let mut client = Raw::unix(&socket);
    client.ask(&frames::hello((1, 1), b"")).assert_error(STARTING, RETRYABLE);
    let begun = Instant::now();
    process.signal(Signal::TERM);
    assert_eq!(process.exit().code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(2), "it took {:?}", begun.elapsed());
    assert_names(&log.whole(), &["while the store was not open yet"]);
    assert!(!socket.exists(), "the file of the socket is removed");
    redis.go_on();
}

#[test]
fn a_redis_that_never_answers_ends_the_sidecar_with_its_error() {
    let mut waiting = Waiting::on(&format!("redis://127.0.0.1:{}/", redis::free_port()));
    assert_eq!(waiting.process.exit().code(), Some(1));
    assert_names(&waiting.log.whole(), &["--store redis://127.0.0.1"]);
}
