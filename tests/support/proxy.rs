//! A way to Redis that is long, or loses an answer, or holds a request back, when it is told to.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::sleep_until;

/// The action on the next bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Pass,
    /// The next answer is lost, and its connection ends.
    LoseAnswer,
    /// The next script that is run waits, with all that comes after it on its connection; others pass.
    HoldRequests,
    /// The same for the next script that is loaded.
    HoldLoads,
}

#[derive(Debug, Default)]
struct Shared {
    /// How long bytes are under way, each way.
    way: Duration,
    order: Mutex<Order>,
    /// How often held requests were let go.
    releases: Mutex<u64>,
    released: Condvar,
    holding: AtomicU64,
    lost: AtomicU64,
}

/// A proxy on a port of its own. It is concerned with connections that run scripts; others pass untouched.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    /// A proxy to a port of this machine. Its threads end with their connections.
    pub fn to(port: u16) -> Proxy {
        Proxy::with_way(Duration::ZERO, port)
    }

    /// The same, where all takes so long each way.
    pub fn with_way(way: Duration, port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared { way, ..Shared::default() });
        let serving = Arc::clone(&shared);
        thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                if let Ok(far) = TcpStream::connect(("127.0.0.1", port)) {
                    join(&near, &far, &serving);
                }
            }
        });
        Proxy { address, shared }
    }

    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// How many answers were lost.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::SeqCst)
    }

    /// The next answer is lost, and its connection ends.
    pub fn lose_an_answer(&self) {
        self.set(Order::LoseAnswer);
    }

    /// The next request waits, with all that follow on its connection.
    pub fn hold_a_request(&self) {
        self.set(Order::HoldRequests);
    }

    /// The next script that is loaded waits, with all that follows on its connection.
    pub fn hold_a_load(&self) {
        self.set(Order::HoldLoads);
    }

    /// How many connections hold requests back.
    pub fn holding(&self) -> u64 {
        self.shared.holding.load(Ordering::SeqCst)
    }

    /// Passes on the bytes that were held, and holds no more.
    pub fn let_go(&self) {
        self.set(Order::Pass);
        *self.shared.releases.lock().expect("no holder panics") += 1;
        self.shared.released.notify_all();
    }

    fn set(&self, order: Order) {
        *self.shared.order.lock().expect("no holder panics") = order;
    }
}

/// Carries bytes both ways until one side ends.
fn join(near: &TcpStream, far: &TcpStream, shared: &Arc<Shared>) {
    let clone = |stream: &TcpStream| stream.try_clone().expect("a socket can be cloned");
    near.set_nodelay(true).expect("it is TCP");
    far.set_nodelay(true).expect("it is TCP");
    let scripts = Arc::new(AtomicBool::new(false));
    let (mut from, requests, sends) = (clone(near), Arc::clone(shared), Arc::clone(&scripts));
    let mut to = Way::to(clone(far), shared.way, Shutdown::Write);
    thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            let bytes = &bytes[..count];
            let has = |wanted: &[u8]| bytes.windows(wanted.len()).any(|word| word == wanted);
            if has(b"EVALSHA") {
                sends.store(true, Ordering::SeqCst);
                requests.wait_while_held(Order::HoldRequests);
            }
            if has(b"LOAD") {
                requests.wait_while_held(Order::HoldLoads);
            }
            if to.carry(bytes).is_err() {
                break;
            }
        }
    });
    let (mut from, answers) = (clone(far), Arc::clone(shared));
    let mut to = Way::to(clone(near), shared.way, Shutdown::Both);
    thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if scripts.load(Ordering::SeqCst) && answers.loses() {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
            if to.carry(&bytes[..count]).is_err() {
                break;
            }
        }
    });
}

/// One way of a connection. Dropped, it ends when all has arrived.
struct Way {
    to: Arrivals,
    takes: Duration,
}

/// Where bytes arrive: now, or later by way of a thread.
enum Arrivals {
    Now(TcpStream, Shutdown),
    Later(Sender<(Instant, Vec<u8>)>),
}

impl Way {
    fn to(mut to: TcpStream, takes: Duration, at_end: Shutdown) -> Way {
        if takes.is_zero() {
            return Way { to: Arrivals::Now(to, at_end), takes };
        }
        let (sender, arriving) = channel::<(Instant, Vec<u8>)>();
        thread::spawn(move || {
            for (arrives_at, bytes) in arriving {
                sleep_until(arrives_at);
                if to.write_all(&bytes).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(at_end);
        });
        Way { to: Arrivals::Later(sender), takes }
    }

    fn carry(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        match &mut self.to {
            Arrivals::Now(to, _) => to.write_all(bytes),
            Arrivals::Later(way) => {
                let arriving = (Instant::now() + self.takes, bytes.to_vec());
                way.send(arriving).map_err(|_| std::io::ErrorKind::BrokenPipe.into())
            }
        }
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        if let Arrivals::Now(to, at_end) = &self.to {
            let _ = to.shutdown(*at_end);
        }
    }
}

impl Shared {
    /// Waits, if what is sent is to be held.
    fn wait_while_held(&self, held: Order) {
        {
            let mut order = self.order.lock().expect("no holder panics");
            if *order != held {
                return;
            }
            *order = Order::Pass;
        }
        let releases = self.releases.lock().expect("no holder panics");
        let before = *releases;
        self.holding.fetch_add(1, Ordering::SeqCst);
        drop(self.released.wait_while(releases, |releases| *releases == before).expect("no holder panics"));
        self.holding.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether the present answer is to be lost.
    fn loses(&self) -> bool {
        let mut order = self.order.lock().expect("no holder panics");
        if *order != Order::LoseAnswer {
            return false;
        }
        *order = Order::Pass;
        self.lost.fetch_add(1, Ordering::SeqCst);
        true
    }
}
