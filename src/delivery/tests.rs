//! Tests of groups and subscriptions with the memory store.

use super::groups::LINGER;
use super::*;
use crate::core::{
    CLOCK_BEAT, CombinedOutbox, MAX_GROUPS, Message, Retention, RingParts, Store, StormRule, Tick, TickCounts,
    TimedOut, TimeoutBatch, Wheel,
};
use crate::memory::{MemoryOptions, MemoryOutbox, MemoryStore};

const REDELIVER: Duration = Duration::from_secs(30);

fn seat(clock: &Clock) -> RingParts {
    let options = MemoryOptions {
        wheel: Wheel::new(5, Duration::from_secs(1)).unwrap(),
        storm: StormRule::default(),
        retention: Retention::default(),
        max_in_flight: 10,
        threads: 1,
    };
    MemoryStore::open(options, None, clock.moment()).unwrap().0.rings()[0].clone()
}

#[tokio::test]
async fn a_group_that_only_some_rings_could_open_is_left_on_the_others() {
    let clock = Arc::new(Clock::start());
    let seats = [seat(&clock), seat(&clock)];
    for number in 1..MAX_GROUPS {
        let group = format!("group-{number}").parse().unwrap();
        assert!(seats[1].outbox.open_group(&group, GroupOptions::default(), clock.now()).await.unwrap());
    }
    let outbox = CombinedOutbox::of(&seats);
    let delivery = Delivery::new(outbox, Arc::clone(&clock), Arc::new(Metrics::default()), Duration::from_secs(1));
    let options = GroupOptions { from_end: true, ephemeral: true };
    let refusal = delivery.subscribe(None, 1, options).await.err().unwrap();
    assert_eq!(refusal.reason, Reason::TooManyGroups);
    let left = seats[0].outbox.backlog(clock.now()).await.unwrap();
    assert_eq!(left.groups.len(), 1, "only the default group is left: {left:?}");
}

fn id(tick: u64) -> BatchId {
    BatchId { tick: Tick(tick), epoch: 1, ring: 0, seq: 0 }
}

/// A delivery from an outbox in memory, and a clock that beats.
struct Subject {
    delivery: Arc<Delivery>,
    outbox: Arc<MemoryOutbox>,
    group: GroupName,
}

impl Subject {
    /// The outbox has `batches` batches of 3 messages each: `id(0)`, `id(1)`, and so on.
    fn new(batches: u64) -> Subject {
        let clock = Arc::new(Clock::start());
        let beating = Arc::clone(&clock);
        tokio::spawn(async move {
            let mut interval = tokio::time::interval(CLOCK_BEAT);
            loop {
                interval.tick().await;
                beating.beat();
            }
        });
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), clock.now()));
        let subject = Subject {
            delivery: Delivery::new(Arc::clone(&outbox) as _, clock, Arc::default(), REDELIVER),
            outbox,
            group: "workers".parse().unwrap(),
        };
        (0..batches).for_each(|tick| subject.publish(tick));
        subject
    }

    fn publish(&self, tick: u64) {
        let counts = TickCounts { added: 3, acked: 0, storm: false, drained: false };
        let messages = (0..3).map(|number| TimedOut { message: Message::from(number), attempt: 1 }).collect();
        let batch = TimeoutBatch { id: id(tick), counts, last: true, messages };
        self.outbox.publish(Arc::new(batch), self.delivery.clock.now());
    }

    async fn join(&self) -> Subscription {
        self.delivery.join_for_requests(&self.group).await.unwrap()
    }

    /// Returns how many batches are delivered and not settled.
    async fn unacked(&self) -> u64 {
        let backlog = self.delivery.backlog().await.unwrap();
        backlog.groups.iter().find(|group| group.group == self.group).map_or(0, |group| group.unacked)
    }

    /// Returns whether the group has a task.
    fn runs(&self) -> bool {
        !self.delivery.attended().is_empty()
    }
}

/// Requests batches, and returns those that were delivered when the answer arrived.
async fn request(subscription: &mut Subscription, batches: u32) -> Vec<BatchId> {
    subscription.request(batches).await.unwrap();
    std::iter::from_fn(|| subscription.try_next()).map(|delivery| delivery.batch.id).collect()
}

