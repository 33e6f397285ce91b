//! The ring in memory.
//!
//! # One truth, in parts
//!
//! Messages are spread over [`Shard`]s by a hash that is keyed per process, since ids come from clients. A shard is
//! a table under a lock, and everything that happens to a message happens there. Around the shards stands
//! `standing`: where the wheel stands. Whoever asks for something holds it for reading from begin to end, and a
//! decision holds it for writing, so each request lies wholly before a decision or wholly behind it:
//!
//! | what | holds `standing` | then, under the lock of the shard |
//! |---|---|---|
//! | add | reading | put the entry in; count it in its tick |
//! | del | reading | entry is there and not decided: take it out, count it |
//! | list D ahead, step by step | – | each entry of this deadline goes on the list, and is marked; who leaves says so |
//! | decide tick D | writing | take the counts of D from every shard: they are final |
//! | list D, step by step | – | each entry of this deadline goes on the list, and is marked |
//! | forget D, step by step | – | each entry of this deadline goes |
//!
//! A message that is decided but not yet listed can be added again: then what it was joins the list by way of the
//! shard's `overtaken`. After the decision an entry stays, as the memory of what is `late`, for a revolution.
//!
//! # Together
//!
//! Requests come in request batches. Their messages are sorted by shard, with the order of each message kept; a shard is
//! locked once for all of its messages; and what a few dozen of them need from memory is asked for before the first
//! is looked at ([`Table::fetch_group`](super::table::Table::fetch_group)).

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use super::entry::Entry;
use super::expire::Expiry;
use super::in_flight::InFlight;
use super::options::RingOptions;
use super::outbox::MemoryOutbox;
use super::saving;
use super::shard::{self, OfTick, Position, Shard, horizon};
use super::state_file::StateFile;
use super::table::{Hash, HashMessage, Keyed, MAX_SHARD_BITS};
use crate::core::completions::Completions;
use crate::core::latency_histogram::Stamp;
use crate::core::message::Message;
use crate::core::refusal::{Reason, Refusal};
use crate::core::request_batch::RequestBatch;
use crate::core::ring::{Advance, ConnectionId, Handover, PublishStep, Reply, Ring, RingStatus, Submitted};
use crate::core::tick::{Tick, Wheel};
use crate::core::tick_schedule::{TickSchedule, Turn};

/// Shards for each of several threads: so many that two seldom want the same, and so few that a request batch has several
/// messages for each. One thread alone has one shard, and what it is asked needs no sorting.
const SHARDS_PER_THREAD: usize = 4;

/// A ring that lives in the process.
pub struct MemoryRing {
    pub(super) options: RingOptions,
    /// Where stamps count from.
    pub(super) origin: Instant,
    pub(super) hasher: Keyed,
    pub(super) shard_bits: u32,
    pub(super) shards: Box<[Mutex<Shard<Keyed>>]>,
    pub(super) wheel_state: RwLock<WheelState>,
    /// The latest time that any request brought, in ns since the origin: see [`MemoryRing::turn`].
    pub(super) latest_ns: AtomicU64,
    pub(super) in_flight: InFlight,
    /// The answer to adds for which there is no room: the same for all.
    pub(super) full: Arc<Refusal>,
    pub(super) expiry: Mutex<Expiry>,
    pub(super) outbox: Arc<MemoryOutbox>,
    /// Where a drain keeps what is in flight.
    pub(super) state_file: Option<StateFile>,
    /// Itself, for the thread that writes the state file.
    this: Weak<MemoryRing>,
}

/// Where the wheel stands.
#[derive(Debug)]
pub(super) struct WheelState {
    pace: TickSchedule,
    /// Ticks below this one are decided. It is the pointer, and after a drain beyond every deadline.
    expired_below: Tick,
    /// Whether new messages are refused.
    pub(super) draining: bool,
    /// Whether a drain has handed out what was in flight: nothing is left to decide.
    handed_out: bool,
    /// Whether all of it was written down for the next start: what changes from now on would be forgotten.
    pub(super) saved: bool,
}

impl MemoryRing {
    /// An empty ring whose batches go to `outbox`.
    #[must_use]
    pub fn new(options: RingOptions, outbox: Arc<MemoryOutbox>, now: Instant) -> MemoryRing {
        let shards = if options.threads > 1 { options.threads * SHARDS_PER_THREAD } else { 1 };
        let shard_bits = shards.next_power_of_two().ilog2().min(MAX_SHARD_BITS);
        let hasher = Keyed::default();
        let shard = |_| Mutex::new(Shard::new(options.wheel, hasher.clone()));
        MemoryRing {
            options,
            origin: now,
            shards: (0..1 << shard_bits).map(shard).collect(),
            shard_bits,
            hasher,
            wheel_state: RwLock::new(WheelState {
                pace: TickSchedule::new(options.wheel.tick_length(), options.pointer, now),
                expired_below: options.pointer,
                draining: false,
                saved: false,
                handed_out: false,
            }),
            latest_ns: AtomicU64::new(0),
            in_flight: InFlight::new(options.max_in_flight),
            full: Arc::new(Refusal::new(
                Reason::MaxInFlight,
                "as many messages are in flight as --max-in-flight allows: try again when some are acknowledged or have \
                 timed out, or raise --max-in-flight",
            )),
            expiry: Mutex::new(Expiry::default()),
            outbox,
            state_file: None,
            this: Weak::new(),
        }
    }

