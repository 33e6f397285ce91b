//! Connections that never send an accepted Hello: they take no place of a client, and cost a bounded amount.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, prlimit};
use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use crate::support::certificates::Files;
use crate::support::frames::{self, ACKED, RETRYABLE};
use crate::support::process::assert_names;
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;
use crate::support::{SLACK, resp, tls, wait_until};

/// The places for unauthenticated connections over TCP and over the Unix socket.
const PLACES: (u64, u64) = (512, 64);

struct Guarded {
    sidecar: Sidecar,
    socket: PathBuf,
    _folder: TempDir,
}

impl Guarded {
    /// A sidecar with a token, a Unix socket, and these flags.
    fn start(flags: &[&str]) -> Guarded {
        let folder = tempfile::tempdir().unwrap();
        let (socket, token) = (folder.path().join("socket"), folder.path().join("token"));
        std::fs::write(&token, "a-token-that-nobody-guesses").unwrap();
        let own = ["--socket", socket.to_str().unwrap(), "--token-file", token.to_str().unwrap()];
        let sidecar = Sidecar::start(&[&own[..], flags].concat());
        Guarded { sidecar, socket, _folder: folder }
    }

    fn tcp(&self) -> Raw {
        greet(Raw::tcp(self.sidecar.listen))
    }

    fn unix(&self) -> Raw {
        greet(Raw::unix(&self.socket))
    }
}

/// Says Hello with the token.
fn greet(mut connection: Raw) -> Raw {
    let welcome = connection.ask(&frames::hello((1, 1), b"a-token-that-nobody-guesses"));
    assert_eq!(welcome.kind, frames::WELCOME, "{welcome:?}");
    connection
}

fn assert_serves(connection: &mut Raw, id: u64) {
    connection.ask(&frames::add(&[id], 0, 1)).added();
    assert_eq!(connection.ask(&frames::del(&[id])).outcomes(), [ACKED]);
}

#[test]
fn strangers_fill_their_own_places_and_the_oldest_makes_room() {
    // Fewer connections of clients are allowed than there are strangers.
    let guarded = Guarded::start(&["--hello-timeout", "60s", "--max-connections", "3"]);
    let (mut tcp, mut unix) = (guarded.tcp(), guarded.unix());
    let over_tcp: Vec<TcpStream> =
        (0..PLACES.0 + 100).map(|_| TcpStream::connect(guarded.sidecar.listen).unwrap()).collect();
    let over_unix: Vec<UnixStream> =
        (0..PLACES.1 + 10).map(|_| UnixStream::connect(&guarded.socket).unwrap()).collect();
    let metrics = || guarded.sidecar.metrics();
    wait_until("all places are taken", || metrics().count("connections_evicted_total") == 110);
    assert_eq!(metrics().count("unauthenticated_connections"), PLACES.0 + PLACES.1);
    assert_eq!(metrics().connections(), 2, "strangers are no connections of clients");
    assert_serves(&mut tcp, 1);
    assert_serves(&mut unix, 2);
    assert_serves(&mut guarded.tcp(), 3);
    assert_serves(&mut guarded.unix(), 4);
    let line = guarded.sidecar.log().line("closing the oldest").expect("it is said");
    assert_names(&line, &["WARN", "accepted Hello", "token"]);
    // The oldest were closed, and the newest stay.
    for stream in [&over_tcp[0], &over_tcp[99]] {
        assert!(matches!(peek(stream), Ok(0) | Err(_)), "it is closed");
    }
    let newest = over_tcp.last().unwrap();
    newest.set_nonblocking(true).unwrap();
    assert!(peek(newest).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "it stays");
    drop((over_tcp, over_unix));
    wait_until("they are gone", || metrics().count("unauthenticated_connections") == 0);
}

/// A connection from another address of loopback.
fn from(last: u8, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, last], 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

