//! Other clients of a Redis, which take most of its time.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use crate::support::redis::{ask, connect_to};

/// How many there are.
const CLIENTS: usize = 3;

/// Some ten milliseconds of work for Redis.
const WORK: &str = "local sum = 0 for number = 1, 400000 do sum = sum + number end return sum";

/// Clients that end when this is dropped.
#[derive(Debug)]
pub struct Pressure {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

impl Pressure {
    pub fn on(address: IpAddr, port: u16) -> Pressure {
        let stop = Arc::new(AtomicBool::new(false));
        let client = |_| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                let Ok(mut connection) = connect_to(address, port) else { return };
                // Redis may be killed meanwhile.
                while !stop.load(Ordering::SeqCst) && ask::<u64>(&mut connection, &["EVAL", WORK, "0"]).is_ok() {}
            })
        };
        Pressure { clients: (0..CLIENTS).map(client).collect(), stop }
    }
}

impl Drop for Pressure {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for client in self.clients.drain(..) {
            let _ = client.join();
        }
    }
}
