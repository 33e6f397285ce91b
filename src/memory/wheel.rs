//! The wheel of a ring in memory: the messages in shards, the position of the pointer, and the expired ticks.
//!
//! # Locks
//!
//! Messages are spread over [`Shards`] by a hash. The hash has a random key in each process, because logic nodes
//! choose the ids. A shard is a table under a lock, and a message is changed only under the lock of its shard. Another
//! lock guards `state`, the [`WheelState`]. A request batch holds `state` for reading from begin to end, and an expiry
//! holds it for writing. So each batch is processed completely before an expiry or completely after it.
//!
//! A message is *listed* when it is put on the list from which the batches of its tick are made. Listing before the
//! expiry is called prelisting. A prelisted message that is acknowledged, withdrawn or re-armed before the expiry is
//! *unlisted*. A tick is *forgotten* when its messages are removed from the table.
//!
//! | action | holds `state` | then, under the lock of the shard |
//! |---|---|---|
//! | add | reading | insert the entry; count it in its tick |
//! | del | reading | if the entry is there and not expired: remove it, count it |
//! | prelist a tick, step by step | – | list and mark each entry of the tick |
//! | expire a tick | writing | take the counts of the tick from every shard: they are final |
//! | list a tick, step by step | – | list and mark each entry of the tick that is not marked |
//! | forget a tick, step by step | – | remove each entry of the tick |
//!
//! A message that has expired but is not yet listed can be added again. The shard then keeps the expired message in
//! `overtaken` until the tick is listed. After the expiry an entry stays for one revolution, so that a DelMsg is
//! answered `late`.
//!
//! Locks are taken in this order: `expiry`, `state`, one shard. An expiry releases `state` before it takes `expiry`.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock, RwLockWriteGuard};

use super::expiry::Expiry;
use super::in_flight_limit::InFlightLimit;
use super::journal::{Buffer, Event};
use super::options::MemoryOptions;
use super::outbox::MemoryOutbox;
use super::shard::{Position, horizon, index};
use super::shards::Shards;
use super::table::Hash;
use crate::core::{
    Advance, DrainOutcome, DueAction, Message, MessageState, PublishStep, Reason, Refusal, Stamp, Tick,
    TickSchedule,
};

/// The position of the pointer, the time of its next move, and the phase of a drain.
#[derive(Debug)]
pub(super) struct WheelState {
    pub(super) schedule: TickSchedule,
    /// Ticks before this tick have expired. It is the tick of the pointer, or after a drain a tick later than every
    /// deadline.
    pub(super) expired_below: Tick,
    /// Whether a drain has begun, which prepares the end of the process. New messages are then refused.
    pub(super) draining: bool,
    /// Whether a drain has expired all ticks, so that no message is in flight any more.
    pub(super) all_expired: bool,
}

/// The wheel of a ring in memory.
pub(super) struct MemoryWheel {
    pub(super) epoch: u64,
    pub(super) shards: Shards,
    pub(super) state: RwLock<WheelState>,
    pub(super) in_flight: InFlightLimit,
    /// The refusal of adds at the limit. All refused adds share it.
    pub(super) full: Arc<Refusal>,
    pub(super) expiry: Mutex<Expiry>,
    pub(super) outbox: Arc<MemoryOutbox>,
    /// The journal that records all changes, if there is one.
    pub(super) journal: Option<Arc<Buffer>>,
    /// The time that corresponds to stamp 0.
    pub(super) origin: Instant,
    /// The latest time of any add, in ns since `origin`: see [`MemoryWheel::advance`].
    pub(super) latest_ns: AtomicU64,
}

impl MemoryWheel {
    pub(super) fn new(
        options: MemoryOptions,
        start: (u64, Tick),
        outbox: Arc<MemoryOutbox>,
        now: Instant,
    ) -> Self {
        let (epoch, pointer) = start;
        MemoryWheel {
            epoch,
            shards: Shards::new(options),
            state: RwLock::new(WheelState {
                schedule: TickSchedule::new(options.wheel.tick_length(), pointer, now),
                expired_below: pointer,
                draining: false,
                all_expired: false,
            }),
            in_flight: InFlightLimit::new(options.max_in_flight),
            full: Arc::new(Refusal::new(
                Reason::MaxInFlight,
                "the limit --max-in-flight is reached: try again when some are acknowledged or have \
                 timed out, or raise --max-in-flight",
            )),
            expiry: Mutex::new(Expiry::new(options.wheel, pointer)),
            outbox,
            journal: None,
            origin: now,
            latest_ns: AtomicU64::new(0),
        }
    }

    pub(super) fn stamp(&self, now: Instant) -> Stamp {
        Stamp::after(now.saturating_duration_since(self.origin))
    }

    pub(super) fn pointer(&self) -> Tick {
        self.state.read().schedule.pointer()
    }

