//! Expired ticks on their way to the outbox in batches, and out of memory a revolution later.
//!
//! A tick expires in an instant, and its counts are known in that instant. Its unacknowledged messages are listed, most of
//! them a moment before. They are published and later forgotten in steps of bounded work, so that a tick of a million
//! messages delays no request:
//!
//! ```text
//!  prelisted ──▶ expired, counted ──▶ listed: shard by shard ──▶ published, batch by batch
//!                                                                      │ one revolution
//!                                                        forgotten ◀───┘
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::options::RingOptions;
use super::outbox::MemoryOutbox;
use super::shards::{LOCKS_PER_STEP, ScanPosition, Shards};
use super::tick_list::TickList;
use crate::core::batch::{BatchId, MAX_BATCH_MESSAGES, TickCounts, TimedOut, TimeoutBatch};
use crate::core::message::Message;
use crate::core::ring::{PublishStep, Published};
use crate::core::tick::Tick;

/// Expired ticks on their way out.
pub(super) struct Expiry {
    options: RingOptions,
    outbox: Arc<MemoryOutbox>,
    /// The tick that expires next, once its prelist has begun.
    pub(super) prelist: Option<TickList>,
    expired: VecDeque<ExpiredTick>,
    /// The scan that lists all ticks of a drain at once: one scan for each would take as long as there are ticks.
    drain: Option<ScanPosition>,
    /// Published ticks that are remembered for `late`, each with the number of its messages.
    remembered: VecDeque<(Tick, u64)>,
    /// The sum of these numbers.
    remembered_messages: u64,
    /// Messages of the first expired tick that fill no batch yet.
    listed: Vec<TimedOut>,
    /// The scan that forgets the first of the remembered ticks.
    forgotten: ScanPosition,
    /// The scan that reclaims memory.
    reclaimed: ScanPosition,
}

/// An expired tick.
struct ExpiredTick {
    list: TickList,
    due_at: Instant,
    counts: TickCounts,
    /// Whether the counts were returned to the caller.
    reported: bool,
    /// Ticks whose work was not done when this one expired.
    behind: usize,
    published: u64,
    batches: u32,
}

impl Expiry {
    pub(super) fn new(options: RingOptions, outbox: Arc<MemoryOutbox>) -> Expiry {
        Expiry {
            options,
            outbox,
            prelist: None,
            expired: VecDeque::new(),
            drain: None,
            remembered: VecDeque::new(),
            remembered_messages: 0,
            listed: Vec::new(),
            forgotten: ScanPosition::default(),
            reclaimed: ScanPosition::default(),
        }
    }

    /// Takes over a tick when it expires; `unlisted` are those that left it after they were prelisted.
    pub(super) fn push(&mut self, tick: Tick, counts: TickCounts, due_at: Instant, unlisted: Vec<Vec<Message>>) {
        let mut list = self.prelist.take_if(|list| list.tick == tick).unwrap_or_else(|| TickList::new(tick));
        list.left.extend(unlisted.into_iter().flatten());
        // A drain expires all ticks at once.
        let behind = if counts.drained { 0 } else { self.expired.len() + self.overdue(tick) };
        if counts.drained {
            self.drain.get_or_insert_default();
        }
        let (reported, published, batches) = (false, 0, 0);
        self.expired.push_back(ExpiredTick { list, due_at, counts, reported, behind, published, batches });
    }

    /// Ticks that were to be forgotten before this one expired.
    fn overdue(&self, tick: Tick) -> usize {
        let slots = u64::from(self.options.wheel.slots());
        self.remembered.iter().take_while(|(of, _)| of.0 + slots < tick.0).count()
    }

    /// Does a step of listing what is still in the tick that expires next; returns whether there is more to do.
    pub(super) fn prelist(&mut self, tick: Tick, shards: &Shards) -> bool {
        let list = self.prelist.get_or_insert_with(|| TickList::new(tick));
        // If it is of another tick, that expires in this moment, and was not yet taken over.
        list.tick == tick && list.prelist(shards)
    }

    /// Records how many messages of `tick` are kept to answer `late`.
    pub(super) fn remember(&mut self, tick: Tick, messages: u64) {
        self.remembered.push_back((tick, messages));
        self.remembered_messages += messages;
    }

