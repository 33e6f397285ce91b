//! Computes when requests are due at a fixed rate.

use std::time::Duration;

/// The length of a round, in ns. The first bursts of connections begin only at multiples of a round, so several
/// connections begin together. Otherwise each connection would need its own wake-up, which costs the bench and the
/// server as much as dozens of requests.
const ROUND: u64 = 250_000;

/// The schedule of one connection. Requests that would be due shortly after each other are due together, as a burst. A
/// busy logic node (a server that pushes messages) also sends many requests together. The schedule does not wait for a
/// slow server, and latency counts from the time at which a request was due. So the latency includes the time in which
/// a stalled server delayed requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    /// The time at which the first burst is due, in ns since the load began.
    first: f64,
    /// The time from one burst to the next, in ns.
    interval: f64,
    /// The number of requests in a burst.
    pub(super) burst: u64,
    /// The number of completed bursts.
    bursts: u64,
    /// The number of requests of the current burst that were made.
    made: u64,
    /// The time at which the current burst is due, in ns since the load began.
    pub(super) due_at: u64,
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "2^53 ns are a hundred days, no time is negative, and a burst has a length"
)]
impl Schedule {
    /// Creates the schedule of connection number `connection`. From the time `from`, all `connections` together make
    /// `per_second` requests a second, evenly spread. Requests of this connection that fall into the same period of
    /// `every` are one burst. The first burst begins a multiple of [`ROUND`] after `from`.
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

    /// Returns the time from one burst to the next, in ns. It is rounded up, because an early check would find no
    /// request due.
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

    /// Skips the rest of the current burst. Returns how many requests were skipped.
    pub(super) fn skip(&mut self) -> u64 {
        let left = self.burst - self.made;
        self.begin_next();
        left
    }

    /// Moves to the next burst. Its due time is computed only here, because the load reads it for every request.
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
        // 16 connections make 100,000 requests a second each. The ninth begins half a period after the first.
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
        // 64 connections make a burst every 4 ms each. Without rounds, their bursts would be 62.5 us apart.
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
