//! Tokens and names of certificates that are withdrawn, and the places of each name.

use std::fs;

use super::{NEW, OLD, admitted, check, connections, greet, secret_file, serve_with};
use crate::support::certificates::{Authority, Files, YEAR_2000, YEAR_3000};
use crate::support::frames;
use crate::support::process::{Process, Run, assert_names};
use crate::support::raw::Raw;
use crate::support::resp::{Resp, line};
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

#[test]
fn a_token_that_is_withdrawn_or_has_other_rights_ends_its_connections() {
    const GONE: &str = "gone:0123456789abcdef-gone\n";
    let others = format!("stays:{OLD}\nstays:{NEW}\n");
    let (_folder, file) = secret_file(&format!("{GONE}{others}changed:0123456789abcdef-changed produce\n"));
    let sidecar = serve_with(&file, &["--resp", "127.0.0.1:0", "--tick", "50ms", "--slots", "3"]);
    let in_resp = |token: &str| {
        let mut client = Resp::to(&sidecar);
        assert_eq!(client.ask(&format!("AUTH {token}")).text(), "OK");
        client
    };
    let gone = "0123456789abcdef-gone";
    let (mut idle, subscriber) = (admitted(&sidecar, gone), admitted(&sidecar, gone).subscribed("default"));
    let (mut taker, mut changed) = (in_resp(gone), admitted(&sidecar, "0123456789abcdef-changed"));
    // A connection counts with the token of its last login.
    let (mut old, mut new) = (in_resp(gone), in_resp(OLD));
    assert_eq!(old.ask(&format!("AUTH {NEW}")).text(), "OK");
    assert_eq!(new.ask(&format!("AUTH {gone}")).text(), "OK");
    taker.send(&line("AW.TAKE other BLOCK 0"));
    idle.ask(&frames::add(&[1], 1, 1)).added();
    let mut subscriber = subscriber;
    subscriber.batch();
    taker.receive();
    let mut waits = in_resp(gone);
    waits.send(&line("AW.TAKE other BLOCK 0"));
    wait_until("it waits", || sidecar.group("other").is_some_and(|group| group.subscribers == 2));

    fs::write(&file, format!("{others}changed:0123456789abcdef-changed produce,consume\n")).unwrap();
    for connection in [&mut idle, &mut subscriber, &mut changed] {
        let refused = connection.next_answer();
        refused.assert_error(15, frames::RETRYABLE);
        assert_names(refused.text(), &["withdrawn", "connect again"]);
        connection.assert_closed();
    }
    for mut client in [taker, new] {
        let rest = String::from_utf8(client.rest()).unwrap();
        assert!(rest.contains("-ACCESS_CHANGED not applied: "), "{rest}");
    }
    // This connection waits for a reply, and takes the refusal for it.
    waits.receive().assert_error("ACCESS_CHANGED outcome unknown: ");
    assert_eq!(old.ask("PING").text(), "PONG");
    let expected = [("changed", 0), ("stays", 1)].map(|(name, count)| (String::from(name), count));
    wait_until("they take no place", || connections(&sidecar) == expected && sidecar.metrics().connections() == 1);
    assert_eq!(sidecar.metrics().refusals("access_changed"), 6);
    greet(&sidecar, gone).1.assert_error(7, 0);
    let batch = admitted(&sidecar, NEW).subscribed("default").batch();
    assert_eq!((batch.ids(), batch.delivery), (vec![1], 2), "its batch went back");
}

