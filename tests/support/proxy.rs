//! A way to Redis that loses an answer, or holds a request back, when it is told to.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// What is to become of the next bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Pass,
    /// The next answer is lost, and its connection ends.
    LoseAnswer,
    /// What is sent next waits, with all that comes after it on its connection; others pass.
    HoldRequests,
}

#[derive(Debug, Default)]
struct Shared {
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
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared::default());
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

    /// How many connections hold requests back.
    pub fn holding(&self) -> u64 {
        self.shared.holding.load(Ordering::SeqCst)
    }

    /// What was held back goes on.
    pub fn let_go(&self) {
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
    let (mut from, mut to, requests, sends) = (clone(near), clone(far), Arc::clone(shared), Arc::clone(&scripts));
    thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            let bytes = &bytes[..count];
            if bytes.windows(7).any(|word| word == b"EVALSHA") {
                sends.store(true, Ordering::SeqCst);
                requests.wait_while_held();
            }
            if to.write_all(bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
    let (mut from, mut to, answers) = (clone(far), clone(near), Arc::clone(shared));
    thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            if scripts.load(Ordering::SeqCst) && answers.loses() {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}

impl Shared {
    /// Waits, if this request is the one to be held.
    fn wait_while_held(&self) {
        {
            let mut order = self.order.lock().expect("no holder panics");
            if *order != Order::HoldRequests {
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