    /// Messages that timed out and are not in the outbox yet.
    pub(super) fn unpublished(&self) -> u64 {
        self.expired.iter().map(|expired| expired.counts.timed_out() - expired.published).sum()
    }

    /// Does a step; returns what it did, and whether there is more to do.
    pub(super) fn step(&mut self, shards: &Shards, pointer: Tick, now: Instant) -> PublishStep {
        let Some(front) = self.expired.front_mut() else {
            // Ticks must be forgotten as fast as they come; memory may wait.
            if self.forget(shards, pointer) {
                return PublishStep { more: true, ..PublishStep::default() };
            }
            return PublishStep { more: self.reclaim(shards), reclaimed: true, ..PublishStep::default() };
        };
        if !std::mem::replace(&mut front.reported, true) {
            let counted = Some((front.list.tick, front.counts));
            return PublishStep { counted, more: true, behind: front.behind, ..PublishStep::default() };
        }
        if front.counts.drained && self.drain.is_some() {
            self.list_drained(shards);
            return PublishStep { more: true, ..PublishStep::default() };
        }
        front.list(shards, &mut self.listed);
        let batch = front.next_batch(&mut self.listed, self.options.epoch);
        let (counts, due_at) = (front.counts, front.due_at);
        if front.published == counts.timed_out() {
            let (tick, messages) = (front.list.tick, front.published);
            debug_assert!(self.listed.is_empty(), "what is listed is of this tick, and all of that is published");
            self.listed.shrink_to(2 * MAX_BATCH_MESSAGES);
            self.expired.pop_front();
            if messages > 0 {
                self.remember(tick, messages);
            }
        }
        let published = batch.map(|batch| {
            let messages = batch.messages.len() as u64;
            self.outbox.publish(Arc::new(batch), due_at);
            Published { messages, lateness: (!counts.drained).then(|| now.saturating_duration_since(due_at)) }
        });
        PublishStep { published, more: true, ..PublishStep::default() }
    }

    /// Lists a part of the messages in the ticks of a drain, which are all that is left.
    fn list_drained(&mut self, shards: &Shards) {
        let (Some(position), Some(first), Some(last)) =
            (&mut self.drain, self.expired.front(), self.expired.back())
        else {
            return;
        };
        let ticks = first.list.tick..last.list.tick.plus(1);
        let more = shards.scan(position, |shard, segment| {
            shard.list_all(&ticks, segment, |tick, timed_out| self.expired[tick].list.push(timed_out))
        });
        if !more {
            self.drain = None;
        }
    }

    /// Forgets a part of the messages that timed out a revolution ago, or earlier if more is remembered than may be in
    /// flight: short ack timeouts on a long ring would fill the memory. Returns whether it had something to do.
    fn forget(&mut self, shards: &Shards, pointer: Tick) -> bool {
        let Some((tick, messages)) = self.remembered.front().copied() else { return false };
        let is_due = !self.options.wheel.is_late_known(tick, pointer);
        if !is_due && self.remembered_messages <= self.options.max_in_flight {
            return false;
        }
        if !shards.scan(&mut self.forgotten, |shard, segment| shard.forget(tick, segment)) {
            self.forgotten = ScanPosition::default();
            self.remembered.pop_front();
            self.remembered_messages -= messages;
        }
        true
    }

    /// Returns memory if there is much more room than messages; returns whether there may be more to return. It is done
    /// between ticks, and not during a prelist: see [`Table::scan`](super::table::Table::scan).
    fn reclaim(&mut self, shards: &Shards) -> bool {
        let is_visited = self.prelist.is_none()
            && shards.visit_next(&mut self.reclaimed, |shard, segment| {
                // One segment at a time is made smaller, or merged with another.
                while *segment < shard.table.segments() {
                    if shard.table.shrink(*segment) {
                        return false;
                    }
                    *segment += 1;
                }
                true
            });
        if !is_visited && self.prelist.is_none() {
            self.reclaimed = ScanPosition::default();
        }
        is_visited
    }
}

