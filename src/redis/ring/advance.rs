//! Moves the pointer to the next tick when the move is due, or postpones the move. The pointer is the tick that expires
//! next: when the pointer leaves a tick, the tick expires.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::info;

use crate::core::{Advance, Refusal, StormRule, Tick};
use crate::redis::connection::link::{Link, Session};
use crate::redis::connection::stall_detector::Look;
use crate::redis::keys::MAX_FROZEN;
use crate::redis::leader::term::{CLOCK_SLACK, NextMove, Term, whole_ms};
use crate::redis::ring::RedisRing;
use crate::redis::scripts::{Answer, SCRIPTS};

/// How long the pointer waits if too many expired ticks are not published yet. Some of them can be published in this
/// time.
const BUSY: Duration = Duration::from_millis(50);

/// How long the pointer waits at most for Acks that sidecars kept during an outage of Redis.
const HELD_WAIT_MAX: Duration = Duration::from_secs(30);

/// How often the leader checks whether Redis has applied the Acks that sidecars kept during an outage.
const HELD_POLL: Duration = Duration::from_millis(50);

/// How long one call of `move_pointer` scans for missing messages while the pointer waits. The caller renews the lease
/// between two calls.
const SCAN_AT_A_TIME: Duration = Duration::from_millis(50);

/// How often the leader checks whether Redis still stalls.
const STALL_POLL: Duration = Duration::from_millis(20);

impl RedisRing {
    /// Moves the pointer by one tick, if the move is due and there is no reason to wait.
    pub(super) async fn move_pointer(&self, now: Instant) -> Result<Advance, Refusal> {
        let link @ Link { options, identity, term: current, .. } = &*self.link;
        let session = link.session()?;
        let recovered_at = link.confirmed(&session)?;
        let Some(term) = self.term_after_outage(&session, recovered_at) else { return Ok(Advance::Deposed) };
        if now < term.next.at {
            return Ok(Advance::Waiting(term.next.at));
        }
        let (awaits_repair, may_wait_for_repair) = {
            let repair = self.repair(term.epoch);
            (repair.scan.is_some_and(|scan| scan.is_awaited), repair.may_wait())
        };
        if awaits_repair {
            let until = link.clock.now() + SCAN_AT_A_TIME;
            while self.repair(term.epoch).scan.is_some() && link.clock.now() < until {
                self.scan(&session, term.epoch).await?;
            }
            return Ok(Advance::Waiting(now));
        }
        let (late, tick_length) = (now - term.next.at, options.wheel.tick_length());
        // The leader may catch up a limited number of moves, including the move that is due now. If more moves are due,
        // the leader skips the rest, which shifts all deadlines. The script that adds messages assumes the same limit.
        let most = tick_length * session.catch_up_max_ticks.max(1);
        if late >= most {
            let missed = late.saturating_sub(most).as_nanos() / tick_length.as_nanos() + 1;
            let next = term.next.at + options.wheel.ticks(u64::try_from(missed).unwrap_or(u64::MAX));
            current.update(term.epoch, |term| term.put_off(next));
            return Ok(Advance::Waiting(next));
        }
        // Before the tick expires, Redis should apply all requests that this sidecar has read. So the leader appends a
        // barrier to the queue of these requests, and waits until the barrier has left the queue, but not for long. If
        // the connection is replaced during this wait, the wait begins again.
        let (barrier, passed) = oneshot::channel();
        self.inbox.push_barrier(barrier);
        // If Redis becomes unreachable, the sender `barrier` is dropped, and the wait ends.
        let _ = timeout(term.flush_timeout(now, tick_length), passed).await;
        if link.session()?.number != session.number {
            return Ok(Advance::Waiting(now));
        }
        let at = now.max(link.clock.now());
        if let Some(until) = self.stalled_until(term, at) {
            return Ok(Advance::Waiting(until));
        }
        // A majority of the Sentinels or Cluster nodes must still confirm this Redis as the primary. The confirmation
        // may have ended since the check at the beginning.
        if link.confirmed(&session)? != recovered_at {
            return Ok(Advance::Waiting(at));
        }
        let StormRule { min, share } = options.storm;
        let longest_silence =
            if term.is_aware { String::new() } else { whole_ms(link.silence().patience()).to_string() };
        let held_for = term.held_since.map(|since| at.saturating_duration_since(since));
        let arguments = (
            (&identity.token, term.epoch, term.pointer.0, whole_ms(at - term.next.at), whole_ms(self.slack())),
            (min, share, MAX_FROZEN, whole_ms(term.next.ahead)),
            (longest_silence, !may_wait_for_repair, held_for >= Some(HELD_WAIT_MAX)),
        );
        let keys = &link.keys;
        let keys = keys.and_lists(&[&keys.lease, &keys.ticks, &keys.held_acks]);
        let (word, mut answer) = self.link.write_in(&session, &SCRIPTS.advance, &keys, arguments).await?;
        self.advanced(term, &word, &mut answer, at)
    }

