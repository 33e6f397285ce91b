//! Several rings as one: frames are split and answered in their order, and a part that was refused is told.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use ackwheel::core::{
    AddOutcome, Advance, Backlog, BatchId, CombinedOutbox, Completions, ConnectionId, DelOutcome, DrainOutcome,
    GroupName, GroupOptions, Message, MessageState, Moment, Outbox, Promise, PublishStep, Reason, Refusal,
    RequestBatch, Retention, Ring, RingParts, RingStatus, Rings, Settled, Store, StormRule, Submitted, Tick,
    Wheel, merge_backlogs, ring_of,
};
use ackwheel::memory::{MemoryOptions, MemoryStore};
use async_trait::async_trait;

use crate::support::single_request::{AddNewMsg, Completed, DelMsg, SingleRequest};

const COUNT: u16 = 3;
const TICK: Duration = Duration::from_secs(1);

/// Memory rings under the numbers 0, 1, 2, whose batches all say ring 0: only their order tells them apart.
fn seats(now: Instant, max_in_flight: u64) -> Vec<RingParts> {
    let open = |_| {
        let options = MemoryOptions {
            wheel: Wheel::new(5, TICK).unwrap(),
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight,
            threads: 1,
        };
        let moment = Moment { now, unix_time: Duration::from_secs(1_000_000) };
        MemoryStore::new(options, moment).rings()[0].clone()
    };
    (0..COUNT).map(open).collect()
}

fn of_ring(ring: u16, count: usize) -> Vec<Message> {
    (0..).map(Message::from).filter(|message| ring_of(*message, COUNT) == ring).take(count).collect()
}

/// All rings, behind a requester for each request.
struct AllRings(Rings);

impl AllRings {
    fn new(parts: &[RingParts]) -> AllRings {
        AllRings(Rings::new(parts))
    }
}

impl SingleRequest for AllRings {
    fn submit_single(&self, mut batch: RequestBatch, now: Instant) -> Completed {
        let mut requester = self.0.requester();
        assert_eq!(requester.submit(&mut batch, now), Submitted::Pending, "several rings complete in `poll`");
        Box::pin(async move {
            let mut completed = RequestBatch::default();
            poll_fn(|context| requester.poll(context, &mut completed)).await;
            completed
        })
    }
}

fn add(messages: &[Message]) -> AddNewMsg<'_> {
    AddNewMsg { messages, ack_timeout_ticks: 2, attempt: 1 }
}

async fn in_flight(seat: &RingParts, now: Instant) -> u64 {
    seat.ring.status(now).await.unwrap().in_flight
}

/// Turns all rings until what was added has timed out.
async fn turn(seats: &[RingParts], now: &mut Instant) {
    for _ in 0..3 {
        *now += TICK;
        for seat in seats {
            while !matches!(seat.ring.advance(*now).await.unwrap(), Advance::Waiting(_)) {}
            while seat.ring.publish_expired(*now).await.unwrap().more {}
        }
    }
}

#[tokio::test]
async fn a_frame_is_split_by_ring_and_answered_in_its_order() {
    let now = Instant::now();
    let seats = seats(now, 1_000);
    let rings = AllRings::new(&seats);
    let messages: Vec<Message> = (0..100).map(|id| Message::new(id, id % 7)).collect();
    let answer = rings.add_new_msg(add(&messages), now).await.unwrap();
    assert_eq!(answer.outcomes, [AddOutcome::Added; 100]);
    let mut total = 0;
    for (ring, seat) in (0..).zip(&seats) {
        let expected = messages.iter().filter(|message| ring_of(**message, COUNT) == ring).count() as u64;
        assert!(expected > 10);
        assert_eq!(in_flight(seat, now).await, expected, "ring {ring}");
        total += expected;
    }
    assert_eq!(total, 100);

    let mut mixed = Vec::new();
    let mut expected = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        if index % 3 == 0 {
            mixed.extend([*message, *message]);
            expected.extend([DelOutcome::Acked, DelOutcome::Unknown]);
        } else {
            mixed.push(Message::new(1_000 + index as u64, 0));
            expected.push(DelOutcome::Unknown);
        }
    }
    let later = now + Duration::from_millis(20);
    let answer = rings.del_msg(DelMsg { messages: &mixed, withdraw: false }, later).await.unwrap();
    assert_eq!(answer.outcomes, expected, "repeats apply in order, and each outcome is at its place");
    assert_eq!(answer.ack_latency.counts.iter().sum::<u64>(), 34, "the tallies of all rings");
    assert_eq!(answer.ack_latency.sum_micros, 20_000 * 34);

    let one = of_ring(2, 5);
    rings.add_new_msg(add(&one), now).await.unwrap();
    let empty = rings.del_msg(DelMsg { messages: &[], withdraw: false }, now).await.unwrap();
    assert!(empty.outcomes.is_empty());
}

