//! Tests subscriptions: batches, acknowledgements, and recovery after faults.

use futures_util::StreamExt;

use super::*;
use crate::core::{BatchId, TickCounts, TimedOut};
use crate::protocol::frame::{Subscribe, TimeoutBatch};

const SUBSCRIPTION: u32 = 2;

fn batch(seq: u32) -> TimeoutBatch {
    let id = BatchId { tick: Tick(115), epoch: 9, ring: 0, seq };
    let counts = TickCounts { added: 3, acked: 2, ..TickCounts::default() };
    let messages = vec![TimedOut { message: Message::new(101, 7), attempt: 1 }];
    TimeoutBatch { id, delivery_count: 1, age_ms: 3, counts, last: true, messages }
}

impl Peer {
    async fn greet_subscriber(&self, answer: Body) -> (Session, Subscribe) {
        let mut session = self.greet(welcome()).await;
        let Frame { correlation: SUBSCRIPTION, body: Body::Subscribe(subscribe) } = session.frame().await else {
            panic!()
        };
        session.send(SUBSCRIPTION, answer).await;
        (session, subscribe)
    }

    async fn subscribe(&self, options: SubscribeOptions) -> (Subscription, Session) {
        let group = options.group.clone().unwrap_or_else(|| "made-up-1".to_owned());
        let (subscription, (session, _)) = tokio::join!(
            Subscription::open(self.address(), options, quick()),
            self.greet_subscriber(subscribed(&group))
        );
        (subscription.unwrap(), session)
    }
}

fn subscribed(group: &str) -> Body {
    Body::Subscribed { group: group.to_owned(), created: false }
}

fn default_group() -> SubscribeOptions {
    SubscribeOptions::default().group("default")
}

#[tokio::test]
async fn batches_are_yielded_and_acknowledged_from_anywhere() {
    let peer = Peer::new().await;
    let (client, _session) = peer.connect().await;
    let options = SubscribeOptions { credit: 10, from_end: true, ..default_group() };
    let (subscription, (mut session, asked)) =
        tokio::join!(client.subscribe(options), peer.greet_subscriber(subscribed("default")));
    let mut subscription = subscription.unwrap();
    let expected = Subscribe { group: "default".to_owned(), credit: 10, ephemeral: false, from_end: true };
    assert_eq!((asked, subscription.group().as_str()), (expected, "default"));

    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(1))).await;
    let first = subscription.next().await.unwrap().unwrap();
    let second = StreamExt::next(&mut subscription).await.unwrap().unwrap();
    assert_eq!((&*first, &second.batch), (&batch(0), &batch(1)));

    // One batch is acknowledged in another task while the stream is read here.
    let acking = tokio::spawn(async move { first.ack().await });
    let (third, settled) = tokio::join!(subscription.next(), async {
        let settled = session.answer(Body::BatchAckAnswer { settled: 1 }).await;
        session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(2))).await;
        settled
    });
    assert_eq!(settled, Body::BatchAck(vec![batch(0).id]));
    assert!(acking.await.unwrap().unwrap());
    let third = third.unwrap().unwrap();

    let (held, asked) =
        tokio::join!(second.nack(Duration::from_secs(2)), session.answer(Body::BatchNackAnswer { held: true }));
    assert!(held.unwrap());
    assert_eq!(asked, Body::BatchNack { batch: batch(1).id, delay_ms: 2_000 });

    let ids = [batch(1).id, third.id];
    let (settled, asked) =
        tokio::join!(subscription.ack_all(&ids), session.answer(Body::BatchAckAnswer { settled: 1 }));
    assert_eq!((settled.unwrap(), asked), (1, Body::BatchAck(ids.to_vec())));
    assert_eq!(subscription.ack_all(&[]).await.unwrap(), 0);
    let (settled, _) =
        tokio::join!(subscription.ack(third.id), session.answer(Body::BatchAckAnswer { settled: 0 }));
    assert!(!settled.unwrap());
}