    /// The same, but a drain keeps what is in flight for a state file.
    pub(super) fn kept_in(self, state_file: Option<StateFile>, this: Weak<MemoryRing>) -> MemoryRing {
        MemoryRing { state_file, this, ..self }
    }

    /// Lets the pointer stay where it is until then, and for a tick more.
    #[cold]
    pub(super) fn hold(&self, until: Instant) {
        self.wheel_state.write().pace.hold(until);
    }

    pub(super) fn stamp(&self, now: Instant) -> Stamp {
        Stamp::after(now.saturating_duration_since(self.origin))
    }

    pub(super) fn expire_step(&self, now: Instant) -> PublishStep {
        self.expiry.lock().step(self, now)
    }

    pub(super) fn pointer(&self) -> Tick {
        self.wheel_state.read().pace.pointer()
    }

    /// The tick that is decided next, if any will be.
    pub(super) fn next_expired(&self) -> Option<Tick> {
        let wheel_state = self.wheel_state.read();
        (!wheel_state.handed_out).then(|| wheel_state.pace.pointer())
    }

    pub(super) fn shard_of(&self, message: Message) -> (Hash, &Mutex<Shard<Keyed>>) {
        let hash = self.hasher.hash_of(message);
        (hash, &self.shards[hash.shard(self.shard_bits)])
    }

    /// Puts back what a state file held: the messages, and those acknowledged so far of ticks not decided.
    pub(super) fn restore(
        &self,
        entries: impl Iterator<Item = Entry>,
        acked: &[(Tick, u64)],
        now: Instant,
    ) -> u64 {
        let position = self.position(&self.wheel_state.read(), now);
        let mut in_flight = 0;
        for entry in entries {
            let (hash, shard) = self.shard_of(entry.message);
            in_flight += u64::from(shard.lock().restore(hash, entry, &position));
        }
        for (tick, acked) in acked {
            // Counts of a tick are summed over the shards, so any of them may keep these.
            self.shards[0].lock().of_tick(*tick, self.options.wheel).acked += acked;
        }
        self.in_flight.change(in_flight);
        in_flight
    }

    /// Counts of the tick, over all shards.
    pub(super) fn counts(&self, tick: Tick) -> OfTick {
        self.shards
            .iter()
            .map(|shard| *shard.lock().of_tick(tick, self.options.wheel))
            .fold(OfTick::default(), OfTick::plus)
    }

    /// The ticks that can have messages in flight.
    pub(super) fn alive(&self) -> impl Iterator<Item = Tick> + use<> {
        let pointer = self.pointer();
        (pointer.0..pointer.0 + horizon(self.options.wheel)).map(Tick)
    }

    pub(super) fn position(&self, wheel_state: &WheelState, now: Instant) -> Position {
        Position {
            wheel: self.options.wheel,
            pointer: wheel_state.pace.pointer(),
            pointer_index: shard::index(wheel_state.pace.pointer(), self.options.wheel),
            expired_below: wheel_state.expired_below,
            due: wheel_state.pace.tick_due(now),
            now: self.stamp(now),
        }
    }

    /// Does what the time asks for: the latest time that anyone has brought. If the ticker was held up after
    /// it had read its own, an add may have seen a stall that the ticker has not, and relies on the shift.
    fn turn(&self, now: Instant) -> Advance {
        let mut wheel_state = self.wheel_state.write();
        let latest = self.origin + Duration::from_nanos(self.latest_ns.load(Ordering::SeqCst));
        let now = now.max(latest);
        match wheel_state.pace.turn(now) {
            Turn::Wait(until) => Advance::Waiting(until),
            Turn::Shift { missed } => Advance::Waiting(wheel_state.pace.shift(missed, now)),
            Turn::Advance { lateness } => {
                let (expired, due_at) = (wheel_state.pace.pointer(), wheel_state.pace.next_advance());
                let shifted = wheel_state.pace.advanced();
                let (pointer, next) = (wheel_state.pace.pointer(), wheel_state.pace.next_advance());
                if !wheel_state.handed_out {
                    self.decide(wheel_state, expired..=expired, pointer, due_at, false);
                }
                Advance::Moved { expired, lateness, shifted, next }
            }
        }
    }

