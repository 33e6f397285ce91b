//! Publishes the messages of expired ticks in batches, and removes them from memory a revolution later.
//!
//! A tick expires in one step, which also makes its counts final. Its unacknowledged messages are *listed*: put on the
//! list from which the batches are made. Most of them are listed shortly before the expiry. After the expiry the
//! messages are published, and a revolution later they are *forgotten*: removed from the table. Until then they are
//! *remembered*, so that a DelMsg is answered `late`. All this takes many small steps, so that a tick of a million
//! messages delays no request:
//!
//! ```text
//!  prelisted ──▶ expired, counted ──▶ listed: shard by shard ──▶ published, batch by batch
//!                                                                      │ one revolution
//!                                                        forgotten ◀───┘
//! ```
//!
//! The ring consists of *shards*, each with a table of messages under a lock of its own. A scan visits all shards to
//! list the messages of a tick. Messages that are in flight shortly before their tick expires are seldom acknowledged
//! in time. So the scan begins before the expiry, and batches are ready when the tick expires. The messages listed
//! early are the *prelist*. A prelisted message may still leave the tick, because it is acknowledged or added again.
//! Its shard then records the message in `unlisted`, and no batch contains it.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::outbox::MemoryOutbox;
use super::shards::{LOCKS_PER_STEP, ScanPosition, Shards};
use crate::core::{
    BatchId, MAX_BATCH_MESSAGES, Message, PublishStep, Published, RandomHasher, Tick, TickCounts, TimedOut,
    TimeoutBatch, Wheel,
};

/// The maximum number of messages in a prelist. Only the last step of prelisting may exceed it. Further messages are
/// listed when their tick expires. The limit saves memory, because a prelisted message is in memory twice until it is
/// published.
const MAX_PRELISTED: usize = 16 * MAX_BATCH_MESSAGES;

/// The expired ticks, and the work that is left to do for them.
#[derive(Default)]
pub(super) struct Expiry {
    wheel: Wheel,
    /// The list of the tick that expires next, if prelisting has begun.
    pub(super) prelist: Option<TickList>,
    expired: VecDeque<ExpiredTick>,
    /// The scan of a drain. A drain expires all ticks at once, and one scan lists the messages of all of them. A scan
    /// for each tick would take much longer.
    drain: Option<ScanPosition>,
    /// Published ticks whose messages are remembered, each with the number of these messages.
    remembered: VecDeque<(Tick, u64)>,
    /// The number of messages in all remembered ticks.
    remembered_messages: u64,
    /// Listed messages of the first expired tick that do not fill a batch yet.
    listed: Vec<TimedOut>,
    /// The scan that removes the messages of the first remembered tick.
    forgotten: ScanPosition,
    /// The scan that reclaims memory.
    reclaimed: ScanPosition,
    /// The ticks before this one have been passed to [`Expiry::push`].
    pushed_below: Tick,
    /// Whether a checkpoint walks through the shards. Then no memory is reclaimed, because the walk could miss entries
    /// that are moved.
    pub(super) is_walked: bool,
}

/// An expired tick.
struct ExpiredTick {
    list: TickList,
    due_at: Instant,
    counts: TickCounts,
    /// Whether a step has returned the counts to the caller.
    reported: bool,
    /// The number of earlier ticks whose work was not complete when this tick expired.
    behind: usize,
    published: u64,
    batches: u32,
}

impl Expiry {
    pub(super) fn new(wheel: Wheel, pointer: Tick) -> Expiry {
        Expiry { wheel, pushed_below: pointer, ..Expiry::default() }
    }

