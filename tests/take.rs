//! Batches by request, on two sidecars that share a Redis: connections that end, kept batches, and acknowledgements
//! over another sidecar.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ackwheel::clock::Clock;
use ackwheel::core::{BatchId, CLOCK_BEAT, CombinedOutbox, GroupName, Leadership, Reason, Refusal, Store, Wheel};
use ackwheel::delivery::{Delivery, Subscription};
use ackwheel::redis::{RedisOptions, RedisStore};

use crate::redis_losses::publish;
use crate::support::PATIENCE;
use crate::support::frozen_redis::{self, FrozenRedis};

/// Longer than any test.
const NEVER: Duration = Duration::from_secs(3_600);

/// How long a request may wait for a Redis that does not answer.
const ABOUT_A_SECOND: Duration = Duration::from_millis(1_500);

/// Two sidecars on a Redis. The first one leads.
struct Pair {
    time: FrozenRedis,
    stores: [RedisStore; 2],
    deliveries: [Arc<Delivery>; 2],
    group: GroupName,
}

impl Pair {
    async fn start(redeliver_after: Duration, batches: u32) -> Pair {
        let time = FrozenRedis::start();
        let wheel = Wheel::new(5, Duration::from_secs(1)).unwrap();
        let options = |name| RedisOptions { name: String::from(name), ..time.options(wheel) };
        let stores = [frozen_redis::open(&options("a")).await, frozen_redis::open(&options("b")).await];
        let leads = stores[0].rings()[0].lease.maintain(time.now()).await.unwrap();
        assert!(matches!(leads, Leadership::Leads { .. }), "{leads:?}");
        let clock = Arc::new(Clock::start());
        let deliveries = [&stores[0], &stores[1]].map(|store| {
            let outbox = CombinedOutbox::of(store.rings());
            Delivery::new(outbox, Arc::clone(&clock), Arc::default(), redeliver_after)
        });
        tokio::spawn(async move {
            loop {
                clock.beat();
                tokio::time::sleep(CLOCK_BEAT).await;
            }
        });
        let mut pair = Pair { time, stores, deliveries, group: "workers".parse().unwrap() };
        for _ in 0..batches {
            publish(&pair.stores[0].rings()[0], &mut pair.time, 1).await;
        }
        pair
    }

    /// Joins the group on a sidecar, and takes all that it has.
    async fn take(&self, sidecar: usize, batches: u32) -> (Subscription, Vec<BatchId>) {
        let mut member = self.deliveries[sidecar].join_for_requests(&self.group).await.unwrap();
        let taken = request(&mut member, batches).await.unwrap();
        (member, taken)
    }
}

/// Requests batches once, and returns those that arrived.
async fn request(member: &mut Subscription, batches: u32) -> Result<Vec<BatchId>, Refusal> {
    member.request(batches).await?;
    Ok(std::iter::from_fn(|| member.try_next()).map(|delivery| delivery.batch.id).collect())
}

