//! A flood of TLS handshakes by peers without a token makes no acknowledgement of an admitted client late.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ackwheel::client::{AddOptions, Client, ClientOptions, Tls};
use ackwheel::core::{DelOutcome, Message};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

use crate::support::certificates::Files;
use crate::support::process::program;
use crate::support::raw::Raw;
use crate::support::sidecar::Sidecar;

/// The connections that the flood holds open at one time.
const HELD: usize = 3_000;

/// How many connections the flood begins before it looks whether one is open.
const BEGUN: usize = 200;

/// How long a victim waits before it acknowledges a message. The ack timeout is twice as long.
const ACK_AFTER: Duration = Duration::from_secs(1);

/// Records the first bytes of a TLS client.
fn client_hello(trusted: &Path) -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut client = program(&["ping", "--addr", &address, "--tls-ca", trusted.to_str().unwrap()]);
    let mut client = client.spawn().unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let mut bytes = vec![0; 4_096];
    let count = stream.read(&mut bytes).unwrap();
    let _ = client.kill();
    let _ = client.wait();
    bytes.truncate(count);
    bytes
}

/// Connects and sends a ClientHello, so many times a second, until it is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    tried: Arc<AtomicU64>,
    opened: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(address: SocketAddr, hello: Vec<u8>, per_second: f64) -> Flood {
        let (stop, tried, opened) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default(), Arc::default());
        let mut flood = Flood { stop, tried, opened, thread: None };
        let (stop, tried, opened) = (Arc::clone(&flood.stop), Arc::clone(&flood.tried), Arc::clone(&flood.opened));
        flood.thread = Some(thread::spawn(move || {
            let (start, [mut begun, mut open], mut count) =
                (Instant::now(), [VecDeque::new(), VecDeque::new()], 0.0);
            while !stop.load(Ordering::Relaxed) {
                if count > start.elapsed().as_secs_f64() * per_second {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                count += 1.0;
                tried.fetch_add(1, Ordering::Relaxed);
                begun.extend(connect(address).ok());
                if begun.len() >= BEGUN
                    && let Some(socket) = begun.pop_front()
                    && socket.send(&hello).is_ok_and(|sent| sent == hello.len())
                {
                    opened.fetch_add(1, Ordering::Relaxed);
                    open.push_back(socket);
                }
                if open.len() >= HELD {
                    open.pop_front();
                }
            }
        }));
        flood
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().expect("it is dropped once").join();
        assert!(ended.is_ok() || thread::panicking(), "the flood ended by itself");
    }
}

/// Begins a connection without a wait. It is reset when it is dropped, so that it keeps no port.
fn connect(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(socket),
    }
}

/// The outcomes of the acknowledgements of one client.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcomes {
    acked: u64,
    late: u64,
    unknown: u64,
}

/// Adds a message every few milliseconds, and acknowledges each after [`ACK_AFTER`].
async fn add_and_acknowledge(client: Client, first: u64, count: u64, pause: Duration) -> Outcomes {
    let (client, begun) = (Arc::new(client), tokio::time::Instant::now());
    let mut tasks = Vec::new();
    for number in 0..count {
        let client = Arc::clone(&client);
        tasks.push(tokio::spawn(async move {
            let message = [Message::new(first + number, 1)];
            let at = begun + pause * u32::try_from(number).unwrap();
            tokio::time::sleep_until(at).await;
            client.add_new_msg(&message, AddOptions::default()).await.expect("it is added");
            tokio::time::sleep_until(at + ACK_AFTER).await;
            client.del_msg(&message).await.expect("it is answered")[0]
        }));
    }
    let mut outcomes = Outcomes::default();
    for task in tasks {
        match task.await.unwrap() {
            DelOutcome::Acked => outcomes.acked += 1,
            DelOutcome::Late => outcomes.late += 1,
            _ => outcomes.unknown += 1,
        }
    }
    outcomes
}

/// Floods a sidecar with one serving thread for `seconds`. Two clients send `count` messages each meanwhile.
fn assert_no_ack_is_late(seconds: u64, count: u64) {
    let (files, trusted): (Files, PathBuf) = Files::vouched_for();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let own = ["--threads", "1", "--tick", "100ms", "--slots", "20", "--socket", socket.to_str().unwrap()];
    let sidecar = Sidecar::start(&[&own[..], &files.flags()].concat());
    let hello = client_hello(&trusted);
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (over_tls, over_unix, flood) = runtime.block_on(async {
        let options = ClientOptions::default().tls(Tls::trusting(&trusted).unwrap());
        let tls = Client::connect(sidecar.listen.into(), options).await.unwrap();
        let unix = format!("unix:{}", socket.display()).parse().unwrap();
        let unix = Client::connect(unix, ClientOptions::default()).await.unwrap();
        let flood = Flood::start(sidecar.listen, hello, 20_000.0);
        let pause = Duration::from_secs(seconds) / u32::try_from(count).unwrap();
        let (tls, unix) = tokio::join!(
            add_and_acknowledge(tls, 1, count, pause),
            add_and_acknowledge(unix, 1_000_000, count, pause)
        );
        (tls, unix, flood)
    });
    let begun = Instant::now();
    Raw::unix(&socket).greet();
    assert!(begun.elapsed() < ACK_AFTER, "a new client over the Unix socket waited {:?}", begun.elapsed());
    let [tried, opened] = [&flood.tried, &flood.opened].map(|number| number.load(Ordering::Relaxed));
    drop(flood);
    let show = |Outcomes { acked, late, unknown }: &Outcomes| [*acked, *late, *unknown];
    println!(
        "connections tried {tried}, opened {opened}; acked, late, unknown over TLS {:?}, over the Unix socket {:?}",
        show(&over_tls),
        show(&over_unix)
    );
    let all_acked = Outcomes { acked: count, ..Outcomes::default() };
    assert_eq!((&over_tls, &over_unix), (&all_acked, &all_acked));
    assert!(sidecar.metrics().count("connections_evicted_total") > 0, "the flood filled all places");
}

#[test]
fn no_ack_is_late_while_strangers_flood_the_port_with_handshakes() {
    assert_no_ack_is_late(3, 800);
}

#[test]
#[ignore = "takes 20 s of two processors; prints the figures of docs/decisions/before-hello.md"]
fn no_ack_is_late_during_20_seconds_of_20_000_handshakes_a_second() {
    assert_no_ack_is_late(20, 5_500);
}
