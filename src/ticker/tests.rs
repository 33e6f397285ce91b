//! The ticker against a lease and a ring that do as they are told, in paused time.

mod behind;
mod lease;

use std::collections::VecDeque;
use std::iter::repeat_n;

use parking_lot::Mutex;

use super::*;
use crate::core::completions::Completions;
use crate::core::group::GroupName;
use crate::core::lease::Lease;
use crate::core::outbox::{Backlog, Dropped, Opening, Outbox, Settled};
use crate::core::refusal::Reason;
use crate::core::request_batch::RequestBatch;
use crate::core::ring::{ConnectionId, Reply, Ring, RingStatus, Submitted};
use crate::core::tick::{Tick, Wheel};
use crate::core::{BatchId, Delivery};
use crate::ticker::precise_timer::PreciseTimer;

const TICK: Duration = Duration::from_secs(1);
/// How long a step of expiry takes.
const STEP: Duration = Duration::from_millis(2);

/// What happened, with its time since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Tend,
    Advance,
    Expire,
    ListAhead,
    Drain,
    Release,
}

struct Script {
    start: Instant,
    calls: Mutex<Vec<(Call, Duration)>>,
    /// The lease's next answers; the last one is repeated.
    leadership: Mutex<VecDeque<Leadership>>,
    /// How often it refuses before that.
    refusals: Mutex<u32>,
    /// What the next advances say; then they move on time.
    advances: Mutex<VecDeque<Advance>>,
    /// What the next steps of expiry say, each after `STEP`; then there is nothing to do.
    steps: Mutex<VecDeque<PublishStep>>,
    /// After how many steps more nothing is left to be listed ahead.
    unlisted: Mutex<u32>,
    handover: Handover,
    tell: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

impl Script {
    fn new(leadership: impl IntoIterator<Item = Leadership>, handover: Handover) -> Arc<Script> {
        Arc::new(Script {
            start: now(),
            calls: Mutex::default(),
            leadership: Mutex::new(leadership.into_iter().collect()),
            refusals: Mutex::default(),
            advances: Mutex::default(),
            steps: Mutex::default(),
            unlisted: Mutex::default(),
            handover,
            tell: Mutex::default(),
        })
    }

    fn note(&self, call: Call) {
        self.calls.lock().push((call, now() - self.start));
    }

    /// When something was called, in ms.
    fn times(&self, call: Call) -> Vec<u128> {
        let calls = self.calls.lock();
        calls.iter().filter(|(found, _)| *found == call).map(|(_, at)| at.as_millis()).collect()
    }

    fn start(self: &Arc<Self>) -> (TickerHandle, Arc<Metrics>) {
        self.start_at(ReadBarrier::new())
    }