#[tokio::test]
async fn a_subscription_heals_and_old_batches_are_acknowledged_on_the_new_connection() {
    let peer = Peer::new().await;
    let (mut subscription, mut session) = peer.subscribe(default_group()).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    let old = subscription.next().await.unwrap().unwrap();
    drop(session);
    let (mut session, asked) = peer.greet_subscriber(subscribed("default")).await;
    assert_eq!(asked.group, "default");
    let (settled, asked) = tokio::join!(old.ack(), session.answer(Body::BatchAckAnswer { settled: 1 }));
    assert!(settled.unwrap());
    assert_eq!(asked, Body::BatchAck(vec![batch(0).id]));
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(1))).await;
    assert_eq!(subscription.next().await.unwrap().unwrap().id, batch(1).id);
    assert_eq!(subscription.reconnects(), 1);
}

/// If the client did not repeat the acknowledgement, a reader that blocks its runtime for two ping intervals would get
/// the same batch forever. Each time, its connection is lost before the acknowledgement arrives.
#[tokio::test]
async fn an_ack_that_is_lost_with_its_connection_is_repeated_and_its_batch_is_not_read_again() {
    let peer = Peer::new().await;
    let (mut subscription, mut session) = peer.subscribe(default_group()).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    let dealt_with = subscription.next().await.unwrap().unwrap();
    let (lost, ()) = tokio::join!(dealt_with.ack(), async {
        assert_eq!(session.frame().await.body, Body::BatchAck(vec![batch(0).id]));
        drop(session);
    });
    assert_outcome_unknown(lost);

    let (mut session, _) = peer.greet_subscriber(subscribed("default")).await;
    let Frame { correlation, body } = session.frame().await;
    assert_eq!(body, Body::BatchAck(vec![batch(0).id]), "the client first repeats the acknowledgement");
    // The sidecar redelivers this batch before it receives the repeated acknowledgement. It never received the first
    // acknowledgement.
    session.send(SUBSCRIPTION, Body::TimeoutBatch(TimeoutBatch { delivery_count: 2, ..batch(0) })).await;
    let again = session.frame().await;
    assert_eq!(again.body, Body::BatchAck(vec![batch(0).id]), "the redelivered batch is acknowledged too");
    session.send(correlation, Body::BatchAckAnswer { settled: 1 }).await;
    session.send(again.correlation, Body::BatchAckAnswer { settled: 0 }).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(1))).await;
    let next = subscription.next().await.unwrap().unwrap();
    assert_eq!((next.id, subscription.reconnects()), (batch(1).id, 1), "batch 0 is not yielded again");
    // After the batch is settled, the subscription has forgotten it.
    session.send(SUBSCRIPTION, Body::TimeoutBatch(TimeoutBatch { delivery_count: 3, ..batch(0) })).await;
    assert_eq!(subscription.next().await.unwrap().unwrap().delivery_count, 3);
}

#[tokio::test]
async fn an_ack_that_is_refused_is_repeated_when_its_batch_comes_again() {
    let peer = Peer::new().await;
    let (mut subscription, mut session) = peer.subscribe(default_group()).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    let dealt_with = subscription.next().await.unwrap().unwrap();
    let (refused, _) = tokio::join!(dealt_with.ack(), session.answer(refusal(Reason::StoreUnreachable)));
    assert_eq!(assert_not_applied(refused).reason(), Some(Reason::StoreUnreachable));
    session.send(SUBSCRIPTION, Body::TimeoutBatch(TimeoutBatch { delivery_count: 2, ..batch(0) })).await;
    let repeated = session.answer(Body::BatchAckAnswer { settled: 1 }).await;
    assert_eq!(repeated, Body::BatchAck(vec![batch(0).id]));
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(1))).await;
    assert_eq!(subscription.next().await.unwrap().unwrap().id, batch(1).id);
}

#[tokio::test]
async fn what_was_not_read_survives_a_lost_connection_and_is_not_doubled() {
    let peer = Peer::new().await;
    let (mut subscription, mut session) = peer.subscribe(default_group()).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(1))).await;
    drop(session);
    let (mut session, _) = peer.greet_subscriber(subscribed("default")).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(TimeoutBatch { delivery_count: 2, ..batch(0) })).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(2))).await;
    // When this Ack is answered, the client has received everything that was sent before.
    let (settled, _) =
        tokio::join!(subscription.ack(batch(9).id), session.answer(Body::BatchAckAnswer { settled: 0 }));
    assert!(!settled.unwrap());
    let mut seen = Vec::new();
    for _ in 0..3 {
        let delivered = subscription.next().await.unwrap().unwrap();
        seen.push((delivered.id.seq, delivered.delivery_count));
    }
    assert_eq!(seen, [(0, 2), (1, 1), (2, 1)]);
}

