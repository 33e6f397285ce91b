//! From a decided tick to its batches, and out of memory a revolution later.
//!
//! A tick is decided in an instant, and its counts are known in that instant; what is left in it is listed, mostly a
//! moment before, published and later forgotten in steps of bounded work, so that a tick of a million messages holds
//! nobody up:
//!
//! ```text
//!  listed ahead ──▶ decided, counted ──▶ listed: shard by shard ──▶ published, batch by batch
//!                                                                      │ one revolution
//!                                                        forgotten ◀───┘
//! ```

mod ahead;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use self::ahead::{Ahead, Listed};
use super::ring::MemoryRing;
use super::shard::Shard;
use super::table::Keyed;
use crate::core::batch::{BatchId, MAX_BATCH_MESSAGES, TickCounts, TimedOut, TimeoutBatch};
use crate::core::message::Message;
use crate::core::ring::{PublishStep, Published};
use crate::core::tick::Tick;

/// Places looked at in one step: a tenth of a millisecond, or some more where many of them are of the tick.
const STEP: usize = 128 * 1_024;

/// Places looked at under one lock: nobody waits for a shard longer than that takes.
const LOCKED_STEP: usize = 32 * 1_024;

/// Decided ticks on their way out.
#[derive(Debug, Default)]
pub(super) struct Expiry {
    /// The tick that is decided next, once it is listed ahead.
    ahead: Option<Ahead>,
    frozen: VecDeque<Frozen>,
    /// How far a drain's ticks are listed, all in one walk: one for each would take as long as there are ticks.
    gathered: Option<Walk>,
    /// Published ticks that are remembered for `late`, each with the number of its messages.
    remembered: VecDeque<(Tick, u64)>,
    /// The sum of these numbers.
    remembered_messages: u64,
    /// Messages of the first decided tick that fill no batch yet.
    listed: Vec<TimedOut>,
    /// How far the first of those that are remembered is forgotten.
    forgotten: Walk,
    shrunk: Walk,
}

/// How far a walk over all shards has come.
#[derive(Clone, Copy, Debug, Default)]
struct Walk {
    shard: usize,
    segment: usize,
}

impl Walk {
    fn next_shard(&mut self) {
        *self = Walk { shard: self.shard + 1, segment: 0 };
    }
}

/// A decided tick.
#[derive(Debug)]
struct Frozen {
    tick: Tick,
    due_at: Instant,
    counts: TickCounts,
    /// What was listed before it was decided.
    ahead: Listed,
    /// Whether the counts were returned to the caller.
    told: bool,
    /// Ticks whose work was not done when this one expired.
    behind: usize,
    walked: Walk,
    published: u64,
    batches: u32,
}

impl Expiry {
    /// Takes over a tick when it is decided; `unlisted` are those that left it after they were listed.
    pub(super) fn freeze(
        &mut self,
        tick: Tick,
        counts: TickCounts,
        due_at: Instant,
        unlisted: Vec<Vec<Message>>,
        slots: u16,
    ) {
        let ahead = self.ahead.take_if(|ahead| ahead.tick == tick).unwrap_or_else(|| Ahead::of(tick));
        let (walked, ahead) = (ahead.walked, ahead.expired(unlisted));
        // A drain expires all ticks at once.
        let behind = if counts.drained { 0 } else { self.frozen.len() + self.overdue(tick, slots) };
        if counts.drained {
            self.gathered.get_or_insert_default();
        }
        self.frozen.push_back(Frozen {
            tick,
            due_at,
            counts,
            ahead,
            told: false,
            behind,
            walked,
            published: 0,
            batches: 0,
        });
    }

    /// Ticks that were to be forgotten before this one expired.
    fn overdue(&self, tick: Tick, slots: u16) -> usize {
        let is_overdue = |(of, _): &&(Tick, u64)| of.0 + u64::from(slots) < tick.0;
        self.remembered.iter().take_while(is_overdue).count()
    }

    /// Does one step of listing what is still in the tick that is decided next; says whether there is more to do.
    pub(super) fn prelist(&mut self, ring: &MemoryRing) -> bool {
        let Some(tick) = ring.next_expired() else { return false };
        let ahead = self.ahead.get_or_insert_with(|| Ahead::of(tick));
        // If it is of another tick, that is decided in this moment, and not yet taken over.
        ahead.tick == tick && ahead.step(ring)
    }

    /// Has so many messages of a tick remembered, which timed out.
    pub(super) fn remember(&mut self, tick: Tick, messages: u64) {
        self.remembered.push_back((tick, messages));
        self.remembered_messages += messages;
    }

    /// Messages that timed out, and are not in the outbox yet.
    pub(super) fn unpublished(&self) -> u64 {
        self.frozen.iter().map(|frozen| frozen.counts.timed_out() - frozen.published).sum()
    }

