//! What the ring costs: `cargo bench --bench ring`.
//!
//! - `decide/1M of which 10k are left`: from the advance to the last batch in the outbox.
//! - `pair/…`: an add and a del of random ids in frames of 256, with as many messages in flight.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ackwheel::core::batch::StormRule;
use ackwheel::core::message::Message;
use ackwheel::core::outbox::Retention;
use ackwheel::core::ring::{AddNewMsg, Advance, DelMsg, Ring};
use ackwheel::core::tick::{Tick, Wheel};
use ackwheel::memory::{MemoryOutbox, MemoryRing, RingOptions};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use futures_util::FutureExt;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

const TICK: Duration = Duration::from_secs(1);
const FRAME: usize = 256;

struct Subject {
    ring: MemoryRing,
    now: Instant,
}

impl Subject {
    fn new() -> Subject {
        let now = Instant::now();
        let outbox = Arc::new(MemoryOutbox::new(Retention::default(), now));
        let options = RingOptions {
            wheel: Wheel::new(15, TICK).expect("usual dimensions"),
            storm: StormRule::default(),
            max_in_flight: u64::MAX,
            epoch: 1,
            pointer: Tick(1),
            keeps_on_drain: false,
        };
        Subject { ring: MemoryRing::new(options, outbox, now), now }
    }

    fn add(&self, messages: &[Message], ack_timeout_ticks: u16) {
        for messages in messages.chunks(FRAME) {
            let request = AddNewMsg { messages, ack_timeout_ticks, attempt: 1 };
            let answer = self.ring.add_new_msg(request, self.now).now_or_never();
            black_box(answer.expect("memory answers at once").expect("there is room"));
        }
    }

    fn del(&self, messages: &[Message]) {
        for messages in messages.chunks(FRAME) {
            let answer = self.ring.del_msg(DelMsg { messages, withdraw: false }, self.now).now_or_never();
            black_box(answer.expect("memory answers at once").expect("a del is not refused"));
        }
    }

    /// Moves the pointer once and carries what was decided to the outbox; returns how much timed out.
    fn decide(&mut self) -> u64 {
        self.now += TICK;
        let advance = self.ring.advance(self.now).now_or_never();
        assert!(matches!(advance, Some(Ok(Advance::Moved { .. }))));
        let mut published = 0;
        loop {
            let expired = self.ring.expire(self.now).now_or_never().expect("memory answers at once");
            let expired = expired.expect("memory is not away");
            published += expired.published.map_or(0, |batch| batch.messages);
            if !expired.more {
                return published;
            }
        }
    }
}

fn random_messages(count: usize, seed: u64) -> Vec<Message> {
    let mut random = SmallRng::seed_from_u64(seed);
    (0..count).map(|_| Message::new(random.next_u64(), random.next_u64() % 1_000)).collect()
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    group.sample_size(10).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(1));
    group.bench_function("1M of which 10k are left", |bencher| {
        bencher.iter_custom(|iterations| {
            let mut elapsed = Duration::ZERO;
            for iteration in 0..iterations {
                let mut subject = Subject::new();
                let mut messages = random_messages(1_000_000, iteration);
                subject.add(&messages, 1);
                messages.shuffle(&mut SmallRng::seed_from_u64(iteration));
                subject.del(&messages[10_000..]);
                assert_eq!(subject.decide(), 0, "it only closes");
                let start = Instant::now();
                assert_eq!(subject.decide(), 10_000);
                elapsed += start.elapsed();
            }
            elapsed
        });
    });
    group.finish();
}

fn pair(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pair");
    group.sample_size(10).throughput(Throughput::Elements(FRAME as u64));
    for in_flight in [100_000, 1_000_000] {
        let subject = Subject::new();
        let mut window = random_messages(in_flight, 1);
        subject.add(&window, 15);
        let mut oldest = 0;
        let mut fresh = random_messages(in_flight, 2);
        group.bench_function(BenchmarkId::from_parameter(in_flight), |bencher| {
            bencher.iter(|| {
                let frame = oldest..(oldest + FRAME).min(in_flight);
                subject.add(&fresh[frame.clone()], 15);
                subject.del(&window[frame.clone()]);
                oldest = frame.end;
                if oldest == in_flight {
                    // What was added in this round is deleted in the next, and the other way round.
                    std::mem::swap(&mut window, &mut fresh);
                    oldest = 0;
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decide, pair);
criterion_main!(benches);
