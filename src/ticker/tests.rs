//! Tests of the ticker with a scripted lease and ring, in paused time.

mod behind;
mod handle;
mod lease;

use std::collections::VecDeque;
use std::iter::repeat_n;

use async_trait::async_trait;
use futures_util::FutureExt;

use super::*;
use crate::core::{
    Advance, Backlog, BatchId, Completions, ConnectionId, Delivery, Dropped, GroupName, GroupOptions, Leadership,
    Lease, Message, MessageState, Outbox, PublishStep, RequestBatch, Ring, RingStatus, Settled, Submitted, Wheel,
};

const TICK: Duration = Duration::from_secs(1);
/// The duration of a step of expiry.
const STEP: Duration = Duration::from_millis(2);

/// A call that the ticker makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Maintain,
    Advance,
    Publish,
    Prelist,
    Drain,
    Release,
}

struct Script {
    start: Instant,
    /// All calls so far, each with its time since the start.
    calls: Mutex<Vec<(Call, Duration)>>,
    /// The next answers of the lease. The last answer is repeated without end.
    leadership: Mutex<VecDeque<Leadership>>,
    /// How often the lease refuses before it gives the answers in `leadership`.
    refusals: Mutex<u32>,
    /// The answers to the next advances. After these, each advance moves the pointer on time.
    advances: Mutex<VecDeque<Advance>>,
    /// The answers to the next steps of expiry, each after `STEP`. After these, steps have nothing to do.
    steps: Mutex<VecDeque<PublishStep>>,
    /// The number of prelist steps after which there is nothing left to list.
    unlisted: Mutex<u32>,
    handover: DrainOutcome,
    on_lease_free: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

impl Script {
    fn new(leadership: impl IntoIterator<Item = Leadership>, handover: DrainOutcome) -> Arc<Script> {
        Arc::new(Script {
            start: now(),
            calls: Mutex::default(),
            leadership: Mutex::new(leadership.into_iter().collect()),
            refusals: Mutex::default(),
            advances: Mutex::default(),
            steps: Mutex::default(),
            unlisted: Mutex::default(),
            handover,
            on_lease_free: Mutex::default(),
        })
    }

    fn record(&self, call: Call) {
        self.calls.lock().push((call, now() - self.start));
    }

    /// Returns the times of all calls of this kind, in ms.
    fn times(&self, call: Call) -> Vec<u128> {
        let calls = self.calls.lock();
        calls.iter().filter(|(found, _)| *found == call).map(|(_, at)| at.as_millis()).collect()
    }

    fn start(self: &Arc<Self>) -> (TickerHandle, Arc<Metrics>) {
        self.start_at(ReadBarrier::new())
    }

    fn start_at(self: &Arc<Self>, read_barrier: Arc<ReadBarrier>) -> (TickerHandle, Arc<Metrics>) {
        let parts =
            RingParts { ring: Arc::clone(self) as _, outbox: Arc::clone(self) as _, lease: Arc::clone(self) as _ };
        let (clock, metrics) = (Arc::new(Clock::start()), Arc::new(Metrics::default()));
        let (ticker, handle) = Ticker::new(&parts, clock, read_barrier, Arc::clone(&metrics));
        tokio::spawn(ticker.run(PreciseTimer::from_runtime()));
        (handle, metrics)
    }
}

fn now() -> Instant {
    Clock::start().now()
}

fn leads(epoch: u64, renew_in: Option<Duration>) -> Leadership {
    Leadership::Leads { epoch, renew_at: renew_in.map(|renew_in| now() + renew_in) }
}

fn follows(retry_ms: u64) -> Leadership {
    Leadership::Follows { retry_after: Duration::from_millis(retry_ms) }
}

#[async_trait]
impl Lease for Script {
    async fn maintain(&self, _: Instant) -> Result<Leadership, Refusal> {
        self.record(Call::Maintain);
        let mut refusals = self.refusals.lock();
        if let Some(left) = refusals.checked_sub(1) {
            *refusals = left;
            return Err(Refusal::new(Reason::StoreUnreachable, "the store is away"));
        }
        let mut answers = self.leadership.lock();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        Ok(answer.expect("a test says what the lease answers"))
    }

    async fn release(&self, _: Instant) -> Result<(), Refusal> {
        self.record(Call::Release);
        Ok(())
    }

    fn on_lease_free(&self, tell: Box<dyn Fn() + Send + Sync>) {
        *self.on_lease_free.lock() = Some(tell);
    }
}

#[async_trait]
impl Ring for Script {
    fn wheel(&self) -> Wheel {
        Wheel::default()
    }

