//! The ring in Redis.
//!
//! Every outcome is decided in a script, by comparing a message's deadline with the pointer in `meta`; so the
//! winner rule of the memory ring is kept by Redis running one script at a time.
//!
//! # Time
//!
//! `due_ms` in `meta` is the time, by Redis' clock, at which the pointer was due to be where it is. An add takes
//! the tick due from it; the script that advances never moves before `due_ms` plus a tick, and sets the next
//! `due_ms` no earlier. Both compare with the same clock, so whatever a network costs, no message is early:
//!
//! ```text
//!   tick due at x = pointer + (time(x) - due) / tick      the pointer moves only at time >= due + tick
//!   next due     >= due + tick                            hence: decided at time > time(x) + k ticks
//! ```
//!
//! The leader waits by its own monotonic clock for as long as the last script told it. A clock that was set shows
//! as a difference beyond [`CLOCK_SLACK`], and then the monotonic clock decides.

mod publish;
mod repair;
pub(crate) mod repair_progress;
mod status;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::Cmd;
use tokio_util::task::AbortOnDropHandle;
use tracing::info;

use crate::core::batch::StormRule;
use crate::core::completions::Completions;
use crate::core::refusal::Refusal;
use crate::core::request_batch::RequestBatch;
use crate::core::ring::{Advance, ConnectionId, Handover, PublishStep, Reply, Ring, RingStatus, Submitted};
use crate::core::tick::{Tick, Wheel};
use crate::redis::batching::driver::BatchDriver;
use crate::redis::connection::link::{Link, Session};
use crate::redis::connection::stall_detector::Look;
use crate::redis::keys::MAX_FROZEN;
use crate::redis::leader::term::{Due, Identity, LeadershipTerm, Term, whole_ms};
use crate::redis::scripts::{Answer, SCRIPTS};

/// How far the leader's and Redis' clock may differ within a tick before one counts as set.
pub(super) const CLOCK_SLACK: Duration = Duration::from_millis(50);

/// Where too many ticks are to be published first, the pointer looks again this much later: meanwhile some are.
const BUSY: Duration = Duration::from_millis(50);

/// While sidecars apply Acks that they held in an outage, the pointer looks again this much later.
const HELD_POLL: Duration = Duration::from_millis(50);

/// While Redis stands still the pointer looks again this much later.
const STILL_SILENT: Duration = Duration::from_millis(20);

/// How a ring in Redis is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingOptions {
    pub(super) ring: u16,
    pub(super) wheel: Wheel,
    pub(super) storm: StormRule,
    pub(super) outage_grace: Duration,
}

/// A ring that lives in Redis.
pub(super) struct RedisRing(Arc<Inner>);

struct Inner {
    options: RingOptions,
    link: Arc<Link>,
    coalescer: Arc<BatchDriver>,
    identity: Identity,
    office: Arc<LeadershipTerm>,
    _watch: AbortOnDropHandle<()>,
}

impl RedisRing {
    pub(super) fn new(
        options: RingOptions,
        link: Arc<Link>,
        coalescer: Arc<BatchDriver>,
        identity: Identity,
        office: Arc<LeadershipTerm>,
    ) -> RedisRing {
        let watch = tokio::spawn(watch::watch(Arc::clone(&link), Arc::clone(&office)));
        let watch = AbortOnDropHandle::new(watch);
        RedisRing(Arc::new(Inner { options, link, coalescer, identity, office, _watch: watch }))
    }

    fn later<T, F>(&self, work: impl FnOnce(Arc<Inner>) -> F) -> Reply<T>
    where
        F: Future<Output = Result<T, Refusal>> + Send + 'static,
    {
        Reply::Later(Box::pin(work(Arc::clone(&self.0))))
    }
}

impl Ring for RedisRing {
    fn wheel(&self) -> Wheel {
        self.0.options.wheel
    }

    fn submit(
        &self,
        batch: &mut RequestBatch,
        connection: ConnectionId,
        completions: &Arc<Completions>,
        _now: Instant,
    ) -> Submitted {
        self.0.coalescer.submit(batch, connection, completions);
        Submitted::Pending
    }

