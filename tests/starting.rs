//! A sidecar whose Redis does not answer yet: its endpoints answer, and a client hears at once that it must wait.

use std::io::Read;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::frames::{self, RETRYABLE};
use crate::support::http;
use crate::support::process::{Log, Process, Run, assert_names, program};
use crate::support::raw::Raw;
use crate::support::redis::{self, Redis};
use crate::support::sidecar::{self, Sidecar};
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

/// The verbs that wait, each with a command that succeeds once the sidecar has started.
fn verbs(listen: SocketAddr, admin: SocketAddr) -> Vec<Process> {
    let (listen, admin) = (listen.to_string(), admin.to_string());
    let verb = |arguments: &[&str]| Process::spawn(program(arguments).args(["--timeout", "1m"]));
    let over_listen = [&["add", "1"][..], &["del", "1"], &["get", "1"], &["ping"]];
    let mut verbs: Vec<_> =
        over_listen.iter().map(|arguments| verb(&[arguments, &["--addr", &listen][..]].concat())).collect();
    verbs.push(verb(&["status", "--admin", &admin]));
    verbs.push(verb(&["group", "list", "--admin", &admin]));
    verbs.push(verb(&["consume", "--group", "default", "--count", "1", "--addr", &listen]));
    verbs.push(verb(&["watch", "--count", "1", "--addr", &listen]));
    verbs
}

/// Asserts that all verbs succeed. Those that wait for a batch get one.
fn assert_succeed(verbs: &mut [Process], listen: SocketAddr) {
    let (mut adding, mut id) = (Raw::greeted(listen), 1);
    wait_until("all verbs end", || {
        id += 1;
        adding.ask(&frames::add(&[id], 1, 1)).added();
        verbs.iter_mut().all(|verb| verb.exited().is_some())
    });
    for verb in verbs {
        let mut text = String::new();
        verb.stderr().read_to_string(&mut text).unwrap();
        assert_eq!(verb.exit().code(), Some(0), "{text}");
    }
}

#[test]
fn verbs_wait_for_a_sidecar_whose_store_is_not_open_yet() {
    let redis = Redis::start();
    redis.stop();
    let waiting = Waiting::on(&redis.url());
    let mut verbs = verbs(waiting.listen, waiting.admin);
    let refused = || http::Metrics::parse(&http::get(waiting.admin, "/metrics").1).refusals("starting");
    // Six verbs connect to --listen.
    wait_until("each has been refused, and tries again", || refused() >= 24);
    assert!(verbs.iter_mut().all(|verb| verb.exited().is_none()), "none has given up");
    redis.go_on();
    wait_until("it is ready", || http::get(waiting.admin, "/readyz") == (200, String::from("ready\n")));
    assert_succeed(&mut verbs, waiting.listen);
}

#[test]
fn verbs_wait_for_a_sidecar_that_does_not_listen_yet() {
    let [listen, admin] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], redis::free_port())));
    let mut verbs = verbs(listen, admin);
    let mut command =
        program(&["serve", "--tick", "100ms", "--listen", &listen.to_string(), "--admin", &admin.to_string()]);
    let _sidecar = Sidecar::spawn(&mut command);
    assert_succeed(&mut verbs, listen);
}

#[test]
fn a_verb_that_waits_in_vain_says_why() {
    let redis = Redis::start();
    redis.stop();
    let waiting = Waiting::on(&redis.url());
    let [listen, admin] = [waiting.listen, waiting.admin].map(|address| address.to_string());
    let run = Run::of(&mut program(&["add", "1", "--timeout", "300ms", "--addr", &listen]));
    assert_names(run.error(1), &["(starting)"]);
    let run = Run::of(&mut program(&["status", "--timeout", "300ms", "--admin", &admin]));
    assert_names(run.error(1), &["the store is being opened"]);
    redis.go_on();
}
