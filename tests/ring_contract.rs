//! The contract of ring and outbox, as every store must keep it.
//!
//! The suite is written against the contracts of `ackwheel::core` alone and mounted once a store, at the end
//! of this file. A store brings a [`Mount`]: itself, and a way to let time pass.

mod mounts;
mod states;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use ackwheel::core::{
    AddNewMsgAnswer, AddOutcome, Advance, BatchId, DelOutcome, Delivery, Dropped, GroupName, GroupOptions,
    Message, Outbox, Promise, Reason, Ring, RingParts, TimedOut,
};

use mounts::{Memory, Mount, RETENTION_TICKS, Redis};
use states::the_state_of_a_message_is_read_and_not_changed;

use AddOutcome::{Added, Rearmed};
use DelOutcome::{Acked, Late, Unknown, Withdrawn};

use crate::support::single_request::{AddNewMsg, DelMsg, SingleRequest};

const SLOTS: u16 = 5;
const TICK: Duration = Duration::from_secs(1);
const MAX_IN_FLIGHT: u64 = 20_000;

/// The operations of the checks on a mounted store.
struct Subject<M> {
    mount: M,
    ring: Arc<dyn Ring>,
    outbox: Arc<dyn Outbox>,
    group: GroupName,
}

fn messages(ids: &[u64]) -> Vec<Message> {
    ids.iter().copied().map(Message::from).collect()
}

fn ids(deliveries: &[Delivery]) -> BTreeSet<u64> {
    deliveries.iter().flat_map(|delivery| &delivery.batch.messages).map(|lost| lost.message.msg_id.0).collect()
}

impl<M: Mount> Subject<M> {
    async fn open() -> Subject<M> {
        let mount = M::open().await;
        let RingParts { ring, outbox, .. } = mount.store().rings()[0].clone();
        Subject { mount, ring, outbox, group: GroupName::default_group() }
    }

    async fn add_with(&self, messages: &[Message], ack_timeout_ticks: u16, attempt: u8) -> AddNewMsgAnswer {
        let request = AddNewMsg { messages, ack_timeout_ticks, attempt };
        self.ring.add_new_msg(request, self.mount.now()).await.unwrap()
    }

    async fn add(&self, ids: &[u64]) -> Vec<AddOutcome> {
        self.add_with(&messages(ids), SLOTS, 1).await.outcomes
    }

    async fn del(&self, ids: &[u64]) -> Vec<DelOutcome> {
        self.del_with(&messages(ids), false).await
    }

    async fn del_with(&self, messages: &[Message], withdraw: bool) -> Vec<DelOutcome> {
        self.ring.del_msg(DelMsg { messages, withdraw }, self.mount.now()).await.unwrap().outcomes
    }

    /// How many latencies a DelMsg was answered with, and their sum in ms.
    async fn latencies(&self, ids: &[u64], withdraw: bool) -> (u64, u64) {
        let request = DelMsg { messages: &messages(ids), withdraw };
        let latency = self.ring.del_msg(request, self.mount.now()).await.unwrap().ack_latency;
        (latency.counts.iter().sum(), latency.sum_micros / 1_000)
    }

    /// Lets `ticks` pass, the ring turned on time, and everything decided published.
    async fn turn(&mut self, ticks: u32) {
        for _ in 0..ticks {
            self.mount.pass(TICK);
            self.advance().await;
            self.publish_expired().await;
        }
    }

    async fn advance(&self) {
        while !matches!(self.ring.advance(self.mount.now()).await.unwrap(), Advance::Waiting(_)) {}
    }

    async fn publish_expired(&self) {
        while self.ring.publish_expired(self.mount.now()).await.unwrap().more {}
    }

    async fn take(&self) -> Vec<Delivery> {
        self.outbox.take(&self.group, u64::MAX, self.mount.now()).await.unwrap()
    }

    async fn retake(&self, deliveries: &[Delivery]) -> Vec<Delivery> {
        let batches: Vec<BatchId> = deliveries.iter().map(|delivery| delivery.batch.id).collect();
        self.outbox.retake(&self.group, &batches, self.mount.now()).await.unwrap()
    }

    async fn settle(&self, deliveries: &[Delivery]) -> u64 {
        let batches: Vec<BatchId> = deliveries.iter().map(|delivery| delivery.batch.id).collect();
        self.outbox.settle(&self.group, &batches).await.unwrap().count
    }

    /// How many messages the outbox holds, once it was tended.
    async fn held_ids(&self) -> u64 {
        self.outbox.maintain(std::slice::from_ref(&self.group), self.mount.now()).await.unwrap();
        self.outbox.backlog(self.mount.now()).await.unwrap().ids
    }
}

