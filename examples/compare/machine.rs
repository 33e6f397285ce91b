//! The delays that the machine itself causes: nothing else runs meanwhile.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::numbers::{figure, id};

/// For how long the thread that only sleeps does so each time.
const NAP: Duration = Duration::from_micros(500);

/// For how long a cache line is handed to and fro: so long that two threads which began on one processor are on two
/// most of the time.
const HANDING: Duration = Duration::from_millis(200);

/// A step of the clock that a thread which does nothing else would not see: something else had its processor.
const GAP: Duration = Duration::from_micros(200);

/// How often it is handed over between two looks at the clock.
const TURNS: u32 = 200;

/// Words of eight bytes in a cache line.
const LINE: usize = 8;

/// How many random lines of memory are read.
const READS: u64 = 4_000_000;

/// How long it takes, in ns, to read a cache line that lies anywhere in so many bytes, where no line says which is next:
/// as many of them are on their way as the processor asks for by itself.
pub fn scattered_line(bytes: u64) -> f64 {
    let lines = usize::try_from(bytes).expect("it fits the memory") / (LINE * size_of::<u64>());
    // Not zeros, for which the system has one page.
    let memory = vec![1_u64; lines * LINE];
    let begun = Instant::now();
    let sum: u64 = (0..READS).map(|number| memory[number_below(lines, id(number)) * LINE]).sum();
    let took = begun.elapsed();
    assert_eq!(black_box(sum), READS, "every line was read");
    took.as_secs_f64() * 1e9 / figure(READS)
}

/// A random number as one below a bound.
#[expect(clippy::cast_possible_truncation, reason = "it is below a length")]
fn number_below(bound: usize, random: u64) -> usize {
    ((u128::from(random) * bound as u128) >> 64) as usize
}

/// How much later than it asked for a thread is woken that only sleeps, for about so long: 99th percentile and 99.9th,
/// in us.
pub fn waking(length: Duration) -> (f64, f64) {
    let begun = Instant::now();
    let mut late = Vec::new();
    while begun.elapsed() < length {
        let asked = Instant::now() + NAP;
        thread::sleep(NAP);
        late.push(asked.elapsed().as_secs_f64() * 1e6);
    }
    late.sort_unstable_by(f64::total_cmp);
    let percentile = |thousandths| late[late.len() * thousandths / 1_000];
    (percentile(990), percentile(999))
}

/// How much of the time is taken from threads that only look at the clock, one a processor, for about so long: the share,
/// in thousandths, that passes in steps longer than [`GAP`], of the processor that loses more; and the longest step, in us.
pub fn taken(length: Duration) -> (f64, f64) {
    let look = || {
        let begun = Instant::now();
        let (mut last, mut taken, mut longest) = (begun, Duration::ZERO, Duration::ZERO);
        while last - begun < length {
            let now = Instant::now();
            let step = now - last;
            if step >= GAP {
                taken += step;
                longest = longest.max(step);
            }
            last = now;
        }
        (taken.as_secs_f64() / (last - begun).as_secs_f64() * 1e3, longest.as_secs_f64() * 1e6)
    };
    thread::scope(|scope| {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..processors).map(|_| scope.spawn(look)).collect();
        let found = threads.into_iter().map(|thread| thread.join().expect("it only looks at the clock"));
        found.fold((0.0, 0.0), |(share, longest), found| (f64::max(share, found.0), f64::max(longest, found.1)))
    })
}

/// How long it takes, in ns, until one of two threads sees what the other has written. The processors of a virtual
/// machine may share a cache, or may not, and that may change from one second to the next.
pub fn handing_over() -> f64 {
    /// An odd turn that ends it.
    const OVER: u64 = u64::MAX;
    let turn = AtomicU64::new(0);
    let wait_for = |parity| {
        let mut spins = 0_u32;
        loop {
            let now = turn.load(Ordering::Acquire);
            if now % 2 == parity {
                return now;
            }
            std::hint::spin_loop();
            spins = spins.wrapping_add(1);
            // Both may be on one processor.
            if spins.is_multiple_of(4_096) {
                thread::yield_now();
            }
        }
    };
    let mut took = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                match wait_for(1) {
                    OVER => return,
                    now => turn.store(now + 1, Ordering::Release),
                }
            }
        });
        let begun = Instant::now();
        while begun.elapsed() < HANDING {
            let begun = Instant::now();
            for _ in 0..TURNS / 2 {
                let now = wait_for(0);
                turn.store(now + 1, Ordering::Release);
            }
            took.push(begun.elapsed() / TURNS);
        }
        wait_for(0);
        turn.store(OVER, Ordering::Release);
    });
    // While both are on one processor a turn takes a thousand times as long: the few of those are not in the middle.
    took.sort_unstable();
    took[took.len() / 2].as_secs_f64() * 1e9
}
