//! Adds subscribers to groups, and the subscription that each subscriber gets.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::{BatchSender, Command, Delivery};
use crate::core::{BatchId, Credit, Delivery as Delivered, GroupName, GroupOptions, MemberId, Reason, Refusal};
use crate::process::panics;

/// The memory of a membership: its channel, its places in the group, and the future of a command that waits.
pub const MEMBER_BYTES: usize = 12 * 1_024;

impl Delivery {
    /// Adds a subscriber to `group`, or to a new group with a generated name if `group` is `None`. If the group does
    /// not exist, creates it with `options`. `credit` limits the messages in the batches that the subscriber has not
    /// acknowledged. The last of these batches may exceed the limit.
    ///
    /// # Errors
    ///
    /// If the limit of groups is reached, or the store is unreachable.
    pub async fn subscribe(
        self: &Arc<Self>,
        group: Option<GroupName>,
        credit: u64,
        options: GroupOptions,
    ) -> Result<Subscription, Refusal> {
        self.add_member(group, Credit::Messages(credit), options).await
    }

    /// Adds a subscriber to `group` that gets batches only by [`Subscription::request`]. If the group does not exist,
    /// creates it at the beginning of the outbox.
    ///
    /// # Errors
    ///
    /// If the limit of groups is reached, or the store is unreachable.
    pub async fn join_for_requests(self: &Arc<Self>, group: &GroupName) -> Result<Subscription, Refusal> {
        self.add_member(Some(group.clone()), Credit::Batches(0), GroupOptions::default()).await
    }

    #[expect(clippy::cast_possible_truncation, reason = "any bits of a hash are as good as others")]
    async fn add_member(
        self: &Arc<Self>,
        group: Option<GroupName>,
        credit: Credit,
        options: GroupOptions,
    ) -> Result<Subscription, Refusal> {
        let member = MemberId(self.last_member.fetch_add(1, Ordering::Relaxed) + 1);
        let process = self.random.hash_one(std::process::id()) as u32;
        let group = group.unwrap_or_else(|| GroupName::generated(process, member.0));
        let (sender, batches) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicU64::new(0));
        let sender = BatchSender { batches: sender, unread: Arc::clone(&unread) };
        let (created, commands) =
            self.join(&group, options, Command::Join { member, credit, batches: sender }).await?;
        Ok(Subscription { group, created, batches, unread, member, commands, delivery: Arc::clone(self) })
    }
}

/// The membership of one subscriber in a group. Dropping this value leaves the group.
pub struct Subscription {
    /// The group.
    pub group: GroupName,
    /// Whether this subscription created the group.
    pub created: bool,
    batches: mpsc::UnboundedReceiver<Delivered>,
    unread: Arc<AtomicU64>,
    member: MemberId,
    commands: mpsc::UnboundedSender<Command>,
    delivery: Arc<Delivery>,
}

impl Subscription {
    /// Waits for the next batch. Returns `None` if the task of the group has ended, which happens only when the process
    /// ends. Cancel-safe.
    pub async fn next(&mut self) -> Option<Delivered> {
        let delivery = self.batches.recv().await?;
        self.record_read(&delivery);
        Some(delivery)
    }

    /// Returns a batch that was delivered already, or `None` if there is none. Does not wait.
    pub fn try_next(&mut self) -> Option<Delivered> {
        let delivery = self.batches.try_recv().ok()?;
        self.record_read(&delivery);
        Some(delivery)
    }

    fn record_read(&self, delivery: &Delivered) {
        self.unread.fetch_sub(delivery.batch.messages.len() as u64, Ordering::Relaxed);
    }

    /// Requests up to `batches` further batches. Replaces an earlier request, so 0 ends it. Only for a subscription
    /// from [`Delivery::join_for_requests`].
    ///
    /// Resolves once the sidecar has delivered all requested batches, or all that the group has now. After that,
    /// [`Subscription::try_next`] returns these batches, and the rest of the request stays in effect. After a request
    /// for 0 batches, no batch is delivered. The call itself queues the request, even if the returned future is never
    /// awaited.
    ///
    /// # Errors
    ///
    /// If the store refuses and this request got no batch; the request stays in effect. Or with
    /// [`Reason::MaxUnacked`] if the subscriber holds the maximum number of messages.
    pub fn request(&self, batches: u32) -> impl Future<Output = Result<(), Refusal>> + Send + use<> {
        let (answer, tried) = oneshot::channel();
        let _ = self.commands.send(Command::Request { member: self.member, batches, answer });
        async move { tried.await.unwrap_or(Ok(())) }
    }

    /// Detaches batches that this subscriber holds (keep). They stay delivered when the subscriber leaves. They go back
    /// to the group only by [`Delivery::nack`], or once they are overdue.
    pub fn keep(&self, batches: Vec<BatchId>) {
        let _ = self.commands.send(Command::Keep { member: self.member, batches });
    }