async fn a_message_times_out_after_its_whole_time_and_less_than_a_tick_more<M: Mount>() {
    for phase in [1, 499, 999] {
        let mut subject = Subject::<M>::open().await;
        subject.advance().await;
        subject.mount.pass(Duration::from_millis(phase));
        subject.add_with(&messages(&[1]), 2, 1).await;
        // The pointer reaches its deadline: the tick is closed, not decided.
        subject.turn(2).await;
        assert!(subject.take().await.is_empty(), "early at phase {phase}");
        subject.turn(1).await;
        assert_eq!(ids(&subject.take().await), BTreeSet::from([1]), "late at phase {phase}");
    }
}

async fn a_deadline_counts_from_the_tick_due_and_not_from_a_lagging_pointer<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.mount.pass(TICK + TICK / 2);
    // By the clock one tick is over, but nobody has turned the ring yet.
    subject.add_with(&messages(&[1]), 1, 1).await;
    subject.advance().await;
    subject.turn(1).await;
    assert!(subject.take().await.is_empty(), "less than a tick has passed since the add");
    subject.turn(1).await;
    assert_eq!(ids(&subject.take().await), BTreeSet::from([1]));
}

async fn a_closing_tick_can_still_be_acknowledged_and_rearmed<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add_with(&messages(&[1, 2, 3]), 2, 1).await;
    subject.turn(2).await;
    assert_eq!(subject.del(&[1]).await, [Acked]);
    assert_eq!(subject.add_with(&messages(&[2]), 1, 2).await.outcomes, [Rearmed]);
    subject.turn(1).await;
    let closed = subject.take().await;
    assert_eq!(ids(&closed), BTreeSet::from([3]));
    assert_eq!((closed[0].batch.counts.added, closed[0].batch.counts.acked), (2, 1), "2 was re-armed away");
    subject.turn(1).await;
    let rearmed = subject.take().await;
    assert_eq!(rearmed[0].batch.messages, [TimedOut { message: Message::new(2, 0), attempt: 2 }]);
}

async fn a_timed_out_message_is_late_for_one_revolution<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add_with(&messages(&[1, 2]), 1, 1).await;
    subject.turn(2).await;
    assert_eq!(subject.del(&[1, 1]).await, [Late, Late], "asking does not use it up");
    assert_eq!(subject.add(&[2]).await, [Added], "adding again erases it");
    assert_eq!(subject.del(&[2, 2]).await, [Acked, Unknown]);
    subject.turn(u32::from(SLOTS) - 1).await;
    assert_eq!(subject.del(&[1]).await, [Late]);
    subject.turn(1).await;
    assert_eq!(subject.del(&[1]).await, [Unknown]);
}

async fn a_decided_message_is_late_before_it_is_published<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add_with(&messages(&[1, 2]), 1, 1).await;
    subject.turn(1).await;
    subject.mount.pass(TICK);
    subject.advance().await;
    assert_eq!(subject.del(&[1]).await, [Late]);
    assert_eq!(subject.add(&[2]).await, [Added], "its first life has ended");
    subject.publish_expired().await;
    let batches = subject.take().await;
    assert_eq!(ids(&batches), BTreeSet::from([1, 2]), "both lives are in the batch");
    assert_eq!((batches[0].batch.counts.added, batches[0].batch.counts.acked), (2, 0));
}

async fn a_withdrawn_message_counts_in_nothing<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add(&[1, 2]).await;
    assert_eq!(subject.del_with(&messages(&[1, 1, 9]), true).await, [Withdrawn, Unknown, Unknown]);
    subject.turn(u32::from(SLOTS) + 1).await;
    let batches = subject.take().await;
    assert_eq!((batches[0].batch.counts.added, batches[0].batch.counts.acked), (1, 0));
    assert_eq!(subject.del_with(&messages(&[2]), true).await, [Late]);
}

async fn the_latency_of_an_ack_runs_from_its_add_and_counts_once<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add_with(&messages(&[1, 2, 3, 4, 5, 6]), 2, 1).await;
    subject.mount.pass(TICK / 4);
    assert_eq!(subject.latencies(&[1, 1, 9], false).await, (1, 250));
    assert_eq!(subject.latencies(&[4, 9], false).await, (1, 250), "without repeats");
    subject.turn(3).await;
    assert_eq!(subject.latencies(&[2, 2], true).await, (0, 0), "a withdrawal is no Ack");
    assert_eq!(subject.latencies(&[2, 3, 2], false).await, (2, 2 * 3_250), "late, and once a message");
    assert_eq!(subject.latencies(&[3], false).await, (0, 0), "also in another request");
    assert_eq!(subject.latencies(&[5, 6], false).await, (2, 2 * 3_250), "without repeats");
    assert_eq!(subject.latencies(&[6, 5], false).await, (0, 0));
}