    /// Appends a tick that has expired. `unlisted` contains the messages that left the tick after they were listed.
    pub(super) fn push(&mut self, tick: Tick, counts: TickCounts, due_at: Instant, unlisted: Vec<Vec<Message>>) {
        let mut list = self.prelist.take_if(|list| list.tick == tick).unwrap_or_else(|| TickList::new(tick));
        list.unlisted.extend(unlisted.into_iter().flatten());
        // `behind` includes remembered ticks that should have been forgotten before this tick expired. It is 0 for a
        // drain, which expires all ticks at once.
        let overdue = self.remembered.iter().take_while(|(of, _)| !self.wheel.is_late_known(*of, tick));
        let behind = if counts.drained { 0 } else { self.expired.len() + overdue.count() };
        if counts.drained {
            self.drain.get_or_insert_default();
        }
        let (reported, published, batches) = (false, 0, 0);
        self.expired.push_back(ExpiredTick { list, due_at, counts, reported, behind, published, batches });
        self.pushed_below = tick.plus(1);
    }

    /// Continues a restored wheel whose pointer stands at `pointer`.
    pub(super) fn begin_at(&mut self, pointer: Tick) {
        self.pushed_below = pointer;
    }

    /// Appends a tick that expired in an earlier process, which had published and reported a part of it.
    pub(super) fn push_restored(&mut self, tick: Tick, counts: TickCounts, published: u64, now: Instant) {
        let (list, reported, behind, batches) = (TickList::new(tick), true, 0, 0);
        self.expired.push_back(ExpiredTick { list, due_at: now, counts, reported, behind, published, batches });
    }

    /// Returns whether all messages of ticks before `below` are in batches.
    pub(super) fn is_all_published_below(&self, below: Tick) -> bool {
        self.expired.is_empty() && self.pushed_below == below
    }

    /// Lists some messages of the tick that expires next. Returns whether there are more to list.
    pub(super) fn prelist(&mut self, tick: Tick, shards: &Shards) -> bool {
        let list = self.prelist.get_or_insert_with(|| TickList::new(tick));
        // If the prelist is of another tick, that tick is just expiring, and `push` will take its list.
        list.tick == tick && list.prelist(shards)
    }

    /// Records the number of messages of `tick` that are kept to answer `late`.
    pub(super) fn remember(&mut self, tick: Tick, messages: u64) {
        self.remembered.push_back((tick, messages));
        self.remembered_messages += messages;
    }

    /// Returns the number of messages that timed out and are not in the outbox yet.
    pub(super) fn unpublished(&self) -> u64 {
        self.expired.iter().map(|expired| expired.counts.timed_out() - expired.published).sum()
    }

