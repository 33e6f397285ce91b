//! The ring in Redis against a naive model: several stores on one ring, their operations interleaved, with lost
//! answers and changes of the leader between any two of them.
//!
//! Redis is a real server whose clock the test moves, and each store reaches it through a proxy that loses an
//! answer when it is told to.

mod model;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ackwheel::core::{
    Advance, Delivery, GroupName, Leadership, Message, Promise, Reason, RingParts, Store, Wheel,
};
use ackwheel::redis::{RedisOptions, RedisStore};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use self::model::Model;
use crate::support::frozen_redis::{self, FrozenRedis};
use crate::support::proxy::Proxy;
use crate::support::single_request::{AddNewMsg, DelMsg, SingleRequest};

const TICK_MS: u64 = 1_000;
const TICK: Duration = Duration::from_millis(TICK_MS);
const CATCH_UP: u64 = 5;
const SLACK_MS: u64 = 50;
const STORES: usize = 2;
/// So many ticks may be decided and not published before the pointer has to wait; the model publishes sooner.
const FEW_FROZEN: u64 = 8;

/// One step of a sequence.
#[derive(Clone, Debug)]
enum Step {
    Add {
        store: usize,
        messages: Vec<Message>,
        ack_timeout_ticks: u16,
        attempt: u8,
    },
    Del {
        store: usize,
        messages: Vec<Message>,
        withdraw: bool,
    },
    Pass {
        ms: u64,
    },
    Advance {
        store: usize,
    },
    Expire {
        store: usize,
    },
    /// A store becomes the leader, by the release of the one before.
    Lead {
        store: usize,
    },
    /// The lease is gone, as if it had run out; the old leader believes that it still leads.
    LoseLease,
    /// The next answer to a store is lost.
    LoseAnswer {
        store: usize,
    },
}

/// Stores on one ring, and the model of it.
struct Subject<'a> {
    model: Model,
    time: &'a mut FrozenRedis,
    proxies: Vec<Proxy>,
    stores: Vec<RedisStore>,
}

