//! The admin endpoints: what they say, and that nobody can hold them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ackwheel::core::{RingStatus, Tick, TickReport};
use base64::Engine as _;
use ring::digest::{SHA256, digest};

use crate::support::frames;
use crate::support::http;
use crate::support::process::Run;
use crate::support::redis::Redis;
use crate::support::sidecar::{Sidecar, serve};
use crate::support::{wait_for, wait_until};

#[test]
fn the_routes_are_there_and_elsewhere_is_a_sign_post() {
    let sidecar = Sidecar::start(&[]);
    assert_eq!(sidecar.get("/livez"), (200, String::from("alive\n")));
    assert_eq!(sidecar.get("/readyz"), (200, String::from("ready\n")));
    let (code, text) = sidecar.get("/nowhere");
    assert_eq!(code, 404);
    assert!(
        [" / ", "/metrics", "/livez", "/readyz", "/status"].iter().all(|route| text.contains(route)),
        "{text}"
    );
}

#[test]
fn connections_that_ask_nothing_hold_up_neither_the_admin_port_nor_the_data_port() {
    let sidecar = Sidecar::start(&[]);
    // Three hundred are more than there may be; half of them say something, and no request.
    let idle: Vec<TcpStream> = (0..300)
        .map(|number| {
            let mut stream = TcpStream::connect(sidecar.admin).unwrap();
            stream.write_all(&b"GET /livez HT"[..number % 2 * 13]).unwrap();
            stream
        })
        .collect();
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 0, 1)).added();
    // They would hold it up until they are closed, after five seconds, had they places that nobody else gets.
    let asked = Instant::now();
    assert_eq!(sidecar.get("/livez").0, 200);
    assert!(asked.elapsed() < Duration::from_secs(4), "answered after {:?}", asked.elapsed());
    drop(idle);
}

