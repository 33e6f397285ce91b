//! What the threads of a run tell each other.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use rand::RngExt;
use rand::rngs::SmallRng;

use super::peer::Peer;

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// There is load, and things happen.
    Faults,
    /// Nothing happens any more, and subscribers acknowledge all they get. There is load.
    Calm,
    /// Nothing is added any more.
    Unloaded,
    /// Subscribers go as well.
    Over,
}

#[derive(Debug)]
pub struct Shared {
    /// Where each place's sidecar listens; none where none runs.
    listen: Mutex<Vec<Option<SocketAddr>>>,
    phase: AtomicU8,
}

impl Shared {
    pub fn new(places: usize) -> Shared {
        Shared { listen: Mutex::new(vec![None; places]), phase: AtomicU8::new(Phase::Faults as u8) }
    }

    pub fn set_listen(&self, place: usize, address: Option<SocketAddr>) {
        self.listen.lock().expect("no holder panics")[place] = address;
    }

    pub fn begin(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::SeqCst);
    }

    pub fn is(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::SeqCst) >= phase as u8
    }

    /// A connection to one of the sidecars, and its place; none where it is not there.
    pub fn connect(&self, random: &mut SmallRng) -> Option<(usize, Peer)> {
        let running: Vec<(usize, SocketAddr)> = {
            let listen = self.listen.lock().expect("no holder panics");
            (0..).zip(listen.iter()).filter_map(|(place, address)| Some((place, (*address)?))).collect()
        };
        let (place, address) = *running.get(random.random_range(0..running.len().max(1)))?;
        Some((place, Peer::greeted(address)?))
    }
}
