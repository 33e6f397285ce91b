//! Measures the ring in memory with whole request batches, as a session submits them: `cargo bench --bench ring`.
//!
//! - `100k in flight`, `1M …`, `10M …`: adds, dels, both in turn (`pair`) and re-arms. Request batches have 256
//!   messages with random keys of 16 bytes, first in, first out. `HashMap pair` inserts the same keys into a plain
//!   `HashMap` and removes them, one at a time, without locks and ticks. The throughput counts the messages of
//!   requests.
//! - `single`: the same in requests of one message, with adds and dels in turn, and in random order.
//! - `expire`: the time from the advance to the last batch in the outbox, for a tick whose messages were mostly
//!   acknowledged at the last moment. The throughput counts the added messages, since the scan passes the entries of
//!   all of them.
//!
//! With `--test` everything runs once, with at most 100k in flight.

#[path = "support/messages.rs"]
mod messages;
#[path = "support/wheel.rs"]
mod wheel;

use std::hint::black_box;
use std::time::{Duration, Instant};

use ackwheel::bench::Order;
use ackwheel::core::{Message, Outcome};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use hashbrown::HashMap;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;

use crate::messages::random_messages;
use crate::wheel::{BATCH, SLOTS, Subject, Window};

/// The data of a message in a map: its deadline, the time of its add, its attempt.
type MapEntry = (u16, u32, u8);

type MessageMap = HashMap<Message, MapEntry, foldhash::quality::RandomState>;

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

    /// Adds a request batch and acknowledges another. Returns the time of each.
    fn pair(&mut self) -> (Duration, Duration) {
        let (entering, leaving) = self.window.step();
        let start = Instant::now();
        self.subject.add(entering, SLOTS, Outcome::Added);
        let added = Instant::now();
        self.subject.del(leaving);
        (added - start, added.elapsed())
    }
}

/// The sum of the times that `once` returns.
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
        hash_map(&mut group, in_flight);
        group.finish();
    }
}

/// All benchmarks use one ring, which the first of them builds, because building it takes the most time.
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
    // Each message counts twice: for its add and for its del.
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

/// The same keys in a map, without locks and ticks.
fn hash_map(group: &mut BenchmarkGroup<'_, WallTime>, in_flight: usize) {
    group.bench_function("HashMap pair", |bencher| {
        let mut window = Window::new(in_flight);
        let entry = (SLOTS, 0, 1);
        let mut map: MessageMap = window.inside().iter().map(|message| (*message, entry)).collect();
        bencher.iter(|| {
            let (entering, leaving) = window.step();
            for message in entering {
                map.insert(*message, black_box(entry));
            }
            for message in leaving {
                black_box(map.remove(message).expect("it was inserted"));
            }
        });
    });
}

fn expire(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("expire");
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
                    // The messages are acknowledged when the tick is closing. Before that, the table would reclaim
                    // their memory between two ticks, and the scan would be shorter.
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
    // Plots and many resamples take long and show little.
    config = Criterion::default().without_plots().nresamples(10_000);
    targets = requests, expire
}
criterion_main!(benches);