#[test]
fn a_flood_from_one_address_closes_no_slow_login_from_others() {
    let guarded = Guarded::start(&["--hello-timeout", "60s", "--resp", "127.0.0.1:0"]);
    let sidecar = &guarded.sidecar;
    let hello = frames::hello((1, 1), b"a-token-that-nobody-guesses").bytes(1);
    let login = resp::line("AUTH a-token-that-nobody-guesses");
    let evicted = || sidecar.metrics().count("connections_evicted_total");
    for (door, greeting, reply) in [(sidecar.listen, &hello, [0, 0, 0]), (sidecar.resp.unwrap(), &login, *b"+OK")]
    {
        let before = evicted();
        let mut slow: Vec<TcpStream> = (0..15).map(|number| from(2 + number % 5, door)).collect();
        for stream in &mut slow {
            stream.write_all(&greeting[..7]).unwrap();
        }
        let mut flood: Vec<TcpStream> = Vec::new();
        for number in 1..=1_500_u64 {
            flood.push(TcpStream::connect(door).unwrap());
            if flood.len() > 600 {
                // The oldest were closed long ago.
                flood.drain(..50);
            }
            if number.is_multiple_of(100) {
                wait_until("they are accepted", || {
                    sidecar.metrics().count("unauthenticated_connections") >= number.min(PLACES.0)
                });
            }
        }
        wait_until("the flood takes all other places", || evicted() - before >= 1_500 + 15 - PLACES.0 - 600);
        for mut stream in slow {
            stream.write_all(&greeting[7..]).unwrap();
            let mut answer = [0; 3];
            stream.read_exact(&mut answer).expect("the slow login is served");
            assert_eq!(answer, reply);
        }
        assert_eq!(sidecar.metrics().refusals("unauthorized"), 0);
        drop(flood);
        wait_until("the flood is over", || sidecar.metrics().count("unauthenticated_connections") == 0);
    }
}

/// The bytes that unauthenticated connections are charged.
fn charged(sidecar: &Sidecar, limit: &str) -> u64 {
    sidecar.status().limits.into_iter().find(|one| one.name == limit).expect("it is a limit").used
}

#[test]
fn strangers_of_all_doors_share_a_little_memory_of_their_own() {
    let guarded = Guarded::start(&["--hello-timeout", "60s", "--resp", "127.0.0.1:0"]);
    let sidecar = &guarded.sidecar;
    let resident = || sidecar.metrics().find("process_resident_memory_bytes").unwrap();
    let before = resident();
    let half_hello = [&4_000_u32.to_be_bytes()[..], &[frames::HELLO; 3_900]].concat();
    let half_command = [&b"*9\r\n$1000\r\n"[..], &[b'x'; 1_000], b"\r\n$1000\r\n"].concat();
    let mut open: Vec<TcpStream> = Vec::new();
    for number in 0..500 {
        for (door, bytes) in [(sidecar.listen, &half_hello), (sidecar.resp.unwrap(), &half_command)] {
            let mut stream = TcpStream::connect(door).unwrap();
            // A third has replies that it does not read.
            let replies = if number % 3 == 0 && door != sidecar.listen { b"a\n".repeat(9) } else { Vec::new() };
            stream.write_all(&[&replies, &bytes[..]].concat()).unwrap();
            open.push(stream);
        }
    }
    wait_until("all are read", || charged(sidecar, "memory before Hello") >= 1_000 * 4_096);
    let most = charged(sidecar, "memory before Hello");
    assert!(most <= 1_000 * 3 * 4_096, "{most} bytes");
    assert_eq!(charged(sidecar, "--max-connection-memory"), 0, "clients share nothing with them");
    let grown = resident() - before;
    assert!(grown < 30.0 * 1_048_576.0, "grew by {grown} bytes");
    drop(open);
    wait_until("all is given back", || charged(sidecar, "memory before Hello") == 0);
}

#[test]
fn a_tls_handshake_without_an_end_is_closed_after_24_kibibytes() {
    let (files, _) = Files::vouched_for();
    let sidecar = Sidecar::start(&[&files.flags()[..], &["--hello-timeout", "60s"]].concat());
    // A ClientHello of 60,000 bytes, in records of 16,000.
    let message = [&[1, 0, 0xea, 0x60][..], &vec![0; 60_000]].concat();
    let records: Vec<u8> = message
        .chunks(16_000)
        .flat_map(|part| [&[22, 3, 1][..], &u16::try_from(part.len()).unwrap().to_be_bytes(), part].concat())
        .collect();
    let mut stream = TcpStream::connect(sidecar.listen).unwrap();
    stream.write_all(&records[..20_000]).unwrap();
    wait_until("it is charged", || charged(&sidecar, "memory before Hello") > 16_384);
    assert_eq!(sidecar.metrics().refusals("tls_handshake"), 0);
    stream.write_all(&records[20_000..30_000]).unwrap();
    wait_until("it is closed", || sidecar.metrics().refusals("tls_handshake") == 1);
    wait_until("all is given back", || charged(&sidecar, "memory before Hello") == 0);
}

/// Strangers that send `a` lines as fast as they can, and connect again when they are closed.
struct Flood(Arc<AtomicBool>, Vec<JoinHandle<()>>);

