//! Completes request batches of adds (AddNewMsg) and dels (DelMsg). The position of the wheel does not change within a
//! batch. [`super::in_flight_limit`] explains the reservations for the limit of messages in flight.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::RwLockReadGuard;

use super::batch_by_shard::{BatchByShard, Item};
use super::in_flight_limit::Shortage;
use super::journal::Event;
use super::shard::{Position, Shard};
use super::table::{Hash, MAX_SHARD_BITS};
use super::wheel::{MemoryWheel, WheelState};
use crate::core::{Message, Refusal, Request, RequestBatch};

const _: () = assert!(1 << MAX_SHARD_BITS <= u128::BITS, "a bit for each shard");

thread_local! {
    /// The messages of a batch, sorted by shard. All request batches of a thread reuse this memory.
    static BATCH_BY_SHARD: RefCell<BatchByShard> = RefCell::default();
}

impl MemoryWheel {
    /// Completes all requests of a batch.
    pub(super) fn complete(&self, batch: &mut RequestBatch, now: Instant) {
        batch.open();
        if let Some(journal) = &self.journal {
            journal.refuse(batch);
        }
        let adds = batch.messages_to_add();
        if adds > 0 {
            self.record_time(now);
        }
        let all = 0..batch.requests.len();
        let wheel_state = self.state.read();
        let reserves = adds > 0 && !wheel_state.draining;
        if wheel_state.draining {
            refuse_adds(&mut batch.requests);
        } else if reserves && !self.in_flight.reserve_provisionally(adds) {
            return self.complete_near_limit(batch, wheel_state, now);
        }
        let position = self.position(&wheel_state, now);
        let change = self.run(batch, all, &position);
        if reserves {
            self.in_flight.settle(adds, change);
        } else {
            self.in_flight.change(change);
        }
    }

    #[cold]
    fn complete_near_limit(
        &self,
        batch: &mut RequestBatch,
        wheel_state: RwLockReadGuard<'_, WheelState>,
        now: Instant,
    ) {
        let position = self.position(&wheel_state, now);
        let done = self.complete_singly(batch, 0, &position);
        drop(wheel_state);
        if done < batch.requests.len() {
            self.complete_settled(batch, done, now);
        }
    }

    /// Completes the requests from index `from` to the end while no other batch is processed, so that no reservation
    /// is provisional. This is rare: another batch must have begun far from the limit, and the limit must be reached
    /// before that batch ends.
    fn complete_settled(&self, batch: &mut RequestBatch, from: usize, now: Instant) {
        let wheel_state = self.state.write();
        if wheel_state.draining {
            // A drain may have begun since the lock was released.
            refuse_adds(&mut batch.requests[from..]);
        }
        let position = self.position(&wheel_state, now);
        let done = self.complete_singly(batch, from, &position);
        debug_assert_eq!(done, batch.requests.len(), "no reservation is provisional");
    }

    /// Completes the requests from index `from` to the end. Completes each AddNewMsg by itself, because near the limit
    /// the order matters. Returns the index of the first request that must wait for a provisional reservation of
    /// another batch, or the number of requests.
    fn complete_singly(&self, batch: &mut RequestBatch, from: usize, position: &Position) -> usize {
        let mut next = from;
        while next < batch.requests.len() {
            let adds = |number: &usize| batch.requests[*number].adds();
            if !adds(&next) {
                let end = (next..batch.requests.len()).find(adds).unwrap_or(batch.requests.len());
                let change = self.run(batch, next..end, position);
                self.in_flight.change(change);
                next = end;
                continue;
            }
            match self.add_exactly(batch, next, position) {
                Ok(()) => {}
                Err(Shortage::Full) => batch.requests[next].refusal = Some(Arc::clone(&self.full)),
                Err(Shortage::Unsettled) => return next,
            }
            next += 1;
        }
        next
    }