    /// Decides all ticks, so that what is in flight goes to the outbox.
    pub(super) fn hand_out(&self, now: Instant) -> Handover {
        let mut wheel_state = self.wheel_state.write();
        wheel_state.handed_out = true;
        let first = wheel_state.pace.pointer();
        let below = first.plus(horizon(self.options.wheel));
        self.decide(wheel_state, first..=Tick(below.0 - 1), below, now, true);
        Handover::HandedOut
    }

    /// Decides ticks: nothing else is done meanwhile, so their counts are final. From here on DelMsg answers `late`
    /// for what was left in them.
    fn decide(
        &self,
        mut wheel_state: RwLockWriteGuard<'_, WheelState>,
        ticks: RangeInclusive<Tick>,
        below: Tick,
        due_at: Instant,
        drained: bool,
    ) {
        wheel_state.expired_below = wheel_state.expired_below.max(below);
        let mut unlisted: Vec<_> = self.shards.iter().map(|shard| shard.lock().take_unlisted()).collect();
        let mut frozen = Vec::new();
        for tick in ticks.start().0..=ticks.end().0 {
            let take =
                |shard: &Mutex<Shard<Keyed>>| std::mem::take(shard.lock().of_tick(Tick(tick), self.options.wheel));
            let of_tick = self.shards.iter().map(take).fold(OfTick::default(), OfTick::plus);
            self.in_flight.change(of_tick.left.wrapping_neg());
            frozen.push((Tick(tick), self.options.storm.count(of_tick.acked, of_tick.left, drained)));
        }
        drop(wheel_state);
        let mut expiry = self.expiry.lock();
        for (tick, counts) in frozen {
            // What was listed ahead is of the first.
            expiry.freeze(tick, counts, due_at, std::mem::take(&mut unlisted), self.options.wheel.slots());
        }
    }
}

impl Ring for MemoryRing {
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
        self.complete(batch, now);
        Submitted::Completed
    }

    fn advance(&self, now: Instant) -> Reply<Advance> {
        Reply::ok(self.turn(now))
    }

    fn publish_expired(&self, now: Instant) -> Reply<PublishStep> {
        Reply::ok(self.expire_step(now))
    }

    fn prelist(&self) -> bool {
        self.expiry.lock().prelist(self)
    }

    fn drain(&self, now: Instant) -> Reply<Handover> {
        if std::mem::replace(&mut self.wheel_state.write().draining, true) {
            return Reply::ok(Handover::Kept);
        }
        match self.this.upgrade().filter(|ring| ring.state_file.is_some()) {
            Some(ring) => saving::reserve(ring, now),
            None => Reply::ok(self.hand_out(now)),
        }
    }

    fn status(&self, now: Instant) -> Reply<RingStatus> {
        let pace = self.wheel_state.read().pace;
        let mut slots = vec![0; usize::from(self.options.wheel.slots())];
        for tick in self.alive().skip(1) {
            slots[usize::from(self.options.wheel.slot(tick).0)] += self.counts(tick).left;
        }
        Reply::ok(RingStatus {
            ring: 0,
            pointer: pace.pointer(),
            pointer_lag: now.saturating_duration_since(pace.next_advance()),
            epoch: self.options.epoch,
            leader: Some(String::from("this process")),
            lease_age: None,
            leads: true,
            waits: None,
            in_flight: self.in_flight.count(),
            slots,
            closing: self.counts(pace.pointer()).left,
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::message::Message;
    use crate::core::outbox::Retention;
    use crate::core::single_request::{AddNewMsg, SingleRequest};

    const TICK: Duration = Duration::from_secs(1);

    #[test]
    fn a_ticker_that_was_held_up_after_it_read_the_time_shifts_all_the_same() {
        let start = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), start));
        let options = RingOptions {
            wheel: Wheel::new(3, TICK).unwrap(),
            storm: StormRule::default(),
            max_in_flight: 10,
            threads: 1,
            epoch: 1,
            pointer: Tick(7),
        };
        let ring = MemoryRing::new(options, outbox, start);
        // The move is due at start + 1. The ticker reads that time and is held up; an add comes at 2.5.
        let woken = start + TICK * 5 / 2;
        let request = AddNewMsg { messages: &[Message::new(1, 0)], ack_timeout_ticks: 1, attempt: 1 };
        let answer = ring.add_new_msg(request, woken).now_or_never().unwrap().unwrap();
        assert_eq!(answer.deadline, Tick(8));
        let advance = |now| ring.advance(now).now_or_never().unwrap().unwrap();
        assert_eq!(advance(start + TICK), Advance::Waiting(woken + TICK));
        // So tick 8 is decided two ticks after waking, and not at once.
        assert_eq!(advance(woken), Advance::Waiting(woken + TICK));
        let moved = |expired, shifted, next| Advance::Moved { expired, lateness: Duration::ZERO, shifted, next };
        assert_eq!(advance(woken + TICK), moved(Tick(7), 1, woken + TICK * 2));
        assert_eq!(advance(woken + TICK * 2), moved(Tick(8), 0, woken + TICK * 3));
    }
}
