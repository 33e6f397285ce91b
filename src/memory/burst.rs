//! What is asked of the ring: bursts of adds and dels, each done under one look at where the wheel stands.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::ring::{MemoryRing, Standing};
use super::shard::Position;
use super::sorted::Sorted;
use super::table::{HashMessage, MAX_SHARD_BITS};
use crate::core::burst::{Burst, Request};
use crate::core::message::Message;
use crate::core::refusal::{Reason, Refusal};
use crate::core::ring::AtOnce;

const _: () = assert!(1 << MAX_SHARD_BITS <= u128::BITS, "a bit tells of each shard whether it is held");

thread_local! {
    /// Used again by every burst of a thread.
    static SORTED: RefCell<Sorted> = RefCell::default();
}

impl AtOnce for MemoryRing {
    fn do_all(&self, burst: &mut Burst, now: Instant) {
        burst.open();
        let adds = burst.messages_to_add();
        if adds > 0 {
            self.see(now);
        }
        let standing = self.standing.read();
        let reserved = if standing.draining {
            refuse(burst, &standing);
            0
        } else if self.reserve(adds) {
            adds
        } else {
            drop(standing);
            return self.do_near_limit(burst, now);
        };
        let position = self.position(&standing, now);
        self.run(burst, 0..burst.requests.len(), &position, reserved);
    }
}

impl MemoryRing {
    /// Does each request by itself, since it matters who comes first, and alone: others count re-arms as new messages
    /// until they are done.
    #[cold]
    fn do_near_limit(&self, burst: &mut Burst, now: Instant) {
        let standing = self.standing.write();
        if standing.draining {
            // Since it was looked at before. What is in flight has perhaps been handed out already.
            refuse(burst, &standing);
        }
        let position = self.position(&standing, now);
        for number in 0..burst.requests.len() {
            match self.admit(burst, &burst.requests[number], &position) {
                Ok(reserved) => self.run(burst, number..number + 1, &position, reserved),
                Err(refusal) => burst.requests[number].refusal = Some(Box::new(refusal)),
            }
        }
    }