    /// Does the next step of expiry. Returns its result, and whether there is more to do.
    pub(super) fn step(
        &mut self,
        shards: &Shards,
        outbox: &MemoryOutbox,
        epoch: u64,
        pointer: Tick,
        now: Instant,
    ) -> PublishStep {
        let Some(front) = self.expired.front_mut() else {
            // Forgetting must keep up with the expiry of ticks. Reclaiming memory may wait.
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
        let batch = front.next_batch(&mut self.listed, epoch);
        let (counts, due_at) = (front.counts, front.due_at);
        if front.published == counts.timed_out() {
            let (tick, messages) = (front.list.tick, front.published);
            debug_assert!(self.listed.is_empty(), "only messages of this tick are listed, and all are published");
            self.listed.shrink_to(2 * MAX_BATCH_MESSAGES);
            self.expired.pop_front();
            if messages > 0 {
                self.remember(tick, messages);
            }
        }
        let published = batch.map(|batch| {
            let messages = batch.messages.len() as u64;
            outbox.publish(Arc::new(batch), due_at);
            Published { messages, lateness: (!counts.drained).then(|| now.saturating_duration_since(due_at)) }
        });
        PublishStep { published, more: true, ..PublishStep::default() }
    }

    /// Lists a part of the messages of a drain, which has expired all remaining ticks.
    fn list_drained(&mut self, shards: &Shards) {
        let (Some(position), Some(first), Some(last)) =
            (&mut self.drain, self.expired.front(), self.expired.back())
        else {
            return;
        };
        let ticks = first.list.tick..last.list.tick.plus(1);
        let more = shards.scan(position, |shard, segment| {
            shard.list(&ticks, segment, |number, timed_out| self.expired[number].list.push(timed_out))
        });
        if !more {
            self.drain = None;
        }
    }

    /// Removes a part of the messages that timed out a revolution ago. If more than `max_in_flight` messages are
    /// remembered, removes the oldest of them earlier. Otherwise short ack timeouts on a long ring would fill the
    /// memory. Returns whether there was something to remove.
    fn forget(&mut self, shards: &Shards, pointer: Tick) -> bool {
        let Some((tick, messages)) = self.remembered.front().copied() else { return false };
        let is_due = !self.wheel.is_late_known(tick, pointer);
        if !is_due && self.remembered_messages <= shards.options.max_in_flight {
            return false;
        }
        if !shards.scan(&mut self.forgotten, |shard, segment| shard.forget(tick, segment)) {
            self.forgotten = ScanPosition::default();
            self.remembered.pop_front();
            self.remembered_messages -= messages;
        }
        true
    }

    /// Reclaims memory of sparse tables. Returns whether there may be more to reclaim. Does nothing while there is a
    /// prelist, because the scan for the prelist could miss entries that are moved: see
    /// [`Table::scan`](super::table::Table::scan).
    fn reclaim(&mut self, shards: &Shards) -> bool {
        if self.prelist.is_some() || self.is_walked {
            return false;
        }
        let more = shards.visit_next(&mut self.reclaimed, |shard, segment| shard.table.reclaim(segment));
        if !more {
            self.reclaimed = ScanPosition::default();
        }
        more
    }
}

impl ExpiredTick {
    /// Lists the next messages, until a batch is full, all messages are listed, or the step has visited enough
    /// shards.
    fn list(&mut self, shards: &Shards, listed: &mut Vec<TimedOut>) {
        self.list.take(listed);
        for _ in 0..LOCKS_PER_STEP {
            let count = listed.len() as u64;
            if count >= MAX_BATCH_MESSAGES as u64 || self.published + count == self.counts.timed_out() {
                return;
            }
            let TickList { tick, position, .. } = &mut self.list;
            let is_visited = shards.visit_next(position, |shard, segment| {
                shard.list(&(*tick..tick.plus(1)), segment, |_, timed_out| listed.push(timed_out))
            });
            debug_assert!(is_visited, "the scan finds all counted messages");
        }
    }

    /// Makes the next batch, if a batch is full or the listed messages are the last of the tick.
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

/// The listed messages of a tick.
#[derive(Debug)]
pub(super) struct TickList {
    tick: Tick,
    position: ScanPosition,
    /// The listed messages, in parts of the size of a batch. All parts but the last are full.
    batches: VecDeque<Vec<TimedOut>>,
    /// The messages that left the tick after they were listed.
    unlisted: HashSet<Message, RandomHasher>,
}

impl TickList {
    fn new(tick: Tick) -> TickList {
        TickList {
            tick,
            position: ScanPosition::default(),
            batches: VecDeque::new(),
            unlisted: HashSet::default(),
        }
    }

    /// Lists some messages before the tick expires. Returns whether there are more to list.
    fn prelist(&mut self, shards: &Shards) -> bool {
        if self.batches.len() * MAX_BATCH_MESSAGES > MAX_PRELISTED {
            return false;
        }
        let mut found = Vec::new();
        let ticks = self.tick..self.tick.plus(1);
        let more = shards.scan(&mut self.position, |shard, segment| {
            shard.list(&ticks, segment, |_, timed_out| found.push(timed_out))
        });
        for timed_out in found {
            self.push(timed_out);
        }
        more
    }

    fn push(&mut self, timed_out: TimedOut) {
        match self.batches.back_mut() {
            Some(batch) if batch.len() < MAX_BATCH_MESSAGES => batch.push(timed_out),
            _ => self.batches.push_back(vec![timed_out]),
        }
    }

