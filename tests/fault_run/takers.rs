//! Subscribers, of which some hold what they get, give it back, or go with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::peer::{Came, Peer};
use super::shared::{Phase, Shared};
use crate::support::frames;
use crate::support::raw::Batch;

/// How long a subscriber waits for a batch before it looks what phase it is.
const LOOK: Duration = Duration::from_millis(50);

/// How a subscriber treats what it gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Manners {
    /// It acknowledges at once.
    Prompt,
    /// It may do whatever a subscriber can do.
    Any,
}

/// Starts a subscriber, which ends with the run and returns all that was delivered to it, in order.
pub fn start(shared: &Arc<Shared>, group: &'static str, manners: Manners, seed: u64) -> JoinHandle<Vec<Batch>> {
    let shared = Arc::clone(shared);
    thread::spawn(move || {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut batches = Vec::new();
        while !shared.is(Phase::Over) {
            match shared.connect(&mut random) {
                Some((_, peer)) => {
                    subscribe(peer, &shared, group, manners, &mut random, &mut batches);
                }
                None => thread::sleep(LOOK),
            }
        }
        batches
    })
}

/// Takes batches until the connection ends; none, if it did before it was to.
fn subscribe(
    mut peer: Peer,
    shared: &Shared,
    group: &str,
    manners: Manners,
    random: &mut SmallRng,
    batches: &mut Vec<Batch>,
) -> Option<()> {
    let credit = [1, 100, 100_000][random.random_range(0..3)];
    peer.request(&frames::subscribe(group, credit, 0))?;
    while !shared.is(Phase::Over) && !peer.went_away {
        let frame = match peer.receive(Instant::now() + LOOK) {
            Came::End => return None,
            Came::Frame(frame) if frame.kind == frames::TIMEOUT_BATCH => frame,
            // A subscription is refused where a sidecar drains, or has no store.
            Came::Frame(frame) if frame.kind == frames::ERROR => return None,
            Came::Frame(_) | Came::Nothing => continue,
        };
        let batch = Batch::of(&frame);
        let id = batch.id;
        batches.push(batch);
        let prompt = manners == Manners::Prompt || shared.is(Phase::Calm);
        match if prompt { 0 } else { random.random_range(0..100) } {
            0..60 => peer.request(&frames::batch_ack(&[id]))?,
            60..70 => peer.request(&frames::batch_nack(id, random.random_range(0..500)))?,
            // It stays silent about this one.
            70..90 => continue,
            _ => return None,
        };
    }
    Some(())
}

/// Asserts that each batch is the same whenever it comes, and that its deliveries can be told apart; returns the
/// first delivery of each.
#[track_caller]
pub fn assert_only_redeliveries(deliveries: &[Batch]) -> HashMap<[u8; 24], Batch> {
    let mut first: HashMap<[u8; 24], Batch> = HashMap::new();
    let mut counts: HashMap<[u8; 24], Vec<u32>> = HashMap::new();
    for batch in deliveries {
        let counts = counts.entry(batch.id).or_default();
        assert!(!counts.contains(&batch.delivery), "delivery {} came twice: {batch:?}", batch.delivery);
        counts.push(batch.delivery);
        let first = first.entry(batch.id).or_insert_with(|| batch.clone());
        assert_eq!(first.messages, batch.messages, "not the same messages: {first:?} {batch:?}");
        assert_eq!(
            (first.added, first.acked, first.last, first.storm, &first.attempts),
            (batch.added, batch.acked, batch.last, batch.storm, &batch.attempts),
            "not the same: {first:?} {batch:?}"
        );
        first.arrived = first.arrived.min(batch.arrived);
    }
    first
}