/// Lets all other tasks run until they wait for a timer.
async fn settle_down() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_gets_its_batches_before_its_answer_and_the_rest_later() {
    let subject = Subject::new(3);
    let mut member = subject.join().await;
    settle_down().await;
    assert_eq!(member.try_next(), None, "nothing was requested");
    assert_eq!(request(&mut member, 2).await, [id(0), id(1)]);
    assert_eq!(request(&mut member, 2).await, [id(2)]);
    subject.publish(3);
    subject.publish(4);
    assert_eq!(member.next().await.unwrap().batch.id, id(3), "the request stays in effect");
    settle_down().await;
    assert_eq!(member.try_next(), None, "the request was for 2 batches");
    assert_eq!(request(&mut member, 1).await, [id(4)]);
    assert_eq!(request(&mut member, 1).await, []);
    assert_eq!(request(&mut member, 0).await, []);
    subject.publish(5);
    settle_down().await;
    assert_eq!(member.try_next(), None, "0 ended the request");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_a_later_one_replaces_is_answered_too() {
    let subject = Subject::new(9);
    let mut member = subject.join().await;
    let requests = [member.request(5), member.request(2), member.request(1)];
    for request in requests {
        request.await.unwrap();
    }
    settle_down().await;
    assert_eq!(member.try_next().unwrap().batch.id, id(0));
    assert_eq!(member.try_next(), None, "only the last request counts");
}

#[tokio::test(start_paused = true)]
async fn a_request_of_a_member_that_leaves_takes_no_batch_from_others() {
    let subject = Subject::new(2);
    let mut other = subject.join().await;
    let leaving = subject.join().await;
    let request_of_leaving = leaving.request(2);
    drop(leaving);
    request_of_leaving.await.unwrap();
    assert_eq!(request(&mut other, 2).await, [id(0), id(1)]);
    assert_eq!(subject.delivery.subscribers(&subject.group), 1);
}

#[tokio::test(start_paused = true)]
async fn batches_return_with_their_connection_unless_they_are_kept() {
    let subject = Subject::new(2);
    let mut member = subject.join().await;
    assert_eq!(request(&mut member, 2).await, [id(0), id(1)]);
    member.keep(vec![id(0)]);
    drop(member);
    let mut other = subject.join().await;
    assert_eq!(request(&mut other, 2).await, [id(1)], "the kept batch stays delivered");
    assert_eq!(other.request(1).await, Ok(()));
    assert_eq!(other.try_next(), None);
    let before = subject.delivery.clock.now();
    assert_eq!(other.next().await.unwrap().batch.id, id(0));
    let waited = subject.delivery.clock.now() - before;
    assert!((REDELIVER - REDELIVER / 10..REDELIVER * 11 / 10).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_kept_batch_returns_to_the_outbox_once_it_is_overdue_or_nacked_without_a_member() {
    let subject = Subject::new(2);
    let mut member = subject.join().await;
    assert_eq!(request(&mut member, 2).await, [id(0), id(1)]);
    member.keep(vec![id(0), id(1)]);
    drop(member);
    settle_down().await;
    assert_eq!(subject.unacked().await, 2);
    let delay = Duration::from_secs(9);
    assert_eq!(subject.delivery.nack(&subject.group, vec![id(0), id(7)], delay).await, Ok(1));
    assert_eq!(subject.unacked().await, 1, "the nacked batch is in the outbox when the answer arrives");
    tokio::time::sleep(REDELIVER + Duration::from_secs(1)).await;
    assert_eq!(subject.unacked().await, 0);
    assert!(subject.runs(), "the task lingers");
    let mut later = subject.join().await;
    assert_eq!(request(&mut later, 3).await, [id(0), id(1)]);
}

#[tokio::test(start_paused = true)]
async fn any_connection_acknowledges_and_returns_batches() {
    let subject = Subject::new(3);
    let (delivery, group) = (&subject.delivery, &subject.group);
    assert_eq!(delivery.ack(group, vec![id(0)]).await.unwrap_err().reason, Reason::UnknownGroup);
    assert_eq!(delivery.ack(&GroupName::default_group(), vec![id(0)]).await, Ok(0), "it always exists");
    assert_eq!(delivery.nack(group, vec![id(0)], Duration::ZERO).await, Ok(0));
    let mut member = subject.join().await;
    assert_eq!(request(&mut member, 3).await, [id(0), id(1), id(2)]);
    assert_eq!(delivery.ack(group, vec![id(0), id(0), id(9)]).await, Ok(1));
    assert_eq!(delivery.nack(group, vec![id(0), id(1), id(1)], Duration::from_secs(5)).await, Ok(1));
    let mut other = subject.join().await;
    assert_eq!(request(&mut member, 1).await, [], "its holder waits for the delay");
    assert_eq!(request(&mut other, 1).await, [id(1)]);
    // The group exists, and its task has ended.
    drop((member, other));
    delivery.wait_until_groups_left(REDELIVER).await;
    assert!(!subject.runs());
    let foreign = BatchId { ring: 9, ..id(2) };
    assert_eq!(delivery.ack(group, vec![foreign, id(2)]).await, Ok(1));
    assert_eq!(delivery.ack(group, vec![id(2)]).await, Ok(0));
    assert_eq!(delivery.nack(group, vec![id(1)], Duration::ZERO).await, Ok(0), "no connection holds it");
}

#[tokio::test]
async fn batches_of_rings_that_do_not_exist_are_acknowledged_without_effect() {
    let clock = Arc::new(Clock::start());
    let outbox = CombinedOutbox::of(&[seat(&clock), seat(&clock)]);
    let delivery = Delivery::new(outbox, clock, Arc::default(), REDELIVER);
    let ids = vec![id(0), BatchId { ring: 1, ..id(0) }, BatchId { ring: 2, ..id(0) }];
    let unknown = "unknown".parse().unwrap();
    assert_eq!(delivery.ack(&unknown, ids.clone()).await.unwrap_err().reason, Reason::UnknownGroup);
    assert_eq!(delivery.ack(&GroupName::default_group(), ids.clone()).await, Ok(0));
    assert_eq!(delivery.ack(&GroupName::default_group(), ids[2..].to_vec()).await, Ok(0));
    let _member = delivery.join_for_requests(&unknown).await.unwrap();
    assert_eq!(delivery.ack(&unknown, ids.clone()).await, Ok(0));
    assert_eq!(delivery.nack(&unknown, ids, Duration::ZERO).await, Ok(0));
}

#[tokio::test(start_paused = true)]
async fn a_group_lingers_after_requests_and_as_long_as_batches_are_kept() {
    let subject = Subject::new(1);
    let mut member = subject.join().await;
    assert!(member.created);
    assert_eq!(request(&mut member, 1).await, [id(0)]);
    drop(member);
    tokio::time::sleep(LINGER - Duration::from_secs(1)).await;
    assert_eq!(subject.delivery.attended(), [(subject.group.clone(), 0)]);
    assert_eq!(subject.delivery.subscribers(&subject.group), 0);
    drop(subject.join().await);
    tokio::time::sleep(LINGER - Duration::from_secs(1)).await;
    assert!(subject.runs(), "each member prolongs the lingering");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!subject.runs());

    let group = Some(subject.group.clone());
    let mut native = subject.delivery.subscribe(group, 9, GroupOptions::default()).await.unwrap();
    let batch = native.next().await.unwrap().batch.id;
    drop(native);
    settle_down().await;
    assert!(!subject.runs(), "a subscriber with a credit of messages ends its group at once");

    let group = Some(subject.group.clone());
    let mut native = subject.delivery.subscribe(group, 9, GroupOptions::default()).await.unwrap();
    assert_eq!(native.next().await.unwrap().batch.id, batch);
    native.keep(vec![batch]);
    drop(native);
    tokio::time::sleep(REDELIVER - Duration::from_secs(1)).await;
    assert!(subject.runs(), "a batch is kept");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!subject.runs());
    assert_eq!(subject.unacked().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_deletion_and_a_drain_end_a_lingering_group_at_once() {
    let subject = Subject::new(1);
    let mut member = subject.join().await;
    assert_eq!(request(&mut member, 1).await, [id(0)]);
    member.keep(vec![id(0)]);
    let in_use = subject.delivery.delete_group(&subject.group).await.unwrap_err();
    assert_eq!(in_use.reason, Reason::GroupInUse);
    let begun = subject.delivery.clock.now();
    // The task has not read that the member left when the drain begins.
    drop(member);
    subject.delivery.wait_until_groups_left(LINGER).await;
    assert!(!subject.runs());
    assert_eq!(subject.unacked().await, 0, "the kept batch is released");
    let mut member = subject.join().await;
    assert_eq!(request(&mut member, 1).await, [id(0)]);
    member.keep(vec![id(0)]);
    drop(member);
    subject.delivery.delete_group(&subject.group).await.unwrap();
    let waited = subject.delivery.clock.now() - begun;
    assert!(waited < Duration::from_secs(1), "{waited:?}");
    assert!(!subject.runs());
    let again = subject.delivery.delete_group(&subject.group).await.unwrap_err();
    assert_eq!(again.reason, Reason::UnknownGroup);
}

#[tokio::test(start_paused = true)]
async fn a_member_that_joins_while_the_task_of_its_group_ends_is_served() {
    let subject = Subject::new(2);
    let (delivery, group) = (&subject.delivery, &subject.group);
    drop(subject.join().await);
    settle_down().await;
    let end = || delivery.handles.lock().get_mut(group).unwrap().end_without_members();
    // The task reads both commands at once.
    end();
    let mut member = subject.join().await;
    assert_eq!(request(&mut member, 1).await, [id(0)]);
    drop(member);
    settle_down().await;
    // The task waits for the lock to end, and a member joins.
    let lock = delivery.lock(group).await;
    end();
    settle_down().await;
    let mut member = subject.join().await;
    drop(lock);
    assert_eq!(request(&mut member, 2).await, [id(0), id(1)]);
    drop(member);
    settle_down().await;
    assert!(subject.runs(), "the member cancelled the end, so the task lingers");
    // A command without a member does not keep the task alive.
    let lock = delivery.lock(group).await;
    end();
    settle_down().await;
    let acked = delivery.ack(group, vec![id(0)]);
    let (acked, ()) = tokio::join!(acked, async { drop(lock) });
    assert_eq!(acked, Ok(1), "the task ended without the command, and the outbox is asked directly");
    settle_down().await;
    assert!(!subject.runs());
}
