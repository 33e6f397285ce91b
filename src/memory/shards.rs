//! The shards of a ring: sums over all shards, and scans that visit one shard after the other.

use parking_lot::{Mutex, MutexGuard};

use super::options::MemoryOptions;
use super::shard::{Shard, TickCount, horizon};
use super::table::MAX_SHARD_BITS;
use crate::core::{RandomHasher, Tick};

/// The number of shards for each thread. With fewer shards, two threads would often want the same shard. With more, a
/// request batch would have too few messages for each shard. A single thread has one shard, and its request batches
/// are not sorted.
const SHARDS_PER_THREAD: usize = 4;

/// The number of shards that one step of expiry locks, one after the other. A step takes about a tenth of a
/// millisecond, or more if it finds many messages.
pub(super) const LOCKS_PER_STEP: usize = 4;

/// The shards of a ring. Each has its own lock.
#[derive(Debug)]
pub(super) struct Shards {
    pub(super) options: MemoryOptions,
    pub(super) hasher: RandomHasher,
    /// The base-2 logarithm of the number of shards.
    pub(super) bits: u32,
    pub(super) list: Box<[Mutex<Shard>]>,
}

/// The position of a scan that visits all shards.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScanPosition {
    shard: usize,
    segment: usize,
}

impl Shards {
    /// Creates empty shards for the number of threads in the options.
    pub(super) fn new(options: MemoryOptions) -> Shards {
        let shards = if options.threads > 1 { options.threads * SHARDS_PER_THREAD } else { 1 };
        let bits = shards.next_power_of_two().ilog2().min(MAX_SHARD_BITS);
        let hasher = RandomHasher::default();
        let shard = |_| Mutex::new(Shard::new(options.wheel, hasher.clone()));
        Shards { options, bits, list: (0..1 << bits).map(shard).collect(), hasher }
    }

    /// Reads the counts of each tick from each shard with `read`, and returns their sums. Locks each shard once, however
    /// many ticks there are.
    pub(super) fn counts(
        &self,
        ticks: &(impl Iterator<Item = Tick> + Clone),
        read: impl Fn(&mut TickCount) -> TickCount,
    ) -> Vec<TickCount> {
        let mut sums = vec![TickCount::default(); ticks.clone().count()];
        for shard in &self.list {
            let mut shard = shard.lock();
            for (sum, tick) in sums.iter_mut().zip(ticks.clone()) {
                let count = read(shard.of_tick(tick, self.options.wheel));
                sum.in_flight += count.in_flight;
                sum.acked += count.acked;
            }
        }
        sums
    }

    /// Returns the ticks that can have messages in flight while the pointer stands at `pointer`.
    pub(super) fn open_ticks(&self, pointer: Tick) -> impl Iterator<Item = Tick> + Clone + use<> {
        (pointer.0..pointer.0 + horizon(self.options.wheel)).map(Tick)
    }

    /// Returns the number of messages in all tables, both in flight and remembered for `late`.
    pub(super) fn len(&self) -> usize {
        self.list.iter().map(|shard| shard.lock().table.len).sum()
    }

    /// Does a step of a scan: calls `visit` for the next shards. Passes each shard, and the segment of its table at
    /// which the scan continues. `visit` returns whether its shard is complete. Returns false when no shard is left.
    pub(super) fn scan(
        &self,
        position: &mut ScanPosition,
        mut visit: impl FnMut(&mut Shard, &mut usize) -> bool,
    ) -> bool {
        (0..LOCKS_PER_STEP).all(|_| self.visit_next(position, &mut visit))
    }

    /// Visits the next shard of a scan. Returns false when no shard is left.
    ///
    /// If another thread waits for the lock of the shard, the lock goes to that thread. Otherwise the next step would
    /// lock the shard again before that thread wakes up.
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