#[tokio::test]
async fn the_deadline_is_the_latest_of_the_rings() {
    let now = Instant::now();
    let seats = seats(now, 1_000);
    seats[1].ring.advance(now + TICK).await.unwrap();
    let ahead = seats[1].ring.add_new_msg(add(&of_ring(1, 1)), now + TICK).await.unwrap().deadline;
    let both = [of_ring(0, 1), of_ring(1, 2)].concat();
    let answer = AllRings::new(&seats).add_new_msg(add(&both), now + TICK).await.unwrap();
    assert_eq!(answer.deadline, ahead);
    assert_eq!(answer.outcomes, [AddOutcome::Added, AddOutcome::Rearmed, AddOutcome::Added]);
}

#[tokio::test]
async fn a_part_refused_makes_the_outcome_unknown_and_a_refusal_of_all_is_passed_on() {
    let now = Instant::now();
    let seats = seats(now, 3);
    let rings = AllRings::new(&seats);
    let part = [of_ring(0, 2), of_ring(1, 4)].concat();
    let refusal = rings.add_new_msg(add(&part), now).await.unwrap_err();
    assert_eq!(refusal.reason, Reason::StoreTimeout);
    assert_eq!(refusal.reason.promise(), Promise::OutcomeUnknown);
    for words in ["1 of 2 rings", "--max-in-flight", "repeat it, but no add of messages that were acknowledged"] {
        assert!(refusal.text.contains(words), "{refusal}");
    }
    assert_eq!((in_flight(&seats[0], now).await, in_flight(&seats[1], now).await), (2, 0));
    let all = [of_ring(1, 4), of_ring(2, 4)].concat();
    let refusal = rings.add_new_msg(add(&all), now).await.unwrap_err();
    assert_eq!(refusal.reason, Reason::MaxInFlight, "nothing was applied, and that is said");
}

/// A ring that answers later, and only when it is asked by all.
struct Slow {
    ring: Arc<dyn Ring>,
    asked: Arc<AtomicU64>,
}

#[async_trait]
impl Ring for Slow {
    fn wheel(&self) -> Wheel {
        self.ring.wheel()
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        now: Instant,
    ) -> Submitted {
        assert_eq!(self.ring.submit(batch, connection, completions, now), Submitted::Completed);
        let (asked, completions, done) = (Arc::clone(&self.asked), Arc::clone(completions), mem::take(batch));
        asked.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            while !asked.load(Ordering::Relaxed).is_multiple_of(u64::from(COUNT)) {
                tokio::task::yield_now().await;
            }
            let put = |completed: &mut RequestBatch| {
                done.requests.iter().for_each(|request| completed.push_from(&done, request));
            };
            completions.put(put).into_iter().for_each(Waker::wake);
        });
        Submitted::Pending
    }

    async fn get(&self, messages: &[Message], now: Instant) -> Result<Vec<MessageState>, Refusal> {
        self.ring.get(messages, now).await
    }

    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        self.ring.advance(now).await
    }

    async fn publish_expired(&self, now: Instant) -> Result<PublishStep, Refusal> {
        self.ring.publish_expired(now).await
    }

    async fn drain(&self, now: Instant) -> Result<DrainOutcome, Refusal> {
        self.ring.drain(now).await
    }

    async fn status(&self, now: Instant) -> Result<RingStatus, Refusal> {
        self.ring.status(now).await
    }
}