impl Flood {
    fn start(door: SocketAddr) -> Flood {
        let stop = Arc::<AtomicBool>::default();
        let lines = b"a\n".repeat(32_768);
        let flood = |stop: Arc<AtomicBool>, lines: Vec<u8>| {
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let Ok(mut stream) = TcpStream::connect(door) else { continue };
                    while !stop.load(Ordering::Relaxed) && stream.write_all(&lines).is_ok() {}
                }
            })
        };
        let threads = (0..4).map(|_| flood(Arc::clone(&stop), lines.clone())).collect();
        Flood(stop, threads)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Logs in 20 times at each door.
fn log_in(guarded: &Guarded) {
    for _ in 0..20 {
        drop((guarded.tcp(), guarded.unix()));
        let mut client = resp::Resp::to(&guarded.sidecar);
        assert_eq!(client.ask("AUTH a-token-that-nobody-guesses").text(), "OK");
    }
}

#[test]
fn a_flood_of_lines_is_closed_and_every_login_succeeds() {
    let guarded = Guarded::start(&["--resp", "127.0.0.1:0"]);
    let closed = || guarded.sidecar.metrics().refusals("hello_expected");
    let _flood = Flood::start(guarded.sidecar.resp.unwrap());
    wait_until("the flood has begun", || closed() >= 20);
    let before = closed();
    log_in(&guarded);
    wait_until("the flood goes on, and its connections are closed", || closed() >= before + 20);
    assert!(charged(&guarded.sidecar, "memory before Hello") <= 1_048_576);
}

fn peek(stream: &TcpStream) -> std::io::Result<usize> {
    stream.peek(&mut [0])
}

#[test]
fn without_free_files_a_stranger_makes_room_and_clients_are_served() {
    let guarded = Guarded::start(&["--hello-timeout", "60s"]);
    let (mut tcp, mut unix) = (guarded.tcp(), guarded.unix());
    let pid = rustix::process::Pid::from_raw(guarded.sidecar.id().cast_signed());
    let files = std::fs::read_dir(format!("/proc/{}/fd", guarded.sidecar.id())).unwrap().count() as u64;
    let few = Rlimit { current: Some(files + 20), maximum: Some(files + 20) };
    prlimit(pid, Resource::Nofile, few).unwrap();
    let strangers: Vec<TcpStream> =
        (0..100).map(|_| TcpStream::connect(guarded.sidecar.listen).unwrap()).collect();
    guarded.sidecar.log().line("could not be accepted").expect("files ran out");
    assert_serves(&mut tcp, 1);
    assert_serves(&mut unix, 2);
    assert_serves(&mut guarded.tcp(), 3);
    assert_serves(&mut guarded.unix(), 4);
    drop(strangers);
}

#[test]
fn handshake_and_hello_share_one_timeout() {
    let (files, trusted) = Files::vouched_for();
    let timeout = Duration::from_secs(2);
    let sidecar = Sidecar::start(&[&files.flags()[..], &["--hello-timeout", "2s"]].concat());
    // A client that makes its handshake late and then sends no Hello.
    let begun = Instant::now();
    let tcp = TcpStream::connect(sidecar.listen).unwrap();
    thread::sleep(Duration::from_millis(1_500));
    let mut tls = tls::connect(&trusted, tcp);
    let error = tls::read_frame(&mut tls).expect("an Error");
    let elapsed = begun.elapsed();
    error.assert_error(4, RETRYABLE);
    assert!(elapsed >= timeout && elapsed < timeout + SLACK, "closed after {elapsed:?}");
}

#[test]
fn over_tls_a_connection_too_many_is_told_so_after_its_hello() {
    let (files, trusted) = Files::vouched_for();
    let sidecar = Sidecar::start(&[&files.flags()[..], &["--max-connections", "1"]].concat());
    let connect = || {
        let mut tls = tls::connect(&trusted, TcpStream::connect(sidecar.listen).unwrap());
        // A request that comes in the same write as Hello is answered, too.
        let bytes = [frames::hello((1, 1), b"").bytes(1), frames::ping(b"early").bytes(2)].concat();
        std::io::Write::write_all(&mut tls, &bytes).unwrap();
        tls
    };
    let mut first = connect();
    assert_eq!(tls::read_frame(&mut first).unwrap().kind, frames::WELCOME);
    assert_eq!(tls::read_frame(&mut first).unwrap().body, b"early");
    let refused = tls::read_frame(&mut connect()).expect("an Error");
    refused.assert_error(8, RETRYABLE);
    assert_eq!(refused.correlation, 1);
    assert_names(refused.text(), &["--max-connections"]);
    drop(first);
    wait_until("there is room again", || sidecar.metrics().connections() == 0);
    assert_eq!(tls::read_frame(&mut connect()).unwrap().kind, frames::WELCOME);
}
