//! Measures the ring in memory with whole request batches, as a session submits them: `cargo bench --bench ring`.
//!
//! - `100k in flight`, `1M …`, `10M …`: adds, dels, both in turn (`pair`) and re-arms, in request batches of 256 messages with
//!   random keys of 16 bytes, first in, first out. Next to them the same keys go into a bare `HashMap` and out of it
//!   (`HashMap pair`), one at a time, without locks and ticks. The throughput is that of messages asked for.
//! - `single`: the same in request batches of requests of one message, adds and dels in turn, and in an order that no processor
//!   guesses.
//! - `decide`: from the advance to the last batch in the outbox, of a tick most of whose messages were acknowledged
//!   at the last moment. The throughput is that of messages added, since the places of all of them are looked at.
//!
//! With `--test` everything is done once, and 100k in flight is the most.

#[path = "support/messages.rs"]
mod messages;
#[path = "support/wheel.rs"]
mod wheel;

use std::hint::black_box;
use std::time::{Duration, Instant};

use ackwheel::bench::Order;
use ackwheel::core::message::Message;
use ackwheel::core::request_batch::Outcome;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use hashbrown::HashMap;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::messages::random_messages;
use crate::wheel::{BATCH, SLOTS, Subject, Window};

/// What a map would have to keep of a message: its deadline, the time of its add, its attempt.
type Kept = (u16, u32, u8);

type Yardstick = HashMap<Message, Kept, foldhash::quality::RandomState>;

/// A ring with many messages in flight.
struct Busy {
    subject: Subject,
    window: Window,
}

impl Busy {
    fn new(in_flight: usize) -> Busy {
        let (mut subject, window) = (Subject::new(), Window::new(in_flight));
        subject.add(window.inside(), SLOTS, Outcome::Added);
        Busy { subject, window }
    }

    /// Adds a request batch and acknowledges another; returns how long each took.
    fn pair(&mut self) -> (Duration, Duration) {
        let (entering, leaving) = self.window.step();
        let start = Instant::now();
        self.subject.add(entering, SLOTS, Outcome::Added);
        let added = Instant::now();
        self.subject.del(leaving);
        (added - start, added.elapsed())
    }
}

/// How long it takes to do something so often, where only a part of it counts.
fn timed(iterations: u64, mut once: impl FnMut() -> Duration) -> Duration {
    (0..iterations).map(|_| once()).sum()
}

fn is_test() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

fn requests(criterion: &mut Criterion) {
    for (name, in_flight) in [("100k", 100_000), ("1M", 1_000_000), ("10M", 10_000_000)] {
        if is_test() && in_flight > 100_000 {
            continue;
        }
        let mut group = criterion.benchmark_group(format!("{name} in flight"));
        group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
        group.throughput(Throughput::Elements(BATCH as u64));
        ring(&mut group, in_flight);
        yardstick(&mut group, in_flight);
        group.finish();
    }
}

/// All on one ring, which is built when the first of them runs: most of the time goes into that.
fn ring(group: &mut BenchmarkGroup<'_, WallTime>, in_flight: usize) {
    let mut built = None;
    group.bench_function("add", |bencher| {
        let busy = built.get_or_insert_with(|| Busy::new(in_flight));
        bencher.iter_custom(|iterations| timed(iterations, || busy.pair().0));
    });
    group.bench_function("del", |bencher| {
        let busy = built.get_or_insert_with(|| Busy::new(in_flight));
        bencher.iter_custom(|iterations| timed(iterations, || busy.pair().1));
    });
    group.bench_function("re-arm", |bencher| {
        let busy = built.get_or_insert_with(|| Busy::new(in_flight));
        bencher.iter_custom(|iterations| {
            timed(iterations, || {
                let (entering, leaving) = busy.window.step();
                busy.subject.add(entering, SLOTS, Outcome::Added);
                let start = Instant::now();
                busy.subject.add(leaving, SLOTS, Outcome::Rearmed);
                let elapsed = start.elapsed();
                busy.subject.del(leaving);
                elapsed
            })
        });
    });
    // The two in turn count one message once for each, as the other figures do.
    group.throughput(Throughput::Elements(2 * BATCH as u64));
    group.bench_function("pair", |bencher| {
        let busy = built.get_or_insert_with(|| Busy::new(in_flight));
        bencher.iter(|| busy.pair());
    });
    for (name, order) in [("single, in turn", Order::InTurn), ("single, mixed", Order::Mixed)] {
        group.bench_function(name, |bencher| {
            let Busy { subject, window } = built.get_or_insert_with(|| Busy::new(in_flight));
            bencher.iter(|| {
                let (entering, leaving) = window.step();
                subject.singly(entering, leaving, order);
            });
        });
    }
}

/// The same keys in a map, without a lock and without a tick.
fn yardstick(group: &mut BenchmarkGroup<'_, WallTime>, in_flight: usize) {
    group.bench_function("HashMap pair", |bencher| {
        let mut window = Window::new(in_flight);
        let kept = (SLOTS, 0, 1);
        let mut map: Yardstick = window.inside().iter().map(|message| (*message, kept)).collect();
        bencher.iter(|| {
            let (entering, leaving) = window.step();
            for message in entering {
                map.insert(*message, black_box(kept));
            }
            for message in leaving {
                black_box(map.remove(message).expect("it was inserted"));
            }
        });
    });
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(1));
    for (name, added, left) in
        [("100k of which 1k are left", 100_000, 1_000), ("1M of which 10k are left", 1_000_000, 10_000)]
    {
        group.throughput(Throughput::Elements(added as u64));
        group.bench_function(name, |bencher| {
            let messages = random_messages(added, 1);
            let mut shuffled = messages.clone();
            shuffled.shuffle(&mut SmallRng::seed_from_u64(2));
            bencher.iter_custom(|iterations| {
                timed(iterations, || {
                    let mut subject = Subject::new();
                    subject.add(&messages, 1, Outcome::Added);
                    // It closes, and what lies in it is acknowledged after that: between two ticks the table would
                    // give back the memory of what has gone, and there would be less to look at.
                    subject.advance();
                    while subject.publish_expired().is_some() {}
                    subject.del(&shuffled[left..]);
                    let start = Instant::now();
                    subject.advance();
                    let mut published = 0;
                    while published < left as u64 {
                        published += subject.publish_expired().expect("the tick is not published yet");
                    }
                    start.elapsed()
                })
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    // Plots and many resamples would take longer than what they show.
    config = Criterion::default().without_plots().nresamples(10_000);
    targets = requests, decide
}
criterion_main!(benches);
