//! Groups share a thread with other tasks: the work between two turns of another task on a runtime of one thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ackwheel::clock::Clock;
use ackwheel::core::{
    BatchId, GroupName, GroupOptions, Message, Outbox, Retention, Tick, TickCounts, TimedOut, TimeoutBatch,
};
use ackwheel::delivery::Delivery;
use ackwheel::memory::MemoryOutbox;
use ackwheel::metrics::Metrics;
use futures_util::future::join_all;

/// Delivers from an outbox with so many batches of a message each.
fn delivery(batches: u64) -> (Arc<Delivery>, Arc<MemoryOutbox>, Arc<Metrics>) {
    let outbox = Arc::new(MemoryOutbox::new(Retention::default(), Instant::now()));
    for tick in 0..batches {
        let id = BatchId { tick: Tick(tick), epoch: 1, ring: 0, seq: 0 };
        let counts = TickCounts { added: 1, acked: 0, storm: false, drained: false };
        let message = TimedOut { message: Message::from(tick), attempt: 1 };
        outbox.publish(Arc::new(TimeoutBatch { id, counts, last: true, messages: vec![message] }), Instant::now());
    }
    let metrics = Arc::new(Metrics::default());
    let redeliver_after = Duration::from_secs(3_600);
    let delivery =
        Delivery::new(Arc::clone(&outbox) as _, Arc::new(Clock::start()), Arc::clone(&metrics), redeliver_after);
    (delivery, outbox, metrics)
}

/// Has others have their turns until `so_far` is `end`; returns the most that it grew by between two turns of ours.
async fn longest_step(end: u64, mut so_far: impl AsyncFnMut() -> u64) -> u64 {
    let (mut last, mut longest) = (so_far().await, 0);
    while last < end {
        tokio::task::yield_now().await;
        let now = so_far().await;
        longest = longest.max(now - last);
        last = now;
    }
    longest
}

#[tokio::test]
async fn a_long_backlog_is_delivered_and_returned_in_turn_with_other_tasks() {
    const BATCHES: u64 = 20_000;
    let (delivery, outbox, metrics) = delivery(BATCHES);
    let default = Some(GroupName::default_group());
    let subscription = delivery.subscribe(default, u64::MAX, GroupOptions::default()).await.unwrap();
    let step = longest_step(BATCHES, async || metrics.batches_delivered.get()).await;
    assert!(step <= 1_000, "{step} at once");
    drop(subscription);
    let waiting = async || BATCHES - outbox.backlog(Instant::now()).await.unwrap().groups[0].unacked;
    let step = longest_step(BATCHES, waiting).await;
    assert!(step <= 5_000, "{step} at once");
}

#[tokio::test]
async fn endless_requests_to_a_group_leave_time_for_other_tasks() {
    let (delivery, _outbox, _metrics) = delivery(0);
    let group = Some(GroupName::default_group());
    let subscription = delivery.subscribe(group, u64::MAX, GroupOptions::default()).await.unwrap();
    let unknown = BatchId { tick: Tick(1), epoch: 1, ring: 0, seq: 0 };
    let answered = Arc::new(AtomicU64::new(0));
    let asked = (0..1_000).map(|_| {
        let (answer, answered) = (subscription.nack(unknown, Duration::ZERO), Arc::clone(&answered));
        tokio::spawn(async move {
            assert!(!answer.await);
            answered.fetch_add(1, Ordering::Relaxed);
        })
    });
    let asked = join_all(asked.collect::<Vec<_>>());
    let step = longest_step(1_000, async || answered.load(Ordering::Relaxed)).await;
    assert!(step <= 20, "{step} at once");
    asked.await;
}
