//! The state that the threads and connections of a bench share, and the counters of each connection.

use std::fmt::Display;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::ids::Ids;
use super::latency::TickTimes;
use super::{BenchOptions, Op, Order};
use crate::clock::Clock;
use crate::protocol::frame::Welcome;

/// The state that the threads of a bench share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) options: BenchOptions,
    pub(super) plan: Arc<Plan>,
    pub(super) stopwatch: Stopwatch,
    /// The Welcome of the server.
    pub(super) welcome: Arc<OnceLock<Welcome>>,
}

impl Shared {
    pub(super) fn new(options: &BenchOptions) -> Shared {
        // Each load has ids of its own: what an earlier one left behind is not its. The chance is that of the
        // standard library's hash seeds.
        let seed = RandomState::new().build_hasher().finish();
        let plan = Plan {
            op: options.op,
            ids: Ids::new(seed, options.acked, options.clients, options.connections),
            pipeline: options.pipeline(),
            ids_per_frame: options.ids_per_frame as u64,
            order: options.order,
            ack_timeout_ticks: options.ack_timeout_ticks,
            ping_length: options.ping_length(),
            errors: Errors::default(),
            live: Live::default(),
        };
        Shared {
            options: options.clone(),
            plan: Arc::new(plan),
            stopwatch: Stopwatch::start(),
            welcome: Arc::default(),
        }
    }
}

/// The settings and sums of all connections.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) op: Op,
    pub(super) ids: Ids,
    pub(super) pipeline: usize,
    pub(super) ids_per_frame: u64,
    pub(super) order: Order,
    pub(super) ack_timeout_ticks: u16,
    pub(super) ping_length: usize,
    pub(super) errors: Errors,
    pub(super) live: Live,
}

impl Plan {
    /// Whether every frame has one message, without a client: then it is made in one piece.
    pub(super) const fn is_single_message(&self) -> bool {
        self.ids_per_frame == 1 && !self.ids.with_clients()
    }
}

/// The counters of one connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    /// Which connection it is.
    pub(super) connection: usize,
    /// Messages added while it was measured.
    pub(super) added: u64,
    /// Messages acknowledged while it was measured.
    pub(super) acked: u64,
    /// Requests answered while it was measured.
    pub(super) frames: u64,
    /// Pairs, or Pings, that were due at a fixed rate and never made.
    pub(super) not_made: u64,
    /// Messages in flight that are not to be acknowledged, since the beginning.
    pub(super) left_to_time_out: u64,
    /// Numbers that were given to messages, since the beginning.
    pub(super) numbers: u64,
    /// When the server was at which deadline.
    pub(super) tick_times: TickTimes,
}

/// The sums over all connections so far.
#[derive(Debug, Default)]
pub(super) struct Live {
    frames: AtomicU64,
    messages: AtomicU64,
    /// When the latest AddNewMsg was sent whose answer named the tick, in ns since the load began.
    ticked_at: AtomicU64,
}

impl Live {
    pub(super) fn count(&self, frames: u64, messages: u64) {
        self.frames.fetch_add(frames, Ordering::Relaxed);
        self.messages.fetch_add(messages, Ordering::Relaxed);
    }

    pub(super) fn record_tick(&self, sent_at: u64) {
        self.ticked_at.fetch_max(sent_at, Ordering::Relaxed);
    }

    pub(super) fn ticked_at(&self) -> u64 {
        self.ticked_at.load(Ordering::Relaxed)
    }

    pub(super) fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }

    pub(super) fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }
}

/// How many different texts are kept.
const KEPT: usize = 8;

/// The errors of a load.
#[derive(Debug, Default)]
pub(super) struct Errors {
    inner: Mutex<(u64, Vec<String>)>,
}

impl Errors {
    /// Counts an error. A text that is known already is not kept again.
    pub(super) fn record(&self, text: impl Into<String>) {
        let text = text.into();
        let (count, texts) = &mut *self.inner.lock();
        *count += 1;
        if texts.len() < KEPT && !texts.contains(&text) {
            texts.push(text);
        }
    }

    /// Counts an error of a kind; only the first example is kept.
    pub(super) fn record_kind(&self, kind: &str, example: impl Display) {
        let (count, texts) = &mut *self.inner.lock();
        *count += 1;
        if texts.len() < KEPT && !texts.iter().any(|text| text.starts_with(kind)) {
            texts.push(format!("{kind} ({example})"));
        }
    }

    /// How many there were, and the first different ones.
    pub(super) fn first(&self) -> (u64, Vec<String>) {
        self.inner.lock().clone()
    }
}

/// The time of a load: ns since it began.
#[derive(Clone, Debug)]
pub(super) struct Stopwatch {
    clock: Arc<Clock>,
    begun: Instant,
}

impl Stopwatch {
    pub(super) fn start() -> Stopwatch {
        let clock = Clock::start();
        Stopwatch { begun: clock.now(), clock: Arc::new(clock) }
    }

    pub(super) fn now(&self) -> u64 {
        u64::try_from(self.clock.now().duration_since(self.begun).as_nanos()).unwrap_or(u64::MAX)
    }

    /// The moment so many ns after the beginning.
    pub(super) fn moment(&self, at: u64) -> Instant {
        self.begun + Duration::from_nanos(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_counted_and_the_first_different_ones_kept() {
        let errors = Errors::default();
        for number in 0..100 {
            errors.record("the same");
            errors.record_kind("a kind", number);
            errors.record(format!("number {number}"));
        }
        let (count, texts) = errors.first();
        assert_eq!((count, texts.len()), (300, KEPT));
        assert_eq!(texts[..4], ["the same", "a kind (0)", "number 0", "number 1"]);
    }
}