    /// Completes the AddNewMsg with index `number` if its new messages fit. Otherwise changes nothing.
    fn add_exactly(&self, batch: &mut RequestBatch, number: usize, position: &Position) -> Result<(), Shortage> {
        set_deadlines(&mut batch.requests[number..=number], position);
        let Some(new) = self.count_if_all_new(batch, number, position)? else {
            return self.add_and_rearm(batch, number, position);
        };
        self.in_flight.reserve(new)?;
        // The change is smaller than `new` if another connection adds one of the messages at the same time.
        let change = self.run(batch, number..number + 1, position);
        self.in_flight.change(change.wrapping_sub(new));
        Ok(())
    }

    /// Returns the number of different messages of an AddNewMsg, or `None` if one of them is in flight. Fails if even
    /// one new message does not fit.
    ///
    /// Locks one shard at a time, so that no other request waits for long.
    fn count_if_all_new(
        &self,
        batch: &RequestBatch,
        number: usize,
        position: &Position,
    ) -> Result<Option<u64>, Shortage> {
        BATCH_BY_SHARD.with_borrow_mut(|sorted| {
            self.sort(sorted, batch, number..number + 1);
            let mut messages = Vec::new();
            for (shard, items) in sorted.groups() {
                let before = messages.len();
                messages.extend(self.shards.list[shard].lock().new_messages(items, batch, position));
                if messages.len() > before {
                    // This shard has at least one new message. Its other new messages may be repetitions of that
                    // message.
                    self.in_flight.check(1)?;
                }
                if messages.len() < before + items.len() {
                    return Ok(None);
                }
            }
            Ok(Some(count_distinct(messages)))
        })
    }

    /// Completes an AddNewMsg of which some messages are in flight, if its new messages fit. Otherwise changes
    /// nothing.
    ///
    /// Locks all shards of the request at the same time, so that no message is acknowledged or expires before it is
    /// re-armed. Locks them in ascending order. No other code locks a shard while it holds another shard.
    fn add_and_rearm(&self, batch: &mut RequestBatch, number: usize, position: &Position) -> Result<(), Shortage> {
        BATCH_BY_SHARD.with_borrow_mut(|sorted| {
            self.sort(sorted, batch, number..number + 1);
            let (mut shards, mut new) = (Vec::new(), 0);
            for (number, items) in sorted.groups() {
                let mut shard = self.shards.list[number].lock();
                match self.in_flight.check(new + 1) {
                    Ok(()) => new += count_distinct(shard.new_messages(items, batch, position).collect()),
                    Err(shortage) if shard.new_messages(items, batch, position).next().is_some() => {
                        return Err(shortage);
                    }
                    Err(_) => {}
                }
                shards.push((shard, items));
            }
            self.in_flight.reserve(new)?;
            let before = batch.in_flight_change();
            for (shard, items) in &mut shards {
                self.run_shard(shard, items, batch, position);
            }
            let change = batch.in_flight_change().wrapping_sub(before);
            debug_assert_eq!(change, new, "all shards of the request are locked");
            Ok(())
        })
    }

    /// Applies adds and dels to the messages of a shard, and records what changed.
    #[inline]
    fn run_shard(&self, shard: &mut Shard, items: &[Item], batch: &mut RequestBatch, position: &Position) {
        shard.run(items, batch, position);
        if let Some(journal) = &self.journal {
            let overtaken = shard.added_again.iter().map(|(tick, timed_out)| Event::Overtaken {
                tick: tick.seen_from(position.pointer),
                timed_out: *timed_out,
            });
            journal.append_changes(items, batch, overtaken);
        }
    }

    fn sort(&self, sorted: &mut BatchByShard, batch: &RequestBatch, requests: Range<usize>) {
        sorted.sort(batch, requests, self.shards.bits, |message| Hash::of(message, &self.shards.hasher));
    }