    /// Does one step; says whether there is more to do.
    pub(super) fn step(&mut self, ring: &MemoryRing, now: Instant) -> PublishStep {
        let Some(front) = self.frozen.front_mut() else {
            // Ticks must be forgotten as fast as they come; memory may wait.
            if self.forget(ring) {
                return PublishStep { more: true, ..PublishStep::default() };
            }
            return PublishStep { more: self.shrink(ring), reclaimed: true, ..PublishStep::default() };
        };
        if !std::mem::replace(&mut front.told, true) {
            let counted = Some((front.tick, front.counts));
            return PublishStep { counted, more: true, behind: front.behind, ..PublishStep::default() };
        }
        if front.counts.drained && self.gathered.is_some() {
            self.gather(ring);
            return PublishStep { more: true, ..PublishStep::default() };
        }
        front.list(ring, &mut self.listed);
        let published = front.publish(ring, &mut self.listed, now);
        if front.published == front.counts.timed_out() {
            let (tick, messages) = (front.tick, front.published);
            debug_assert!(self.listed.is_empty(), "what is listed is of this tick, and all of that is published");
            self.listed.shrink_to(2 * MAX_BATCH_MESSAGES);
            self.frozen.pop_front();
            if messages > 0 {
                self.remember(tick, messages);
            }
        }
        PublishStep { published, more: true, ..PublishStep::default() }
    }

    /// Lists a part of what is in the ticks of a drain, which are all that is left.
    fn gather(&mut self, ring: &MemoryRing) {
        let (Some(walk), Some(first), Some(last)) = (&mut self.gathered, self.frozen.front(), self.frozen.back())
        else {
            return;
        };
        let ticks = first.tick..=last.tick;
        for _ in 0..STEP / LOCKED_STEP {
            let Some(shard) = ring.shards.get(walk.shard) else {
                self.gathered = None;
                return;
            };
            let note = |tick: usize, timed_out| self.frozen[tick].ahead.push(timed_out);
            if in_turn(shard, |shard| shard.list_all(ticks.clone(), &mut walk.segment, LOCKED_STEP, note)) {
                walk.next_shard();
            }
        }
    }

    /// Forgets a part of what timed out a revolution ago, or earlier where more is remembered than may be in flight: who
    /// has short ack timeouts on a long ring would fill the memory. Returns whether it had something to do.
    fn forget(&mut self, ring: &MemoryRing) -> bool {
        let Some((tick, messages)) = self.remembered.front().copied() else { return false };
        let is_due = !ring.options.wheel.remembers(tick, ring.pointer());
        if !is_due && self.remembered_messages <= ring.options.max_in_flight {
            return false;
        }
        for _ in 0..STEP / LOCKED_STEP {
            let Some(shard) = ring.shards.get(self.forgotten.shard) else {
                self.forgotten = Walk::default();
                self.remembered.pop_front();
                self.remembered_messages -= messages;
                break;
            };
            if in_turn(shard, |shard| shard.forget(tick, &mut self.forgotten.segment, LOCKED_STEP)) {
                self.forgotten.next_shard();
            }
        }
        true
    }

    /// Gives memory back where there is much more room than messages; returns whether there may be more to give.
    /// It is done between ticks, and not while one is listed: see [`Table::scan`](super::table::Table::scan).
    fn shrink(&mut self, ring: &MemoryRing) -> bool {
        if self.ahead.is_some() {
            return false;
        }
        let Some(shard) = ring.shards.get(self.shrunk.shard) else {
            self.shrunk = Walk::default();
            return false;
        };
        let segment = &mut self.shrunk.segment;
        let is_done = in_turn(shard, |shard| {
            // One at a time is made smaller, or merged with another.
            while *segment < shard.table.segments() {
                if shard.table.shrink(*segment) {
                    return false;
                }
                *segment += 1;
            }
            true
        });
        if is_done {
            self.shrunk.next_shard();
        }
        true
    }
}

impl Frozen {
    /// Lists the next messages, until a batch is full or all are listed or enough was done.
    fn list(&mut self, ring: &MemoryRing, listed: &mut Vec<TimedOut>) {
        self.ahead.take(listed);
        for _ in 0..STEP / LOCKED_STEP {
            let known = listed.len() as u64;
            if known >= MAX_BATCH_MESSAGES as u64 || self.published + known == self.counts.timed_out() {
                return;
            }
            let Walk { shard, segment } = &mut self.walked;
            if in_turn(&ring.shards[*shard], |shard| shard.list(self.tick, segment, LOCKED_STEP, listed)) {
                self.walked.next_shard();
            }
        }
    }

