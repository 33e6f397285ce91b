//! The memory that a connection takes is charged to it, and freed once the connection has ended.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::support::frames;
use crate::support::resp::{Reply, Resp, command, line, start};
use crate::support::sidecar::Sidecar;
use crate::support::wait_until;

const MEGABYTE: u64 = 1_048_576;

/// Returns the number of bytes that are charged to connections.
pub fn charged(sidecar: &Sidecar) -> u64 {
    let limits = sidecar.status().limits;
    limits.iter().find(|limit| limit.name == "--max-connection-memory").expect("this limit applies").used
}

/// Returns the resident memory of the sidecar, in bytes.
fn resident(sidecar: &Sidecar) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", sidecar.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kilobytes * 1_024
}

/// Fills more than half of the queue of replies of a connection, so that its commands about batches do not begin.
fn fill_half(sidecar: &Sidecar, stream: &mut TcpStream) {
    let before = charged(sidecar);
    // The memory of the queue doubles when it is full.
    while charged(sidecar) < before + 4_000_000 {
        stream.write_all(&b"COMMAND DOCS\r\n".repeat(20)).unwrap();
    }
}

/// Sends bytes over and over on a connection that reads nothing, until the sidecar takes no more of them.
fn attack(sidecar: &Sidecar, bytes: &[u8], times: usize) -> TcpStream {
    let mut stream = TcpStream::connect(sidecar.resp.expect("it was started with --resp")).unwrap();
    if bytes.windows(3).any(|part| part == b"ACK") {
        fill_half(sidecar, &mut stream);
    }
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    for _ in 0..times {
        match stream.write_all(bytes) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe) => break,
            Err(error) => panic!("{error}"),
        }
    }
    stream
}

/// Shows that an attack makes the sidecar hold no more than it charges, that a connection has at most `most` bytes, and
/// that all is free once the connections have ended.
#[track_caller]
fn assert_charged(connections: u64, bytes: &[u8], times: usize, most: u64) {
    let sidecar = start(&["--threads", "1", "--slots", "600"]);
    let mut victim = Resp::to(&sidecar);
    victim.ask("AW.ADD 7");
    // The memory that every process needs for its first connections and for a status.
    drop(attack(&sidecar, &line("PING"), 1));
    charged(&sidecar);
    let (resident_before, charged_before) = (resident(&sidecar), charged(&sidecar));
    let (mut attackers, mut most_charged) = (Vec::new(), 0);
    for _ in 0..connections {
        attackers.push(attack(&sidecar, bytes, times));
        let grown = resident(&sidecar).saturating_sub(resident_before);
        // On a slow machine, the first connections have ended before the last ones begin.
        most_charged = most_charged.max(charged(&sidecar));
        assert!(grown <= most_charged + 20 * MEGABYTE, "{grown} bytes more, and {most_charged} were charged");
    }
    assert!(
        most_charged <= charged_before + connections * most,
        "{most_charged} bytes were charged to {connections} connections"
    );
    assert_eq!(victim.ask("AW.DEL 7").texts(), ["acked"]);
    drop(attackers);
    wait_until("all is given back", || {
        charged(&sidecar) <= charged_before && resident(&sidecar) <= resident_before + 20 * MEGABYTE
    });
}

#[test]
fn acks_of_batches_that_wait_are_charged() {
    let ids = vec!["0-1-2-3"; 4_096];
    let acks = command(&[&["AW.ACK", "default"], &ids[..]].concat());
    assert_charged(4, &acks, 1_024, 10 * MEGABYTE);
}

#[test]
fn returned_batches_that_wait_are_charged() {
    let ids = vec!["0-1-2-3"; 4_096];
    let nacks = command(&[&["AW.NACK", "default", "0"], &ids[..]].concat());
    assert_charged(4, &nacks, 1_024, 10 * MEGABYTE);
}

#[test]
fn the_arguments_of_half_commands_are_charged() {
    let half = [&b"*32776\r\n"[..], &b"$0\r\n\r\n".repeat(32_775)].concat();
    assert_charged(60, &half, 1, 2 * MEGABYTE);
}

