//! Access: tokens with names and rights, their rotation, throttled guesses, client certificates, and the permissions of
//! files.

mod withdrawn;

use std::cell::Cell;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ackwheel::client::{AddOptions, Client, ClientError, ClientOptions, SubscribeOptions};
use ackwheel::core::Message;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use crate::support::certificates::{Authority, Files, YEAR_1999, YEAR_2000, YEAR_3000};
use crate::support::frames::{self, Frame};
use crate::support::process::{Run, assert_names, program};
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

const OLD: &str = "0123456789abcdef-old";
const NEW: &str = "0123456789abcdef-new";

/// A folder, and a secret file in it.
fn secret_file(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    (folder, path)
}

fn serve_with(token_file: &Path, flags: &[&str]) -> Sidecar {
    Sidecar::start(&[&["--token-file", token_file.to_str().unwrap()], flags].concat())
}

fn check(flags: &[&str]) -> Run {
    Run::of(program(&["serve", "--check-config"]).args(flags))
}

fn greet(sidecar: &Sidecar, token: &str) -> (Raw, Frame) {
    let mut connection = Raw::tcp(sidecar.listen);
    let answer = connection.ask(&frames::hello((1, 1), token.as_bytes()));
    (connection, answer)
}

fn admitted(sidecar: &Sidecar, token: &str) -> Raw {
    let (connection, welcome) = greet(sidecar, token);
    assert_eq!(welcome.kind, frames::WELCOME, "{welcome:?}");
    connection
}

fn connections(sidecar: &Sidecar) -> Vec<(String, u64)> {
    sidecar.status().access.into_iter().map(|access| (access.name, access.connections)).collect()
}