async fn a_rearmed_message_has_its_last_deadline_and_attempt<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    assert_eq!(subject.add(&[7, 7, 8]).await, [Added, Rearmed, Added], "repeats apply in order");
    subject.turn(2).await;
    let first = subject.add_with(&messages(&[7]), SLOTS, 3).await;
    assert_eq!(first.outcomes, [Rearmed]);
    subject.turn(u32::from(SLOTS) - 1).await;
    assert_eq!(ids(&subject.take().await), BTreeSet::from([8]));
    subject.turn(2).await;
    let batches = subject.take().await;
    assert_eq!(batches[0].batch.messages, [TimedOut { message: Message::new(7, 0), attempt: 3 }]);
    assert_eq!(batches[0].batch.id.tick, first.deadline);
}

async fn a_message_is_the_pair_and_any_id_is_legal<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    let pairs = [(9, 1), (9, 2), (u64::MAX, u64::MAX), (0, 0), (1 << 53, (1 << 53) + 1)].map(Message::from);
    assert_eq!(subject.add_with(&pairs, 1, 255).await.outcomes, [Added; 5]);
    assert_eq!(subject.del_with(&pairs[..1], false).await, [Acked]);
    subject.turn(2).await;
    let batches = subject.take().await;
    let found: BTreeSet<_> = batches.iter().flat_map(|delivery| delivery.batch.messages.clone()).collect();
    let expected = pairs[1..].iter().map(|message| TimedOut { message: *message, attempt: 255 });
    assert_eq!(found, expected.collect());
}

async fn large_ticks_are_cut_and_earlier_ticks_go_first<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    let many: Vec<u64> = (0..10_000).collect();
    subject.add_with(&messages(&[20_000]), 1, 1).await;
    subject.add_with(&messages(&many), 2, 1).await;
    subject.del(&many[..2_000]).await;
    subject.turn(3).await;
    let batches = subject.take().await;
    assert_eq!(ids(&batches[..1]), BTreeSet::from([20_000]));
    assert!(!batches[0].batch.counts.storm, "one message is no storm");
    let large = &batches[1..];
    assert_eq!(ids(large).len(), 8_000);
    for (seq, delivery) in (0..).zip(large) {
        let batch = &delivery.batch;
        assert!((1..=4_096).contains(&batch.messages.len()));
        assert_eq!((batch.id.seq, batch.last), (seq, seq as usize + 1 == large.len()));
        assert_eq!((batch.counts.added, batch.counts.acked, batch.counts.storm), (10_000, 2_000, true));
    }
    let names: BTreeSet<BatchId> = batches.iter().map(|delivery| delivery.batch.id).collect();
    assert_eq!(names.len(), batches.len(), "no name twice");
    assert!(names.iter().eq(batches.iter().map(|delivery| &delivery.batch.id)), "in the order of their names");
}

async fn a_frame_beyond_the_limit_is_refused_as_a_whole<M: Mount>() {
    let subject = Subject::<M>::open().await;
    let most: Vec<Message> = (1..MAX_IN_FLIGHT).map(Message::from).collect();
    subject.add_with(&most, SLOTS, 1).await;
    let two = messages(&[0, MAX_IN_FLIGHT]);
    let request = AddNewMsg { messages: &two, ack_timeout_ticks: SLOTS, attempt: 1 };
    let refusal = subject.ring.add_new_msg(request, subject.mount.now()).await.unwrap_err();
    assert_eq!(refusal.reason, Reason::MaxInFlight);
    assert_eq!(refusal.reason.promise(), Promise::NotApplied);
    assert!(refusal.text.contains("try again") && refusal.text.contains("--max-in-flight"), "{refusal}");
    assert_eq!(subject.del_with(&two, false).await, [Unknown, Unknown]);
    assert_eq!(subject.add(&[0]).await, [Added], "one still fits");
}