#[test]
fn no_name_takes_the_places_of_other_names() {
    let (_folder, file) = secret_file(&format!("many:{OLD}\nmany:{NEW}\nfew:0123456789abcdef-few\n"));
    let sidecar = serve_with(&file, &["--resp", "127.0.0.1:0", "--max-connections", "8"]);
    // Each of two names has a quarter of the places for itself.
    let mut many: Vec<Raw> =
        [OLD, NEW, OLD].iter().cycle().take(6).map(|token| admitted(&sidecar, token)).collect();
    for token in [OLD, NEW] {
        let (_, refused) = greet(&sidecar, token);
        refused.assert_error(8, frames::RETRYABLE);
        assert_names(refused.text(), &["--max-connections", "other names"]);
    }
    let few = "0123456789abcdef-few";
    let mut others: Vec<Raw> = (0..2).map(|_| admitted(&sidecar, few)).collect();
    greet(&sidecar, few).1.assert_error(8, frames::RETRYABLE);
    // A place that is given back is for all names again.
    others.pop();
    wait_until("a place is free", || sidecar.metrics().connections() == 7);
    greet(&sidecar, OLD).1.assert_error(8, frames::RETRYABLE);
    many.truncate(4);
    wait_until("places are free", || sidecar.metrics().connections() == 5);
    others.extend((0..3).map(|_| admitted(&sidecar, few)));
    greet(&sidecar, OLD).1.assert_error(8, frames::RETRYABLE);
    assert_eq!(connections(&sidecar), [("few".into(), 4), ("many".into(), 4)]);
    // Each listener has places of its own.
    let mut clients: Vec<Resp> = (0..6).map(|_| Resp::to(&sidecar)).collect();
    for client in &mut clients {
        assert_eq!(client.ask(&format!("AUTH {OLD}")).text(), "OK");
    }
    Resp::to(&sidecar).ask(&format!("AUTH {NEW}")).assert_error("ERR max number of clients reached");
    assert_eq!(Resp::to(&sidecar).ask(&format!("AUTH {few}")).text(), "OK");
    // A client that logs in again keeps its place.
    assert_eq!(clients[0].ask(&format!("AUTH {NEW}")).text(), "OK");
}

#[test]
fn a_client_certificate_is_admitted_while_its_name_is_in_the_list() {
    let (server, authority) = (Files::new(), Authority::new());
    authority.certify(&server, 0);
    let ca = server.authority("ca.pem", &authority);
    let (_folder, names) = secret_file("# the nodes\nnode-7\n\n  node-8 \n");
    let [ca, list] = [&ca, &names].map(|path| path.to_str().unwrap());
    let alone = ["--tls-client-names", list];
    assert_names(
        check(&[&server.flags()[..], &alone].concat()).error(64),
        &["--tls-client-names", "--tls-client-ca"],
    );
    let sidecar = Sidecar::start(&[&server.flags()[..], &["--tls-client-ca", ca], &alone].concat());
    let certified = |name: &str| {
        let files = Files::new();
        authority.certify_client(&files, name, (YEAR_2000, YEAR_3000));
        files
    };
    let command = |verb: &str, files: &Files| {
        let [_, certificate, _, key] = files.flags();
        let mut command = sidecar.command(&[verb, "--tls-ca", ca]);
        command.args(["--tls-client-cert", certificate, "--tls-client-key", key]);
        command
    };
    let [seven, eight, nine] = ["node-7", "node-8", "node-9"].map(certified);
    for allowed in [&seven, &eight] {
        assert_names(Run::of(&mut command("ping", allowed)).output(), &["answered in"]);
    }
    // A name that only looks like one of the list is another name.
    for refused in [&nine, &certified("node-7\u{1}"), &certified("NODE-7")] {
        assert_names(Run::of(&mut command("ping", refused)).error(1), &["unauthorized", "--tls-client-names"]);
    }
    let mut watch = Process::spawn(&mut command("watch", &seven));
    let counts = || connections(&sidecar);
    wait_until("it is connected", || counts() == [("node-7".into(), 1), ("node-8".into(), 0)]);
    fs::write(&names, "node-8\n").unwrap();
    wait_until("it is closed", || sidecar.metrics().refusals("access_changed") == 1);
    wait_until("it takes no place", || counts() == [(String::from("node-8"), 0)]);
    assert_names(Run::of(&mut command("ping", &seven)).error(1), &["unauthorized"]);
    assert_names(Run::of(&mut command("ping", &eight)).output(), &["answered in"]);
    watch.kill();
}
