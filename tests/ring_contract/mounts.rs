//! The stores that the contract is checked with.

use std::time::{Duration, Instant};

use ackwheel::core::{Leadership, Moment, Retention, Store, StormRule, Wheel};
use ackwheel::redis::RedisOptions;

use super::{MAX_IN_FLIGHT, SLOTS, TICK};
use crate::support::frozen_redis::{self, FrozenRedis};

/// The retention, in ticks.
pub const RETENTION_TICKS: u32 = 20;

/// Short, so that the ring can turn for as long.
fn retention() -> Retention {
    Retention { time: TICK * RETENTION_TICKS, ..Retention::default() }
}

/// A store with its time.
pub(super) trait Mount {
    async fn open() -> Self;
    fn store(&self) -> &dyn Store;
    fn now(&self) -> Instant;
    /// Lets time pass without turning the ring.
    fn pass(&mut self, time: Duration);
}

/// The memory store: its time is a number.
pub(super) struct Memory {
    store: ackwheel::memory::MemoryStore,
    now: Instant,
}

impl Mount for Memory {
    async fn open() -> Memory {
        let options = ackwheel::memory::MemoryOptions {
            wheel: Wheel::new(SLOTS, TICK).unwrap(),
            storm: StormRule::default(),
            retention: retention(),
            max_in_flight: MAX_IN_FLIGHT,
            threads: 1,
        };
        let moment = Moment { now: Instant::now(), unix_time: Duration::from_secs(1_000_000) };
        let store = ackwheel::memory::MemoryStore::new(options, moment);
        Memory { store, now: moment.now }
    }

    fn store(&self) -> &dyn Store {
        &self.store
    }

    fn now(&self) -> Instant {
        self.now
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }
}

/// A store in Redis, whose clock the test moves.
pub(super) struct Redis {
    store: ackwheel::redis::RedisStore,
    time: FrozenRedis,
}

impl Mount for Redis {
    async fn open() -> Redis {
        let time = FrozenRedis::start();
        let options = RedisOptions {
            max_in_flight: MAX_IN_FLIGHT,
            retention: retention(),
            ..time.options(Wheel::new(SLOTS, TICK).unwrap())
        };
        let store = frozen_redis::open(&options).await;
        let leads = store.rings()[0].lease.maintain(time.now()).await.unwrap();
        assert!(matches!(leads, Leadership::Leads { .. }), "{leads:?}");
        Redis { store, time }
    }

    fn store(&self) -> &dyn Store {
        &self.store
    }

    fn now(&self) -> Instant {
        self.time.now()
    }

    fn pass(&mut self, time: Duration) {
        self.time.pass(time);
    }
}