#[test]
fn statuses_that_nobody_reads_are_charged() {
    // The queue of replies may have 4 MiB, at a capacity of at most twice that.
    assert_charged(4, &line("AW.STATUS").repeat(1_024), 8, 10 * MEGABYTE);
}

#[test]
fn a_waiting_take_is_charged_with_what_it_takes() {
    let sidecar = start(&["--threads", "1", "--slots", "600"]);
    drop(attack(&sidecar, &line("PING"), 1));
    let (resident_before, charged_before) = (resident(&sidecar), charged(&sidecar));
    let takes: Vec<TcpStream> = (0..800).map(|_| attack(&sidecar, &line("AW.TAKE default BLOCK 0"), 1)).collect();
    wait_until("all wait", || sidecar.group("default").is_some_and(|group| group.subscribers == 800));
    let (grown, charged) =
        (resident(&sidecar).saturating_sub(resident_before), charged(&sidecar) - charged_before);
    assert!(charged >= 800 * 14_800, "{charged}");
    assert!(grown <= charged + 4 * MEGABYTE, "{grown} bytes more, and {charged} are charged");
    drop(takes);
}

#[test]
fn long_replies_to_short_commands_are_charged() {
    assert_charged(4, &b"COMMAND DOCS\r\n".repeat(2_000), 32, 10 * MEGABYTE);
}

#[test]
fn commands_that_waited_for_room_are_run_although_the_client_sends_no_more() {
    let sidecar = start(&["--slots", "600"]);
    let mut client = Resp::to(&sidecar);
    client.ask("AW.ADD 1");
    // More than the queue of replies and the sockets hold.
    let docs = 8_000;
    let mut reader = Resp::over(client.stream.try_clone().unwrap());
    let writer = std::thread::spawn(move || {
        client.send(&b"COMMAND DOCS\r\n".repeat(docs));
        client.send(&line("AW.DEL 1"));
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    for _ in 0..docs {
        reader.receive();
    }
    assert_eq!(reader.receive().texts(), ["acked"]);
    assert_eq!(reader.rest(), b"");
    writer.join().unwrap();
}

#[test]
fn a_command_about_batches_begins_although_many_replies_wait_behind_it() {
    let sidecar = start(&[]);
    let mut client = Resp::to(&sidecar);
    let docs = 2_000;
    let mut reader = Resp::over(client.stream.try_clone().unwrap());
    let writer = std::thread::spawn(move || {
        client.send(
            &[line("AW.TAKE default"), b"COMMAND DOCS\r\n".repeat(docs), line("AW.ACK default 0-1-2-3")].concat(),
        );
        client
    });
    assert_eq!(reader.receive(), Reply::Array(Vec::new()));
    for _ in 0..docs {
        reader.receive();
    }
    assert_eq!(reader.receive(), Reply::Integer(0));
    drop(writer.join().unwrap());
}

#[test]
fn half_a_command_is_refused_once_its_rest_does_not_come() {
    let sidecar = start(&[]);
    let (mut half, mut idle) = (Resp::to(&sidecar), Resp::to(&sidecar));
    half.send(b"*3\r\n$6\r\nAW.DEL\r\n$1\r\n1\r\n$1");
    half.receive()
        .assert_error("SILENT not applied: the client sent nothing for 10s: send the rest of the command");
    assert_eq!(half.rest(), b"");
    assert_eq!(idle.ask("PING").text(), "PONG", "a connection that waits for nothing stays");
}

#[test]
fn requests_of_the_native_protocol_that_wait_are_charged() {
    let sidecar = start(&["--threads", "1"]);
    let mut subscribers: Vec<_> = (0..10).map(|_| sidecar.connect()).collect();
    let before = charged(&sidecar);
    for subscriber in &mut subscribers {
        subscriber.ask(&frames::subscribe("default", 10, 0));
    }
    wait_until("memberships are charged", || charged(&sidecar) >= before + 10 * 8_192);
    drop(subscribers);
    wait_until("all is given back", || charged(&sidecar) == 0);
}