#[test]
fn idle_admin_connections_do_not_close_one_that_sends_a_request() {
    let redis = Redis::start();
    let sidecar = Sidecar::start(&["--store", &redis.url()]);
    redis.stop();
    let mut asking: Vec<TcpStream> = (0..4).map(|_| TcpStream::connect(sidecar.admin).unwrap()).collect();
    for stream in &mut asking {
        stream.write_all(b"GET /status HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    }
    let idle: Vec<TcpStream> = (0..600).map(|_| TcpStream::connect(sidecar.admin).unwrap()).collect();
    for mut stream in asking {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 503"), "the store does not answer, and that is said: {answer}");
    }
    drop(idle);
}

#[test]
fn an_admin_client_that_sends_requests_and_reads_nothing_loses_its_connection_slot() {
    let sidecar = Sidecar::start(&[]);
    let ask = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n".repeat(400);
    let deaf: Vec<TcpStream> = (0..64)
        .map(|_| {
            let mut stream = TcpStream::connect(sidecar.admin).unwrap();
            // It may be closed after the first of them.
            let _ = stream.write_all(&ask);
            stream
        })
        .collect();
    wait_until("a probe is answered", || sidecar.get("/livez").0 == 200);
    drop(deaf);
}

#[test]
fn status_asks_the_sidecar_itself_and_no_proxy() {
    let sidecar = Sidecar::start(&[]);
    let mut command = sidecar.command(&["status"]);
    command.env("HTTP_PROXY", "http://127.0.0.1:9").env("http_proxy", "http://127.0.0.1:9");
    let run = crate::support::process::Run::of(&mut command);
    assert!(run.output().contains("slots"), "{run:?}");
}

#[test]
fn the_page_is_served_fresh_and_may_do_no_more_than_it_must() {
    let sidecar = Sidecar::start(&[]);
    let (code, headers, page) = http::ask(sidecar.admin, "GET", "/");
    assert_eq!((code, headers["content-type"].as_str()), (200, "text/html; charset=utf-8"));
    assert_eq!(headers["cache-control"], "no-store");
    assert_eq!(headers["x-content-type-options"], "nosniff");
    assert_eq!(headers["referrer-policy"], "no-referrer");
    let policy: Vec<&str> = headers["content-security-policy"].split("; ").collect();
    let expected = [
        String::from("default-src 'none'"),
        format!("script-src '{}'", hash_of(&page, "script")),
        format!("style-src '{}'", hash_of(&page, "style")),
    ];
    assert_eq!(policy[..3], expected, "the page has changed: put these hashes into src/admin/mod.rs");
    let rest =
        ["img-src data:", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"];
    assert_eq!(policy[3..], rest);

    let (code, headers, body) = http::ask(sidecar.admin, "HEAD", "/");
    assert_eq!((code, body.as_str()), (200, ""));
    assert_eq!(headers["content-length"], page.len().to_string());
    assert_eq!(http::ask(sidecar.admin, "POST", "/").0, 405);
    assert_eq!(http::ask(sidecar.admin, "GET", "/status").1["cache-control"], "no-store");
}

/// The hash of the one block of this kind, as a Content-Security-Policy names it.
fn hash_of(page: &str, tag: &str) -> String {
    let blocks: Vec<&str> = page.split(&format!("<{tag}>")).skip(1).collect();
    let [block] = blocks[..] else { panic!("{} blocks of {tag}", blocks.len()) };
    let block = block.split(&format!("</{tag}>")).next().unwrap();
    let hash = base64::engine::general_purpose::STANDARD.encode(digest(&SHA256, block.as_bytes()));
    format!("sha256-{hash}")
}

/// The whole answer to a request, as it is sent.
fn answer_to(sidecar: &Sidecar, request: &str) -> String {
    let mut stream = TcpStream::connect(sidecar.admin).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn every_path_is_answered_only_under_a_name_that_is_allowed() {
    let sidecar = Sidecar::start(&["--admin-host", "ring.example.com, other.example"]);
    let admin = sidecar.admin.to_string();
    for path in ["/", "/metrics", "/livez", "/readyz", "/status", "/nowhere"] {
        for (host, is_allowed) in [
            (admin.as_str(), true),
            ("[::1]:7416", true),
            ("localhost", true),
            ("ackwheel-a:7416", true),
            ("ackwheel.im.svc.cluster.local", true),
            ("ring.example.com:7416", true),
            ("OTHER.example.", true),
            ("evil.example:7416", false),
            ("127.0.0.1.evil.example", false),
            ("ring.example.com.evil.example", false),
        ] {
            let answer = answer_to(&sidecar, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert_eq!(head.starts_with("HTTP/1.1 421 "), !is_allowed, "{host}{path}: {head}");
            assert_eq!(body.contains("--admin-host"), !is_allowed, "{host}{path}: {body}");
            assert!(head.contains("\r\ncache-control: no-store"), "{host}{path}: {head}");
            assert!(head.contains("\r\nx-content-type-options: nosniff"), "{host}{path}: {head}");
        }
    }
    let without = answer_to(&sidecar, "GET /livez HTTP/1.1\r\n\r\n");
    assert!(without.starts_with("HTTP/1.1 400 "), "{without}");
    let probe = answer_to(&sidecar, "GET /livez HTTP/1.0\r\n\r\n");
    assert!(probe.starts_with("HTTP/1.0 200 ") && probe.ends_with("\r\n\r\nalive\n"), "{probe}");
    let wrong = Run::of(&mut serve(&["--admin-host", "http://ring.example.com"]));
    assert!(wrong.error(64).contains("--admin-host"), "{wrong:?}");
}

#[test]
fn the_page_carries_everything_with_it() {
    let (_, page) = Sidecar::start(&[]).get("/");
    // A namespace is a name and is fetched by nobody.
    let page = page.replace("http://www.w3.org/2000/svg", "");
    for outside in
        ["http:", "https:", "\"//", "'//", "(//", "`//", "url(", "@import", "import(", "<iframe", "<object"]
    {
        assert!(!page.contains(outside), "the page has {outside}");
    }
    for attribute in ["src=\"", "href=\""] {
        for value in page.split(attribute).skip(1).map(|rest| rest.split('"').next().unwrap()) {
            assert!(value.starts_with("data:") || ["status", "metrics"].contains(&value), "{attribute}{value}");
        }
    }
}

/// The report of a leading sidecar about a tick, once it is expired.
fn decided(sidecar: &Sidecar, tick: u64) -> TickReport {
    wait_for("the tick is decided", || {
        sidecar.status().rings[0].recent.iter().find(|one| one.tick == tick).cloned()
    })
}

fn assert_recent_ticks_are_told(sidecar: &Sidecar) {
    let mut connection = sidecar.connect();
    let (calm, _) = connection.ask(&frames::add(&(1..=10).collect::<Vec<_>>(), 2, 1)).added();
    connection.ask(&frames::del(&(1..=6).collect::<Vec<_>>()));
    connection.ask(&frames::withdraw(&[7]));
    let told = decided(sidecar, calm);
    assert_eq!(told, TickReport { tick: calm, added: 9, acked: 6, timed_out: 3, storm: false });
    let (stormy, _) = connection.ask(&frames::add(&(11..=20).collect::<Vec<_>>(), 2, 1)).added();
    connection.ask(&frames::del(&[11, 12]));
    let told = decided(sidecar, stormy);
    assert_eq!(told, TickReport { tick: stormy, added: 10, acked: 2, timed_out: 8, storm: true });
    // And so it is with the many ticks that have no messages, until the oldest are forgotten.
    let full = wait_for("sixty ticks without messages", || {
        let RingStatus { recent, pointer: Tick(pointer), leads, .. } = sidecar.status().rings.remove(0);
        assert!(leads && recent.iter().all(|one| one.tick < pointer), "{recent:?} at {pointer}");
        (recent.first()?.tick > stormy).then_some(recent)
    });
    assert_eq!(full.len(), 60);
    assert!(full.windows(2).all(|pair| pair[1].tick == pair[0].tick + 1), "{full:?}");
    assert!(full.iter().all(|one| (one.added, one.storm) == (0, false)), "{full:?}");
}

const SHORT_TICKS: [&str; 6] = ["--tick", "100ms", "--slots", "15", "--storm-min", "8"];

#[test]
fn a_sidecar_in_memory_reports_the_last_ticks() {
    let sidecar = Sidecar::start(&SHORT_TICKS);
    assert_recent_ticks_are_told(&sidecar);
    assert!(sidecar.status().sidecar.ends_with(&format!(":{}", sidecar.listen.port())));
}

#[test]
fn the_leader_reports_the_last_ticks_in_redis() {
    let redis = Redis::start();
    let leader = Sidecar::on(&redis, "leader", &SHORT_TICKS);
    let follower = Sidecar::on(&redis, "follower", &[&SHORT_TICKS[..], &["--never-lead"]].concat());
    wait_until("it leads", || leader.status().rings[0].leads);
    assert_recent_ticks_are_told(&leader);
    let status = follower.status();
    let ring = &status.rings[0];
    assert_eq!((ring.leads, ring.leader.as_deref(), &*ring.recent), (false, Some("leader"), &[][..]));
    assert_eq!(status.sidecar, "follower");
}
