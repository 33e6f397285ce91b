//! Subscribers: one acknowledges every batch at once, the others also hang, nack and disconnect.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::client::{Client, Protocol};
use super::deliveries::Deliveries;
use super::peer::{Came, Peer};
use super::resp_peer::RespPeer;
use super::shared::{Manners, Phase, Shared, Side};
use crate::support::frames;
use crate::support::raw::Batch;
use crate::support::resp::{Taken, command};

/// How long a subscriber waits for a batch before it looks at the phase of the run.
const LOOK: Duration = Duration::from_millis(50);

/// How long a subscriber on RESP waits for a batch.
const BLOCK: Duration = Duration::from_millis(500);

/// How long it waits for the answer when it settles one.
const GIVES_UP: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub struct Group {
    pub name: &'static str,
    pub subscribers: usize,
    /// Its subscribers acknowledge every batch at once; lateness is measured there.
    pub is_prompt: bool,
}

/// Starts a subscriber, which ends with the run and returns all that was delivered to it.
pub fn start(
    shared: &Arc<Shared>,
    side: Side,
    protocol: Protocol,
    group: Group,
    seed: u64,
) -> JoinHandle<Deliveries> {
    let mut subscriber = Subscriber {
        shared: Arc::clone(shared),
        side,
        group,
        random: SmallRng::seed_from_u64(seed),
        deliveries: Deliveries::default(),
    };
    thread::spawn(move || {
        while !subscriber.shared.is(Phase::Over) {
            let connected = subscriber.shared.connect(subscriber.side, protocol, &mut subscriber.random);
            let consumed = connected.and_then(|(place, client)| match client {
                Client::Native(peer) => subscriber.subscribe(place, peer),
                Client::Resp(peer) => subscriber.take(place, peer),
            });
            if consumed.is_none() {
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
        while !self.shared.is(Phase::Over) && !peer.is_over && self.shared.reaches(self.side, place) {
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

    /// Takes batches until the connection ends; none if the sidecar or the subscriber ended it.
    fn take(&mut self, place: usize, mut peer: RespPeer) -> Option<()> {
        let began = Instant::now();
        let (shared, side) = (Arc::clone(&self.shared), self.side);
        let reaches = || shared.reaches(side, place);
        while !shared.is(Phase::Over) && !peer.is_over && reaches() {
            let count = if self.group.is_prompt { "16" } else { ["1", "4", "16"][self.random.random_range(0..3)] };
            let keep: &[&str] =
                if !self.group.is_prompt && self.random.random_bool(0.3) { &["KEEP"] } else { &[] };
            let options = [&["COUNT", count], keep].concat();
            for taken in peer.take(self.group.name, &options, BLOCK, reaches)? {
                let batch = batch_of(&taken);
                self.deliveries.add(&batch, began, self.group.is_prompt);
                let delay_ms = self.random.random_range(0..500).to_string();
                let settle = match self.reaction() {
                    Reaction::Ack => command(&["AW.ACK", self.group.name, &taken.batch]),
                    Reaction::Nack => command(&["AW.NACK", self.group.name, &delay_ms, &taken.batch]),
                    Reaction::Silence => continue,
                    Reaction::Disconnect => return None,
                };
                // A refusal leaves the batch to a redelivery.
                peer.ask(&[settle], GIVES_UP, reaches);
            }
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

/// A batch as the native protocol has it.
fn batch_of(taken: &Taken) -> Batch {
    let numbers: Vec<u64> =
        taken.batch.split('-').map(|number| number.parse().expect("the id of a batch is of numbers")).collect();
    let [ring, epoch, tick, position] = numbers[..] else { panic!("no id of a batch: {}", taken.batch) };
    let mut id = [0; 24];
    id[..2].copy_from_slice(&u16::try_from(ring).expect("few rings").to_be_bytes());
    id[4..8].copy_from_slice(&u32::try_from(position).expect("few batches of a tick").to_be_bytes());
    id[8..16].copy_from_slice(&epoch.to_be_bytes());
    id[16..].copy_from_slice(&tick.to_be_bytes());
    let message = |text: &String| {
        let (id, client) = text.split_once(':').unwrap_or((text, "0"));
        (id.parse().expect("an id"), client.parse().expect("a client"))
    };
    let number = |number: i64| u64::try_from(number).expect("not negative");
    let has = |flag: &str| taken.flags.split(' ').any(|word| word == flag);
    Batch {
        id,
        tick,
        epoch,
        delivery: u32::try_from(taken.delivery).expect("few deliveries"),
        age_ms: number(taken.age_ms),
        added: number(taken.added),
        acked: number(taken.acked),
        last: has("last"),
        storm: has("storm"),
        drained: has("drained"),
        messages: taken.messages.iter().map(message).collect(),
        attempts: taken.attempts.iter().map(|attempt| u8::try_from(*attempt).expect("few attempts")).collect(),
        arrived: Instant::now(),
    }
}
