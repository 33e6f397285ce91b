//! Computes when requests are due at a fixed rate.

use std::time::Duration;

/// Connections whose groups of requests would begin within so many ns are due together. The bench shares its machine
/// with the server, and a wake-up for each connection costs both as much as dozens of requests.
const ROUND: u64 = 250_000;

/// The schedule of one connection. Requests that would be due shortly after each other are due together, as a burst: a
/// logic node that pushes thousands of messages a second does not write them one by one either. Where the server is
/// slower than the rate the schedule does not wait for it: latency counts from when a request was due, so that a server
/// that stalled cannot hide how many would have waited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    /// When the first burst is due, in ns since the load began.
    first: f64,
    /// ns from one burst to the next.
    interval: f64,
    /// Requests that are due together.
    pub(super) burst: u64,
    /// Bursts that were made.
    bursts: u64,
    /// Requests that were made of the one that is next.
    made: u64,
    /// When that one is due, in ns since the load began.
    pub(super) due_at: u64,
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "2^53 ns are a hundred days, no time is negative, and a burst has a length"
)]
impl Schedule {
    /// The schedule of connection `connection` of `connections` that make `per_second` requests together, evenly
    /// spread, from `from` on; those that fall into the time `every` are one burst, and bursts begin where a [`ROUND`]
    /// does.
    pub(super) fn new(
        from: u64,
        per_second: f64,
        every: Duration,
        connection: usize,
        connections: usize,
    ) -> Schedule {
        let apart = 1e9 * connections as f64 / per_second;
        let burst = (every.as_nanos() as f64 / apart).max(1.0) as u64;
        let interval = apart * burst as f64;
        let after = (interval * connection as f64 / connections as f64) as u64;
        let first = (from + after - after % ROUND) as f64;
        Schedule { first, interval, burst, bursts: 0, made: 0, due_at: first as u64 }
    }

    /// From one burst to the next, in ns, rounded up: a check too early would find nothing due.
    pub(super) fn period(&self) -> u64 {
        (self.interval.ceil() as u64).max(1)
    }

    /// Records that the next request was made.
    pub(super) fn advance(&mut self) {
        self.made += 1;
        if self.made == self.burst {
            self.begin_next();
        }
    }

    /// Gives up the rest of the next burst; returns how many requests that is.
    pub(super) fn skip(&mut self) -> u64 {
        let left = self.burst - self.made;
        self.begin_next();
        left
    }

    /// Computed once a burst: a load asks for each request when it is due.
    fn begin_next(&mut self) {
        self.bursts += 1;
        self.made = 0;
        self.due_at = (self.first + self.interval * self.bursts as f64) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_asks_often_asks_in_bursts_and_no_faster() {
        // 16 connections with 100,000 requests a second each, the ninth half of a period after the first.
        for (every_ms, together) in [(4, 400), (16, 1_600)] {
            let mut schedule = Schedule::new(0, 1.6e6, Duration::from_millis(every_ms), 8, 16);
            assert_eq!(schedule.burst, together);
            for burst in 0..3 {
                for _ in 0..together {
                    assert_eq!(schedule.due_at, every_ms * (500_000 + burst * 1_000_000));
                    schedule.advance();
                }
            }
        }
    }

    #[test]
    fn connections_whose_bursts_begin_in_the_same_round_make_them_together() {
        // 64 connections with a burst every 4 ms each: one after the other they would be 62.5 us apart.
        let due = |burst: u32| -> Vec<u64> {
            let next = |connection| {
                let mut schedule = Schedule::new(7, 64_000.0, Duration::from_millis(4), connection, 64);
                (0..burst).for_each(|_| assert_eq!(schedule.skip(), 4));
                schedule.due_at
            };
            (0..64).map(next).collect()
        };
        for burst in 0..3 {
            let together: Vec<u64> = (0..64).map(|n| 7 + u64::from(burst) * 4_000_000 + n / 4 * ROUND).collect();
            assert_eq!(due(burst), together);
        }
    }

    #[test]
    fn what_is_left_of_a_burst_can_be_skipped() {
        let mut schedule = Schedule::new(0, 1_000.0, Duration::from_millis(4), 0, 1);
        schedule.advance();
        assert_eq!((schedule.skip(), schedule.due_at), (3, 4_000_000));
        (0..4).for_each(|_| schedule.advance());
        assert_eq!((schedule.due_at, schedule.skip(), schedule.due_at), (8_000_000, 4, 12_000_000));
    }

    #[test]
    fn the_connections_share_the_rate_evenly() {
        let mut due: Vec<u64> = (0..4)
            .flat_map(|connection| {
                let mut schedule = Schedule::new(1_000, 100.0, Duration::from_millis(4), connection, 4);
                (0..25).map(move |_| {
                    let next = schedule.due_at;
                    schedule.advance();
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
