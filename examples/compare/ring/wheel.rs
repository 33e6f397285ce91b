//! A ring, ours or the one on dashmap, as a server uses it: time is read once a batch, and ticks are decided when
//! they are due.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ackwheel::core::{
    Advance, Completions, ConnectionId, Message, Operation, Outcome, RequestBatch, Retention, Ring, StormRule,
    Submitted, Tick, Wheel,
};
use ackwheel::memory::{MemoryOptions, MemoryOutbox, MemoryRing};
use futures_util::FutureExt;

use super::Found;
use super::subject::Subject;
use crate::dashed::DashRing;
use crate::numbers::messages;

/// A ring; of several handles to one, a single one knows the time of the next tick and turns it. It is asked as a
/// session asks it, with bursts.
pub struct Wheeled<R> {
    ring: Arc<R>,
    batch: RequestBatch,
    completions: Arc<Completions>,
    next: Option<Instant>,
}

impl Wheeled<MemoryRing> {
    /// An empty ring of the usual dimensions, made for so many threads.
    pub fn for_threads(threads: usize) -> Wheeled<MemoryRing> {
        Wheeled::new(threads, MemoryRing::new)
    }

    /// One ring for so many threads; the first of them turns it.
    pub fn shared(threads: usize) -> Vec<Wheeled<MemoryRing>> {
        let mut first = Wheeled::for_threads(threads);
        let others = (1..threads).map(|_| Wheeled {
            ring: Arc::clone(&first.ring),
            batch: RequestBatch::default(),
            completions: Arc::default(),
            next: None,
        });
        let mut all: Vec<Wheeled<MemoryRing>> = others.collect();
        first.turn(Instant::now());
        all.push(first);
        all
    }
}

impl Wheeled<DashRing> {
    /// The same on dashmap, for one thread.
    pub fn on_dashmap() -> Wheeled<DashRing> {
        Wheeled::new(1, DashRing::new)
    }
}

impl<R: Ring> Wheeled<R> {
    fn new(
        threads: usize,
        make: impl FnOnce(MemoryOptions, (u64, Tick), Arc<MemoryOutbox>, Instant) -> R,
    ) -> Wheeled<R> {
        let now = Instant::now();
        let options = MemoryOptions {
            wheel: Wheel::default(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: u64::MAX >> 1,
            threads,
        };
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), now));
        Wheeled {
            ring: Arc::new(make(options, (1, Tick(1)), outbox, now)),
            batch: RequestBatch::default(),
            completions: Arc::default(),
            next: Some(now),
        }
    }

    /// Moves the pointer if that is due, and carries what was decided to the outbox; returns how much that was.
    fn turn(&mut self, now: Instant) -> u64 {
        if self.next.is_none_or(|next| now < next) {
            return 0;
        }
        self.advance(now);
        let mut published = 0;
        loop {
            let (messages, more) = self.publish_expired(now);
            published += messages;
            if !more {
                return published;
            }
        }
    }

    fn advance(&mut self, now: Instant) {
        let advanced = self.ring.advance(now).now_or_never().expect("memory answers at once");
        self.next = match advanced.expect("memory is not away") {
            Advance::Waiting(next) | Advance::Moved { next, .. } => Some(next),
            Advance::Deposed => None,
        };
    }

    /// Does one step with what was decided; returns how many messages that brought to the outbox, and whether there is
    /// more to do.
    fn publish_expired(&mut self, now: Instant) -> (u64, bool) {
        let expired = self.ring.publish_expired(now).now_or_never().expect("memory answers at once");
        let expired = expired.expect("memory is not away");
        (expired.published.map_or(0, |batch| batch.messages), expired.more)
    }

    fn add_for(&mut self, messages: &[Message], ack_timeout_ticks: u16, now: Instant) -> usize {
        self.ask(Operation::Add { ack_timeout_ticks, attempt: 1 }, messages, Outcome::Added, now)
    }

    fn del_at(&mut self, messages: &[Message], now: Instant) -> usize {
        self.ask(Operation::Del { withdraw: false }, messages, Outcome::Acked, now)
    }

    /// Returns how many messages had this outcome.
    fn ask(&mut self, operation: Operation, messages: &[Message], outcome: Outcome, now: Instant) -> usize {
        self.batch.clear(usize::MAX);
        self.batch.push(1, operation, messages.iter().copied());
        let submitted = self.ring.submit(&mut self.batch, ConnectionId::default(), &self.completions, now);
        assert_eq!(submitted, Submitted::Completed);
        self.batch.outcomes().iter().filter(|found| **found == outcome).count()
    }
}

impl<R: Ring> Subject for Wheeled<R> {
    fn add(&mut self, messages: &[Message]) -> usize {
        let now = Instant::now();
        self.turn(now);
        self.add_for(messages, 15, now)
    }

    fn del(&mut self, messages: &[Message]) -> usize {
        self.del_at(messages, Instant::now())
    }
}

/// Decides a tick of so many messages of which some are left: from the advance to the last batch in the outbox.
pub fn decide(mut wheel: Wheeled<impl Ring>, in_flight: u64, left: u64) -> Found {
    let added = messages(0..in_flight);
    let start = Instant::now();
    // Those that are left lie all over the tick.
    let stride = in_flight / left;
    let acked: Vec<Message> =
        (0..).zip(&added).filter(|(n, _)| n % stride != 0).map(|(_, message)| *message).collect();
    added.chunks(256).for_each(|batch| assert_eq!(wheel.add_for(batch, 1, start), batch.len()));
    // Time is what it is told: the first tick to pass only closes, the next one is decided.
    let tick = Duration::from_secs(1);
    assert_eq!(wheel.turn(start + tick), 0, "a tick that closes is not decided");
    // After that, since memory that is not needed is given back between ticks: the table is as large as it was.
    acked.chunks(256).for_each(|batch| assert_eq!(wheel.del_at(batch, start + tick), batch.len()));
    let now = start + 2 * tick;
    let left = added.len() as u64 - acked.len() as u64;
    let begun = Instant::now();
    wheel.advance(now);
    let mut published = 0;
    // The ring reclaims memory after that, between two ticks.
    while published < left {
        let (messages, more) = wheel.publish_expired(now);
        published += messages;
        assert!(more || published == left, "what is left times out");
    }
    let elapsed = begun.elapsed();
    assert_eq!(published, left, "nothing else times out");
    Found { decide_ms: Some(elapsed.as_secs_f64() * 1e3), ..Found::default() }
}
