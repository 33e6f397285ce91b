//! When requests are due at a fixed rate.

use std::time::Duration;

/// The schedule of one connection. Requests that would be due shortly after each other are due together, as a burst: a
/// logic node that pushes thousands of messages a second does not write them one by one either. Where the server is slower
/// than the rate the schedule does not wait for it: latency counts from when a request was due, so that a server that
/// stood still cannot hide how many would have waited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// When the first burst is due, in ns since the load began.
    first: f64,
    /// ns from one burst to the next.
    interval: f64,
    /// Requests in a burst.
    burst: u64,
    /// How many were made.
    made: u64,
}

impl Pace {
    /// The schedule of connection `connection` of `connections` that make `per_second` requests together, evenly spread,
    /// from `from` on; those that fall into the time `every` are one burst.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "2^53 ns are a hundred days, and a burst has a length"
    )]
    pub(super) fn new(from: u64, per_second: f64, every: Duration, connection: usize, connections: usize) -> Pace {
        let apart = 1e9 * connections as f64 / per_second;
        let burst = (every.as_nanos() as f64 / apart).max(1.0) as u64;
        let interval = apart * burst as f64;
        Pace { first: from as f64 + interval * connection as f64 / connections as f64, interval, burst, made: 0 }
    }

    /// How many are due together.
    pub(super) const fn burst(&self) -> u64 {
        self.burst
    }

    /// When the next is due, in ns since the load began.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "2^53 ns are a hundred days, and no time is negative"
    )]
    pub(super) fn next(&self) -> u64 {
        (self.first + self.interval * (self.made / self.burst) as f64) as u64
    }

    /// From one burst to the next, in ns, rounded up: who looks too early would find nothing due.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "no period is negative")]
    pub(super) fn period(&self) -> u64 {
        (self.interval.ceil() as u64).max(1)
    }

    /// The next was made.
    pub(super) const fn advance(&mut self) {
        self.made += 1;
    }

    /// What is left of the burst that is next will not be made; returns how many those are.
    pub(super) const fn skip(&mut self) -> u64 {
        let left = self.burst - self.made % self.burst;
        self.made += left;
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_asks_often_asks_in_bursts_and_no_faster() {
        // 16 connections with 100,000 requests a second each, the ninth half of a period after the first.
        for (every_ms, together) in [(4, 400), (16, 1_600)] {
            let mut pace = Pace::new(0, 1.6e6, Duration::from_millis(every_ms), 8, 16);
            assert_eq!(pace.burst(), together);
            for burst in 0..3 {
                for _ in 0..together {
                    assert_eq!(pace.next(), every_ms * (500_000 + burst * 1_000_000));
                    pace.advance();
                }
            }
        }
    }

    #[test]
    fn the_connections_share_the_rate_evenly() {
        let mut due: Vec<u64> = (0..4)
            .flat_map(|connection| {
                let mut pace = Pace::new(1_000, 100.0, Duration::from_millis(4), connection, 4);
                (0..25).map(move |_| {
                    let next = pace.next();
                    pace.advance();
                    next
                })
            })
            .collect();
        due.sort_unstable();
        assert!(
            due.iter().zip((1_000_u64..).step_by(10_000_000)).all(|(due, expected)| *due == expected),
            "{due:?}"
        );
    }
}