#[tokio::test]
async fn all_rings_are_asked_in_the_call_and_awaited_together() {
    let now = Instant::now();
    let asked = Arc::new(AtomicU64::new(0));
    let mut seats = seats(now, 1_000);
    for seat in &mut seats {
        seat.ring = Arc::new(Slow { ring: Arc::clone(&seat.ring), asked: Arc::clone(&asked) });
    }
    let rings = AllRings::new(&seats);
    let messages: Vec<Message> = (0..50).map(Message::from).collect();
    let added = rings.add_new_msg(add(&messages), now);
    assert_eq!(asked.load(Ordering::Relaxed), 3, "before anyone awaits");
    let deleted = rings.del_msg(DelMsg { messages: &messages, withdraw: false }, now);
    assert_eq!(deleted.await.unwrap().outcomes, [DelOutcome::Acked; 50], "in the order of the calls");
    assert_eq!(added.await.unwrap().outcomes, [AddOutcome::Added; 50]);
}

#[tokio::test]
async fn batches_of_all_rings_are_taken_in_turns_within_the_window() {
    let mut now = Instant::now();
    let seats = seats(now, 1_000);
    let (rings, outbox) = (AllRings::new(&seats), CombinedOutbox::of(&seats));
    let told = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&told);
    outbox.on_new_batches(Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    let audit: GroupName = "audit".parse().unwrap();
    assert!(outbox.open_group(&audit, GroupOptions::default(), now).await.unwrap());
    assert!(!outbox.open_group(&audit, GroupOptions::default(), now).await.unwrap());
    let messages: Vec<Message> = (0..30).map(Message::from).collect();
    rings.add_new_msg(add(&messages), now).await.unwrap();
    turn(&seats, &mut now).await;
    assert_eq!(told.load(Ordering::Relaxed), 3, "a batch a ring");

    let first = outbox.take(&audit, 1, now).await.unwrap();
    assert_eq!(first.len(), 1, "the window is overshot by one batch, and not by one of each ring");
    let rest = outbox.take(&audit, u64::MAX, now).await.unwrap();
    assert_eq!(rest.len(), 2);
    let found: BTreeSet<u64> = first
        .iter()
        .chain(&rest)
        .flat_map(|delivery| delivery.batch.messages.iter().map(|lost| lost.message.msg_id.0))
        .collect();
    assert!(found.into_iter().eq(0..30));
    let backlog = outbox.backlog(now).await.unwrap();
    let found: Vec<_> = backlog.groups.iter().map(|of| (of.group.as_str(), of.batches, of.unacked)).collect();
    assert_eq!(found, [("audit", 3, 3), ("default", 3, 0)]);
    assert_eq!(backlog.ids, 30);
    assert_eq!(merge_backlogs(vec![backlog.clone(), Backlog::default()]), backlog);
    assert!(outbox.delete_group(&audit).await.unwrap());
    assert!(!outbox.delete_group(&audit).await.unwrap());
}

#[tokio::test]
async fn a_batch_of_a_ring_that_there_is_not_is_no_batch() {
    let now = Instant::now();
    let outbox = CombinedOutbox::of(&seats(now, 10));
    let group = GroupName::default_group();
    let batch = BatchId { tick: Tick(1), epoch: 1, ring: COUNT, seq: 0 };
    assert_eq!(outbox.settle(&group, &[batch]).await.unwrap().count, 0);
    assert!(outbox.retake(&group, &[batch], now).await.unwrap().is_empty());
    outbox.release(&group, &[batch]).await.unwrap();
    assert_eq!(outbox.settle(&group, &[]).await.unwrap().count, 0);
}

/// An outbox of a ring whose store is away.
struct Away;

fn away<T>() -> Result<T, Refusal> {
    Err(Refusal::new(Reason::StoreUnreachable, "the store is away"))
}