    fn start_at(self: &Arc<Self>, read_barrier: Arc<ReadBarrier>) -> (TickerHandle, Arc<Metrics>) {
        let seat =
            RingParts { ring: Arc::clone(self) as _, outbox: Arc::clone(self) as _, lease: Arc::clone(self) as _ };
        let (clock, metrics) = (Arc::new(Clock::start()), Arc::new(Metrics::new()));
        let (ticker, handle) = Ticker::new(&seat, clock, read_barrier, Arc::clone(&metrics));
        tokio::spawn(ticker.run(PreciseTimer::of_the_runtime()));
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

impl Lease for Script {
    fn maintain(&self, _: Instant) -> Reply<Leadership> {
        self.note(Call::Tend);
        let mut refusals = self.refusals.lock();
        if let Some(left) = refusals.checked_sub(1) {
            *refusals = left;
            return Reply::refused(Refusal::new(Reason::StoreAway, "the store is away"));
        }
        let mut answers = self.leadership.lock();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        Reply::ok(answer.expect("a test says what the lease answers"))
    }

    fn release(&self, _: Instant) -> Reply<()> {
        self.note(Call::Release);
        Reply::ok(())
    }

    fn on_vacancy(&self, tell: Box<dyn Fn() + Send + Sync>) {
        *self.tell.lock() = Some(tell);
    }
}

impl Ring for Script {
    fn wheel(&self) -> Wheel {
        Wheel::default()
    }

    fn submit(&self, _: &mut RequestBatch, _: ConnectionId, _: &Arc<Completions>, _: Instant) -> Submitted {
        unreachable!("a ticker submits nothing")
    }

    fn advance(&self, now: Instant) -> Reply<Advance> {
        self.note(Call::Advance);
        let moved = Advance::Moved { expired: Tick(1), lateness: Duration::ZERO, shifted: 0, next: now + TICK };
        Reply::ok(self.advances.lock().pop_front().unwrap_or(moved))
    }

    fn publish_expired(&self, _: Instant) -> Reply<PublishStep> {
        let Some(step) = self.steps.lock().pop_front() else { return Reply::ok(PublishStep::default()) };
        self.note(Call::Expire);
        Reply::Later(Box::pin(async move {
            tokio::time::sleep(STEP).await;
            Ok(step)
        }))
    }

    fn prelist(&self) -> bool {
        self.note(Call::ListAhead);
        let mut left = self.unlisted.lock();
        *left = left.saturating_sub(1);
        *left > 0
    }

    fn drain(&self, _: Instant) -> Reply<Handover> {
        self.note(Call::Drain);
        Reply::ok(self.handover)
    }

    fn status(&self, _: Instant) -> Reply<RingStatus> {
        unreachable!("a ticker does not ask for the status")
    }
}

impl Outbox for Script {
    fn open_group(&self, _: &GroupName, _: Opening, _: Instant) -> Reply<bool> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn leave_group(&self, _: &GroupName) -> Reply<()> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn delete_group(&self, _: &GroupName) -> Reply<bool> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn take(&self, _: &GroupName, _: u64, _: Instant) -> Reply<Vec<Delivery>> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn take_again(&self, _: &GroupName, _: &[BatchId], _: Instant) -> Reply<Vec<Delivery>> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn settle(&self, _: &GroupName, _: &[BatchId]) -> Reply<Settled> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn release(&self, _: &GroupName, _: &[BatchId]) -> Reply<()> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn maintain(&self, _: &[GroupName], _: Instant) -> Reply<Dropped> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn backlog(&self, _: Instant) -> Reply<Backlog> {
        unreachable!("a ticker leaves the outbox to the ring")
    }

    fn on_news(&self, _: Box<dyn Fn() + Send + Sync>) {}
}

async fn pass(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_never_read_holds_a_move_up_for_half_a_tick_and_once() {
    let script = Script::new([leads(7, None)], Handover::Kept);
    let read_barrier = ReadBarrier::new();
    let _never_passes = read_barrier.join(None);
    let (_handle, _metrics) = script.start_at(read_barrier);
    pass(10_000).await;
    let moves = script.times(Call::Advance);
    assert!(moves.len() >= 6, "{moves:?}");
    // Asked 3 ms ahead, so half a tick after that; each of the four timers may be late by 1 ms. A move that is late
    // by a whole tick would count as a stall.
    assert!(moves.windows(2).all(|pair| pair[1] - pair[0] <= 1_000 + 500 + 4), "{moves:?}");
}

#[tokio::test(start_paused = true)]
async fn connections_that_had_their_time_before_a_move_are_given_no_second_one() {
    let script = Script::new([leads(7, None)], Handover::Kept);
    let first = Advance::Moved {
        expired: Tick(1),
        lateness: Duration::ZERO,
        shifted: 0,
        next: script.start + TICK * 3 / 2,
    };
    // The move is due at 1,500 ms and held up until 1,997. Then so much time goes by that all are asked again.
    let waiting = Advance::Waiting(script.start + TICK * 2 + Duration::from_millis(20));
    script.advances.lock().extend([first, waiting]);
    let read_barrier = ReadBarrier::new();
    let _never_passes = read_barrier.join(None);
    let (_handle, _metrics) = script.start_at(read_barrier);
    pass(2_400).await;
    let moves = script.times(Call::Advance);
    assert!((1_997..2_003).contains(&moves[1]), "{moves:?}");
    assert!((2_020..=2_100).contains(&moves[2]), "{moves:?}");
}

#[tokio::test(start_paused = true)]
async fn what_came_to_others_while_a_connection_was_slow_is_read_before_the_move() {
    let script = Script::new([leads(7, None)], Handover::Kept);
    let read_barrier = ReadBarrier::new();
    let (_handle, _metrics) = script.start_at(Arc::clone(&read_barrier));
    pass(500).await;
    // Without a socket, they are asked in every round.
    let (mut slow, mut quick) = (read_barrier.join(None), read_barrier.join(None));
    slow.asked().await;
    quick.asked().await;
    quick.passed();
    pass(200).await;
    slow.passed();
    slow.asked().await;
    slow.passed();
    quick.asked().await;
    assert_eq!(script.times(Call::Advance).len(), 1, "they are asked once more, and waited for");
    quick.passed();
    // A round that took no time has no second one.
    pass(100).await;
    let moves = script.times(Call::Advance);
    assert!(moves.len() == 2 && (1_197..=1_203).contains(&moves[1]), "{moves:?}");
    assert!(slow.asked().now_or_never().is_none() && quick.asked().now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn tidying_up_leaves_the_processor_to_others_and_the_moves_on_time() {
    let script = Script::new([leads(7, None)], Handover::Kept);
    let published = PublishStep { more: true, ..PublishStep::default() };
    let reclaimed = PublishStep { reclaimed: true, ..published };
    script.steps.lock().extend([published; 3].into_iter().chain(repeat_n(reclaimed, 300)));
    let (_handle, _metrics) = script.start();
    pass(3_900).await;
    let steps = script.times(Call::Expire);
    assert_eq!(steps.len(), 303);
    // What is to be published is published without a pause; then a fifth of the time is used. The runtime's timers are
    // late by up to a millisecond, and the pause that a move would fall into is cut short.
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
async fn what_a_move_will_decide_is_listed_shortly_before_it_until_nothing_is_left() {
    let script = Script::new([leads(7, None)], Handover::Kept);
    let (_handle, _metrics) = script.start();
    *script.unlisted.lock() = 3;
    pass(2_500).await;
    // 100 ms before the connections are asked, which is 3 ms before the move.
    assert_eq!(script.times(Call::ListAhead), [897, 897, 897, 1_897]);
    assert_eq!(script.times(Call::Advance), [0, 1_000, 2_000]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_publishes_what_is_decided_and_tidies_nothing_up() {
    let script = Script::new([leads(7, None)], Handover::HandedOut);
    let (handle, _metrics) = script.start();
    pass(100).await;
    let published = PublishStep { more: true, ..PublishStep::default() };
    let reclaimed = PublishStep { reclaimed: true, ..published };
    script.steps.lock().extend([published, published, reclaimed, reclaimed, reclaimed]);
    assert_eq!(handle.drain().await, Ok(Handover::HandedOut));
    assert_eq!(script.steps.lock().len(), 2, "one step says that nothing else is left");
}

#[tokio::test(start_paused = true)]
async fn a_drain_of_a_shared_ring_gives_the_lease_up_first_and_for_good() {
    for role in [leads(7, Some(TICK * 60)), follows(200)] {
        let script = Script::new([role], Handover::Kept);
        let (handle, _) = script.start();
        pass(1_500).await;
        assert_eq!(handle.drain().await.unwrap(), Handover::Kept);
        assert_eq!((script.times(Call::Drain), script.times(Call::Release)), (vec![1_500], vec![1_500]));
        let before = script.calls.lock().len();
        pass(5_000).await;
        assert_eq!(script.calls.lock().len(), before, "it neither turns the ring nor stands for election");
    }
}

#[tokio::test(start_paused = true)]
async fn where_nobody_else_could_lead_a_drain_keeps_the_ring_turning() {
    let script = Script::new([leads(7, None)], Handover::Kept);
    let (handle, _) = script.start();
    pass(1_500).await;
    handle.drain().await.unwrap();
    pass(1_000).await;
    assert_eq!(script.times(Call::Advance), [0, 1_000, 2_000]);
    assert!(script.times(Call::Release).is_empty());
    assert_eq!(script.times(Call::Tend), [0], "a lease for ever is taken once");
}
