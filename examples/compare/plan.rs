//! How much is measured.

use std::time::Duration;

use serde::Serialize;

/// How much is measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Plan {
    /// How often each subject runs.
    pub rounds: u32,
    /// How often those of `idle` run. Their figures are nearly the same, and in a second in which the machine is busy
    /// either of them is a fifth lower.
    pub idle_rounds: u32,
    /// How long a load runs.
    #[serde(with = "humantime_serde")]
    pub run: Duration,
    /// How long a subject in the process runs.
    #[serde(with = "humantime_serde")]
    pub run_in_process: Duration,
    /// Messages in flight of the ring, and of the load at half of the highest rate.
    pub many: u64,
    /// Messages in flight of all other loads.
    pub in_flight: u64,
    /// Messages that are left of a tick of `many`.
    pub left: u64,
    /// Connections that do nothing.
    pub idle: usize,
    /// Messages in flight of the bulk.
    pub bulk: u64,
}

impl Plan {
    /// As the targets say it.
    pub fn new(rounds: u32, run: Duration) -> Plan {
        Plan {
            rounds,
            idle_rounds: 3 * rounds,
            run,
            run_in_process: (run / 2).max(Duration::from_millis(500)),
            many: 1_000_000,
            in_flight: 100_000,
            left: 10_000,
            idle: 10_000,
            bulk: 20_000_000,
        }
    }

    /// One short round with fewer messages.
    pub fn quick() -> Plan {
        let run = Duration::from_millis(300);
        Plan {
            rounds: 1,
            idle_rounds: 1,
            run,
            run_in_process: run,
            many: 100_000,
            // Just enough for frames of 512.
            in_flight: 40_000,
            left: 1_000,
            idle: 1_000,
            bulk: 2_000_000,
        }
    }
}