    /// Completes the requests in this range. Returns by how much the number of messages in flight has changed. A
    /// negative change wraps around.
    fn run(&self, batch: &mut RequestBatch, requests: Range<usize>, position: &Position) -> u64 {
        set_deadlines(&mut batch.requests[requests.clone()], position);
        let before = batch.in_flight_change();
        BATCH_BY_SHARD.with_borrow_mut(|sorted| {
            self.sort(sorted, batch, requests);
            // Shards that other threads have locked come last. Otherwise threads that visit the shards in the same
            // order would wait for each other at every shard.
            let mut held = 0_u128;
            for (number, items) in sorted.groups() {
                match self.shards.list[number].try_lock() {
                    Some(mut shard) => self.run_shard(&mut shard, items, batch, position),
                    None => held |= 1 << number,
                }
            }
            for (number, items) in sorted.groups().filter(|(number, _)| held >> number & 1 == 1) {
                self.run_shard(&mut self.shards.list[number].lock(), items, batch, position);
            }
        });
        batch.in_flight_change().wrapping_sub(before)
    }
}

/// Sets the deadlines of requests that are not refused.
fn set_deadlines(requests: &mut [Request], position: &Position) {
    for request in requests.iter_mut().filter(|request| request.refusal.is_none()) {
        debug_assert!(
            !request.adds() || request.operation.ack_timeout_ticks() > 0,
            "checked where the request came in"
        );
        // Unused for a DelMsg; computing it anyway is cheaper than a branch.
        request.deadline = position.deadline(request.operation.ack_timeout_ticks());
    }
}

/// Returns the number of different messages.
fn count_distinct(mut messages: Vec<Message>) -> u64 {
    messages.sort_unstable();
    messages.dedup();
    messages.len() as u64
}

