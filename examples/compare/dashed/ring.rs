//! A ring on dashmap, as well as that can be used: the maps id → tick and tick → ids.
//!
//! It answers the same requests as the ring in memory, in the same bursts, counts the same for each tick and takes
//! the latency of each Ack. It leaves out features that would make it slower: it remembers nothing as `late` once that is
//! listed, has no limit of messages in flight, does not drain, and trusts its ticker never to be held up between its
//! look at the clock and the move.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use ackwheel::core::{
    Advance, Completions, ConnectionId, DrainOutcome, DueAction, Message, MessageState, Operation, Outcome,
    PublishStep, Reason, Refusal, Request, RequestBatch, Ring, RingStatus, Stamp, Submitted, Tick, TickSchedule,
    Wheel,
};
use ackwheel::memory::{MemoryOptions, MemoryOutbox};
use async_trait::async_trait;
use dashmap::SharedValue;
use parking_lot::{Mutex, RwLock};

use super::expire::Expiry;
use super::grouped::{self, Grouped, Item, Key, Map};
use super::slots::{Flight, Slots};

/// Messages that are read before the first of them is dealt with, so that the processor waits for several at once.
const READ_AHEAD: usize = 16;

/// An operation on a message, and the position of the message in its batch.
#[derive(Clone, Copy, Debug)]
struct Todo {
    index: u32,
    verb: Verb,
}

/// The deadline lies so many ticks ahead of the pointer.
#[derive(Clone, Copy, Debug)]
enum Verb {
    Add { ahead: u16, attempt: u8 },
    Del { withdraw: bool },
}

thread_local! {
    /// Used again by every request batch of a thread.
    static GROUPED: RefCell<Grouped<Todo>> = RefCell::default();
}

/// A ring on dashmap.
pub struct DashRing {
    pub(super) options: MemoryOptions,
    pub(super) epoch: u64,
    origin: Instant,
    /// id → tick, with what else is to be known of a message.
    pub(super) map: Map<Flight>,
    /// tick → ids, for each shard of the map. They are locked while that is.
    pub(super) slots: Box<[Mutex<Slots>]>,
    /// A request batch holds it for reading from begin to end, a decision for writing.
    pace: RwLock<TickSchedule>,
    expiry: Mutex<Expiry>,
    pub(super) outbox: Arc<MemoryOutbox>,
}

impl DashRing {
    /// An empty ring whose batches go to `outbox`.
    pub fn new(
        options: MemoryOptions,
        (epoch, pointer): (u64, Tick),
        outbox: Arc<MemoryOutbox>,
        now: Instant,
    ) -> DashRing {
        // As many as our ring would have; dashmap wants two at least.
        let shards = if options.threads > 1 { (options.threads * 4).next_power_of_two() } else { 2 };
        let map = Map::with_hasher_and_shard_amount(foldhash::fast::RandomState::default(), shards);
        DashRing {
            options,
            epoch,
            origin: now,
            map,
            slots: (0..shards).map(|_| Mutex::new(Slots::new(options.wheel))).collect(),
            pace: RwLock::new(TickSchedule::new(options.wheel.tick_length(), pointer, now)),
            expiry: Mutex::default(),
            outbox,
        }
    }

    fn stamp(&self, now: Instant) -> Stamp {
        Stamp::after(now.saturating_duration_since(self.origin))
    }

    /// Does what is asked of the messages of one shard, under one lock.
    fn run(&self, number: usize, items: &[Item<Todo>], batch: &mut RequestBatch, pointer: Tick, now: Stamp) {
        let mut shard = self.map.shards()[number].write();
        let mut slots = self.slots[number].lock();
        let hash_of = |(key, _): &(Key, _)| self.map.hash_usize(key) as u64;
        for items in items.chunks(READ_AHEAD) {
            grouped::read_ahead(items, |hash, key| shard.get(hash, |(known, _)| known == key).is_some());
            for &Item { hash, key, what: Todo { index, verb } } in items {
                let outcome = match verb {
                    Verb::Add { ahead, attempt } => {
                        let flight = Flight { deadline: pointer.plus(ahead.into()), added_at: now, attempt };
                        slots.add(flight.deadline, key);
                        if let Some((_, known)) = shard.get_mut(hash, |(known, _)| *known == key) {
                            slots.overtake(key, std::mem::replace(known.get_mut(), flight), pointer)
                        } else {
                            shard.insert(hash, (key, SharedValue::new(flight)), hash_of);
                            Outcome::Added
                        }
                    }
                    Verb::Del { withdraw } => match shard.remove_entry(hash, |(known, _)| *known == key) {
                        None => Outcome::Unknown,
                        // It is decided, and still to be listed.
                        Some((_, flight)) if flight.get().deadline < pointer => {
                            shard.insert(hash, (key, flight), hash_of);
                            Outcome::Late
                        }
                        Some((_, flight)) if withdraw => slots.withdraw(*flight.get()),
                        Some((_, flight)) => {
                            batch.ack_latency.record_between(flight.get().added_at, now);
                            slots.acknowledge(*flight.get())
                        }
                    },
                };
                batch.set(index as usize, outcome);
            }
        }
    }
}

