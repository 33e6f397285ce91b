//! The ring against a naive model: random sequences of operations, every answer and every batch compared.
//!
//! The model keeps one map and recomputes everything from it at each step. It knows nothing of slots, lists
//! or places, and reads time in whole milliseconds.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ackwheel::core::{
    AddOutcome, Advance, DelOutcome, GroupName, Message, MessageState, Outbox, Ring, StormRule, Tick, TickCounts,
    TimedOut, TimeoutBatch, Wheel,
};
use ackwheel::memory::{MemoryOptions, MemoryOutbox, MemoryRing};
use futures_util::FutureExt;
use proptest::prelude::*;

use crate::support::single_request::{AddNewMsg, DelMsg, SingleRequest};

const TICK_MS: u64 = 1_000;
const FIRST_TICK: u64 = 100;

/// One step of a sequence.
#[derive(Clone, Debug)]
enum Step {
    Add {
        messages: Vec<Message>,
        ack_timeout_ticks: u16,
        attempt: u8,
    },
    Del {
        messages: Vec<Message>,
        withdraw: bool,
    },
    /// Time passes without anyone turning the ring: up to five ticks, so that there are stalls too.
    Pass {
        ms: u64,
    },
    /// The ticker lists ahead of the next decision.
    ListAhead,
    /// The ticker looks once.
    Advance,
    /// The ticker does what is due, then one more step of expiry.
    Expire,
}

/// The state of a message.
#[derive(Clone, Copy, Debug)]
struct Life {
    deadline: u64,
    attempt: u8,
}

/// The wheel as DESIGN tells it, without a thought for cost.
struct Model {
    start: Instant,
    slots: u64,
    now_ms: u64,
    pointer: u64,
    next_advance_ms: u64,
    /// Ticks missed since the last move.
    shifted: u64,
    in_flight: BTreeMap<Message, Life>,
    late: BTreeMap<Message, u64>,
    acked: BTreeMap<u64, u64>,
    /// Tick → what timed out, and how many were acknowledged.
    decided: BTreeMap<u64, (BTreeSet<TimedOut>, u64)>,
}

impl Model {
    fn new(slots: u16, start: Instant) -> Model {
        Model {
            start,
            slots: u64::from(slots),
            now_ms: 0,
            pointer: FIRST_TICK,
            next_advance_ms: TICK_MS,
            shifted: 0,
            in_flight: BTreeMap::new(),
            late: BTreeMap::new(),
            acked: BTreeMap::new(),
            decided: BTreeMap::new(),
        }
    }

    fn next_advance(&self) -> Instant {
        self.start + Duration::from_millis(self.next_advance_ms)
    }

    /// How late the pointer is, in ms; `None` before its time.
    fn lateness(&self) -> Option<u64> {
        self.now_ms.checked_sub(self.next_advance_ms)
    }

    /// The tick at which the wheel should stand by the clock: a lagging pointer is one behind it, and ticks
    /// missed in a stall are not made up.
    fn tick_due(&self) -> u64 {
        self.pointer + u64::from(self.lateness().is_some_and(|lateness| lateness < TICK_MS))
    }

    fn add(&mut self, message: Message, ack_timeout_ticks: u16, attempt: u8) -> AddOutcome {
        let deadline = self.tick_due() + u64::from(ack_timeout_ticks);
        self.late.remove(&message);
        match self.in_flight.insert(message, Life { deadline, attempt }) {
            Some(_) => AddOutcome::Rearmed,
            None => AddOutcome::Added,
        }
    }

    fn del(&mut self, message: Message, withdraw: bool) -> DelOutcome {
        if let Some(life) = self.in_flight.remove(&message) {
            if withdraw {
                return DelOutcome::Withdrawn;
            }
            *self.acked.entry(life.deadline).or_default() += 1;
            return DelOutcome::Acked;
        }
        match self.late.get(&message) {
            Some(deadline) if self.pointer - (deadline + 1) < self.slots => DelOutcome::Late,
            _ => DelOutcome::Unknown,
        }
    }

    fn get(&self, message: Message) -> MessageState {
        if let Some(Life { deadline, attempt }) = self.in_flight.get(&message) {
            let ends_ms = self.next_advance_ms + (deadline - self.pointer) * TICK_MS;
            let remaining_ms = u32::try_from(ends_ms.saturating_sub(self.now_ms)).unwrap();
            return MessageState::InFlight { deadline: Tick(*deadline), remaining_ms, attempt: *attempt };
        }
        match self.late.get(&message) {
            Some(deadline) if self.pointer - (deadline + 1) < self.slots => MessageState::Late,
            _ => MessageState::Unknown,
        }
    }

