//! Maintenance of the outbox, once a second: recovers lost batches and, on the leader, keeps the bounds and frees the
//! batches of dead sidecars.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::core::outbox::Dropped;
use crate::core::refusal::Refusal;
use crate::redis::leader::term::{Term, whole_ms};
use crate::redis::outbox::Inner;
use crate::redis::outbox::calls::group_name;
use crate::redis::outbox::heartbeat::WatchedTime;
use crate::redis::scripts::SCRIPTS;

/// After a start or an outage nothing is dropped for being old before so much time has passed, or the retention, if that
/// is less.
const LONGEST_GRACE: Duration = Duration::from_secs(3_600);

/// How long a leader has been watching. Before that is a grace, it drops nothing because of age: after a start or an
/// outage, consumers have the grace to return.
#[derive(Debug, Default)]
pub(super) struct Grace {
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

impl Inner {
    /// Maintains the outbox. A part that fails does not keep the others from being done: a Redis that is out of memory
    /// takes no heartbeat, and trimming helps it. The dropped batches are returned even after a failure, since they are reported once here.
    pub(super) async fn maintain(&self, now: Instant) -> Result<Dropped, Refusal> {
        let link = &self.context.link;
        self.maintained.notify_one();
        if link.is_up() {
            // Hints can be missed; nothing waits for longer than this.
            self.tell();
        }
        let mut dropped = Dropped::default();
        let (mut kept, mut inspected) = (Ok(()), Ok(()));
        if let Some(term) = self.context.term.lasting(link.clock().now()) {
            kept = self.keep_bounds(term, now, &mut dropped).await;
            inspected = self.inspect().await;
        }
        let heartbeat = self.last_heartbeat.lock().clone();
        let recovered = self.recover_all().await;
        if dropped != Dropped::default() {
            return Ok(dropped);
        }
        heartbeat.and(inspected).and(kept).and(recovered).map(|()| dropped)
    }

    /// Drops batches and groups beyond the bounds, in steps. A step whose answer is lost is repeated under its number.
    async fn keep_bounds(&self, term: Term, now: Instant, dropped: &mut Dropped) -> Result<(), Refusal> {
        let options = &self.context.options;
        let retention = options.retention;
        let session = self.context.link.session()?.number;
        let grace = retention.time.min(LONGEST_GRACE);
        let may_drop_old = self.grace.lock().is_over((session, term.epoch), grace, options.lease, now);
        loop {
            let number = self.steps.load(Ordering::Relaxed) + 1;
            let arguments = (whole_ms(retention.time), retention.max_ids, may_drop_old, number);
            let mut answer = self.run_expecting("tended", &SCRIPTS.tend, arguments).await?;
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