#[tokio::test]
async fn what_there_is_no_room_for_is_given_back() {
    let peer = Peer::new().await;
    let options = SubscribeOptions { credit: 1, ..default_group() };
    let (mut subscription, mut session) = peer.subscribe(options).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(1))).await;
    let asked = session.answer(Body::BatchNackAnswer { held: true }).await;
    assert_eq!(asked, Body::BatchNack { batch: batch(1).id, delay_ms: 5_000 });
    assert_eq!(subscription.next().await.unwrap().unwrap().id, batch(0).id);
    session.send(SUBSCRIPTION, Body::TimeoutBatch(TimeoutBatch { delivery_count: 2, ..batch(1) })).await;
    let again = subscription.next().await.unwrap().unwrap();
    assert_eq!((again.id, again.delivery_count, subscription.reconnects()), (batch(1).id, 2, 0));
}

#[tokio::test]
async fn an_ephemeral_group_is_named_by_the_server_each_time() {
    let peer = Peer::new().await;
    let (subscription, session) = peer.subscribe(SubscribeOptions::default()).await;
    assert_eq!(subscription.group(), "made-up-1");
    drop(session);
    let (mut session, asked) = peer.greet_subscriber(subscribed("made-up-2")).await;
    assert_eq!((asked.group.as_str(), asked.ephemeral), ("", true));
    let (settled, _) =
        tokio::join!(subscription.ack(batch(0).id), session.answer(Body::BatchAckAnswer { settled: 0 }));
    assert!(!settled.unwrap());
    assert_eq!(subscription.group(), "made-up-2");
}

#[tokio::test]
async fn a_refused_subscription_is_not_opened() {
    let peer = Peer::new().await;
    let (error, _) = tokio::join!(
        Subscription::open(peer.address(), SubscribeOptions::default().group("a b"), ClientOptions::default()),
        peer.greet_subscriber(refusal(Reason::BadGroupName))
    );
    assert_eq!(assert_not_applied(error).reason(), Some(Reason::BadGroupName));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_heals_is_waited_out_and_one_that_cannot_ends_the_stream() {
    let clock = HeldClock::new();
    let peer = Peer::new().await;
    let (mut subscription, mut session) = peer.subscribe(default_group()).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    let delivered = subscription.next().await.unwrap().unwrap();
    drop(session);
    // `TooManyGroups` may count this client's own group, if the server has not noticed that its old connection is lost.
    let heals = [refusal(Reason::StoreUnreachable), refusal(Reason::TooManyGroups), subscribed("default")];
    for answer in heals.into_iter().chain([refusal(Reason::BadGroupName)]) {
        clock.until(peer.greet_subscriber(answer)).await;
    }
    let error = subscription.next().await.unwrap().unwrap_err();
    assert_eq!(error.reason(), Some(Reason::BadGroupName));
    assert!(subscription.next().await.is_none());
    assert_not_applied(delivered.ack().await);
}

#[tokio::test]
async fn reading_can_be_given_up_at_any_time() {
    let peer = Peer::new().await;
    let (mut subscription, mut session) = peer.subscribe(default_group()).await;
    assert!(futures_util::poll!(std::pin::pin!(subscription.next())).is_pending());
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    assert_eq!(subscription.next().await.unwrap().unwrap().id, batch(0).id);
}

#[tokio::test]
async fn a_dropped_subscription_finishes_what_was_acknowledged_and_leaves() {
    let peer = Peer::new().await;
    let (mut subscription, mut session) = peer.subscribe(default_group()).await;
    session.send(SUBSCRIPTION, Body::TimeoutBatch(batch(0))).await;
    let delivered = subscription.next().await.unwrap().unwrap();
    let acking = start({
        let delivered = delivered.clone();
        async move { delivered.ack().await }
    })
    .await;
    drop(subscription);
    settle().await;
    let error = assert_not_applied(delivered.ack().await);
    assert!(matches!(error, ClientError::Closed { .. }) && !error.is_retryable(), "{error:?}");
    session.answer(Body::BatchAckAnswer { settled: 1 }).await;
    assert!(acking.await.unwrap().unwrap());
    session.expect_goodbye().await;
}
