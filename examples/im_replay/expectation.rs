//! The expected outcome of a message by the trace: whether its phone was online.

use std::collections::HashMap;

use crate::trace::Push;

/// A phone was online for a message if its user sent something at most this long before or after it.
pub const ONLINE_WITHIN_SECONDS: u64 = 600;

/// When each user sent something.
pub struct Activity {
    sent: HashMap<u64, Vec<u64>>,
}

impl Activity {
    /// The activity that a trace shows, in whatever order.
    pub fn of(trace: &[Push]) -> Activity {
        let mut sent: HashMap<u64, Vec<u64>> = HashMap::new();
        for push in trace {
            sent.entry(push.source).or_default().push(push.seconds);
        }
        for times in sent.values_mut() {
            times.sort_unstable();
        }
        Activity { sent }
    }

    /// Whether the phone that a message goes to was online for it. Exactly 600 s away still counts.
    pub fn is_online(&self, push: &Push) -> bool {
        let Some(times) = self.sent.get(&push.destination) else { return false };
        let earliest = push.seconds.saturating_sub(ONLINE_WITHIN_SECONDS);
        let latest = push.seconds.saturating_add(ONLINE_WITHIN_SECONDS);
        let first = times.partition_point(|time| *time < earliest);
        times.get(first).is_some_and(|time| *time <= latest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn push(source: u64, destination: u64, seconds: u64) -> Push {
        Push { source, destination, seconds }
    }

    /// Whether phone 2 is online for a message at `seconds`, if its user sent something at these times.
    fn online(sent: &[u64], seconds: u64) -> bool {
        let mut trace: Vec<Push> = sent.iter().map(|time| push(2, 9, *time)).collect();
        trace.push(push(1, 2, seconds));
        Activity::of(&trace).is_online(&push(1, 2, seconds))
    }

    #[test]
    fn six_hundred_seconds_before_and_after_count_and_one_more_does_not() {
        assert!(online(&[4_400], 5_000) && online(&[5_600], 5_000) && online(&[5_000], 5_000));
        assert!(!online(&[4_399], 5_000) && !online(&[5_601], 5_000));
        assert!(!online(&[4_399, 5_601], 5_000), "between two that are too far away");
        assert!(online(&[9_000, 5_100, 1], 5_000), "the order of the trace does not matter");
    }

    #[test]
    fn who_never_sent_anything_is_offline_and_who_writes_to_oneself_is_online() {
        assert!(!online(&[], 5_000));
        let to_oneself = push(3, 3, 5_000);
        assert!(Activity::of(&[to_oneself]).is_online(&to_oneself));
    }

    #[test]
    fn the_beginning_of_time_is_no_trap() {
        assert!(online(&[0], 10) && online(&[600], 0) && !online(&[601], 0));
        assert!(online(&[u64::MAX], u64::MAX - 600));
    }
}