    fn advance(&mut self) -> Advance {
        let decided = self.pointer;
        match self.lateness() {
            None => return Advance::Waiting(self.next_advance()),
            Some(lateness) if lateness >= TICK_MS => {
                self.next_advance_ms = self.now_ms + TICK_MS;
                self.shifted += lateness / TICK_MS;
                return Advance::Waiting(self.next_advance());
            }
            Some(_) => {}
        }
        let lateness = Duration::from_millis(self.now_ms - self.next_advance_ms);
        self.pointer += 1;
        self.next_advance_ms += TICK_MS;
        let expired: Vec<_> = self.in_flight.iter().filter(|(_, life)| life.deadline == decided).collect();
        let timed_out: BTreeSet<TimedOut> = expired
            .into_iter()
            .map(|(message, life)| TimedOut { message: *message, attempt: life.attempt })
            .collect();
        for timed_out in &timed_out {
            self.in_flight.remove(&timed_out.message);
            self.late.insert(timed_out.message, decided);
        }
        let acked = self.acked.remove(&decided).unwrap_or_default();
        self.decided.insert(decided, (timed_out, acked));
        let shifted = std::mem::take(&mut self.shifted);
        Advance::Moved { expired: Tick(decided), lateness, shifted, next: self.next_advance() }
    }
}

/// The ring under test, with the same clock as the model.
struct Subject {
    /// The counts of each tick, as published.
    counted: RefCell<Vec<(Tick, TickCounts)>>,
    start: Instant,
    ring: MemoryRing,
    outbox: Arc<MemoryOutbox>,
}

impl Subject {
    fn new(slots: u16) -> Subject {
        let start = Instant::now();
        let wheel = Wheel::new(slots, Duration::from_millis(TICK_MS)).unwrap();
        let outbox = Arc::new(MemoryOutbox::new(ackwheel::core::Retention::default(), start));
        let options = MemoryOptions {
            wheel,
            storm: StormRule { min: 4, share: 0.5 },
            retention: ackwheel::core::Retention::default(),
            max_in_flight: 1_000,
            threads: 2,
        };
        Subject {
            counted: RefCell::default(),
            start,
            ring: MemoryRing::new(options, (1, Tick(FIRST_TICK)), Arc::clone(&outbox), start),
            outbox,
        }
    }

    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_millis(ms)
    }

    /// Does one step of expiry; whether there is more to do.
    fn publish_expired(&self, now: Instant) -> bool {
        let expired = self.ring.publish_expired(now).now_or_never().unwrap().unwrap();
        self.counted.borrow_mut().extend(expired.counted);
        expired.more
    }

    fn taken(&self, now: Instant) -> Vec<Arc<TimeoutBatch>> {
        let group = GroupName::default_group();
        let taken = self.outbox.take(&group, u64::MAX, now);
        let deliveries = taken.now_or_never().unwrap().unwrap();
        deliveries.into_iter().map(|delivery| delivery.batch).collect()
    }
}

/// Runs a sequence on both and compares.
fn run(slots: u16, steps: &[Step]) {
    let subject = Subject::new(slots);
    let mut model = Model::new(slots, subject.start);
    for step in steps {
        let now = subject.at(model.now_ms);
        match step {
            Step::Add { messages, ack_timeout_ticks, attempt } => {
                let ack_timeout_ticks = (*ack_timeout_ticks - 1) % slots + 1;
                let request = AddNewMsg { messages, ack_timeout_ticks, attempt: *attempt };
                let answer = subject.ring.add_new_msg(request, now).now_or_never().unwrap().unwrap();
                let expected: Vec<_> =
                    messages.iter().map(|message| model.add(*message, ack_timeout_ticks, *attempt)).collect();
                assert_eq!(answer.outcomes, expected, "{step:?}");
                assert_eq!(answer.deadline.0, model.tick_due() + u64::from(ack_timeout_ticks), "{step:?}");
            }
            Step::Del { messages, withdraw } => {
                let request = DelMsg { messages, withdraw: *withdraw };
                let answer = subject.ring.del_msg(request, now).now_or_never().unwrap().unwrap();
                let expected: Vec<_> = messages.iter().map(|message| model.del(*message, *withdraw)).collect();
                assert_eq!(answer.outcomes, expected, "{step:?}");
            }
            Step::Pass { ms } => model.now_ms += ms,
            Step::ListAhead => {
                subject.ring.prelist();
            }
            Step::Advance => {
                let found = subject.ring.advance(now).now_or_never().unwrap().unwrap();
                assert_eq!(found, model.advance());
            }
            Step::Expire => {
                subject.publish_expired(now);
            }
        }
        let asked = [0, 1, 2].map(Message::from);
        let states = subject.ring.get(&asked, subject.at(model.now_ms)).now_or_never().unwrap().unwrap();
        assert_eq!(states, asked.map(|message| model.get(message)), "after {step:?}");
    }
    finish(&mut model, &subject);
}

