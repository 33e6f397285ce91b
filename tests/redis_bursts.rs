//! Requests of one read reach Redis in one script, and are answered as if each had come alone.

use std::collections::HashSet;
use std::future::poll_fn;
use std::sync::Arc;

use ackwheel::core::{
    Completions, ConnectionId, Leadership, Message, Operation, Outcome, Reason, RequestBatch, Ring, Store,
    Submitted, Wheel,
};
use ackwheel::redis::{RedisOptions, RedisStore};
use proptest::prelude::*;
use proptest::test_runner::{Config as ProptestConfig, TestRunner};
use tokio::runtime::Runtime;

use crate::support::frozen_redis::{self, FrozenRedis};

use Outcome::{Acked, Added, Rearmed, Unknown, Withdrawn};

const ADD: Operation = Operation::Add { ack_timeout_ticks: 5, attempt: 1 };
const DEL: Operation = Operation::Del { withdraw: false };
const WITHDRAW: Operation = Operation::Del { withdraw: true };

/// The outcome of a request; none if it was refused for the limit.
type Ended = Option<Vec<Outcome>>;

/// A ring in a Redis of its own whose time is stopped.
struct Subject {
    time: FrozenRedis,
    /// The ring lives as long as its store.
    _store: RedisStore,
    ring: Arc<dyn Ring>,
}

impl Subject {
    async fn open(max_in_flight: u64) -> Subject {
        let time = FrozenRedis::start();
        let wheel = Wheel::new(5, std::time::Duration::from_secs(1)).unwrap();
        let store = frozen_redis::open(&RedisOptions { max_in_flight, ..time.options(wheel) }).await;
        let leads = store.rings()[0].lease.maintain(time.now()).await.unwrap();
        assert!(matches!(leads, Leadership::Leads { .. }), "{leads:?}");
        let ring = Arc::clone(&store.rings()[0].ring);
        Subject { time, _store: store, ring }
    }

    /// Submits all of it at once, and waits until all is complete.
    async fn ask(&self, requests: &[(Operation, Vec<Message>)]) -> Vec<Ended> {
        let (mut batch, completions) = (RequestBatch::default(), Arc::new(Completions::default()));
        for (id, (operation, messages)) in (0..).zip(requests) {
            batch.push(id, *operation, messages.iter().copied());
        }
        let submitted = self.ring.submit(&mut batch, ConnectionId::default(), &completions, self.time.now());
        assert_eq!(submitted, Submitted::Pending);
        let mut ended: Vec<Option<Ended>> = vec![None; requests.len()];
        while ended.iter().any(Option::is_none) {
            let mut answered = RequestBatch::default();
            poll_fn(|context| completions.poll(context, &mut answered)).await;
            for request in &answered.requests {
                let outcomes = answered.outcomes()[request.range()].to_vec();
                let refusal = request.refusal.as_ref().map(|refusal| refusal.reason);
                assert!(matches!(refusal, None | Some(Reason::MaxInFlight)), "{refusal:?}");
                let place = &mut ended[usize::try_from(request.id).unwrap()];
                assert_eq!(*place, None, "a request is answered once");
                *place = Some(if refusal.is_none() { Some(outcomes) } else { None });
            }
        }
        ended.into_iter().flatten().collect()
    }

    async fn in_flight(&self) -> (u64, u64) {
        let status = self.ring.status(self.time.now()).await.unwrap();
        (status.in_flight, status.slots.iter().sum())
    }
}

/// Outcomes with how often each comes in a row, so that a thousand are read at a glance.
fn runs(ended: &[Ended]) -> Vec<Option<Vec<(Outcome, usize)>>> {
    let run = |same: &[Outcome]| (same[0], same.len());
    let runs_of = |outcomes: &Vec<Outcome>| outcomes.chunk_by(PartialEq::eq).map(run).collect();
    ended.iter().map(|outcomes| outcomes.as_ref().map(runs_of)).collect()
}