    fn submit(&self, _: &mut RequestBatch, _: ConnectionId, _: &Arc<Completions>, _: Instant) -> Submitted {
        unreachable!("a ticker submits nothing")
    }

    async fn get(&self, _: &[Message], _: Instant) -> Result<Vec<MessageState>, Refusal> {
        unreachable!("a ticker reads no message")
    }

    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        self.record(Call::Advance);
        let moved = Advance::Moved { expired: Tick(1), lateness: Duration::ZERO, shifted: 0, next: now + TICK };
        Ok(self.advances.lock().pop_front().unwrap_or(moved))
    }

    async fn publish_expired(&self, _: Instant) -> Result<PublishStep, Refusal> {
        let Some(step) = self.steps.lock().pop_front() else { return Ok(PublishStep::default()) };
        self.record(Call::Publish);
        tokio::time::sleep(STEP).await;
        Ok(step)
    }

    fn prelist(&self) -> bool {
        self.record(Call::Prelist);
        let mut left = self.unlisted.lock();
        *left = left.saturating_sub(1);
        *left > 0
    }

    async fn drain(&self, _: Instant) -> Result<DrainOutcome, Refusal> {
        self.record(Call::Drain);
        Ok(self.handover)
    }

    async fn status(&self, _: Instant) -> Result<RingStatus, Refusal> {
        unreachable!("a ticker does not ask for the status")
    }
}

#[async_trait]
impl Outbox for Script {
    async fn open_group(&self, _: &GroupName, _: GroupOptions, _: Instant) -> Result<bool, Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn leave_group(&self, _: &GroupName) -> Result<(), Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn delete_group(&self, _: &GroupName) -> Result<bool, Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn take(&self, _: &GroupName, _: u64, _: Instant) -> Result<Vec<Delivery>, Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn retake(&self, _: &GroupName, _: &[BatchId], _: Instant) -> Result<Vec<Delivery>, Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn settle(&self, _: &GroupName, _: &[BatchId]) -> Result<Settled, Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn release(&self, _: &GroupName, _: &[BatchId]) -> Result<(), Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn maintain(&self, _: &[GroupName], _: Instant) -> Result<Dropped, Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    async fn backlog(&self, _: Instant) -> Result<Backlog, Refusal> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn on_new_batches(&self, _: Box<dyn Fn() + Send + Sync>) {}
}

