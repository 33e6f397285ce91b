//! Keeps the bounds of the outbox, as the leader: drops batches and groups that are too old or too many.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::core::outbox::Dropped;
use crate::core::refusal::Refusal;
use crate::redis::context::RingContext;
use crate::redis::leader::term::{Term, whole_ms};
use crate::redis::outbox::calls::{group_name, run_expecting};
use crate::redis::outbox::heartbeat::WatchedTime;
use crate::redis::scripts::SCRIPTS;

/// After a start or an outage nothing is dropped for being old before so much time has passed, or the retention, if
/// that is less.
const LONGEST_GRACE: Duration = Duration::from_secs(3_600);

/// How long a leader has been watching. Before that is a grace, it drops nothing because of age: after a start or an
/// outage, consumers have the grace to return.
#[derive(Debug, Default)]
struct Grace {
    /// The session of the link, and the epoch of the leader.
    term: (u64, u64),
    watched: WatchedTime,
    lasted: Duration,
}

impl Grace {
    /// Whether the grace is over in this term, at `now`.
    fn is_over(&mut self, term: (u64, u64), grace: Duration, lease: Duration, now: Instant) -> bool {
        if self.term != term {
            *self = Grace { term, ..Grace::default() };
        }
        self.lasted += self.watched.until(now, lease);
        self.lasted >= grace
    }
}

/// Keeps the bounds of the outbox.
pub(super) struct Bounds {
    context: Arc<RingContext>,
    grace: Mutex<Grace>,
    /// How many steps were answered.
    steps: AtomicU64,
}

impl Bounds {
    pub(super) fn new(context: Arc<RingContext>) -> Bounds {
        Bounds { context, grace: Mutex::default(), steps: AtomicU64::new(0) }
    }

    /// Drops batches and groups beyond the bounds, in steps. A step whose answer is lost is repeated under its number.
    pub(super) async fn keep(&self, term: Term, now: Instant, dropped: &mut Dropped) -> Result<(), Refusal> {
        let options = &self.context.options;
        let retention = options.retention;
        let session = self.context.link.session()?.number;
        let grace = retention.time.min(LONGEST_GRACE);
        let may_drop_old = self.grace.lock().is_over((session, term.epoch), grace, options.lease, now);
        loop {
            let number = self.steps.load(Ordering::Relaxed) + 1;
            let arguments = (whole_ms(retention.time), retention.max_ids, may_drop_old, number);
            let mut answer = run_expecting(&self.context, "tended", &SCRIPTS.tend, arguments).await?;
            let more = answer.count()? == 1;
            let (ids, batches, groups) = (answer.count()?, answer.count()?, answer.rest(group_name)?);
            self.steps.store(number, Ordering::Relaxed);
            dropped.ids += ids;
            dropped.batches += batches;
            dropped.groups.extend(groups);
            if !more {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(3);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_grace_lasts_for_time_that_the_leader_watched_in_one_term() {
        let (mut grace, begun) = (Grace::default(), Instant::now());
        let mut is_over = |term, second| grace.is_over(term, LEASE * 2, LEASE, begun + SECOND * second);
        assert!(!is_over((1, 1), 0));
        assert!(!is_over((1, 1), 100), "this process was stopped");
        let over = (101..120).find(|second| is_over((1, 1), *second));
        assert_eq!(over, Some(105), "half a lease of the pause counts");
        assert!(is_over((1, 1), 106));
        assert!(!is_over((2, 1), 107), "Redis was unreachable");
        assert!(!is_over((2, 5), 200), "another led meanwhile");
    }
}