/// Refuses adds, because the ring drains.
#[cold]
fn refuse_adds(requests: &mut [Request]) {
    let refusal = Arc::new(Refusal::draining());
    for request in requests.iter_mut().filter(|request| request.adds()) {
        request.refusal.get_or_insert_with(|| Arc::clone(&refusal));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::core::single_request::{AddNewMsg, DelMsg, SingleRequest};
    use crate::core::{DrainOutcome, Operation, Outcome, Reason, Retention, Ring, StormRule, Tick, Wheel};
    use crate::memory::{MemoryOptions, MemoryOutbox, MemoryRing};

    fn ring(max_in_flight: u64, now: Instant) -> MemoryRing {
        let options = MemoryOptions {
            wheel: Wheel::new(15, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight,
            threads: 2,
        };
        MemoryRing::new(options, (1, Tick(1)), Arc::new(MemoryOutbox::new(Retention::default(), now)), now)
    }

    #[test]
    fn a_drain_that_begins_before_an_unsettled_batch_has_its_turn_is_observed() {
        let now = Instant::now();
        let ring = ring(1, now);
        let (one, other) = (Message::from(1), Message::from(2));
        let mut batch = RequestBatch::default();
        batch.push_single(1, Operation::Add { ack_timeout_ticks: 15, attempt: 1 }, one);
        ring.wheel.complete(&mut batch, now);
        assert!(matches!(ring.drain(now).now_or_never(), Some(Ok(DrainOutcome::Published))));
        let mut batch = RequestBatch::default();
        batch.push_single(2, Operation::Add { ack_timeout_ticks: 15, attempt: 1 }, other);
        batch.push_single(3, Operation::Del { withdraw: false }, one);
        batch.open();
        ring.wheel.complete_settled(&mut batch, 0, now);
        let refused = batch.requests[0].refusal.as_ref().map(|refusal| refusal.reason);
        assert_eq!(refused, Some(Reason::Draining));
        assert!(batch.requests[1].refusal.is_none());
        assert_eq!(batch.outcomes()[1], Outcome::Late);
    }

    fn add_one(ring: &MemoryRing, id: u64, now: Instant) -> bool {
        let mut batch = RequestBatch::default();
        batch.push_single(1, Operation::Add { ack_timeout_ticks: 15, attempt: 1 }, Message::from(id));
        ring.wheel.complete(&mut batch, now);
        batch.requests[0].refusal.is_none()
    }

    #[test]
    fn a_full_ring_is_not_locked_for_a_refusal_a_rearm_or_an_ack() {
        let now = Instant::now();
        let ring = ring(2, now);
        assert!(add_one(&ring, 1, now) && add_one(&ring, 2, now));
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            // While the test holds this lock, other requests are being processed.
            let others = ring.wheel.state.read();
            scope.spawn(|| {
                let refused = !add_one(&ring, 3, now);
                let rearmed = add_one(&ring, 1, now);
                let mut batch = RequestBatch::default();
                batch.push_single(1, Operation::Del { withdraw: false }, Message::from(2));
                batch.push_single(2, Operation::Add { ack_timeout_ticks: 15, attempt: 1 }, Message::from(3));
                ring.wheel.complete(&mut batch, now);
                done.send((refused, rearmed, batch.requests[1].refusal.is_none())).unwrap();
            });
            let outcome = is_done.recv_timeout(Duration::from_secs(10));
            drop(others);
            assert_eq!(outcome, Ok((true, true, true)), "no request waits for those of other connections");
        });
        assert_eq!(ring.wheel.in_flight.count(), 2);
    }

    const LIMIT: u64 = 64;

    /// Runs four threads. Each thread adds its `own` messages again and again, some of them twice in a batch, and
    /// acknowledges some. A batch adds more than a sixteenth of the limit. Returns how many adds were refused.
    fn race(ring: &MemoryRing, own: u64, now: Instant) -> u64 {
        let refused = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let refused = &refused;
                scope.spawn(move || {
                    let ids = thread * 1_000..thread * 1_000 + own;
                    for round in 0..5_000 {
                        let mut batch = RequestBatch::default();
                        let again = ids.clone().chain(ids.clone().take(3)).map(Message::from);
                        batch.push(1, Operation::Add { ack_timeout_ticks: 15, attempt: 1 }, again);
                        if round % 3 == 0 {
                            batch.push(
                                2,
                                Operation::Del { withdraw: false },
                                ids.clone().take(5).map(Message::from),
                            );
                        }
                        ring.wheel.complete(&mut batch, now);
                        refused.fetch_add(u64::from(batch.requests[0].refusal.is_some()), Ordering::Relaxed);
                        let in_flight = ring.wheel.in_flight.count();
                        // The number includes provisional reservations, which stay well below the limit.
                        assert!(in_flight <= LIMIT, "{in_flight} are in flight");
                    }
                });
            }
        });
        let left = ring.wheel.shards.len();
        assert_eq!(ring.wheel.in_flight.count(), left as u64);
        refused.load(Ordering::Relaxed)
    }

    #[test]
    fn threads_are_refused_nothing_for_which_there_is_room() {
        let now = Instant::now();
        let ring = ring(LIMIT, now);
        assert_eq!(race(&ring, LIMIT / 4, now), 0, "the messages of all threads fit");
    }

    #[test]
    fn threads_never_have_more_in_flight_than_the_limit() {
        let now = Instant::now();
        let ring = ring(LIMIT, now);
        assert!(race(&ring, LIMIT / 4 + 1, now) > 0, "the messages of all threads do not fit");
    }

    #[test]
    fn what_is_added_again_takes_no_room_from_others_also_while_it_is() {
        let now = Instant::now();
        let ring = ring(40_000, now);
        let messages = |ids: Range<u64>| ids.map(Message::from).collect::<Vec<Message>>();
        let add = |messages: &[Message]| {
            let request = AddNewMsg { messages, ack_timeout_ticks: 15, attempt: 1 };
            ring.add_new_msg(request, now).now_or_never().unwrap().map(drop)
        };
        add(&messages(0..30_000)).unwrap();
        let (again, others) = (messages(0..10_000), messages(50_000..50_500));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..200).for_each(|_| add(&again).unwrap());
                done.store(true, Ordering::SeqCst);
            });
            while !done.load(Ordering::SeqCst) {
                add(&others).unwrap();
                let request = DelMsg { messages: &others, withdraw: false };
                ring.del_msg(request, now).now_or_never().unwrap().unwrap();
            }
        });
        assert_eq!(ring.wheel.in_flight.count(), 30_000);
    }
}
