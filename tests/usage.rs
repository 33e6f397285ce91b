//! Exit codes and errors: 0, 1 at run time, 64 for usage; each error says what was wrong and what to do.

use std::io::{Read, Write};
use std::net::TcpListener;

use crate::support::process::{Run, assert_names, program};
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;
use crate::support::watch::Watch;

#[test]
fn a_wrong_command_line_ends_with_64_and_names_the_word() {
    for (arguments, words) in [
        (&["frobnicate"][..], &["frobnicate", "--help"][..]),
        (&[], &["Usage", "serve", "watch"]),
        (&["add"], &["ID[:CLIENT]"]),
        (&["add", "1:2:3"], &["1:2:3", "write ID or ID:CLIENT"]),
        (&["add", "18446744073709551616"], &["18446744073709551616", "18446744073709551615"]),
        (&["add", "--ack-timeout-ticks", "0", "1"], &["'0'", "--ack-timeout-ticks", "1"]),
        (&["add", "--attempt", "256", "1"], &["256", "--attempt"]),
        (&["del", "--with-draw", "1"], &["--with-draw", "--withdraw"]),
        (&["consume", "--group", "a b"], &["a b", "--group"]),
        (&["consume"], &["--group <NAME>"]),
        (&["watch", "--group", "default"], &["'--group'", "watch looks on", "consume --group NAME takes"]),
        (&["watch", "--group=default", "--json"], &["--group", "watch looks on", "consume --group NAME takes"]),
        (&["watch", "--no-ack"], &["'--no-ack'", "watch looks on", "consume --group NAME takes"]),
        (&["watch", "--count", "0"], &["'0'", "--count"]),
        (&["group", "delete"], &["NAME"]),
        (&["add", "1", "--timeout", "soon"], &["soon", "--timeout"]),
        (&["add", "1", "--timeout", "0"], &["--timeout", "above 0"]),
        (&["add", "1", "--addr", "nowhere"], &["nowhere", "--addr"]),
        (&["add", "1", "--token-file", "/nonexistent/token"], &["/nonexistent/token", "--token-file"]),
        (&["add", "1", "--token-file", "/dev/null"], &["--token-file: /dev/null", "no regular file"]),
        (&["add", "1", "--timeout", "500000000000years"], &["500000000000years", "--timeout", "a year"]),
        (&["status", "--timeout", "500000000000years"], &["500000000000years", "--timeout", "a year"]),
        (&["status", "--admin", "http://127.0.0.1:7416"], &["http://127.0.0.1:7416", "--admin", "HOST:PORT"]),
        (&["status", "--addr", "127.0.0.1:7415"], &["'--addr'", "--admin HOST:PORT"]),
        (&["group", "list", "--addr", "127.0.0.1:7415"], &["'--addr'", "--admin HOST:PORT"]),
        (&["watch", "--admin", "127.0.0.1:7416"], &["'--admin'", "--addr HOST:PORT"]),
        (&["serve", "--addr", "127.0.0.1:7415"], &["'--addr'", "--listen"]),
        (&["bench", "--admin", "7416"], &["7416", "--admin", "HOST:PORT"]),
        (
            &["bench", "--idle-connections", "18446744073709551615"],
            &["18446744073709551615", "--idle-connections"],
        ),
    ] {
        let run = Run::of(&mut program(arguments));
        assert_names(run.error(64), words);
    }
}