    /// Hands the next batch to the outbox, if one is full or it is the last; `None` if none is.
    fn publish(&mut self, ring: &MemoryRing, listed: &mut Vec<TimedOut>, now: Instant) -> Option<Published> {
        let left = self.counts.timed_out() - self.published;
        let known = listed.len();
        if known == 0 || (known < MAX_BATCH_MESSAGES && (known as u64) < left) {
            return None;
        }
        let messages: Vec<TimedOut> = if listed.capacity() == known && known <= MAX_BATCH_MESSAGES {
            std::mem::take(listed)
        } else {
            listed.drain(known.saturating_sub(MAX_BATCH_MESSAGES)..).collect()
        };
        let count = messages.len() as u64;
        let id = BatchId { tick: self.tick, epoch: ring.options.epoch, ring: 0, seq: self.batches };
        let last = count == left;
        ring.outbox.publish(Arc::new(TimeoutBatch { id, counts: self.counts, last, messages }), self.due_at);
        self.batches += 1;
        self.published += count;
        let lateness = (!self.counts.drained).then(|| now.saturating_duration_since(self.due_at));
        Some(Published { messages: count, lateness })
    }
}

/// Does one step with a shard, and lets go of it in favour of whoever waits: the next step would take it again before
/// they have woken.
fn in_turn<T>(shard: &Mutex<Shard<Keyed>>, step: impl FnOnce(&mut Shard<Keyed>) -> T) -> T {
    let mut shard = shard.lock();
    let done = step(&mut shard);
    MutexGuard::unlock_fair(shard);
    done
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::core::batch::StormRule;
    use crate::core::group::GroupName;
    use crate::core::message::DelOutcome;
    use crate::core::outbox::{Outbox, Retention};
    use crate::core::ring::Ring;
    use crate::core::single_request::{AddNewMsg, DelMsg, SingleRequest};
    use crate::core::tick::Wheel;
    use crate::memory::{MemoryOutbox, RingOptions};

    /// A ring of three slots of a second that stands at `pointer`.
    pub(super) fn ring_at(pointer: Tick, now: Instant) -> (MemoryRing, Arc<MemoryOutbox>) {
        ring_of(3, 1_000_000, pointer, now)
    }

    fn ring_of(slots: u16, max_in_flight: u64, pointer: Tick, now: Instant) -> (MemoryRing, Arc<MemoryOutbox>) {
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), now));
        let options = RingOptions {
            wheel: Wheel::new(slots, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            max_in_flight,
            threads: 1,
            epoch: 1,
            pointer,
        };
        (MemoryRing::new(options, Arc::clone(&outbox), now), outbox)
    }

    #[test]
    fn a_tick_says_how_many_were_not_done_when_it_expired() {
        let mut now = Instant::now();
        let (ring, _outbox) = ring_at(Tick(1), now);
        let mut behind = Vec::new();
        let mut pass = |is_done: bool| {
            let messages: Vec<Message> = (0..2_000).map(Message::from).collect();
            let request = AddNewMsg { messages: &messages, ack_timeout_ticks: 1, attempt: 1 };
            ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
            now += Duration::from_secs(1);
            ring.advance(now).now_or_never().unwrap().unwrap();
            if is_done {
                let steps = std::iter::repeat_with(|| ring.expire_step(now)).take_while(|step| step.more);
                behind.extend(steps.filter(|step| step.counted.is_some()).map(|step| step.behind));
            }
        };
        [true, true, true, true, false, false, true, true].into_iter().for_each(&mut pass);
        assert_eq!(behind, [0, 0, 0, 0, 0, 1, 2, 0], "two ticks in a row had no time, and then there was enough");
    }

    /// docs/PERFORMANCE.md says what it printed, and `EXPIRY_NS_A_MESSAGE` follows from it.
    #[test]
    #[ignore = "it measures, for people"]
    fn what_both_passes_of_a_tick_take() {
        const IN_FLIGHT: u64 = 10_000_000;
        let now = Instant::now();
        let (ring, _outbox) = ring_of(15, IN_FLIGHT, Tick(100), now);
        let messages: Vec<Message> = (0..IN_FLIGHT).map(Message::from).collect();
        for messages in messages.chunks(10_000) {
            let request = AddNewMsg { messages, ack_timeout_ticks: 15, attempt: 1 };
            ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
        }
        for round in 0..5 {
            ring.expiry.lock().ahead = None;
            let begun = Instant::now();
            while ring.prelist() {}
            let (listed, begun, mut segment) = (begun.elapsed(), Instant::now(), 0);
            while !in_turn(&ring.shards[0], |shard| shard.forget(Tick(99), &mut segment, LOCKED_STEP)) {}
            let forgotten = begun.elapsed();
            let ps = |took: Duration| took.as_nanos() * 1_000 / u128::from(IN_FLIGHT);
            println!("round {round}: {} ps a message to list, {} ps to forget", ps(listed), ps(forgotten));
        }
    }

    #[test]
    fn no_more_is_remembered_than_may_be_in_flight() {
        let mut now = Instant::now();
        let (ring, _outbox) = ring_of(100, 1_000, Tick(1), now);
        let answer = |messages: &[Message], now| {
            let asked = DelMsg { messages, withdraw: false };
            ring.del_msg(asked, now).now_or_never().unwrap().unwrap().outcomes
        };
        let of_round = |round: u64| -> Vec<Message> { (0..400).map(|id| Message::new(id, round)).collect() };
        for round in 0..20 {
            let request = AddNewMsg { messages: &of_round(round), ack_timeout_ticks: 1, attempt: 1 };
            ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
            // A tick closes before it is decided.
            for _ in 0..2 {
                now += Duration::from_secs(1);
                ring.advance(now).now_or_never().unwrap().unwrap();
                while ring.expire_step(now).more {}
            }
            let kept = ring.shards.iter().map(|shard| shard.lock().table.len()).sum::<usize>();
            assert!(kept <= 1_000, "{kept} are remembered after round {round}");
        }
        assert_eq!(answer(&of_round(19), now), [DelOutcome::Late; 400], "the latest are");
        assert_eq!(answer(&of_round(0), now), [DelOutcome::Unknown; 400]);
    }

    #[test]
    fn a_drain_hands_out_all_ticks_after_one_walk() {
        const SLOTS: u16 = 300;
        const IN_TICK: u64 = 1_000;
        let now = Instant::now();
        let (ring, outbox) = ring_of(SLOTS, 1_000_000, Tick(1), now);
        for ticks in 1..=SLOTS {
            let first = u64::from(ticks) * IN_TICK;
            let messages: Vec<Message> = (first..first + IN_TICK).map(Message::from).collect();
            let request = AddNewMsg { messages: &messages, ack_timeout_ticks: ticks, attempt: 1 };
            ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
        }
        // The first of them was listed ahead.
        assert!(matches!(ring.advance(now + Duration::from_secs(1)).now_or_never(), Some(Ok(_))));
        while ring.prelist() {}
        ring.drain(now).now_or_never().unwrap().unwrap();
        let mut steps = 0;
        let mut left = IN_TICK * u64::from(SLOTS);
        loop {
            assert_eq!(ring.expiry.lock().unpublished(), left);
            let step = ring.expire_step(now);
            left -= step.published.map_or(0, |batch| batch.messages);
            if !step.more {
                break;
            }
            steps += 1;
        }
        assert_eq!(left, 0);
        // Each tick is told, and published if it has messages; a walk for each would be three steps more.
        let most = 2 * usize::from(SLOTS) + 50;
        assert!((usize::from(SLOTS)..most).contains(&steps), "{steps} steps");
        let taken = outbox.take(&GroupName::default_group(), u64::MAX, now).now_or_never().unwrap().unwrap();
        assert_eq!(taken.len(), usize::from(SLOTS));
        for (delivery, first) in taken.iter().zip((IN_TICK..).step_by(1_000)) {
            let batch = &delivery.batch;
            let mut ids: Vec<u64> = batch.messages.iter().map(|timed_out| timed_out.message.msg_id.0).collect();
            ids.sort_unstable();
            assert!(ids.into_iter().eq(first..first + IN_TICK), "{:?}", batch.id);
            assert!(batch.last && batch.counts.drained);
        }
    }

    #[test]
    fn memory_returns_when_load_falls() {
        let mut now = Instant::now();
        let (ring, _outbox) = ring_at(Tick(1), now);
        let messages: Vec<Message> = (0..200_000).map(Message::from).collect();
        let request = AddNewMsg { messages: &messages, ack_timeout_ticks: 3, attempt: 1 };
        ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
        let room = || ring.shards.iter().map(|shard| shard.lock().table.capacity()).sum::<usize>();
        let peak = room();
        assert!(peak < 400_000, "room for {peak} is made for 200,000");
        // They time out, are remembered for a revolution and forgotten.
        let mut reclaimed = 0;
        for _ in 0..8 {
            now += Duration::from_secs(1);
            ring.advance(now).now_or_never().unwrap().unwrap();
            loop {
                let step = ring.expire_step(now);
                assert!(
                    !step.reclaimed || ring.expiry.lock().frozen.is_empty(),
                    "what is decided is published first"
                );
                reclaimed += usize::from(step.reclaimed && step.more);
                if !step.more {
                    break;
                }
            }
        }
        assert!(reclaimed >= peak / 20_000, "memory was given back in {reclaimed} steps");
        assert!(ring.shards.iter().all(|shard| shard.lock().table.len() == 0));
        assert!(room() < peak / 20, "room for {} of {peak} is kept", room());
    }
}
