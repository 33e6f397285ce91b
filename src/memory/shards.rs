//! All shards of a ring: the assignment of messages to shards, sums over all shards, and scans through all of them.

use foldhash::quality::RandomState;
use parking_lot::{Mutex, MutexGuard};

use super::options::MemoryOptions;
use super::shard::{Shard, TickCount, horizon};
use super::table::MAX_SHARD_BITS;
use crate::core::Tick;

/// Shards for each thread: so many that two threads seldom want the same, and so few that a request batch has several
/// messages for each. A single thread has one shard, and its request batches are not sorted.
const SHARDS_PER_THREAD: usize = 4;

/// The most locks that one step of expiry takes: a tenth of a millisecond together, or more if it finds many messages.
pub(super) const LOCKS_PER_STEP: usize = 4;

/// The shards of a ring, each under a lock of its own.
#[derive(Debug)]
pub(super) struct Shards {
    pub(super) options: MemoryOptions,
    pub(super) hasher: RandomState,
    /// The number of shards, as a power of two.
    pub(super) bits: u32,
    pub(super) list: Box<[Mutex<Shard>]>,
}

/// The position of a scan through all shards.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScanPosition {
    shard: usize,
    segment: usize,
}

impl Shards {
    /// Shards for this number of threads.
    pub(super) fn new(options: MemoryOptions) -> Shards {
        let shards = if options.threads > 1 { options.threads * SHARDS_PER_THREAD } else { 1 };
        let bits = shards.next_power_of_two().ilog2().min(MAX_SHARD_BITS);
        let hasher = RandomState::default();
        let shard = |_| Mutex::new(Shard::new(options.wheel, hasher.clone()));
        Shards { options, bits, list: (0..1 << bits).map(shard).collect(), hasher }
    }

    /// The counts of a tick.
    pub(super) fn counts(&self, tick: Tick) -> TickCount {
        self.sum(|shard| *shard.of_tick(tick, self.options.wheel))
    }

    /// Resets the counts of a tick that expires, and returns them.
    pub(super) fn take_counts(&self, tick: Tick) -> TickCount {
        self.sum(|shard| std::mem::take(shard.of_tick(tick, self.options.wheel)))
    }

    fn sum(&self, count: impl Fn(&mut Shard) -> TickCount) -> TickCount {
        self.list.iter().map(|shard| count(&mut shard.lock())).fold(TickCount::default(), |sum, count| TickCount {
            in_flight: sum.in_flight + count.in_flight,
            acked: sum.acked + count.acked,
        })
    }

    /// The ticks that can have messages in flight while the pointer stands at `pointer`.
    pub(super) fn open_ticks(&self, pointer: Tick) -> impl Iterator<Item = Tick> + use<> {
        (pointer.0..pointer.0 + horizon(self.options.wheel)).map(Tick)
    }

    /// The number of messages in all tables, in flight or remembered.
    pub(super) fn len(&self) -> usize {
        self.list.iter().map(|shard| shard.lock().table.len).sum()
    }

    /// Does a step of a scan: `visit` gets the next shard, and the segment at which it continues, and returns whether it is
    /// done with the shard. Returns false once the scan is behind the last shard.
    pub(super) fn scan(
        &self,
        position: &mut ScanPosition,
        mut visit: impl FnMut(&mut Shard, &mut usize) -> bool,
    ) -> bool {
        (0..LOCKS_PER_STEP).all(|_| self.visit_next(position, &mut visit))
    }

    /// Visits one shard of a scan.
    ///
    /// The lock goes to a thread that waits for it, if there is one: the next step would take it again before that thread
    /// has woken.
    pub(super) fn visit_next(
        &self,
        position: &mut ScanPosition,
        visit: impl FnOnce(&mut Shard, &mut usize) -> bool,
    ) -> bool {
        let Some(shard) = self.list.get(position.shard) else { return false };
        let mut shard = shard.lock();
        if visit(&mut shard, &mut position.segment) {
            *position = ScanPosition { shard: position.shard + 1, segment: 0 };
        }
        MutexGuard::unlock_fair(shard);
        true
    }
}
