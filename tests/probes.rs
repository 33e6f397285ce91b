//! The admin endpoints answer whatever the connections do, and the connections whatever is asked of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::task::{LocalSet, spawn_local};

use crate::support::frames;
use crate::support::sidecar::Sidecar;
use crate::support::{http, wait_until};

const FLOODING: u64 = 4_000;

/// How long a probe may take.
const PROBE: Duration = Duration::from_millis(100);

/// The work of a thread with many connections until it is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    /// Rounds that were begun, over all connections.
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// Each of so many connections sends these bytes again and again, and reads whatever comes.
    fn of(connections: u64, address: SocketAddr, once: Vec<u8>, again: Vec<u8>) -> Flood {
        let (once, again) = (Arc::<[u8]>::from(once), Arc::<[u8]>::from(again));
        Flood::start(connections, move |stop, rounds| {
            let (once, again) = (Arc::clone(&once), Arc::clone(&again));
            async move {
                let mut stream = TcpStream::connect(address).await?;
                stream.write_all(&once).await?;
                let mut answers = vec![0; 16_384];
                while !stop.load(Ordering::Relaxed) {
                    rounds.fetch_add(1, Ordering::Relaxed);
                    stream.write_all(&again).await?;
                    if stream.read(&mut answers).await? == 0 {
                        break;
                    }
                }
                Ok(())
            }
        })
    }

    /// So many tasks connect, send these bytes, read to the end, and connect again.
    fn of_short_ones(tasks: u64, address: SocketAddr, once: Vec<u8>) -> Flood {
        let once = Arc::<[u8]>::from(once);
        Flood::start(tasks, move |stop, rounds| {
            let once = Arc::clone(&once);
            async move {
                while !stop.load(Ordering::Relaxed) {
                    rounds.fetch_add(1, Ordering::Relaxed);
                    let mut stream = TcpStream::connect(address).await?;
                    // Only the bytes before the other side closed count.
                    let _ = stream.write_all(&once).await;
                    let _ = stream.read_to_end(&mut Vec::new()).await;
                }
                Ok(())
            }
        })
    }

    fn start<F>(tasks: u64, task: impl Fn(Arc<AtomicBool>, Arc<AtomicU64>) -> F + Send + 'static) -> Flood
    where
        F: Future<Output = std::io::Result<()>> + 'static,
    {
        let (stop, rounds) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (told, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            LocalSet::new().block_on(&runtime, async {
                let all: Vec<_> =
                    (0..tasks).map(|_| spawn_local(task(Arc::clone(&told), Arc::clone(&counted)))).collect();
                while !told.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                all.iter().for_each(tokio::task::JoinHandle::abort);
            });
        });
        Flood { stop, rounds, thread: Some(thread) }
    }

    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().expect("it is dropped once").join();
        assert!(ended.is_ok() || thread::panicking(), "the flood ended by itself");
    }
}

/// Room for the flood's files in this process.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

fn hello_bytes() -> Vec<u8> {
    frames::hello((1, 1), b"").bytes(1)
}

/// 100 messages are added and acknowledged, each in a frame of its own.
fn busy_bytes() -> Vec<u8> {
    (1..=100_u32)
        .flat_map(|id| {
            let ids = [u64::from(id)];
            [frames::add(&ids, 0, 1).bytes(id), frames::del(&ids).bytes(id)].concat()
        })
        .collect()
}

/// How long each of so many requests takes, the shortest first.
fn times(count: usize, request: impl Fn()) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..count)
        .map(|_| {
            let asked = Instant::now();
            request();
            asked.elapsed()
        })
        .collect();
    times.sort_unstable();
    times
}

fn assert_probes_answer(sidecar: &Sidecar, flood: &Flood) {
    let before = flood.rounds();
    for (path, text) in [("/livez", "alive\n"), ("/readyz", "ready\n")] {
        let times = times(100, || assert_eq!(sidecar.get(path), (200, String::from(text))));
        // Two of a hundred may have waited for a processor of this machine.
        assert!(times[97] < PROBE, "{path} took {:?} with others before it: {times:?}", times[97]);
    }
    let times = times(10, || assert_eq!(sidecar.get("/metrics").0, 200));
    assert!(times[9] < Duration::from_secs(4), "/metrics took {times:?}");
    assert!(flood.rounds() > before, "the flood went on meanwhile");
}

#[test]
fn probes_answer_within_100_ms_while_4000_connections_flood_the_only_serving_thread() {
    raise_file_limit();
    let sidecar = Sidecar::start(&["--threads", "1", "--max-connections", "5000"]);
    let flood = Flood::of(FLOODING, sidecar.listen, hello_bytes(), busy_bytes());
    wait_until("all of them flood", || flood.rounds() >= 2 * FLOODING);
    assert_probes_answer(&sidecar, &flood);
}

#[test]
fn probes_answer_within_100_ms_while_connections_come_and_go_without_pause() {
    raise_file_limit();
    let sidecar = Sidecar::start(&["--threads", "1"]);
    // No frame: the server says so and closes.
    let flood = Flood::of_short_ones(500, sidecar.listen, b"GET / HTTP/1.1\r\n\r\n".to_vec());
    wait_until("they come and go", || flood.rounds() >= 1_000);
    assert_probes_answer(&sidecar, &flood);
}

#[test]
fn acknowledgements_are_answered_while_the_admin_port_is_flooded() {
    let sidecar = Sidecar::start(&["--threads", "1"]);
    let mut connection = sidecar.connect();
    let ask = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n".to_vec();
    let flood = Flood::of_short_ones(200, sidecar.admin, ask);
    wait_until("the flood is there", || flood.rounds() >= 400);
    let mut times: Vec<Duration> = (0..500)
        .map(|id| {
            connection.ask(&frames::add(&[id], 0, 1)).added();
            let asked = Instant::now();
            assert_eq!(connection.ask(&frames::del(&[id])).outcomes(), [frames::ACKED]);
            asked.elapsed()
        })
        .collect();
    times.sort_unstable();
    assert!(
        times[490] < Duration::from_millis(50),
        "p98 of an Ack is {:?}, the worst {:?}",
        times[490],
        times[499]
    );
    assert_eq!(http::get(sidecar.admin, "/livez").0, 200);
}