    /// Moves messages to `listed` until they fill a batch or no message is left. Leaves out unlisted messages.
    fn take(&mut self, listed: &mut Vec<TimedOut>) {
        while listed.len() < MAX_BATCH_MESSAGES {
            let Some(batch) = self.batches.pop_front() else { return };
            if listed.is_empty() && self.unlisted.is_empty() {
                *listed = batch;
            } else {
                listed.extend(batch.into_iter().filter(|timed_out| !self.unlisted.contains(&timed_out.message)));
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::ops::Range;
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;
    use crate::core::single_request::{AddNewMsg, DelMsg, SingleRequest};
    use crate::core::{Advance, DelOutcome, GroupName, Outbox, Retention, Ring, StormRule};
    use crate::memory::{MemoryOptions, MemoryRing};

    /// Returns a ring with three slots and ticks of a second, whose pointer stands at `pointer`.
    pub(in crate::memory) fn ring_at(pointer: Tick, now: Instant) -> (MemoryRing, Arc<MemoryOutbox>) {
        ring_of(3, 1_000_000, pointer, now)
    }

    fn ring_of(slots: u16, max_in_flight: u64, pointer: Tick, now: Instant) -> (MemoryRing, Arc<MemoryOutbox>) {
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), now));
        let options = MemoryOptions {
            wheel: Wheel::new(slots, Duration::from_secs(1)).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight,
            threads: 1,
        };
        (MemoryRing::new(options, (1, pointer), Arc::clone(&outbox), now), outbox)
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
        assert_eq!(behind, [0, 0, 0, 0, 0, 1, 2, 0], "expiry missed two ticks, and then caught up");
    }

    /// Measures how long the two scans of a tick, for listing and for forgetting, take for each message.
    /// `EXPIRY_NS_A_MESSAGE` in `options.rs` follows from the output.
    #[test]
    #[ignore = "it checks nothing, and only measures"]
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
            // The first move closes the tick, and the second move expires it.
            for _ in 0..2 {
                now += Duration::from_secs(1);
                ring.advance(now).now_or_never().unwrap().unwrap();
                while ring.wheel.publish_expired(now).more {}
            }
            let kept = ring.wheel.shards.len();
            assert!(kept <= 1_000, "{kept} are remembered after round {round}");
        }
        assert_eq!(answer(&of_round(19), now), [DelOutcome::Late; 400], "the latest messages are remembered");
        assert_eq!(answer(&of_round(0), now), [DelOutcome::Unknown; 400]);
    }

