//! State that the threads of a run share.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use rand::RngExt;
use rand::rngs::SmallRng;

use super::client::{Client, Protocol};
use super::peer::Peer;
use super::resp_peer::RespPeer;

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Load and faults.
    Faults,
    /// Load without faults; subscribers acknowledge all they get.
    Calm,
    /// No load.
    Unloaded,
    /// Subscribers leave.
    Over,
}

/// How all subscribers but the prompt one behave at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Manners {
    /// They mostly acknowledge.
    Usual,
    Disconnect,
    Hang,
    Nack,
}

impl Manners {
    const ALL: [Manners; 4] = [Manners::Usual, Manners::Disconnect, Manners::Hang, Manners::Nack];
}

/// The addresses of a sidecar.
#[derive(Clone, Copy, Debug)]
pub struct Listeners {
    pub native: SocketAddr,
    pub resp: SocketAddr,
}

#[derive(Debug)]
pub struct Shared {
    /// Where the sidecar of each place listens; none where none runs.
    listen: Mutex<Vec<Option<Listeners>>>,
    phase: AtomicU8,
    manners: AtomicU8,
    floods: AtomicU32,
    /// Whether the sides of the network are cut off from each other.
    is_cut: AtomicBool,
}

/// The side of the network that a thread or a sidecar is on. Without a network everything is on the first.
pub type Side = usize;

/// The side of a place, if there is a network: the first sidecar is alone with a Redis.
pub fn side_of(place: usize) -> Side {
    usize::from(place == 0)
}

impl Shared {
    pub fn new(places: usize) -> Shared {
        Shared {
            listen: Mutex::new(vec![None; places]),
            phase: AtomicU8::new(Phase::Faults as u8),
            manners: AtomicU8::new(Manners::Usual as u8),
            floods: AtomicU32::new(0),
            is_cut: AtomicBool::new(false),
        }
    }

    pub fn set_listen(&self, place: usize, listeners: Option<Listeners>) {
        self.listen.lock().expect("no holder panics")[place] = listeners;
    }

    pub fn begin(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::SeqCst);
    }

    pub fn is(&self, phase: Phase) -> bool {
        self.phase.load(Ordering::SeqCst) >= phase as u8
    }

    pub fn set_manners(&self, manners: Manners) {
        self.manners.store(manners as u8, Ordering::SeqCst);
    }

    pub fn manners(&self) -> Manners {
        Manners::ALL[usize::from(self.manners.load(Ordering::SeqCst))]
    }

    /// Asks every load generator for a flood of large frames.
    pub fn flood(&self) {
        self.floods.fetch_add(1, Ordering::SeqCst);
    }

    /// How many floods were asked for so far.
    pub fn floods(&self) -> u32 {
        self.floods.load(Ordering::SeqCst)
    }

    pub fn set_cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Ordering::SeqCst);
    }

    /// Whether a side reaches the sidecar of a place.
    pub fn reaches(&self, side: Side, place: usize) -> bool {
        side == side_of(place) || !self.is_cut.load(Ordering::SeqCst)
    }

    /// A connection to one of the sidecars, and its place; none if it does not answer.
    pub fn connect(&self, side: Side, protocol: Protocol, random: &mut SmallRng) -> Option<(usize, Client)> {
        let (place, listeners) = self.one_of(side, random)?;
        let client = match protocol {
            Protocol::Native => Client::Native(Peer::greeted(listeners.native)?),
            Protocol::Resp => Client::Resp(RespPeer::connected(listeners.resp)?),
        };
        Some((place, client))
    }

    /// One of the sidecars that a side reaches.
    fn one_of(&self, side: Side, random: &mut SmallRng) -> Option<(usize, Listeners)> {
        let running: Vec<(usize, Listeners)> = {
            let listen = self.listen.lock().expect("no holder panics");
            (0..)
                .zip(listen.iter())
                .filter_map(|(place, listeners)| Some((place, (*listeners)?)))
                .filter(|(place, _)| self.reaches(side, *place))
                .collect()
        };
        running.get(random.random_range(0..running.len().max(1))).copied()
    }
}