/// The operation of a request, for each of its messages.
#[expect(clippy::cast_possible_truncation, reason = "a deadline is at most one revolution and a tick ahead")]
const fn verb(request: &Request, pointer: Tick) -> Verb {
    match request.operation {
        Operation::Add { attempt, .. } => Verb::Add { ahead: request.deadline.since(pointer) as u16, attempt },
        Operation::Del { withdraw } => Verb::Del { withdraw },
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a request batch ends far below 4 billion messages")]
const fn first(request: &Request) -> u32 {
    request.range().start as u32
}

#[async_trait]
impl Ring for DashRing {
    fn wheel(&self) -> Wheel {
        self.options.wheel
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        _connection: ConnectionId,
        _completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted {
        batch.open();
        let pace = self.pace.read();
        let (pointer, due) = (pace.pointer(), pace.tick_due(now));
        for request in batch.requests.iter_mut().filter(|request| request.refusal.is_none()) {
            if let Operation::Add { ack_timeout_ticks, .. } = request.operation {
                request.deadline = self.options.wheel.deadline(due, ack_timeout_ticks);
            }
        }
        GROUPED.with_borrow_mut(|grouped| {
            let requests = batch.requests.iter().filter(|request| request.refusal.is_none());
            let items = requests.flat_map(|request| {
                let verb = verb(request, pointer);
                let messages = batch.messages()[request.range()].iter();
                messages.zip(first(request)..).map(move |(message, index)| (*message, Todo { index, verb }))
            });
            grouped.group(&self.map, items);
            for (number, items) in grouped.groups() {
                self.run(number, items, batch, pointer, self.stamp(now));
            }
        });
        Submitted::Completed
    }

    async fn get(&self, _messages: &[Message], _now: Instant) -> Result<Vec<MessageState>, Refusal> {
        let text = "the ring of the comparison reads no message";
        Err(Refusal::new(Reason::UnknownType, text))
    }

    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        let mut pace = self.pace.write();
        Ok(match pace.due_action(now) {
            DueAction::Wait(until) => Advance::Waiting(until),
            DueAction::Shift { missed } => Advance::Waiting(pace.shift(missed, now)),
            DueAction::Advance { lateness } => {
                let (decided, due_at) = (pace.pointer(), pace.next_advance());
                let shifted = pace.record_move();
                let next = pace.next_advance();
                let taken = self.slots.iter().map(|slots| slots.lock().take(decided)).collect();
                drop(pace);
                self.expiry.lock().freeze(decided, taken, self.options.storm, due_at);
                Advance::Moved { expired: decided, lateness, shifted, next }
            }
        })
    }

    async fn publish_expired(&self, now: Instant) -> Result<PublishStep, Refusal> {
        Ok(self.expiry.lock().step(self, now))
    }

    /// Nobody drains a subject.
    async fn drain(&self, _now: Instant) -> Result<DrainOutcome, Refusal> {
        Ok(DrainOutcome::Kept)
    }

    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal> {
        let (wheel, pace) = (self.options.wheel, *self.pace.read());
        let left = |tick: Tick| self.slots.iter().map(|slots| slots.lock().of(tick).left).sum::<u64>();
        let (pointer, mut by_slot) = (pace.pointer(), vec![0; usize::from(wheel.slots())]);
        for tick in (pointer.0 + 1..=pointer.0 + 1 + u64::from(wheel.slots())).map(Tick) {
            by_slot[wheel.slot(tick)] += left(tick);
        }
        let closing = left(pointer);
        Ok(RingStatus {
            pointer,
            pointer_lag_seconds: now.saturating_duration_since(pace.next_advance()).as_secs_f64(),
            epoch: self.epoch,
            leader: Some(String::from("this process")),
            leads: true,
            in_flight: closing + by_slot.iter().sum::<u64>(),
            slots: by_slot,
            closing,
            ..RingStatus::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ackwheel::core::{AddOutcome, DelOutcome, GroupName, Message, Outbox, Retention, StormRule, TimedOut};
    use futures_util::FutureExt;

    use super::*;
    use crate::single_request::{AddNewMsg, DelMsg, SingleRequest};

    const TICK: Duration = Duration::from_secs(1);

    fn answer<T>(reply: impl Future<Output = Result<T, Refusal>>) -> T {
        reply.now_or_never().expect("it answers at once").expect("it refuses nothing")
    }

    fn ring(start: Instant) -> DashRing {
        let options = MemoryOptions {
            wheel: Wheel::new(3, TICK).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 100,
            threads: 1,
        };
        DashRing::new(options, (1, Tick(7)), Arc::new(MemoryOutbox::new(Retention::default(), start)), start)
    }

    fn add(ring: &DashRing, ids: &[u64], ack_timeout_ticks: u16, attempt: u8, now: Instant) -> Vec<AddOutcome> {
        let messages: Vec<Message> = ids.iter().copied().map(Message::from).collect();
        answer(ring.add_new_msg(AddNewMsg { messages: &messages, ack_timeout_ticks, attempt }, now)).outcomes
    }

    fn del(ring: &DashRing, id: u64, now: Instant) -> DelOutcome {
        let request = DelMsg { messages: &[Message::from(id)], withdraw: false };
        answer(ring.del_msg(request, now)).outcomes[0]
    }

    /// Every step of expiry; returns the counts and what is in the outbox.
    fn publish_expired(ring: &DashRing, now: Instant) -> (Vec<(u64, u64, u64)>, Vec<TimedOut>) {
        let mut counted = Vec::new();
        loop {
            let expired = answer(ring.publish_expired(now));
            counted.extend(expired.counted.map(|(tick, counts)| (tick.0, counts.added, counts.acked)));
            if !expired.more {
                break;
            }
        }
        let batches = answer(ring.outbox.take(&GroupName::default_group(), u64::MAX, now));
        let mut lost: Vec<TimedOut> = batches.iter().flat_map(|found| found.batch.messages.clone()).collect();
        lost.sort_unstable();
        (counted, lost)
    }

    #[test]
    fn what_is_not_acknowledged_times_out_once_with_the_tick_that_it_was_last_added_for() {
        use AddOutcome::{Added, Rearmed};
        let start = Instant::now();
        let ring = ring(start);
        assert_eq!(add(&ring, &[1, 2, 3, 4, 4], 1, 1, start), [Added, Added, Added, Added, Rearmed]);
        assert_eq!(add(&ring, &[3], 2, 2, start), [Rearmed]);
        assert_eq!((del(&ring, 1, start), del(&ring, 1, start)), (DelOutcome::Acked, DelOutcome::Unknown));
        assert!(matches!(answer(ring.advance(start + TICK)), Advance::Moved { expired: Tick(7), .. }));
        let decided = start + 2 * TICK;
        assert!(matches!(answer(ring.advance(decided)), Advance::Moved { expired: Tick(8), .. }));
        // Between decision and listing.
        assert_eq!(del(&ring, 2, decided), DelOutcome::Late);
        assert_eq!(add(&ring, &[4], 1, 3, decided), [Added]);
        let lost = |id: u64, attempt| TimedOut { message: Message::from(id), attempt };
        let (counted, first) = publish_expired(&ring, decided);
        assert_eq!((counted, first), (vec![(7, 0, 0), (8, 3, 1)], vec![lost(2, 1), lost(4, 1)]));
        assert_eq!(answer(ring.status(decided)).in_flight, 2);
        for tick in 3..=4 {
            answer(ring.advance(start + tick * TICK));
        }
        let (counted, second) = publish_expired(&ring, start + 4 * TICK);
        assert_eq!((counted, second), (vec![(9, 1, 0), (10, 1, 0)], vec![lost(3, 2), lost(4, 3)]));
        assert_eq!((ring.map.len(), answer(ring.status(decided)).in_flight), (0, 0));
    }
}
