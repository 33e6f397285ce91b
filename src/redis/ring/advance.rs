//! Moves the pointer when a move is due, or puts the move off.

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

/// How long the pointer waits if too many ticks are unpublished. In this time some are published.
const BUSY: Duration = Duration::from_millis(50);

/// Maximum wait of the pointer for Acks that sidecars held in an outage.
const HELD_WAIT_MAX: Duration = Duration::from_secs(30);

/// How often the pointer checks whether sidecars still have to apply Acks that they held in an outage.
const HELD_POLL: Duration = Duration::from_millis(50);

/// How long one call scans for missing messages while the pointer waits. Then the lease can be renewed.
const SCAN_AT_A_TIME: Duration = Duration::from_millis(50);

/// How often the pointer checks whether Redis still stalls.
const STALL_POLL: Duration = Duration::from_millis(20);

impl RedisRing {
    /// Moves the pointer by one tick, if the move is due and nothing requires a wait.
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
        // The due move counts as one of the ticks that are caught up. Adds assume the same maximum.
        let most = tick_length * session.catch_up_max_ticks.max(1);
        if late >= most {
            let missed = late.saturating_sub(most).as_nanos() / tick_length.as_nanos() + 1;
            let next = term.next.at + options.wheel.ticks(u64::try_from(missed).unwrap_or(u64::MAX));
            current.update(term.epoch, |term| term.put_off(next));
            return Ok(Advance::Waiting(next));
        }
        // Redis applies the requests that this sidecar has read before the tick expires. If the connection is rebuilt
        // during this wait, the wait begins again.
        let (barrier, passed) = oneshot::channel();
        self.inbox.push_barrier(barrier);
        // If Redis becomes unreachable, the inbox drops the barrier, and the wait ends.
        let _ = timeout(term.flush_timeout(now, tick_length), passed).await;
        if link.session()?.number != session.number {
            return Ok(Advance::Waiting(now));
        }
        let at = now.max(link.clock.now());
        if let Some(until) = self.stalled_until(term, at) {
            return Ok(Advance::Waiting(until));
        }
        // This check comes as late as possible: the confirmation may have ended since the first check.
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

    /// Returns the term, if this sidecar leads in this session. After an outage the pointer waits for the Acks that all
    /// sidecars hold. It waits once per move, so that many short outages do not stop the wheel.
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

    /// Returns until when the pointer waits, at the time `at`, because Redis stalls or stalled a moment ago. In a
    /// stall, all sidecars may have Acks that Redis has not applied. The pointer waits once per move, so that a slow
    /// Redis does not stop the wheel.
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

    /// Puts the next move off by the length of a stall of Redis, at most by the grace time. Returns the new time.
    fn put_off(&self, term: Term, at: Instant, stall: Duration) -> Instant {
        let until = at + stall.min(self.link.options.outage_grace);
        self.link.term.update(term.epoch, |term| term.put_off(until));
        until
    }

    fn advanced(&self, term: Term, word: &str, answer: &mut Answer, asked: Instant) -> Result<Advance, Refusal> {
        let link @ Link { ring, options, term: current, .. } = &*self.link;
        let at = asked.max(link.clock.now());
        match word {
            "moved" => {
                let next = NextMove::from_answer(answer.number()?, asked, at, self.slack() / 2);
                let lateness = Duration::from_millis(answer.count()?);
                // If the answer of a move was lost in an outage, the pointer moved before the outage: the outage did
                // not put that move off.
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
                // If the call was sent early, its answer does not delay the certain time of the move: a clock may have
                // been set back.
                let next =
                    if asked < term.next.certain() { next.no_later_than(term.next.certain()) } else { next };
                current.update(term.epoch, |term| term.next = next);
                Ok(Advance::Waiting(next.at))
            }
            "delayed" => {
                // The stall may have begun before this call. Other requests of this process show how long it was.
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

    /// Returns the tolerated difference of two clocks: [`CLOCK_SLACK`], but at most a quarter of a tick.
    fn slack(&self) -> Duration {
        CLOCK_SLACK.min(self.link.options.wheel.tick_length() / 4)
    }
}