#[test]
fn a_token_rotates_under_load_and_no_request_of_a_client_that_follows_is_refused() {
    let (_folder, of_server) = secret_file(&format!("node:{OLD}\n"));
    let (_other, of_client) = secret_file(&format!("# of the nodes\n{OLD}\n"));
    let sidecar = serve_with(&of_server, &["--log", "debug"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let connect = || Client::connect(sidecar.listen.into(), ClientOptions::default().token_file(&of_client));
    let lasting = runtime.block_on(connect()).unwrap();
    // Adds over the lasting connection and over a new one, until the condition is true.
    let (mut id, closed) = (0, Cell::new(0));
    let mut load_until = |is_done: &dyn Fn() -> bool| {
        wait_until("the next step of the rotation", || {
            id += 1;
            runtime.block_on(async {
                let fresh = connect().await.expect("a client that follows is admitted");
                fresh.add_new_msg(&[Message::new(id, 1)], AddOptions::default()).await.unwrap();
                // The connection of the old token ends with it, and the client opens another one.
                while let Err(error) = lasting.add_new_msg(&[Message::new(id, 1)], AddOptions::default()).await {
                    assert!(matches!(error, ClientError::ConnectionLost { .. }), "{error}");
                    closed.set(closed.get() + 1);
                }
            });
            is_done()
        });
    };
    let times_read = || sidecar.log().text().matches("the token has changed and was read again").count();
    load_until(&|| true);
    fs::write(&of_server, format!("node:{OLD}\nnode:{NEW}\n")).unwrap();
    load_until(&|| times_read() == 1);
    fs::write(&of_client, format!("{NEW}\n")).unwrap();
    load_until(&|| true);
    fs::write(&of_server, format!("node:{NEW}\n")).unwrap();
    load_until(&|| times_read() == 2);
    greet(&sidecar, OLD).1.assert_error(7, 0);
    load_until(&|| sidecar.metrics().refusals("access_changed") == 1);
    assert!(closed.get() <= 1, "only requests that were on their way fail");
    assert_eq!(sidecar.metrics().refusals("unauthorized"), 1, "the one that came with the old token");
    assert!(!sidecar.log().text().contains("0123456789abcdef"), "no token in the log");
}

#[test]
fn a_subscription_whose_token_is_refused_comes_back_with_the_next_token_of_its_file() {
    let (_folder, of_server) = secret_file(OLD);
    let (_other, of_client) = secret_file(OLD);
    let flags = ["--tick", "50ms", "--slots", "3", "--token-file", of_server.to_str().unwrap()];
    let mut sidecar = Sidecar::start(&flags);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = ClientOptions::default().token_file(&of_client);
    let client = runtime.block_on(Client::connect(sidecar.listen.into(), options)).unwrap();
    let group = SubscribeOptions::default().group("default");
    let mut subscription = runtime.block_on(client.subscribe(group)).unwrap();

    fs::write(&of_server, NEW).unwrap();
    let listen = sidecar.listen.to_string();
    sidecar.kill();
    let serve = ["serve", "--listen", &listen, "--admin", "127.0.0.1:0"];
    let sidecar = Sidecar::spawn(program(&serve).args(flags));
    wait_until("both connections are refused", || sidecar.metrics().refusals("unauthorized") >= 4);
    fs::write(&of_client, NEW).unwrap();
    sidecar.wait_for_subscribers(1);
    let batch = runtime.block_on(async {
        client.add_new_msg(&[Message::new(1, 1)], AddOptions::default()).await.unwrap();
        subscription.next().await
    });
    assert_eq!(batch.unwrap().unwrap().messages.len(), 1);
}

#[test]
fn a_token_permits_what_its_rights_name_and_nothing_else() {
    let tokens = "producer:token-of-a-producer produce\nconsumer:token-of-a-consumer consume\n\
                  operator:token-of-operator admin\nall:token-of-everything\n";
    let (_folder, file) = secret_file(tokens);
    let sidecar = serve_with(&file, &["--log", "debug"]);
    let requests = [
        ("produce", frames::add(&[1], 15, 1)),
        ("produce", frames::del(&[1])),
        ("consume", frames::subscribe("default", 100, 0)),
        ("consume", frames::batch_ack(&[[0; 24]])),
        ("consume", frames::batch_nack([0; 24], 0)),
        ("admin", frames::group_delete("nothing")),
    ];
    let of = [
        ("token-of-a-producer", "produce", "producer"),
        ("token-of-a-consumer", "consume", "consumer"),
        ("token-of-operator", "admin", "operator"),
        ("token-of-everything", "", "all"),
    ];
    let mut open = Vec::new();
    for (token, right, name) in of {
        let mut connection = admitted(&sidecar, token);
        for (needed, request) in &requests {
            let answer = connection.ask(request);
            let is_refused = answer.kind == frames::ERROR && answer.status == 43;
            assert_eq!(is_refused, !right.is_empty() && right != *needed, "{name} {needed}: {answer:?}");
            if is_refused {
                answer.assert_error(43, 0);
                assert_names(answer.text(), &[needed, name, right]);
            }
        }
        assert_eq!(connection.ask(&frames::ping(b"on")).body, b"on", "the connection goes on");
        open.push(connection);
    }
    assert_eq!(sidecar.metrics().refusals("not_permitted"), 4 + 3 + 5);
    let expected = ["all", "consumer", "operator", "producer"].map(|name| (name.to_owned(), 1));
    assert_eq!(connections(&sidecar), expected);
    drop(open);
    wait_until("all are gone", || connections(&sidecar).iter().all(|(_, connections)| *connections == 0));
    assert!(sidecar.log().line("name=\"producer\"").is_some(), "{}", sidecar.log().text());
    assert!(!sidecar.log().text().contains("token-of"), "no token in the log");
}

#[test]
fn a_request_batch_without_its_right_changes_nothing() {
    let (_folder, file) = secret_file("consumer:token-of-a-consumer consume\nall:token-of-everything\n");
    let sidecar = serve_with(&file, &["--slots", "60"]);
    let mut all = admitted(&sidecar, "token-of-everything");
    all.ask(&frames::add(&[1], 60, 1)).added();
    let mut consumer = admitted(&sidecar, "token-of-a-consumer");
    consumer.ask(&frames::del(&[1])).assert_error(43, 0);
    consumer.ask(&frames::add(&[2], 60, 1)).assert_error(43, 0);
    assert_eq!(all.ask(&frames::del(&[1])).outcomes(), [frames::ACKED], "it was still in flight");
    assert_eq!(all.ask(&frames::del(&[2])).outcomes(), [frames::UNKNOWN]);
}

/// A connection from another address of loopback.
fn from(address: [u8; 4], to: SocketAddr) -> Raw {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((address, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    Raw::over_tcp(TcpStream::from(socket))
}

#[test]
fn guesses_of_an_address_are_throttled_and_those_of_another_are_not() {
    const WEAK: &str = "weak";
    let (folder, file) = secret_file(&format!("{OLD}\neasy:{WEAK}"));
    let socket = folder.path().join("socket");
    let sidecar = serve_with(&file, &["--socket", socket.to_str().unwrap()]);
    let started = Instant::now();
    let guess = || {
        let (mut compared, mut throttled) = (0, 0);
        while started.elapsed() < Duration::from_secs(2) {
            match greet(&sidecar, "guess").1.status {
                7 => compared += 1,
                12 => throttled += 1,
                other => panic!("status {other}"),
            }
        }
        (compared, throttled)
    };
    let counts: Vec<(u64, u64)> = thread::scope(|scope| {
        let guessers = [0; 4].map(|_| scope.spawn(guess));
        guessers.map(|guesser| guesser.join().unwrap()).to_vec()
    });
    let (compared, throttled) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
    // Four threads may compare their guesses at the same time, when one is left.
    let most = 100 + 10 * started.elapsed().as_secs() + 10 + 4;
    assert!((100..=most).contains(&compared), "{compared} guesses compared, at most {most}");
    assert!(throttled > 0);
    assert_eq!(sidecar.metrics().refusals("too_many_attempts"), throttled);

    let right = frames::hello((1, 1), WEAK.as_bytes());
    assert_eq!(from([127, 0, 0, 2], sidecar.listen).ask(&right).kind, frames::WELCOME);
    assert_eq!(Raw::unix(&socket).ask(&right).kind, frames::WELCOME);
    for _ in 0..110 {
        greet(&sidecar, "guess");
    }
    let refused = Raw::tcp(sidecar.listen).ask(&right);
    refused.assert_error(12, frames::RETRYABLE);
    assert_names(refused.text(), &["too many wrong tokens", "ms"]);
    assert_eq!(greet(&sidecar, OLD).1.kind, frames::WELCOME, "a token that is hard to guess is not locked out");
    wait_until("the address may try again", || greet(&sidecar, WEAK).1.kind == frames::WELCOME);
    let line = sidecar.log().line("too many wrong tokens from this address").unwrap();
    assert_names(&line, &["address=127.0.0.1"]);
}

#[test]
fn weak_tokens_and_files_that_others_can_read_are_warned_of() {
    let (_folder, file) = secret_file(&format!("good:{OLD}\nshort:012345678\nflat:aaaaaaaaaaaaaaaaaaaaaaaa\n"));
    let flags = ["--token-file", file.to_str().unwrap()];
    let weak = check(&flags);
    assert_eq!((weak.code, weak.stdout.as_str()), (0, "the configuration is right\n"));
    assert_names(&weak.stderr, &["token short on line 2", "token flat on line 3", "easy to guess"]);
    assert!(!weak.stderr.contains("token good") && !weak.stderr.contains("012345678"), "{}", weak.stderr);

    fs::write(&file, OLD).unwrap();
    assert_eq!(check(&flags).output(), "the configuration is right\n");
    let sidecar = serve_with(&file, &[]);
    fs::write(&file, "short:012345678").unwrap();
    assert!(sidecar.log().line("token short on line 1").is_some(), "a reload warns too");

    fs::write(&file, OLD).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let chmod = format!("chmod 0640 {}", file.display());
    assert_names(&check(&flags).stderr, &["--token-file", &chmod]);
    assert!(serve_with(&file, &[]).log().line(&chmod).is_some());

    let settings = file.with_extension("toml");
    for (store, is_warned) in [("redis://:secret@127.0.0.1/", true), ("redis://127.0.0.1/", false)] {
        fs::write(&settings, format!("store = {store:?}\n")).unwrap();
        fs::set_permissions(&settings, fs::Permissions::from_mode(0o644)).unwrap();
        let warned = check(&["--config", settings.to_str().unwrap()]).stderr.contains("chmod 0640");
        assert_eq!(warned, is_warned, "{store}");
    }

    let (files, _) = Files::vouched_for();
    assert_eq!(check(&files.flags()).output(), "the configuration is right\n");
    fs::set_permissions(&files.key, fs::Permissions::from_mode(0o604)).unwrap();
    assert_names(&check(&files.flags()).stderr, &["--tls-key", "chmod 0600"]);
}

#[test]
fn a_pipe_in_place_of_a_file_is_refused_and_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let pipe = pipe.to_str().unwrap();
    let (files, _) = Files::vouched_for();
    let [_, certificate, _, key] = files.flags();
    for flags in [
        &["--token-file", pipe][..],
        &["--config", pipe],
        &["--tls-cert", pipe, "--tls-key", key],
        &["--tls-cert", certificate, "--tls-key", pipe],
        &["--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", pipe],
    ] {
        assert_names(check(flags).error(64), &[pipe, "no regular file"]);
    }
    for flag in ["--token-file", "--tls-ca"] {
        assert_names(Run::of(&mut program(&["ping", flag, pipe])).error(64), &[flag, pipe, "no regular file"]);
    }
}

#[test]
fn a_client_certificate_is_required_and_each_wrong_one_is_named_on_both_sides() {
    let (server, authority, clients) = (Files::new(), Authority::new(), Authority::new());
    authority.certify(&server, 0);
    let trusted = server.authority("ca.pem", &authority);
    let client_ca = server.authority("clients.pem", &clients);
    let beyond_loopback = ["--listen", "0.0.0.0:0", "--tls-client-ca", client_ca.to_str().unwrap()];
    let flags = [&server.flags()[..], &beyond_loopback[2..]].concat();
    assert_eq!(check(&[&server.flags()[..], &beyond_loopback].concat()).output(), "the configuration is right\n");
    assert_names(check(&beyond_loopback).error(64), &["--tls-client-ca", "--tls-cert"]);

    let [right, strange, expired] = [
        (&clients, "node-7", (YEAR_2000, YEAR_3000)),
        (&authority, "node-8", (YEAR_2000, YEAR_3000)),
        (&clients, "node-9", (YEAR_1999, YEAR_2000)),
    ]
    .map(|(authority, name, years)| {
        let files = Files::new();
        authority.certify_client(&files, name, years);
        files
    });
    let sidecar = Sidecar::start(&flags);
    let ping = |files: Option<&Files>| {
        let mut arguments = vec!["ping", "--tls-ca", trusted.to_str().unwrap()];
        if let Some(files) = files {
            let [_, certificate, _, key] = files.flags();
            arguments.extend(["--tls-client-cert", certificate, "--tls-client-key", key]);
        }
        sidecar.run(&arguments)
    };
    assert_names(ping(Some(&right)).output(), &["answered in"]);
    for (files, client_says, server_says) in [
        (None, "requires a client certificate", "a client presented no certificate"),
        (Some(&strange), "no authority of its --tls-client-ca", "no authority of --tls-client-ca signed it"),
        (Some(&expired), "has expired", "it has expired"),
    ] {
        let before = sidecar.metrics().refusals("tls_handshake");
        assert_names(ping(files).error(1), &[client_says]);
        assert!(sidecar.log().line(server_says).is_some(), "{}", sidecar.log().text());
        assert_eq!(sidecar.metrics().refusals("tls_handshake"), before + 1);
    }
    fs::write(&client_ca, fs::read(&trusted).unwrap()).unwrap();
    assert!(sidecar.log().line("the certificate has changed and was read again").is_some());
    assert_names(ping(Some(&strange)).output(), &["answered in"]);
    ping(Some(&right)).error(1);

    let mut watch = sidecar.command(&["watch", "--tls-ca", trusted.to_str().unwrap()]);
    let [_, certificate, _, key] = strange.flags();
    watch.args(["--tls-client-cert", certificate, "--tls-client-key", key]);
    let mut watch = crate::support::process::Process::spawn(&mut watch);
    wait_until("its name is shown", || connections(&sidecar) == [(String::from("node-8"), 1)]);
    watch.kill();
    assert_names(
        Run::of(&mut program(&["ping", "--tls-client-cert", certificate])).error(64),
        &["--tls-client-key", "--tls-ca"],
    );
}

#[test]
fn tokens_without_tls_beyond_loopback_are_warned_of() {
    let (_folder, token) = secret_file(OLD);
    let (files, _) = Files::vouched_for();
    let token = ["--token-file", token.to_str().unwrap()];
    for (flags, is_warned) in [
        (&["--listen", "0.0.0.0:0"][..], true),
        (&["--resp", "0.0.0.0:0"], true),
        (&["--listen", "127.0.0.1:0"], false),
        (&[&["--listen", "0.0.0.0:0"][..], &files.flags()].concat(), false),
    ] {
        let warnings = check(&[flags, &token].concat()).stderr;
        assert_eq!(warnings.contains("0.0.0.0:0 has no TLS"), is_warned, "{flags:?}: {warnings}");
    }
}

#[test]
fn with_a_token_and_client_certificates_both_are_required() {
    let (server, authority, client) = (Files::new(), Authority::new(), Files::new());
    authority.certify(&server, 0);
    authority.certify_client(&client, "node-7", (YEAR_2000, YEAR_3000));
    let ca = server.authority("ca.pem", &authority);
    let (_folder, token) = secret_file(&format!("nodes:{OLD}"));
    let [ca, token] = [&ca, &token].map(|path| path.to_str().unwrap());
    let sidecar = Sidecar::start(&[&server.flags()[..], &["--tls-client-ca", ca, "--token-file", token]].concat());
    let [_, certificate, _, key] = client.flags();
    let with_certificate = ["--tls-client-cert", certificate, "--tls-client-key", key];
    let ping = |flags: &[&str]| sidecar.run(&[&["ping", "--tls-ca", ca], flags].concat());
    assert_names(ping(&with_certificate).error(1), &["unauthorized"]);
    assert_names(ping(&["--token-file", token]).error(1), &["requires a client certificate"]);
    assert_names(ping(&[&with_certificate[..], &["--token-file", token]].concat()).output(), &["answered in"]);
}