fn ids(ids: impl IntoIterator<Item = u64>) -> Vec<Message> {
    ids.into_iter().map(Message::from).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_frame_of_a_burst_is_held_against_the_limit_in_its_turn() {
    let subject = Subject::open(10).await;
    assert_eq!(subject.ask(&[(DEL, Vec::new())]).await, [Some(Vec::new())], "what asks for nothing is answered");
    let added = subject.ask(&[(ADD, ids(1..=8))]).await;
    assert_eq!(added, [Some(vec![Added; 8])]);
    let requests = [
        (ADD, ids(11..=13)),
        (DEL, ids([1, 11])),
        (ADD, ids(11..=13)),
        (ADD, ids([11, 11, 2])),
        (ADD, ids([14])),
        (WITHDRAW, ids([12])),
        (ADD, ids([14, 14])),
        (DEL, ids([14, 14])),
    ];
    let expected = [
        None,
        Some(vec![Acked, Unknown]),
        Some(vec![Added; 3]),
        Some(vec![Rearmed; 3]),
        None,
        Some(vec![Withdrawn]),
        Some(vec![Added, Rearmed]),
        Some(vec![Acked, Unknown]),
    ];
    assert_eq!(subject.ask(&requests).await, expected);
    assert_eq!(subject.in_flight().await, (9, 9));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_of_several_scripts_is_refused_whole_and_what_follows_is_not() {
    let subject = Subject::open(1_500).await;
    let requests = [
        (ADD, ids(1..=700)),
        (ADD, ids(1_001..=3_500)),
        (DEL, ids(1_001..=3_500)),
        (ADD, ids(701..=1_500)),
        (ADD, ids([1_501])),
        (DEL, ids(1..=1_500)),
        (ADD, ids(5_001..=6_500)),
    ];
    let expected = [
        Some(vec![Added; 700]),
        None,
        Some(vec![Unknown; 2_500]),
        Some(vec![Added; 800]),
        None,
        Some(vec![Acked; 1_500]),
        Some(vec![Added; 1_500]),
    ];
    assert_eq!(runs(&subject.ask(&requests).await), runs(&expected));
    assert_eq!(subject.in_flight().await, (1_500, 1_500));
}

/// The limit of the ring in the comparison below, near which it mostly is.
const LIMIT: usize = 9;

/// The ring as a set: what its time standing still makes of it.
#[derive(Default)]
struct Model(HashSet<Message>);

impl Model {
    fn ask(&mut self, operation: Operation, messages: &[Message]) -> Ended {
        let fresh: HashSet<&Message> = messages.iter().filter(|message| !self.0.contains(message)).collect();
        if matches!(operation, Operation::Add { .. }) && self.0.len() + fresh.len() > LIMIT {
            return None;
        }
        let outcome = |message: &Message| match operation {
            Operation::Add { .. } if self.0.insert(*message) => Added,
            Operation::Add { .. } => Rearmed,
            Operation::Del { withdraw } if self.0.remove(message) => {
                if withdraw {
                    Withdrawn
                } else {
                    Acked
                }
            }
            Operation::Del { .. } => Unknown,
        };
        Some(messages.iter().map(outcome).collect())
    }
}

fn request() -> impl Strategy<Value = (Operation, Vec<Message>)> {
    let message = (0..8_u64, 0..2_u64).prop_map(Message::from);
    let operation = prop_oneof![
        3 => (1..=5_u16, 1..3_u8)
            .prop_map(|(ack_timeout_ticks, attempt)| Operation::Add { ack_timeout_ticks, attempt }),
        2 => prop::bool::weighted(0.3).prop_map(|withdraw| Operation::Del { withdraw }),
    ];
    (operation, prop::collection::vec(message, 1..5))
}

#[test]
fn repeats_in_a_request_batch_are_answered_as_if_each_request_had_come_alone() {
    let runtime = Runtime::new().unwrap();
    let subject = runtime.block_on(Subject::open(LIMIT as u64));
    let config = ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() };
    let bursts = prop::collection::vec(prop::collection::vec(request(), 1..40), 1..4);
    let ran = TestRunner::new(config).run(&bursts, |bursts| {
        let mut model = Model::default();
        runtime.block_on(async {
            for batch in &bursts {
                let expected: Vec<Ended> =
                    batch.iter().map(|(operation, messages)| model.ask(*operation, messages)).collect();
                assert_eq!(subject.ask(batch).await, expected);
                assert_eq!(subject.in_flight().await, (model.0.len() as u64, model.0.len() as u64));
            }
            // The next case begins with an empty ring.
            subject.ask(&[(WITHDRAW, model.0.into_iter().collect())]).await;
        });
        Ok(())
    });
    if let Err(error) = ran {
        panic!("{error}");
    }
}