impl Subject<'_> {
    async fn open(slots: u16, time: &mut FrozenRedis) -> Subject<'_> {
        let _: () = time.redis.command(&["FLUSHALL"]);
        let options = time.options(Wheel::new(slots, TICK).unwrap());
        let (mut proxies, mut stores) = (Vec::new(), Vec::new());
        for _ in 0..STORES {
            let proxy = Proxy::to(time.redis.port);
            stores.push(frozen_redis::open(&RedisOptions { url: proxy.url().into(), ..options.clone() }).await);
            proxies.push(proxy);
        }
        let now = time.unix_ms();
        let pointer = now / TICK_MS;
        let model = Model { slots: slots.into(), now, pointer, due: now, ..Model::default() };
        Subject { model, time, proxies, stores }
    }

    fn seat(&self, store: usize) -> &RingParts {
        &self.stores[store].rings()[0]
    }

    /// Waits until a store's link has healed; what its candidate saw before counts for nothing then, and its term is over.
    ///
    /// The leader waits for Acks that the store held meanwhile, until that says that they are applied. The answer to this
    /// comes before the one to what is asked later, which may be the next that is lost.
    async fn heal(&mut self, store: usize, mut lost: u64) {
        while self.proxies[store].lost() > lost {
            lost = self.proxies[store].lost();
            (self.model.seen[store], self.model.next[store]) = (None, None);
            let holds = || self.time.redis.command::<bool>(&["EXISTS", "{test:0}:held_acks"]);
            while !self.stores[store].is_up()
                || holds()
                || self.seat(store).ring.status(self.time.now()).await.is_err()
            {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Add { store, messages, ack_timeout_ticks, attempt } => {
                let k = (*ack_timeout_ticks - 1) % u16::try_from(self.model.slots).unwrap() + 1;
                self.add(*store, messages, k, *attempt).await;
            }
            Step::Del { store, messages, withdraw } => self.del(*store, messages, *withdraw).await,
            Step::Pass { ms } => {
                self.time.pass(Duration::from_millis(*ms));
                self.model.now += ms;
            }
            Step::Advance { store } => self.advance(*store).await,
            Step::Expire { store } => drop(self.publish_expired(*store).await),
            Step::Lead { store } => self.lead(*store).await,
            Step::LoseLease => {
                let _: u64 = self.time.redis.command(&["DEL", "{test:0}:lease"]);
                self.model.leader = None;
            }
            Step::LoseAnswer { store } => self.proxies[*store].lose_an_answer(),
        }
    }

    async fn add(&mut self, store: usize, messages: &[Message], ack_timeout_ticks: u16, attempt: u8) {
        let lost = self.proxies[store].lost();
        let request = AddNewMsg { messages, ack_timeout_ticks, attempt };
        let answer = self.seat(store).ring.add_new_msg(request, self.time.now()).await;
        let expected: Vec<_> =
            messages.iter().map(|message| self.model.add(*message, ack_timeout_ticks, attempt)).collect();
        match answer {
            Ok(answer) => {
                assert_eq!(answer.outcomes, expected);
                assert_eq!(answer.deadline.0, self.model.tick_due() + u64::from(ack_timeout_ticks));
            }
            Err(refusal) => {
                assert_eq!(refusal.reason.promise(), Promise::OutcomeUnknown, "{refusal}");
                assert_eq!(self.proxies[store].lost(), lost + 1, "refused without cause: {refusal}");
            }
        }
        self.heal(store, lost).await;
    }

    /// A DelMsg is answered with its true outcome, however many answers are lost.
    async fn del(&mut self, store: usize, messages: &[Message], withdraw: bool) {
        let lost = self.proxies[store].lost();
        let request = DelMsg { messages, withdraw };
        let answer = self.seat(store).ring.del_msg(request, self.time.now()).await.unwrap();
        let expected: Vec<_> = messages.iter().map(|message| self.model.del(*message, withdraw)).collect();
        assert_eq!(answer.outcomes, expected);
        self.heal(store, lost).await;
    }

    async fn advance(&mut self, store: usize) {
        let lost = self.proxies[store].lost();
        let found = self.seat(store).ring.advance(self.time.now()).await;
        let leads = self.model.leads(store);
        let expected = self.model.advance(store, self.time);
        match found {
            Ok(found) => {
                assert_eq!(found, expected);
                self.heal(store, lost).await;
            }
            Err(refusal) => {
                assert_eq!(self.proxies[store].lost(), lost + 1, "refused without cause: {refusal}");
                self.heal(store, lost).await;
                let again = self.seat(store).ring.advance(self.time.now()).await.unwrap();
                assert_eq!(again, Advance::Deposed, "its connection was rebuilt");
                if leads {
                    self.lead(store).await;
                }
            }
        }
        while leads && self.model.unpublished > FEW_FROZEN && self.publish_expired(store).await {}
    }

    /// Does one step of expiry; whether there is more to do.
    async fn publish_expired(&mut self, store: usize) -> bool {
        let lost = self.proxies[store].lost();
        let expired = self.seat(store).ring.publish_expired(self.time.now()).await;
        let leads = self.model.leads(store);
        let more = match expired {
            Ok(expired) => {
                let did = expired.counted.is_some() || expired.published.is_some();
                assert!(leads || !did, "{expired:?}");
                assert!(!(leads && expired.deposed), "{expired:?}");
                if expired.deposed {
                    self.model.next[store] = None;
                }
                if let Some((tick, counts)) = expired.counted {
                    let earlier = self.model.counted.insert(tick.0, counts);
                    assert_eq!(earlier, None, "tick {tick} is counted twice");
                }
                self.model.in_doubt.take_if(|asked| *asked == store && !expired.deposed);
                self.heal(store, lost).await;
                expired.more
            }
            Err(refusal) => {
                assert_eq!(self.proxies[store].lost(), lost + 1, "refused without cause: {refusal}");
                self.model.in_doubt = leads.then_some(store).or(self.model.in_doubt);
                self.heal(store, lost).await;
                if leads {
                    self.lead(store).await;
                }
                true
            }
        };
        if leads && !more {
            self.model.unpublished = 0;
        }
        more
    }

    /// Tends the lease of a store, as often as it takes for an answer to come through.
    async fn maintain(&mut self, store: usize) -> Leadership {
        loop {
            let lost = self.proxies[store].lost();
            let found = self.seat(store).lease.maintain(self.time.now()).await;
            let is_held: bool = self.time.redis.command(&["EXISTS", "{test:0}:lease"]);
            let is_own = self.model.leader == Some(store) && self.model.next[store].is_none();
            if is_held && (self.model.leader.is_none() || is_own) {
                self.model.acquire(store);
            }
            match found {
                Ok(leadership) => {
                    if matches!(leadership, Leadership::Follows { .. }) {
                        self.model.sees(store);
                    }
                    return leadership;
                }
                Err(refusal) => assert_eq!(refusal.reason, Reason::StoreTimeout, "{refusal}"),
            }
            self.heal(store, lost).await;
        }
    }

    async fn lead(&mut self, store: usize) {
        if let Some(leader) = self.model.leader.filter(|leader| *leader != store) {
            let found = self.maintain(store).await;
            assert!(matches!(found, Leadership::Follows { .. }), "{found:?}");
            let lost = self.proxies[leader].lost();
            // If the answer is lost, the lease is released all the same.
            let _ = self.seat(leader).lease.release(self.time.now()).await;
            self.heal(leader, lost).await;
            (self.model.leader, self.model.next[leader]) = (None, None);
        }
        let found = self.maintain(store).await;
        assert!(matches!(found, Leadership::Leads { .. }), "{found:?}");
    }

    /// Lets everything come to its end, then compares every batch of every tick.
    async fn finish(mut self) {
        let store = self.model.leader.unwrap_or(0);
        self.lead(store).await;
        // The messages published last are remembered for a revolution more.
        let end = self.model.pointer + CATCH_UP + 2 * self.model.slots + 2;
        while !self.model.in_flight.is_empty() || self.model.pointer < end {
            let wait = self.model.next[store].map_or(0, |next| next.saturating_sub(self.model.now));
            self.step(&Step::Pass { ms: wait }).await;
            if !self.model.leads(store) {
                self.lead(store).await;
            }
            self.advance(store).await;
        }
        while self.publish_expired(store).await {}
        let mut found: BTreeMap<u64, Vec<Delivery>> = BTreeMap::new();
        let outbox = &self.seat(store).outbox;
        loop {
            let taken = outbox.take(&GroupName::default_group(), u64::MAX, self.time.now()).await.unwrap();
            if taken.is_empty() {
                break;
            }
            for delivery in taken {
                found.entry(delivery.batch.id.tick.0).or_default().push(delivery);
            }
        }
        let uncounted = self.model.decided.keys().filter(|tick| !self.model.counted.contains_key(*tick)).count();
        assert!(uncounted <= self.model.untold, "{uncounted} ticks go uncounted, {} may", self.model.untold);
        for (tick, (timed_out, acked)) in &self.model.decided {
            if let Some(counts) = self.model.counted.get(tick) {
                assert_eq!((counts.acked, counts.timed_out()), (*acked, timed_out.len() as u64), "tick {tick}");
            }
            let batches = found.remove(tick).unwrap_or_default();
            let listed: Vec<_> = batches.iter().flat_map(|delivery| delivery.batch.messages.clone()).collect();
            assert_eq!(listed.len(), timed_out.len(), "tick {tick}: {listed:?} and {timed_out:?}");
            assert_eq!(&listed.into_iter().collect::<BTreeSet<_>>(), timed_out, "tick {tick}");
            for delivery in batches {
                let counts = delivery.batch.counts;
                assert_eq!((counts.acked, counts.timed_out()), (*acked, timed_out.len() as u64), "tick {tick}");
                assert_eq!(delivery.delivery_count, 1);
            }
        }
        assert!(found.is_empty(), "batches of ticks that were never decided: {found:?}");
        let status = self.seat(store).ring.status(self.time.now()).await.unwrap();
        assert_eq!((status.in_flight, status.slots.iter().sum::<u64>(), status.closing), (0, 0, 0));
        for (key, count) in [("messages", "HLEN"), ("late", "LLEN")] {
            let left: u64 = self.time.redis.command(&[count, &format!("{{test:0}}:{key}")]);
            assert_eq!(left, 0, "what was late is forgotten: {key}");
        }
    }
}