    /// Returns the position of the wheel for a request batch that is processed at `now`.
    pub(super) fn position(&self, state: &WheelState, now: Instant) -> Position {
        let (wheel, pointer) = (self.shards.options.wheel, state.schedule.pointer());
        Position {
            wheel,
            pointer,
            pointer_index: index(pointer, wheel),
            expired_below: state.expired_below,
            due: state.schedule.tick_due(now),
            now: self.stamp(now),
        }
    }

    /// Returns the state of each message.
    #[cold]
    #[inline(never)]
    pub(super) fn get(&self, messages: &[Message], now: Instant) -> Vec<MessageState> {
        let state = self.state.read();
        let (position, schedule) = (self.position(&state, now), &state.schedule);
        let remaining = |deadline: Tick| {
            let moves = u32::try_from(deadline.0.saturating_sub(schedule.pointer().0)).unwrap_or(u32::MAX);
            let ends = schedule.next_advance() + self.shards.options.wheel.tick_length().saturating_mul(moves);
            u32::try_from(ends.saturating_duration_since(now).as_millis()).unwrap_or(u32::MAX)
        };
        let one = |message: &Message| {
            let hash = Hash::of(*message, &self.shards.hasher);
            let found = self.shards.list[hash.shard(self.shards.bits)].lock().get(hash, *message, &position);
            match found {
                MessageState::InFlight { deadline, attempt, .. } => {
                    MessageState::InFlight { deadline, remaining_ms: remaining(deadline), attempt }
                }
                state => state,
            }
        };
        messages.iter().map(one).collect()
    }

    /// Returns the tick that expires next, or `None` if a drain has expired all ticks.
    pub(super) fn next_expired(&self) -> Option<Tick> {
        let state = self.state.read();
        (!state.all_expired).then(|| state.schedule.pointer())
    }

    /// Records the time of an add. Must be called before the deadline of the add is computed.
    pub(super) fn record_time(&self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.origin).as_nanos();
        self.latest_ns.fetch_max(u64::try_from(elapsed).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// Moves the pointer if the move is due. The later of two times counts: `now`, and the latest time of any add. The
    /// reason is that the ticker can be delayed after it has read the clock. An add may then see a stall that `now`
    /// does not show. Its deadline is only right if this call shifts all deadlines for that stall.
    pub(super) fn advance(&self, now: Instant) -> Advance {
        let mut state = self.state.write();
        let latest = self.origin + Duration::from_nanos(self.latest_ns.load(Ordering::SeqCst));
        let now = now.max(latest);
        match state.schedule.due_action(now) {
            DueAction::Wait(until) => Advance::Waiting(until),
            DueAction::Shift { missed } => Advance::Waiting(state.schedule.shift(missed, now)),
            DueAction::Advance { lateness } => {
                let (expired, due_at) = (state.schedule.pointer(), state.schedule.next_advance());
                let shifted = state.schedule.record_move();
                let (pointer, next) = (state.schedule.pointer(), state.schedule.next_advance());
                if !state.all_expired {
                    self.expire(state, expired..pointer, due_at, false);
                }
                Advance::Moved { expired, lateness, shifted, next }
            }
        }
    }

    /// Expires all ticks for a drain, so that all messages in flight go to the outbox.
    pub(super) fn expire_all(&self, now: Instant) -> DrainOutcome {
        let mut state = self.state.write();
        state.all_expired = true;
        let first = state.schedule.pointer();
        let below = first.plus(horizon(self.shards.options.wheel));
        self.expire(state, first..below, now, true);
        DrainOutcome::Published
    }

    /// Expires `ticks`. The caller has locked `state` for writing, so no request is processed, and the counts of the
    /// ticks are final. After this call DelMsg answers `late` for the messages that were still in flight.
    fn expire(
        &self,
        mut state: RwLockWriteGuard<'_, WheelState>,
        ticks: Range<Tick>,
        due_at: Instant,
        drained: bool,
    ) {
        state.expired_below = state.expired_below.max(ticks.end);
        let mut unlisted: Vec<_> =
            self.shards.list.iter().map(|shard| std::mem::take(&mut shard.lock().unlisted)).collect();
        let mut expired = Vec::new();
        let ticks = (ticks.start.0..ticks.end.0).map(Tick);
        for (tick, count) in ticks.clone().zip(self.shards.counts(&ticks, std::mem::take)) {
            self.in_flight.change(count.in_flight.wrapping_neg());
            let counts = self.shards.options.storm.count(count.acked, count.in_flight, drained);
            expired.push((tick, counts));
            if let Some(journal) = &self.journal {
                journal.append_event(&Event::Expired { tick, counts });
            }
        }
        drop(state);
        let mut expiry = self.expiry.lock();
        for (tick, counts) in expired {
            // Only the first tick has a prelist.
            expiry.push(tick, counts, due_at, std::mem::take(&mut unlisted));
        }
    }

    /// Does a step of publishing expired messages, or of freeing their memory.
    pub(super) fn publish_expired(&self, now: Instant) -> PublishStep {
        let mut expiry = self.expiry.lock();
        expiry.step(&self.shards, &self.outbox, self.epoch, self.pointer(), now)
    }
}