/// Lets everything come to its end, then compares every batch of every tick.
fn finish(model: &mut Model, subject: &Subject) {
    while !model.in_flight.is_empty()
        || model.late.values().any(|deadline| deadline + 1 + model.slots > model.pointer)
    {
        model.now_ms = model.now_ms.max(model.next_advance_ms);
        let now = subject.at(model.now_ms);
        subject.ring.advance(now).now_or_never().unwrap().unwrap();
        model.advance();
    }
    let now = subject.at(model.now_ms);
    while subject.publish_expired(now) {}
    let counted = subject.counted.borrow();
    let told = counted.iter().map(|(tick, counts)| (tick.0, (counts.acked, counts.timed_out())));
    let decided = model.decided.iter().map(|(tick, (timed_out, acked))| (*tick, (*acked, timed_out.len() as u64)));
    assert!(told.eq(decided), "every decided tick is counted once, in order: {counted:?}");

    let mut found: BTreeMap<u64, Vec<Arc<TimeoutBatch>>> = BTreeMap::new();
    for batch in subject.taken(now) {
        found.entry(batch.id.tick.0).or_default().push(batch);
    }
    for (tick, (timed_out, acked)) in &model.decided {
        let batches = found.remove(tick).unwrap_or_default();
        let listed: Vec<TimedOut> = batches.iter().flat_map(|batch| batch.messages.iter().copied()).collect();
        assert_eq!(listed.len(), timed_out.len(), "tick {tick}: {listed:?} and {timed_out:?}");
        assert_eq!(&listed.into_iter().collect::<BTreeSet<_>>(), timed_out, "tick {tick}");
        for (seq, batch) in (0..).zip(&batches) {
            assert_eq!((batch.id.seq, batch.last), (seq, seq as usize + 1 == batches.len()));
            assert_eq!((batch.counts.acked, batch.counts.timed_out()), (*acked, timed_out.len() as u64));
            let storm = timed_out.len() >= 4 && timed_out.len() as u64 >= *acked;
            assert_eq!(batch.counts.storm, storm, "tick {tick}");
        }
    }
    assert!(found.is_empty(), "batches of ticks that were never decided: {found:?}");
    let status = subject.ring.status(now).now_or_never().unwrap().unwrap();
    assert_eq!((status.in_flight, status.slots.iter().sum::<u64>(), status.closing), (0, 0, 0));
}

fn message() -> impl Strategy<Value = Message> {
    (0..10_u64, 0..2_u64).prop_map(Message::from)
}

fn step() -> impl Strategy<Value = Step> {
    let messages = || prop::collection::vec(message(), 1..6);
    prop_oneof![
        4 => (messages(), 1..=6_u16, 1..3_u8).prop_map(|(messages, ack_timeout_ticks, attempt)| Step::Add {
            messages,
            ack_timeout_ticks,
            attempt
        }),
        3 => (messages(), prop::bool::weighted(0.2))
            .prop_map(|(messages, withdraw)| Step::Del { messages, withdraw }),
        4 => prop_oneof![9 => 1..1_100_u64, 1 => 1_900..5_000_u64].prop_map(|ms| Step::Pass { ms }),
        3 => Just(Step::ListAhead),
        4 => Just(Step::Advance),
        3 => Just(Step::Expire),
    ]
}

/// 10,000 sequences in release, as the issue asks; a debug build is slower and runs fewer.
fn cases() -> u32 {
    let default = if cfg!(debug_assertions) { 1_000 } else { 10_000 };
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(default)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ring_answers_as_the_model(slots in 1..=5_u16, steps in prop::collection::vec(step(), 1..80)) {
        run(slots, &steps);
    }
}