async fn status_counts_every_slot<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add_with(&messages(&[1, 2, 3]), 1, 1).await;
    let deadline = subject.add_with(&messages(&[4]), SLOTS, 1).await.deadline;
    let wheel = subject.ring.wheel();
    let status = subject.ring.status(subject.mount.now()).await.unwrap();
    assert_eq!((status.in_flight, status.closing, status.slots.iter().sum::<u64>()), (4, 0, 4));
    assert_eq!(status.slots[wheel.slot(deadline)], 1);
    subject.turn(1).await;
    let status = subject.ring.status(subject.mount.now()).await.unwrap();
    assert_eq!((status.in_flight, status.closing, status.slots.iter().sum::<u64>()), (4, 3, 1));
}

async fn every_group_has_its_own_copy_until_all_have_settled_it<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    let other: GroupName = "other".parse().unwrap();
    let open = || subject.outbox.open_group(&other, GroupOptions::default(), subject.mount.now());
    assert!(open().await.unwrap());
    assert!(!open().await.unwrap(), "it is there already");
    subject.add_with(&messages(&[1]), 1, 1).await;
    subject.turn(2).await;
    let mine = subject.take().await;
    assert_eq!(subject.settle(&mine).await, 1);
    assert_eq!(subject.settle(&mine).await, 0, "settling is final and harmless");
    let theirs = subject.outbox.take(&other, u64::MAX, subject.mount.now()).await.unwrap();
    assert_eq!(ids(&theirs), BTreeSet::from([1]));
    let backlog = subject.outbox.backlog(subject.mount.now()).await.unwrap();
    let found: Vec<_> = backlog.groups.iter().map(|of| (of.group.as_str(), of.batches, of.unacked)).collect();
    assert_eq!(found, [("default", 0, 0), ("other", 1, 1)]);
    assert!(subject.outbox.delete_group(&other).await.unwrap());
    assert!(!subject.outbox.delete_group(&other).await.unwrap());
}

async fn the_outbox_holds_what_some_group_has_not_settled<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    assert_eq!(subject.held_ids().await, 0);
    subject.add_with(&messages(&[1, 2, 3]), 1, 1).await;
    subject.turn(1).await;
    subject.add_with(&messages(&[4, 5]), 1, 1).await;
    subject.turn(2).await;
    assert_eq!(subject.held_ids().await, 5);
    let taken = subject.take().await;
    assert_eq!(subject.settle(&taken[..1]).await, 1);
    assert_eq!(subject.held_ids().await, 2, "the first batch is settled");
    assert_eq!(subject.settle(&taken[1..]).await, 1);
    assert_eq!(subject.held_ids().await, 0);
}

async fn released_batches_are_taken_first_with_their_count<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add_with(&messages(&[1]), 1, 1).await;
    subject.turn(1).await;
    subject.add_with(&messages(&[2]), 1, 1).await;
    subject.turn(1).await;
    let first = subject.take().await;
    assert_eq!((ids(&first), first[0].delivery_count), (BTreeSet::from([1]), 1));
    let (batch, again) = (first[0].batch.id, subject.retake(&first).await);
    assert_eq!((ids(&again), again[0].delivery_count), (BTreeSet::from([1]), 2));
    subject.outbox.release(&subject.group, &[batch]).await.unwrap();
    subject.turn(1).await;
    let both = subject.take().await;
    assert_eq!(both.iter().map(|delivery| delivery.delivery_count).collect::<Vec<_>>(), [3, 1]);
    assert!(both[0].age >= TICK, "its age counts from the decision");
    assert_eq!(subject.settle(&both).await, 2);
    assert!(subject.retake(&first).await.is_empty(), "a settled batch is not delivered again");
}

async fn only_unsettled_batches_are_taken_again_and_each_counts_for_itself<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    for id in [1, 2, 3] {
        subject.add_with(&messages(&[id]), 1, 1).await;
        subject.turn(1).await;
    }
    subject.turn(1).await;
    let all = subject.take().await;
    assert_eq!(ids(&subject.retake(&all[2..]).await), BTreeSet::from([3]));
    assert_eq!(subject.settle(&all[1..2]).await, 1);
    let again = subject.retake(&all).await;
    let counts = |delivery: &Delivery| (delivery.batch.id, delivery.delivery_count);
    assert_eq!(
        again.iter().map(counts).collect::<Vec<_>>(),
        [(all[0].batch.id, 2), (all[2].batch.id, 3)],
        "in the order in which they were asked for"
    );
    assert_eq!(again[1].batch.messages, all[2].batch.messages);
    assert!(subject.retake(&[]).await.is_empty());
}