fn message() -> impl Strategy<Value = Message> {
    (0..8_u64, 0..2_u64).prop_map(Message::from)
}

fn step() -> impl Strategy<Value = Step> {
    let messages = || prop::collection::vec(message(), 1..6);
    let store = || 0..STORES;
    prop_oneof![
        5 => (store(), messages(), 1..=6_u16, 1..3_u8).prop_map(|(store, messages, ack_timeout_ticks, attempt)| {
            Step::Add { store, messages, ack_timeout_ticks, attempt }
        }),
        4 => (store(), messages(), prop::bool::weighted(0.2))
            .prop_map(|(store, messages, withdraw)| Step::Del { store, messages, withdraw }),
        5 => prop_oneof![9 => 1..1_100_u64, 1 => 1_900..9_000_u64].prop_map(|ms| Step::Pass { ms }),
        6 => store().prop_map(|store| Step::Advance { store }),
        4 => store().prop_map(|store| Step::Expire { store }),
        3 => store().prop_map(|store| Step::Lead { store }),
        1 => Just(Step::LoseLease),
        2 => store().prop_map(|store| Step::LoseAnswer { store }),
    ]
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(200)
}

/// A runtime, and a Redis whose clock is stopped.
fn stage() -> (tokio::runtime::Runtime, FrozenRedis) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    (runtime.expect("threads can be had"), FrozenRedis::start())
}