#[test]
fn help_and_version_are_no_errors_and_help_teaches() {
    let help = Run::of(&mut program(&["--help"]));
    assert_names(help.output(), &["ackwheel serve", "ackwheel watch", "ackwheel add", "Exit codes: 0, 1", "64"]);
    for verb in ["serve", "add", "del", "watch", "consume", "ping", "status", "check", "group", "bench"] {
        assert_names(&help.stdout, &[verb]);
        assert_names(Run::of(&mut program(&[verb, "--help"])).output(), &["Usage: ackwheel", verb]);
    }
    let version = Run::of(&mut program(&["--version"]));
    assert_eq!(version.output(), concat!("ackwheel ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn without_a_sidecar_each_verb_fails_with_1_and_names_the_address() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    for arguments in [
        &["add", "1"][..],
        &["del", "1"],
        &["watch"],
        &["consume", "--group", "a"],
        &["ping"],
        &["group", "delete", "audit"],
    ] {
        let run = Run::of(program(arguments).args(["--addr", &address]));
        assert_names(run.error(1), &[&address, "is ackwheel serving there?"]);
    }
    let run = Run::of(program(&["status"]).args(["--admin", &address]));
    assert_names(run.error(1), &[&address, "is --admin the admin address of a sidecar?"]);
    let run = Run::of(program(&["add", "1"]).env("ACKWHEEL_ADDR", &address));
    assert_names(run.error(1), &[&address]);
}

#[test]
fn an_answer_from_another_program_is_no_success() {
    let sidecar = Sidecar::start(&[]);
    let admin = sidecar.admin.to_string();
    let run = Run::of(program(&["add", "1", "--timeout", "2s"]).args(["--addr", &admin]));
    assert_names(run.error(1), &[&admin, "admin port", "7415"]);
    let listen = sidecar.listen.to_string();
    let run = Run::of(program(&["status", "--timeout", "2s"]).args(["--admin", &listen]));
    assert_names(run.error(1), &[&listen, "--admin"]);
}

#[test]
fn a_status_that_is_refused_is_an_error_that_says_why() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4_096]).unwrap();
        let words = "Redis is away (store_away)\n";
        let head = "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n";
        write!(stream, "{head}content-length: {}\r\n\r\n{words}", words.len()).unwrap();
    });
    let run = Run::of(program(&["status"]).args(["--admin", &address]));
    assert_names(run.error(1), &[&address, "503", ": Redis is away (store_away)\n"]);
    answering.join().unwrap();
}

#[test]
fn an_address_in_use_is_a_failure_that_names_it_and_the_flag() {
    let sidecar = Sidecar::start(&[]);
    let (listen, admin) = (sidecar.listen.to_string(), sidecar.admin.to_string());
    for (flag, address) in [("--listen", listen), ("--admin", admin)] {
        let mut command = program(&["serve", flag, &address]);
        let other = if flag == "--listen" { "--admin" } else { "--listen" };
        let run = Run::of(command.args([other, "127.0.0.1:0"]));
        assert_names(run.error(1), &[&address, &format!("choose another {flag}")]);
    }
}

#[test]
fn a_group_is_deleted_when_nobody_uses_it_and_never_the_default_one() {
    let sidecar = Sidecar::start(&["--tick", "100ms"]);
    let mut watch = Watch::start(&sidecar, &["--group", "audit"]);
    let in_use = sidecar.run(&["group", "delete", "audit"]);
    assert_names(in_use.error(1), &["audit", "has subscribers", "group_in_use"]);
    watch.kill();
    wait_until("the subscriber is gone", || sidecar.subscribers() == 0);
    assert!(sidecar.group("audit").is_some(), "a named group stays without subscribers");
    let listed = sidecar.run(&["group", "list"]);
    let first = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let rows: Vec<Vec<String>> = listed.output().lines().map(first).collect();
    assert_eq!(rows[0], ["group", "subscribers", "here", "batches", "unacked", "oldest"]);
    assert!(
        rows[1..].contains(&first("audit 0 0 0 -")) && rows[1..].contains(&first("default 0 0 0 -")),
        "{rows:?}"
    );

    assert_eq!(sidecar.run(&["group", "delete", "audit"]).output(), "audit deleted\n");
    assert!(sidecar.group("audit").is_none());
    let gone = sidecar.run(&["group", "delete", "audit"]);
    assert_names(gone.error(1), &["there is no group audit", "ackwheel status", "unknown_group"]);
    let default = sidecar.run(&["group", "delete", "default"]);
    assert_names(default.error(1), &["default", "cannot be deleted"]);
    assert!(sidecar.group("default").is_some());
    let wrong = sidecar.run(&["group", "delete", "a/b"]);
    assert_names(wrong.error(64), &["a/b"]);
}
