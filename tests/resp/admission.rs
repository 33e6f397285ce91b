//! Tokens, rights, TLS, and the limit of connections.

use std::fs;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::certificates::Files;
use crate::support::process::assert_names;
use crate::support::resp::{Reply, Resp, line, start};
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

const TOKEN: &str = "0123456789abcdef-all";
const PRODUCER: &str = "0123456789abcdef-produces";
const CONSUMER: &str = "0123456789abcdef-consumes";

fn start_with_tokens(flags: &[&str]) -> (TempDir, Sidecar) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens");
    fs::write(&path, format!("all:{TOKEN}\nfront:{PRODUCER} produce\nback:{CONSUMER} consume\n")).unwrap();
    let sidecar = start(&[&["--token-file", path.to_str().unwrap()], flags].concat());
    (folder, sidecar)
}

fn connections(sidecar: &Sidecar) -> Vec<(String, u64)> {
    sidecar.status().access.into_iter().map(|access| (access.name, access.connections)).collect()
}

#[test]
fn without_a_token_nothing_is_answered_but_a_login() {
    let (_folder, sidecar) = start_with_tokens(&[]);
    let mut client = Resp::to(&sidecar);
    for text in ["PING", "AW.ADD 1", "INFO", "HELLO 3", "MULTI"] {
        client.ask(text).assert_error("NOAUTH not applied: ");
    }
    assert_eq!(client.ask("RESET").text(), "RESET");
    // A connection has ten commands before its token.
    let mut client = Resp::to(&sidecar);
    client.ask("HELLO 3 SETNAME x").assert_error("NOAUTH ");
    client.ask("HELLO 9").assert_error("NOPROTO ");
    client.ask("AUTH wrong").assert_error("WRONGPASS not applied: ");
    client.ask("HELLO 3 AUTH default wrong").assert_error("WRONGPASS not applied: ");
    // Commands that follow in the same read are served.
    client.send(&[line(&format!("AUTH {TOKEN}")), line("AW.ADD 1"), line("PING")].concat());
    assert_eq!(client.receive().text(), "OK");
    assert_eq!(client.receive().array()[0], Reply::Integer(1));
    assert_eq!(client.receive().text(), "PONG");
    assert_eq!(client.ask("CONFIG GET save"), Reply::Array(Vec::new()), "a refused HELLO 3 changes no version");
    assert_eq!(client.ask("CLIENT GETNAME"), Reply::Null, "and no name");
    assert_eq!(client.ask("RESET").text(), "RESET");
    assert_eq!(client.ask("AW.DEL 1").texts(), ["acked"], "RESET keeps the rights");
    let mut third = Resp::to(&sidecar);
    for _ in 0..3 {
        third.ask("AUTH wrong").assert_error("WRONGPASS ");
    }
    assert_eq!(third.rest(), b"", "the third wrong token ends the connection");
    assert_eq!(sidecar.metrics().refusals("unauthorized"), 5);
}

#[test]
fn ten_commands_and_a_kibibyte_of_replies_come_before_a_token() {
    let (_folder, sidecar) = start_with_tokens(&[]);
    let replies = |bytes: &[u8]| {
        let mut client = Resp::to(&sidecar);
        client.send(bytes);
        let replies = String::from_utf8(client.rest()).unwrap();
        assert!(replies.len() <= 1_024, "{replies}");
        let lines: Vec<String> = replies.lines().map(String::from).collect();
        assert!(lines.last().unwrap().starts_with("-HELLO_EXPECTED not applied: too many commands"), "{replies}");
        lines.len() - 1
    };
    for (command, replied) in [
        (&b"a\n"[..], 10),
        (b"*1\r\n$1\r\na\r\n", 10),
        (b"RESET\r\n", 10),
        (b"HELLO 2\r\n", 10),
        // Empty commands have no reply, and count.
        (b"\n", 0),
        (b"*0\r\n", 0),
    ] {
        assert_eq!(replies(&command.repeat(10_000)), replied, "{}", command.escape_ascii());
    }
    let long = format!("HELLO 3 {}\r\n", "\u{e9}".repeat(64)).into_bytes();
    assert!((3..10).contains(&replies(&long.repeat(20))), "long replies count by their length");
    let login = line(&format!("AUTH {TOKEN}"));
    assert_eq!(replies(&[b"a\n".repeat(10), login.clone()].concat()), 10, "the eleventh command is not run");
    assert_eq!(sidecar.metrics().refusals("hello_expected"), 8);
    let mut tenth = Resp::to(&sidecar);
    tenth.send(&[b"a\n".repeat(9), login, line("PING").repeat(20)].concat());
    (0..9).for_each(|_| tenth.receive().assert_error("NOAUTH "));
    assert_eq!(tenth.receive().text(), "OK");
    (0..20).for_each(|_| assert_eq!(tenth.receive().text(), "PONG"));
}