async fn play(time: &mut FrozenRedis, slots: u16, steps: &[Step]) {
    let mut subject = Subject::open(slots, time).await;
    for step in steps {
        subject.step(step).await;
    }
    subject.finish().await;
}

#[test]
fn several_stores_on_one_ring_answer_as_the_model() {
    let (runtime, time) = stage();
    let time = RefCell::new(time);
    let config = ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() };
    let sequences = (1..=5_u16, prop::collection::vec(step(), 1..60));
    let ran = TestRunner::new(config).run(&sequences, |(slots, steps)| {
        runtime.block_on(play(&mut time.borrow_mut(), slots, &steps));
        Ok(())
    });
    if let Err(error) = ran {
        panic!("{error}");
    }
}

#[test]
fn every_tick_is_counted_whatever_answer_about_it_is_lost() {
    let (runtime, mut time) = stage();
    let message = |id: u64| Message::from(id);
    let mut steps = vec![Step::Lead { store: 0 }];
    for round in 0..4 {
        let messages = (10 * round..10 * round + 5).map(message).collect();
        steps.push(Step::Add { store: 1, messages, ack_timeout_ticks: 1, attempt: 1 });
        steps.push(Step::Del { store: 0, messages: vec![message(10 * round)], withdraw: false });
        steps.extend([Step::Pass { ms: TICK_MS }, Step::Advance { store: 0 }]);
        steps.extend([Step::LoseAnswer { store: 0 }, Step::Expire { store: 0 }, Step::Expire { store: 0 }]);
    }
    runtime.block_on(play(&mut time, 3, &steps));
}
