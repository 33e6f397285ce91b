//! The admin endpoints: what they say, and that nobody can hold them.

use std::net::TcpStream;

use crate::support::frames;
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

#[test]
fn the_routes_are_there_and_elsewhere_is_a_sign_post() {
    let sidecar = Sidecar::start(&[]);
    assert_eq!(sidecar.get("/livez"), (200, String::from("alive\n")));
    assert_eq!(sidecar.get("/readyz"), (200, String::from("ready\n")));
    let (code, text) = sidecar.get("/nowhere");
    assert_eq!(code, 404);
    assert!(["/metrics", "/livez", "/readyz", "/status"].iter().all(|route| text.contains(route)), "{text}");
}

#[test]
fn idle_connections_to_the_admin_port_hold_up_neither_it_nor_the_data_port() {
    let sidecar = Sidecar::start(&[]);
    let idle: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(sidecar.admin).unwrap()).collect();
    let mut connection = sidecar.connect();
    connection.ask(&frames::add(&[1], 0, 1)).added();
    // The idle ones are closed after five seconds, 64 at a time.
    wait_until("the admin port answers again", || sidecar.get("/livez").0 == 200);
    drop(idle);
}

#[test]
fn status_asks_the_sidecar_itself_and_no_proxy() {
    let sidecar = Sidecar::start(&[]);
    let mut command = sidecar.command(&["status"]);
    command.env("HTTP_PROXY", "http://127.0.0.1:9").env("http_proxy", "http://127.0.0.1:9");
    let run = crate::support::process::Run::of(&mut command);
    assert!(run.output().contains("slots"), "{run:?}");
}