impl ExpiredTick {
    /// Lists the next messages, until a batch is full, or all are listed, or the step is over.
    fn list(&mut self, shards: &Shards, listed: &mut Vec<TimedOut>) {
        self.list.take(listed);
        for _ in 0..LOCKS_PER_STEP {
            let count = listed.len() as u64;
            if count >= MAX_BATCH_MESSAGES as u64 || self.published + count == self.counts.timed_out() {
                return;
            }
            let TickList { tick, position, .. } = &mut self.list;
            let is_visited = shards.visit_next(position, |shard, segment| shard.list(*tick, segment, listed));
            debug_assert!(is_visited, "all that were counted are found");
        }
    }

    /// Makes the next batch, if one is full or it is the last.
    fn next_batch(&mut self, listed: &mut Vec<TimedOut>, epoch: u64) -> Option<TimeoutBatch> {
        let left = self.counts.timed_out() - self.published;
        let count = listed.len();
        if count == 0 || (count < MAX_BATCH_MESSAGES && (count as u64) < left) {
            return None;
        }
        let messages: Vec<TimedOut> = if listed.capacity() == count && count <= MAX_BATCH_MESSAGES {
            std::mem::take(listed)
        } else {
            listed.drain(count.saturating_sub(MAX_BATCH_MESSAGES)..).collect()
        };
        let id = BatchId { tick: self.list.tick, epoch, ring: 0, seq: self.batches };
        let last = messages.len() as u64 == left;
        self.batches += 1;
        self.published += messages.len() as u64;
        Some(TimeoutBatch { id, counts: self.counts, last, messages })
    }
}

#[cfg(test)]
pub(super) mod tests {
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
    use crate::memory::MemoryRing;

    /// A ring of three slots of a second that stands at `pointer`.
    pub(in crate::memory) fn ring_at(pointer: Tick, now: Instant) -> (MemoryRing, Arc<MemoryOutbox>) {
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
                let steps =
                    std::iter::repeat_with(|| ring.wheel.publish_expired(now)).take_while(|step| step.more);
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
            ring.wheel.expiry.lock().prelist = None;
            let begun = Instant::now();
            while ring.prelist() {}
            let (listed, begun, mut segment) = (begun.elapsed(), Instant::now(), 0);
            let shard = &ring.wheel.shards.list[0];
            while !shard.lock().forget(Tick(99), &mut segment) {}
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
            let request = DelMsg { messages, withdraw: false };
            ring.del_msg(request, now).now_or_never().unwrap().unwrap().outcomes
        };
        let of_round = |round: u64| -> Vec<Message> { (0..400).map(|id| Message::new(id, round)).collect() };
        for round in 0..20 {
            let request = AddNewMsg { messages: &of_round(round), ack_timeout_ticks: 1, attempt: 1 };
            ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
            // A tick closes before it expires.
            for _ in 0..2 {
                now += Duration::from_secs(1);
                ring.advance(now).now_or_never().unwrap().unwrap();
                while ring.wheel.publish_expired(now).more {}
            }
            let kept = ring.wheel.shards.len();
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
            assert_eq!(ring.wheel.expiry.lock().unpublished(), left);
            let step = ring.wheel.publish_expired(now);
            left -= step.published.map_or(0, |batch| batch.messages);
            if !step.more {
                break;
            }
            steps += 1;
        }
        assert_eq!(left, 0);
        // Each tick is counted, and published if it has messages; a walk for each would be three steps more.
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
        let room = || ring.wheel.shards.list.iter().map(|shard| shard.lock().table.capacity()).sum::<usize>();
        let peak = room();
        assert!(peak < 400_000, "room for {peak} is made for 200,000");
        // They time out, are remembered for a revolution and forgotten.
        let mut reclaimed = 0;
        for _ in 0..8 {
            now += Duration::from_secs(1);
            ring.advance(now).now_or_never().unwrap().unwrap();
            loop {
                let step = ring.wheel.publish_expired(now);
                assert!(
                    !step.reclaimed || ring.wheel.expiry.lock().expired.is_empty(),
                    "expired ticks are published first"
                );
                reclaimed += usize::from(step.reclaimed && step.more);
                if !step.more {
                    break;
                }
            }
        }
        assert!(reclaimed >= peak / 20_000, "memory was given back in {reclaimed} steps");
        assert!(ring.wheel.shards.len() == 0);
        assert!(room() < peak / 20, "room for {} of {peak} is kept", room());
    }
}
