//! The list of a tick: its messages that time out, collected for its batches.
//!
//! A message that is not acknowledged a moment before its tick expires will hardly be. So the scan for a tick begins
//! before, while nothing waits for its end, and the batches are ready when the tick expires: this is the *prelist*. A message
//! may leave the tick in between, as an Ack comes or it is added again. Its shard keeps it in `unlisted`, and it is left out.

use std::collections::{HashSet, VecDeque};

use foldhash::quality::RandomState;

use super::shards::{ScanPosition, Shards};
use crate::core::batch::{MAX_BATCH_MESSAGES, TimedOut};
use crate::core::message::Message;
use crate::core::tick::Tick;

/// The most messages that are prelisted, or as many more as a step finds: the others are listed when their tick expires.
/// They are in memory twice until then.
const MAX_PRELISTED: usize = 16 * MAX_BATCH_MESSAGES;

/// The messages of a tick, as far as they are listed.
#[derive(Debug)]
pub(super) struct TickList {
    pub(super) tick: Tick,
    pub(super) position: ScanPosition,
    /// All but the last are full.
    batches: VecDeque<Vec<TimedOut>>,
    /// The messages that left the tick after they were listed.
    pub(super) left: HashSet<Message, RandomState>,
}

impl TickList {
    pub(super) fn new(tick: Tick) -> TickList {
        TickList { tick, position: ScanPosition::default(), batches: VecDeque::new(), left: HashSet::default() }
    }

    /// Lists some messages before the tick expires; returns whether there are more to list.
    pub(super) fn prelist(&mut self, shards: &Shards) -> bool {
        if self.batches.len() * MAX_BATCH_MESSAGES > MAX_PRELISTED {
            return false;
        }
        let mut found = Vec::new();
        let more = shards.scan(&mut self.position, |shard, segment| shard.list(self.tick, segment, &mut found));
        found.into_iter().for_each(|timed_out| self.push(timed_out));
        more
    }

    pub(super) fn push(&mut self, timed_out: TimedOut) {
        match self.batches.back_mut() {
            Some(batch) if batch.len() < MAX_BATCH_MESSAGES => batch.push(timed_out),
            _ => self.batches.push_back(vec![timed_out]),
        }
    }

    /// Moves messages to `listed` until that fills a batch, as far as there are any.
    pub(super) fn take(&mut self, listed: &mut Vec<TimedOut>) {
        while listed.len() < MAX_BATCH_MESSAGES {
            let Some(batch) = self.batches.pop_front() else { return };
            if listed.is_empty() && self.left.is_empty() {
                *listed = batch;
            } else {
                listed.extend(batch.into_iter().filter(|timed_out| !self.left.contains(&timed_out.message)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use futures_util::FutureExt;

    use super::super::expiry::tests::ring_at;
    use super::*;
    use crate::core::group::GroupName;
    use crate::core::outbox::Outbox;
    use crate::core::ring::{Advance, Ring};
    use crate::core::single_request::{AddNewMsg, DelMsg, SingleRequest};
    use crate::memory::{MemoryOutbox, MemoryRing};

    /// The first position of the pointer. A message added there with an ack timeout of one tick expires with the next tick.
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

        /// The sizes of all batches, and the ids in them.
        fn taken(&self) -> (Vec<usize>, HashSet<u64>) {
            let taken = self.outbox.take(&GroupName::default_group(), u64::MAX, self.now);
            let batches: Vec<_> = taken.now_or_never().unwrap().unwrap();
            let ids = batches.iter().flat_map(|delivery| &delivery.batch.messages);
            let sizes: Vec<usize> = batches.iter().map(|delivery| delivery.batch.messages.len()).collect();
            let ids: HashSet<u64> = ids.map(|timed_out| timed_out.message.msg_id.0).collect();
            assert_eq!(sizes.iter().sum::<usize>(), ids.len(), "each is in one batch");
            (sizes, ids)
        }
    }

    #[test]
    fn what_was_listed_ahead_is_published_without_another_look_at_the_others() {
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
    fn whoever_leaves_after_it_was_listed_is_in_no_batch_and_no_other_is_missing() {
        let mut subject = Subject::new();
        let in_tick = 300_000;
        subject.add(0..in_tick, 1);
        subject.del((0..in_tick).filter(|id| !id.is_multiple_of(4)), false);
        subject.advance();
        // The empty tick is dealt with. The next step would reclaim memory, by moving entries to where this looked
        // already.
        let reported_and_done = [(); 2].map(|()| subject.ring.wheel.publish_expired(subject.now));
        assert!(reported_and_done.iter().all(|step| step.more && !step.reclaimed), "{reported_and_done:?}");
        let (mut new, mut steps) = (in_tick..in_tick + 3_000, 0);
        while subject.ring.prelist() {
            // Segments are split meanwhile.
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
        // It is another one now.
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
