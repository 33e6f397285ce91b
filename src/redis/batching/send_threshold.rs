//! When a second script goes out while one is in flight.
//!
//! What waits for an answer travels in company, and of two scripts neither should be so small that what Redis does beside
//! the messages counts. So where Redis works all the time the second waits for half of what is unanswered: clients that
//! wait for answers have two scripts carry half of it each. Where an answer takes mostly the way to Redis and back, to
//! wait would only add to it.

use std::time::Duration;

use crate::redis::batching::chunk::MAX_CHUNK;

/// The least number of messages that are worth a second script.
pub(crate) const LEAST: usize = 256;

/// More are not waited for.
const MOST: usize = MAX_CHUNK / 2;

/// An answer that takes longer was on its way for most of it: two full scripts take Redis about two milliseconds.
const FAR: Duration = Duration::from_millis(4);

/// The number of messages for which a second script goes out, where so many were unanswered when the last answer came,
/// and that took so long.
pub(crate) fn messages(unanswered: usize, round_trip: Duration) -> usize {
    if round_trip > FAR { LEAST } else { (unanswered / 2).clamp(LEAST, MOST) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_script_waits_for_half_of_what_was_unanswered_unless_redis_is_far() {
        let near = [(0, 256), (512, 256), (700, 350), (1_000, 500), (100_000, 500)];
        for (unanswered, worth) in near {
            assert_eq!(messages(unanswered, Duration::from_millis(2)), worth);
            assert_eq!(messages(unanswered, Duration::from_millis(5)), 256);
        }
    }
}