    #[test]
    fn a_drain_publishes_all_ticks_after_one_scan() {
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
        // The first of these ticks is prelisted.
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
        // Each tick takes two steps: one counts the tick, and one publishes its messages. A scan for each tick would
        // take three more.
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
        // The messages time out, are remembered for a revolution, and are then removed.
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

    /// The tick at which the pointer stands first. A message that is added there with an ack timeout of one tick
    /// expires with the next tick.
    const FIRST: Tick = Tick(7);

    struct Subject {
        ring: MemoryRing,
        outbox: Arc<MemoryOutbox>,
        now: Instant,
    }

    impl Subject {
        fn new() -> Subject {
            let now = Instant::now();
            let (ring, outbox) = ring_at(FIRST, now);
            Subject { ring, outbox, now }
        }

        fn add(&self, ids: Range<u64>, ack_timeout_ticks: u16) {
            let messages: Vec<Message> = ids.map(Message::from).collect();
            let request = AddNewMsg { messages: &messages, ack_timeout_ticks, attempt: 1 };
            self.ring.add_new_msg(request, self.now).now_or_never().unwrap().unwrap();
        }

        fn del(&self, ids: impl Iterator<Item = u64>, withdraw: bool) {
            let messages: Vec<Message> = ids.map(Message::from).collect();
            let request = DelMsg { messages: &messages, withdraw };
            self.ring.del_msg(request, self.now).now_or_never().unwrap().unwrap();
        }

        fn advance(&mut self) {
            self.now += Duration::from_secs(1);
            let moved = self.ring.advance(self.now).now_or_never().unwrap().unwrap();
            assert!(matches!(moved, Advance::Moved { .. }), "{moved:?}");
        }

        fn publish_expired(&self) {
            while self.ring.wheel.publish_expired(self.now).more {}
        }

        fn listed(&self) -> usize {
            let expiry = self.ring.wheel.expiry.lock();
            expiry.prelist.iter().flat_map(|prelist| &prelist.batches).map(Vec::len).sum()
        }

        /// Takes all batches. Returns their sizes, and the ids in them.
        fn taken(&self) -> (Vec<usize>, HashSet<u64>) {
            let group = GroupName::default_group();
            let taken = self.outbox.take(&group, u64::MAX, self.now);
            let batches: Vec<_> = taken.now_or_never().unwrap().unwrap();
            let ids = batches.iter().flat_map(|delivery| &delivery.batch.messages);
            let sizes: Vec<usize> = batches.iter().map(|delivery| delivery.batch.messages.len()).collect();
            let ids: HashSet<u64> = ids.map(|timed_out| timed_out.message.msg_id.0).collect();
            assert_eq!(sizes.iter().sum::<usize>(), ids.len(), "each message is in one batch");
            (sizes, ids)
        }
    }

    #[test]
    fn prelisted_messages_are_published_without_another_scan() {
        let mut subject = Subject::new();
        subject.add(0..9_000, 1);
        subject.add(100_000..400_000, 3);
        subject.advance();
        subject.publish_expired();
        while subject.ring.prelist() {}
        assert_eq!(subject.listed(), 9_000);
        subject.advance();
        let steps: Vec<_> = (0..4).map(|_| subject.ring.wheel.publish_expired(subject.now)).collect();
        assert_eq!(
            steps[0].counted.map(|(tick, counts)| (tick, counts.timed_out())),
            Some((FIRST.plus(1), 9_000))
        );
        let published: Vec<_> =
            steps.iter().filter_map(|step| step.published.map(|batch| batch.messages)).collect();
        assert_eq!(published, [4_096, 4_096, 808]);
        assert_eq!(subject.taken().1, (0..9_000).collect());
    }

    #[test]
    fn a_message_that_leaves_after_it_was_listed_is_in_no_batch_and_no_other_is_missing() {
        let mut subject = Subject::new();
        let in_tick = 300_000;
        subject.add(0..in_tick, 1);
        subject.del((0..in_tick).filter(|id| !id.is_multiple_of(4)), false);
        subject.advance();
        // The empty tick is complete after two steps. A third step would reclaim memory, and could move entries to
        // segments that the scan has already visited.
        let reported_and_done = [(); 2].map(|()| subject.ring.wheel.publish_expired(subject.now));
        assert!(reported_and_done.iter().all(|step| step.more && !step.reclaimed), "{reported_and_done:?}");
        let (mut new, mut steps) = (in_tick..in_tick + 3_000, 0);
        while subject.ring.prelist() {
            // These adds split segments between the steps of the scan.
            subject.add(new.clone(), 3);
            new = new.end..new.end + 3_000;
            for _ in 0..20 {
                subject.ring.wheel.publish_expired(subject.now);
            }
            steps += 1;
        }
        assert!(steps > 1 && subject.listed() > MAX_PRELISTED, "{} in {steps} steps", subject.listed());
        subject.del((0..in_tick).step_by(12), false);
        subject.del((4..in_tick).step_by(20), true);
        subject.add(8..9, 3);
        // The id 0 was acknowledged, so this add is a new message with a later deadline.
        subject.add(0..1, 2);
        subject.advance();
        subject.publish_expired();
        let (sizes, ids) = subject.taken();
        let mut expected: HashSet<u64> = (0..in_tick).step_by(4).collect();
        for gone in (0..in_tick).step_by(12).chain((4..in_tick).step_by(20)).chain([8]) {
            expected.remove(&gone);
        }
        assert_eq!(ids.len(), expected.len());
        assert_eq!(ids, expected);
        assert!(sizes[..sizes.len() - 1].iter().all(|size| *size == MAX_BATCH_MESSAGES), "{sizes:?}");
    }
}