#[test]
fn a_token_gives_a_name_and_its_rights() {
    let (_folder, sidecar) = start_with_tokens(&[]);
    let (mut front, mut back) = (Resp::to(&sidecar), Resp::to(&sidecar));
    assert!(matches!(front.ask(&format!("HELLO 3 AUTH anybody {PRODUCER} SETNAME node-1")), Reply::Map(_)));
    assert_eq!(back.ask(&format!("AUTH {CONSUMER}")).text(), "OK");
    assert_eq!(connections(&sidecar), [("all".into(), 0), ("back".into(), 1), ("front".into(), 1)]);
    assert_eq!(front.ask("AW.ADD 1").array()[0], Reply::Integer(1));
    front.ask("AW.TAKE default").assert_error("NOT_PERMITTED not applied: this request needs the right consume");
    front.ask("AW.ACK default 0-1-2-3").assert_error("NOT_PERMITTED ");
    front.ask("AW.NACK default 5 0-1-2-3").assert_error("NOT_PERMITTED ");
    back.ask("AW.ADD 2").assert_error("NOT_PERMITTED not applied: this request needs the right produce");
    back.ask("AW.DEL 1").assert_error("NOT_PERMITTED ");
    assert_eq!(back.ask("AW.TAKE default"), Reply::Array(Vec::new()));
    // A second login replaces the first.
    assert_eq!(back.ask(&format!("AUTH {TOKEN}")).text(), "OK");
    assert_eq!(back.ask("AW.DEL 1").texts(), ["acked"]);
    back.ask("AUTH wrong").assert_error("WRONGPASS ");
    assert_eq!(back.ask("AW.DEL 1").texts(), ["unknown"], "a wrong login changes nothing");
    wait_until("the names change", || {
        connections(&sidecar) == [("all".into(), 1), ("back".into(), 0), ("front".into(), 1)]
    });
}

#[test]
fn without_a_token_file_any_login_is_accepted() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    assert_eq!(client.ask("AUTH whatever").text(), "OK");
    assert!(matches!(client.ask("HELLO 3 AUTH default whatever"), Reply::Map(_)));
}

#[test]
fn a_client_that_presents_no_token_is_closed_in_time() {
    let (_folder, sidecar) = start_with_tokens(&["--hello-timeout", "300ms"]);
    let began = Instant::now();
    let mut client = Resp::to(&sidecar);
    client.ask("PING").assert_error("NOAUTH ");
    assert!(String::from_utf8(client.rest()).unwrap().starts_with("-HELLO_TIMEOUT not applied: no token came"));
    assert!(began.elapsed() >= Duration::from_millis(300));
}

#[test]
fn connections_beyond_the_limit_get_the_error_that_client_libraries_know() {
    let sidecar = start(&["--max-connections", "2"]);
    let mut clients = [Resp::to(&sidecar), Resp::to(&sidecar)];
    for client in &mut clients {
        assert_eq!(client.ask("PING").text(), "PONG");
    }
    assert_eq!(Resp::to(&sidecar).rest(), b"-ERR max number of clients reached\r\n");
    let mut native = sidecar.connect();
    native.ask(&crate::support::frames::add(&[1], 0, 1)).added();
    let [first, _] = clients;
    drop(first);
    wait_until("the place is free", || {
        let mut next = Resp::to(&sidecar);
        next.send(b"PING\r\n");
        matches!(next.receive(), Reply::Simple(_))
    });
}

#[test]
fn the_check_logs_in_as_a_client_library_does_with_tls_and_a_token() {
    let (files, authority) = Files::vouched_for();
    let (folder, token) = (tempfile::tempdir().unwrap(), "token");
    let [right, wrong] = [(token, TOKEN), ("wrong", PRODUCER)].map(|(name, text)| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let sidecar = start(&[&files.flags()[..], &["--token-file", &right]].concat());
    let resp = sidecar.resp.unwrap().to_string();
    let check = |token: &str, more: &[&str]| {
        let flags = ["check", "--tls-ca", authority.to_str().unwrap(), "--token-file", token, "--resp", &resp];
        sidecar.run(&[&flags[..], more].concat())
    };
    let run = check(&right, &[]);
    assert!(run.stdout.contains(&format!("ok    resp: {resp} accepts this token")), "{run:?}");
    let run = check(&wrong, &[]);
    assert_eq!(run.code, 1, "{run:?}");
    assert_names(&run.stdout, &["fail  resp: no login over RESP", "correct --token-file"]);
    let run = sidecar.run(&["check", "--token-file", &right, "--resp", &resp, "--timeout", "1s"]);
    assert_names(&run.stdout, &["fail  resp: no login over RESP", "does --tls-ca match its --tls-cert?"]);
    let connections = sidecar.status().listeners.into_iter().map(|one| (one.listener, one.received_bytes > 0));
    assert_eq!(
        connections.collect::<Vec<_>>(),
        [("listen".into(), true), ("socket".into(), false), ("resp".into(), true)]
    );
}