    /// Acknowledges batches, which settles them for the group. Resolves to the number of batches that were not settled
    /// before.
    ///
    /// The call itself queues the request, even if the returned future is never awaited.
    ///
    /// # Errors
    ///
    /// If the store is unreachable, or the task of the group has ended.
    pub fn ack(&self, batches: Vec<BatchId>) -> impl Future<Output = Result<u64, Refusal>> + Send + use<> {
        let (answer, settled) = oneshot::channel();
        let _ = self.commands.send(Command::Ack { batches, answer });
        let ended = "the process ends: acknowledge the batch over another connection";
        async move { settled.await.unwrap_or_else(|_| Err(Refusal::new(Reason::StoreTimeout, ended))) }
    }

    /// Gives a batch back to the group (nack), which redelivers it. Other subscribers can get the batch at once, this
    /// subscriber only after `delay`. Resolves to whether this subscriber held the batch.
    pub fn nack(&self, batch: BatchId, delay: Duration) -> impl Future<Output = bool> + Send + use<> {
        let (answer, held) = oneshot::channel();
        let _ = self.commands.send(Command::Nack { member: self.member, batch, delay, answer });
        async move { held.await.unwrap_or(false) }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let _shared = panics::shared();
        if let Some(handle) = self.delivery.handles.lock().get_mut(&self.group) {
            handle.members -= 1;
        }
        let _ = self.commands.send(Command::Leave { member: self.member });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::core::{
        CLOCK_BEAT, CombinedOutbox, MAX_CREDIT, Message, Retention, Tick, TickCounts, TimedOut, TimeoutBatch,
    };
    use crate::delivery::groups::LINGER;
    use crate::delivery::tests::seat;
    use crate::memory::MemoryOutbox;

    const REDELIVER: Duration = Duration::from_secs(30);

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
            (0..batches).for_each(|tick| subject.publish(tick, 3));
            subject
        }

        fn publish(&self, tick: u64, messages: u64) {
            let counts = TickCounts { added: messages, acked: 0, storm: false, drained: false };
            let messages =
                (0..messages).map(|number| TimedOut { message: Message::from(number), attempt: 1 }).collect();
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
        subject.publish(3, 3);
        subject.publish(4, 3);
        assert_eq!(member.next().await.unwrap().batch.id, id(3), "the request stays in effect");
        settle_down().await;
        assert_eq!(member.try_next(), None, "the request was for 2 batches");
        assert_eq!(request(&mut member, 1).await, [id(4)]);
        assert_eq!(request(&mut member, 1).await, []);
        assert_eq!(request(&mut member, 0).await, []);
        subject.publish(5, 3);
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
    async fn a_request_of_a_connection_with_too_many_messages_is_refused_until_it_acknowledges() {
        let subject = Subject::new(0);
        subject.publish(0, u64::from(MAX_CREDIT));
        subject.publish(1, 1);
        let mut member = subject.join().await;
        assert_eq!(request(&mut member, 2).await, [id(0)], "the first batch reaches the limit");
        let refusal = member.request(1).await.unwrap_err();
        assert_eq!(refusal.reason, Reason::MaxUnacked);
        assert_eq!(member.request(0).await, Ok(()));
        assert_eq!(subject.delivery.ack(&subject.group, vec![id(0)]).await, Ok(1));
        assert_eq!(member.try_next(), None, "the refused request is not in effect");
        assert_eq!(request(&mut member, 1).await, [id(1)]);
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
        assert!((REDELIVER * 9 / 10..REDELIVER * 11 / 10).contains(&waited), "{waited:?}");
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
        assert_eq!(subject.delivery.nack(&subject.group, vec![id(0), id(7)], delay).await, 1);
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
        assert_eq!(delivery.nack(group, vec![id(0)], Duration::ZERO).await, 0);
        let mut member = subject.join().await;
        assert_eq!(request(&mut member, 3).await, [id(0), id(1), id(2)]);
        assert_eq!(delivery.ack(group, vec![id(0), id(0), id(9)]).await, Ok(1));
        assert_eq!(delivery.nack(group, vec![id(0), id(1), id(1)], Duration::from_secs(5)).await, 1);
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
        assert_eq!(delivery.nack(group, vec![id(1)], Duration::ZERO).await, 0, "no connection holds it");
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
        assert_eq!(delivery.nack(&unknown, ids, Duration::ZERO).await, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_lingers_after_requests_and_as_long_as_batches_are_kept() {
        let subject = Subject::new(1);
        let mut member = subject.join().await;
        assert!(member.created);
        assert_eq!(request(&mut member, 1).await, [id(0)]);
        drop(member);
        tokio::time::sleep(LINGER * 9 / 10).await;
        assert_eq!(subject.delivery.attended(), [(subject.group.clone(), 1)]);
        assert_eq!(subject.delivery.subscribers(&subject.group), 1);
        drop(subject.join().await);
        tokio::time::sleep(LINGER * 9 / 10).await;
        assert!(subject.runs(), "each member prolongs the lingering");
        tokio::time::sleep(REDELIVER / 4).await;
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
        tokio::time::sleep(REDELIVER * 9 / 10).await;
        assert!(subject.runs(), "a batch is kept");
        tokio::time::sleep(REDELIVER / 4).await;
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
}
