//! When requests are due at a fixed rate.

/// The schedule of one connection. Where the server is slower than the rate the schedule does not wait for it: latency
/// counts from when a request was due, so that a server that stood still cannot hide how many would have waited.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// When the first is due, in ns since the load began.
    first: f64,
    /// ns from one to the next.
    interval: f64,
    /// How many were made.
    made: u64,
}

impl Pace {
    /// The schedule of connection `connection` of `connections` that make `per_second` requests together, evenly spread,
    /// from `from` on.
    #[expect(clippy::cast_precision_loss, reason = "2^53 ns are a hundred days")]
    pub(super) fn new(from: u64, per_second: f64, connection: usize, connections: usize) -> Pace {
        let apart = 1e9 / per_second;
        Pace { first: from as f64 + apart * connection as f64, interval: apart * connections as f64, made: 0 }
    }

    /// When the next is due, in ns since the load began.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "2^53 ns are a hundred days, and no time is negative"
    )]
    pub(super) fn next(&self) -> u64 {
        (self.first + self.interval * self.made as f64) as u64
    }

    /// The next was made.
    pub(super) const fn advance(&mut self) {
        self.made += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connections_share_the_rate_evenly() {
        let mut due: Vec<u64> = (0..4)
            .flat_map(|connection| {
                let mut pace = Pace::new(1_000, 1e6, connection, 4);
                (0..25).map(move |_| {
                    let next = pace.next();
                    pace.advance();
                    next
                })
            })
            .collect();
        due.sort_unstable();
        assert!(due.iter().zip((1_000_u64..).step_by(1_000)).all(|(due, expected)| *due == expected), "{due:?}");
    }
}
