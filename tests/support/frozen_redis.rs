//! Stores in a Redis whose clock is stopped until the test moves it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ackwheel::clock::Clock;
use ackwheel::core::{Retention, StormRule, Wheel};
use ackwheel::metrics::Metrics;
use ackwheel::redis::{CredentialFiles, RedisOptions, RedisStore};

use super::clock;
use super::redis::Redis;

/// When time begins, in ms since the Unix epoch: on a whole tick.
const BEGINNING: u64 = 1_800_000_000_000;

/// A Redis and a monotonic clock that move together, by the hand of the test.
#[derive(Debug)]
pub struct FrozenRedis {
    pub redis: Redis,
    start: Instant,
    passed: Duration,
}

impl FrozenRedis {
    pub fn start() -> FrozenRedis {
        let redis = Redis::with_clock(clock::Clock::Frozen(BEGINNING));
        // Ahead of the true clock, so that a store never takes that for the later one.
        let start = Instant::now() + Duration::from_secs(10_000_000);
        FrozenRedis { redis, start, passed: Duration::ZERO }
    }

    /// Now, by the monotonic clock.
    pub fn now(&self) -> Instant {
        self.start + self.passed
    }

    /// Now, in ms since the Unix epoch.
    pub fn unix_ms(&self) -> u64 {
        BEGINNING + u64::try_from(self.passed.as_millis()).expect("a test is short")
    }

    /// The moment of the monotonic clock at this Unix time in ms.
    pub fn at(&self, unix_ms: u64) -> Instant {
        self.start + Duration::from_millis(unix_ms - BEGINNING)
    }

    /// Lets whole milliseconds pass.
    pub fn pass(&mut self, time: Duration) {
        self.passed += time;
        self.redis.set_frozen(self.unix_ms());
    }

    /// How a store in it is to be, if nothing else is said.
    pub fn options(&self, wheel: Wheel) -> RedisOptions {
        RedisOptions {
            url: self.redis.url().into(),
            files: CredentialFiles::default(),
            namespace: String::from("test"),
            rings: 1,
            wheel,
            storm: StormRule::default(),
            retention: Retention::default(),
            max_in_flight: 1_000_000,
            max_held_acks: 1_000_000,
            name: String::from("test"),
            never_lead: false,
            expire_without_majority: false,
            // Nobody loses it by the time that a test lets pass.
            lease: Duration::from_secs(1_000_000),
            outage_grace: Duration::ZERO,
            catch_up_max_ticks: 5,
        }
    }
}

/// Opens a store.
pub async fn open(options: &RedisOptions) -> RedisStore {
    let (clock, metrics) = (Arc::new(Clock::start()), Arc::new(Metrics::default()));
    RedisStore::open(options, &clock, &metrics).await.unwrap_or_else(|error| panic!("{error}"))
}
