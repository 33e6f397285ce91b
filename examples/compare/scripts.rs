//! Our own scripts, called directly: what Redis can do with them where no sidecar is in between.
//!
//! They are called for the ring of a sidecar that is asked for nothing meanwhile, and turns it: messages are put into
//! the sets of as many ticks as they are where the sidecar is asked.

use std::ops::Range;
use std::time::{Duration, Instant};

use ackwheel::bench::acknowledged;
use anyhow::ensure;
use hdrhistogram::Histogram;

use crate::direct::DirectCalls;
use crate::numbers::{figure, messages};

/// That of a sidecar that is told of none.
const NAMESPACE: &str = "ackwheel";

/// Calls of a fixed number of messages on one connection: adds of new ones, and dels of old ones in the order of
/// `ackwheel bench`.
struct Calls {
    redis: DirectCalls,
    ids: u64,
    in_flight: u64,
    window: Range<u64>,
}

impl Calls {
    fn open(url: &str, ids: u64, in_flight: u64) -> anyhow::Result<Calls> {
        Ok(Calls { redis: DirectCalls::open(url, NAMESPACE)?, ids, in_flight, window: 0..0 })
    }

    fn add(&mut self) -> Vec<u8> {
        let end = self.window.end + self.ids;
        let call = self.redis.add(&messages(self.window.end..end));
        self.window.end = end;
        call
    }

    fn del(&mut self) -> Vec<u8> {
        let start = self.window.start + self.ids;
        let scattered = |nth| acknowledged(nth, self.in_flight, self.window.end);
        let call = self.redis.del(&messages((self.window.start..start).map(scattered)));
        self.window.start = start;
        call
    }

    /// One more than so many messages in flight, or one less.
    fn next(&mut self) -> Vec<u8> {
        if self.window.end - self.window.start <= self.in_flight { self.add() } else { self.del() }
    }

    fn receive(&mut self) -> anyhow::Result<()> {
        let applied = self.redis.receive()?;
        ensure!(applied as u64 == self.ids, "a script applied {applied} of {} messages", self.ids);
        Ok(())
    }

    fn ask(&mut self, call: &[u8]) -> anyhow::Result<()> {
        self.redis.send(call)?;
        self.receive()
    }

    fn fill(&mut self) -> anyhow::Result<()> {
        while self.window.end - self.window.start < self.in_flight {
            let call = self.add();
            self.ask(&call)?;
        }
        Ok(())
    }

    fn empty(&mut self) -> anyhow::Result<()> {
        while !self.window.is_empty() {
            let call = self.del();
            self.ask(&call)?;
        }
        Ok(())
    }
}

/// Pairs of adds and dels a second with calls of so many messages, so many of them in flight. The next call is
/// written while Redis works.
///
/// # Errors
///
/// When Redis does not carry one out.
pub fn pairs_per_second(url: &str, ids: u64, depth: u64, in_flight: u64, run: Duration) -> anyhow::Result<f64> {
    let mut calls = Calls::open(url, ids, in_flight)?;
    calls.fill()?;
    let (start, mut answered, mut flying) = (Instant::now(), 0, 0);
    let mut next = calls.next();
    while start.elapsed() < run {
        while flying < depth {
            calls.redis.send(&next)?;
            flying += 1;
            next = calls.next();
        }
        calls.receive()?;
        flying -= 1;
        answered += 1;
    }
    let elapsed = start.elapsed();
    for _ in 0..flying {
        calls.receive()?;
    }
    // Calls are numbered: the one that is written must go before those that delete the rest.
    calls.ask(&next)?;
    calls.empty()?;
    Ok(figure(answered * ids) / 2.0 / elapsed.as_secs_f64())
}

/// The median time of a call of one message, one at a time, in us: the mean of that of adds and that of dels.
///
/// # Errors
///
/// When Redis does not carry one out.
pub fn median_us(url: &str, in_flight: u64, run: Duration) -> anyhow::Result<f64> {
    let mut calls = Calls::open(url, 1, in_flight)?;
    calls.fill()?;
    let (mut adds, mut dels) = (Histogram::<u64>::new(3)?, Histogram::<u64>::new(3)?);
    let start = Instant::now();
    while start.elapsed() < run {
        for (is_add, times) in [(true, &mut adds), (false, &mut dels)] {
            let call = if is_add { calls.add() } else { calls.del() };
            let begun = Instant::now();
            calls.ask(&call)?;
            times.record(u64::try_from(begun.elapsed().as_nanos())?)?;
        }
    }
    calls.empty()?;
    Ok(figure(adds.value_at_quantile(0.5) + dels.value_at_quantile(0.5)) / 2.0 / 1e3)
}