async fn a_window_is_overshot_by_at_most_one_batch<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    for id in [10, 20, 30] {
        subject.add_with(&messages(&[id, id + 1]), 1, 1).await;
        subject.turn(1).await;
    }
    subject.turn(1).await;
    let taken = subject.outbox.take(&subject.group, 3, subject.mount.now()).await.unwrap();
    assert_eq!(ids(&taken), BTreeSet::from([10, 11, 20, 21]));
    assert_eq!(ids(&subject.take().await), BTreeSet::from([30, 31]));
}

async fn groups_begin_where_they_are_asked_to_and_retention_counts_its_losses<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    subject.add_with(&messages(&[1, 2]), 1, 1).await;
    subject.turn(2).await;
    let (old, new, now) = ("old".parse::<GroupName>().unwrap(), ["new".parse().unwrap()], subject.mount.now());
    subject.outbox.open_group(&old, GroupOptions::default(), now).await.unwrap();
    subject.outbox.open_group(&new[0], GroupOptions { from_end: true, ephemeral: false }, now).await.unwrap();
    assert_eq!(subject.outbox.take(&old, 9, now).await.unwrap().len(), 1);
    assert_eq!(subject.outbox.take(&new[0], 9, now).await.unwrap().len(), 0);
    subject.outbox.leave_group(&old).await.unwrap();
    assert_eq!(subject.outbox.maintain(&new, subject.mount.now()).await.unwrap(), Dropped::default());
    subject.turn(RETENTION_TICKS + 1).await;
    let dropped = subject.outbox.maintain(&new, subject.mount.now()).await.unwrap();
    assert_eq!((dropped.ids, dropped.batches, dropped.groups), (2, 1, vec![old]));
    assert!(subject.take().await.is_empty());
}

async fn an_ephemeral_group_goes_with_its_last_subscriber_and_others_stay<M: Mount>() {
    let mut subject = Subject::<M>::open().await;
    let [brief, lasting]: [GroupName; 2] = ["brief", "lasting"].map(|name| name.parse().unwrap());
    let ephemeral = GroupOptions { from_end: true, ephemeral: true };
    assert!(subject.outbox.open_group(&brief, ephemeral, subject.mount.now()).await.unwrap());
    assert!(subject.outbox.open_group(&lasting, GroupOptions::default(), subject.mount.now()).await.unwrap());
    assert!(!subject.outbox.open_group(&lasting, ephemeral, subject.mount.now()).await.unwrap());
    subject.add_with(&messages(&[1]), 1, 1).await;
    subject.turn(2).await;
    let taken = subject.outbox.take(&brief, 9, subject.mount.now()).await.unwrap();
    subject.outbox.release(&brief, &[taken[0].batch.id]).await.unwrap();
    for group in [&brief, &lasting] {
        subject.outbox.leave_group(group).await.unwrap();
    }
    let backlog = subject.outbox.backlog(subject.mount.now()).await.unwrap();
    let found: Vec<_> = backlog.groups.iter().map(|of| of.group.as_str()).collect();
    assert_eq!(found, ["default", "lasting"], "a group stays what it was made as");
}

macro_rules! mount {
    ($store:ident as $module:ident: $($check:ident)+) => {
        mod $module {
            $(#[tokio::test]
            async fn $check() {
                super::$check::<super::$store>().await;
            })+
        }
    };
}

/// The whole suite, for one store.
macro_rules! suite {
    ($store:ident as $module:ident) => {
        mount! { $store as $module:
            a_message_times_out_after_its_whole_time_and_less_than_a_tick_more
            a_deadline_counts_from_the_tick_due_and_not_from_a_lagging_pointer
            a_closing_tick_can_still_be_acknowledged_and_rearmed
            a_timed_out_message_is_late_for_one_revolution
            a_decided_message_is_late_before_it_is_published
            a_withdrawn_message_counts_in_nothing
            the_latency_of_an_ack_runs_from_its_add_and_counts_once
            a_rearmed_message_has_its_last_deadline_and_attempt
            a_message_is_the_pair_and_any_id_is_legal
            large_ticks_are_cut_and_earlier_ticks_go_first
            a_frame_beyond_the_limit_is_refused_as_a_whole
            status_counts_every_slot
            the_state_of_a_message_is_read_and_not_changed
            every_group_has_its_own_copy_until_all_have_settled_it
            the_outbox_holds_what_some_group_has_not_settled
            released_batches_are_taken_first_with_their_count
            only_unsettled_batches_are_taken_again_and_each_counts_for_itself
            a_window_is_overshot_by_at_most_one_batch
            groups_begin_where_they_are_asked_to_and_retention_counts_its_losses
            an_ephemeral_group_goes_with_its_last_subscriber_and_others_stay
        }
    };
}

suite! { Memory as memory }
suite! { Redis as redis }