    /// Returns the leadership term, or `None` if this sidecar was not elected in `session`, the current connection to
    /// Redis. `recovered_at` is the end of the last outage, if there was one. If the outage is new, postpones the next
    /// move, so that all sidecars can send the Acks that they kept. A further outage before the same move does not
    /// prolong this wait, so that many short outages do not stop the pointer.
    fn term_after_outage(&self, session: &Session, recovered_at: Option<Instant>) -> Option<Term> {
        let Link { options, term: current, .. } = &*self.link;
        let term = current.in_session(session.number)?;
        if recovered_at == term.recovered_at {
            return Some(term);
        }
        current.update(term.epoch, |term| {
            let grace_until = recovered_at.map(|recovered_at| recovered_at + options.outage_grace);
            term.grace_until = term.grace_until.or(grace_until);
            term.put_off(term.grace_until.map_or(term.next.at, |until| until.max(term.next.at)));
            term.recovered_at = recovered_at;
        });
        current.get()
    }

    /// Returns until when the pointer must wait if, at the time `at`, Redis stalls or has just stalled. In a stall, any
    /// sidecar may have Acks that Redis has not applied. Returns `None` without a stall. Also returns `None` if the
    /// move was already postponed, so that a slow Redis does not stop the pointer.
    fn stalled_until(&self, term: Term, at: Instant) -> Option<Instant> {
        let grace = self.link.options.outage_grace;
        if term.is_aware || grace.is_zero() {
            return None;
        }
        match self.link.look() {
            Look::Answers => None,
            Look::Silent => Some(at + STALL_POLL),
            Look::CatchesUp(left) => Some(self.put_off(term, at, left)),
        }
    }

    /// Postpones the next move until the time `at` plus the length of the stall. A stall counts for at most
    /// `outage_grace`, the wait after an outage. Returns the new time of the move.
    fn put_off(&self, term: Term, at: Instant, stall: Duration) -> Instant {
        let until = at + stall.min(self.link.options.outage_grace);
        self.link.term.update(term.epoch, |term| term.put_off(until));
        until
    }

    /// Applies the answer of the script `advance`. `word` is the first word of the answer, and `asked` is the time of
    /// the call.
    fn advanced(&self, term: Term, word: &str, answer: &mut Answer, asked: Instant) -> Result<Advance, Refusal> {
        let link @ Link { ring, options, term: current, .. } = &*self.link;
        let at = asked.max(link.clock.now());
        match word {
            "moved" => {
                let next = NextMove::from_answer(answer.number()?, asked, at, self.slack() / 2);
                let lateness = Duration::from_millis(answer.count()?);
                // The value is 0 if an earlier call moved the pointer, and the answer to that call was lost in an
                // outage. The outage began after the move, so the outage did not shift the move.
                let shifted = if answer.count()? > 0 { term.shifted_ticks(options.wheel) } else { 0 };
                self.report_lost(answer.count()?);
                current.update(term.epoch, |term| term.moved(next, options.wheel));
                self.repair(term.epoch).scans = 0;
                Ok(Advance::Moved { expired: term.pointer, lateness, shifted, next: next.at })
            }
            "missing" => {
                self.report_missing(answer.count()?);
                self.repair(term.epoch).begin(true, term.pointer, term.session);
                Ok(Advance::Waiting(at))
            }
            "wait" => {
                let next = NextMove::from_answer(answer.number()?, asked, at, self.slack() / 2);
                // If Redis is far, the leader sends the call early, so that it arrives in time. The answer to an early
                // call must not postpone the time at which the move is certainly due by the leader's clock: Redis'
                // clock may have been set back.
                let next =
                    if asked < term.next.certain() { next.no_later_than(term.next.certain()) } else { next };
                current.update(term.epoch, |term| term.next = next);
                Ok(Advance::Waiting(next.at))
            }
            "delayed" => {
                // The stall may have begun before this call. Then the other requests of this process show its length.
                let known = if let Look::CatchesUp(left) = self.link.look() { left } else { Duration::ZERO };
                let stall = Duration::from_millis(answer.count()?).max(known);
                Ok(Advance::Waiting(self.put_off(term, at, stall)))
            }
            "held" => {
                if term.held_since.is_none() {
                    let sidecars = answer.count()?;
                    info!(ring, sidecars, "the pointer waits for Acks that were held in an outage");
                }
                let until = at + HELD_POLL;
                current.update(term.epoch, |term| {
                    term.held_since.get_or_insert(at);
                    term.put_off(until);
                });
                Ok(Advance::Waiting(until))
            }
            "busy" => {
                current.update(term.epoch, |term| term.is_busy = true);
                Ok(Advance::Waiting(at + BUSY.min(options.wheel.tick_length() / 4)))
            }
            "deposed" => {
                current.end();
                Ok(Advance::Deposed)
            }
            "elsewhere" => {
                let pointer = Tick(answer.count()?);
                if pointer < term.pointer {
                    self.report_lost_moves("moves of the pointer", pointer);
                    return Ok(Advance::Deposed);
                }
                current.update(term.epoch, |term| term.pointer = pointer);
                Ok(Advance::Waiting(at))
            }
            word => Err(answer.strange(word).into()),
        }
    }

    /// Returns by how much the clocks of Redis and of this sidecar may differ within a tick: by [`CLOCK_SLACK`], but at
    /// most by a quarter of a tick.
    fn slack(&self) -> Duration {
        CLOCK_SLACK.min(self.link.options.wheel.tick_length() / 4)
    }
}