    fn advance(&self, now: Instant) -> Reply<Advance> {
        self.later(|inner| async move { inner.advance(now).await })
    }

    fn publish_expired(&self, _now: Instant) -> Reply<PublishStep> {
        self.later(|inner| async move { inner.publish_expired().await })
    }

    fn drain(&self, _now: Instant) -> Reply<Handover> {
        self.0.coalescer.drain();
        Reply::ok(Handover::Kept)
    }

    fn status(&self, now: Instant) -> Reply<RingStatus> {
        self.later(|inner| async move { inner.status(now).await })
    }
}

impl Inner {
    async fn advance(&self, now: Instant) -> Result<Advance, Refusal> {
        let session = self.link.session()?;
        let recovered = self.link.confirmed(&session)?;
        let Some(term) = self.term_in(&session, recovered) else { return Ok(Advance::Deposed) };
        if now < term.next {
            return Ok(Advance::Waiting(term.next));
        }
        if term.mends.on_its_way.is_some_and(|mending| mending.is_awaited) {
            self.mend_for_a_while(&session, term).await?;
            return Ok(Advance::Waiting(now));
        }
        let (late, tick_length) = (now - term.next, self.options.wheel.tick_length());
        // The move that is due is one of those that are caught up. What adds count from knows the same bound.
        let most = tick_length * session.catch_up_max_ticks.max(1);
        if late >= most {
            let missed = late.saturating_sub(most).as_nanos() / tick_length.as_nanos() + 1;
            let missed = u64::try_from(missed).unwrap_or(u64::MAX);
            let next = term.next + self.options.wheel.ticks(missed);
            self.office.note(term.epoch, |term| term.put_off(next));
            return Ok(Advance::Waiting(next));
        }
        // What this sidecar has read comes before the decision. If Redis went away meanwhile, the wait begins anew.
        self.coalescer.flush(term.patience(now, tick_length)).await;
        if self.link.session()?.number != session.number {
            return Ok(Advance::Waiting(now));
        }
        let at = now.max(self.link.clock().now());
        if let Some(until) = self.waits_for_others(term, at) {
            return Ok(Advance::Waiting(until));
        }
        // As late as possible: what is confirmed now may not be by the time that the rest was done.
        if self.link.confirmed(&session)? != recovered {
            return Ok(Advance::Waiting(at));
        }
        let keys = self.link.keys();
        let names: Vec<&str> = [&keys.lease, &keys.ticks, &keys.held_acks]
            .into_iter()
            .chain(keys.lists())
            .map(String::as_str)
            .collect();
        let StormRule { min, share } = self.options.storm;
        let call = self.link.write_in(&session, &SCRIPTS.advance, &names, |call| {
            self.term_arguments(call, term);
            call.arg(term.pointer.0).arg(whole_ms(at - term.next)).arg(whole_ms(self.slack())).arg(min).arg(share);
            call.arg(MAX_FROZEN).arg(whole_ms(term.ahead));
            if term.is_aware {
                call.arg("")
            } else {
                call.arg(whole_ms(self.link.silence().patience()))
            };
            call.arg(u8::from(!term.mends.may_wait())).arg(u8::from(term.has_waited_for_held_acks(at)));
        });
        let mut answer = call.await?;
        self.advanced(term, &mut answer, at, at.max(self.link.clock().now()))
    }

    /// Until when the pointer has to wait at a time `at`, since Redis stands still or did so a moment ago: then all sidecars
    /// have Acks that wait for it. Once, until it has moved, so that a slow Redis does not stop the wheel.
    fn waits_for_others(&self, term: Term, at: Instant) -> Option<Instant> {
        let grace = self.options.outage_grace;
        if term.is_aware || grace.is_zero() {
            return None;
        }
        match self.link.silence().look(self.link.clock().now()) {
            Look::Answers => None,
            Look::Silent => Some(at + STILL_SILENT),
            Look::CatchesUp(left) => Some(self.put_off(term, at, left)),
        }
    }

    /// Puts the next move off, since Redis stood still for so long; returns until when.
    fn put_off(&self, term: Term, at: Instant, wait: Duration) -> Instant {
        let until = at + wait.min(self.options.outage_grace);
        self.office.note(term.epoch, |term| term.put_off(until));
        until
    }