#[async_trait]
impl Outbox for Away {
    async fn open_group(&self, _: &GroupName, _: GroupOptions, _: Instant) -> Result<bool, Refusal> {
        away()
    }

    async fn leave_group(&self, _: &GroupName) -> Result<(), Refusal> {
        away()
    }

    async fn delete_group(&self, _: &GroupName) -> Result<bool, Refusal> {
        away()
    }

    async fn take(&self, _: &GroupName, _: u64, _: Instant) -> Result<Vec<ackwheel::core::Delivery>, Refusal> {
        away()
    }

    async fn retake(
        &self,
        _: &GroupName,
        _: &[BatchId],
        _: Instant,
    ) -> Result<Vec<ackwheel::core::Delivery>, Refusal> {
        away()
    }

    async fn settle(&self, _: &GroupName, _: &[BatchId]) -> Result<Settled, Refusal> {
        away()
    }

    async fn release(&self, _: &GroupName, _: &[BatchId]) -> Result<(), Refusal> {
        away()
    }

    async fn maintain(&self, _: &[GroupName], _: Instant) -> Result<ackwheel::core::Dropped, Refusal> {
        away()
    }

    async fn backlog(&self, _: Instant) -> Result<Backlog, Refusal> {
        away()
    }

    fn on_new_batches(&self, _: Box<dyn Fn() + Send + Sync>) {}
}

/// Seats with a batch in the outbox of each.
async fn seats_with_batches(now: &mut Instant) -> Vec<RingParts> {
    let seats = seats(*now, 1_000);
    let messages: Vec<Message> = (0..30).map(Message::from).collect();
    AllRings::new(&seats).add_new_msg(add(&messages), *now).await.unwrap();
    turn(&seats, now).await;
    seats
}

#[tokio::test]
async fn a_ring_that_is_away_does_not_hide_what_the_others_hold() {
    let (mut now, group) = (Instant::now(), GroupName::default_group());
    let mut seats = seats_with_batches(&mut now).await;
    seats[1].outbox = Arc::new(Away);
    let outbox = CombinedOutbox::of(&seats);
    assert_eq!(outbox.take(&group, u64::MAX, now).await.unwrap().len(), 2);
    assert_eq!(outbox.take(&group, 1, now).await.unwrap_err().reason, Reason::StoreUnreachable);
    let late = now + Retention::default().time + TICK;
    let dropped = outbox.maintain(&[], late).await.unwrap();
    assert_eq!(dropped.batches, 2, "what was dropped is told once");
    assert_eq!(outbox.maintain(&[], late).await.unwrap_err().reason, Reason::StoreUnreachable);
    assert_eq!(outbox.backlog(now).await.unwrap_err().reason, Reason::StoreTimeout);
    let unknown = outbox.open_group(&"audit".parse().unwrap(), GroupOptions::default(), now).await.unwrap_err();
    assert_eq!(unknown.reason, Reason::StoreTimeout, "some rings have it now");
}

#[tokio::test]
async fn a_ring_that_is_away_does_not_hide_what_the_others_settled() {
    let (mut now, group) = (Instant::now(), GroupName::default_group());
    let mut seats = seats_with_batches(&mut now).await;
    let here = seats[0].outbox.take(&group, 1, now).await.unwrap()[0].batch.id;
    let there = BatchId { ring: 1, ..here };
    seats[1].outbox = Arc::new(Away);
    let outbox = CombinedOutbox::of(&seats);
    let settled = outbox.settle(&group, &[there, here]).await.unwrap();
    assert_eq!((settled.count, settled.batches), (1, vec![here]));
    assert_eq!(settled.refusal.unwrap().reason, Reason::StoreTimeout, "the client is to repeat it");
    let settled = outbox.settle(&group, &[there, here]).await.unwrap();
    assert_eq!((settled.count, settled.batches), (0, vec![here]), "it is settled all the same");
    assert_eq!(outbox.settle(&group, &[there]).await.unwrap_err().reason, Reason::StoreUnreachable);
}
