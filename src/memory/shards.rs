//! All shards of a ring: which message belongs to which, sums over all of them, and walks through all of them.

use parking_lot::{Mutex, MutexGuard};

use super::shard::{Shard, TickCount};
use super::table::{Hash, HashMessage, Keyed, MAX_SHARD_BITS};
use super::wheel_state::horizon;
use crate::core::message::Message;
use crate::core::tick::{Tick, Wheel};

/// Shards for each of several threads: so many that two seldom want the same, and so few that a request batch has several
/// messages for each. One thread alone has one shard, and its request batches need no partition.
const SHARDS_PER_THREAD: usize = 4;

/// Entries that are looked at under one lock: no request waits for a shard longer than that takes.
pub(super) const LOCKED_STEP: usize = 32 * 1_024;

/// How often one step of expiry locks a shard: a tenth of a millisecond together, or some more where it finds many messages.
pub(super) const LOCKS_PER_STEP: usize = 4;

/// The shards of a ring, each under a lock of its own.
#[derive(Debug)]
pub(super) struct Shards {
    wheel: Wheel,
    hasher: Keyed,
    bits: u32,
    list: Box<[Mutex<Shard<Keyed>>]>,
}

/// How far a walk through all shards has come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Walk {
    shard: usize,
    segment: usize,
}

impl Shards {
    /// As many as that number of threads needs.
    pub(super) fn new(wheel: Wheel, threads: usize) -> Shards {
        let shards = if threads > 1 { threads * SHARDS_PER_THREAD } else { 1 };
        let bits = shards.next_power_of_two().ilog2().min(MAX_SHARD_BITS);
        let hasher = Keyed::default();
        let shard = |_| Mutex::new(Shard::new(wheel, hasher.clone()));
        Shards { wheel, bits, list: (0..1 << bits).map(shard).collect(), hasher }
    }

    /// The number of shards, as a power of two.
    pub(super) fn bits(&self) -> u32 {
        self.bits
    }

    pub(super) fn hash_of(&self, message: Message) -> Hash {
        self.hasher.hash_of(message)
    }

    pub(super) fn get(&self, number: usize) -> &Mutex<Shard<Keyed>> {
        &self.list[number]
    }

    pub(super) fn of(&self, hash: Hash) -> &Mutex<Shard<Keyed>> {
        self.get(hash.shard(self.bits))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Mutex<Shard<Keyed>>> {
        self.list.iter()
    }

    /// The counts of a tick.
    pub(super) fn counts(&self, tick: Tick) -> TickCount {
        self.sum(|shard| *shard.of_tick(tick, self.wheel))
    }

    /// Takes the counts of a tick that expires.
    pub(super) fn take_counts(&self, tick: Tick) -> TickCount {
        self.sum(|shard| std::mem::take(shard.of_tick(tick, self.wheel)))
    }

    fn sum(&self, of: impl Fn(&mut Shard<Keyed>) -> TickCount) -> TickCount {
        self.iter().map(|shard| of(&mut shard.lock())).fold(TickCount::default(), TickCount::plus)
    }

    /// The ticks that can have messages in flight while the pointer stands at `pointer`.
    pub(super) fn open_ticks(&self, pointer: Tick) -> impl Iterator<Item = Tick> + use<> {
        (pointer.0..pointer.0 + horizon(self.wheel)).map(Tick)
    }

    /// The number of messages in all tables, those in flight and those remembered.
    pub(super) fn len(&self) -> usize {
        self.iter().map(|shard| shard.lock().table.len()).sum()
    }

    /// Goes on with a walk: `visit` gets the next shard, and the segment where it goes on, and returns whether it is done with
    /// the shard. False if the walk is behind the last shard.
    ///
    /// The lock goes to a thread that waits for it, if there is one: the next step would take it again before that thread
    /// has woken.
    pub(super) fn visit_next(
        &self,
        walk: &mut Walk,
        visit: impl FnOnce(&mut Shard<Keyed>, &mut usize) -> bool,
    ) -> bool {
        let Some(shard) = self.list.get(walk.shard) else { return false };
        let mut shard = shard.lock();
        if visit(&mut shard, &mut walk.segment) {
            *walk = Walk { shard: walk.shard + 1, segment: 0 };
        }
        MutexGuard::unlock_fair(shard);
        true
    }
}