    fn advanced(&self, term: Term, answer: &mut Answer, asked: Instant, at: Instant) -> Result<Advance, Refusal> {
        match answer.text()?.as_str() {
            "moved" => {
                let due = self.due(answer, asked, at)?;
                let lateness = Duration::from_millis(answer.count()?);
                // A move whose answer was lost in an outage came before that, and was not put off by it.
                let shifted = if answer.count()? > 0 { term.shifted_ticks(self.options.wheel) } else { 0 };
                self.tell_lost(answer.count()?);
                self.office.note(term.epoch, |term| term.moved(due, self.options.wheel));
                Ok(Advance::Moved { expired: term.pointer, lateness, shifted, next: due.next })
            }
            "missing" => {
                self.tell_missing(answer.count()?);
                self.office.note(term.epoch, |now| now.mends.begin(true, term.pointer, term.session));
                Ok(Advance::Waiting(at))
            }
            "wait" => {
                let due = self.due(answer, asked, at)?;
                // Asked ahead of its time, no answer moves that time: a clock may have been set back.
                let due = if asked < term.certain() { due.no_later_than(term.certain()) } else { due };
                self.office.note(term.epoch, |term| (term.next, term.ahead) = (due.next, due.ahead));
                Ok(Advance::Waiting(due.next))
            }
            "delayed" => {
                // It may have stood still for longer than since the move was due: others that asked know.
                let known = match self.link.silence().look(self.link.clock().now()) {
                    Look::CatchesUp(left) => left,
                    Look::Answers | Look::Silent => Duration::ZERO,
                };
                let stood_still = Duration::from_millis(answer.count()?).max(known);
                Ok(Advance::Waiting(self.put_off(term, at, stood_still)))
            }
            "held" => {
                if term.held_since.is_none() {
                    let sidecars = answer.count()?;
                    info!(
                        ring = self.options.ring,
                        sidecars, "the pointer waits for Acks that were held in an outage"
                    );
                }
                let until = at + HELD_POLL;
                self.office.note(term.epoch, |term| {
                    term.held_since.get_or_insert(at);
                    term.put_off(until);
                });
                Ok(Advance::Waiting(until))
            }
            "busy" => {
                self.office.note(term.epoch, |term| term.is_busy = true);
                Ok(Advance::Waiting(at + BUSY.min(self.options.wheel.tick_length() / 4)))
            }
            "deposed" => {
                self.office.leave();
                Ok(Advance::Deposed)
            }
            "elsewhere" => {
                let pointer = Tick(answer.count()?);
                if pointer < term.pointer {
                    self.report_lost_moves("moves of the pointer", pointer);
                    return Ok(Advance::Deposed);
                }
                self.office.note(term.epoch, |term| term.pointer = pointer);
                Ok(Advance::Waiting(at))
            }
            word => Err(answer.strange(word).into()),
        }
    }

    /// The term, if this sidecar leads in this session. After an outage the pointer waits for the Acks that all sidecars
    /// hold; once, until it has moved, so that a Redis that comes and goes does not stop the wheel.
    fn term_in(&self, session: &Session, recovered: Option<Instant>) -> Option<Term> {
        let term = self.office.term_in(session.number)?;
        if recovered == term.recovered {
            return Some(term);
        }
        self.office.note(term.epoch, |term| {
            let graced = recovered.map(|recovered| recovered + self.options.outage_grace);
            term.graced = term.graced.or(graced);
            term.put_off(term.graced.map_or(term.next, |graced| graced.max(term.next)));
            term.recovered = recovered;
        });
        self.office.term()
    }

    fn term_arguments(&self, call: &mut Cmd, term: Term) {
        call.arg(&self.identity.token).arg(term.epoch);
    }

    /// What an answer says about the next move.
    fn due(&self, answer: &mut Answer, asked: Instant, answered: Instant) -> Result<Due, Refusal> {
        Ok(Due::told(answer.number()?, asked, answered, self.slack() / 2))
    }

    /// A quarter of a short tick: a clock that was set by less is as good as one that was not.
    fn slack(&self) -> Duration {
        CLOCK_SLACK.min(self.options.wheel.tick_length() / 4)
    }
}