async fn sleep(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_never_read_delays_a_move_once_and_by_half_a_tick() {
    let script = Script::new([leads(7, None)], DrainOutcome::Kept);
    let read_barrier = ReadBarrier::new();
    let _never_passes = read_barrier.join(None);
    let (_handle, _metrics) = script.start_at(read_barrier);
    sleep(10_000).await;
    let moves = script.times(Call::Advance);
    assert!(moves.len() >= 6, "{moves:?}");
    // The connections are asked 3 ms before the move, and the barrier then waits half a tick. This wait consists of
    // four timers, and each may be late by 1 ms. A move that is late by a whole tick would count as a stall.
    assert!(moves.windows(2).all(|pair| pair[1] - pair[0] <= 1_000 + 500 + 4), "{moves:?}");
}

#[tokio::test(start_paused = true)]
async fn connections_that_timed_out_before_a_move_delay_it_no_second_time() {
    let script = Script::new([leads(7, None)], DrainOutcome::Kept);
    let first = Advance::Moved {
        expired: Tick(1),
        lateness: Duration::ZERO,
        shifted: 0,
        next: script.start + TICK * 3 / 2,
    };
    // The move is due at 1,500 ms, and the read barrier delays it until 1,997 ms. Then the ring waits so long that
    // the connections are asked again.
    let waiting = Advance::Waiting(script.start + TICK * 2 + Duration::from_millis(20));
    script.advances.lock().extend([first, waiting]);
    let read_barrier = ReadBarrier::new();
    let _never_passes = read_barrier.join(None);
    let (_handle, _metrics) = script.start_at(read_barrier);
    sleep(2_400).await;
    let moves = script.times(Call::Advance);
    assert!((1_997..2_003).contains(&moves[1]), "{moves:?}");
    assert!((2_020..=2_100).contains(&moves[2]), "{moves:?}");
}

#[tokio::test(start_paused = true)]
async fn bytes_that_arrive_while_a_connection_is_slow_are_read_before_the_move() {
    let script = Script::new([leads(7, None)], DrainOutcome::Kept);
    let read_barrier = ReadBarrier::new();
    let (_handle, _metrics) = script.start_at(Arc::clone(&read_barrier));
    sleep(500).await;
    // Connections without a socket are asked in every round.
    let (mut slow, mut quick) = (read_barrier.join(None), read_barrier.join(None));
    slow.read_requested().await;
    quick.read_requested().await;
    quick.confirm_read();
    sleep(200).await;
    slow.confirm_read();
    slow.read_requested().await;
    slow.confirm_read();
    quick.read_requested().await;
    assert_eq!(script.times(Call::Advance).len(), 1, "the move waits until the connections have read once more");
    quick.confirm_read();
    // The second round was quick, so there is no third one.
    sleep(100).await;
    let moves = script.times(Call::Advance);
    assert!(moves.len() == 2 && (1_197..=1_203).contains(&moves[1]), "{moves:?}");
    assert!(slow.read_requested().now_or_never().is_none() && quick.read_requested().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn memory_reclaim_pauses_for_others_and_does_not_delay_moves() {
    let script = Script::new([leads(7, None)], DrainOutcome::Kept);
    let published = PublishStep { more: true, ..PublishStep::default() };
    let reclaimed = PublishStep { reclaimed: true, ..published };
    script.steps.lock().extend([published; 3].into_iter().chain(repeat_n(reclaimed, 300)));
    let (_handle, _metrics) = script.start();
    sleep(3_900).await;
    let steps = script.times(Call::Publish);
    assert_eq!(steps.len(), 303);
    // Batches are published without a pause. After that, reclaiming memory uses a fifth of the time. Timers of the
    // runtime are late by up to a millisecond. A pause is cut short if a move is due during it.
    assert!(steps[..4].windows(2).all(|pair| (2..=3).contains(&(pair[1] - pair[0]))), "{steps:?}");
    let paused = steps[3..].windows(2).filter(|pair| (10..=12).contains(&(pair[1] - pair[0]))).count();
    assert!(paused >= 299 - 3 * 3, "{paused} of {steps:?}");
    let moves = script.times(Call::Advance);
    assert!(
        moves.len() == 4 && moves.iter().zip([0, 1_000, 2_000, 3_000]).all(|(at, due)| at - due <= 3),
        "{moves:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_closing_tick_is_listed_shortly_before_its_expiry_until_nothing_is_left() {
    let script = Script::new([leads(7, None)], DrainOutcome::Kept);
    let (_handle, _metrics) = script.start();
    *script.unlisted.lock() = 3;
    sleep(2_500).await;
    // Prelisting begins 100 ms before the connections are asked, and they are asked 3 ms before the move.
    assert_eq!(script.times(Call::Prelist), [897, 897, 897, 1_897]);
    assert_eq!(script.times(Call::Advance), [0, 1_000, 2_000]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_publishes_expired_messages_and_reclaims_no_memory() {
    let script = Script::new([leads(7, None)], DrainOutcome::Published);
    let (handle, _metrics) = script.start();
    sleep(100).await;
    let published = PublishStep { more: true, ..PublishStep::default() };
    let reclaimed = PublishStep { reclaimed: true, ..published };
    script.steps.lock().extend([published, published, reclaimed, reclaimed, reclaimed]);
    assert_eq!(handle.drain().await, Ok(DrainOutcome::Published));
    assert_eq!(script.steps.lock().len(), 2, "the first step that reclaims memory ends the drain");
}

#[tokio::test(start_paused = true)]
async fn a_drain_of_a_shared_ring_releases_the_lease_for_good() {
    for role in [leads(7, Some(TICK * 60)), follows(200)] {
        let script = Script::new([role], DrainOutcome::Kept);
        let (handle, _) = script.start();
        sleep(1_500).await;
        assert_eq!(handle.drain().await.unwrap(), DrainOutcome::Kept);
        assert_eq!((script.times(Call::Drain), script.times(Call::Release)), (vec![1_500], vec![1_500]));
        let before = script.calls.lock().len();
        sleep(5_000).await;
        assert_eq!(script.calls.lock().len(), before, "a ticker that has resigned calls nothing");
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_of_a_sole_leader_keeps_the_ring_turning() {
    let script = Script::new([leads(7, None)], DrainOutcome::Kept);
    let (handle, _) = script.start();
    sleep(1_500).await;
    handle.drain().await.unwrap();
    sleep(1_000).await;
    assert_eq!(script.times(Call::Advance), [0, 1_000, 2_000]);
    assert!(script.times(Call::Release).is_empty());
    assert_eq!(script.times(Call::Maintain), [0], "a lease without end is maintained once");
}