/// Requests batches until so many have arrived.
async fn request_until(member: &mut Subscription, batches: usize) -> Vec<BatchId> {
    let (mut taken, begun) = (Vec::new(), Instant::now());
    while taken.len() < batches {
        assert!(begun.elapsed() < PATIENCE, "only {} of {batches} batches arrived", taken.len());
        taken.extend(request(member, 16).await.unwrap());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    taken.sort_unstable();
    taken
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_ended_connection_held_goes_to_another_sidecar_at_once_unless_it_is_kept() {
    let pair = Pair::start(NEVER, 70).await;
    let idle = pair.deliveries[0].join_for_requests(&pair.group).await.unwrap();
    let (ended, taken) = pair.take(0, 70).await;
    assert_eq!(taken.len(), 70);
    let (mut other, none) = pair.take(1, 1).await;
    assert_eq!(none, []);
    ended.keep(vec![taken[0]]);
    drop(ended);
    // The other member on the first sidecar requests nothing. It must not hold up any of the 69 batches.
    assert_eq!(request_until(&mut other, 69).await, taken[1..]);
    assert_eq!(request(&mut other, 1).await.unwrap(), []);
    drop(idle);
    assert_eq!(request(&mut other, 1).await.unwrap(), []);
    // A deletion through the other sidecar is refused while the group lingers on the first.
    drop(other);
    let [a, b] = &pair.deliveries;
    assert_eq!(b.delete_group(&pair.group).await.unwrap_err().reason, Reason::GroupInUse);
    assert_eq!(a.ack(&pair.group, taken[1..3].to_vec()).await, Ok(2));
    a.wait_until_groups_left(PATIENCE).await;
    // Now no sidecar has a task of the group.
    assert_eq!(b.ack(&pair.group, taken[..3].to_vec()).await, Ok(1), "the end released the kept batch");
    let unknown = "unknown".parse().unwrap();
    assert_eq!(b.ack(&unknown, taken[..3].to_vec()).await.unwrap_err().reason, Reason::UnknownGroup);
    b.delete_group(&pair.group).await.unwrap();
    assert_eq!(b.ack(&pair.group, taken.clone()).await.unwrap_err().reason, Reason::UnknownGroup);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_batch_goes_to_another_sidecar_once_it_is_overdue_or_nacked() {
    let redeliver_after = Duration::from_secs(1);
    let pair = Pair::start(redeliver_after, 2).await;
    let (ended, taken) = pair.take(0, 2).await;
    let begun = Instant::now();
    ended.keep(taken.clone());
    drop(ended);
    let (mut other, none) = pair.take(1, 1).await;
    assert_eq!(none, []);
    let [a, b] = &pair.deliveries;
    assert_eq!(b.nack(&pair.group, vec![taken[1]], NEVER).await, 0, "the other sidecar holds it");
    assert_eq!(a.nack(&pair.group, vec![taken[1]], NEVER).await, 1);
    assert_eq!(request(&mut other, 1).await.unwrap(), [taken[1]], "no delay, because no connection held it");
    assert_eq!(b.ack(&pair.group, vec![taken[1]]).await, Ok(1));
    assert_eq!(request_until(&mut other, 1).await, [taken[0]]);
    assert!(begun.elapsed() >= redeliver_after, "{:?}", begun.elapsed());
    assert_eq!(b.ack(&pair.group, taken).await, Ok(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_refused_soon_while_redis_does_not_answer_and_gets_its_batches_afterwards() {
    let pair = Pair::start(NEVER, 2).await;
    let (mut member, first) = pair.take(0, 1).await;
    assert_eq!(first.len(), 1, "the other batch was not requested");
    pair.time.redis.stop();
    for _ in 0..2 {
        let begun = Instant::now();
        let refusal = request(&mut member, 1).await.unwrap_err();
        assert!([Reason::StoreTimeout, Reason::StoreUnreachable].contains(&refusal.reason), "{refusal}");
        assert!(begun.elapsed() < ABOUT_A_SECOND, "refused after {:?}", begun.elapsed());
    }
    let begun = Instant::now();
    let new = "new".parse().unwrap();
    pair.deliveries[0].join_for_requests(&new).await.err().expect("the group cannot be opened");
    assert!(begun.elapsed() < ABOUT_A_SECOND, "refused after {:?}", begun.elapsed());
    // A lingering group is joined without Redis.
    drop(member);
    let begun = Instant::now();
    let mut member = pair.deliveries[0].join_for_requests(&pair.group).await.unwrap();
    request(&mut member, 1).await.unwrap_err();
    assert!(begun.elapsed() < ABOUT_A_SECOND, "refused after {:?}", begun.elapsed());
    pair.time.redis.go_on();
    let begun = Instant::now();
    let mut taken = Vec::new();
    while taken.len() < 2 {
        assert!(begun.elapsed() < PATIENCE, "only {taken:?} arrived");
        taken.extend(request(&mut member, 2).await.unwrap_or_default());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(taken.contains(&first[0]), "the connection that held it has ended: {taken:?}");
}