    /// Notes the time of a request, before the pace is asked about it.
    fn see(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.origin).as_nanos();
        self.latest_ns.fetch_max(u64::try_from(elapsed).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Counts messages as in flight ahead of adding them, if there is room for all.
    fn reserve(&self, count: u64) -> bool {
        if count == 0 {
            return true;
        }
        let before = self.in_flight.fetch_add(count, Ordering::Relaxed);
        let has_room = before.saturating_add(count) <= self.options.max_in_flight;
        if !has_room {
            self.in_flight.fetch_sub(count, Ordering::Relaxed);
        }
        has_room
    }

    /// Makes room for one request; returns how many messages were counted as in flight. One that is in flight
    /// already, or stands there twice, needs no room.
    fn admit(&self, burst: &Burst, request: &Request, position: &Position) -> Result<u64, Refusal> {
        if !request.adds() {
            return Ok(0);
        }
        let is_fresh = |message: &&Message| {
            let (hash, shard) = self.shard_of(**message);
            !shard.lock().is_in_flight(hash, **message, position)
        };
        let fresh: HashSet<&Message> = burst.messages()[request.range()].iter().filter(is_fresh).collect();
        let wanted = fresh.len() as u64;
        if self.reserve(wanted) {
            return Ok(wanted);
        }
        let (in_flight, max) = (self.in_flight.load(Ordering::Relaxed), self.options.max_in_flight);
        Err(Refusal::new(
            Reason::MaxInFlight,
            format!(
                "{in_flight} messages are in flight and {wanted} more would exceed the limit of {max}: try again when \
                 some are acknowledged or have timed out, or raise --max-in-flight"
            ),
        ))
    }

    /// Does these requests, for whose messages `reserved` were counted as in flight.
    fn run(&self, burst: &mut Burst, requests: Range<usize>, position: &Position, reserved: u64) {
        for request in burst.requests[requests.clone()].iter_mut().filter(|request| request.refusal.is_none()) {
            debug_assert!(
                !request.adds() || request.asks.ack_timeout_ticks() > 0,
                "checked where the request came in"
            );
            // What that says of a del is never looked at: it is faster than to ask which one is an add.
            request.deadline = position.deadline(request.asks.ack_timeout_ticks());
        }
        let before = burst.in_flight_change();
        SORTED.with_borrow_mut(|sorted| {
            sorted.sort(burst, requests, self.shard_bits, |message| self.hasher.hash_of(message));
            // Shards that others hold come last: threads that waited for each other would go on in step.
            let mut held = 0_u128;
            for (number, items) in sorted.groups() {
                match self.shards[number].try_lock() {
                    Some(mut shard) => shard.run(items, burst, position),
                    None => held |= 1 << number,
                }
            }
            for (number, items) in sorted.groups().filter(|(number, _)| held >> number & 1 == 1) {
                self.shards[number].lock().run(items, burst, position);
            }
        });
        // More than was reserved is added only if a message left in the very moment that it was counted.
        let change = burst.in_flight_change().wrapping_sub(before).wrapping_sub(reserved);
        if change != 0 {
            self.in_flight.fetch_add(change, Ordering::Relaxed);
        }
    }
}

/// Refuses what a ring that drains does not do.
#[cold]
fn refuse(burst: &mut Burst, standing: &Standing) {
    if standing.saved {
        let text = "this sidecar has gone, and its messages are kept for its next start: ask again then";
        burst.refuse_all(&Refusal::new(Reason::Draining, text));
    } else {
        let text = "this sidecar is draining and takes no new messages: add them through another one";
        burst.refuse_adds(&Refusal::new(Reason::Draining, text));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::burst::{Asks, Outcome};
    use crate::core::outbox::Retention;
    use crate::core::ring::{AddNewMsg, Asker, DelMsg, Handover, Ring};
    use crate::core::store::Moment;
    use crate::core::tick::{Tick, Wheel};
    use crate::memory::state::Saved;
    use crate::memory::{MemoryOutbox, RingOptions};

    fn ring(max_in_flight: u64, now: Instant) -> MemoryRing {
        let options = RingOptions {
            wheel: Wheel::new(15, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            max_in_flight,
            threads: 2,
            epoch: 1,
            pointer: Tick(1),
        };
        MemoryRing::new(options, Arc::new(MemoryOutbox::new(Retention::default(), now)), now)
    }

    #[test]
    fn a_drain_that_comes_before_a_burst_near_the_limit_has_its_turn_is_heeded() {
        let now = Instant::now();
        let ring = ring(1, now);
        let (one, other) = (Message::from(1), Message::from(2));
        let mut burst = Burst::default();
        burst.push_single(1, Asks::Add { ack_timeout_ticks: 15, attempt: 1 }, one);
        ring.do_all(&mut burst, now);
        assert!(matches!(ring.drain(now).now_or_never(), Some(Ok(Handover::HandedOut))));
        let mut burst = Burst::default();
        burst.push_single(2, Asks::Add { ack_timeout_ticks: 15, attempt: 1 }, other);
        burst.push_single(3, Asks::Del { withdraw: false }, one);
        burst.open();
        ring.do_near_limit(&mut burst, now);
        let refused = burst.requests[0].refusal.as_ref().map(|refusal| refusal.reason);
        assert_eq!(refused, Some(Reason::Draining));
        assert!(burst.requests[1].refusal.is_none());
        assert_eq!(burst.outcomes()[1], Outcome::Late);
    }

    #[test]
    fn what_is_written_down_is_not_changed_any_more() {
        let now = Instant::now();
        let ring = ring(10, now);
        let mut burst = Burst::default();
        burst.push_single(1, Asks::Add { ack_timeout_ticks: 15, attempt: 1 }, Message::from(1));
        ring.do_all(&mut burst, now);
        ring.standing.write().draining = true;
        let saved = Saved::of(&ring, &ring.outbox, Moment { now, unix_time: Duration::ZERO });
        let mut burst = Burst::default();
        burst.push_single(2, Asks::Del { withdraw: false }, Message::from(1));
        ring.do_all(&mut burst, now);
        let refused = burst.requests[0].refusal.as_ref().map(|refusal| refusal.reason);
        assert_eq!(
            refused,
            Some(Reason::Draining),
            "else it would be acknowledged here, and time out in the next process"
        );
        assert_eq!(saved.in_flight(), 1);
    }

    #[test]
    fn what_is_added_again_takes_no_room_from_others_also_while_it_is() {
        let now = Instant::now();
        let ring = ring(40_000, now);
        let messages = |ids: Range<u64>| ids.map(Message::from).collect::<Vec<Message>>();
        let add = |messages: &[Message]| {
            let request = AddNewMsg { messages, ack_timeout_ticks: 15, attempt: 1, asker: Asker::default() };
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
                let request = DelMsg { messages: &others, withdraw: false, asker: Asker::default() };
                ring.del_msg(request, now).now_or_never().unwrap().unwrap();
            }
        });
        assert_eq!(ring.in_flight.load(Ordering::Relaxed), 30_000);
    }
}
