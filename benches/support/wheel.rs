//! A ring in memory that gets whole request batches, as from a session.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ackwheel::bench::Order;
use ackwheel::core::{
    Advance, Completions, ConnectionId, Message, Operation, Outcome, RequestBatch, Retention, Ring, StormRule,
    Submitted, Tick, Wheel,
};
use ackwheel::memory::{MemoryOptions, MemoryOutbox, MemoryRing};
use futures_util::FutureExt;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::messages::random_messages;

/// Messages of a request batch, and the most of one request.
pub const BATCH: usize = 256;

/// Slots of the wheel, and the ack timeout of messages that should not time out.
pub const SLOTS: u16 = 15;

const TICK: Duration = Duration::from_secs(1);

/// Number of messages outside of the window, of which the next ones are added.
const SPARE: usize = 64 * BATCH;

/// A ring, a batch that is reused, and a clock that moves on demand.
pub struct Subject {
    ring: MemoryRing,
    now: Instant,
    batch: RequestBatch,
    completions: Arc<Completions>,
    random: SmallRng,
}

impl Subject {
    pub fn new() -> Subject {
        let now = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), now));
        let options = MemoryOptions {
            wheel: Wheel::new(SLOTS, TICK).expect("usual dimensions"),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: u64::MAX,
            threads: 1,
        };
        Subject {
            ring: MemoryRing::new(options, (1, Tick(1)), outbox, now),
            now,
            batch: RequestBatch::default(),
            completions: Arc::default(),
            random: SmallRng::seed_from_u64(3),
        }
    }

    /// Submits the batch and clears it. Every message must have one of the expected outcomes, since work that was not
    /// done would look fast.
    pub fn submit(&mut self, expected: &[Outcome]) {
        let submitted = self.ring.submit(&mut self.batch, ConnectionId::default(), &self.completions, self.now);
        assert_eq!(submitted, Submitted::Completed);
        let done: u64 = expected.iter().map(|outcome| self.batch.total(*outcome)).sum();
        assert_eq!(done, self.batch.messages().len() as u64, "not every message is one of {expected:?}");
        self.batch.clear(usize::MAX);
    }

    /// Adds messages that must all have the same outcome, in request batches of one request with up to 256 messages.
    pub fn add(&mut self, messages: &[Message], ack_timeout_ticks: u16, expected: Outcome) {
        for messages in messages.chunks(BATCH) {
            self.batch.push(1, Operation::Add { ack_timeout_ticks, attempt: 1 }, messages.iter().copied());
            self.submit(&[expected]);
        }
    }

    /// Acknowledges messages in flight, in request batches of one request with up to 256 messages.
    pub fn del(&mut self, messages: &[Message]) {
        for messages in messages.chunks(BATCH) {
            self.batch.push(2, Operation::Del { withdraw: false }, messages.iter().copied());
            self.submit(&[Outcome::Acked]);
        }
    }

    /// Adds messages and acknowledges as many, in request batches of 256 requests with one message each.
    pub fn singly(&mut self, entering: &[Message], leaving: &[Message], order: Order) {
        const OPERATIONS: [Operation; 2] =
            [Operation::Add { ack_timeout_ticks: SLOTS, attempt: 1 }, Operation::Del { withdraw: false }];
        for (entering, leaving) in entering.chunks(BATCH / 2).zip(leaving.chunks(BATCH / 2)) {
            let messages = [entering, leaving].concat();
            // The index of the next message of each kind, and the end of each kind.
            let (mut next, ends) = ([0, entering.len()], [entering.len(), messages.len()]);
            for number in 0..messages.len() {
                let wanted = match order {
                    Order::InTurn => number % 2 == 1,
                    Order::Mixed => self.random.next_u64() >> 63 == 1,
                };
                let wanted = usize::from(wanted).max(usize::from(next[0] == ends[0]));
                // Hides from the compiler that it is 0 or 1. Otherwise it makes a branch, which would be counted.
                let kind = black_box(wanted.min(usize::from(next[1] < ends[1])));
                self.batch.push_single(1, OPERATIONS[kind], messages[next[kind]]);
                next[kind] += 1;
            }
            self.submit(&[Outcome::Added, Outcome::Acked]);
        }
    }

    /// Moves the pointer once. The tick that it leaves expires.
    pub fn advance(&mut self) {
        self.now += TICK;
        let advance = self.ring.advance(self.now).now_or_never();
        assert!(matches!(advance, Some(Ok(Advance::Moved { .. }))), "the pointer did not move");
    }

    /// Does the next step of expiry. Returns how many messages it published; `None` if no work is left.
    pub fn publish_expired(&mut self) -> Option<u64> {
        let expired = self.ring.publish_expired(self.now).now_or_never().expect("memory answers at once");
        let expired = expired.expect("memory refuses nothing");
        expired.more.then(|| expired.published.map_or(0, |batch| batch.messages))
    }
}

/// A window that moves over a circle of messages. The messages in the window are in flight.
pub struct Window {
    messages: Vec<Message>,
    /// The index of the next batch to leave the window.
    oldest: usize,
    /// The index of the next batch to enter it.
    newest: usize,
}

impl Window {
    /// A window of at least `in_flight` messages, in whole batches.
    pub fn new(in_flight: usize) -> Window {
        let in_flight = in_flight.next_multiple_of(BATCH);
        Window { messages: random_messages(in_flight + SPARE, 1), oldest: 0, newest: in_flight }
    }

    /// The messages in flight before the window moves for the first time.
    pub fn inside(&self) -> &[Message] {
        &self.messages[..self.newest]
    }

    /// Moves by a batch. Returns the messages to add and those to acknowledge.
    pub fn step(&mut self) -> (&[Message], &[Message]) {
        let (entering, leaving) = (self.newest, self.oldest);
        self.newest = (entering + BATCH) % self.messages.len();
        self.oldest = (leaving + BATCH) % self.messages.len();
        (&self.messages[entering..entering + BATCH], &self.messages[leaving..leaving + BATCH])
    }
}
