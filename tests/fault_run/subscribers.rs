//! Subscribers: one acknowledges every batch at once, the others also hang, nack and disconnect.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::deliveries::Deliveries;
use super::peer::{Came, Peer};
use super::shared::{Manners, Phase, Shared, Side};
use crate::support::frames;
use crate::support::raw::Batch;

/// How long a subscriber waits for a batch before it looks at the phase of the run.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub name: &'static str,
    pub subscribers: usize,
    /// Its subscribers acknowledge every batch at once; lateness is measured there.
    pub is_prompt: bool,
}

/// Starts a subscriber, which ends with the run and returns all that was delivered to it.
pub fn start(shared: &Arc<Shared>, side: Side, group: Group, seed: u64) -> JoinHandle<Deliveries> {
    let mut subscriber = Subscriber {
        shared: Arc::clone(shared),
        side,
        group,
        random: SmallRng::seed_from_u64(seed),
        deliveries: Deliveries::default(),
    };
    thread::spawn(move || {
        while !subscriber.shared.is(Phase::Over) {
            let connected = subscriber.shared.connect(subscriber.side, &mut subscriber.random);
            if connected.and_then(|(place, peer)| subscriber.subscribe(place, peer)).is_none() {
                thread::sleep(LOOK);
            }
        }
        subscriber.deliveries
    })
}

struct Subscriber {
    shared: Arc<Shared>,
    side: Side,
    group: Group,
    random: SmallRng,
    deliveries: Deliveries,
}

impl Subscriber {
    /// Receives batches until the connection ends; none if the sidecar or the subscriber ended it.
    fn subscribe(&mut self, place: usize, mut peer: Peer) -> Option<()> {
        let credit =
            if self.group.is_prompt { 1_000_000 } else { [1, 1_000, 100_000][self.random.random_range(0..3)] };
        peer.request(&frames::subscribe(self.group.name, credit, 0))?;
        let subscribed = Instant::now();
        while !self.shared.is(Phase::Over) && !peer.went_away && self.shared.reaches(self.side, place) {
            let frame = match peer.receive(Instant::now() + LOOK) {
                Came::End => return None,
                Came::Frame(frame) if frame.kind == frames::TIMEOUT_BATCH => frame,
                // A sidecar that drains, or has no store, refuses subscriptions.
                Came::Frame(frame) if frame.kind == frames::ERROR => return None,
                Came::Frame(_) | Came::Nothing => continue,
            };
            let batch = Batch::of(&frame);
            self.deliveries.add(&batch, subscribed, self.group.is_prompt);
            match self.reaction() {
                Reaction::Ack => peer.request(&frames::batch_ack(&[batch.id]))?,
                Reaction::Nack => peer.request(&frames::batch_nack(batch.id, self.random.random_range(0..500)))?,
                Reaction::Silence => continue,
                Reaction::Disconnect => return None,
            };
        }
        Some(())
    }

    fn reaction(&mut self) -> Reaction {
        if self.group.is_prompt || self.shared.is(Phase::Calm) {
            return Reaction::Ack;
        }
        match (self.shared.manners(), self.random.random_range(0..100)) {
            (Manners::Usual, 0..94) | (_, 0..20) => Reaction::Ack,
            (Manners::Usual, 94..96) | (Manners::Nack, _) => Reaction::Nack,
            (Manners::Usual, 96..98) | (Manners::Hang, _) => Reaction::Silence,
            (Manners::Usual | Manners::Disconnect, _) => Reaction::Disconnect,
        }
    }
}

/// The reaction of a subscriber to a batch.
enum Reaction {
    Ack,
    Nack,
    Silence,
    Disconnect,
}
